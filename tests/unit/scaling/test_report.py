"""Tables, CSV and plots of predictions."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from caffepy.errors import ConfigError, RunError
from caffepy.scaling.model import Cluster, Link
from caffepy.scaling.predict import Exchange, Prediction, describe, format_table, write_csv, write_plot
from caffepy.scaling.profile import Gradient, LayerProfile, Profile
from caffepy.utils.installation import MissingExtraError

PREDICTIONS = [
    Prediction(1, 8, 22.1758, 21.281, 0.895, 0.8948, 23088.2, 0.9597, "ring"),
    Prediction(64, 512, 222.48, 21.281, 1.2, 201.2, 999.44, 0.0946, "hierarchical"),
]
PROFILE = Profile(
    "LeNet", "CPU, 1 thread", True, 64, 1, 20.0, 0.5, 6, True, (LayerProfile("ip", 6.0, 12.0),),
    (Gradient(0, 2**20),),
)  # fmt: skip


def test_table():
    assert format_table(PREDICTIONS) == [
        "nodes  devices  step ms  compute ms  communication ms  exposed ms  images/s  efficiency",
        "    1        8   22.176      21.281             0.895       0.895    23,088       0.960",
        "   64      512  222.480      21.281             1.200     201.200     999.4       0.095",
    ]


def test_description():
    cluster = Cluster(1, 8, Link(2e-6, 350e9, ((2.0**20, Link(0.0, 1e9)),)), Link(1e-5, float("inf")))
    assert list(describe(PROFILE, cluster, Exchange())) == [
        "LeNet, batch 64 per device, CPU, 1 thread: 3,200.0 images/s alone",
        "An iteration: 20.000 ms = (forward 6.000 + backward 12.000) + update 0.500 + other 1.500",
        "Gradients: 1.00 MiB in 1 bucket, reduced during the backward pass",
        "Inside a node: 350 GB/s, 2 us; from 1 MiB on 1 GB/s, 0 us",
    ]
    network = replace(cluster, between=Link(1e-5, 5e10))
    *_, exchange, _, between = describe(replace(PROFILE, passes=2), network, Exchange(overlap=False, wire_bytes=2))
    assert exchange == "Gradients: 0.50 MiB in 1 bucket, reduced after the backward pass"
    assert between == "Between nodes: 50 GB/s, 10 us"


def test_csv(tmp_path: Path):
    write_csv(tmp_path / "plan.csv", PREDICTIONS)
    with (tmp_path / "plan.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["devices"] for row in rows] == ["8", "512"]
    assert float(rows[0]["step_ms"]) == 22.1758 and rows[1]["algorithm"] == "hierarchical"
    with pytest.raises(RunError, match="absent/plan.csv: cannot be written"):
        write_csv(tmp_path / "absent" / "plan.csv", PREDICTIONS)


def test_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write_plot(tmp_path / "plan.png", PREDICTIONS, "LeNet")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--plot .*plan.docx: .*not supported"):
        write_plot(tmp_path / "plan.docx", PREDICTIONS, "LeNet")
    with pytest.raises(RunError, match="absent/plan.png: cannot be written"):
        write_plot(tmp_path / "absent" / "plan.png", PREDICTIONS, "LeNet")


def test_a_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed .* install .*\[plot\]'"):
        write_plot(tmp_path / "plan.png", PREDICTIONS, "LeNet")

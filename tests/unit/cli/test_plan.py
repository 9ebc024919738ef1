"""`caffepy plan` on the command line: its table, its files, and options that do not go together."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from caffepy.cli.main import main

NET = """
name: "small"
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "absent" batch_size: 8 backend: LMDB } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1" inner_product_param { num_output: 64 } }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""
HEAD = "nodes devices step ms compute ms communication ms exposed ms images/s efficiency"
MADE_UP = ("--cpu", "--threads=1", "--shape=1,8,8")
GIVEN = ("--cpu", "--shape=1,8,8", "--forward-ms=1", "--backward-ms=2")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver of a net without its data."""
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)
    Path("solver.prototxt").write_text('net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 9')


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], list[dict[str, float]]]:
    """What was printed above the table, and the table."""
    assert main(["plan", *arguments]) == 0, capsys.readouterr().err
    lines = [re.sub(r" +", " ", line.strip()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index(HEAD)
    names = ("nodes", "devices", "step", "compute", "communication", "exposed", "rate", "efficiency")
    rows = [dict(zip(names, map(float, line.replace(",", "").split()), strict=True)) for line in lines[start + 1 :]]
    return lines[:start], rows


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake gets."""
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("caffepy: error: ")


def test_measured_here(capsys: pytest.CaptureFixture[str]):
    above, rows = plan(
        capsys,
        "--solver=solver.prototxt",
        *MADE_UP,
        "--measure=3",
        "--nodes=1,2,64",
        "-gpus-per-node",
        "4",
        "--network=100Gb",
        "--save-profile=p.json",
    )
    assert above[0].startswith("small, batch 8 per device, CPU, 1 thread: ")
    assert above[3:5] == ["Inside a node: 4 GB/s, 5 us", "Between nodes: 12.5 GB/s, 10 us"]
    assert [(row["nodes"], row["devices"]) for row in rows] == [(1, 4), (2, 8), (64, 256)]
    assert 1 > rows[0]["efficiency"] > rows[1]["efficiency"] > rows[2]["efficiency"] > 0
    _, again = plan(capsys, "--profile=p.json", "--gpus-per-node=4")
    assert again == rows[:1]


def test_given_times(capsys: pytest.CaptureFixture[str]):
    """19,456 bytes over 1 MB/s: twice a half of them, after an iteration of 3 ms."""
    above, rows = plan(
        capsys, "--solver=solver.prototxt", *GIVEN, "--nodes=2", "--network=1MB", "--latency=0", "--no-overlap"
    )
    assert above[2] == "Gradients: 0.02 MiB in 1 bucket, reduced after the backward pass"
    size = 4 * (64 * 64 + 64 + 640 + 64)
    assert rows[0]["communication"] == rows[0]["exposed"] == pytest.approx(1e3 * size / 1e6, abs=1e-3)
    assert rows[0]["step"] == pytest.approx(3 + 1e3 * size / 1e6, abs=2e-3)


@pytest.mark.parametrize(
    "options, communication",
    [
        ((), 19.456),
        (("--compression=fp16",), 9.728),
        (("--compression=bf16",), 9.728),
        (("--algorithm=tree",), 38.912),
        (("--latency=1ms",), 23.456),
        (("--bucket-mb=1",), 19.456),
        (("--latency=1ms", "--bucket-mb=1"), 21.456),
    ],
)
def test_options_of_the_exchange(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], communication: float):
    """Two buckets of unequal size by themselves, one with --bucket-mb; two messages each."""
    latency = () if any("latency" in option for option in options) else ("--latency=0",)
    _, rows = plan(capsys, "--solver=solver.prototxt", *GIVEN, "--nodes=2", "--network=1MB", *latency, *options)
    assert rows[0]["communication"] == pytest.approx(communication, abs=1e-3)


def test_what_communication_takes_from_computing(capsys: pytest.CaptureFixture[str]):
    options = ("--solver=solver.prototxt", *GIVEN, "--nodes=2", "--network=10MB", "--latency=0", "--bucket-mb=0.001")
    _, all_of_it = plan(capsys, *options)  # a CPU's default
    _, nothing = plan(capsys, *options, "--contention=0")
    assert all_of_it[0]["exposed"] == all_of_it[0]["communication"] == nothing[0]["communication"]
    assert nothing[0]["exposed"] < 0.9 * all_of_it[0]["exposed"]


def test_links(capsys: pytest.CaptureFixture[str]):
    options = ("--solver=solver.prototxt", "--shape=1,8,8", "--backward-ms=2", "--gpus-per-node=8")
    assert plan(capsys, *options)[0][-2] == "Inside a node: 350 GB/s, 2.5 us"  # the solver is a GPU's
    assert plan(capsys, *options, "--links=pcie")[0][-2] == "Inside a node: 20 GB/s, 5 us"
    assert plan(capsys, *options, "--links=64", "--link-latency=1us")[0][-2] == "Inside a node: 64 GB/s, 1 us"


def test_files(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    plan(capsys, "--solver=solver.prototxt", *GIVEN, "--gpus-per-node=2", "--csv=plan.csv", "--plot=plan.png")
    assert Path("plan.csv").read_text().startswith("nodes,devices,step_ms,")
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


def test_matplotlib_is_asked_for_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = refused(capsys, "--solver=solver.prototxt", *MADE_UP, "--plot=plan.png", "--save-profile=p.json")
    assert "[plot]'" in message and not Path("p.json").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ((), "plan needs --solver or --profile"),
        (("--solver=absent.prototxt", "--cpu"), "absent.prototxt"),
        (("--solver=solver.prototxt", "--cpu"), r"absent.*; or give the shape of one record, e.g. --shape 3,224,224"),
        (("--solver=s", "--forward-ms=1"), "--forward-ms needs --backward-ms"),
        (("--solver=s", "--no-overlap", "--bucket-mb=1"), "leave --bucket-mb out"),
        (("--solver=s", "--nodes=1,2"), "several --nodes need the network's bandwidth, e.g. --network 400Gb"),
        (("--profile=p.json", "--batch=3"), "--batch is for measuring"),
        (("--profile=p.json", "--shape=3,8,8"), "--shape is for measuring"),
        (("--profile=p.json",), "p.json: cannot be read as a profile"),
        (("--profile=p.json", "--measure=3"), "not allowed with argument"),
        (("--solver=s", "--calibrate=a.txt", "--links=pcie"), "--calibrate measures --links and --link-latency"),
        (("--solver=s", "--calibrate-network=a.txt", "--network=1Gb"), "measures --network and --latency"),
        (("--solver=s", "--network=fast"), "'fast' is no bandwidth such as 400Gb"),
        (("--solver=s", "--links=nvlnk"), "did you mean 'nvlink'"),
        (("--solver=s", "--nodes=1,none"), "'none' is not a whole number of at least 1"),
        (("--solver=s", "--contention=2"), "'2' is not a number from 0 to 1"),
        (("--solver=s", "--backward-ms=nan"), "'nan' is not a number above 0"),
        (("--solver=s", "--bucket-mib=1"), "did you mean '--bucket-mb'"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str):
    assert re.search(message, refused(capsys, *options))


def test_calibrated_by_what_bench_prints(capsys: pytest.CaptureFixture[str]):
    sizes = ("4K", "16K", "64K", "256K")
    bench = ("bench", "allreduce", "--cpu", "--cpu-solvers=2", "--iterations=3", f"--sizes={','.join(sizes)}")
    assert main(list(bench)) == 0
    printed = capsys.readouterr().out
    # The table as it is printed, its times made those of a steady machine: a busy one may seem to have no line at all.
    row = re.compile(r"^( *(\d+) +\d+ +float32 +)[\d.]+", re.MULTILINE)
    steady = row.sub(lambda found: f"{found[1]}{100 + int(found[2]) / 1000:.2f}", printed)
    assert len(row.findall(printed)) == len(sizes)
    Path("a.txt").write_text(steady)
    options = ("--solver=solver.prototxt", *GIVEN, "--gpus-per-node=2")
    above, rows = plan(capsys, *options, "--calibrate=a.txt")
    assert re.fullmatch(r"a.txt: the error of the fit is at most \d+%", above[0])
    assert rows[0]["communication"] > 0
    above, rows = plan(capsys, *options[:-1], "--nodes=2", "--calibrate-network=a.txt", "--algorithm=recursive-halving")
    assert any(line.startswith("Between nodes: ") for line in above)
    assert rows[0]["communication"] > 0

"""CPU kernels are compiled by processes of their own, from the first line on where nothing is cached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import caffepy
from caffepy import version
from caffepy.training import early_kernels

NET = """
layer { name: "data" type: "DummyData" top: "data"
  dummy_data_param { shape { dim: 4 dim: 6 } data_filler { type: "gaussian" std: 1 } } }
layer { name: "scale" type: "Scale" bottom: "data" top: "scale" scale_param { filler { type: "constant" value: 2 } } }
layer { name: "loss" type: "Reduction" bottom: "scale" top: "loss" loss_weight: 1 reduction_param { operation: SUMSQ } }
"""


class Started:
    """What stands for the processes."""

    def __init__(self) -> None:
        self.wanted = False
        self.calls: list[str] = []

    def start(self, command: Sequence[str]) -> None:
        self.calls.append("start")

    def allow(self, command: Sequence[str]) -> None:
        self.calls.append("allow")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """On a machine of two cores with nothing cached, of a process that nobody launched."""
    started = Started()
    monkeypatch.setattr(early_kernels, "PROCESSES", started)
    monkeypatch.setattr(early_kernels, "find_launcher", lambda: None)
    monkeypatch.setattr(early_kernels, "cache_folder", lambda: tmp_path / "caffepy")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    return started


def test_with_nothing_cached_they_are_started_at_once(processes: Started, tmp_path: Path):
    (tmp_path / "caffepy/kernels-0.0.0-abc").mkdir(parents=True)
    early_kernels.begin()
    assert processes.calls == ["start"]


def test_with_kernels_in_the_cache_they_wait_for_one_that_is_not(processes: Started, tmp_path: Path):
    (tmp_path / f"caffepy/kernels-{version.__version__}-abc").mkdir(parents=True)
    early_kernels.begin()
    assert processes.calls == ["allow"]


def test_ranks_of_mpi_start_none(processes: Started, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(early_kernels, "find_launcher", object)
    early_kernels.begin()
    assert not processes.calls


def test_on_one_core_there_are_none(processes: Started, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    early_kernels.begin()
    assert not processes.calls


def test_they_are_started_once(processes: Started):
    processes.wanted = True
    early_kernels.begin()
    assert not processes.calls


ONE_CORE = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
TRAIN = "from caffepy.cli.main import main; status = main(sys.argv[1:]); "
IMPORT = "from caffepy.phases.kernel_processes import PROCESSES; "
TELL = "print(len(PROCESSES._names or ()), len(PROCESSES._done)); sys.exit(status)"


def train(folder: Path, cache: str, start: str) -> tuple[list[str], list[str]]:
    """The lines with losses and what the processes did, of a training with a cache folder of its own."""
    root = str(Path(caffepy.__file__).parents[1])
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / cache), "PYTHONPATH": root}
    command = [sys.executable, "-c", start + TRAIN + IMPORT + TELL, "train", "--solver", "solver.prototxt", "--cpu"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return re.findall(r"Train net output .*", result.stderr), result.stdout.split()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core there are no such processes")
def test_a_training_has_the_same_bits_whoever_compiled_its_kernels(tmp_path: Path):
    (tmp_path / "solver.prototxt").write_text(
        "base_lr: 0.01 lr_policy: 'fixed' momentum: 0.9 max_iter: 3 display: 1 random_seed: 5 "
        f"snapshot_after_train: false net_param {{ {NET} }}"
    )
    losses, told = train(tmp_path, "others", "import sys; ")
    assert int(told[0]) > 2, "no process compiled kernels"
    assert len(set(told)) == 1
    again, told = train(tmp_path, "others", "import sys; ")
    assert told == ["0", "0"], "kept kernels were compiled again"
    alone, told = train(tmp_path, "alone", ONE_CORE)
    assert told == ["0", "0"]
    assert len(losses) >= 3
    assert losses == again == alone

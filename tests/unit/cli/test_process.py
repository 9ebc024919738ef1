"""The program as a process of its own: signals, full disks, closed pipes, and what its log looks like to others."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from training import CLASSIFIER

import caffepy
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.formats.proto import caffe_pb2

NET = 'name: "tiny"' + CLASSIFIER.replace("dim: 5", "dim: 300").replace("num_output: 3", "num_output: 500")
SOLVER = """
net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 100000000 display: 100 snapshot_prefix: "tiny"
random_seed: 1 solver_mode: CPU
"""
COMMAND = [sys.executable, "-m", "caffepy", "train", "--solver=solver.prototxt", "--threads=1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(caffepy.__file__).parents[1]))
    Path("net.prototxt").write_text(NET)
    Path("solver.prototxt").write_text(SOLVER)


def run(*arguments: str, max_iter: int = 20, **settings: object) -> subprocess.CompletedProcess[str]:
    Path("solver.prototxt").write_text(SOLVER.replace("100000000", str(max_iter)))
    settings.setdefault("stderr", subprocess.PIPE)
    return subprocess.run([*COMMAND, *arguments], text=True, timeout=300, **settings)


def ignore_as_nohup() -> None:
    """What `nohup COMMAND &` in a script leaves a process to begin with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def training(*arguments: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A training process that has begun its iterations and would go on for days."""
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, **settings)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if re.search(r"Iteration [1-9]\d*.* loss = ", line):
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def last_snapshot() -> int:
    """The iteration of the newest snapshot, -1 where there is none."""
    return max((int(re.findall(r"\d+", path.name)[0]) for path in Path().glob("tiny_iter_*.solverstate")), default=-1)


@pytest.mark.parametrize(
    ("number", "begin"),
    [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGINT, ignore_as_nohup)],
    ids=["SIGINT", "SIGTERM", "SIGINT under nohup"],
)
def test_a_signal_stops_with_a_snapshot(number: signal.Signals, begin: Callable[[], None] | None):
    with training("-stage", "a b", "--keep_going", preexec_fn=begin) as process:
        process.send_signal(number)
        _, rest = process.communicate(timeout=300)
    assert process.returncode == 0
    assert last_snapshot() > 0
    assert "Traceback" not in rest
    command = "caffepy train --solver=solver.prototxt --threads=1 --stage 'a b' --keep-going --snapshot"
    assert f"To resume training: {command} tiny_iter_{last_snapshot()}.solverstate\n" in rest


def test_the_tests_pass_where_signals_are_ignored():
    tests = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "unit/training/test_stop_requests_signals.py",
    ]
    result = subprocess.run(
        command, cwd=tests, preexec_fn=ignore_as_nohup, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout


def test_sighup_takes_a_snapshot_and_goes_on():
    with training() as process:
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        for line in process.stderr:
            if "Snapshotting solver state" in line:
                break
        for line in process.stderr:
            if re.search(r"Iteration \d+.* loss = ", line):
                break
        assert process.poll() is None
        assert last_snapshot() > 0


def test_an_effect_of_none_ignores_the_signal():
    with training("--sigint_effect=none") as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for _, line in zip(range(3), process.stderr, strict=False):
            assert "Optimization Done" not in line
        assert process.poll() is None


def test_the_log_is_what_caffes_parser_reads():
    result = run(max_iter=200)
    assert result.returncode == 0
    assert "Training is finished: iteration 200 is max_iter; its weights: tiny_iter_200.caffemodel\n" in result.stderr
    assert "To resume training" not in result.stderr
    lines = result.stderr.splitlines()
    assert all(re.match(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ \S+:\d+\] ", line) for line in lines), result.stderr
    assert sum("Solving tiny" in line for line in lines) == 1
    losses = [re.search(r"Iteration (\d+)\b.*, loss = ([\d.eE+-]+)", line) for line in lines]
    assert [int(match[1]) for match in losses if match] == [0, 100, 200]
    rates = [re.search(r"Iteration (\d+), lr = ([-+]?[0-9]*\.?[0-9]+([eE]?[-+]?[0-9]+)?)", line) for line in lines]
    assert [match[2] for match in rates if match] == ["0.01", "0.01"]
    assert any(re.search(r"Train net output #0: loss = [\d.eE+-]+ \(\* 1 = [\d.eE+-]+ loss\)", line) for line in lines)


def test_a_full_disk_leaves_the_older_snapshot_whole():
    assert run(max_iter=5).returncode == 0
    before = {path.name: path.read_bytes() for path in Path().glob("tiny_iter_5.*")}
    assert len(before) == 2

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    result = run("--snapshot=auto", max_iter=10, preexec_fn=limit)
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith("caffepy: error: ")
    assert "tiny_iter_10" in error
    assert "Traceback" not in result.stderr
    assert {path.name: path.read_bytes() for path in Path().glob("tiny_iter_*")} == before
    assert run("--snapshot=auto", max_iter=10).returncode == 0


def test_a_full_disk_below_the_log_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # which would leave nothing to be flushed at exit
    with open("/dev/full", "w") as full:
        assert run(max_iter=5, stderr=full).returncode == 0
    assert Path("tiny_iter_5.solverstate").is_file()


def test_training_in_a_folder_that_has_been_removed(tmp_path: Path):
    text = SOLVER.replace("100000000", "5").replace('"tiny"', f'"{tmp_path}/tiny"')
    Path("solver.prototxt").write_text(text.replace("net.prototxt", f"{tmp_path}/net.prototxt"))
    command = ["caffepy.cli.main", "train", f"--solver={tmp_path}/solver.prototxt", "--threads=1"]
    program = f"import sys; sys.argv = {command}; from caffepy.cli.main import main; sys.exit(main())"
    shell = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -c '{program.replace(chr(39), chr(34))}'"
    result = subprocess.run(["bash", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "1 process in a folder that has been removed" in result.stderr
    assert Path("tiny_iter_5.solverstate").is_file()


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        result = subprocess.run(
            [sys.executable, "-m", "caffepy", "device_query"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert result.stderr == ""
    assert result.returncode == 141


def test_no_arguments_print_the_help():
    result = subprocess.run([sys.executable, "-m", "caffepy"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: caffepy")


def test_a_mistake_is_one_line_and_nothing_else():
    result = run("--snapshot=absent.solverstate")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("caffepy: error: absent.solverstate")
    assert "Traceback" not in result.stderr


DATA = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "db" batch_size: 4 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
STUCK = """
import sys, threading
from caffepy.cli.main import main
from caffepy.data.loader import DatumLoader
read = DatumLoader.load_bytes
def load_bytes(loader, firsts, *others):
    if firsts[0] >= 64 * 4:
        print("stuck", file=sys.stderr, flush=True)
        threading.Event().wait()
    return read(loader, firsts, *others)
DatumLoader.load_bytes = load_bytes
sys.exit(main(sys.argv[1:]))
"""
"""A disk that answers once: the training of 64 passes, and no more."""


def test_sigterm_ends_the_wait_for_a_dead_disk_with_a_snapshot():
    records = (
        (record_key(n), caffe_pb2.Datum(channels=1, height=3, width=3, data=bytes([n] * 9), label=n % 3))
        for n in range(50)
    )
    write_datums(Path("db"), records)
    Path("net.prototxt").write_text(DATA)
    command = [sys.executable, "-c", STUCK, *COMMAND[3:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line == "stuck\n":
                break
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=300)[1]
    assert (process.returncode, last_snapshot()) == (0, 64), rest
    assert "Iteration 64 waits for its data and is not made" in rest

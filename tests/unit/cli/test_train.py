"""The command that goes on from a snapshot."""

from __future__ import annotations

import logging
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.cli import train
from caffepy.cli.main import main, parse
from caffepy.cli.options import normalise
from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.training.prepare import keep_global_batch

STATE = Path("run one/x_iter_7.solverstate")
WORDS = "-cpu|--cpu-solvers 4|--sync-bn|--batch per-device|-compression=fp16|--stage deep,wide|--level=3|"
WORDS += "--trace 'a file.json'|--sigint_effect snapshot|--timeout 20|--eager|--no-autotune|--threads 2|--keep-going"
OPTIONS = [shlex.split(option) for option in f"{WORDS}|--math=fp32".split("|")]
STARTS = [[], ["--snapshot", "old.solverstate"], ["-snapshot=auto"], ["--weights", "a.caffemodel,b"], ["-weights=c"]]


def values(arguments: list[str]) -> dict[str, object]:
    command = parse(arguments)
    assert command is not None
    return {name: value for name, value in vars(command).items() if name != "arguments"}


@given(st.permutations(OPTIONS), st.integers(0, len(OPTIONS)), st.sampled_from(STARTS), st.data())
def test_it_has_every_option_that_was_given(
    options: list[list[str]], count: int, start: list[str], data: st.DataObject
) -> None:
    chosen = [["--solver", "a solver.prototxt"], *options[:count]]
    chosen.insert(data.draw(st.integers(0, len(chosen))), start)
    arguments = normalise(["train", *(word for option in chosen for word in option)])
    again = train.resuming(arguments, STATE)
    read_by_a_shell = normalise(shlex.split(shlex.join(again)))
    assert values(read_by_a_shell) == {**values(arguments), "snapshot": str(STATE), "weights": []}
    assert sum(word.startswith(("--snapshot", "--weights")) for word in again) == 1


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    return caplog


def say(iteration: int, **fields: object) -> None:
    arguments = normalise(["train", "-solver", "s.prototxt", "--weights=w.caffemodel", "-sync_bn"])
    args = parse(arguments)
    assert isinstance(args, train.TrainCommand)
    train._say_how_to_resume(args, SolverParameter(max_iter=10, snapshot_prefix="x", **fields), iteration)


@pytest.mark.parametrize("line", ["", "caffepy launch --nproc-per-node 2 --"])
def test_it_begins_with_the_launcher(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    if line:
        monkeypatch.setenv("CAFFEPY_LAUNCH_LINE", line)
    Path("x_iter_7.solverstate").touch()
    say(7)
    command = "train --solver s.prototxt --sync-bn --snapshot x_iter_7.solverstate"
    assert said.messages == [f"To resume training: {line or 'mpirun -np 2 caffepy'} {command}"]


def test_at_max_iter_training_is_finished(said: pytest.LogCaptureFixture) -> None:
    say(10)
    for name in ("x_iter_10.solverstate.h5", "x_iter_10.caffemodel.h5"):
        Path(name).touch()
    say(10, snapshot_format=SolverParameter.HDF5)
    finished = "Training is finished: iteration 10 is max_iter"
    assert said.messages == [finished, f"{finished}; its weights: x_iter_10.caffemodel.h5"]


def test_without_a_snapshot_there_is_nothing_to_go_on_from(said: pytest.LogCaptureFixture) -> None:
    say(7)
    assert said.messages == []


def test_fewer_ranks_make_more_passes(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    param = SolverParameter(iter_size=3)
    keep_global_batch(param)
    assert param.iter_size == 3 and not said.text
    monkeypatch.setenv("CAFFEPY_BATCH_RANKS", "8")
    keep_global_batch(param)
    assert param.iter_size == 6 and "4 ranks train for 8: iter_size is 6" in said.text
    monkeypatch.setenv("CAFFEPY_BATCH_RANKS", "5")
    param.iter_size = 3
    with pytest.raises(ConfigError, match="5 ranks cannot be divided among 4: an iteration has 15 batches"):
        keep_global_batch(param)
    for text in ("x", "nan", "1e999"):
        monkeypatch.setenv("CAFFEPY_BATCH_RANKS", text)
        with pytest.raises(ConfigError, match=f"CAFFEPY_BATCH_RANKS is '{text}'"):
            keep_global_batch(param)


@pytest.mark.parametrize("option", ["--snapshot", "--weights", "--solver", "--from-log"])
@pytest.mark.parametrize("value", ["", " ", ","])
def test_an_empty_name_is_refused(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    """As a script gives it whose variable is empty: training would begin from scratch."""
    with suppress(SystemExit):
        assert main(["train", "--solver", "a.prototxt", option, value]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: '{value}' names nothing: give a" in error and "leave the option out" in error


def test_a_log_has_its_solver_in_it(capsys: pytest.CaptureFixture[str], said: pytest.LogCaptureFixture) -> None:
    assert main(["train", "--solver", "a.prototxt", "--from-log", "log"]) == 2
    assert "--solver and --from-log exclude each other" in capsys.readouterr().err
    assert main(["train", "--cpu", "--from-log", "absent"]) == 2
    assert "--from-log absent: there is no such file" in capsys.readouterr().err

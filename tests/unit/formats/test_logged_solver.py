"""The solver in a log: written by training, read back by --from-log, and in nobody's way."""

from __future__ import annotations

import datetime
import logging
import re
from pathlib import Path

import pytest

from caffepy.cli.output import log_to_stderr
from caffepy.errors import ConfigError
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.logged_solver import describe_solver, read_logged_solver
from caffepy.formats.paths import PathResolver

NET = 'name: "a \\"" layer { name: "d\\n| x" type: "DummyData" top: "d" dummy_data_param { shape { dim: 2 dim: 3 } } }'
logger = logging.getLogger("caffepy.tests")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The log of two starts, as `describe_solver` says it, with other lines between."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "test.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(
        'train_net: "net.prototxt" test_net: "test.prototxt" test_iter: 1 test_interval: 9 base_lr: 0.1 '
        'lr_policy: "fixed" max_iter: 3 random_seed: 5'
    )
    param = read_solver(tmp_path / "solver.prototxt")
    with log_to_stderr():
        for _ in range(2):
            logger.info("Device 0: rank 0 on a, CPU")
            for line in describe_solver(param, PathResolver(tmp_path / "solver.prototxt")):
                logger.info("%s", line)
                logger.info("something of another thread")
            logger.info("Solving %s", "a")
            logger.info("Iteration %d, lr = %.6g", 0, 0.1)
            param.max_iter = 7
    (tmp_path / "log").write_text(capsys.readouterr().err)
    return tmp_path / "log"


def test_the_first_solver_comes_back_with_its_nets(log: Path) -> None:
    param, folder = read_logged_solver(log)
    assert folder == log.parent
    assert (param.max_iter, param.random_seed, param.snapshot_prefix) == (3, 5, str(log.parent / "solver"))
    assert not param.HasField("train_net") and not param.test_net
    assert param.train_net_param == param.test_net_param[0] == read_net(log.parent / "net.prototxt")


def test_it_may_have_the_prefixes_of_ranks(log: Path) -> None:
    log.write_text(re.sub(r"(\S+:\d+\]) ", r"\1 [rank 0] ", log.read_text()))
    assert read_logged_solver(log)[0].max_iter == 3


def test_what_cannot_be_read(log: Path, tmp_path: Path) -> None:
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join(whole[:12]))
    with pytest.raises(ConfigError, match=r"ends within the solver: it has \d+ of \d+ lines"):
        read_logged_solver(log)
    log.write_text("Iteration 1\n")
    with pytest.raises(ConfigError, match="it contains no solver; is it the log"):
        read_logged_solver(log)
    with pytest.raises(ConfigError, match="there is no such file"):
        read_logged_solver(tmp_path / "absent")
    with pytest.raises(ConfigError, match="/dev/zero: cannot be read: it is a device, not a regular file"):
        read_logged_solver(Path("/dev/zero"))
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        read_logged_solver(tmp_path / ("x" * 5000))
    with pytest.raises(ConfigError, match="cannot be read: the path has a NUL character"):
        read_logged_solver(tmp_path / "a\0b")


def test_a_log_whose_solver_does_not_end_is_given_up(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.formats.logged_solver._MAX_TEXT", 900)
    with pytest.raises(ConfigError, match="its solver does not end within the first 900 characters"):
        read_logged_solver(log)


def test_caffes_parsers_can_read_the_time_of_every_line(log: Path) -> None:
    """What `tools/extra/parse_log.py` does: from the first iteration on each line must begin with a time, the start is
    the line that says Solving, and nothing of the solver may look like an iteration."""
    lines = log.read_text().splitlines()
    start = next(line for line in lines if "Solving" in line)
    first = next(index for index, line in enumerate(lines) if re.search(r"Iteration (\d+)", line))
    assert "Solving" in lines[first - 1] and start == lines[first - 1]
    assert len(lines) > first + 10  # the log of the second start follows
    for line in lines:
        words = line.split()
        month, day, clock = int(words[0][1:3]), int(words[0][3:]), words[1]
        hours, microseconds = clock[: clock.rfind(".")], int(clock[clock.rfind(".") + 1 :])
        assert datetime.datetime(2026, month, day, *map(int, hours.split(":")), microseconds)

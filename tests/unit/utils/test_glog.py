"""The log's format, read back by the expressions that Caffe's own log parsers use."""

from __future__ import annotations

import datetime
import logging
import os
import re
import socket
import threading
from pathlib import Path

import pytest

from caffepy.cli.output import log_to_stderr, rank_prefix
from caffepy.utils.glog import ENDS, GlogFormatter
from caffepy.utils.progress import ProgressBar, progress_bar

GLOG = re.compile(r"([IWEF])(\d{4}) (\d\d:\d\d:\d\d\.\d{6})\s+(\d+) (\S+):(\d+)\] (.*)")
logger = logging.getLogger("caffepy.tests")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)


def under_mpirun(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))


def test_lines_look_like_glogs(capsys: pytest.CaptureFixture[str]):
    before = datetime.datetime.now()
    with log_to_stderr():
        logger.info("Iteration %d, loss = %g", 100, 0.25)
    match = GLOG.fullmatch(capsys.readouterr().err.rstrip("\n"))
    assert match is not None
    assert match[1] == "I"
    assert match[5] == "test_glog.py"
    assert match[7] == "Iteration 100, loss = 0.25"
    stamp = datetime.datetime.strptime(f"{before.year}{match[2]} {match[3]}", "%Y%m%d %H:%M:%S.%f")
    assert abs(stamp - before) < datetime.timedelta(seconds=300)


@pytest.mark.parametrize("verbose", [False, True])
def test_the_error_that_ends_the_command_is_no_line_of_the_log(capsys: pytest.CaptureFixture[str], verbose: bool):
    error = ValueError("injected") if verbose else None
    with log_to_stderr(verbose):
        logger.error("%s: it broke", "rank 1 on b, device 0, iteration 5", extra=ENDS, exc_info=error)
    *trace, last = capsys.readouterr().err.splitlines()
    assert last == "caffepy: error: rank 1 on b, device 0, iteration 5: it broke"
    assert trace == (["ValueError: injected"] if verbose else [])


def test_caffes_way_to_find_the_time_of_a_line(capsys: pytest.CaptureFixture[str]):
    with log_to_stderr():
        logger.info("Solving LeNet")
    words = capsys.readouterr().err.strip().split()
    assert 1 <= int(words[0][1:3]) <= 12
    assert 1 <= int(words[0][3:]) <= 31
    assert len(words[1].rpartition(".")[2]) == 6


@pytest.mark.parametrize(
    "level, letter",
    [(logging.DEBUG, "I"), (logging.INFO, "I"), (logging.WARNING, "W"), (logging.ERROR, "E"), (logging.CRITICAL, "F")],
)
def test_letters(level: int, letter: str):
    record = logging.LogRecord("caffepy", level, "/a/solver.py", 7, "text", None, None)
    assert GlogFormatter().format(record)[0] == letter


def test_only_the_root_rank_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for rank in (0, 1):
        under_mpirun(monkeypatch, rank, 2)
        with log_to_stderr():
            logger.info("said by %d", rank)
            logger.error("failed on %d", rank)
    text = capsys.readouterr().err
    assert "said by 0" in text
    assert "said by 1" not in text
    assert "failed on 1" in text


def test_verbose_logs_every_rank_with_its_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    under_mpirun(monkeypatch, 1, 2)
    with log_to_stderr(verbose=True):
        logger.debug("detail")
    assert GLOG.fullmatch(capsys.readouterr().err.rstrip("\n"))[7] == "[rank 1] detail"


def test_messages_of_other_ranks_than_the_root_name_it(monkeypatch: pytest.MonkeyPatch):
    assert rank_prefix() == ""
    under_mpirun(monkeypatch, 0, 2)
    assert rank_prefix() == ""
    under_mpirun(monkeypatch, 1, 2)
    assert rank_prefix().startswith("rank 1 on ")


def test_the_logger_is_left_as_it_was():
    package = logging.getLogger("caffepy")
    before = (package.level, list(package.handlers))
    with log_to_stderr(verbose=True):
        assert len(package.handlers) == len(before[1]) + 1
    assert (package.level, list(package.handlers)) == before


def test_a_closed_stderr_does_not_stop_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    with log_to_stderr():
        monkeypatch.setattr("sys.stderr", Closed())
        logger.info("nobody reads this")
        monkeypatch.undo()
        logger.info("read again")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("] read again")


def test_a_process_without_stderr_logs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with log_to_stderr():
        monkeypatch.setattr("sys.stderr", None)
        logger.info("nobody can read this")
        with progress_bar(lambda: 1, lambda: 2):
            pass
    assert capsys.readouterr().err == ""


def test_the_progress_bar_lets_the_log_through(capsys: pytest.CaptureFixture[str]):
    with log_to_stderr():
        bar = ProgressBar(lambda: 7, lambda: 10)
        bar.start()
        bar.show(0)
        assert "/10" not in capsys.readouterr().err
        bar.show(4)
        logger.info("above the bar")
        bar.close()
        logger.info("after the bar")
    text = capsys.readouterr().err
    assert "above the bar\n" in text
    assert text.rstrip().endswith("after the bar")
    assert "7/10" in text


def test_the_progress_bar_ends_before_the_error_that_ends_the_command(capsys: pytest.CaptureFixture[str]):
    with log_to_stderr():
        bar = ProgressBar(lambda: 7, lambda: 10)
        bar.start()
        bar.show(4)
        logger.error("ending at once", extra=ENDS)
        text = capsys.readouterr().err
        bar.close()
    assert text.endswith("\ncaffepy: error: ending at once\n")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "shown"),
    [("0", "IWE"), ("1", "WE"), ("2", "E"), ("3", ""), ("9", ""), ("x", "IWE"), ("²", "IWE"), ("9" * 5000, "IWE")],
)
def test_glog_minloglevel_hides_lower_levels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, shown: str
):
    monkeypatch.setenv("GLOG_minloglevel", value)
    with log_to_stderr():
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "text")
    assert "".join(line[0] for line in capsys.readouterr().err.splitlines()) == shown


def test_glog_log_dir_gets_glogs_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("GLOG_log_dir", str(tmp_path))
    monkeypatch.setenv("USER", "someone")
    with log_to_stderr():
        logger.info("Solving LeNet")
        logger.warning("slow disk")
    assert "Solving LeNet" in capsys.readouterr().err, "Caffe sets alsologtostderr"
    assert not (tmp_path / "caffe.ERROR").exists()
    name = os.readlink(tmp_path / "caffe.INFO")
    pattern = rf"caffe\.{re.escape(socket.gethostname())}\.someone\.log\.INFO\.\d{{8}}-\d{{6}}\.{os.getpid()}"
    assert re.fullmatch(pattern, name)
    created, *_, first, second = (tmp_path / name).read_text().splitlines()
    assert created.startswith("Log file created at: ")
    assert GLOG.fullmatch(first)[7] == "Solving LeNet" and GLOG.fullmatch(second)[1] == "W"
    assert "Solving LeNet" not in (tmp_path / "caffe.WARNING").read_text()
    monkeypatch.setenv("GLOG_logtostderr", "1")
    with log_to_stderr():
        logger.error("only here")
    assert not (tmp_path / "caffe.ERROR").exists()


def test_a_folder_of_logs_that_is_not_there_does_not_stop_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("GLOG_log_dir", str(tmp_path / "absent"))
    with log_to_stderr():
        logger.info("one")
        logger.info("two")
    text = capsys.readouterr().err
    assert text.count("Could not create log file") == 1 and "one" in text and "two" in text


def test_there_is_no_bar_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    with progress_bar(lambda: 1, lambda: 2):
        assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert capsys.readouterr().err == ""

"""`caffepy.logs`: logs of both Caffes and ours read, written as tables and drawn."""

from __future__ import annotations

import csv
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import cv2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.cli.main import main
from caffepy.errors import ConfigError, DataError
from caffepy.logs.plot import CHARTS, plot_logs
from caffepy.logs.read import TrainingLog, read_log, write_tables

BVLC = """\
Log file created at: 2015/12/31 23:59:00
I1231 23:59:50.000000 25210 solver.cpp:280] Solving LeNet
I1231 23:59:50.100000 25210 solver.cpp:337] Iteration 0, Testing net (#0)
I1231 23:59:51.000000 25210 solver.cpp:404]     Test net output #0: accuracy = 0.1
I1231 23:59:51.000000 25210 solver.cpp:404]     Test net output #1: loss = 2.4 (* 1 = 2.4 loss)
I1231 23:59:52.000000 25210 solver.cpp:228] Iteration 0, loss = 2.5
I1231 23:59:52.000000 25210 solver.cpp:244]     Train net output #0: loss = 2.5 (* 1 = 2.5 loss)
I1231 23:59:52.000000 25210 sgd_solver.cpp:106] Iteration 0, lr = 0.01
I0101 00:00:10.500000 25210 solver.cpp:228] Iteration 100, loss = 2.25e-01
I0101 00:00:10.500000 25210 solver.cpp:244]     Train net output #0: loss = 0.225 (* 1 = 0.225 loss)
I0101 00:00:10.500000 25210 sgd_solver.cpp:106] Iteration 100, lr = 0.00992565
"""
NVIDIA = """\
I0625 18:29:41.023252   173 solver.cpp:380] Solving Resnet50
I0625 18:29:41.023252   179 solver.cpp:380] Solving Resnet50
I0625 18:29:47.083963   173 solver.cpp:307] Iteration 0 (3.20117 s), loss = 7.50393
I0625 18:29:47.083999   173 solver.cpp:324]     Train net output #0: accuracy/top-1 = 0
I0625 18:29:47.084017   173 solver.cpp:324]     Train net output #1: loss = 7.50393 (* 1 = 7.50393 loss)
I0625 18:29:47.084022   173 sgd_solver.cpp:137] Iteration 0, lr = 0.2, m = 0.9
I0625 18:30:07.380233   173 solver.cpp:302] Iteration 100 (6.20402 iter/s, 15.7962s/100 iter), 0.5/20ep, loss = nan
I0625 18:30:07.380276   173 solver.cpp:324]     Train net output #0: accuracy/top-1 = 0.25
I0625 18:30:07.380303   173 solver.cpp:324]     Train net output #1: loss = nan (* 1 = nan loss)
I0625 18:30:09.380303   179 solver.cpp:324] Test net output mAP #0: detection_eval = 0.71
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_log(text: str, name: str = "train.log", year: int = 2016) -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        changed = datetime(year, 1, 1, 12, tzinfo=UTC).timestamp()
        os.utime(path, (changed, changed))
        return path

    return write_log


def test_bvlcs_log_across_a_new_year(write):
    log = read_log(write(BVLC))
    assert [(row.iteration, row.seconds, row.learning_rate, row.outputs) for row in log.train] == [
        (0, 2.0, 0.01, {"loss": 2.5}),
        (100, 20.5, 0.00992565, {"loss": 0.225}),
    ]
    (test,) = log.test
    assert (test.iteration, test.seconds, test.learning_rate) == (0, 0.1, 0.01)
    assert test.outputs == {"accuracy": 0.1, "loss": 2.4}


def test_nvidias_log_with_several_threads(write):
    log = read_log(write(NVIDIA))
    assert [row.iteration for row in log.train] == [0, 100]
    assert list(log.train[1].outputs) == ["accuracy/top-1", "loss"]
    assert log.train[1].outputs["accuracy/top-1"] == 0.25
    assert math.isnan(log.train[1].outputs["loss"])
    assert log.train[1].learning_rate == 0.2


def test_lines_that_ran_together_are_divided(write):
    lines = BVLC.splitlines()
    joined = "\n".join([*lines[:8], "x" * 7 + lines[8] + lines[9] + lines[10]])
    assert [row.outputs for row in read_log(write(joined)).train] == [{"loss": 2.5}, {"loss": 0.225}]


def test_each_thread_goes_on_with_its_own_row(write):
    mixed = BVLC.splitlines()
    mixed.insert(4, "I1231 23:59:51.000000 7 solver.cpp:337] Iteration 0, Testing net (#1)")
    mixed.insert(6, "I1231 23:59:51.000000 7 solver.cpp:404]     Test net output #0: accuracy = 0.9")
    log = read_log(write("\n".join(mixed)))
    assert [(row.net, row.outputs) for row in log.test] == [(0, {"accuracy": 0.1, "loss": 2.4}), (1, {"accuracy": 0.9})]


def restarted() -> str:
    """To iteration 300, then again from 200; the second run's first lines are cut off."""
    lines = ["I0101 10:00:00.000000 1 solver.cpp:1] Solving net"]
    for hour, iterations in ((10, (0, 100, 200, 300)), (11, (200, 300, 400))):
        lines += [
            f"I0101 {hour}:{iteration // 100:02}:00.000000 1 solver.cpp:2] Iteration {iteration}, loss = {hour}.5"
            for iteration in iterations
        ]
    return "\n".join(lines)


def test_a_restart_begins_a_run(write):
    log = read_log(write(restarted()))
    assert [row.iteration for row in log.train] == [0, 100, 200, 300, 200, 300, 400]
    assert [row.run for row in log.train] == [0, 0, 0, 0, 1, 1, 1]
    assert log.train[-1].seconds == 3840
    assert [row.iteration for row in log.latest().train] == [0, 100, 200, 300, 400]
    assert [row.loss for row in log.latest().train] == [10.5, 10.5, 11.5, 11.5, 11.5]


def test_a_leap_day_is_a_day(write):
    text = "".join(
        f"I{day} 00:00:00.000000 1 solver.cpp:2] Iteration {number}, loss = 1\n"
        for number, day in enumerate(["0228", "0229", "0301"])
    )
    for year in (2023, 2024):
        assert [row.seconds for row in read_log(write(text, year=year)).train][1] == 86400


def test_a_prefix_with_its_year_is_taken_at_its_word(write):
    text = "".join(f"I{year}0101 00:00:00.000000 1 solver.cpp:2] Iteration {year}, loss = 1\n" for year in (2019, 2021))
    assert read_log(write(text)).train[1].seconds == (366 + 365) * 86400


def test_outputs_of_one_name_are_told_apart(write):
    text = "I0101 00:00:00.000000 1 s.cpp:2] Iteration 7, Testing net (#0)\n" + "".join(
        f"I0101 00:00:00.000000 1 s.cpp:3]     Test net output #{number}: prob = 0.{number}\n" for number in range(3)
    )
    assert read_log(write(text)).test[0].outputs == {"prob": 0.0, "prob[1]": 0.1, "prob[2]": 0.2}


@pytest.mark.parametrize("text", ["", "hello\n", "I0101 00:00:00.000000 1 s.cpp:2] Iteration 7\n", "Iteration 5, lr"])
def test_what_is_no_log_is_refused(write, text: str):
    with pytest.raises(DataError, match=r"has no line such as 'Iteration 100, loss = 0\.5'"):
        read_log(write(text))


def test_a_log_that_is_not_there(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_log(tmp_path / "none.log")


@settings(max_examples=60)
@given(st.text(max_size=60), st.integers(0, len(BVLC)), st.integers(0, len(BVLC)))
def test_a_damaged_log_is_read_or_refused(tmp_path_factory, junk: str, begin: int, end: int):
    path = tmp_path_factory.mktemp("log") / "damaged.log"
    path.write_bytes((BVLC[:begin] + junk + BVLC[end:]).encode("utf-8", "replace"))
    try:
        log = read_log(path)
    except DataError:
        return
    assert all(row.iteration >= 0 for row in (*log.train, *log.test))


def rows_of(path: Path, delimiter: str = ",") -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_tables_have_caffes_columns(write, tmp_path: Path):
    write_tables(read_log(write(BVLC)), tmp_path)
    assert rows_of(tmp_path / "train.log.train") == [
        ["NumIters", "Seconds", "LearningRate", "loss"],
        ["0", "2.000000", "0.01", "2.5"],
        ["100", "20.500000", "0.00992565", "0.225"],
    ]
    assert rows_of(tmp_path / "train.log.test")[0] == ["NumIters", "Seconds", "LearningRate", "accuracy", "loss"]


def test_a_name_is_no_formula(write, tmp_path: Path):
    write_tables(read_log(write(BVLC.replace("accuracy", "=cmd|' /C calc'!A0"))), tmp_path)
    assert rows_of(tmp_path / "train.log.test")[0][3].startswith("'=cmd")


def test_the_command_writes_both_tables(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = write(BVLC)
    assert main(["parse_log", str(log), str(tmp_path), "--delimiter=\\t", "--latest"]) == 0
    assert "train.log.train: 2 rows" in capsys.readouterr().out
    assert rows_of(tmp_path / "train.log.test", "\t")[1][3] == "0.1"
    assert main(["parse_log", str(log), "--delimiter", "ab"]) == 2
    assert "--delimiter is one character" in capsys.readouterr().err


# -- charts -----------------------------------------------------------------------------------------------


def test_the_chart_types_are_numbered_as_caffes():
    assert CHARTS[0] == ("Test accuracy", "iterations")
    assert CHARTS[3] == ("Test loss", "seconds")
    assert CHARTS[6] == ("Train loss", "iterations")
    assert len(CHARTS) == 8


def svg_of(logs: list[TrainingLog], tmp_path: Path, **options: object) -> str:
    plot_logs(logs, tmp_path / "chart.svg", **options)
    return (tmp_path / "chart.svg").read_text()


@pytest.fixture(autouse=True)
def _text_as_text(monkeypatch: pytest.MonkeyPatch):
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")


@pytest.mark.parametrize("chart", range(8))
def test_every_chart_type_is_drawn(write, tmp_path: Path, chart: int):
    quantity, axis = CHARTS[chart]
    svg = svg_of([read_log(write(BVLC))], tmp_path, chart=chart)
    assert f"{quantity} vs. {'Iters' if axis == 'iterations' else 'Seconds'}" in svg


def test_losses_and_scores_of_several_logs(write, tmp_path: Path):
    logs = [read_log(write(BVLC, "first.log")), read_log(write(NVIDIA, "$x_1$ <b>&.log"))]
    svg = svg_of(logs, tmp_path)
    assert ">first: train loss<" in svg
    assert ">first: test accuracy<" in svg
    assert ">$x_1$ &lt;b&gt;&amp;: train accuracy/top-1<" in svg


def test_outputs_can_be_chosen(write, tmp_path: Path):
    svg = svg_of([read_log(write(BVLC))], tmp_path, outputs=["accuracy"], x="seconds")
    assert ">test accuracy<" in svg
    assert "train loss" not in svg


def test_mistakes_are_named(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = read_log(write(BVLC))
    with pytest.raises(ConfigError, match="there is no chart type 8"):
        plot_logs([log], tmp_path / "a.png", chart=8)
    with pytest.raises(ConfigError, match=r"charts end in \.png, \.svg, \.pdf"):
        plot_logs([log], tmp_path / "a.txt")
    with pytest.raises(DataError, match="have nothing for 'mAP'; their outputs: accuracy, loss"):
        plot_logs([log], tmp_path / "a.png", outputs=["mAP"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"charts need matplotlib: .*install .*\[plot\]'"):
        plot_logs([log], tmp_path / "a.png")


def test_the_command_takes_caffes_arguments(write, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log, picture = write(BVLC), tmp_path / "loss.png"
    assert main(["plot_training_log", "6", str(picture), str(log)]) == 0
    assert cv2.imread(str(picture)).shape[2] == 3
    assert main(["plot_training_log", str(picture)]) == 2
    assert "needs a picture to write and at least one log" in capsys.readouterr().err
    assert main(["plot_training_log", "9" * 5000, str(picture), str(log)]) == 2
    assert f"'{'9' * 20}…' is no chart type" in capsys.readouterr().err

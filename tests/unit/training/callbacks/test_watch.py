"""What loggers are given: values of displays and tests, speed, gradients, histograms; and loggers that fail."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend
from training import CLASSIFIER, CPU, PLAIN, TESTED, TINY, build_solver, solver_param

import caffepy
from caffepy.backend import Backend
from caffepy.cli.main import main
from caffepy.errors import ConfigError, RunError
from caffepy.logs.performance_report import STAGES
from caffepy.training.callbacks.logger_callback import LoggerCallback
from caffepy.training.callbacks.loggers import Logger, Run
from caffepy.training.solver import Solver

DISPLAYED = PLAIN + "display: 1 "


class Recorder(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.arrays: list[tuple[int, Mapping[str, np.ndarray]]] = []
        self.closed: list[bool] = []

    def start(self, run: Run) -> None:
        self.run = run

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self.rows.append((iteration, dict(values)))

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        self.arrays.append((iteration, {name: array.copy() for name, array in values.items()}))

    def close(self, failed: bool) -> None:
        self.closed.append(failed)

    def column(self, name: str) -> dict[int, float]:
        return {iteration: row[name] for iteration, row in self.rows if name in row}


class Failing(Recorder):
    """Fails in one method."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__()

        def fail(*_: Any) -> None:
            self.rows.append((-1, {}))
            raise error

        setattr(self, method, fail)


def watch(solver: Solver, *loggers: Logger, histograms: int = 0) -> LoggerCallback:
    """Make loggers listen to a solver."""
    watch = LoggerCallback(solver, [(type(logger).__name__, logger) for logger in loggers], histograms)
    solver.add_callback(watch)
    return watch


def record(text: str, net: str = TINY, iterations: int = 4, histograms: int = 0, backend: Backend = CPU) -> Recorder:
    """What a logger is given in some iterations."""
    recorder = Recorder()
    with build_solver(text, net, backend) as solver:
        watched = watch(solver, recorder, histograms=histograms)
        solver.step(iterations)
        watched.close(failed=False)
    return recorder


# -- values --------------------------------------------------------------------------------------------


def test_an_iterations_display_and_test_are_one_row() -> None:
    recorder = record(TESTED + "display: 3 ", iterations=5)
    assert [iteration for iteration, _ in recorder.rows] == [0, 2, 3, 4]
    assert list(recorder.column("loss")) == [0, 3]
    assert list(recorder.column("test0/accuracy")) == [0, 2, 4]
    assert recorder.column("learning_rate") == {0: pytest.approx(0.1), 3: pytest.approx(0.1)}
    assert set(recorder.rows[0][1]) == {
        "loss",
        "train/loss",
        "learning_rate",
        "gradient_norm",
        "test0/accuracy",
        "test0/loss",
    }


def test_values_are_those_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recorder = record(TESTED + "display: 1 average_loss: 2 ")
    text = "\n".join(logged.message for logged in caplog.records)
    for iteration, row in recorder.rows:
        assert f"loss = {row['loss']:.6g}" in text
        assert f"Train net output #0: loss = {row['train/loss']:.6g}" in text
        assert iteration % 2 or f"Test net output #0: accuracy = {row['test0/accuracy']:.6g}" in text


def test_the_last_loss_and_test_are_logged() -> None:
    recorder = Recorder()
    caffepy.train(solver_param(TESTED + "display: 2 ", TINY), loggers=recorder, threads=1)
    iteration, row = recorder.rows[-1]
    assert iteration == 4
    assert set(row) == {"loss", "test0/accuracy", "test0/loss"}
    assert recorder.closed == [False]


def test_test_nets_are_numbered_and_elements_of_outputs_too() -> None:
    net = TINY.replace('top: "accuracy"', 'top: "accuracy" top: "classes"')
    recorder = record(PLAIN + "test_iter: 1 test_iter: 2 test_state {} test_state {} test_interval: 4 ", net, 1)
    assert {name for name in recorder.rows[0][1] if "classes" in name} == {
        f"test{index}/classes/{element}" for index in (0, 1) for element in (0, 1)
    }


def test_large_outputs_are_left_out() -> None:
    net = TINY + 'layer { name: "large" type: "DummyData" top: "large" dummy_data_param { shape { dim: 101 } } }'
    (row,) = [row for _, row in record(DISPLAYED, net, 1).rows]
    assert not any("large" in name for name in row)
    assert "train/loss" in row


@pytest.mark.parametrize("captures", [False, True])
def test_speed_counts_iterations_after_the_first_ones(captures: bool) -> None:
    recorder = record(DISPLAYED + "iter_size: 3 ", iterations=6, backend=FakeGraphBackend() if captures else CPU)
    rates, images = recorder.column("speed/iterations_per_second"), recorder.column("speed/images_per_second")
    assert list(rates) == [2, 3, 4, 5]
    assert all(images[i] == pytest.approx(12 * rate) for i, rate in rates.items())
    assert set(recorder.column("speed/waiting_share").values()) == {0.0}


def test_the_share_of_waiting_is_that_of_the_data_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    with build_solver(DISPLAYED, TINY) as solver:
        layer = solver.net.layers[0]
        waits = dict.fromkeys(STAGES, 0.0)
        monkeypatch.setattr(type(layer), "waited", lambda _: waits | {"decoding": 0.25 * solver.clock.elapsed()[1]})
        watch(solver, recorder)
        solver.step(4)
    assert recorder.column("speed/waiting_share")[3] == pytest.approx(0.25, rel=0.2)


def test_the_first_logger_is_told_of_the_run(tmp_path: Path) -> None:
    text = DISPLAYED + f'momentum: 0.9 solver_mode: CPU stepvalue: 3 snapshot_prefix: "{tmp_path}/net" '
    recorder = Recorder()
    with build_solver(text, TINY) as solver:
        watch(solver, recorder).close(failed=True)
    run = recorder.run
    assert run is not None
    assert (run.iteration, run.identifiers) == (0, tmp_path / "net_loggers.json")
    settings = {name: run.settings[name] for name in ("net_name", "momentum", "lr_policy", "solver_mode", "max_iter")}
    assert settings == {
        "net_name": "tiny",
        "momentum": 0.9,
        "lr_policy": "fixed",
        "solver_mode": "CPU",
        "max_iter": 4,
    }
    assert (run.settings["images_per_iteration"], run.settings["devices"]) == (4, 1)
    assert "stepvalue" not in run.settings
    assert recorder.closed == [True]


# -- gradients -----------------------------------------------------------------------------------------


def gradient_norm(solver: Solver) -> float:
    parameters = solver.net.parameters
    return float(np.linalg.norm(solver.backend.to_host(parameters.gradients).astype(np.float64)))


@pytest.mark.parametrize("extra", ["", "clip_gradients: 0.01 ", "clip_gradients: 1e6 ", "iter_size: 3 ", "adam"])
@pytest.mark.parametrize("captures", [False, True])
def test_the_gradient_norm_is_that_of_the_iteration(extra: str, captures: bool) -> None:
    text = DISPLAYED + ('type: "Adam" ' if extra == "adam" else extra)
    recorder, norms = Recorder(), []
    with build_solver(text, CLASSIFIER, FakeGraphBackend() if captures else CPU) as solver:
        solver.add_callback(lambda solver: norms.append(gradient_norm(solver)))
        watch(solver, recorder)
        solver.step(4)
    assert len(set(norms)) == 4
    assert list(recorder.column("gradient_norm").values()) == pytest.approx(norms, rel=1e-5)


def test_the_gradient_norm_is_without_the_loss_scale() -> None:
    plain = record(DISPLAYED, CLASSIFIER).column("gradient_norm")
    scaled = record(DISPLAYED, "global_grad_scale: 64 " + CLASSIFIER).column("gradient_norm")
    assert list(scaled.values()) == pytest.approx(list(plain.values()), rel=1e-4)


def test_the_gradient_norm_of_large_gradients_is_finite() -> None:
    with build_solver(DISPLAYED, CLASSIFIER) as solver:
        solver.step(1)
        solver.backend.fill(solver.net.parameters.gradients, 1e30)
        count = solver.net.parameters.gradients.size
        assert solver.update.gradient_norm() == pytest.approx(1e30 * count**0.5, rel=1e-5)


def test_there_is_no_gradient_norm_where_diff_has_the_step_or_nothing_is_learned() -> None:
    assert not record(DISPLAYED + "snapshot_diff: true ").column("gradient_norm")
    assert record(DISPLAYED + "snapshot_diff: true clip_gradients: 1e6 ").column("gradient_norm")
    fixed = TINY.replace("param { lr_mult: 1 } param { lr_mult: 2", "param { lr_mult: 0 } param { lr_mult: 0")
    assert not record(DISPLAYED, fixed).column("gradient_norm")


def test_logging_does_not_change_training() -> None:
    with build_solver(PLAIN, CLASSIFIER) as plain, build_solver(DISPLAYED, CLASSIFIER) as logged:
        watch(logged, Recorder(), histograms=1)
        for solver in (plain, logged):
            solver.step(4)
        first, second = (solver.backend.to_host(solver.net.parameters.data) for solver in (plain, logged))
        np.testing.assert_array_equal(first, second)


def test_histograms_have_parameters_and_gradients() -> None:
    recorder = record(DISPLAYED, iterations=5, histograms=2)
    assert [iteration for iteration, _ in recorder.arrays] == [0, 2, 4]
    arrays = recorder.arrays[1][1]
    assert {name: array.shape for name, array in arrays.items()} == {
        "parameters/ip/0": (6,),
        "gradients/ip/0": (6,),
        "parameters/ip/1": (2,),
        "gradients/ip/1": (2,),
    }
    flat = np.concatenate([arrays["gradients/ip/0"], arrays["gradients/ip/1"]])
    assert np.linalg.norm(flat) == pytest.approx(recorder.column("gradient_norm")[2], rel=1e-5)


def test_histograms_have_finite_values_only() -> None:
    recorder = Recorder()
    with build_solver(PLAIN, TINY) as solver:
        watched = watch(solver, recorder, histograms=1)
        solver.backend.fill(solver.net.parameters.parameters[0].blob.data, np.nan)
        weights = solver.net.parameters.parameters[1].blob
        solver.backend.from_host(np.array([np.inf, 3], np.float32), weights.data)
        solver.iteration = 1
        watched.after_iteration(solver)
    ((_, arrays),) = recorder.arrays
    assert "parameters/ip/0" not in arrays
    assert arrays["parameters/ip/1"].tolist() == [3]


# -- loggers that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scalars", "histograms", "close"])
def test_a_logger_that_fails_is_called_no_more_and_training_goes_on(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Failing(method, OSError(28, "No space left on device")), Recorder()
    param = solver_param(DISPLAYED, TINY)
    trained = caffepy.train(param, loggers=[bad, good], threads=1, log_histograms=1)
    assert trained.iteration == 4
    assert len(good.rows) == 4 + 1
    assert len(good.arrays) == 4
    (warning,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert "--log Failing failed and is off from iteration" in warning
    assert "training continues: OSError: [Errno 28] No space left on device" in warning
    assert len([row for row in bad.rows if row[0] == -1]) <= 2
    assert method == "close" or bad.closed == [True]


def test_a_logger_that_cannot_start_ends_a_training_that_begins(caplog: pytest.LogCaptureFixture) -> None:
    first = Recorder()
    failing = Failing("start", ConnectionError("no route to host"))
    with pytest.raises(ConfigError, match="--log Failing: ConnectionError: no route to host; correct it, or leave"):
        caffepy.train(solver_param(PLAIN, TINY), loggers=[first, failing], threads=1)
    assert first.closed == [True]
    with pytest.raises(RunError, match="the folder is read-only"):
        caffepy.train(solver_param(PLAIN, TINY), loggers=Failing("start", RunError("the folder is read-only")))


@pytest.mark.parametrize("error", [ConnectionError("no route to host"), RunError("run.csv: cannot be written")])
def test_a_logger_that_cannot_start_does_not_end_a_training_that_resumes(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    param = solver_param(DISPLAYED + f'snapshot: 2 snapshot_prefix: "{tmp_path}/net" ', TINY)
    caffepy.train(param, max_iter=2, threads=1)
    recorder = Recorder()
    with pytest.raises(ConfigError, match="another file"):
        caffepy.train(param, snapshot="auto", loggers=Failing("start", ConfigError("another file")), threads=1)
    loggers = [Failing("start", error), recorder]
    trained = caffepy.train(param, snapshot="auto", loggers=loggers, threads=1)
    assert trained.iteration == 4
    assert recorder.run is not None
    assert recorder.run.iteration == 2
    assert [iteration for iteration, _ in recorder.rows] == [2, 3, 4]
    assert "off from iteration 2 on" in caplog.text


def test_loggers_are_told_of_a_training_that_fails() -> None:
    recorder = Recorder()

    def fail(solver: Solver) -> None:
        if solver.iteration == 3:
            raise RunError("the disk is gone")

    with pytest.raises(RunError, match="the disk is gone"):
        caffepy.train(solver_param(DISPLAYED, TINY), loggers=recorder, callbacks=fail, threads=1)
    assert [iteration for iteration, _ in recorder.rows] == [0, 1]
    assert recorder.closed == [True]


def test_histograms_without_a_logger_are_refused() -> None:
    with pytest.raises(ConfigError, match="--log-histograms says what --log writes; give --log too"):
        caffepy.train(solver_param(PLAIN, TINY), log_histograms=1)
    with pytest.raises(ConfigError, match="log_histograms: '-1' is not a whole number"):
        caffepy.train(solver_param(PLAIN, TINY), log_histograms=-1, loggers=Recorder())


def test_a_solver_without_display_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    recorder = record(TESTED)
    assert "the solver's display is 0: loggers get scores of tests only" in caplog.text
    assert [set(row) for _, row in recorder.rows] == [{"test0/accuracy", "test0/loss"}] * 2


# -- the whole way -------------------------------------------------------------------------------------


def test_devices_are_averaged_and_one_of_them_writes() -> None:
    recorder, norms = Recorder(), []
    param = solver_param(TESTED + "display: 1 ", CLASSIFIER)
    trained = caffepy.train(
        param, loggers=recorder, cpu_solvers=2, threads=1, callbacks=lambda solver: norms.append(gradient_norm(solver))
    )
    assert [iteration for iteration, _ in recorder.rows] == [0, 1, 2, 3, 4]
    assert recorder.run is not None
    assert recorder.run.settings["devices"] == 2
    assert recorder.run.settings["images_per_iteration"] == 12
    rates, images = recorder.column("speed/iterations_per_second"), recorder.column("speed/images_per_second")
    assert all(images[i] == pytest.approx(12 * rate) for i, rate in rates.items())
    assert list(recorder.column("gradient_norm").values()) == pytest.approx(norms, rel=1e-5)
    assert recorder.column("loss")[1] != pytest.approx(trained.losses[1])  # that of the first device


def test_the_command_writes_files_and_a_resumed_one_continues_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(CLASSIFIER)
    (tmp_path / "solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 6 display: 1 snapshot: 2 snapshot_prefix: "s" '
        "random_seed: 1 "
    )
    command = ["train", "--solver", "solver.prototxt", "--cpu", "--threads", "1", "--log", "csv:logs/run.csv"]
    assert main(command) == 0
    before = read(tmp_path / "logs" / "run.csv")
    assert main([*command, "--snapshot", "s_iter_2.solverstate", "--overwrite"]) == 0
    after = read(tmp_path / "logs" / "run.csv")
    assert [row["iteration"] for row in after] == ["0", "1", "2", "3", "4", "5", "6"]
    assert [row["loss"] for row in after] == [row["loss"] for row in before]


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))

"""A solver waits for its data: a stop, and a failure elsewhere, end the wait, and nothing of its state has changed."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import build_solver, weights_of

from caffepy.data.loader import DatumLoader
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import AbortedError
from caffepy.formats.proto import caffe_pb2
from caffepy.training.callback import Action
from caffepy.training.solver import Solver

SOLVER = """base_lr: 0.1 momentum: 0.9 lr_policy: "multistep" gamma: 0.5 stepvalue: 5 stepvalue: 21 max_iter: 30
iter_size: 3
snapshot_prefix: "{folder}/x"
"""
NET = """
layer {{ name: "data" type: "Data" top: "data" top: "label" data_param {{ source: "{folder}/db" batch_size: 4 }} }}
layer {{ name: "bn" type: "BatchNorm" bottom: "data" top: "bn" }}
layer {{ name: "ip" type: "InnerProduct" bottom: "bn" top: "ip"
  inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""
"""Blocks of images have 64 passes: iteration 21 has its first pass in the first block, and the others in the second."""


class SlowSource:
    """Lets loaders read their first block, and the others when `free` is set.

    Args:
        monkeypatch: undoes it.
        seconds: after which a block comes all the same.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 300.0) -> None:
        self.free = threading.Event()
        self.waited = threading.Event()
        read = DatumLoader.load_bytes

        def slow(loader: DatumLoader, firsts: Sequence[int], *others: Any) -> int:
            if firsts[0] >= 64 * 4 and not self.free.is_set():
                self.waited.set()
                self.free.wait(seconds)
            return read(loader, firsts, *others)

        monkeypatch.setattr(DatumLoader, "load_bytes", slow)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    """Solver and net over an LMDB in the test's folder."""
    rng = np.random.default_rng(3)
    datums = [caffe_pb2.Datum(channels=1, height=3, width=3, data=rng.bytes(9), label=n % 3) for n in range(50)]
    write_datums(tmp_path / "db", ((record_key(n), datum) for n, datum in enumerate(datums)))
    return SOLVER.format(folder=tmp_path), NET.format(folder=tmp_path)


def state_of(solver: Solver) -> list[np.ndarray]:
    """Weights, the statistics of BatchNorm among them, and history."""
    return [*weights_of(solver.net), *(solver.backend.to_host(array) for array in solver.history)]


def test_a_stop_ends_the_wait_and_resuming_gives_the_same_bits(
    texts: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build_solver(*texts) as solver:
        solver.solve()
        expected = state_of(solver)
    source = SlowSource(monkeypatch)
    requests = [Action.SNAPSHOT, Action.STOP]
    stop_at = lambda: source.waited.is_set() and solver.iteration == 21 and requests  # noqa: E731
    with build_solver(*texts, request=lambda: requests.pop(0) if stop_at() else Action.NONE) as solver:
        solver.solve()
        assert (solver.iteration, solver.stopped_early) == (21, True)
        source.free.set()
    with build_solver(*texts) as solver:
        solver.solve(resume_from=tmp_path / "x_iter_21.solverstate")
        assert solver.iteration == 30
        for found, wanted in zip(state_of(solver), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_failure_elsewhere_ends_the_wait(texts: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    source = SlowSource(monkeypatch)
    with build_solver(*texts) as solver:

        def cancel() -> None:
            source.waited.wait(300)
            time.sleep(0.2)
            solver.requests.cancel()

        threading.Thread(target=cancel).start()
        with pytest.raises(AbortedError, match="training was stopped while it waited for data"):
            solver.solve()
        source.free.set()


def test_a_stop_ends_a_tests_wait_for_data(
    texts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = SlowSource(monkeypatch)
    tested = texts[0] + "test_iter: 100 test_interval: 30"
    request = lambda: Action.STOP if source.waited.is_set() else Action.NONE  # noqa: E731
    with caplog.at_level("INFO"), build_solver(tested, texts[1], request=request) as solver:
        solver.solve()
        assert (solver.iteration, solver.stopped_early) == (0, True)
        source.free.set()
    assert "Test interrupted." in caplog.text


def test_displays_and_the_report_show_the_share_of_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, texts: tuple[str, str]
) -> None:
    read = DatumLoader.load_bytes

    def slow(loader: DatumLoader, *arguments: Any) -> int:
        time.sleep(0.2)
        return read(loader, *arguments)

    monkeypatch.setattr(DatumLoader, "load_bytes", slow)
    text = texts[0].replace("iter_size: 3", "display: 10")
    with caplog.at_level(logging.INFO), build_solver(text, texts[1]) as solver:
        solver.step(11)
    waits = solver.performance.waits
    assert waits is not None
    assert 0.1 < waits["reading"] <= solver.performance.seconds
    assert waits["decoding"] == 0
    shown = [message for message in caplog.messages if "Waited for data" in message]
    assert len(shown) == 1
    # The first batch may compile a kernel, which counts as transforming.
    assert re.search(r"Waited for data \d+ % of the time \(reading \d+ %[,)]", shown[0])

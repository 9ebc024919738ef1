"""Which buckets begin when, and what is said of them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from training import build_net

from caffepy.distributed.communicators.communicator import (
    Collective,
    Communicator,
    FinishedWork,
    Op,
    PendingCollective,
    ReduceOp,
)
from caffepy.distributed.reducer import Reducer
from caffepy.logs.trace import NO_TRACE
from caffepy.net import Net

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 20 } shape { dim: 4 dim: 20 } data_filler { value: 1 } } }
layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" inner_product_param { num_output: 20 bias_term: false } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 20 bias_term: false } }
layer { name: "c" type: "InnerProduct" bottom: "b" top: "c" inner_product_param { num_output: 20 bias_term: false } }
layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "label" top: "loss" }
"""


class Recorder(Communicator):
    """A communicator that writes down what it is asked for; `completed` as a GPU tells it."""

    asynchronous = True
    completed: int | None = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.log: list[str] = []

    def start(self, collective: Collective) -> PendingCollective:
        assert collective.op is Op.ALL_REDUCE and collective.operator is ReduceOp.AVG
        if collective.overlap is None:
            self.log.append(f"all-reduce {collective.array.size}")
            return FinishedWork()
        with collective.overlap:
            self.log.append(f"begin {collective.array.size}")
        return RecordedWork(self.log)

    def abort(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class RecordedWork(FinishedWork):
    """Writes down what it is waited for with."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self, seconds: float = 0.0) -> bool:
        self._log.append("finish")
        return True


def make(buckets: int, completes: bool = True) -> tuple[Net, Reducer, Recorder]:
    net, recorder = build_net(NET), Recorder()
    exchange = Reducer(
        net,
        recorder,
        buckets,
        lambda: completes,
        lambda what: nullcontext(recorder.log.append(f"wait for {what}")),
        NO_TRACE,
    )
    net.after_backward.append(lambda node: recorder.log.append(f"after {node.layer.name}"))
    return net, exchange, recorder


def passes(net: Net) -> None:
    net.clear_param_diffs()
    net.forward()
    net.backward()


def test_a_bucket_begins_after_the_layer_that_completes_it() -> None:
    net, exchange, recorder = make(3)
    passes(net)
    exchange.finish()
    whole = "the gradients' all-reduce"
    assert recorder.log == [
        "after loss", f"wait for the beginning of part 1 of 3 of {whole}", "begin 448",
        "after c", f"wait for the beginning of part 2 of 3 of {whole}", "begin 448",
        "after b", f"wait for the beginning of part 3 of 3 of {whole}", "begin 512", "after a", "after data",
        f"wait for part 1 of 3 of {whole}", "finish", f"wait for part 2 of 3 of {whole}", "finish",
        f"wait for part 3 of 3 of {whole}", "finish",
    ]  # fmt: skip


def test_a_pass_that_does_not_complete_the_gradients_begins_nothing() -> None:
    net, exchange, recorder = make(3, completes=False)
    passes(net)
    assert not [line for line in recorder.log if line.startswith("begin")]
    exchange.finish()
    assert [line for line in recorder.log if line.startswith("begin")] == ["begin 448", "begin 448", "begin 512"]


def test_one_bucket_waits_for_the_end_of_the_backward_pass() -> None:
    net, exchange, recorder = make(1)
    passes(net)
    exchange.finish()
    assert not exchange.overlaps
    assert recorder.log[-2:] == ["wait for the gradients' all-reduce", "all-reduce 1408"]


def test_one_bucket_is_begun_where_it_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "compresses", True)
    net, exchange, recorder = make(1)
    passes(net)
    exchange.finish()
    assert [line for line in recorder.log if line.split()[0] in ("begin", "finish")] == ["begin 1408", "finish"]


@pytest.mark.parametrize(("completed", "part"), [(0, 1), (1, 2), (2, 3), (3, 1)])
def test_the_bucket_that_a_device_is_in_is_told(completed: int, part: int) -> None:
    _, exchange, recorder = make(3)
    recorder.completed = completed
    assert exchange.describe() == f"part {part} of 3 of the gradients' all-reduce"
    assert make(1)[1].describe() == "the gradients' all-reduce"

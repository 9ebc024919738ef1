"""How gradients are cut into buckets, which begin when, and what is said of them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from training import build_net

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.types import HostTimer
from caffepy.distributed import reducer
from caffepy.distributed.communicators.communicator import (
    Collective,
    Communicator,
    FinishedWork,
    Op,
    PendingCollective,
    ReduceOp,
)
from caffepy.distributed.reducer import CommTimer, Reducer, cut_buckets
from caffepy.logs.trace import NO_TRACE
from caffepy.net import Net
from caffepy.net.parameters import ParameterBuffer

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
        "after loss",
        f"wait for the beginning of part 1 of 3 of {whole}",
        "begin 448",
        "after c",
        f"wait for the beginning of part 2 of 3 of {whole}",
        "begin 448",
        "after b",
        f"wait for the beginning of part 3 of 3 of {whole}",
        "begin 512",
        "after a",
        "after data",
        f"wait for part 1 of 3 of {whole}",
        "finish",
        f"wait for part 2 of 3 of {whole}",
        "finish",
        f"wait for part 3 of 3 of {whole}",
        "finish",
    ]


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


# -- cutting the gradients into buckets ------------------------------------------------------------------


DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 10 } shape { dim: 4 dim: 10 } data_filler { type: "gaussian" } } }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "%s" bottom: "label" top: "loss" }'


def inner(name: str, bottom: str, params: str = "") -> str:
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" {params} '
        "inner_product_param { num_output: 10 bias_term: false } }"
    )


CHAIN = DATA + inner("a", "data") + inner("b", "a") + inner("c", "b") + inner("d", "c") + LOSS % "d"


@pytest.mark.parametrize(("count", "made"), [(0, 4), (1, 1), (2, 2), (3, 2), (4, 4), (100, 4)])
def test_buckets_cover_everything_once_in_order(count: int, made: int) -> None:
    net = build_net(CHAIN)
    buckets = cut_buckets(net, count)
    assert len(buckets) == made
    assert buckets[0].start == 0
    assert buckets[-1].stop == net.parameters.learned + ParameterBuffer.FLAGS
    assert all(a.stop == b.start for a, b in zip(buckets, buckets[1:], strict=False))
    assert [b.node for b in buckets] == sorted((b.node for b in buckets), reverse=True)


def test_a_bucket_is_complete_with_its_first_layer() -> None:
    net = build_net(CHAIN)
    names = net.layer_names
    assert [names[bucket.node] for bucket in cut_buckets(net, 2)] == ["c", "a"]
    assert [names[bucket.node] for bucket in cut_buckets(net, 4)] == ["d", "c", "b", "a"]


@pytest.mark.parametrize(("count", "last", "wanted"), [(2, 300, "ca"), (2, 200, "cba"), (2, 100, "ca"), (1, 200, "a")])
def test_the_first_layers_gradients_are_a_small_bucket(
    monkeypatch: pytest.MonkeyPatch, count: int, last: int, wanted: str
) -> None:
    """Each layer has 128 numbers, of which two are in a bucket of about a half."""
    monkeypatch.setattr(reducer, "_LAST_BUCKET", last)
    net = build_net(CHAIN)
    buckets = cut_buckets(net, count)
    assert "".join(net.layer_names[bucket.node] for bucket in buckets) == wanted
    assert buckets[-1].stop == net.parameters.learned + ParameterBuffer.FLAGS
    assert all(a.stop == b.start for a, b in zip(buckets, buckets[1:], strict=False))


@pytest.mark.parametrize("name", ["", "same"])
def test_layers_of_one_name_complete_their_own_buckets(name: str) -> None:
    """Their gradients lie in the order of the backward pass, and no bucket ends before its layers have run."""
    text = CHAIN
    for layer in "abcd":
        text = text.replace(f'name: "{layer}"', f'name: "{name}"')
    net = build_net(text)
    assert [bucket.node for bucket in cut_buckets(net, 4)] == [4, 3, 2, 1]
    assert [bucket.node for bucket in cut_buckets(net, 2)] == [3, 1]
    starts = [parameter.start for parameter in net.parameters.parameters]
    assert starts == sorted(starts, reverse=True)


def test_a_shared_parameter_is_complete_with_the_first_layer_that_has_it() -> None:
    shared = 'param { name: "w" }'
    text = DATA + inner("a", "data", shared) + inner("b", "a") + inner("c", "b", shared) + LOSS % "c"
    net = build_net(text)
    buckets = cut_buckets(net, 3)
    assert [net.layer_names[bucket.node] for bucket in buckets] == ["b", "a"]


def test_what_is_not_learned_is_not_exchanged() -> None:
    net = build_net(CHAIN.replace('top: "b" ', 'top: "b" param { lr_mult: 0 } '))
    assert sum(b.stop - b.start for b in cut_buckets(net, 6)) == 3 * 128 + ParameterBuffer.FLAGS


def test_a_net_that_learns_nothing_exchanges_its_flags() -> None:
    net = build_net(DATA + inner("a", "data", "param { lr_mult: 0 }") + LOSS % "a")
    (bucket,) = cut_buckets(net, 6)
    assert bucket.stop - bucket.start == ParameterBuffer.FLAGS


# -- the time of the exchange ----------------------------------------------------------------------------


class Device:
    """A device whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def device_timer(self, places: int) -> HostTimer:
        return HostTimer(places, lambda: self.now)


def make_timer() -> tuple[CommTimer, Device]:
    device = Device()
    return CommTimer(device), device  # type: ignore[arg-type]


def exchange(clock: CommTimer, device: Device, seconds: float) -> None:
    with clock.exposed():
        device.now += seconds


def test_what_is_hidden_is_communication_but_not_exposed() -> None:
    clock, device = make_timer()
    for _ in range(20):
        clock.begin()
        device.now += 1.25
        exchange(clock, device, 0.5)
        device.now += 3.0
    assert clock.totals() == (35.0, 10.0)
    assert clock.totals() == (35.0, 10.0)


def test_exchanges_that_go_on_together_are_counted_once() -> None:
    clock, device = make_timer()
    for _ in range(3):
        clock.begin()
        device.now += 0.5
        clock.begin()
        device.now += 3.0
        exchange(clock, device, 0.0)
        device.now += 4.0
    assert clock.totals() == (10.5, 0.0)


def test_an_exchange_that_fails_is_not_under_way_any_more() -> None:
    clock, device = make_timer()
    with pytest.raises(KeyError), clock.exposed():
        raise KeyError("lost")
    device.now += 7.0
    exchange(clock, device, 0.5)
    assert clock.totals() == (0.5, 0.5)


def test_without_overlap_all_is_exposed() -> None:
    clock, device = make_timer()
    for _ in range(3):
        exchange(clock, device, 0.5)
        device.now += 1.0
    assert clock.totals() == (1.5, 1.5)


def test_what_came_before_a_reset_does_not_count() -> None:
    clock, device = make_timer()
    exchange(clock, device, 1.0)
    clock.reset()
    exchange(clock, device, 0.5)
    assert clock.totals() == (0.5, 0.5)


def test_the_clock_of_a_cpu_goes_forward() -> None:
    backend = CpuBackend(1)
    clock = CommTimer(backend)
    with clock.exposed():
        backend.zeros((1000,))
    communication, exposed = clock.totals()
    assert communication >= exposed > 0

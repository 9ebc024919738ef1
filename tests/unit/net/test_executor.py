"""Forward passes on a CPU that plays a capturing device, and the cutting of steps into graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend
from forward_passes import HOST, build, give, values

from caffepy.errors import RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.net.executor import ForwardExecutor, GraphSegments, Segment


def launches(runner: ForwardExecutor) -> int:
    assert isinstance(runner.net.backend, FakeGraphBackend)
    return runner.net.backend.launches


def test_passes_but_the_first_are_replayed_and_give_the_same() -> None:
    runner, eager = ForwardExecutor(build()), ForwardExecutor(build(), eager=True)
    assert (runner.wanted, eager.wanted) == (True, False)
    for seed in range(5):
        give(runner.net, seed)
        give(eager.net, seed)
        np.testing.assert_array_equal(values(runner), values(eager))
    assert (launches(runner), launches(eager)) == (4, 0)
    assert runner.net.context.passes.number == eager.net.context.passes.number == 5


def test_the_unfused_net_gives_the_same_to_rounding() -> None:
    runner, plain = ForwardExecutor(build()), build(fuse=False)
    plain.forward()
    for _ in range(3):
        np.testing.assert_allclose(values(runner), plain.blobs["out"].host_data(), rtol=1e-4, atol=1e-5)


def test_parameters_are_taken_over_when_that_is_said() -> None:
    runner = ForwardExecutor(build())
    before = values(runner)
    scale = runner.net.layers[3].blobs[0]
    runner.net.backend.fill(scale.data, 2)
    for _ in range(2):
        np.testing.assert_array_equal(values(runner), before)
    runner.parameters_changed()
    for _ in range(2):
        np.testing.assert_allclose(values(runner), 2 * before, rtol=1e-5)


def test_the_net_by_itself_takes_the_present_parameters() -> None:
    runner = ForwardExecutor(build())
    before = values(runner)
    runner.net.backend.fill(runner.net.layers[3].blobs[0].data, 2)
    runner.net.forward()
    np.testing.assert_allclose(runner.net.blobs["out"].host_data(), 2 * before, rtol=1e-5)


def test_another_shape_is_run_eagerly_and_captured_again() -> None:
    runner, plain = ForwardExecutor(build()), build(fuse=False)
    launched = []
    for shape in ((2, 3, 5, 5), (2, 3, 5, 5), (1, 3, 6, 4), (1, 3, 6, 4), (1, 3, 6, 4), (2, 3, 5, 5)):
        for net in (runner.net, plain):
            net.blobs["data"].reshape(shape)
            give(net, 2)
        plain.forward()
        np.testing.assert_allclose(values(runner), plain.blobs["out"].host_data(), rtol=1e-4, atol=1e-5)
        launched.append(launches(runner))
    assert launched == [0, 1, 1, 2, 3, 3]


def test_each_replay_draws_new_numbers_and_the_same_as_an_eager_pass() -> None:
    runner, eager = (
        ForwardExecutor(build(caffe_pb2.TRAIN, fuse=False), eager=wanted) for wanted in (False, True)
    )  # a layer that draws is what matters here
    found, wanted = ([values(each) for _ in range(4)] for each in (runner, eager))
    np.testing.assert_array_equal(found, wanted)
    assert len({drawn.tobytes() for drawn in found}) == 4
    assert launches(runner) == 3
    assert runner.net.context.passes.on_device is None


def test_dropout_draws_nothing_in_a_test() -> None:
    runner = ForwardExecutor(build())
    values(runner)
    assert not runner.net.context.passes.uses_random


def test_layers_of_the_host_run_between_the_graphs() -> None:
    runner = ForwardExecutor(build(text=HOST))
    noise = []
    for _ in range(4):
        values(runner)
        noise.append(runner.net.blobs["noise"].host_data())
    assert launches(runner) == 3
    assert len({tuple(drawn) for drawn in noise}) == 4


class Failing(FakeGraphBackend):
    """A device on which capturing fails.

    Args:
        error: how.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def capture(self, *works: Callable[[], None]) -> Any:
        raise self.error


def test_what_cannot_be_captured_is_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    runner = ForwardExecutor(build(backend=Failing(RunError("it asks for memory"))))
    with caplog.at_level(logging.INFO):
        found = [values(runner) for _ in range(4)]
    assert "are not captured into graphs: it asks for memory" in caplog.text
    assert caplog.text.count("not captured") == 1
    assert not runner.wanted
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_what_could_not_be_captured_is_tried_again_behind_another_pass(caplog: pytest.LogCaptureFixture) -> None:
    backend = Failing(RunError("it asks for memory"))
    runner = ForwardExecutor(build(backend=backend))
    with caplog.at_level(logging.INFO):
        first = [values(runner) for _ in range(2)]
        backend.capture = FakeGraphBackend().capture  # type: ignore[method-assign]
        for _ in range(2):
            np.testing.assert_array_equal(first[0], values(runner))
    assert runner.captured
    assert "not captured" not in caplog.text


IN_PLACE = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 3 dim: 4 } } }
layer { name: "scale" type: "Scale" bottom: "data" top: "data"
  scale_param { filler { type: "constant" value: 2 } } }
layer { name: "prelu" type: "PReLU" bottom: "data" top: "data" prelu_param { filler { type: "constant" value: 0.5 } } }
layer { name: "loss" type: "Reduction" bottom: "data" top: "loss" loss_weight: 1 }
"""


def test_whoever_runs_the_net_itself_has_what_a_backward_pass_needs() -> None:
    net = build(text=IN_PLACE, phase=caffe_pb2.TRAIN, fuse=False)
    runner = ForwardExecutor(net)
    for seed in range(3):
        give(net, seed)
        x = net.blobs["data"].host_data()
        if seed < 2:
            runner.forward()
        else:
            net.forward()
            net.backward()
    (scale,), (slope,) = (layer.blobs for layer in net.layers if layer.blobs)
    factors = np.where(x > 0, 1, 0.5)
    np.testing.assert_allclose(slope.host_diff(), np.minimum(2 * x, 0).sum(axis=0), rtol=1e-6)
    np.testing.assert_allclose(scale.host_diff(), (x * factors).sum(axis=0), rtol=1e-6)


def test_another_error_leaves_no_half_of_a_graph() -> None:
    runner = ForwardExecutor(build(backend=Failing(KeyError("x"))))
    first = values(runner)
    with pytest.raises(KeyError, match="x"):
        runner.forward()
    assert not runner.captured
    np.testing.assert_array_equal(values(runner), first)


def test_callbacks_see_every_layer() -> None:
    runner = ForwardExecutor(build())
    first = values(runner)
    values(runner)
    seen: list[str] = []
    runner.net.after_forward.append(lambda node: seen.append(node.layer.type))
    np.testing.assert_array_equal(values(runner), first)
    assert seen == ["Input", "Convolution + BatchNorm + Scale + ReLU", "Dropout"]
    runner.net.after_forward.clear()
    np.testing.assert_array_equal(values(runner), first)
    assert launches(runner) == 2


def test_where_others_run_beside_it_it_captures_when_it_is_told() -> None:
    runner = ForwardExecutor(build(), lazily=False)
    assert not runner.capture()  # memory and plans are there after an eager pass
    for _ in range(3):
        runner.forward()
    assert launches(runner) == 0
    assert runner.capture()
    runner.forward()
    assert launches(runner) == 1
    runner.stop_capturing()
    runner.forward()
    assert (launches(runner), runner.capture(), runner.wanted) == (1, False, False)


def test_a_net_that_shows_its_blobs_is_not_captured() -> None:
    net = build()
    net.debug_info = True
    assert not ForwardExecutor(net).wanted


# -- steps cut into graphs -------------------------------------------------------------------------------


class Recorder:
    """Stands for a backend: a captured step is run when its graph is launched, and not before."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        self.done: list[str] = []
        self.capturing: list[str] | None = None

    def capture(self, *works: Callable[[], None]) -> Any:
        self.capturing = []
        for work in works:
            work()
        names, self.capturing = self.capturing, None
        self.graphs.append(names)
        recorder = self

        class Graph:
            def launch(self) -> None:
                recorder.done.extend(f"{name}*" for name in names)

        return Graph()

    def segment(self, name: str, blocker: str | None = None) -> Segment:
        def run() -> None:
            (self.done if self.capturing is None else self.capturing).append(name)

        return Segment(name, run, blocker)


def test_segments_run_in_order_and_graphs_leave_out_what_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    segments = [
        recorder.segment("a"),
        recorder.segment("b"),
        recorder.segment("c", "it asks the user"),
        recorder.segment("d"),
    ]
    work = GraphSegments(recorder, segments)  # type: ignore[arg-type]
    work.run()
    assert recorder.done == ["a", "b", "c", "d"]
    assert not work.captured
    recorder.done.clear()
    with caplog.at_level(logging.DEBUG, "caffepy"):
        work.capture()
    assert work.captured
    assert recorder.graphs == [["a", "b"], ["d"]]
    assert recorder.done == []
    assert "c runs outside of the captured graphs: it asks the user" in [r.getMessage() for r in caplog.records]
    for _ in range(2):
        work.run()
    assert recorder.done == ["a*", "b*", "c", "d*"] * 2


def test_dropped_graphs_run_segment_by_segment() -> None:
    recorder = Recorder()
    work = GraphSegments(recorder, [recorder.segment("a")])  # type: ignore[arg-type]
    work.capture()
    work.drop()
    work.run()
    assert recorder.done == ["a"]
    assert not work.captured

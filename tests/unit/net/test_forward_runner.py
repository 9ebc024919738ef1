"""Forward passes on a CPU that plays a capturing device: a graph runs its steps when it is launched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from replaying import Replaying

from caffepy.backend import Backend
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.errors import RunError
from caffepy.layers.core.base import LAYERS, LayerContext, import_layer_types
from caffepy.net import Net
from caffepy.net.forward_runner import ForwardRunner, can_record
from caffepy.proto import caffe_pb2

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 5 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "drop" type: "Dropout" bottom: "c" top: "out" }
"""
HOST = NET + 'layer { name: "noise" type: "DummyData" top: "noise" dummy_data_param { shape { dim: 3 } data_filler { ' \
    'type: "gaussian" } } }'  # fmt: skip
"""A layer that draws its numbers on the host."""


def build(phase: int = caffe_pb2.TEST, text: str = NET, fuse: bool = True, backend: Backend | None = None) -> Net:
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    net = Net(param, LayerContext(backend or Replaying(), phase=phase, seed=3), fuse=fuse)
    give(net, 1)
    return net


def give(net: Net, seed: int) -> None:
    blob = net.blobs["data"]
    net.backend.from_host(np.random.default_rng(seed).standard_normal(blob.shape), blob.data)


def values(runner: ForwardRunner) -> Any:
    runner.forward()
    return runner.net.blobs["out"].host_data()


def launches(runner: ForwardRunner) -> int:
    assert isinstance(runner.net.backend, Replaying)
    return runner.net.backend.launches


def test_passes_but_the_first_are_replayed_and_give_the_same() -> None:
    runner, eager = ForwardRunner(build()), ForwardRunner(build(), eager=True)
    assert (runner.wanted, eager.wanted) == (True, False)
    for seed in range(5):
        give(runner.net, seed)
        give(eager.net, seed)
        np.testing.assert_array_equal(values(runner), values(eager))
    assert (launches(runner), launches(eager)) == (4, 0)
    assert runner.net.context.passes.number == eager.net.context.passes.number == 5


def test_the_unfused_net_gives_the_same_to_rounding() -> None:
    runner, plain = ForwardRunner(build()), build(fuse=False)
    plain.forward()
    for _ in range(3):
        np.testing.assert_allclose(values(runner), plain.blobs["out"].host_data(), rtol=1e-4, atol=1e-5)


def test_parameters_are_taken_over_when_that_is_said() -> None:
    runner = ForwardRunner(build())
    before = values(runner)
    scale = runner.net.layers[3].blobs[0]
    runner.net.backend.fill(scale.data, 2)
    for _ in range(2):
        np.testing.assert_array_equal(values(runner), before)
    runner.parameters_changed()
    for _ in range(2):
        np.testing.assert_allclose(values(runner), 2 * before, rtol=1e-5)


def test_the_net_by_itself_takes_the_present_parameters() -> None:
    runner = ForwardRunner(build())
    before = values(runner)
    runner.net.backend.fill(runner.net.layers[3].blobs[0].data, 2)
    runner.net.forward()
    np.testing.assert_allclose(runner.net.blobs["out"].host_data(), 2 * before, rtol=1e-5)


def test_another_shape_is_run_eagerly_and_captured_again() -> None:
    runner, plain = ForwardRunner(build()), build(fuse=False)
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
        ForwardRunner(build(caffe_pb2.TRAIN, fuse=False), eager=wanted) for wanted in (False, True)
    )  # a layer that draws is what matters here
    found, wanted = ([values(each) for _ in range(4)] for each in (runner, eager))
    np.testing.assert_array_equal(found, wanted)
    assert len({drawn.tobytes() for drawn in found}) == 4
    assert launches(runner) == 3
    assert runner.net.context.passes.on_device is None


def test_dropout_draws_nothing_in_a_test() -> None:
    runner = ForwardRunner(build())
    values(runner)
    assert not runner.net.context.passes.draws


def test_layers_of_the_host_run_between_the_graphs() -> None:
    runner = ForwardRunner(build(text=HOST))
    noise = []
    for _ in range(4):
        values(runner)
        noise.append(runner.net.blobs["noise"].host_data())
    assert launches(runner) == 3
    assert len({tuple(drawn) for drawn in noise}) == 4


class Failing(Replaying):
    """A device on which capturing fails.

    Args:
        error: how.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def capture(self, work: Callable[[], None]) -> Any:
        raise self.error


def test_what_cannot_be_captured_is_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    runner = ForwardRunner(build(backend=Failing(RunError("it asks for memory"))))
    with caplog.at_level(logging.INFO):
        found = [values(runner) for _ in range(3)]
    assert "are not captured into graphs: it asks for memory" in caplog.text
    assert caplog.text.count("not captured") == 1
    assert not runner.wanted
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_another_error_leaves_no_half_of_a_graph() -> None:
    runner = ForwardRunner(build(backend=Failing(KeyError("x"))))
    first = values(runner)
    with pytest.raises(KeyError, match="x"):
        runner.forward()
    assert not runner.captured
    np.testing.assert_array_equal(values(runner), first)


def test_callbacks_see_every_layer() -> None:
    runner = ForwardRunner(build())
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
    runner = ForwardRunner(build(), lazily=False)
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
    assert not ForwardRunner(net).wanted


WRITTEN_DOWN = (
    NET
    + """
layer { name: "p" type: "Pooling" bottom: "out" top: "p" pooling_param { kernel_size: 2 stride: 1 } }
layer { name: "join" type: "Concat" bottom: "p" bottom: "p" top: "join" }
layer { name: "lrn" type: "LRN" bottom: "join" top: "lrn" }
layer { name: "fc" type: "InnerProduct" bottom: "lrn" top: "fc"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "prob" type: "Softmax" bottom: "fc" top: "prob" }
layer { name: "row" type: "Reshape" bottom: "fc" top: "row" reshape_param { shape { dim: 0 dim: 1 dim: 3 } } }
layer { name: "gate" type: "Sigmoid" bottom: "row" top: "gate" }
"""
)
MOVING = (
    WRITTEN_DOWN
    + """
layer { name: "mvn" type: "MVN" bottom: "join" top: "mvn" }
layer { name: "flat" type: "Flatten" bottom: "mvn" top: "flat" }
layer { name: "last" type: "InnerProduct" bottom: "flat" top: "last"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
"""
)


def outputs(runner: ForwardRunner, seed: int) -> list[Any]:
    give(runner.net, seed)
    runner.forward()
    return [blob.host_data() for blob in runner.net.outputs.values()]


@pytest.mark.parametrize("text", [WRITTEN_DOWN, MOVING])
@pytest.mark.parametrize("fuse", [True, False])
def test_passes_on_the_cpu_that_are_written_down_give_the_same(text: str, fuse: bool) -> None:
    runner = ForwardRunner(build(text=text, fuse=fuse, backend=CpuBackend(2)))
    eager = ForwardRunner(build(text=text, fuse=fuse, backend=CpuBackend(1)), eager=True)
    for seed in range(8):
        for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert runner.net.context.passes.number == eager.net.context.passes.number


ALONE = [
    *[(kind, "") for kind in ("AbsVal", "BNLL", "HardSwish", "ReLU6", "Sigmoid", "Swish", "TanH", "Threshold")],
    ("Clip", "clip_param { min: -0.5 max: 0.5 }"),
    ("ELU", "elu_param { alpha: 0.5 }"),
    ("Exp", "exp_param { base: 2 scale: 0.5 }"),
    ("Log", "log_param { shift: 10 }"),
    *[("Power", f"power_param {{ power: {power} scale: 0.1 shift: 2 }}") for power in (0, 1, 2, 0.3)],
    *[("PReLU", f"prelu_param {{ {more} filler {{ type: 'gaussian' }} }}") for more in ("", "channel_shared: true")],
    *[("Flatten", f"flatten_param {{ {more} }}") for more in ("", "axis: 2")],
    *[("Reshape", f"reshape_param {{ shape {{ {dims} }} }}")
      for dims in ("dim: 0 dim: -1", "dim: 3 dim: 2 dim: 5 dim: 5")],
    ("Permute", "permute_param { order: 0 order: 2 order: 3 order: 1 }"),
    ("ShuffleChannel", "shuffle_channel_param { group: 3 }"),
    *[("Tile", f"tile_param {{ axis: {axis} tiles: 2 }}") for axis in (0, 1, 3)],
    ("BatchNorm", "batch_norm_param { use_global_stats: false }"),
    ("BatchNorm", ""),
    ("Bias", "bias_param { filler { type: 'gaussian' } }"),
    ("Concat", "bottom: 'data' concat_param { axis: 2 }"),
    *[(kind, f"convolution_param {{ num_output: 3 kernel_size: 3 stride: 2 pad: 1 {groups} "
       "weight_filler { type: 'xavier' } bias_filler { type: 'gaussian' } }")
      for kind in ("Convolution", "Deconvolution", "DepthwiseConvolution", "ConvolutionDepthwise")
      for groups in (["", "group: 3"] if "Depthwise" not in kind else ["group: 3"])],
    ("Crop", "bottom: 'small' crop_param { axis: 2 offset: 1 }"),
    ("Dropout", ""),
    *[("Eltwise", f"bottom: 'data' eltwise_param {{ operation: {kind} }}") for kind in ("SUM", "PROD", "MAX")],
    ("Eltwise", "bottom: 'data' eltwise_param { coeff: 2 coeff: -0.5 }"),
    *[("InnerProduct", f"inner_product_param {{ num_output: 4 {more} weight_filler {{ type: 'xavier' }} }}")
      for more in ("", "axis: 2", "transpose: true bias_term: false")],
    *[("LRN", f"lrn_param {{ local_size: 3 norm_region: {region} beta: {beta} }}")
      for region in ("ACROSS_CHANNELS", "WITHIN_CHANNEL") for beta in (0.75, 0.6)],
    *[("Pooling", f"pooling_param {{ pool: {kind} {more} }}") for kind in ("MAX", "AVE")
      for more in ("kernel_size: 3 stride: 2 pad: 1", "global_pooling: true")],
    ("PriorBox", "bottom: 'small' prior_box_param { min_size: 4 aspect_ratio: 2 variance: 0.1 }"),
    *[("ReLU", f"relu_param {{ negative_slope: {slope} }}") for slope in (0, 0.1)],
    ("Scale", "scale_param { bias_term: true filler { type: 'gaussian' } }"),
    ("Scale", "bottom: 'small' scale_param { axis: 0 }"),
    ("Slice", "top: 'other' slice_param { axis: 2 slice_point: 2 }"),
    *[("Softmax", f"softmax_param {{ axis: {axis} }}") for axis in (1, 2, -1)],
    ("Split", "top: 'other'"),
]  # fmt: skip
INPUTS = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 5 } } }
layer { name: "small" type: "Input" top: "small" input_param { shape { %s } } }
"""


@pytest.mark.parametrize(("kind", "settings"), ALONE)
def test_each_layer_that_is_written_down_computes_new_inputs(kind: str, settings: str) -> None:
    small = "dim: 2" if kind == "Scale" else "dim: 2 dim: 3 dim: 3 dim: 3"
    text = INPUTS % small + f"layer {{ name: 'l' type: '{kind}' bottom: 'data' top: 'out' {settings} }}"
    runner, eager = (ForwardRunner(build(text=text, fuse=False, backend=CpuBackend(2)), eager=e) for e in (False, True))
    for seed in range(5):
        for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("kind", "settings"), ALONE)
def test_a_layer_that_uses_the_host_unnoticed_is_called_in_each_pass(
    kind: str, settings: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unnoticed = property(lambda recording: False, lambda recording, value: None)
    monkeypatch.setattr("caffepy.backend.cpu.jit.recording.Recording.host_work", unnoticed, raising=False)
    with caplog.at_level(logging.WARNING):
        test_each_layer_that_is_written_down_computes_new_inputs(kind, settings)
    if (kind, settings) == ("Softmax", "softmax_param { axis: 2 }"):
        assert "layer 'l' (Softmax) does not compute by kernels alone, and is called in each pass" in caplog.text


def test_layers_that_only_call_kernels_pass_their_trial(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for kind, settings in ALONE:
            test_each_layer_that_is_written_down_computes_new_inputs(kind, settings)
    assert not caplog.text


HEADS = (
    INPUTS % "dim: 2 dim: 3 dim: 3 dim: 3"
    + "".join(
        f"""layer {{ name: "flat_{name}" type: "Flatten" bottom: "{name}" top: "flat_{name}" }}
    layer {{ name: "boxes_{name}" type: "PriorBox" bottom: "{name}" bottom: "data" top: "boxes_{name}"
      prior_box_param {{ min_size: 2 }} }}
    """
        for name in ("data", "small")
    )
    + """layer { name: "all" type: "Concat" bottom: "flat_data" bottom: "flat_small" top: "all" }
layer { name: "boxes" type: "Concat" bottom: "boxes_data" bottom: "boxes_small" top: "boxes" concat_param { axis: 2 } }
"""
)


def test_the_heads_of_a_detector_do_not_cut_a_pass_into_parts() -> None:
    """Parts that are made again by themselves wake all threads anew."""
    runner, eager = (ForwardRunner(build(text=HEADS, backend=CpuBackend(2)), eager=e) for e in (False, True))
    for seed in range(4):
        for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert runner._recorded is not None
    assert len(runner._recorded._calls) == 1


def test_a_trial_leaves_the_numbers_of_the_pass() -> None:
    runner, eager = (ForwardRunner(build(text=WRITTEN_DOWN, backend=CpuBackend(1)), eager=e) for e in (False, True))
    for seed in (1, 2):
        outputs(runner, seed)
        outputs(eager, seed)
    for name, blob in runner.net.blobs.items():
        np.testing.assert_array_equal(blob.host_data(), eager.net.blobs[name].host_data(), err_msg=name)


def test_each_layer_that_is_written_down_is_tried() -> None:
    import_layer_types()
    own = [name for name in LAYERS if LAYERS.get(name).__module__.startswith("caffepy.")]
    recorded = {name for name in own if LAYERS.get(name).recordable}
    assert {kind for kind, _ in ALONE} | {"Input"} == recorded


def test_layers_are_not_called_once_a_pass_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, called = ForwardRunner(build(text=WRITTEN_DOWN, backend=CpuBackend(2))), []
    forward = Net.forward_node
    monkeypatch.setattr(Net, "forward_node", lambda net, node: called.append(node.layer.name) or forward(net, node))
    counts = []
    for seed in range(5):
        outputs(runner, seed)
        counts.append(len(called))
        called.clear()
    assert counts[0] == counts[2] == len(runner.net.schedule)
    assert counts[1] == 2 * len(runner.net.schedule) - 1  # each layer that has a bottom is tried with other numbers
    assert counts[3:] == [0, 0]


def test_parameters_are_taken_over_by_passes_that_are_written_down() -> None:
    runner = ForwardRunner(build(text=WRITTEN_DOWN, backend=CpuBackend(2)))
    eager = ForwardRunner(build(text=WRITTEN_DOWN, backend=CpuBackend(2)), eager=True)
    for change in range(2):
        for one in (runner, eager):
            one.net.backend.copy(one.net.layers[1].blobs[0].data * 2, one.net.layers[1].blobs[0].data)
            one.parameters_changed()
        for seed in range(3):
            for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
                np.testing.assert_array_equal(found, expected, err_msg=str(change))


def test_a_layer_that_moves_its_top_ends_the_pass_that_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, eager = (ForwardRunner(build(text=WRITTEN_DOWN, backend=CpuBackend(2)), eager=e) for e in (False, True))
    for layer in runner.net.layers:
        monkeypatch.setattr(layer, "recordable", layer.type in {"LRN", "InnerProduct", "Softmax"})
    node = next(n for n in runner.net.schedule if n.layer.name == "join")
    forward = node.layer.forward

    def move(bottom: Any, top: Any) -> None:
        top[0].bind(data=runner.net.backend.zeros(top[0].shape))
        forward(bottom, top)

    monkeypatch.setattr(node.layer, "forward", move)
    for seed in range(8):
        for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_data_layers_keep_passes_from_being_written_down() -> None:
    net = build(text=HOST, backend=CpuBackend(2))
    assert not can_record(net)
    assert can_record(build(backend=CpuBackend(2)))
    assert not can_record(build())

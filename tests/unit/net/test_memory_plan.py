"""Memory plans: a net whose blobs share memory computes the very same bits; what is counted is what is allocated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training import CPU

from caffepy.backend import Backend
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.meta import MetaBackend
from caffepy.backend.types import ARENA_ALIGNMENT, ImageSlot, aligned_bytes
from caffepy.errors import DataError, OutOfMemoryError
from caffepy.formats.load import read_net
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.input.prefetching import blocks_needed, expected_bytes, passes_per_block
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.memory_plan import (
    BLOBS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    Lifetime,
    MemoryPlan,
    assign_offsets,
    describe,
    live_bytes,
    plan_memory,
    sample_shapes,
    widest_gaps,
)

MODELS = Path(__file__).parents[3] / "models"

HEAD = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } shape { dim: 2 }
    data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
"""
TAIL = """
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" top: "probabilities" }
"""


def layer(kind: str, bottoms: str, tops: str, param: str = "") -> str:
    names = "".join(f' bottom: "{b}"' for b in bottoms.split()) + "".join(f' top: "{t}"' for t in tops.split())
    return f'layer {{ name: "{kind}_{tops}" type: "{kind}"{names} {param} }}\n'


CONT = """
layer { name: "cont" type: "DummyData" top: "cont"
  dummy_data_param { shape { dim: 2 dim: 4 } data_filler { type: "constant" value: 1 } } }
"""
RECURRENT = 'recurrent_param { num_output: 3 weight_filler { type: "xavier" } }'

ZOO = {
    "lstm": CONT + layer("LSTM", "conv cont", "x", RECURRENT) + layer("ReLU", "x", "x"),
    "rnn": CONT + layer("RNN", "conv cont", "x", RECURRENT) + layer("ReLU", "x", "x"),
    "in place": layer("ReLU", "conv", "conv") + layer("PReLU", "conv", "conv") + layer("Dropout", "conv", "x"),
    "elu, then in place": layer("ELU", "conv", "x") + layer("Dropout", "x", "x"),
    "normalisation in place": layer("BatchNorm", "conv", "conv")
    + layer("Scale", "conv", "conv")
    + layer("ReLU", "conv", "x"),
    "residual": layer("BatchNorm", "conv", "bn")
    + layer("Scale", "bn", "s", "scale_param { bias_term: true }")
    + layer("Eltwise", "s data", "x")
    + layer("ReLU", "x", "x"),
    "views": layer("Flatten", "conv", "flat")
    + layer("Reshape", "flat", "back", "reshape_param { shape { dim: 0 dim: 4 dim: 36 } }")
    + layer("Sigmoid", "back", "x"),
    "rows with channels last": layer("Permute", "conv", "p", "permute_param { order: 0 order: 2 order: 3 order: 1 }")
    + layer("Flatten", "p", "flat")
    + layer("Sigmoid", "flat", "x"),
    "slices": layer("Slice", "conv", "a b") + layer("Concat", "b a", "x"),
    "single": layer("Slice", "conv", "a") + layer("Concat", "a", "b") + layer("TanH", "b", "x"),
    "pooling": layer("Pooling", "conv", "p", "pooling_param { pool: MAX kernel_size: 3 stride: 2 }")
    + layer("Pooling", "p", "x", "pooling_param { pool: AVE kernel_size: 2 }"),
    "mask": layer("Pooling", "conv", "x mask", "pooling_param { pool: MAX kernel_size: 3 stride: 2 }"),
    "lrn": layer("LRN", "conv", "l")
    + layer("LRN", "l", "x", "lrn_param { norm_region: WITHIN_CHANNEL local_size: 3 }"),
    "maximum": layer("Eltwise", "conv data", "m", "eltwise_param { operation: MAX }")
    + layer("Eltwise", "m data", "x", "eltwise_param { operation: PROD stable_prod_grad: false }")
    + layer("ReLU", "x", "x"),
    "losses within": layer("Power", "conv", "x", "power_param { power: 2 } loss_weight: 0.25")
    + layer("EuclideanLoss", "x data", "distance", "loss_weight: 0.5"),
    "moved": layer("Permute", "conv", "p", "permute_param { order: 0 order: 2 order: 3 order: 1 }")
    + layer("Tile", "p", "t", "tile_param { axis: 2 tiles: 2 }")
    + layer("Crop", "t p", "c", "crop_param { axis: 2 }")
    + layer("ShuffleChannel", "c", "x", "shuffle_channel_param { group: 2 }"),
    "windows": layer("Im2col", "conv", "w", "convolution_param { kernel_size: 2 stride: 2 }")
    + layer("Interp", "w", "i", "interp_param { zoom_factor: 2 }")
    + layer("Upsample", "i", "u", "upsample_param { scale: 2 }")
    + layer("SPP", "u", "x", "spp_param { pyramid_height: 2 }"),
    "unpooled": layer("Pooling", "conv", "p mask", "pooling_param { pool: MAX kernel_size: 2 stride: 2 }")
    + layer("ReLU6", "p", "p")
    + layer("Upsample", "p mask", "u")
    + layer("HardSwish", "u", "x"),
    "drawn": layer("Pooling", "conv", "x", "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"),
    "standardised": layer("MVN", "conv", "m")
    + layer("Normalize", "m", "n", "norm_param { across_spatial: false }")
    + layer("Reduction", "n", "r", "reduction_param { axis: 2 operation: SUMSQ }")
    + layer("Axpy", "r n conv", "x")
    + layer("MVN", "x", "x", "mvn_param { across_channels: true }")
    + layer("ReLU", "x", "x"),
    "rows": layer("DummyData", "", "index", "dummy_data_param { shape { dim: 3 } }")
    + layer("BatchReindex", "conv index", "more")
    + layer("Embed", "index", "e", "embed_param { num_output: 3 input_dim: 4 weight_filler { type: 'xavier' } }")
    + layer("Reduction", "more", "r")
    + layer("Reduction", "e", "s", "reduction_param { operation: ASUM }")
    + layer("Eltwise", "r s", "y")
    + layer("Power", "y", "z", "loss_weight: 0.1")
    + layer("TanH", "conv", "x"),
    "other losses": layer("DummyData", "", "gain", "dummy_data_param { shape { dim: 3 dim: 3 } }")
    + layer("Parameter", "", "h", "parameter_param { shape { dim: 2 dim: 3 } } loss_weight: 0.5")
    + layer("InnerProduct", "conv", "s", "inner_product_param { num_output: 3 weight_filler { type: 'xavier' } }")
    + layer("InfogainLoss", "s label gain", "g", "loss_param { ignore_label: 0 }")
    + layer("HingeLoss", "s label", "hinge")
    + layer("Softmax", "s", "q")
    + layer("MultinomialLogisticLoss", "q label", "m")
    + layer("L1Loss", "s q", "l")
    + layer("SmoothL1Loss", "s q", "sl")
    + layer("ContrastiveLoss", "s q label", "c")
    + layer("ELU", "conv", "x"),
    "regions": layer("DummyData", "", "rois", "dummy_data_param { shape { dim: 3 dim: 5 } data_filler { value: 1 } }")
    + layer("ROIPooling", "conv rois", "p", "roi_pooling_param { pooled_h: 2 pooled_w: 2 spatial_scale: 2 }")
    + layer("PSROIPooling", "conv rois", "q", "psroi_pooling_param { output_dim: 1 group_size: 2 spatial_scale: 2 }")
    + layer("Reduction", "p", "y", "loss_weight: 0.1")
    + layer("Reduction", "q", "z", "loss_weight: 0.1")
    + layer("BNLL", "conv", "x"),
    "filtered": layer("DummyData", "", "s", "dummy_data_param { shape { dim: 2 } data_filler { type: 'gaussian' } }")
    + layer("Filter", "conv label s", "f l")
    + layer("ReLU", "f", "f")
    + layer("Reduction", "f", "y", "loss_weight: 0.1")
    + layer("TanH", "conv", "x"),
    "silenced": layer("Split", "conv", "x y") + layer("Silence", "y", ""),
    "deconvolution": layer("Deconvolution", "conv", "x", "convolution_param { num_output: 2 kernel_size: 2 }"),
    "sum in place": layer("ReLU", "conv", "r")
    + layer("BatchNorm", "r", "bn")
    + layer("Eltwise", "bn data", "bn", "eltwise_param { coeff: 2 coeff: -1 }")
    + layer("TanH", "bn", "x"),
    "product and maximum in place": layer("Sigmoid", "conv", "s")
    + layer("Eltwise", "s data", "s", "eltwise_param { operation: PROD }")
    + layer("TanH", "s", "t")
    + layer("Eltwise", "t data", "t", "eltwise_param { operation: MAX }")
    + layer("ELU", "t", "x"),
    "channels at axis 2": layer("Reshape", "conv", "five", "reshape_param { axis: 1 num_axes: 0 shape { dim: 1 } }")
    + layer("Convolution", "five", "c", "convolution_param { axis: 2 num_output: 3 kernel_size: 2 }")
    + layer("Deconvolution", "c", "d", "convolution_param { axis: 2 num_output: 2 kernel_size: 2 }")
    + layer("ReLU", "d", "x"),
    "a kernel that reaches past the image": layer(
        "Convolution", "conv", "c", "convolution_param { num_output: 3 kernel_size: 8 stride: 3 }"
    )
    + layer("ReLU", "c", "x"),
    "a convolution over vectors": layer("InnerProduct", "conv", "v", "inner_product_param { num_output: 6 }")
    + layer("Convolution", "v", "x", "convolution_param { num_output: 4 group: 2 kernel_size: 1 }"),
    "softmax": layer("Softmax", "conv", "x") + layer("Exp", "x", "x"),
    "bias": layer("Bias", "conv", "x", "bias_param { filler { value: 0.5 } }"),
}


def zoo(name: str) -> caffe_pb2.NetParameter:
    return parse_text(HEAD + ZOO[name] + TAIL, caffe_pb2.NetParameter(), name)


def model(path: str, shape: tuple[int, ...], batch: int) -> caffe_pb2.NetParameter:
    """A net of models/, with random images."""
    param = read_net(MODELS / path)
    for data in param.layer:
        if data.type != "Data":
            continue
        data.type = "DummyData"
        for dims in ((batch, *shape), (batch,)):
            data.dummy_data_param.shape.add(dim=dims)
        data.dummy_data_param.data_filler.add(type="gaussian")
        data.dummy_data_param.data_filler.add(type="constant", value=3)
    return param


def context(backend: Backend = CPU, phase: int = caffe_pb2.TRAIN) -> LayerContext:
    return LayerContext(backend, phase=phase, seed=7)


def poison(arena: np.ndarray) -> None:
    """Not a number, whatever is read first."""
    arena.view(np.uint8)[...] = 0xFF


class SpoilingBackend(CpuBackend):
    """Overwrites all of the leased workspace with NaN, before and after each layer."""

    leased = 0

    @contextmanager
    def workspace_lease(self, buffer: np.ndarray | None) -> Iterator[None]:
        assert buffer is not None
        self.leased = max(self.leased, buffer.nbytes)
        poison(buffer)
        yield
        poison(buffer)


def bind(plan: MemoryPlan, net: Net) -> np.ndarray:
    arena = plan.new_arena(net.backend)
    plan.bind(net, arena)
    return arena


def train(net: Net, between: Callable[[], None] = lambda: None) -> list[np.ndarray]:
    """The outputs, losses and gradients of three iterations that learn."""
    seen = []
    for _ in range(3):
        between()
        net.clear_param_diffs()
        net.forward()
        seen += [blob.host_data() for blob in net.outputs.values()] + [np.array(net.loss())]
        net.backward()
        seen.append(CPU.to_host(net.parameters.diff))
        net.parameters.data[: net.parameters.learned] -= 0.01 * net.parameters.gradients
    return seen


def check_same(param: caffe_pb2.NetParameter, fuse: bool) -> MemoryPlan:
    plan, backend = plan_memory(param, context(), fuse=fuse), SpoilingBackend(1)
    with CPU.activate():
        alone, sharing = Net(param, context(), fuse=fuse), Net(param, context(backend), fuse=fuse)
        arena = bind(plan, sharing)
        for wanted, got in zip(train(alone), train(sharing, lambda: poison(arena)), strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert backend.leased > plan.arena / 2
    return plan


@pytest.mark.parametrize("fuse", [False, True], ids=["written", "fused"])
@pytest.mark.parametrize("name", ZOO)
def test_sharing_changes_no_bit(name: str, fuse: bool):
    plan = check_same(zoo(name), fuse)
    assert plan.bound <= plan.arena < plan.alone


@pytest.mark.parametrize("fuse", [False, True], ids=["written", "fused"])
@pytest.mark.parametrize(
    "path, shape, batch",
    [
        ("lenet/train_test.prototxt", (1, 28, 28), 8),
        ("cifar10/quick_train_test.prototxt", (3, 32, 32), 4),
        ("cifar10/full_train_test.prototxt", (3, 32, 32), 4),
        ("resnet18/train_val.prototxt", (3, 64, 64), 2),
    ],
)
def test_sharing_changes_no_bit_of_a_model(path: str, shape: tuple[int, ...], batch: int, fuse: bool):
    plan = check_same(model(path, shape, batch), fuse)
    assert plan.arena < 0.75 * plan.alone
    assert plan.arena <= 1.01 * plan.bound


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, shape",
    [
        ("caffenet/train_val.prototxt", (3, 227, 227)),
        ("googlenet/train_val.prototxt", (3, 224, 224)),
        ("resnet50/train_val.prototxt", (3, 64, 64)),
    ],
)
def test_sharing_changes_no_bit_of_a_large_model(path: str, shape: tuple[int, ...]):
    param = model(path, shape, 2)
    for layer in param.layer:
        if layer.type == "InnerProduct":
            # Large weights cost time and share nothing.
            layer.inner_product_param.num_output = min(layer.inner_product_param.num_output, 100)
    check_same(param, True)


def test_force_backward_and_a_second_pass_within_an_iteration():
    param = zoo("residual")
    param.force_backward = True
    plan = plan_memory(param, context())
    with CPU.activate():
        nets = [Net(param, context()) for _ in range(2)]
        poison(bind(plan, nets[1]))
        for net in nets:
            net.clear_param_diffs()
            for _ in range(2):
                net.forward()
                net.backward()
        np.testing.assert_array_equal(*(net.parameters.diff for net in nets))


def test_a_test_net_can_use_the_train_nets_arena():
    param = model("lenet/train_test.prototxt", (1, 28, 28), 4)
    plans = [plan_memory(param, context(phase=phase)) for phase in (caffe_pb2.TRAIN, caffe_pb2.TEST)]
    assert plans[1].arena <= plans[0].arena
    with CPU.activate():
        train_net, test_net, alone = (Net(param, context(phase=phase)) for phase in (caffe_pb2.TRAIN, 1, 1))
        plans[1].bind(test_net, bind(plans[0], train_net))
        for net in (test_net, alone):
            net.share_trained_layers_with(train_net)
        train_net.forward()
        for net in (test_net, alone):
            net.forward()
        for name, blob in test_net.outputs.items():
            np.testing.assert_array_equal(blob.host_data(), alone.outputs[name].host_data())


def test_a_blob_that_is_reshaped_gets_memory_of_its_own():
    text = 'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 } } }'
    text += layer("TanH", "data", "a") + layer("TanH", "a", "b") + layer("TanH", "b", "c") + layer("TanH", "c", "d")
    param = parse_text(text, caffe_pb2.NetParameter(), "net")
    plan = plan_memory(param, context(phase=caffe_pb2.TEST))
    net = Net(param, context(phase=caffe_pb2.TEST))
    poison(bind(plan, net))
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    for rows in (2, 4):
        net.blobs["data"].reshape((rows, 3))
        CPU.from_host(values[:rows], net.blobs["data"].data)
        net.forward()
        wanted = np.tanh(np.tanh(np.tanh(np.tanh(values[:rows]))))
        np.testing.assert_allclose(net.blobs["d"].host_data(), wanted, rtol=1e-6)


def test_a_plan_of_another_net_is_refused():
    plan = plan_memory(zoo("bias"), context())
    with pytest.raises(AssertionError):
        bind(plan, Net(zoo("views"), context()))


def test_what_outlives_a_pass_does_not_share():
    plan = plan_memory(zoo("losses within"), context())
    titles = {slot.title for slot in plan.slots}
    assert not titles & {
        "loss data",
        "accuracy data",
        "probabilities data",
        "distance data",
        "x data",
        "data data",
        "label data",
    }
    assert {"conv data", "conv diff", "ip data"} <= titles


class CountingBackend(CpuBackend):
    """Adds up what is asked for, like a GPU's pool."""

    mask_dtype = "uint8"

    def __init__(self) -> None:
        super().__init__(1)
        self.counted = 0
        self.limit: int | None = None

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32"):
        array = super().zeros(shape, dtype)
        self.counted += array.nbytes
        if self.limit is not None and self.counted > self.limit:
            raise OutOfMemoryError(f"no {array.nbytes} bytes", "buy some", self.limit)
        return array


def test_the_prediction_is_what_is_allocated():
    param = model("cifar10/full_train_test.prototxt", (3, 32, 32), 4)
    backend = CpuBackend(1)
    plan = plan_memory(param, context(backend))
    with CPU.activate():
        counting = CountingBackend()
        counting.mask_dtype = backend.mask_dtype
        net = Net(param, context(counting))
        bind(plan, net)
        net.prepare()
        assert net.parameters.diff is not None
        net.forward()
        net.backward()
    slack = 0.01 * plan.total()
    assert counting.counted == pytest.approx(plan.total(), abs=slack)


def test_kinds_of_memory():
    param = parse_text(HEAD + ZOO["bias"] + TAIL, caffe_pb2.NetParameter(), "net")
    lasting = plan_memory(param, context()).lasting
    assert lasting[INPUTS] == 4 * (2 * 4 * 36 + 2)
    sizes = [4 * 4 * 9, 4, 144 * 3, 3] + [4 * 36]
    assert lasting[PARAMETERS] >= 4 * sum(sizes[:4])
    assert lasting[GRADIENTS] == lasting[PARAMETERS]
    assert lasting[BLOBS] > 0
    assert lasting[BUFFERS] > 0


def test_a_gpus_half_precision_halves_the_blobs():
    param = model("resnet18/train_val.prototxt", (3, 64, 64), 4)
    whole = plan_memory(param, context(MetaBackend()), fuse=True)
    param.default_forward_type = param.default_backward_type = caffe_pb2.FLOAT16
    half = plan_memory(param, context(MetaBackend()), fuse=True)
    assert half.arena == pytest.approx(whole.arena / 2, rel=0.1)
    assert half.lasting["half copies"] == half.lasting[PARAMETERS] / 2
    assert whole.lasting["half copies"] == 0


def test_what_is_folded_has_no_copies_in_half_precision():
    """Only the last layer, an inner product of 512 to 1000, reads its parameters as they are."""
    param = read_net(MODELS / "resnet18/deploy.prototxt")
    param.default_forward_type = param.default_backward_type = caffe_pb2.FLOAT16
    lasting = plan_memory(param, context(MetaBackend(), caffe_pb2.TEST), fuse=True).lasting
    assert lasting["half copies"] == pytest.approx(2 * (512 * 1000 + 1000), rel=0.01)
    assert lasting["half copies"] < lasting[PARAMETERS] / 20


def test_data_are_not_opened_where_their_shape_is_known():
    param = read_net(MODELS / "lenet/train_test.prototxt")
    with pytest.raises(DataError, match="does not exist"):
        plan_memory(param, context())
    known = replace(context(), sample_shapes={"data": (1, 28, 28), "label": ()})
    plan = plan_memory(param, known)
    assert "data data" in {slot.title for slot in plan.slots}  # a layer that reads ahead writes it in every pass
    shadow = Net(param, replace(known, backend=MetaBackend()))
    assert sample_shapes(shadow) == {"data": (1, 28, 28), "label": ()}
    assert known.first_sample is None
    slot = ImageSlot(64, 1, 28, 28)
    block = passes_per_block(slot)
    labels = plan.lasting[INPUTS] - slot.size * block * blocks_needed(1, block)
    assert labels == 64 * 4
    assert expected_bytes([(64, 1, 28, 28), (64,)], False, 1) == 4 * 64 * 4 * (28 * 28 + 1)


def test_a_workspace_that_fits_between_the_blobs_costs_nothing():
    plan = plan_memory(model("resnet18/train_val.prototxt", (3, 224, 224), 32), context(MetaBackend()), fuse=True)
    fixed = MetaBackend().workspace(0)
    largest = plan.workspace(share=False)
    assert max(plan.workspaces.values()) == largest >= plan.workspace() >= plan.least_workspace == fixed
    first = plan.steps.index("forward of layer 'conv1' (Convolution)")  # large, and there is nothing else yet
    alone = replace(plan, workspaces={first: plan.gaps[first][1] - plan.gaps[first][0]})
    assert alone.workspace() == fixed < alone.workspace(share=False)
    tight = replace(plan, gaps=[(0, 0)] * len(plan.steps))
    assert tight.workspace() == largest
    assert replace(plan, workspaces={}).workspace() == fixed


def test_the_description():
    plan = plan_memory(model("lenet/train_test.prototxt", (1, 28, 28), 64), context(MetaBackend()))
    line = describe(plan, 1, "GPU 0")
    blobs = f"blobs {plan.arena / 2**20:.1f} MiB (shared; {plan.alone / 2**20:.1f} MiB without sharing)"
    assert line.startswith(f"Memory: {plan.total(1) / 2**20:.1f} MiB on GPU 0: {blobs}, ")
    assert "parameters 1.6 MiB, gradients 1.6 MiB, history 1.6 MiB" in line
    assert "copies" not in line
    assert plan.steps[plan.peak] == "forward of layer 'pool1' (Pooling)"
    assert plan.at_peak()[0].title == "conv1 data"
    assert sum(aligned_bytes(slot.life.size) for slot in plan.at_peak()) == plan.bound


def test_too_little_memory_for_the_arena():
    plan = plan_memory(zoo("bias"), context())
    backend = CountingBackend()
    backend.limit = plan.arena - 1
    with pytest.raises(
        OutOfMemoryError, match=r"net '', which needs the most in .* of layer '.*' .*: no \d+ bytes: buy"
    ):
        plan.new_arena(backend)


# -- offsets in the arena --------------------------------------------------------------------------------


LIVES = st.lists(
    st.builds(
        lambda size, first, span: Lifetime(size, first, first + span),
        st.integers(0, 5000),
        st.integers(0, 20),
        st.integers(0, 8),
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(LIVES)
def test_offsets_keep_apart_what_meets(lives: list[Lifetime]):
    offsets, size = assign_offsets(lives)
    assert max(live_bytes(lives), default=0) <= size <= sum(aligned_bytes(life.size) for life in lives)
    for (a, begin), (b, other) in itertools.combinations(zip(lives, offsets, strict=True), 2):
        if a.overlaps(b):
            assert begin + a.size <= other or other + b.size <= begin
    for life, offset in zip(lives, offsets, strict=True):
        assert offset % ARENA_ALIGNMENT == 0
        assert 0 <= offset <= offset + life.size <= size


@settings(max_examples=100)
@given(LIVES, st.integers(0, 3000))
@example([Lifetime(1024, 0, 0), Lifetime(0, 0, 0)], 3000)
def test_gaps_are_free_and_none_is_wider(lives: list[Lifetime], behind: int):
    offsets, size = assign_offsets(lives)
    gaps = widest_gaps(lives, offsets, size + behind, 30)
    for step, (begin, end) in enumerate(gaps):
        taken = np.zeros(size + behind, bool)
        for life, offset in zip(lives, offsets, strict=True):
            if life.first <= step <= life.last:
                taken[offset : offset + aligned_bytes(life.size)] = True
        assert not taken[begin:end].any()
        widths = [len(list(run)) for free, run in itertools.groupby(taken) if not free]
        assert end - begin == max(widths, default=0)

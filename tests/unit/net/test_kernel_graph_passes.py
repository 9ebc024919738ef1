"""Forward passes whose calls of kernels the CPU captures and makes again without Python between layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forward_passes import HOST, NET, build, give

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.jit.kernel import KernelGraph
from caffepy.errors import DataError
from caffepy.layers.layer import LAYERS, import_layer_types
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor

CAPTURED = (
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
    CAPTURED
    + """
layer { name: "mvn" type: "MVN" bottom: "join" top: "mvn" }
layer { name: "flat" type: "Flatten" bottom: "mvn" top: "flat" }
layer { name: "last" type: "InnerProduct" bottom: "flat" top: "last"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
"""
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[KernelGraph]:
    """The graphs that CPUs capture."""
    found: list[KernelGraph] = []
    capture = CpuBackend.capture

    def noting(backend: CpuBackend, *works: Any) -> KernelGraph:
        found.append(capture(backend, *works))
        return found[-1]

    monkeypatch.setattr(CpuBackend, "capture", noting)
    return found


def outputs(runner: ForwardExecutor, seed: int) -> list[Any]:
    give(runner.net, seed)
    runner.forward()
    return [blob.host_data() for blob in runner.net.outputs.values()]


@pytest.mark.parametrize("text", [CAPTURED, MOVING])
@pytest.mark.parametrize("fuse", [True, False])
def test_passes_on_the_cpu_that_are_captured_give_the_same(text: str, fuse: bool) -> None:
    runner = ForwardExecutor(build(text=text, fuse=fuse, backend=CpuBackend(2)))
    eager = ForwardExecutor(build(text=text, fuse=fuse, backend=CpuBackend(1)), eager=True)
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
    *[
        ("Reshape", f"reshape_param {{ shape {{ {dims} }} }}")
        for dims in ("dim: 0 dim: -1", "dim: 3 dim: 2 dim: 5 dim: 5")
    ],
    ("Permute", "permute_param { order: 0 order: 2 order: 3 order: 1 }"),
    ("ShuffleChannel", "shuffle_channel_param { group: 3 }"),
    *[("Tile", f"tile_param {{ axis: {axis} tiles: 2 }}") for axis in (0, 1, 3)],
    ("BatchNorm", "batch_norm_param { use_global_stats: false }"),
    ("BatchNorm", ""),
    ("Bias", "bias_param { filler { type: 'gaussian' } }"),
    ("Concat", "bottom: 'data' concat_param { axis: 2 }"),
    *[
        (
            kind,
            f"convolution_param {{ num_output: 3 kernel_size: 3 stride: 2 pad: 1 {groups} "
            "weight_filler { type: 'xavier' } bias_filler { type: 'gaussian' } }",
        )
        for kind in ("Convolution", "Deconvolution", "DepthwiseConvolution", "ConvolutionDepthwise")
        for groups in (["", "group: 3"] if "Depthwise" not in kind else ["group: 3"])
    ],
    ("Crop", "bottom: 'small' crop_param { axis: 2 offset: 1 }"),
    ("Dropout", ""),
    *[("Eltwise", f"bottom: 'data' eltwise_param {{ operation: {kind} }}") for kind in ("SUM", "PROD", "MAX")],
    ("Eltwise", "bottom: 'data' eltwise_param { coeff: 2 coeff: -0.5 }"),
    *[
        ("InnerProduct", f"inner_product_param {{ num_output: 4 {more} weight_filler {{ type: 'xavier' }} }}")
        for more in ("", "axis: 2", "transpose: true bias_term: false")
    ],
    *[
        ("LRN", f"lrn_param {{ local_size: 3 norm_region: {region} beta: {beta} }}")
        for region in ("ACROSS_CHANNELS", "WITHIN_CHANNEL")
        for beta in (0.75, 0.6)
    ],
    *[
        ("Pooling", f"pooling_param {{ pool: {kind} {more} }}")
        for kind in ("MAX", "AVE")
        for more in ("kernel_size: 3 stride: 2 pad: 1", "global_pooling: true")
    ],
    ("PriorBox", "bottom: 'small' prior_box_param { min_size: 4 aspect_ratio: 2 variance: 0.1 }"),
    *[("ReLU", f"relu_param {{ negative_slope: {slope} }}") for slope in (0, 0.1)],
    ("Scale", "scale_param { bias_term: true filler { type: 'gaussian' } }"),
    ("Scale", "bottom: 'small' scale_param { axis: 0 }"),
    ("Interp", "interp_param { zoom_factor: 2 }"),
    ("Upsample", "upsample_param { scale: 2 }"),
    ("Pooling", "top: 'mask' pooling_param { pool: MAX kernel_size: 2 stride: 2 }"),
    ("Slice", "top: 'other' slice_param { axis: 2 slice_point: 2 }"),
    *[("Softmax", f"softmax_param {{ axis: {axis} }}") for axis in (1, 2, -1)],
    ("Split", "top: 'other'"),
    ("Correlation", "bottom: 'data' correlation_param { pad: 1 kernel_size: 1 max_displacement: 1 }"),
    ("Resample", "resample_param { height: 4 width: 7 }"),
    ("Downsample", "downsample_param { top_height: 3 top_width: 4 }"),
    ("ChannelNorm", ""),
    ("ExpMax", ""),
    ("Mean", "mean_param { operation: SUBTRACT value: 0.5 }"),
    ("PowerFile", ""),
    *[("BN", f"bn_param {{ {more} }}") for more in ("", "bn_mode: INFERENCE")],
    *[(kind, "") for kind in ("SeLUDropout", "Gather", "Scatter")],
    ("Reverse", "reverse_param { axis: 2 }"),
    ("Flip", "flip_param { flip_height: true }"),
    ("CropCenter", "crop_center_param { crop_size: 0 crop_size: 0 crop_size: 1 crop_size: 1 }"),
    ("Transpose", "transpose_param { dim: 1 dim: 0 dim: 3 dim: 2 }"),
]
BY_OTHERS = [
    ("Embed", "bottom: 'numbers' embed_param { input_dim: 7 num_output: 4 weight_filler { type: 'gaussian' } }"),
    ("Axpy", "bottom: 'factors' bottom: 'data' bottom: 'data'"),
    ("Scale", "bottom: 'data' bottom: 'factors' scale_param { axis: 0 }"),
    ("Bias", "bottom: 'data' bottom: 'factors' bias_param { axis: 0 }"),
    ("ROIPooling", "bottom: 'data' bottom: 'regions' roi_pooling_param { pooled_h: 2 pooled_w: 2 spatial_scale: 1 }"),
    ("Upsample", "bottom: 'data' bottom: 'mask' upsample_param { scale: 2 }"),
    ("Warp", "bottom: 'data' bottom: 'flow'"),
    ("SpatialTransformer", "bottom: 'data' bottom: 'theta'"),
    ("ROIAlign", "bottom: 'data' bottom: 'regions' roi_pooling_param { pooled_h: 2 pooled_w: 2 spatial_scale: 1 }"),
    ("ROIWarping", "bottom: 'data' bottom: 'regions' roi_warping_param { pooled_h: 2 pooled_w: 2 }"),
    (
        "PSROIAlign",
        "bottom: 'data' bottom: 'regions' psroi_align_param { output_dim: 3 group_size: 1 spatial_scale: 1 }",
    ),
    ("MaskPooling", "bottom: 'data' bottom: 'masks'"),
    ("MaskResize", "bottom: 'masks' mask_resize_param { output_height: 3 output_width: 7 }"),
    ("Pooling3D", "bottom: 'clip' pooling_param { kernel_size: 2 kernel_depth: 2 }"),
]
"""Layers whose first bottom is no image, or whose second one holds numbers of pixels, rows or samples."""
SHAPES = {
    "data": (2, 3, 4, 4),
    "factors": (2, 3),
    "numbers": (2, 5),
    "regions": (4, 5),
    "mask": (2, 3, 4, 4),
    "flow": (2, 2, 4, 4),
    "theta": (2, 6),
    "masks": (2, 1, 4, 4),
    "clip": (2, 3, 4, 4, 4),
}


def others(seed: int) -> dict[str, Any]:
    """Inputs of BY_OTHERS."""
    generator = np.random.default_rng(seed)
    found = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    found["numbers"] = generator.integers(0, 7, SHAPES["numbers"]).astype(np.float32)
    found["mask"] = generator.integers(0, 64, SHAPES["mask"]).astype(np.float32)
    found["regions"] = np.sort(generator.integers(0, 4, SHAPES["regions"])).astype(np.float32)
    found["regions"][:, 0] = generator.integers(0, 2, 4)
    return found


def runner_of(kind: str, settings: str, eager: bool) -> ForwardExecutor:
    text = "".join(
        f"layer {{ name: '{name}' type: 'Input' top: '{name}' input_param {{ shape {{ "
        f"{' '.join(f'dim: {size}' for size in shape)} }} }} }}"
        for name, shape in SHAPES.items()
        if name == "data" or f"'{name}'" in settings
    )
    text += f"layer {{ name: 'l' type: '{kind}' top: 'out' {settings} }}"
    return ForwardExecutor(build(text=text, fuse=False, backend=CpuBackend(2)), eager=eager)


def pass_of(runner: ForwardExecutor, given: dict[str, Any]) -> Any:
    for name, blob in runner.net.blobs.items():
        if name in given:
            runner.net.backend.from_host(given[name], blob.data)
    runner.forward()
    return runner.net.blobs["out"].host_data()


@pytest.mark.parametrize(("kind", "settings"), BY_OTHERS)
def test_layers_with_other_inputs_are_kernels_alone_and_compute_new_inputs(
    kind: str, settings: str, graphs: list[KernelGraph]
) -> None:
    runner, eager = (runner_of(kind, settings, each) for each in (False, True))
    for seed in range(5):
        np.testing.assert_array_equal(pass_of(runner, others(seed)), pass_of(eager, others(seed)))
    assert [(graph.host_works, graph.kernel_calls > 0) for graph in graphs] == [(0, True)]


@pytest.mark.parametrize(
    ("kind", "name", "value"), [("Embed", "numbers", 7), ("ROIPooling", "regions", 2), ("Upsample", "mask", 64)]
)
def test_indices_that_name_nothing_are_found_in_each_pass(kind: str, name: str, value: float) -> None:
    settings = next(each for other, each in BY_OTHERS if other == kind)
    runner = runner_of(kind, settings, False)
    for seed in range(5):
        wrong = others(seed)
        wrong[name].flat[0] = value
        if seed % 2:
            with pytest.raises(DataError, match="layer 'l'"):
                pass_of(runner, wrong)
        pass_of(runner, others(seed))


INPUTS = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 5 } } }
layer { name: "small" type: "Input" top: "small" input_param { shape { %s } } }
"""


def change_parameters(runner: ForwardExecutor) -> None:
    for blob in (blob for layer in runner.net.layers for blob in layer.blobs):
        blob.data[...] = np.random.default_rng(blob.count).uniform(0.5, 2, blob.shape)
    runner.parameters_changed()


@pytest.mark.parametrize(("kind", "settings"), ALONE)
def test_each_layer_that_is_captured_computes_new_inputs(kind: str, settings: str) -> None:
    small = "dim: 2" if kind == "Scale" else "dim: 2 dim: 3 dim: 3 dim: 3"
    text = INPUTS % small + f"layer {{ name: 'l' type: '{kind}' bottom: 'data' top: 'out' {settings} }}"
    runner, eager = (
        ForwardExecutor(build(text=text, fuse=False, backend=CpuBackend(2)), eager=e) for e in (False, True)
    )
    for seed in range(5):
        if seed == 3:
            for one in (runner, eager):
                change_parameters(one)
        for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
            np.testing.assert_array_equal(found, expected)


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


def test_the_heads_of_a_detector_do_not_cut_a_pass_into_parts(graphs: list[KernelGraph]) -> None:
    """Parts that are launched by themselves wake all threads anew."""
    runner, eager = (ForwardExecutor(build(text=HEADS, backend=CpuBackend(2)), eager=e) for e in (False, True))
    for seed in range(4):
        for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert [graph.host_works for graph in graphs] == [0]


def test_each_forward_pass_of_recordable_layers_is_tried() -> None:
    """Types that inherit `forward`, such as activations, need no case of their own."""
    import_layer_types()
    own = [name for name in LAYERS if LAYERS.get(name).__module__.startswith("caffepy.")]
    recorded = {name for name in own if LAYERS.get(name).recordable}
    tried = {kind for kind, _ in (*ALONE, *BY_OTHERS)} | {"Input"}
    assert tried <= recorded
    assert {LAYERS.get(name).forward for name in recorded} == {LAYERS.get(name).forward for name in tried}


def test_layers_are_called_in_the_first_pass_and_captured_in_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, called = ForwardExecutor(build(text=CAPTURED, backend=CpuBackend(2))), []
    forward = Net.forward_node
    monkeypatch.setattr(Net, "forward_node", lambda net, node: called.append(node.layer.name) or forward(net, node))
    counts = []
    for seed in range(5):
        outputs(runner, seed)
        counts.append(len(called))
        called.clear()
    assert counts == [len(runner.net.schedule)] * 2 + [0] * 3


def test_parameters_are_taken_over_by_passes_that_are_captured() -> None:
    runner = ForwardExecutor(build(text=CAPTURED, backend=CpuBackend(2)))
    eager = ForwardExecutor(build(text=CAPTURED, backend=CpuBackend(2)), eager=True)
    for change in range(2):
        for one in (runner, eager):
            one.net.backend.copy(one.net.layers[1].blobs[0].data * 2, one.net.layers[1].blobs[0].data)
            one.parameters_changed()
        for seed in range(3):
            for found, expected in zip(outputs(runner, seed), outputs(eager, seed), strict=True):
                np.testing.assert_array_equal(found, expected, err_msg=str(change))


def test_data_layers_keep_passes_from_being_captured() -> None:
    assert not ForwardExecutor(build(text=HOST, backend=CpuBackend(2))).wanted
    assert ForwardExecutor(build(backend=CpuBackend(2))).wanted
    assert ForwardExecutor(build()).wanted

"""ONNX operators as Caffe's layers: the numbers are onnxruntime's; what cannot be said is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, save_model
from onnx_nets import assert_round_trip, layer_net, net_of

from caffepy.errors import ConfigError, RunError
from caffepy.export.onnx_import.graph import IMPORTED_AS, IMPORTERS
from caffepy.export.onnx_import.read import build_imported, check_imported, read_onnx
from caffepy.formats.dialect import nvidia_field

RNG = np.random.default_rng(3)
IMAGE = (2, 4, 7, 6)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def save(
    path: Path, nodes: list[Any], inputs: dict[str, Any], constants: dict[str, np.ndarray], opset: int = 17
) -> Path:
    """A model whose output is `y`."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    target = path / "model.onnx"
    save_model(model, str(target))
    return target


def one(path: Path, operator: str, *operands: Any, opset: int = 17, **attributes: Any) -> Path:
    """A model of one node; tuples are inputs' shapes, arrays constants, "" inputs left out."""
    names, inputs, constants = [], {}, {}
    for index, operand in enumerate(operands):
        name = f"i{index}" if not isinstance(operand, str) else operand
        if isinstance(operand, tuple):
            inputs[name] = operand
        elif isinstance(operand, np.ndarray):
            constants[name] = operand
        names.append(name)
    return save(path, [helper.make_node(operator, names, ["y"], name="it", **attributes)], inputs, constants, opset)


def types_of(path: Path) -> list[str]:
    """The imported net's layer types, after a comparison within 1e-5."""
    param, net = build_imported(path, "net")
    assert not nvidia_field(param), "a BatchNorm beside it would get the eps of NVIDIA's dialect"
    assert all(one.relative <= 1e-5 for one in check_imported(path, net)), check_imported(path, net)
    return [layer.type for layer in param.layer if layer.type != "Input"]


CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], list[str] | None]] = [
    ("Conv", (IMAGE, floats(6, 2, 3, 3), floats(6)), {"group": 2, "pads": [1, 1, 1, 1]}, ["Convolution"]),
    ("Conv", (IMAGE, floats(6, 4, 3, 2)), {"pads": [0, 0, 1, 2], "strides": [2, 2]}, ["Convolution"]),
    ("Conv", (IMAGE, floats(6, 4, 3, 2)), {"pads": [2, 1, 0, 0], "strides": [2, 3]}, ["Convolution"]),
    ("Conv", (IMAGE, floats(6, 4, 2, 2)), {"pads": [2, 0, 0, 2], "dilations": [2, 2]}, ["Convolution"]),
    ("Conv", (IMAGE, floats(6, 4, 3, 3)), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, ["Convolution"]),
    ("Conv", ((2, 4, 9), floats(6, 4, 3)), {"pads": [1, 1]}, ["Convolution"]),
    ("ConvTranspose", (IMAGE, floats(4, 3, 3, 3)), {"strides": [2, 2], "pads": [1] * 4}, ["Deconvolution"]),
    (
        "ConvTranspose",
        (IMAGE, floats(4, 3, 3, 3)),
        {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]},
        ["Deconvolution", "Slice", "Slice", "Silence"],
    ),
    ("ConvTranspose", (IMAGE, floats(4, 3, 2, 2)), {"strides": [2, 2], "output_padding": [1, 1]}, ["Deconvolution"]),
    ("Gemm", ((2, 5), floats(3, 5), floats(3)), {"transB": 1, "alpha": 0.5, "beta": 2.0}, ["InnerProduct"]),
    ("Gemm", ((2, 5), floats(5, 3), floats(1)), {}, ["InnerProduct"]),
    ("MatMul", ((2, 4, 5), floats(5, 3)), {}, ["InnerProduct"]),
    ("BatchNormalization", (IMAGE, *(np.abs(floats(4)) for _ in range(4))), {"epsilon": 1e-3}, ["BatchNorm", "Scale"]),
    ("LRN", (IMAGE,), {"size": 3, "alpha": 0.1, "bias": 2.0}, ["LRN"]),
    ("MaxPool", (IMAGE,), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}, ["Pooling"]),
    ("MaxPool", (IMAGE,), {"kernel_shape": [2, 2], "strides": [2, 2]}, ["Pooling"]),
    ("MaxPool", ((1, 2, 9),), {"kernel_shape": [3], "strides": [2]}, ["Reshape", "Pooling", "Reshape"]),
    ("AveragePool", (IMAGE,), {"kernel_shape": [3, 3], "pads": [1] * 4}, ["Pooling", "Scale"]),
    ("AveragePool", (IMAGE,), {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1}, ["Pooling"]),
    (
        "AveragePool",
        ((1, 2, 5, 4, 3),),
        {"kernel_shape": [3, 1, 1], "pads": [1, 0, 0, 1, 0, 0]},
        ["Reshape", "Pooling", "Scale", "Reshape"],
    ),
    ("GlobalAveragePool", (IMAGE,), {}, ["Pooling"]),
    ("GlobalMaxPool", ((2, 3, 5),), {}, None),
    ("ReduceMean", (IMAGE,), {"axes": [2, 3]}, ["Pooling"]),
    ("ReduceMean", (IMAGE,), {"axes": [-1, -2], "keepdims": 0}, ["Pooling", "Flatten"]),
    ("ReduceMean", (IMAGE,), {"axes": [1]}, ["Permute", "Reduction", "Reshape"]),
    ("ReduceMax", (IMAGE,), {"axes": [1], "keepdims": 0}, None),
    ("ReduceSum", (IMAGE, ints(2, 3)), {}, ["Pooling", "Power"]),
    ("ReduceL2", (IMAGE,), {"axes": [1]}, None),
    ("Softmax", (IMAGE,), {"axis": 1}, ["Softmax"]),
    ("LogSoftmax", ((2, 5),), {}, ["Softmax", "Log"]),
    ("Clip", (IMAGE, np.array(0, np.float32), np.array(6, np.float32)), {}, ["Clip"]),
    ("Clip", (IMAGE, np.array(0, np.float32), ""), {}, ["ReLU"]),
    ("Relu", (IMAGE,), {}, ["ReLU"]),
    ("LeakyRelu", (IMAGE,), {"alpha": 0.2}, ["ReLU"]),
    ("PRelu", (IMAGE, floats(4, 1, 1)), {}, ["PReLU"]),
    ("PRelu", (IMAGE, floats(1)), {}, ["PReLU"]),
    ("Elu", (IMAGE,), {"alpha": 0.5}, ["ELU"]),
    ("Selu", (IMAGE,), {}, ["ELU", "Power"]),
    ("HardSigmoid", (IMAGE,), {"alpha": 1 / 6}, ["Power", "Clip"]),
    ("HardSwish", (IMAGE,), {}, ["HardSwish"]),
    *((name, (IMAGE,), {}, None) for name in ("Sigmoid", "Tanh", "Abs", "Exp", "Softplus", "Neg", "Reciprocal")),
    ("Pow", (IMAGE, np.array(2, np.float32)), {}, ["Power"]),
    ("Add", (IMAGE, IMAGE), {}, ["Eltwise"]),
    ("Add", (IMAGE, floats(4, 1, 1)), {}, ["Bias"]),
    ("Add", (floats(1, 1, 1, 6), IMAGE), {}, ["Bias"]),
    ("Add", (IMAGE, np.array(2, np.float32)), {}, ["Power"]),
    ("Add", ((2, 4, 1, 1), IMAGE), {}, ["Flatten", "Bias"]),
    ("Mul", (IMAGE, (2, 4, 1, 1)), {}, ["Flatten", "Scale"]),
    ("Mul", ((1, 4, 7, 6), (1, 1, 7, 6)), {}, None),
    ("Mul", ((2, 4, 1, 6), (4, 7, 1)), {}, None),
    ("Mul", ((2, 1, 7, 6), floats(4, 1, 1)), {}, ["Tile", "Scale"]),
    ("Sub", (IMAGE, IMAGE), {}, ["Eltwise"]),
    ("Sub", (floats(4, 1, 1), IMAGE), {}, ["Power", "Bias"]),
    ("Sub", (IMAGE, floats(7, 6)), {}, ["Bias"]),
    ("Div", (IMAGE, np.abs(floats(4, 1, 1)) + 1), {}, ["Scale"]),
    ("Sum", (IMAGE, IMAGE, IMAGE), {}, ["Eltwise", "Eltwise"]),
    ("Max", (IMAGE, IMAGE), {}, ["Eltwise"]),
    ("Min", (IMAGE, IMAGE), {}, None),
    ("Max", (IMAGE, np.array(0, np.float32)), {}, ["ReLU"]),
    ("Min", (IMAGE, np.array(0.5, np.float32)), {}, ["Clip"]),
    ("Concat", (IMAGE, (2, 1, 7, 6)), {"axis": 1}, ["Concat"]),
    ("Concat", (IMAGE, floats(2, 1, 7, 6)), {"axis": 1}, ["Parameter", "Concat"]),
    ("Flatten", (IMAGE,), {}, ["Flatten"]),
    ("Flatten", (IMAGE,), {"axis": 2}, ["Reshape"]),
    ("Reshape", (IMAGE, ints(0, 2, -1, 6)), {}, ["Reshape"]),
    ("Squeeze", ((2, 4, 1, 1), ints(2, 3)), {}, ["Flatten"]),
    ("Unsqueeze", ((2, 4), ints(-1, 1)), {}, ["Reshape"]),
    ("Transpose", (IMAGE,), {"perm": [0, 2, 3, 1]}, ["Permute"]),
    ("Slice", (IMAGE, ints(1, -4), ints(3, 2**62), ints(1, 3)), {}, ["Slice", "Slice", "Silence"]),
    ("Slice", (IMAGE, ints(1, 0), ints(7, 6), ints(2, 3), ints(2, 3)), {}, ["Slice", "Convolution", "Silence"]),
    ("Gather", (IMAGE, np.array(-2)), {"axis": 1}, ["Slice", "Reshape", "Silence"]),
    ("Expand", ((2, 4, 1, 1), ints(2, 4, 3, 2)), {}, ["Tile", "Tile"]),
    ("Tile", (IMAGE, ints(1, 2, 1, 3)), {}, ["Tile", "Tile"]),
    ("Pad", (IMAGE, ints(0, 0, 1, 2, 0, 0, 3, 0)), {}, ["Convolution"]),
    ("Pad", (IMAGE, ints(0, 0, -1, 1, 0, -1, 0, 1)), {}, ["Slice", "Slice", "Convolution", "Silence"]),
    ("DepthToSpace", (IMAGE,), {"blocksize": 2}, None),
    ("DepthToSpace", (IMAGE,), {"blocksize": 2, "mode": "CRD"}, None),
    ("SpaceToDepth", ((2, 3, 4, 6),), {"blocksize": 2}, None),
    ("Dropout", (IMAGE,), {}, ["Split"]),
    (
        "Resize",
        (IMAGE, "", np.float32([1, 1, 2, 2])),
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
        ["Deconvolution"],
    ),
    (
        "Resize",
        (IMAGE, "", "", ints(2, 4, 9, 11)),
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        ["Interp"],
    ),
    *(
        ("Resize", (IMAGE, "", "", ints(2, 4, 10, 9)), {"mode": mode, "coordinate_transformation_mode": how}, None)
        for mode in ("nearest", "linear", "cubic")
        for how in ("half_pixel", "pytorch_half_pixel", "asymmetric")
    ),
    ("Resize", (IMAGE, "", np.float32([1, 1, 1.5, 0.7])), {"mode": "linear"}, None),
    ("MaxRoiPool", (IMAGE, floats(2, 5) * 0), {"pooled_shape": [2, 2]}, ["Parameter", "ROIPooling"]),
]


@pytest.mark.parametrize(
    ("operator", "operands", "attributes", "types"), CASES, ids=[str(i) + c[0] for i, c in enumerate(CASES)]
)
def test_an_operator_gives_its_numbers(operator, operands, attributes, types, tmp_path: Path):
    found = types_of(one(tmp_path, operator, *operands, **attributes))
    assert types is None or found == types


POOL = st.tuples(*[st.integers(0, 2)] * 4)


@settings(max_examples=60)
@given(
    operator=st.sampled_from(["MaxPool", "AveragePool"]),
    size=st.tuples(*[st.integers(2, 9)] * 2),
    kernel=st.tuples(*[st.integers(1, 4)] * 2),
    stride=st.tuples(*[st.integers(1, 3)] * 2),
    pads=POOL,
    include=st.integers(0, 1),
)
@example(operator="MaxPool", size=(4, 2), kernel=(2, 1), stride=(3, 2), pads=(0, 0, 0, 0), include=1)
def test_all_windows_of_pooling(tmp_path_factory, operator, size, kernel, stride, pads, include):
    assume(all(pads[i] < kernel[i % 2] for i in range(4)))
    assume(all(size[i] + pads[i] + pads[i + 2] >= kernel[i] for i in range(2)))
    more = {"count_include_pad": include} if operator == "AveragePool" else {"ceil_mode": include}
    path = tmp_path_factory.mktemp("pool")
    model = one(path, operator, (1, 2, *size), kernel_shape=kernel, strides=stride, pads=pads, **more)
    try:
        types_of(model)
    except ConfigError as error:
        assert "Caffe's pooling has fewer windows" in str(error)
        # Caffe leaves out windows behind the image along both axes where either has padding. It rounds both axes alike,
        # and rounded up, a stride above the kernel can begin a window behind the image.
        rounds_up = bool(more.get("ceil_mode"))
        assert any(pads) or (rounds_up and any(step > side for step, side in zip(stride, kernel, strict=True)))


def test_squeeze_and_excitation_becomes_scale(tmp_path: Path):
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Conv", ["p", "w"], ["c"]),
        helper.make_node("Sigmoid", ["c"], ["s"]),
        helper.make_node("Mul", ["x", "s"], ["y"]),
    ]
    path = save(tmp_path, nodes, {"x": IMAGE}, {"w": floats(4, 4, 1, 1)})
    assert types_of(path) == ["Pooling", "Convolution", "Sigmoid", "Flatten", "Scale"]


def test_swish_and_channel_shuffle_become_one_layer(tmp_path: Path):
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["s"]),
        helper.make_node("Mul", ["x", "s"], ["a"]),
        helper.make_node("Shape", ["a"], ["size"]),
        helper.make_node("Gather", ["size", "zero"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["a", "to"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=[0, 2, 1, 3, 4]),
        helper.make_node("Reshape", ["c", "back"], ["y"]),
    ]
    constants = {"zero": np.array(0), "axis": ints(0), "rest": ints(2, 2, 7, 6), "back": ints(2, -1, 7, 6)}
    assert types_of(save(tmp_path, nodes, {"x": IMAGE}, constants)) == ["Swish", "ShuffleChannel"]


def test_padding_goes_into_the_convolution_behind_it(tmp_path: Path):
    nodes = [helper.make_node("Pad", ["x", "p"], ["q"]), helper.make_node("Conv", ["q", "w"], ["y"], strides=[2, 2])]
    constants = {"p": ints(0, 0, 0, 0, 0, 0, 1, 1), "w": floats(3, 4, 3, 3)}
    assert types_of(save(tmp_path, nodes, {"x": IMAGE}, constants)) == ["Convolution"]


def test_scale_and_bias_are_merged_and_fold_merges_more(tmp_path: Path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Mul", ["a", "m"], ["b"]),
        helper.make_node("Add", ["b", "t"], ["y"]),
    ]
    path = save(tmp_path, nodes, {"x": IMAGE}, {"w": floats(3, 4, 1, 1), "m": floats(3, 1, 1), "t": floats(3, 1, 1)})
    assert types_of(path) == ["Convolution", "Scale"]
    param, net = build_imported(path, "net", fold=True)
    assert [layer.type for layer in param.layer] == ["Input", "Convolution"]
    check_imported(path, net)


def test_outputs_that_others_read_and_inputs_without_a_batch(tmp_path: Path):
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "a")],
    )
    path = tmp_path / "m.onnx"
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    _, net = build_imported(path, "net", batch=4)
    assert set(net.outputs) == {"y", "a"}
    assert net.blobs["x"].shape == (4, 3)
    assert len(check_imported(path, net)) == 2


def test_all_nodes_that_cannot_be_said_are_listed(tmp_path: Path):
    nodes = [
        helper.make_node("Erf", ["x"], ["a"], name="gelu"),
        helper.make_node("Pad", ["x", "p"], ["b"], name="mirror", mode="reflect"),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("NonZero", ["c"], ["y"]),
    ]
    path = save(tmp_path, nodes, {"x": IMAGE}, {"p": ints(0, 0, 1, 1, 0, 0, 1, 1)})
    said = r"3 nodes cannot be said by Caffe's layers: 'gelu' .Erf.: Caffe has no layer for it; 'y' .NonZero.*'mirror' "
    with pytest.raises(ConfigError, match=said):
        read_onnx(path, "net")


def test_a_net_that_differs_is_refused(tmp_path: Path):
    path = one(tmp_path, "Elu", IMAGE)
    _, net = build_imported(path, "net")
    net.layers[1].param.elu_param.alpha = 3
    net.layers[1].setup([], [])
    with pytest.raises(RunError, match="output 'y': largest difference .* above the limit of 0.0001"):
        check_imported(path, net)


def test_every_operator_is_documented_and_most_are_tried():
    assert set(IMPORTERS) == set(IMPORTED_AS)
    tried = {case[0] for case in CASES}
    assert set(IMPORTERS) - tried <= {
        "Sqrt",
        "Log",
        "Identity",
        "Cast",
        "ReduceL1",
        "ReduceSumSquare",
        "Upsample",
        "Split",
        "ArgMax",
    }


# -- and back ----------------------------------------------------------------------------------------------

ROUND = [
    ('type: "MVN"', (IMAGE,)),
    ('type: "Normalize" norm_param { across_spatial: false }', (IMAGE,)),
    ('type: "Interp" interp_param { height: 10 width: 9 }', (IMAGE,)),
    ('type: "LSTM" recurrent_param { num_output: 4 }', ((3, 2, 5), (3, 2))),
    ('type: "RNN" recurrent_param { num_output: 4 }', ((3, 2, 5), (3, 2))),
    ('type: "LSTMUnit" top: "c" top: "h"', ((1, 2, 4), (1, 2, 16), (1, 2))),
    ('type: "Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 1 }', ((1, 2, 8, 8),)),
    ('type: "Slice" top: "a" top: "b"', (IMAGE,)),
]


@pytest.mark.parametrize(("layer", "shapes"), ROUND, ids=[layer for layer, _ in ROUND])
def test_an_exported_layer_comes_back(layer: str, shapes: tuple[tuple[int, ...], ...], tmp_path: Path):
    kind = layer.split('"')[1]
    assert kind in [one.type for one in assert_round_trip(layer_net(layer, *shapes), tmp_path).layers]


def test_an_exported_detector_comes_back(tmp_path: Path):
    text = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 12 dim: 12 } } }
    layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
      convolution_param { num_output: 8 kernel_size: 3 stride: 2 } }
    layer { name: "norm" type: "Normalize" bottom: "conv" top: "norm" norm_param { across_spatial: false } }
    layer { name: "loc" type: "Convolution" bottom: "norm" top: "loc"
      convolution_param { num_output: 8 kernel_size: 1 } }
    layer { name: "locp" type: "Permute" bottom: "loc" top: "locp"
      permute_param { order: 0 order: 2 order: 3 order: 1 } }
    layer { name: "locf" type: "Flatten" bottom: "locp" top: "locf" }
    layer { name: "conf" type: "Convolution" bottom: "norm" top: "conf"
      convolution_param { num_output: 6 kernel_size: 1 } }
    layer { name: "confp" type: "Permute" bottom: "conf" top: "confp"
      permute_param { order: 0 order: 2 order: 3 order: 1 } }
    layer { name: "confr" type: "Reshape" bottom: "confp" top: "confr"
      reshape_param { shape { dim: 0 dim: -1 dim: 3 } } }
    layer { name: "soft" type: "Softmax" bottom: "confr" top: "soft" softmax_param { axis: 2 } }
    layer { name: "conff" type: "Flatten" bottom: "soft" top: "conff" }
    layer { name: "prior" type: "PriorBox" bottom: "norm" bottom: "data" top: "prior"
      prior_box_param { min_size: 4 max_size: 8 variance: 0.1 } }
    layer { name: "out" type: "DetectionOutput" bottom: "locf" bottom: "conff" bottom: "prior" top: "out"
      detection_output_param { num_classes: 3 nms_param { nms_threshold: 0.45 top_k: 20 } keep_top_k: 10
        confidence_threshold: 0.01 code_type: CENTER_SIZE } }
    """
    net = assert_round_trip(net_of(text), tmp_path, 2e-5)
    assert {"DetectionOutput", "Normalize", "Parameter"} <= {layer.type for layer in net.layers}

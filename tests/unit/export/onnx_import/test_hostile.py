"""ONNX files from strangers: each mistake is one line that says what was found and where."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from caffepy.errors import ConfigError, one_line
from caffepy.export.onnx_import.read import read_onnx


def model(nodes: list[object], constants: list[TensorProto] | None = None, shape: object = (1, 4)) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants or [],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def node(kind: str, inputs: list[str], output: str = "y", **attributes: object) -> object:
    return helper.make_node(kind, inputs, [output], name=f"n{output}", **attributes)


def refuse(folder: Path, content: ModelProto | bytes, match: str) -> None:
    path = folder / "m.onnx"
    path.write_bytes(content if isinstance(content, bytes) else content.SerializeToString())
    with pytest.raises(ConfigError, match=match) as caught:
        read_onnx(path, "net")
    assert str(caught.value) == one_line(str(caught.value))


def tensor(values: np.ndarray, name: str = "w") -> TensorProto:
    return numpy_helper.from_array(values, name)


def test_what_is_no_model(tmp_path: Path):
    refuse(tmp_path, b"\xff" * 40, "not an ONNX model, or damaged")
    refuse(tmp_path, b"", "has no graph with nodes")
    with pytest.raises(ConfigError, match="cannot be read: "):
        read_onnx(tmp_path / "absent.onnx", "net")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a FIFO"):
        read_onnx(tmp_path / "pipe", "net")


def test_graphs_that_are_none(tmp_path: Path):
    refuse(
        tmp_path,
        model([node("Add", ["x", "b"], "a"), node("Neg", ["a"], "b"), node("Neg", ["b"])]),
        "node 'na' depends on itself: the graph has a cycle",
    )
    refuse(tmp_path, model([node("Neg", ["x"]), node("Abs", ["x"])]), "the value 'y' is made more than once")
    refuse(tmp_path, model([node("Neg", ["z"])]), "node 'ny' reads 'z', which nothing gives")
    refuse(tmp_path, model([node("Neg", ["x"], "a")]), "output 'y' does not depend on the inputs")
    other = model([node("Neg", ["x"])])
    del other.opset_import[:]
    refuse(tmp_path, other, "names no version of ONNX's operators")


def test_inputs_that_no_net_takes(tmp_path: Path):
    refuse(
        tmp_path, model([node("Neg", ["x"])], shape=(1, "C")), "input 'x' leaves axes open; give its shape with --shape"
    )
    refuse(tmp_path, model([node("Neg", ["x"])], shape=(2**20, 2**20)), "at most 2147483647 elements")
    text = model([node("Neg", ["x"])])
    text.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    refuse(tmp_path, text, "input 'x' is no tensor of floats")


def test_tensors_that_are_not_whole(tmp_path: Path):
    def changed(**fields: object) -> ModelProto:
        weights = tensor(np.ones((4, 3), np.float32))
        for name, value in fields.items():
            if name == "dims":
                weights.dims[:] = value
            else:
                setattr(weights, name, value)
        return model([node("MatMul", ["x", "w"])], [weights])

    refuse(tmp_path, changed(dims=[4, 30000]), r"tensor 'w' has not the values that its shape \[4, 30000\] needs")
    refuse(tmp_path, changed(dims=[2**31, 2**31]), "tensor 'w' has the shape .* at most 2147483647 elements are read")
    refuse(tmp_path, changed(dims=[-4, -3]), r"tensor 'w' has the shape \[-4, -3\]")
    refuse(tmp_path, changed(data_type=TensorProto.STRING), "tensor 'w' is of the type 8, which holds no numbers")
    refuse(tmp_path, changed(data_type=77), "tensor 'w' is of the type 77")


def external(**entries: str) -> ModelProto:
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 3], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        weights.external_data.add(key=key, value=value)
    return model([node("MatMul", ["x", "w"])], [weights])


def test_external_data_only_from_the_models_folder(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    (tmp_path / "outside").write_bytes(values.tobytes())
    (folder / "inside").write_bytes(b"1234" + values.tobytes())
    (folder / "link").symlink_to(tmp_path / "outside")
    for location in ("../outside", str(tmp_path / "outside"), "link", "", "a\0b"):
        refuse(folder, external(location=location), "tensor 'w' lies in .* which is not in the model's folder")
    refuse(folder, external(location="absent"), "absent, which cannot be read")
    refuse(folder, external(location="inside", offset="9"), "needs 48 bytes from 9 on of inside, which has 52")
    refuse(folder, external(location="inside", offset="-4"), "needs 48 bytes from -4")
    refuse(folder, external(location="inside", offset="x"), "has not the values")
    path = folder / "m.onnx"
    path.write_bytes(external(location="inside", offset="4").SerializeToString())
    net = read_onnx(path, "net")
    assert list(net.layer[1].blobs[0].data) == list(values.T.reshape(-1))


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([node("ConstantOfShape", ["huge"], "c"), node("Add", ["x", "c"])], "it makes a constant of the shape"),
        ([node("Expand", ["x", "huge"])], "'ny' .Expand."),
        ([node("Tile", ["w", "huge2"], "c"), node("Add", ["x", "c"])], "it makes a constant of the shape"),
        (
            [node("Range", ["zero", "million", "step"], "c"), node("Add", ["x", "c"])],
            "it makes a constant of the shape",
        ),
        ([node("Reshape", ["x", "huge"])], "cannot be reshaped to"),
        ([node("Pad", ["x", "huge2"])], "'ny' .Pad."),
        ([node("Resize", ["x", "", "", "huge"])], "it resizes something else than an image"),
        ([node("Softmax", ["x"], axis=9)], "axis 9 does not exist among 2"),
        ([node("Transpose", ["x"], perm=[0, 0])], r"its perm \[0, 0\] does not name each"),
        ([node("If", ["x"])], "'ny' .If.: Caffe has no layer for it"),
        ([node("MatMul", ["x", "x"])], "its input 'x' is computed; only a constant can be imported"),
        ([node("MaxPool", ["x"], kernel_shape=[2, 2])], "its image has 0 spatial axes"),
        ([node("Conv", ["x", "w"])], "its image has 0 spatial axes"),
        ([node("LRN", ["x"], size=4)], "local_size is 4, but must be odd"),
        ([node("Gemm", ["x", "w"], transB="no")], "its attribute transB is 'no', no whole number"),
        ([node("Gemm", ["x"])], "its input 1 is missing"),
        ([node("LeakyRelu", ["x"], alpha="much")], "its attribute alpha is 'much', no number"),
        ([node("Split", ["x"], split=[1.5, 2.5])], "its attributes or constants do not fit|do not make up"),
        ([node("Div", ["step", "zero"], "c"), node("Add", ["x", "c"])], "it divides by 0"),
    ],
)
def test_nodes_that_ask_for_the_impossible(nodes: list[object], match: str, tmp_path: Path):
    numbers = {"huge": [2**40, 2**40], "huge2": [2**30, 2**30], "w": [[1.0] * 3] * 4}
    constants = [tensor(np.array(v, np.float32 if name == "w" else np.int64), name) for name, v in numbers.items()]
    scalars = {"zero": 0, "million": 2**50, "step": 1}
    constants += [tensor(np.array(value, np.int64), name) for name, value in scalars.items()]
    refuse(tmp_path, model(nodes, constants), match)


@pytest.mark.parametrize(
    "param", ['type: "Python" python_param { module: "os" layer: "x" }', 'type: "HDF5Output"', "{"]
)
def test_metadata_bring_back_no_other_layers_than_were_written(param: str, tmp_path: Path):
    hostile = model([node("Neg", ["x"])])
    text = json.dumps({"param": param, "inputs": ["x"], "outputs": ["y"], "parameters": []})
    helper.set_model_props(hostile, {"caffepy.layer.evil": text})
    refuse(tmp_path, hostile, "its description (names the layer type|is no layer)")


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"param": 1}', '{"param": "", "inputs": 3, "outputs": [], "parameters": []}']
)
def test_metadata_of_others_are_left_alone(text: str, tmp_path: Path):
    other = model([node("Neg", ["x"])])
    helper.set_model_props(other, {"caffepy.layer.other": text})
    path = tmp_path / "m.onnx"
    path.write_bytes(other.SerializeToString())
    assert [layer.type for layer in read_onnx(path, "net").layer] == ["Input", "Power"]

"""ONNX files from strangers: each mistake is one line that says what was found and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

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
    "text", ["[]", "{", '{"param": 1}', '{"param": "", "inputs": 3, "outputs": [], "parameters": []}']
)
def test_metadata_of_others_are_left_alone(text: str, tmp_path: Path):
    other = model([node("Neg", ["x"])])
    helper.set_model_props(other, {"caffepy.layer.other": text})
    path = tmp_path / "m.onnx"
    path.write_bytes(other.SerializeToString())
    assert [layer.type for layer in read_onnx(path, "net").layer] == ["Input", "Power"]

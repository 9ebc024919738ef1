"""Weights in .safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx_nets import layer_text, net_of
from safetensors.numpy import load_file

from caffepy.cli.main import main
from caffepy.errors import RunError, SnapshotError
from caffepy.formats.caffemodel import read_caffemodel, read_layer_shapes, write_caffemodel
from caffepy.formats.safetensors import read_safetensors, read_tensors, write_tensors

NET = """
layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
layer { name: "a/conv.1" type: "Convolution" bottom: "x" top: "a" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "a" top: "b" }
layer { name: "slope" type: "PReLU" bottom: "b" top: "c" prelu_param { channel_shared: true } }
"""


def file_of(header: object, values: bytes = b"", length: int | None = None) -> bytes:
    """A file with a header, which may be no JSON, and values behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + values


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    """A tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_weights_return_as_they_were(tmp_path: Path):
    net, other, path = net_of(NET), net_of(NET), tmp_path / "net.safetensors"
    write_caffemodel(path, net.name, net.layers)
    names = ["a/conv.1.0", "a/conv.1.1", "bn.0", "bn.1", "bn.2", "slope.0"]
    assert list(read_tensors(path)) == names
    for layer in other.layers:
        for blob in layer.blobs:
            other.backend.fill(blob.data, 0)
    assert other.copy_trained_layers_from(read_caffemodel(path), str(path)) == ["a/conv.1", "bn", "slope"]
    for mine, theirs in zip(net.layers, other.layers, strict=True):
        for one, two in zip(mine.blobs, theirs.blobs, strict=True):
            np.testing.assert_array_equal(one.host_data(), two.host_data())
    shapes = [list(blob.shape.dim) for layer in read_layer_shapes(path).layer for blob in layer.blobs]
    assert shapes == [[4, 3, 3, 3], [4], [4], [4], [1], []]


def test_the_package_safetensors_reads_the_files(tmp_path: Path):
    arrays = {"x.0": np.arange(6, dtype=np.float32).reshape(2, 3), "y.0": np.float16([1.5]), "z.0": np.float32(7)}
    write_tensors(tmp_path / "a.safetensors", {name: np.asarray(values) for name, values in arrays.items()})
    found = load_file(tmp_path / "a.safetensors")
    for name, values in arrays.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("F64", np.array([1.5, -2.0], "<f8")),
        ("F16", np.array([1.5, -2.0], "<f2")),
        ("BF16", np.array([0x3FC0, 0xC000], "<u2")),
    ],
)
def test_other_types_become_float32(dtype: str, values: np.ndarray, tmp_path: Path):
    path = tmp_path / "net.safetensors"
    header = {"__metadata__": {"format": "pt"}, "fc.0": entry([2], 0, values.nbytes, dtype)}
    path.write_bytes(file_of(header, values.tobytes()))
    assert list(read_safetensors(path).layer[0].blobs[0].data) == [1.5, -2.0]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "header too small"),
        (file_of({}, length=2**62), "header too large"),
        (file_of(b"{}", length=1 << 24), "invalid header length"),
        (file_of(b"[" * 100_000), "invalid JSON in header"),
        (file_of(b"[]"), "invalid JSON in header"),
        (file_of({"a.0": {"dtype": "F32", "shape": [1]}}), "missing field `data_offsets`"),
        (file_of({"a.0": entry([2**40, 2**40], 0, 4)}, bytes(4)), "overflow computing buffer size"),
        (file_of({"a.0": entry([-1, -1], 0, 4)}, bytes(4)), "expected usize"),
        (file_of({"a.0": entry([True], 0, 4)}, bytes(4)), "expected usize"),
        (file_of({"a.0": entry([1], 0, 8, "I64")}, bytes(8)), "type 'I64'; F64, F32, F16, BF16 are read"),
        (file_of({"a.0": entry([1], 0, 4), "b.0": entry([1], 0, 4)}, bytes(4)), "invalid offset for tensor"),
        (file_of({"a.0": entry([1], 0, 4)}, bytes(8)), "file not fully covered"),
        (file_of({"a.0": entry([1], 0, 4)}, bytes(3)), "file not fully covered"),
        (file_of({"conv.weight": entry([1], 0, 4)}, bytes(4)), "'conv.weight' is not a parameter of a Caffe layer"),
        (file_of({"conv.100": entry([1], 0, 4)}, bytes(4)), "'conv.100' is not a parameter"),
        (file_of({"0": entry([1], 0, 4)}, bytes(4)), "'0' is not a parameter"),
    ],
)
def test_damaged_and_hostile_files(content: bytes, match: str, tmp_path: Path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=match):
        read_caffemodel(path)


def test_an_absent_file_is_named(tmp_path: Path):
    with pytest.raises(SnapshotError, match="none.safetensors: no such file"):
        read_caffemodel(tmp_path / "none.safetensors")


def test_two_layers_of_one_name_are_refused(tmp_path: Path):
    net = net_of(NET.replace('"slope"', '"bn"'))
    with pytest.raises(RunError, match="two layers named 'bn' have parameters"):
        write_caffemodel(tmp_path / "net.safetensors", net.name, net.layers)


def test_export_converts_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = layer_text('type: "InnerProduct" inner_product_param { num_output: 4 }', (2, 3))
    model, weights = tmp_path / "net.prototxt", [tmp_path / name for name in ("a.caffemodel", "b.safetensors")]
    model.write_text(text)
    write_caffemodel(weights[0], "small", net_of(text).layers)
    back = tmp_path / "c.caffemodel"
    assert main(["export", str(model), *map(str, weights)]) == 0
    assert main(["export", str(model), str(weights[1]), str(back)]) == 0
    assert "2 blobs, 16 numbers" in capsys.readouterr().out
    assert read_caffemodel(back).message.crc32c == read_caffemodel(weights[0]).message.crc32c
    assert main(["snapshot", "verify", str(weights[1])]) == 0
    assert "readable: 1 layers, 2 blobs; no checksum (the format has none)" in capsys.readouterr().out

"""Every registered layer type has a test that runs on a GPU where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import FORMS, Case, add_inputs
from google.protobuf import text_format
from layer_cases import ELSEWHERE, build_case, own_cases, pass_once, results, type_of
from training import CPU

from caffepy import pycaffe as caffe
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LAYERS, import_layer_types

TESTS = Path(__file__).parents[2]
FOLDERS = ("layers", "nvidia/layers", "nvidia/data", "nvidia/detection")
GOLDEN = [path for folder in FOLDERS for path in (TESTS / "golden" / folder).glob("*.npz")]
"""Their tests run on a GPU too, where there is one."""


def registered() -> set[str]:
    import_layer_types()
    return {name for name in LAYERS if LAYERS.get(name).__module__.startswith("caffepy.")}


def checked_on_each_backend() -> set[str]:
    """The types that tests of layers and forks run through `layer_harness`, which takes every backend present."""
    unit = Path(__file__).parents[1]
    texts = [path.read_text() for folder in ("layers", "forks") for path in (unit / folder).rglob("test_*.py")]
    return {
        kind for text in texts if "from layer_harness" in text for kind in re.findall(r"""type: ["'](\w+)["']""", text)
    }


def test_every_type_runs_on_a_gpu_in_some_test() -> None:
    golden = {
        layer.type
        for path in GOLDEN
        for layer in text_format.Parse(str(np.load(path)["prototxt"]), caffe_pb2.NetParameter()).layer
    }
    cases = {type_of(one) for one in own_cases()}
    assert registered() <= golden | cases | checked_on_each_backend() | ELSEWHERE.keys()


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_the_files_that_test_other_types_name_them(kind: str) -> None:
    assert re.search(rf"""["']{kind}["']""", (TESTS / ELSEWHERE[kind]).read_text())


@pytest.mark.parametrize("one", FORMS, ids=type_of)
def test_cases_give_numbers(one: Case) -> None:
    with CPU.activate():
        net = build_case(CPU, one, "FLOAT")
        pass_once(net)
        net.raise_device_errors()
        found = results(net)
    assert any(name.startswith("gradient of ") for name in found)
    for name, values in found.items():
        assert np.isfinite(values).all() and (values.any() or name.startswith("gradient of b")), name


def nets_by_type() -> dict[str, tuple[caffe_pb2.NetParameter, int]]:
    """For each type a net that has it and needs no files, with its phase."""
    found: dict[str, tuple[caffe_pb2.NetParameter, int]] = {}
    for one in own_cases():
        layer, net = text_format.Parse(one.layer, caffe_pb2.LayerParameter(name="L")), caffe_pb2.NetParameter()
        add_inputs(net, layer, one)
        net.layer.append(layer)
        found.setdefault(layer.type, (net, one.phase))
    for path in sorted(GOLDEN):
        with np.load(path) as numbers:
            net = text_format.Parse(str(numbers["prototxt"]), caffe_pb2.NetParameter())
            phase = caffe_pb2.Phase.Value(str(numbers["phase"]))
        if all(layer.bottom or layer.type in ("Input", "DummyData", "Parameter") for layer in net.layer):
            for layer in net.layer:
                found.setdefault(layer.type, (net, phase))
    return found


def tops_before_the_first_pass(net: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Write the inputs of a net and yield what its blobs hold in Caffe: 0, or the bottom's memory."""
    expected = {name: np.zeros(blob.shape, np.float32) for name, blob in net.blobs.items()}
    for name in net.inputs:
        expected[name][...] = np.arange(expected[name].size).reshape(expected[name].shape) + 1
        net.blobs[name].data[...] = expected[name]
    for layer, (name, tops) in zip(net.layers, net.top_names.items(), strict=True):
        bottoms = net.bottom_names[name]
        if layer.type == "Reshape" or (layer.type in ("Concat", "Slice") and len(bottoms) == len(tops) == 1):
            expected[tops[0]] = expected[bottoms[0]].reshape(expected[tops[0]].shape)
    yield from expected.items()


def test_tops_before_the_first_pass(tmp_path: Path) -> None:
    """Constants of DummyData have a test of their own; the tests of types that are not here look in `Runner`."""
    nets = nets_by_type()
    assert {"Concat", "Flatten", "Input", "Parameter", "Permute", "Reshape", "Slice", "Split"} <= nets.keys()
    for kind, (param, phase) in nets.items():
        (tmp_path / "net.prototxt").write_text(text_format.MessageToString(param))
        net = caffe.Net(str(tmp_path / "net.prototxt"), phase)
        for name, values in tops_before_the_first_pass(net):
            np.testing.assert_array_equal(net.blobs[name].data, values, err_msg=f"{kind}: {name}")

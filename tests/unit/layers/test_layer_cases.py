"""Every registered layer type has a test that runs on a GPU where there is one."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from field_cases import Case
from google.protobuf import text_format
from layer_cases import ELSEWHERE, MORE, build_case, own_cases, pass_once, results, type_of
from training import CPU

from caffepy.layers.core.base import LAYERS, import_layer_types
from caffepy.proto import caffe_pb2

TESTS = Path(__file__).parents[2]
FOLDERS = ("layers", "nvidia/layers", "nvidia/data", "nvidia/detection")
GOLDEN = [path for folder in FOLDERS for path in (TESTS / "golden" / folder).glob("*.npz")]
"""Their tests run on a GPU too, where there is one."""


def registered() -> set[str]:
    import_layer_types()
    return {name for name in LAYERS if LAYERS.get(name).__module__.startswith("caffepy.")}


def checked_on_each_backend() -> set[str]:
    """The types that files in this folder run through `layer_harness`, which takes every backend present."""
    texts = [path.read_text() for path in Path(__file__).parent.rglob("test_*.py")]
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


@pytest.mark.parametrize("one", MORE, ids=type_of)
def test_cases_give_numbers(one: Case) -> None:
    with CPU.activate():
        net = build_case(CPU, one, "FLOAT")
        pass_once(net)
        net.raise_device_errors()
        found = results(net)
    assert any(name.startswith("gradient of ") for name in found)
    for name, values in found.items():
        assert np.isfinite(values).all() and (values.any() or name.startswith("gradient of b")), name

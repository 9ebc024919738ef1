"""Every layer type that has a form gives its numbers by onnxruntime and by PyTorch, where that is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from export_cases import CASES, CHAIN, DETECT, POOL
from export_nets import TEMPLATES, outcomes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_templates import UNTRIED
from onnx_nets import assert_exported, layer_net, layer_text, net_of
from torch_nets import HAS_TORCH, assert_module, write_module

from caffepy.errors import ConfigError, ShapeError
from caffepy.export.check import larger_batch, random_inputs, run_net
from caffepy.export.onnx.libraries import run_model
from caffepy.export.onnx.write import serialised, to_model
from caffepy.export.prepare import Settings, inference_net, varying_axes
from caffepy.export.torch.write import run_exported, to_torch
from caffepy.formats.fields import NO_MEANING, REFUSED
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.export_rules import ONNX, TORCH, import_families
from caffepy.layers.layer import LAYERS, import_layer_types

Check = Callable[..., object]
LAYER = caffe_pb2.LayerParameter.DESCRIPTOR
FILLERS = "FillerParameter"
"""Exports take the values of parameters, however they came about."""
ELSEWHERE = {"Split", "Silence", "Parameter", "DetectionOutput"}
"""Types that other tests here export."""
WITHOUT_TORCH = (
    "axis: 2 }",
    "num_output: 4 }",
    "pad: 2",
    "normalize_param",
    "filter_param",
    "per_fla_fuse",
    "top_k: 3",
    "pad_ratio",
    "expose_hidden",
)
"""What the settings of cases that PyTorch's form refuses have in them."""
DRAWING = 'type: "Dropout" dropout_param { sample_weights_test: true }'
PSROI = 'type: "PSROIPooling" psroi_pooling_param { output_dim: 1 group_size: 1 spatial_scale: 1 }'


@pytest.fixture(params=["ONNX", *["PyTorch"] * HAS_TORCH])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Check:
    """Compares a net and one of its exports."""
    if request.param == "ONNX":
        return assert_exported
    return lambda net, tolerance=1e-5, inputs=None: assert_module(net, tmp_path, inputs, tolerance)


@pytest.mark.parametrize(("layer", "shapes"), CASES, ids=[layer for layer, _ in CASES])
def test_a_layer_gives_its_numbers(check: Check, layer: str, shapes: tuple[tuple[int, ...], ...]):
    net = layer_net(layer, *shapes)
    try:
        check(net)
    except ConfigError as error:
        refused = layer.split('"')[1] not in TORCH.functions or any(part in layer for part in WITHOUT_TORCH)
        assert "no PyTorch form" in str(error) and refused, error


def test_every_type_is_tried():
    import_families()
    import_layer_types()
    assert {layer.split('"')[1] for layer, _ in CASES} | ELSEWHERE == set(ONNX.functions)
    assert set(TEMPLATES) == set(ONNX.functions) | set(TORCH.functions)
    for rules in (ONNX, TORCH):
        assert set(rules.functions) == set(rules.forms) <= set(LAYERS)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pool=st.sampled_from(["MAX", "AVE"]),
    size=st.tuples(*[st.integers(1, 9)] * 2),
    kernel=st.tuples(*[st.integers(1, 5)] * 2),
    stride=st.tuples(*[st.integers(1, 4)] * 2),
    pad=st.tuples(*[st.integers(0, 3)] * 2),
    mode=st.sampled_from(["CEIL", "FLOOR"]),
)
def test_all_windows_of_pooling(check: Check, pool, size, kernel, stride, pad, mode):
    assume(all(p < k for p, k in zip(pad, kernel, strict=True)))
    window = f"kernel_h: {kernel[0]} kernel_w: {kernel[1]}"
    try:
        net = layer_net(POOL.format(pool, window, *stride, *pad, mode), (1, 2, *size))
    except ShapeError:
        assume(False)
    check(net)


POOLED = 'layer { name: "p" type: "Pooling" bottom: "x0" top: "p" top: "m" pooling_param { kernel_size: 2 stride: 2 } }'


@pytest.mark.parametrize(
    "text",
    [
        CHAIN,
        POOLED + 'layer { name: "u" type: "Upsample" bottom: "p" bottom: "m" top: "u" upsample_param { scale: 2 } }',
        POOLED + 'layer { name: "elu" type: "ELU" bottom: "m" top: "elu" }',
        """
        layer { name: "relu" type: "ReLU" bottom: "x0" top: "y" }
        layer { name: "one" type: "Parameter" top: "one" parameter_param { shape { dim: 2 dim: 3 } } }""",
        """
        layer { name: "same" type: "SeLUDropout" bottom: "x0" top: "y" }
        layer { name: "relu" type: "ReLU" bottom: "y" top: "y" }
        layer { name: "sum" type: "Eltwise" bottom: "x0" bottom: "y" top: "sum" }""",
    ],
    ids=["in place and several readers", "unpooling", "a mask is a number", "a parameter", "in place behind the same"],
)
def test_layers_together(check: Check, text: str):
    data = layer_text('type: "Silence" top: "s"', (1, 2, 6, 8)).split('layer { name: "it"')[0]
    check(net_of(text if text == CHAIN else data + text))


@pytest.mark.parametrize("code", ["CORNER", "CENTER_SIZE", "CORNER_SIZE"])
@pytest.mark.parametrize("nms", ["", "top_k: 7", "eta: 0.9 top_k: 20"])
@pytest.mark.parametrize(
    "more",
    [
        "keep_top_k: 9 confidence_threshold: 0.1",
        "share_location: false keep_top_k: 9",
        "background_label_id: -1",
        "confidence_threshold: 99",
        "variance_encoded_in_target: true keep_top_k: 0",
    ],
)
def test_detection_output(check: Check, code: str, nms: str, more: str):
    locations = 240 * (4 if "share_location: false" in more else 1)
    net = net_of(DETECT % (locations, f"code_type: {code} {more}", nms))
    assert run_net(net, random_inputs(net))["out"].shape[3] == 7
    if check is assert_exported and "eta" in nms:
        with pytest.raises(ConfigError, match="layer 'out' .*eta is not 1, which ONNX's NonMaxSuppression cannot say"):
            check(net, 2e-5)
    else:
        check(net, 2e-5)


def test_any_batch(tmp_path: Path):
    text = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 6 dim: 4 dim: 4 } } }
    layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
    layer { name: "shuffle" type: "ShuffleChannel" bottom: "pool" top: "shuffle" shuffle_channel_param { group: 2 } }
    layer { name: "re" type: "Reshape" bottom: "shuffle" top: "re" reshape_param { shape { dim: 0 dim: 3 dim: -1 } } }
    layer { name: "fc" type: "InnerProduct" bottom: "re" top: "fc" inner_product_param { num_output: 3 axis: 2 } }
    """
    net = net_of(text)
    varying = varying_axes(inference_net(net.param, Settings()))
    content, inputs = serialised(to_model(net, varying=varying)), larger_batch(random_inputs(net))
    path = write_module(net, tmp_path, varying)
    found = [run_model(content, inputs)["fc"]]
    found += [run_exported(path, inputs, ["fc"])["fc"]] if HAS_TORCH else []
    wanted = run_net(net, inputs)["fc"]
    for values in found:
        assert values.shape[0] == 3
        assert np.abs(values - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("write", [to_model, to_torch])
def test_what_has_no_form_is_refused_by_name(write: Callable[..., object]):
    with pytest.raises(ConfigError, match="layer 'it' .Dropout.: sample_weights_test draws random numbers"):
        write(layer_net(DRAWING, (2, 3)))
    with pytest.raises(ConfigError, match=r"layer 'out' .DetectionOutput.: use_polygon has no (ONNX|PyTorch) form"):
        write(net_of(DETECT % (720, "code_type: CENTER_SIZE use_polygon: true", "")))
    with pytest.raises(ConfigError, match="net 'small' has no output"):
        write(net_of(layer_text('type: "Silence"', (2, 3)).replace('top: "y"', "")))
    more = 'layer { name: "dummy" type: "DummyData" top: "d" dummy_data_param { shape { dim: 2 } } }'
    named = "2 of the net's layers have no (ONNX|PyTorch) form: 'it' .PSROIPooling., 'dummy' .DummyData.; .*docs/how-to"
    with pytest.raises(ConfigError, match=named):
        write(net_of(layer_text(PSROI, (1, 1, 4, 4), (1, 5)) + more))


# -- random nets, as `tests/support/export_nets.py` makes them -----------------------------------------


@pytest.mark.parametrize("first", range(8, 33, 5))
def test_random_nets_are_exported_or_refused_by_name(first: int):
    found = [(seed, one) for seed in range(first, first + 5) for one in outcomes(seed)]
    assert found
    assert not [(seed, one) for seed, one in found if one.wrong]


def _messages() -> set[str]:
    """The fields of LayerParameter that templates have, and those of a type's name."""
    texts = " ".join(template[0] for templates in TEMPLATES.values() for template in templates)
    own = {f"{kind.lower()}param" for kind in TEMPLATES}
    found = set(re.findall(r"(\w+_param) \{", texts))
    return {name for name in LAYER.fields_by_name if name in found or name.replace("_", "") in own}


@pytest.mark.parametrize("holder", sorted(_messages()))
def test_templates_have_every_field_that_acts(holder: str):
    message = LAYER.fields_by_name[holder].message_type
    schema = message.full_name.partition(".")[2]
    texts = [template[0] for templates in TEMPLATES.values() for template in templates if holder in template[0]]
    acting = {
        field.name
        for field in message.fields
        if not {f"{schema}.{field.name}", f"{holder}.{field.name}"} & {*REFUSED, *NO_MEANING, *UNTRIED}
        and (field.message_type is None or field.message_type.name != FILLERS)
    }
    assert acting <= set(re.findall(r"\w+", " ".join(texts)))

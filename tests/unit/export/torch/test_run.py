"""Layers that have a PyTorch form give their numbers by PyTorch; test_write.py needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from export_cases import CASES, CHAIN, DETECT, POOL
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx_nets import even_out, layer_net, layer_text, net_of, random_parameters
from torch_nets import assert_module, write_module

from caffepy.cli.main import main
from caffepy.errors import ConfigError, ShapeError
from caffepy.export.onnx.check import larger_batch, random_inputs, run_net
from caffepy.export.onnx.prepare import Settings, inference_net, open_for_export, varying_axes
from caffepy.export.torch.write import MODULE_NAMES, run_exported, to_torch
from caffepy.formats.caffemodel import write_caffemodel
from caffepy.layers.export_rules import TORCH, import_families

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[4]
REFUSED = (
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
"""What the settings of refused cases have in them."""
import_families()
EXPORTED = [case for case in CASES if case[0].split('"')[1] in TORCH.functions]


@pytest.mark.parametrize(("layer", "shapes"), EXPORTED, ids=[layer for layer, _ in EXPORTED])
def test_a_layer_gives_its_numbers(layer: str, shapes: tuple[tuple[int, ...], ...], tmp_path: Path):
    try:
        assert_module(layer_net(layer, *shapes), tmp_path)
    except ConfigError as error:
        assert "has no PyTorch form" in str(error) and any(part in layer for part in REFUSED), error


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pool=st.sampled_from(["MAX", "AVE"]),
    size=st.tuples(*[st.integers(1, 9)] * 2),
    kernel=st.tuples(*[st.integers(1, 5)] * 2),
    stride=st.tuples(*[st.integers(1, 4)] * 2),
    pad=st.tuples(*[st.integers(0, 3)] * 2),
    mode=st.sampled_from(["CEIL", "FLOOR"]),
)
def test_all_windows_of_pooling(pool, size, kernel, stride, pad, mode, tmp_path: Path):
    assume(all(p < k for p, k in zip(pad, kernel, strict=True)))
    window = f"kernel_h: {kernel[0]} kernel_w: {kernel[1]}"
    try:
        net = layer_net(POOL.format(pool, window, *stride, *pad, mode), (1, 2, *size))
    except ShapeError:
        assume(False)
    assert_module(net, tmp_path)


def test_unpooling_by_a_mask(tmp_path: Path):
    pool = (
        'layer { name: "p" type: "Pooling" bottom: "x0" top: "p" top: "m" pooling_param { kernel_size: 2 stride: 2 } }'
    )
    up = 'layer { name: "u" type: "Upsample" bottom: "p" bottom: "m" top: "u" upsample_param { scale: 2 } }'
    text = layer_text('type: "Silence" top: "s"', (1, 2, 6, 8)).split('layer { name: "it"')[0]
    assert_module(net_of(text + pool + up), tmp_path)


def test_a_mask_is_a_number_as_in_caffe(tmp_path: Path):
    pool = (
        'layer { name: "p" type: "Pooling" bottom: "x0" top: "p" top: "m" pooling_param { kernel_size: 2 } }'
        'layer { name: "elu" type: "ELU" bottom: "m" top: "elu" }'
    )
    text = layer_text('type: "Silence" top: "s"', (1, 2, 6, 8)).split('layer { name: "it"')[0]
    assert_module(net_of(text + pool), tmp_path)


def test_a_parameter_that_is_an_output(tmp_path: Path):
    text = layer_text('type: "ReLU"', (2, 3))
    more = 'layer { name: "one" type: "Parameter" top: "one" parameter_param { shape { dim: 2 dim: 3 } } }'
    assert_module(net_of(text + more), tmp_path)


def test_layers_in_place_and_blobs_with_several_readers(tmp_path: Path):
    assert_module(net_of(CHAIN), tmp_path)


def test_a_layer_in_place_behind_one_that_passes_its_input_on(tmp_path: Path):
    text = """
    layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
    layer { name: "same" type: "SeLUDropout" bottom: "x" top: "y" }
    layer { name: "relu" type: "ReLU" bottom: "y" top: "y" }
    layer { name: "sum" type: "Eltwise" bottom: "x" bottom: "y" top: "sum" }
    """
    assert_module(net_of(text), tmp_path)


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
def test_detection_output(code: str, nms: str, more: str, tmp_path: Path):
    locations = 240 * (4 if "share_location: false" in more else 1)
    net = net_of(DETECT % (locations, f"code_type: {code} {more}", nms))
    assert_module(net, tmp_path, tolerance=2e-5)


def test_any_batch(tmp_path: Path):
    text = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 6 dim: 4 dim: 4 } } }
    layer { name: "shuffle" type: "ShuffleChannel" bottom: "data" top: "shuffle" shuffle_channel_param { group: 2 } }
    layer { name: "re" type: "Reshape" bottom: "shuffle" top: "re" reshape_param { shape { dim: 0 dim: 3 dim: -1 } } }
    layer { name: "fc" type: "InnerProduct" bottom: "re" top: "fc" inner_product_param { num_output: 3 axis: 2 } }
    """
    net = net_of(text)
    path = write_module(net, tmp_path, varying_axes(inference_net(net.param, Settings())))
    inputs = larger_batch(random_inputs(net))
    found, wanted = run_exported(path, inputs, ["fc"])["fc"], run_net(net, inputs)["fc"]
    assert found.shape[0] == 3
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_names_that_torch_has_taken():
    assert {name for name in dir(torch.nn.Module()) if not name.startswith("_")} <= set(MODULE_NAMES.split())


@pytest.mark.parametrize("name", ["lenet", "mobilenet_ssd"])
def test_models(name: str, tmp_path: Path):
    net, _ = open_for_export(ROOT / f"models/{name}/deploy.prototxt", [], Settings())
    assert_module(even_out(random_parameters(net)), tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, weights, output = ROOT / "models/lenet/deploy.prototxt", tmp_path / "w.caffemodel", tmp_path / "lenet.py"
    net, _ = open_for_export(model, [], Settings())
    write_caffemodel(weights, "LeNet", even_out(random_parameters(net)).layers)
    assert main(["export", str(model), str(weights), str(output), "--half", "--batch", "dynamic"]) == 0
    said = capsys.readouterr().out
    assert said.count("float16 weights: output 'prob': largest difference") == 2
    inputs = random_inputs(net)
    found, wanted = run_exported(output, inputs, ["prob"])["prob"], run_net(net, inputs)["prob"]
    assert 0 < np.abs(found - wanted).max() < 0.01
    assert output.with_suffix(".safetensors").stat().st_size < 0.51 * weights.stat().st_size
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["lenet.py", "lenet.safetensors", "w.caffemodel"]


def test_a_difference_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, weights, output = ROOT / "models/lenet/deploy.prototxt", tmp_path / "w.caffemodel", tmp_path / "lenet.py"
    net, _ = open_for_export(model, [], Settings())
    write_caffemodel(weights, "LeNet", net.layers)

    def wrong(*given: object):
        text, parameters = to_torch(*given)
        return text, {name: values + 1 for name, values in parameters.items()}

    monkeypatch.setattr("caffepy.export.torch.write.to_torch", wrong)
    assert main(["export", str(model), str(weights), str(output)]) == 1
    assert "above the limit of 1e-05; the file is not written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["w.caffemodel"]

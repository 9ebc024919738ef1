"""What the export to ONNX alone does: versions of the operators, inputs, order of equal scores and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from export_cases import CASES, DETECT
from onnx_nets import assert_exported, layer_net, layer_text, net_of

from caffepy.errors import ConfigError
from caffepy.export.check import random_inputs, run_net
from caffepy.export.onnx.libraries import run_model
from caffepy.export.onnx.write import NEWEST, OLDEST, serialised, to_model
from caffepy.export.prepare import Settings, inference_net, varying_axes


@pytest.mark.parametrize("opset", [OLDEST, 18, NEWEST])
def test_every_version_of_the_operators_gives_them(opset: int):
    for layer, shapes in CASES:
        if "MVN" in layer or "HardSwish" in layer or "Slice" in layer or "ReLU" in layer or "Reduction" in layer:
            assert_exported(layer_net(layer, *shapes), opset=opset)


def test_inputs_of_other_batches_have_names_of_their_own_for_them():
    text = layer_text('type: "BatchReindex"', (2, 3), (4,))
    more = 'layer { name: "flat" type: "Reshape" bottom: "y" top: "flat" reshape_param { shape { dim: -1 } } }'
    net = net_of(text + more)
    model = to_model(net, varying=varying_axes(inference_net(net.param, Settings())))
    infos = [*model.graph.input, *model.graph.output]
    sizes = {one.name: [axis.dim_param or axis.dim_value for axis in one.type.tensor_type.shape.dim] for one in infos}
    assert sizes == {"x0": ["x0_0", 3], "x1": ["x1_0"], "flat": ["flat_0"]}


def test_a_shape_that_depends_on_the_batch_twice_is_refused():
    text = layer_text('type: "LSTM" recurrent_param { num_output: 4 }', (3, 2, 5), (3, 2))
    net = net_of(text)
    with pytest.raises(ConfigError, match="depends on the batch; export it with --batch N"):
        to_model(net, varying=varying_axes(inference_net(net.param, Settings())))


@pytest.mark.parametrize("code", ["CORNER", "CENTER_SIZE"])
def test_a_threshold_above_1_suppresses_nothing(code: str):
    net = net_of((DETECT % (240, f"code_type: {code}", "")).replace("nms_threshold: 0.4", "nms_threshold: 1.5"))
    assert run_net(net, random_inputs(net))["out"].shape[2] == 2 * 3 * 60
    assert_exported(net, 2e-5)


@pytest.mark.parametrize(("more", "nms"), [("keep_top_k: 7", "top_k: 3"), ("keep_top_k: 7", ""), ("", "top_k: 3")])
def test_of_equal_scores_the_first_stay(more: str, nms: str):
    net = net_of(DETECT % (240, f"confidence_threshold: 0.1 {more}", nms))
    inputs = random_inputs(net)
    scores = np.zeros((2, 60, 4), np.float32)
    scores[:, ::12] = 0.5  # 15 boxes, of which std::sort keeps the order
    for name, values in (("conf", scores), ("loc", 0 * inputs["loc"])):
        inputs[name] = values.reshape(inputs[name].shape)
    assert_exported(net, 2e-5, inputs)


@pytest.mark.parametrize("kind", ["ROIAlign", "ROIWarping", "PSROIAlign"])
def test_samples_of_regions_are_refused_by_name(kind: str):
    settings = {
        "ROIAlign": "roi_pooling_param { pooled_h: 1 pooled_w: 1 }",
        "ROIWarping": "roi_warping_param { pooled_h: 1 pooled_w: 1 }",
        "PSROIAlign": "psroi_align_param { output_dim: 1 group_size: 1 spatial_scale: 1 }",
    }
    text = layer_text(f'type: "{kind}" {settings[kind]}', (1, 1, 4, 4), (1, 5))
    with pytest.raises(ConfigError, match=f"no ONNX form: 'it' .{kind}"):
        to_model(net_of(text))


def test_layers_of_training_and_their_labels_are_left_out():
    text = """
    layer { name: "data" type: "Input" top: "data" top: "label"
      input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
    layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 3 } }
    layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
    layer { name: "acc" type: "Accuracy" bottom: "fc" bottom: "label" top: "acc" }
    """
    model = to_model(net_of(text))
    assert [one.name for one in model.graph.input] == ["data"]
    assert [one.name for one in model.graph.output] == ["fc"]


def test_an_input_that_no_layer_reads_is_left_out():
    net = net_of(layer_text('type: "ReLU"', (2, 3), (1, 3)).replace('bottom: "x0"', ""))
    assert list(net.outputs) == ["y"]
    model = to_model(net)
    assert [one.name for one in model.graph.input] == ["x1"]
    assert list(run_model(serialised(model), random_inputs(net))) == ["y"]


def test_a_version_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="opset is 12; 13 to 21 can be written"):
        to_model(layer_net('type: "ReLU"', (3, 8)), 12)

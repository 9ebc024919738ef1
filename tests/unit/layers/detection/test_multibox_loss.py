"""MultiBoxLoss against a plain computation, over all of its settings; its place in a net; its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from detection_reference import MultiBox
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, assert_near, backend_named

from caffepy.backend.meta import MetaBackend
from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net

IMAGES, PRIORS, CLASSES = 2, 24, 4


def _boxes(rng: np.random.Generator, count: int) -> Any:
    corners = rng.uniform(-0.1, 0.7, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(0.15, 0.5, (count, 2))], axis=1)


def make_inputs(seed: int, locations: int, classes: int = CLASSES, background: int = 0) -> dict[str, Any]:
    """Predictions, scores, priors and objects; the last image of three may have no objects."""
    rng = np.random.default_rng(seed)
    priors = np.stack([_boxes(rng, PRIORS), rng.uniform(0.1, 0.3, (PRIORS, 4))])
    rows = np.full((7, 8), -1.0)
    for row in range(6):
        rows[row, 0], rows[row, 1] = rng.integers(IMAGES), rng.integers(0, classes)
        rows[row, 3:7], rows[row, 7] = np.clip(_boxes(rng, 1), 0, 1), rng.integers(2)
    return {
        "loc": rng.normal(0, 0.7, (IMAGES, PRIORS * locations * 4)),
        "conf": rng.normal(0, 2, (IMAGES, PRIORS * classes)),
        "prior": priors.reshape(1, 2, -1),
        "gt": rows[None, None],
    }


def _input(name: str, shape: tuple[int, ...]) -> str:
    dims = " ".join(f"dim: {d}" for d in shape)
    return f'layer {{ name: "in_{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}\n'


def build(text: str, inputs: dict[str, Any], backend: Any, shard: Shard | None = None, more: str = "") -> Net:
    """A net whose predictions and scores pass through a Power layer each, so that they have gradients."""
    param = "".join(_input(name, value.shape) for name, value in inputs.items())
    for name, top in (("loc", "l"), ("conf", "c")):
        param += f'layer {{ name: "pass_{name}" type: "Power" bottom: "{name}" top: "{top}" }}\n'
    param += (
        f'layer {{ name: "L" type: "MultiBoxLoss" bottom: "l" bottom: "c" bottom: "prior" bottom: "gt" top: "y" {more} '
    )
    param += f"multibox_loss_param {{ {text} }} }} force_backward: true"
    context = LayerContext(backend, caffe_pb2.TRAIN, shard=shard or Shard())
    net = Net(text_format.Parse(param, caffe_pb2.NetParameter()), context)
    for name, value in inputs.items():
        backend.from_host(value.astype(np.float32), net.blobs[name].data)
    return net


SETTINGS = st.fixed_dictionaries(
    {
        "code_type": st.sampled_from(["CORNER", "CENTER_SIZE", "CORNER_SIZE"]),
        "match_type": st.sampled_from(["BIPARTITE", "PER_PREDICTION"]),
        "mining_type": st.sampled_from(["NONE", "MAX_NEGATIVE", "HARD_EXAMPLE"]),
        "conf_loss_type": st.sampled_from(["SOFTMAX", "LOGISTIC"]),
        "loc_loss_type": st.sampled_from(["L2", "SMOOTH_L1"]),
        "share_location": st.booleans(),
        "use_prior_for_matching": st.booleans(),
        "use_difficult_gt": st.booleans(),
        "bp_inside": st.booleans(),
        "encode_variance_in_target": st.booleans(),
        "ignore_cross_boundary_bbox": st.booleans(),
        "map_object_to_agnostic": st.booleans(),
        "use_prior_for_nms": st.booleans(),
        "overlap_threshold": st.sampled_from([0.2, 0.5]),
        "neg_overlap": st.sampled_from([0.2, 0.5]),
        "neg_pos_ratio": st.sampled_from([1.5, 3.0]),
        "sample_size": st.sampled_from([5, 64]),
        "loc_weight": st.sampled_from([1.0, 0.7]),
        "background_label_id": st.sampled_from([0, 1]),
    }
)
NMS = st.sampled_from(["", "nms_param { nms_threshold: 0.4 top_k: 12 }", "nms_param { nms_threshold: 0.4 }"])


def _text(chosen: dict[str, Any], nms: str) -> str:
    words = [f"{k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in chosen.items()]
    return " ".join([*words, nms])


@given(SETTINGS, NMS, st.integers(0, 10_000))
@settings(max_examples=60, derandomize=True)
def test_all_settings_against_a_plain_computation(chosen: dict[str, Any], nms: str, seed: int) -> None:
    chosen["share_location"] |= chosen["mining_type"] != "NONE"
    classes = 2 if chosen["map_object_to_agnostic"] else CLASSES
    if classes == 2:
        chosen["background_label_id"] = 0
    text = f"num_classes: {classes} " + _text(chosen, nms)
    param = text_format.Parse(text, caffe_pb2.MultiBoxLossParameter())
    locations = 1 if param.share_location else classes
    inputs = make_inputs(seed, locations, classes)
    plain = MultiBox(
        param,
        inputs["loc"].astype(np.float32).reshape(IMAGES, PRIORS, locations, 4),
        inputs["conf"].astype(np.float32).reshape(IMAGES, PRIORS, classes),
        inputs["prior"].astype(np.float32).reshape(2, PRIORS, 4),
        inputs["gt"].astype(np.float32).reshape(-1, 8),
    )
    backend = backend_named("cpu")
    net = build(text, inputs, backend)
    net.forward()
    net.backward()
    divisor = max(plain.matched, 1)
    loss = (plain.loc_loss + plain.conf_loss) / divisor
    assert float(net.blobs["y"].host_data()) == pytest.approx(loss, rel=2e-5, abs=1e-6)
    for name, wanted in (("l", plain.loc_gradient), ("c", plain.conf_gradient)):
        assert_near(net.blobs[name].host_diff(), wanted.reshape(IMAGES, -1) / divisor, 2e-5, name)


@pytest.mark.parametrize("mining", ["NONE", "MAX_NEGATIVE"])
@pytest.mark.parametrize("background", [0, 1, 2])
def test_targets_of_logistic_begin_as_the_number_of_the_background(background: int, mining: str) -> None:
    """Two priors of one image, the first matched with an object of class 3: targets b b b 1 and b .. 1 .. b."""
    scores = np.array([[[0.3, -0.2, 0.9, 0.4], [-0.5, 0.1, 0.7, 0.2]]])
    inputs = {
        "loc": np.zeros((1, 8)),
        "conf": scores.reshape(1, 8),
        "prior": np.array([[[0, 0, 0.5, 0.5, 0.5, 0.5, 1, 1], [0.1] * 8]]),
        "gt": np.array([[[[0, 3, 0, 0, 0, 0.5, 0.5, 0]]]]),
    }
    text = f"num_classes: 4 conf_loss_type: LOGISTIC mining_type: {mining} background_label_id: {background}"
    net = build(text, inputs, backend_named("cpu"))
    net.forward()
    net.backward()
    targets = np.full((2, 4), float(background))
    targets[0, 3] = 1
    if mining != "NONE":
        targets[1, background] = 1
    wanted = np.log1p(np.exp(scores[0])) - targets * scores[0]
    assert float(net.blobs["y"].host_data()) == pytest.approx(wanted.sum(), rel=1e-5)
    assert_near(net.blobs["c"].host_diff().reshape(2, 4), 1 / (1 + np.exp(-scores[0])) - targets, 1e-5, "scores")


@pytest.mark.parametrize("mining", ["MAX_NEGATIVE", "HARD_EXAMPLE"])
def test_one_prior_is_enough(mining: str) -> None:
    scores = np.array([[0.5, -1.0, 2.0], [0.25, 1.5, -0.5]])
    inputs = {
        "loc": np.zeros((2, 4)),
        "conf": scores,
        "prior": np.array([[[0.1, 0.1, 0.6, 0.6], [0.1] * 4]]),
        "gt": np.array([[[[0, 2, 0, 0.1, 0.1, 0.6, 0.6, 0], [1, 1, 0, 0.1, 0.1, 0.6, 0.6, 0]]]]),
    }
    net = build(f"num_classes: 3 mining_type: {mining}", inputs, backend_named("cpu"))
    net.forward()
    wanted = -np.log(np.exp(scores) / np.exp(scores).sum(1, keepdims=True))[[0, 1], [2, 1]].mean()
    assert float(net.blobs["y"].host_data()) == pytest.approx(wanted, rel=1e-5)


PLAIN = f"num_classes: {CLASSES} overlap_threshold: 0.3 code_type: CENTER_SIZE "


def _loss(more: str, text: str = PLAIN, shard: Shard | None = None) -> tuple[float, Any]:
    net = build(text, make_inputs(3, 1), backend_named("cpu"), shard, more)
    net.forward()
    net.backward()
    return float(net.blobs["y"].host_data()), net.blobs["c"].host_diff()


def test_what_the_sum_is_divided_by() -> None:
    total, gradient = _loss("loss_param { normalization: NONE }")
    for mode, divisor in (("FULL", IMAGES * PRIORS), ("BATCH_SIZE", IMAGES)):
        loss, own = _loss(f"loss_param {{ normalization: {mode} }}")
        assert loss == pytest.approx(total / divisor)
        assert_near(own, gradient / divisor, 1e-6, mode)
    assert _loss("loss_param { normalize: false }")[0] == pytest.approx(total / IMAGES)
    assert _loss("")[0] == pytest.approx(_loss("loss_param { normalization: VALID }")[0])
    assert _loss("loss_weight: 3")[0] == pytest.approx(_loss("")[0])
    assert_near(_loss("loss_weight: 3")[1], 3 * _loss("")[1], 1e-6, "loss weight")


def test_propagate_down_leaves_out_that_part_of_the_loss() -> None:
    pairs = [("true", "false"), ("false", "true"), ("true", "true")]
    boxes, scores, both = (
        _loss("".join(f" propagate_down: {word}" for word in (*pair, "false", "false")))[0] for pair in pairs
    )
    assert boxes > 0
    assert scores > 0
    assert boxes + scores == pytest.approx(both)


def test_matches_are_counted_over_all_devices() -> None:
    """Two devices' losses average to what one with both batches has."""
    alone, gradient = _loss("")
    counts: list[float] = []

    def count_twice(array: Any) -> None:
        counts.append(float(array[0]))
        array[0] += 6

    net = build(PLAIN, make_inputs(3, 1), backend_named("cpu"), Shard(0, 2))
    net.context.all_reduce_sum = count_twice
    net.forward()
    net.backward()
    factor = counts[0] * 2 / (counts[0] + 6)
    assert float(net.blobs["y"].host_data()) == pytest.approx(alone * factor)
    assert_near(net.blobs["c"].host_diff(), gradient * factor, 1e-6, "gradient")


def test_no_gradient_is_asked_of_prior_boxes_that_learned_layers_shape() -> None:
    text = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
    layer { name: "gt" type: "Input" top: "gt" input_param { shape { dim: 1 dim: 1 dim: 1 dim: 8 } } }
    layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
      convolution_param { num_output: 4 kernel_size: 3 stride: 4 weight_filler { type: "xavier" } } }
    layer { name: "loc" type: "Flatten" bottom: "conv" top: "loc" }
    layer { name: "conf_conv" type: "Convolution" bottom: "conv" top: "conf_conv"
      convolution_param { num_output: 3 kernel_size: 1 weight_filler { type: "xavier" } } }
    layer { name: "conf" type: "Flatten" bottom: "conf_conv" top: "conf" }
    layer { name: "prior" type: "PriorBox" bottom: "conv" bottom: "data" top: "prior"
      prior_box_param { min_size: 3 } }
    layer { name: "priors" type: "Concat" bottom: "prior" top: "priors" concat_param { axis: 2 } }
    layer { name: "loss" type: "MultiBoxLoss" bottom: "loc" bottom: "conf" bottom: "priors" bottom: "gt" top: "loss"
      multibox_loss_param { num_classes: 3 code_type: CENTER_SIZE } }
    """
    backend = backend_named("cpu")
    net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend))
    backend.from_host(np.random.default_rng(0).normal(size=(2, 3, 8, 8)), net.blobs["data"].data)
    backend.from_host(np.array([[[[0, 1, 0, 0.1, 0.1, 0.5, 0.5, 0]]]]), net.blobs["gt"].data)
    net.forward()
    net.backward()
    assert np.abs(backend.to_host(net.parameters.diff)).max() > 0
    assert not net.nodes[net.layer_names.index("prior")].need_backward


def test_the_meta_device_learns_shapes_and_times_of_use() -> None:
    backend = MetaBackend()
    net = build(PLAIN, {name: value.astype(np.float32) for name, value in make_inputs(3, 1).items()}, backend)
    net.forward()
    net.backward()
    assert net.blobs["y"].shape == ()


@pytest.mark.parametrize(
    ("text", "blocker"),
    [
        ("", None),
        ("mining_type: NONE share_location: false", "it matches boxes on the host"),
        ("use_prior_for_matching: false", "it matches boxes on the host"),
        ("mining_type: HARD_EXAMPLE", "it matches boxes on the host"),
        ("nms_param { nms_threshold: 0.5 top_k: 9 }", "it matches boxes on the host"),
        ("conf_loss_type: LOGISTIC background_label_id: 1", "it matches boxes on the host"),
        ("conf_loss_type: LOGISTIC", None),
    ],
)
def test_a_gpu_captures_what_it_does_not_leave_to_the_host(text: str, blocker: str | None) -> None:
    inputs = make_inputs(3, CLASSES if "share_location" in text else 1)
    net = build(f"{PLAIN} {text}", {name: value.astype(np.float32) for name, value in inputs.items()}, MetaBackend())
    assert net.nodes[-1].layer.capture_blocker() == blocker
    on_cpu = build(f"{PLAIN} {text}", inputs, backend_named("cpu"))
    assert on_cpu.nodes[-1].layer.capture_blocker() == "it matches boxes on the host"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "num_classes is needed"),
        ("num_classes: 4 background_label_id: 4", "background_label_id 4 is not below num_classes 4"),
        ("num_classes: 4 do_neg_mining: false", "do_neg_mining: false contradicts mining_type: MAX_NEGATIVE"),
        ("num_classes: 4 share_location: false", "mining needs share_location: true"),
        ("num_classes: 4 map_object_to_agnostic: true", "map_object_to_agnostic needs num_classes: 2, not 4"),
        ("num_classes: 4 mining_type: HARD_EXAMPLE sample_size: 0", "sample_size is 0"),
    ],
)
def test_settings_that_do_not_hold_together(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer 'L' \(MultiBoxLoss\): {error}"):
        build(text, make_inputs(0, 1), backend_named("cpu"))


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("nms_param { nms_threshold: 0.4 }", "nms_param without top_k leaves no candidates for mining, as in Caffe"),
        ("ignore_difficult_gt: true", "ignore_difficult_gt has no effect, as in Caffe; write use_difficult_gt: false"),
    ],
)
def test_settings_that_do_not_do_what_one_expects(caplog: pytest.LogCaptureFixture, text: str, warning: str) -> None:
    build(PLAIN, make_inputs(0, 1), backend_named("cpu"))
    assert not caplog.records
    build(PLAIN + text, make_inputs(0, 1), backend_named("cpu"))
    assert any(f"layer 'L' (MultiBoxLoss): {warning}" in record.getMessage() for record in caplog.records)


def test_shapes_that_do_not_fit() -> None:
    inputs = make_inputs(0, 1)
    with pytest.raises(ShapeError, match=r"layer 'L' .*needs 5 scores for each of the 24 priors; num_classes is 5"):
        build("num_classes: 5", inputs, backend_named("cpu"))
    with pytest.raises(ShapeError, match=r"layer 'L' .*objects 1 1 G 8"):
        build(PLAIN, {**inputs, "gt": inputs["gt"][..., :7]}, backend_named("cpu"))


def _forward(**changed: Any) -> float:
    net = build(PLAIN, {**make_inputs(3, 1), **changed}, backend_named("cpu"))
    net.forward()
    net.backward()
    return float(net.blobs["y"].host_data())


@pytest.mark.parametrize(
    ("column", "value", "error"),
    [
        (1, 9, "'gt' has an object of class 9 in image 0 of the batch, but there are 4 classes"),
        (1, np.nan, "row 0 of 'gt' has the image 0 and the label nan"),
        (0, np.inf, "row 0 of 'gt' has the image inf"),
    ],
)
def test_objects_that_name_no_class(column: int, value: float, error: str) -> None:
    rows = make_inputs(3, 1)["gt"]
    rows[0, 0, 0, :2] = 0, 1
    rows[0, 0, 0, column] = value
    with pytest.raises(DataError, match=rf"layer 'L' \(MultiBoxLoss\): {error}"):
        _forward(gt=rows)


def test_priors_that_cannot_be_computed_with() -> None:
    for part, place, value in ((0, 2, -5.0), (1, 0, 0.0), (0, 0, np.nan)):
        priors = make_inputs(3, 1)["prior"].reshape(2, PRIORS, 4)
        priors[part, 7, place] = value
        with pytest.raises(DataError, match=r"prior 7 of 'prior' is .*; correct its PriorBox layer"):
            _forward(prior=priors.reshape(1, 2, -1))


def test_hostile_values_end_neither_in_a_crash_nor_in_a_wrong_number() -> None:
    inputs = make_inputs(3, 1)
    scores, rows = inputs["conf"].copy(), inputs["gt"].copy()
    scores[0, ::7] = np.nan
    assert np.isnan(_forward(conf=scores))
    rows[..., 3:7] = 0.5  # objects without an area match nothing
    assert _forward(gt=rows) == 0
    rows[..., 0] = 99  # images that are not in the batch
    assert _forward(gt=rows) == 0
    assert np.isfinite(_forward(gt=np.zeros((1, 1, 0, 8))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_every_time(backend: str) -> None:
    device = backend_named(backend)
    with device.activate():
        results = []
        for _ in range(2):
            net = build(PLAIN, make_inputs(5, 1), device)
            net.forward()
            net.backward()
            results.append([net.blobs["y"].host_data(), net.blobs["l"].host_diff(), net.blobs["c"].host_diff()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)

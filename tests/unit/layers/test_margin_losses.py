"""ContrastiveLoss, HingeLoss, MultinomialLogisticLoss, L1Loss, SmoothL1Loss and InfogainLoss."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2

WEIGHTS = [1.0, -0.5, 2.0]


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


# -- pairs ------------------------------------------------------------------------------------------------


def contrastive(a, b, s, margin, legacy):
    d2 = ((a - b) ** 2).reshape(len(a), -1).sum(1)
    apart = np.maximum(margin - d2, 0) if legacy else np.maximum(margin - np.sqrt(d2), 0) ** 2
    return np.where(s.reshape(-1).astype(int) != 0, d2, apart).sum() / (2 * len(a))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("tail", [(), (1, 1)])
def test_contrastive(backend, legacy, weight, tail):
    a, b = gaussian((7, 3, *tail)), gaussian((7, 3, *tail), 1)
    s = np.array([0, 1, 0, 2, 0.5, -1, 0], np.float32)
    text = f"type: 'ContrastiveLoss' contrastive_loss_param {{ margin: 2.5 legacy_version: {str(legacy).lower()} }}"
    runner = Runner(text, [a, b, s], backend, loss_weight=weight)
    result = runner.run([np.float32(weight)])
    assert_near(result.tops[0], contrastive(a.astype(float), b, s, 2.5, legacy), 2e-5, "loss")
    difference = (a.astype(float) - b).reshape(7, 3)
    distance = np.sqrt((difference**2).sum(1))
    apart = -(distance**2 < 2.5).astype(float) if legacy else -np.maximum(2.5 - distance, 0) / (distance + 1e-4)
    slope = np.where(s.astype(int) != 0, 1, apart)[:, None] * weight / 7
    for found, sign in zip(result.bottom_diffs, (1, -1), strict=False):
        assert_near(found, (sign * slope * difference).reshape(a.shape), 2e-5, "gradient")
    only_b = runner.backward([np.float32(weight)], [False, True, False])
    assert_near(only_b[1], result.bottom_diffs[1], 0, "gradient of b alone")


def test_contrastive_refuses():
    with pytest.raises(ShapeError, match=r"the first two bottoms must both be \(N, C\)"):
        Runner("type: 'ContrastiveLoss'", [gaussian((3, 2, 2)), gaussian((3, 2, 2)), gaussian((3,))])
    with pytest.raises(ShapeError, match="one number for each pair"):
        Runner("type: 'ContrastiveLoss'", [gaussian((3, 2)), gaussian((3, 2)), gaussian((3, 2))])


# -- one label a sample -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 3, 2), (4, 6, 1, 1)])
def test_hinge(norm, shape):
    x, labels = gaussian(shape), np.random.default_rng(1).integers(0, np.prod(shape[1:]), shape[0]).astype(np.float32)

    def reference(x, labels):
        sign = np.ones((len(x), x[0].size))
        sign[np.arange(len(x)), labels.astype(int)] = -1
        margin = np.maximum(0, 1 + sign * x.reshape(len(x), -1))
        return (margin ** (1 if norm == "L1" else 2)).sum() / len(x)

    for weight in WEIGHTS:
        text = f"type: 'HingeLoss' hinge_loss_param {{ norm: {norm} }}"
        check_layer(text, [x, labels], reference, loss_weight=weight)


@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 3, 2)])
def test_multinomial(shape):
    x = softmax(gaussian(shape).reshape(shape[0], -1), 1).reshape(shape)
    labels = np.random.default_rng(1).integers(0, np.prod(shape[1:]), shape[0]).astype(np.float32)

    def reference(x, labels):
        return -np.log(x.reshape(len(x), -1)[np.arange(len(x)), labels.astype(int)]).sum() / len(x)

    for weight in WEIGHTS:
        check_layer("type: 'MultinomialLogisticLoss'", [x, labels], reference, loss_weight=weight)


def test_multinomial_of_nothing_is_finite():
    runner = Runner("type: 'MultinomialLogisticLoss'", [np.zeros((1, 2), np.float32), np.zeros(1, np.float32)])
    assert_near(runner.forward()[0], -np.log(1e-20), 1e-5, "loss")
    assert_near(runner.backward([np.float32(1)])[0], [[-1e20, 0]], 1e-5, "gradient")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["HingeLoss", "MultinomialLogisticLoss", "InfogainLoss"])
def test_labels_that_name_no_class(backend, kind):
    inputs = [gaussian((3, 4)), np.array([0, 4, 1], np.float32)] + [gaussian((4, 4), 1)] * (kind == "InfogainLoss")
    runner = Runner(f"type: '{kind}'", inputs, backend)
    runner.forward()
    with pytest.raises(DataError, match=rf"layer 'L' \({kind}\): the label of sample 1 is 4, outside the 4 classes"):
        runner.layer.raise_device_errors()


def test_one_label_a_sample():
    with pytest.raises(ShapeError, match="needs one label for each position: 3"):
        Runner("type: 'HingeLoss'", [gaussian((3, 4)), gaussian((3, 2))])


# -- regression -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "other"), [((4, 5), (4, 5)), ((2, 3, 4, 2), (2, 3, 4, 2)), ((2, 3, 2, 2), (2, 12))])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_l1(shape, other, weight):
    def reference(a, b):
        return np.abs(a - b.reshape(a.shape)).sum() / len(a)

    check_layer("type: 'L1Loss'", [gaussian(shape), gaussian(other, 1)], reference, loss_weight=weight)


def smooth(d, sigma):
    return np.where(np.abs(d) < 1 / sigma**2, 0.5 * (sigma * d) ** 2, np.abs(d) - 0.5 / sigma**2)


@pytest.mark.parametrize("bottoms", [2, 3, 4])
@pytest.mark.parametrize("sigma", [1, 3, 0.5])
def test_smooth_l1(bottoms, sigma):
    inputs = [gaussian((2, 3, 4, 2), i) for i in range(bottoms)]

    def reference(a, b, inside=1.0, outside=1.0):
        return (outside * smooth(inside * (a - b), sigma)).sum() / len(a)

    text = f"type: 'SmoothL1Loss' smooth_l1_loss_param {{ sigma: {sigma} }}"
    for weight in WEIGHTS[:2]:
        check_layer(text, inputs, reference, loss_weight=weight)


def test_smooth_l1_refuses():
    a = gaussian((2, 3))
    with pytest.raises(ConfigError, match="smooth_l1_loss_param.sigma is 0; it must be above 0"):
        Runner("type: 'SmoothL1Loss' smooth_l1_loss_param { sigma: 0 }", [a, a])
    with pytest.raises(ShapeError, match="weights must have the first bottom's count"):
        Runner("type: 'SmoothL1Loss'", [a, a, gaussian((2, 2))])


# -- information gain -------------------------------------------------------------------------------------


def infogain(x, labels, h, axis, ignored, normalization, probabilities=False):
    p = np.moveaxis(x if probabilities else softmax(x, axis), axis, -1)
    k = p.shape[-1]
    rows, numbers = p.reshape(-1, k), labels.reshape(-1).astype(int)
    valid = numbers != ignored
    loss = -(h.reshape(k, k)[np.where(valid, numbers, 0)] * np.log(rows) * valid[:, None]).sum()
    divisor = {"VALID": valid.sum(), "FULL": valid.size, "BATCH_SIZE": np.prod(x.shape[:axis]), "NONE": 1}
    return loss / max(divisor[normalization], 1)


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 4), 1), ((2, 4, 3, 2), 1), ((2, 3, 3, 4), -1), ((2, 3, 2), 1), ((2, 2, 3, 2), 2)]
)
@pytest.mark.parametrize(
    ("ignored", "normalization"), [(None, "VALID"), (1, "VALID"), (1, "FULL"), (255, "BATCH_SIZE"), (1, "NONE")]
)
def test_infogain(shape, axis, ignored, normalization):
    classes = shape[axis]
    places = np.delete(shape, axis)
    labels = np.random.default_rng(3).integers(0, classes, places).astype(np.float32)
    if ignored == 255:
        labels.reshape(-1)[0] = 255
    ignoring = "" if ignored is None else f"ignore_label: {ignored}"
    text = (
        f"type: 'InfogainLoss' infogain_loss_param {{ axis: {axis} }} "
        f"loss_param {{ {ignoring} normalization: {normalization} }}"
    )
    inputs = [gaussian(shape), labels, np.abs(gaussian((1, 1, classes, classes), 2))]
    positive = axis % len(shape)

    def reference(x, labels, h):
        return infogain(x, labels, h, positive, ignored, normalization)

    check_layer(text, inputs, reference, loss_weight=0.5)


def test_infogain_matrix_from_a_file_and_second_top(tmp_path):
    h = np.abs(gaussian((4, 4), 2))
    blob = caffe_pb2.BlobProto(num=1, channels=1, height=4, width=4, data=h.reshape(-1).tolist())
    path = tmp_path / "h.binaryproto"
    path.write_bytes(blob.SerializeToString())
    labels = np.array([0, 3, 1], np.float32)
    text = f"type: 'InfogainLoss' infogain_loss_param {{ source: '{path}' }}"
    check_layer(
        text,
        [gaussian((3, 4)), labels],
        lambda x, labels: (infogain(x, labels, h, 1, None, "VALID"), softmax(x, 1)),
        tops=2,
        gradients=False,
    )
    check_layer(text, [gaussian((3, 4)), labels], lambda x, labels: infogain(x, labels, h, 1, None, "VALID"))


def test_infogain_of_probabilities(monkeypatch):
    """NVIDIA's dialect."""
    monkeypatch.setenv("CAFFEPY_DIALECT", "nvidia")
    x, labels, h = softmax(gaussian((5, 4)), 1), np.array([0, 3, 1, 1, 2], np.float32), gaussian((4, 4), 2)
    for fields, ignored, normalization in (
        ("", None, "BATCH_SIZE"),
        ("ignore_label: 1 normalization: VALID", 1, "VALID"),
    ):
        text = f"type: 'InfogainLoss' loss_param {{ {fields} }}"
        check_layer(
            text,
            [x, labels, h],
            lambda *a, i=ignored, n=normalization: infogain(*a, 1, i, n, probabilities=True),
            loss_weight=-2,
        )
    with pytest.raises(ConfigError, match="has no second top in NVIDIA's dialect"):
        Runner("type: 'InfogainLoss'", [x, labels, h], tops=2)


def test_infogain_refuses(tmp_path):
    x, labels = gaussian((3, 4)), np.zeros(3, np.float32)
    with pytest.raises(ConfigError, match="needs the matrix: a third bottom, or a file named by infogain_loss_param"):
        Runner("type: 'InfogainLoss'", [x, labels])
    with pytest.raises(ShapeError, match=r"the matrix has 9 elements instead of 4 \* 4"):
        Runner("type: 'InfogainLoss'", [x, labels, gaussian((3, 3))])
    with pytest.raises(ConfigError, match="normalize is not for this layer; use normalization"):
        Runner("type: 'InfogainLoss' loss_param { normalize: true }", [x, labels, gaussian((4, 4))])
    with pytest.raises(DataError, match=r"source '.*gone' cannot be read"):
        Runner(f"type: 'InfogainLoss' infogain_loss_param {{ source: '{tmp_path}/gone' }}", [x, labels])
    broken = tmp_path / "broken"
    broken.write_bytes(b"\xff\xff\xff")
    with pytest.raises(DataError, match=r"source '.*broken' is not a BlobProto"):
        Runner(f"type: 'InfogainLoss' infogain_loss_param {{ source: '{broken}' }}", [x, labels])

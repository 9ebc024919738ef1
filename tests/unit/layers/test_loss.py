"""Softmax, losses and accuracy; labels that name no class."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, TEST, Runner, assert_near, backend_named, check_layer, gaussian

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError, ShapeError


def softmax(x, axis=1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def labels_for(shape, axis, classes=None):
    places = shape[:axis] + shape[axis + 1 :]
    return np.random.default_rng(3).integers(0, classes or shape[axis], places).astype(np.float32)


@st.composite
def class_scores(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple))
    return shape, draw(st.integers(1, len(shape) - 1))


@settings(max_examples=20)
@given(class_scores())
def test_softmax(case):
    shape, axis = case
    text = f"type: 'Softmax' softmax_param {{ axis: {axis} }}"
    check_layer(text, [gaussian(shape) * 3], lambda x: softmax(x, axis), in_place=True)


def softmax_loss(x, labels, axis, ignored, normalization):
    p = np.take_along_axis(
        softmax(x, axis), np.expand_dims(labels.astype(int).reshape(labels.shape) % x.shape[axis], axis), axis
    )
    counted = (labels != ignored).reshape(labels.shape)
    losses = -np.log(np.squeeze(p, axis)) * counted
    divisors = {
        "FULL": labels.size,
        "VALID": counted.sum(),
        "BATCH_SIZE": np.prod(x.shape[:axis]),
        "NONE": 1,
    }
    return losses.sum() / max(divisors[normalization], 1)


@settings(max_examples=30)
@given(
    case=class_scores(),
    ignored=st.sampled_from([None, 0, 255]),
    normalization=st.sampled_from(["FULL", "VALID", "BATCH_SIZE", "NONE"]),
    weight=st.sampled_from([1.0, -0.5, 2.0]),
)
def test_softmax_loss(case, ignored, normalization, weight):
    shape, axis = case
    labels = labels_for(shape, axis)
    if ignored == 255:
        labels.reshape(-1)[::3] = 255
    ignore = "" if ignored is None else f"ignore_label: {ignored}"
    loss = f"loss_param {{ {ignore} normalization: {normalization} }}"
    text = f"type: 'SoftmaxWithLoss' softmax_param {{ axis: {axis} }} {loss}"

    def reference(x, labels):
        return softmax_loss(x, labels, axis, ignored, normalization)

    check_layer(text, [gaussian(shape), labels], reference, loss_weight=weight)


@pytest.mark.parametrize(("old", "new"), [("true", "VALID"), ("false", "BATCH_SIZE")])
def test_old_normalize_flag(old, new):
    inputs = [gaussian((4, 3, 2, 2)), labels_for((4, 3, 2, 2), 1)]
    texts = [f"type: 'SoftmaxWithLoss' loss_param {{ {s} }}" for s in (f"normalize: {old}", f"normalization: {new}")]
    first, second = (Runner(text, inputs).forward()[0] for text in texts)
    assert first == second


def test_second_top_has_the_probabilities():
    x = gaussian((4, 3, 2, 2))
    _, probabilities = Runner("type: 'SoftmaxWithLoss'", [x, labels_for(x.shape, 1)], tops=2).forward()
    assert_near(probabilities, softmax(x.astype(np.float64)), 1e-5, "probabilities")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["SoftmaxWithLoss", "EuclideanLoss", "SigmoidCrossEntropyLoss"])
def test_a_loss_that_other_layers_read_takes_its_gradient_from_them(kind, backend):
    x = gaussian((4, 3))
    other = labels_for(x.shape, 1) if kind == "SoftmaxWithLoss" else np.abs(gaussian((4, 3), 1)) % 1
    by_weight = Runner(f"type: '{kind}'", [x, other], backend, loss_weight=0.25).run([np.float32(0.25)])
    by_diff = Runner(f"type: '{kind}'", [x, other], backend, loss_weight=0.0).run([np.float32(0.25)])
    for first, second in zip(by_weight.bottom_diffs, by_diff.bottom_diffs, strict=True):
        if first is not None:
            assert_near(second, first, 1e-6, kind)


@settings(max_examples=12, derandomize=True)
@given(
    case=class_scores(),
    smoothing=st.sampled_from([0.1, 0.5, 1.0]),
    mode=st.sampled_from(["", "normalization: NONE", "ignore_label: 0", "ignore_label: 0 normalization: FULL"]),
)
def test_label_smoothing(case, smoothing, mode):
    """The target is (1 - s) onehot + s / classes."""
    shape, axis = case
    labels = labels_for(shape, axis)
    counts = np.expand_dims(labels != (0 if "ignore" in mode else -1), axis)

    def loss(x, _):
        classes = np.arange(shape[axis]).reshape(-1, *(1 for _ in shape[axis + 1 :]))
        onehot = np.expand_dims(labels, axis) == classes
        target = (1 - smoothing) * onehot + smoothing / shape[axis]
        total = -(target * np.log(softmax(x, axis)) * counts).sum()
        divisor = 1 if "NONE" in mode else labels.size if "FULL" in mode else max(counts.sum(), 1)
        return total / divisor

    text = (
        f"type: 'SoftmaxWithLoss' softmax_param {{ axis: {axis} }} loss_param {{ label_smoothing: {smoothing} {mode} }}"
    )
    check_layer(text, [gaussian(shape), labels], loss)


@pytest.mark.parametrize("part", [-0.1, 1.5])
def test_label_smoothing_is_a_part(part):
    with pytest.raises(ConfigError, match="label_smoothing is .* from 0 to 1"):
        Runner(
            f"type: 'SoftmaxWithLoss' loss_param {{ label_smoothing: {part} }}",
            [gaussian((2, 3)), np.zeros(2, np.float32)],
        )


def cross_entropy(x, t):
    return np.maximum(x, 0) - x * t + np.log1p(np.exp(-np.abs(x)))


@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    normalization=st.sampled_from(["", "FULL", "VALID", "BATCH_SIZE", "NONE"]),
    ignored=st.booleans(),
)
def test_sigmoid_cross_entropy(shape, normalization, ignored):
    x, t = gaussian(shape) * 3, np.random.default_rng(2).uniform(0.01, 0.99, shape).astype(np.float32)
    if ignored:
        t.reshape(-1)[::2] = -1
    mode = f"normalization: {normalization}" if normalization else ""
    text = f"type: 'SigmoidCrossEntropyLoss' loss_param {{ {mode} {'ignore_label: -1' if ignored else ''} }}"

    def reference(x, t):
        counted = t != -1 if ignored else np.ones(shape)
        divisors = {"FULL": x.size, "VALID": counted.sum(), "NONE": 1}
        return (cross_entropy(x, t) * counted).sum() / max(divisors.get(normalization, shape[0]), 1)

    check_layer(text, [x, t], reference)


def counted(labels, ignored):
    return np.float32((labels.astype(int) != ignored).sum())


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["SoftmaxWithLoss", "SigmoidCrossEntropyLoss"]),
    normalization=st.sampled_from(["", "FULL", "VALID", "BATCH_SIZE", "NONE"]),
    devices=st.integers(1, 4),
    ignored=st.lists(st.booleans(), min_size=24, max_size=24),
    ignore=st.booleans(),
    weight=st.sampled_from([1.0, 0.5]),
)
def test_devices_together_have_the_loss_and_gradient_of_one(kind, normalization, devices, ignored, ignore, weight):
    """Each has a part of the batch; losses and gradients are averaged as training does."""
    classes = kind == "SoftmaxWithLoss"
    x = gaussian((24, 3))
    labels = labels_for(x.shape, 1) if classes else np.random.default_rng(2).uniform(0, 0.9, x.shape).astype(np.float32)
    if ignore:
        labels[np.array(ignored)] = 9
    mode = f"normalization: {normalization}" if normalization else ""
    text = f"type: '{kind}' loss_param {{ {mode} {'ignore_label: 9' if ignore else ''} }}"
    whole = Runner(text, [x, labels], loss_weight=weight).run([np.float32(weight)])
    own, total = [], counted(labels, 9)
    for rank in range(devices):
        part = slice(24 // devices * rank, 24 // devices * (rank + 1))
        runner = Runner(text, [x[part], labels[part]], loss_weight=weight, shard=Shard(rank, devices))
        counts = []

        def add_up(array, counts=counts):
            counts.append(array.copy())
            array[...] = total

        if devices > 1:
            runner.layer.context.all_reduce_sum = add_up
        own.append(runner.run([np.float32(weight)]))
        asks = ignore and devices > 1 and (normalization == "VALID" or (classes and normalization == ""))
        assert [list(np.ravel(count)) for count in counts] == ([[counted(labels[part], 9)]] * len(counts))
        assert bool(counts) == asks == runner.layer.communicates()
    assert_near(np.mean([result.tops[0] for result in own]), whole.tops[0], 1e-5, "loss")
    together = np.concatenate([result.bottom_diffs[0] for result in own]) / devices
    assert_near(together, whole.bottom_diffs[0], 1e-5, "gradient")


def test_a_test_nets_loss_is_its_own_devices():
    """A test batch is scored by one device."""
    inputs = [gaussian((4, 3)), labels_for((4, 3), 1)]
    for mode in ("VALID", "NONE"):
        text = f"type: 'SoftmaxWithLoss' loss_param {{ normalization: {mode} ignore_label: 1 }}"
        one, two = (Runner(text, inputs, phase=TEST, shard=shard).forward() for shard in (Shard(), Shard(1, 2)))
        assert one[0] == two[0]


def test_sigmoid_cross_entropy_of_large_scores_is_finite():
    x, t = np.array([[-1e4, 1e4]], np.float32), np.array([[1, 0]], np.float32)
    result = Runner("type: 'SigmoidCrossEntropyLoss'", [x, t]).run([np.float32(1)])
    assert result.tops[0] == 2e4
    assert result.bottom_diffs[0].tolist() == [[-1, 1]]


@pytest.mark.parametrize("ignored_score", [np.inf, -np.inf, np.nan, 3e38])
def test_sigmoid_cross_entropy_ignores_whatever_the_score_is(ignored_score):
    x, t = np.array([[ignored_score, 2]], np.float32), np.array([[255, 1]], np.float32)
    text = "type: 'SigmoidCrossEntropyLoss' loss_param { ignore_label: 255 normalization: VALID }"
    result = Runner(text, [x, t]).run([np.float32(1)])
    assert result.tops[0] == pytest.approx(cross_entropy(2.0, 1.0), rel=1e-6)
    np.testing.assert_allclose(result.bottom_diffs[0], [[0, 1 / (1 + np.exp(-2.0)) - 1]], rtol=1e-5)


@pytest.mark.parametrize("shapes", [((4, 3), (4, 3)), ((5, 1), (5,)), ((2, 3, 2, 2), (2, 12)), ((2, 12), (2, 3, 2, 2))])
def test_euclidean(shapes):
    def reference(a, b):
        return ((a - b.reshape(a.shape)) ** 2).sum() / (2 * a.shape[0])

    check_layer("type: 'EuclideanLoss'", [gaussian(shapes[0]), gaussian(shapes[1], 1)], reference, loss_weight=0.7)


@pytest.mark.parametrize(
    ("kind", "shapes", "message"),
    [
        ("EuclideanLoss", ((4, 3), (3, 4)), r"same first axis, N \('a' is 4 3 \(12\); 'b' is 3 4 \(12\)\)"),
        ("EuclideanLoss", ((4, 3), (4, 2)), r"same count \('a' is 4 3"),
        ("SigmoidCrossEntropyLoss", ((4, 3), ()), "need a first axis"),
        ("SoftmaxWithLoss", ((4, 3), (4, 3)), r"one label for each position: 4 for classes along axis 1, not 12"),
        ("Accuracy", ((4, 3, 2), (4,)), r"layer 'L' \(Accuracy\): needs one label for each position: 8"),
        ("Accuracy accuracy_param { top_k: 4 }", ((4, 3), (4,)), "top_k is 4, but there are 3 classes"),
    ],
)
def test_shapes_that_do_not_fit(kind, shapes, message):
    name, _, rest = kind.partition(" ")
    with pytest.raises(ShapeError, match=message):
        Runner(f"type: '{name}' {rest}", [np.zeros(shape, np.float32) for shape in shapes])


@settings(max_examples=25)
@given(case=class_scores(), top_k=st.integers(1, 3), ignored=st.sampled_from([None, 0, 255]), ties=st.booleans())
def test_accuracy(case, top_k, ignored, ties):
    shape, axis = case
    top_k = min(top_k, shape[axis])
    x, labels = gaussian(shape), labels_for(shape, axis)
    if ties:
        x = np.round(x)
    if ignored == 255:
        labels.reshape(-1)[::2] = 255
    counted = labels != (-1 if ignored is None else ignored)
    own = np.take_along_axis(x, np.expand_dims(labels.astype(int) % shape[axis], axis), axis)
    right = ((x >= own).sum(axis) - 1 < top_k) & counted
    per_class = [
        right[(labels == c) & counted].mean() if ((labels == c) & counted).any() else 0 for c in range(shape[axis])
    ]
    ignore = "" if ignored is None else f"ignore_label: {ignored}"
    text = f"type: 'Accuracy' accuracy_param {{ axis: {axis} top_k: {top_k} {ignore} }}"
    wanted = right.sum() / max(counted.sum(), 1)
    check_layer(text, [x, labels], lambda *_: (wanted, np.array(per_class)), tops=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["SoftmaxWithLoss", "Accuracy"])
@pytest.mark.parametrize("bad", [5, -1, 1e6])
def test_a_label_outside_the_classes(kind, bad, backend):
    labels = labels_for((4, 5, 2, 2), 1)
    labels[2, 1, 0] = bad
    runner = Runner(f"type: '{kind}'", [gaussian((4, 5, 2, 2)), labels], backend, first_sample=100)
    runner.forward()
    wanted = rf"layer 'L' \({kind}\): the label of sample 102 is .*, outside the 5 classes, 0 to 4; correct the data"
    with backend_named(backend).activate():
        with pytest.raises(DataError, match=wanted):
            runner.layer.raise_device_errors()
        runner.layer.raise_device_errors()  # reported once
    runner.forward([runner.inputs[0], labels_for((4, 5, 2, 2), 1)])
    runner.layer.raise_device_errors()


def test_a_bad_label_found_late_names_the_range():
    labels = labels_for((4, 5), 1)
    labels[3] = 9
    runner = Runner("type: 'SoftmaxWithLoss'", [gaussian((4, 5)), labels], first_sample=8)
    for _ in range(3):
        runner.forward()
    with pytest.raises(DataError, match="of the samples from 8 on, number 3 of its batch, is outside the 5 classes"):
        runner.layer.raise_device_errors()


def test_ignored_labels_are_not_bad():
    labels = np.array([0, 255, 1], np.float32)
    for text in ("type: 'Accuracy' accuracy_param", "type: 'SoftmaxWithLoss' loss_param"):
        runner = Runner(text + " { ignore_label: 255 }", [gaussian((3, 2)), labels])
        runner.forward()
        runner.layer.raise_device_errors()
        other = Runner(text + " { ignore_label: 254 }", [gaussian((3, 2)), labels])
        other.forward()
        with pytest.raises(DataError, match="is 255, outside the 2 classes"):
            other.layer.raise_device_errors()


def test_a_bad_label_is_named_as_the_data_layer_names_it():
    labels = np.array([0, 1, 7], np.float32)
    runner = Runner("type: 'Accuracy'", [gaussian((3, 2)), labels], pass_number=4, first_sample=12)
    runner.layer.context.describe_sample = lambda number, place: f"record {place} of pass {number}"
    runner.forward()
    with pytest.raises(DataError, match=r"record 2 of pass 4 \(sample 14\) is 7, outside the 2 classes"):
        runner.layer.raise_device_errors()


@settings(max_examples=20)
@given(case=class_scores(), ignored=st.sampled_from([None, 0, 255]), mode=st.sampled_from(["VALID", "BATCH_SIZE"]))
def test_softmax_loss_with_a_weight_for_each_class(case, ignored, mode):
    shape, axis = case
    labels = labels_for(shape, axis)
    if ignored == 255:
        labels.reshape(-1)[::3] = 255
    weights = np.random.default_rng(1).uniform(0.2, 3, shape[axis]).astype(np.float32)

    def reference(x, labels):
        target = labels.astype(int) % shape[axis]
        p = np.take_along_axis(softmax(x, axis), np.expand_dims(target, axis), axis)
        counted = labels != (-1 if ignored is None else ignored)
        losses = -np.log(np.squeeze(p, axis)) * weights[target] * counted
        return losses.sum() / max(counted.sum() if mode == "VALID" else np.prod(shape[:axis]), 1)

    ignore = "" if ignored is None else f"ignore_label: {ignored}"
    listed = " ".join(f"class_weighting: {w!r}" for w in weights.tolist())
    loss = f"loss_param {{ {ignore} normalization: {mode} weight_by_label_freqs: true {listed} }}"
    text = f"type: 'SoftmaxWithLoss' softmax_param {{ axis: {axis} }} {loss}"
    check_layer(text, [gaussian(shape), labels], reference, loss_weight=2.0)


def test_class_weights_count_only_if_they_are_asked_for():
    inputs = [gaussian((4, 3)), labels_for((4, 3), 1)]
    plain = Runner("type: 'SoftmaxWithLoss'", inputs).forward()
    listed = "class_weighting: 9 class_weighting: 1 class_weighting: 1"
    assert Runner(f"type: 'SoftmaxWithLoss' loss_param {{ {listed} }}", inputs).forward() == plain


def test_class_weights_that_do_not_fit():
    inputs = [gaussian((4, 3)), labels_for((4, 3), 1)]
    with pytest.raises(ShapeError, match="class_weighting has 1 weights for 3 classes"):
        Runner("type: 'SoftmaxWithLoss' loss_param { weight_by_label_freqs: true class_weighting: 1 }", inputs)
    with pytest.raises(ConfigError, match="both label_smoothing and weight_by_label_freqs"):
        Runner("type: 'SoftmaxWithLoss' loss_param { weight_by_label_freqs: true label_smoothing: 0.1 }", inputs)

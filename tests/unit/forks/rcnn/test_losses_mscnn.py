"""DetectionLoss of MS-CNN and DetectionGroupLoss against loops over plain numbers, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError, ShapeError

ROWS, COLUMNS, CLASSES = 5, 6, 3
MEAN, STD = (0.02, -0.01, 0.05, 0.03), (0.1, 0.1, 0.2, 0.2)
REGRESSION = (
    "bbox_reg_param { " + " ".join(f"bbox_mean: {m} bbox_std: {s}" for m, s in zip(MEAN, STD, strict=True)) + " }"
)
BASE = "field_w: 24 field_h: 20 downsample_rate: 8"


def labels(count: int, seed: int = 0, classes: int = CLASSES) -> Any:
    """Maps with some objects; half of the background overlaps an object by more than 0.5."""
    rng = np.random.default_rng(seed)
    found = np.zeros((count, 6, ROWS, COLUMNS), np.float32)
    found[:, 0] = rng.integers(1, classes, found[:, 0].shape) * (rng.random(found[:, 0].shape) < 0.15)
    x, y = (np.arange(COLUMNS) + 0.5) * 8, (np.arange(ROWS) + 0.5)[:, None] * 8
    found[:, 1] = x + rng.uniform(-4, 4, found[:, 0].shape)
    found[:, 2] = y + rng.uniform(-4, 4, found[:, 0].shape)
    found[:, 3:5] = rng.uniform(15, 30, found[:, 3:5].shape)
    found[:, 5] = rng.uniform(0, 1, found[:, 0].shape)
    return found


def maps(count: int = 2, classes: int = CLASSES) -> Any:
    """Scores and offsets within their limits."""
    rng = np.random.default_rng(5)
    scores = rng.normal(0, 1, (count, classes, ROWS, COLUMNS))
    return np.concatenate([scores, rng.normal(0, 0.6, (count, 4, ROWS, COLUMNS))], 1).astype(np.float32)


def target(label: Any, row: int, column: int, field: Any) -> list[float]:
    x, y, w, h = (float(v) for v in label[1:5, row, column])
    values = [
        (x - (column + 0.5) * 8) / field[0],
        (y - (row + 0.5) * 8) / field[1],
        math.log(max(w, 2) / field[0]),
        math.log(max(h, 2) / field[1]),
    ]
    return [(v - m) / s for v, m, s in zip(values, MEAN, STD, strict=True)]


def limited(values: Any, place: float, size: float) -> Any:
    pairs = []
    for which, limit in ((slice(0, 2), 1 / place), (slice(2, 4), math.log(size))):
        mean, std = np.mean(MEAN[which]), math.sqrt(np.prod(STD[which]))
        pairs += [((-limit - mean) / std, (limit - mean) / std)] * 2
    return [min(max(float(v), low), high) for v, (low, high) in zip(values, pairs, strict=True)]


def smooth(d: float) -> float:
    return abs(d) - 0.5 if abs(d) >= 1 else d * d / 2


def class_loss(scores: Any, label: int) -> float:
    scores = scores.astype(float) - scores.max()
    return float(np.log(np.exp(scores).sum()) - scores[label])


def hardest(value: Any, label: Any, multiple: int, threshold: float, classes: int) -> set[tuple[int, int]]:
    """The background positions that bootstrap mines in an image."""
    found: set[tuple[int, int]] = set()
    places = [at for at in np.ndindex(ROWS, COLUMNS) if not label[0][at] and label[5][at] < threshold]
    for number in range(1, classes):
        count = max(4, multiple * int((label[0] == number).sum()))
        found |= set(sorted(places, key=lambda at: -value[number][at])[:count])
    return found


def loss_of(
    value: Any,
    label: Any,
    kept: list[set[Any]],
    *,
    weights: tuple[float, float] = (1, 1),
    iou: bool = False,
    factor: float = 1,
    box: Any = smooth,
    place: float = 2,
    size: float = 2,
) -> tuple[float, float]:
    """Both numbers of DetectionLoss, given the background positions that count."""
    classes, boxes, total, count = 0.0, 0.0, 0, 0
    for image, found in enumerate(kept):
        for at in np.ndindex(ROWS, COLUMNS):
            number = int(label[image, 0][at])
            if number or at in found:
                weight = (float(label[image, 5][at]) if iou else 1) * weights[0] if number else weights[1]
                classes += weight * class_loss(value[image, :CLASSES, at[0], at[1]], number)
                total += 1
            if number:
                predicted = limited(value[image, CLASSES:, at[0], at[1]], place, size)
                wanted = target(label[image], *at, (24, 20))
                boxes += sum(box(p - w) for p, w in zip(predicted, wanted, strict=True))
                count += 4
    part = factor * boxes / count
    return classes / total + part, part


def run(fields: str, value: Any, label: Any, backend: str = "cpu", **more: Any) -> Any:
    given = (f"cls_num: {CLASSES}", "field_w: 24", "field_h: 20", "downsample_rate: 8")
    fields += " " + " ".join(one for one in given if one.split(" ")[0] not in fields)
    text = f'type: "DetectionLoss" detection_loss_param {{ {fields} }} {REGRESSION}'
    return Runner(text, [value, label], backend, **more).forward()[0].ravel()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ("", {}),
        ("lambda: 0.3", {"factor": 0.3}),
        ("bb_smooth: false", {"box": lambda d: d * d / 2}),
        ("field_xyr: 6 field_whr: 1.2", {"place": 6, "size": 1.2}),
        ("bg_threshold: 0.3", {}),
        ("iou_weighted: true", {"iou": True}),
    ],
)
def test_all_background_counts(backend: str, fields: str, arguments: Any) -> None:
    value, label = maps(), labels(2)
    threshold = 0.3 if "bg_threshold" in fields else 0.5
    kept = [{at for at in np.ndindex(ROWS, COLUMNS) if not one[0][at] and one[5][at] < threshold} for one in label]
    found = run(f'sample_mode: "all" {fields}', value, label, backend)
    assert_near(found, loss_of(value, label, kept, **arguments), 1e-5, "loss")


def test_bootstrap_counts_the_background_with_the_highest_scores() -> None:
    value, label = maps(), labels(2)
    for multiple in (1, 2):
        kept = [hardest(v, one, multiple, 0.5, CLASSES) for v, one in zip(value, label, strict=True)]
        found = run(f'sample_mode: "bootstrap" bg_multiple: {multiple}', value, label)
        assert_near(found, loss_of(value, label, kept), 1e-5, "loss")


def test_weights_of_objects_and_background() -> None:
    value, label = maps(), labels(2)
    kept = [hardest(v, one, 2, 0.5, CLASSES) for v, one in zip(value, label, strict=True)]
    objects, background = int((label[:, 0] != 0).sum()), sum(map(len, kept))
    total = objects + background
    weights = (total / 3 / objects, total * 2 / 3 / background)
    found = run('sample_mode: "bootstrap" bg_multiple: 2 pos_neg_weighted: true', value, label)
    assert_near(found, loss_of(value, label, kept, weights=weights), 1e-5, "loss")


def test_random_background_belongs_to_the_sample() -> None:
    """The gradient shows which positions count: as many as are drawn, the same for a sample in any batch."""
    value, label = maps(), labels(2)
    text = f'type: "DetectionLoss" detection_loss_param {{ cls_num: {CLASSES} {BASE} bg_multiple: 1 }} {REGRESSION}'

    def counted(sample: int, seed: int, mode: str = "random") -> Any:
        param = text.replace("bg_multiple", f'sample_mode: "{mode}" bg_multiple')
        runner = Runner(param, [value[sample:], label[sample:]], first_sample=7 + sample, seed=seed)
        runner.forward()
        return np.abs(runner.backward([np.ones((1, 1, 1, 2))], [True, False])[0][:, :CLASSES]).sum(1) > 0

    both, second, other = counted(0, 1), counted(1, 1), counted(0, 2)
    np.testing.assert_array_equal(both[1:], second)
    assert not np.array_equal(both, other)
    background = both & (label[:, 0] == 0)
    assert not (background & (label[:, 5] >= 0.5)).any()
    assert 0 < background.sum() <= 2 * max(8, (label[:, 0] != 0).sum())
    assert counted(0, 1, "mixture").sum() > 0


def test_objectness_and_ignored_labels() -> None:
    value, label = maps(classes=2), labels(2, classes=9)
    text = f'type: "DetectionLoss" detection_loss_param {{ cls_num: 2 {BASE} sample_mode: "all" objectness: true }}'
    as_one = label.copy()
    as_one[:, 0] = label[:, 0] != 0
    plain = text.replace("objectness: true", "")
    found, wanted = (
        Runner(f"{t} {REGRESSION}", [value, one]).forward()[0] for t, one in ((text, label), (plain, as_one))
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    label, value = labels(2), maps()
    cut = label.copy()
    cut[:, 5] = np.where(label[:, 0] == 2, 1, label[:, 5])
    cut[:, 0] = np.where(label[:, 0] == 2, 0, label[:, 0])
    text = f'type: "DetectionLoss" detection_loss_param {{ cls_num: {CLASSES} {BASE} sample_mode: "all" }} {REGRESSION}'
    ignoring = Runner(f"{text} loss_param {{ ignore_label: 2 }}", [value, label]).forward()[0]
    np.testing.assert_allclose(ignoring, Runner(text, [value, cut]).forward()[0], rtol=1e-5)


def check_gradient(text: str, inputs: list[Any], gradients: int, backend: str) -> None:
    """Differences of the first number; a layer with other positions would show a jump."""
    runner = Runner(text, inputs, backend, loss_weight=2)
    propagate = [index < gradients for index in range(len(inputs))]
    runner.forward()
    found = runner.backward([np.full((1, 1, 1, 2), 2, np.float32)], propagate)
    rng = np.random.default_rng(0)
    for index in range(gradients):
        for _ in range(5):
            direction = rng.choice([-1.0, 1.0], inputs[index].shape)
            ends = []
            for sign in (1, -1):
                moved = list(inputs)
                moved[index] = (inputs[index] + sign * 1e-3 * direction).astype(np.float32)
                ends.append(2 * float(runner.forward(moved)[0].ravel()[0]))
            computed = float((found[index] * direction).sum())
            scale = float(np.abs(found[index]).sum())
            assert abs((ends[0] - ends[1]) / 2e-3 - computed) < 3e-3 * max(scale, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", ["", "bb_smooth: false lambda: 0.5", "iou_weighted: true pos_neg_weighted: true"])
def test_gradient(backend: str, more: str) -> None:
    fields = f'cls_num: {CLASSES} {BASE} sample_mode: "all" field_xyr: 0.1 field_whr: 99 {more}'
    text = f'type: "DetectionLoss" detection_loss_param {{ {fields} }} {REGRESSION}'
    check_gradient(text, [maps(), labels(2)], 1, backend)


def test_without_objects_only_background_counts() -> None:
    value, label = maps(), labels(2)
    label[:, 0] = 0
    found = run('sample_mode: "bootstrap" pos_neg_weighted: true bg_multiple: 3', value, label)
    assert found[0] > 0
    assert found[1] == 0
    label[:, 5] = 1
    assert run('sample_mode: "all"', value, label).tolist() == [0, 0]


def on_two_devices(text: str, inputs: list[Any], per_sample: int) -> tuple[Any, list[Any]]:
    """The mean of the losses, and the gradients, of two devices with half of the batch each."""
    totals: list[Any] = []

    def run_each(add_up: Any) -> list[Runner]:
        runners = []
        for rank in range(2):
            half = len(inputs[0]) // 2
            part = [value[rank * half : (rank + 1) * half] for value in inputs]
            first = 7 + rank * half // per_sample
            runner = Runner(text, part, shard=Shard(rank, 2, 2), first_sample=first)
            runner.layer.context.all_reduce_sum = add_up
            runner.forward()
            runners.append(runner)
        return runners

    def set_sum(values: Any) -> None:
        values[...] = sum(totals)

    run_each(lambda values: totals.append(np.array(values)))
    runners = run_each(set_sum)
    losses = [runner.top[0].host_data() for runner in runners]
    wanted = [index < len(inputs) - 1 for index in range(len(inputs))]
    gradients = [runner.backward([np.ones((1, 1, 1, 2), np.float32)], wanted) for runner in runners]
    joined = [np.concatenate([one[i] for one in gradients]) / 2 for i in range(len(inputs) - 1)]
    return (losses[0] + losses[1]) / 2, joined


@pytest.mark.parametrize("kind", ["random", "bootstrap"])
def test_two_devices_give_the_loss_of_one(kind: str) -> None:
    single = f'cls_num: {CLASSES} {BASE} sample_mode: "{kind}" pos_neg_weighted: true bg_multiple: 2'
    texts = (
        (f'type: "DetectionLoss" detection_loss_param {{ {single} }} {REGRESSION}', [maps(), labels(2)], 1),
        (group_text(f"neg_mining_type: '{kind}' pos_neg_weighted: true bg_multiple: 2"), group_inputs(), 2),
    )
    for text, inputs, per_sample in texts:
        runner = Runner(text, inputs, first_sample=7)
        whole = runner.forward()[0]
        wanted = [index < len(inputs) - 1 for index in range(len(inputs))]
        gradients = runner.backward([np.ones((1, 1, 1, 2), np.float32)], wanted)
        loss, parts = on_two_devices(text, inputs, per_sample)
        np.testing.assert_allclose(loss, whole, rtol=1e-5)
        for found, expected in zip(parts, gradients, strict=False):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ("coord_num: 5", ConfigError, "coord_num is 5"),
        ("objectness: true", ConfigError, "2 with objectness"),
        ("field_w: 0", ConfigError, "all above 0"),
        ("field_xyr: 0", ConfigError, "field_xyr is 0"),
        ("cls_num: 4", ShapeError, r"maps \(N, 8, H, W\)"),
    ],
)
def test_settings_that_do_not_fit(fields: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(fields, maps(), labels(2))


def test_labels_outside_the_classes() -> None:
    label = labels(2)
    label[1, 0, 2, 3] = 7
    with pytest.raises(DataError, match=r"'b' has the label 7 in image 1 of the batch at \(2, 3\)"):
        run("", maps(), label)


# -- DetectionGroupLoss --------------------------------------------------------------------------------

KINDS = ((24, 20), (16, 30))
GROUP = "cls_num: 3 stride: 8 field_w: 24 field_w: 16 field_h: 20 field_h: 30"


def group_inputs() -> list[Any]:
    value = maps(4)
    return [value[:, :CLASSES], value[:, CLASSES:], labels(4, 3)]


def group_text(fields: str) -> str:
    return f'type: "DetectionGroupLoss" detection_group_loss_param {{ {GROUP} {fields} }} {REGRESSION}'


def group_loss(
    inputs: list[Any],
    kept: list[set[Any]],
    *,
    weights: tuple[float, float] = (1, 1),
    factor: float = 1,
    box: Any = smooth,
) -> tuple[float, float]:
    """Both numbers, given the positions (map, row, column) of each image that count."""
    scores, offsets, label = inputs
    classes, boxes, total, count = 0.0, 0.0, 0, 0
    for image, found in enumerate(kept):
        for kind, row, column in found:
            at = image * len(KINDS) + kind
            number = int(label[at, 0, row, column])
            classes += weights[0 if number else 1] * class_loss(scores[at, :, row, column], number)
            total += 1
            if number:
                wanted = target(label[at], row, column, KINDS[kind])
                boxes += sum(box(float(p) - w) for p, w in zip(offsets[at, :, row, column], wanted, strict=True))
                count += 4
    part = factor * boxes / count
    return classes / total + part, part


def mined(inputs: list[Any], multiple: int, threshold: float = 0.5, least: int = 5) -> Any:
    """All objects and the hardest background positions of both images."""
    scores, _, label = inputs
    kept = []
    for image in range(2):
        places = [(kind, *at) for kind in range(2) for at in np.ndindex(ROWS, COLUMNS)]
        number = {p: int(label[2 * image + p[0], 0, p[1], p[2]]) for p in places}
        objects = {p for p in places if number[p]}
        rest = [p for p in places if not number[p] and label[2 * image + p[0], 5, p[1], p[2]] < threshold]

        def rank(p: Any, image: int = image) -> float:
            return class_loss(scores[2 * image + p[0], :, p[1], p[2]], 0)

        kept.append(objects | set(sorted(rest, key=rank, reverse=True)[: max(multiple * len(objects), least)]))
    return kept


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fields", "mining", "arguments"),
    [
        ("bg_multiple: 1", {"multiple": 1}, {}),
        ("bg_multiple: 2 neg_ranking_type: 'conf_prob'", {"multiple": 2}, {}),
        ("bg_multiple: 0 min_num_neg: 9", {"multiple": 0, "least": 9}, {}),
        ("bg_multiple: 2 bg_threshold: 0.3", {"multiple": 2, "threshold": 0.3}, {}),
        ("bg_multiple: 1 lambda: 0.3", {"multiple": 1}, {"factor": 0.3}),
        ("bg_multiple: 1 bbox_loss_type: 'Euclidean_L2'", {"multiple": 1}, {"box": lambda d: d * d / 2}),
    ],
)
def test_group_loss_with_hard_background(backend: str, fields: str, mining: Any, arguments: Any) -> None:
    inputs = group_inputs()
    text = group_text(f"neg_mining_type: 'bootstrap' {fields}")
    found = Runner(text, inputs, backend).forward()[0].ravel()
    assert_near(found, group_loss(inputs, mined(inputs, **mining), **arguments), 1e-5, "loss")


def test_group_weights() -> None:
    inputs = group_inputs()
    kept = mined(inputs, 1)
    objects = int((inputs[2][:, 0] != 0).sum())
    total = sum(map(len, kept))
    weights = (total / 2 / objects, total / 2 / (total - objects))
    text = group_text("neg_mining_type: 'bootstrap' bg_multiple: 1 pos_neg_weighted: true")
    assert_near(Runner(text, inputs).forward()[0].ravel(), group_loss(inputs, kept, weights=weights), 1e-5, "loss")


@pytest.mark.parametrize("kind", ["random", "bootstrap", "mixture"])
def test_a_batch_size_limits_the_positions_of_an_image(kind: str) -> None:
    inputs = group_inputs()
    text = group_text(f"batch_size: 12 bg_multiple: 3 neg_mining_type: '{kind}'")
    runner = Runner(text, inputs)
    runner.forward()
    gradient = runner.backward([np.ones((1, 1, 1, 2))], [True, True, False])
    counted = np.abs(gradient[0]).sum(1).reshape(2, -1) > 0
    objects = (inputs[2][:, 0] != 0).reshape(2, -1)
    assert (counted.sum(1) == 12).all()
    assert (counted & objects).sum(1).tolist() == np.minimum(objects.sum(1), 3).tolist()
    np.testing.assert_array_equal((np.abs(gradient[1]).sum(1).reshape(2, -1) > 0), counted & objects)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", ["", "bbox_loss_type: 'Euclidean_L2' lambda: 2", "field_whr: 99 field_xyr: 0.1"])
def test_group_gradient(backend: str, more: str) -> None:
    check_gradient(group_text(f"min_num_neg: 99 bg_multiple: 99 {more}"), group_inputs(), 2, backend)


def test_group_limits_act_if_both_are_given() -> None:
    inputs = group_inputs()
    plain, one, both = (
        Runner(group_text(f"min_num_neg: 99 {fields}"), inputs).forward()[0].ravel()[1]
        for fields in ("", "field_whr: 1.1", "field_whr: 1.1 field_xyr: 9")
    )
    assert plain == one
    assert plain != both


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("neg_mining_type: 'x'", "neg_mining_type is 'x'"),
        ("neg_ranking_type: 'x'", "neg_ranking_type is 'x'"),
        ("bbox_loss_type: 'x'", "bbox_loss_type is 'x'"),
        ("batch_size: 0", "batch_size is 0"),
        ("objectness: true", "2 with objectness"),
        ("field_w: 3", "as many field_w as field_h"),
    ],
)
def test_group_settings_that_do_not_fit(fields: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner(group_text(fields), group_inputs())


def test_group_shapes_that_do_not_fit() -> None:
    inputs = group_inputs()
    with pytest.raises(ShapeError, match=r"N \* 2"):
        Runner(group_text(""), [value[:3] for value in inputs])

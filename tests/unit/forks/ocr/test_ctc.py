"""CTC against a sum over all paths and against PyTorch; the decoder and the accuracies against loops over labels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, check_layer, gaussian

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.forks.ocr.ctc import ctc_losses

WARP = "type: 'WarpCTCLoss'"
CTC = "type: 'CtcLoss' ctc_loss_param { alphabet_size: 4 blank_label: 3 time_step: 5 }"
DECODER = "type: 'CTCGreedyDecoder'"
ACCURACY = "type: 'LabelsequenceAccuracy' labelsequence_accuracy_param { blank_label: 2 }"


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def spelled(path, blank):
    merged = [key for key, _ in itertools.groupby(path)]
    return [label for label in merged if label != blank]


def loss_of(x, labels, blank):
    """Of one sequence (T, C): minus the logarithm of the sum over all paths that spell the labels; 0 if none does."""
    p = softmax(x)
    paths = [path for path in itertools.product(range(x.shape[1]), repeat=len(x)) if spelled(path, blank) == labels]
    return -np.log(sum(np.prod(p[range(len(x)), list(path)]) for path in paths)) if paths else 0.0


LABELS = [[1, 2], [1, 1], [], [2, 1, 2, 1], [1, 1, 1], [2]]
"""In five time steps the paths of [1, 1, 1] need each of them."""


def rows(labels, padding, columns=5):
    return np.array([row + [padding] * (columns - len(row)) for row in labels], np.float32)


@pytest.mark.parametrize("blank", [0, 3])
def test_the_loss_is_that_of_all_paths(blank):
    x = gaussian((5, 6, 4)).astype(np.float64)
    lengths = np.array([len(row) for row in LABELS])
    labels = rows(LABELS, -1).astype(int)
    steps = np.array([5, 3, 5, 5, 4, 1])  # three equal labels need five time steps, not four
    wanted = [loss_of(x[:t, n], LABELS[n], blank) for n, t in enumerate(steps)]
    losses, gradient = ctc_losses(x, labels, lengths, steps, blank)
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)
    assert wanted[4] == 0 < min(wanted[:4])
    for place in np.ndindex(x.shape):
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[place] += sign * 1e-5
            sides.append(ctc_losses(moved, labels, lengths, steps, blank)[0].sum())
        np.testing.assert_allclose(gradient[place], (sides[0] - sides[1]) / 2e-5, atol=1e-8)
    assert not gradient[:, 4].any()
    assert not gradient[1:, 5].any()


def test_pytorch_computes_the_same():
    torch = pytest.importorskip("torch")
    times, samples, classes = 30, 8, 20
    rng = np.random.default_rng(3)
    x = (4 * gaussian((times, samples, classes))).astype(np.float64)
    labels = rng.integers(1, 5, (samples, 12))  # with many repetitions
    lengths, steps = rng.integers(0, 13, samples), rng.integers(3, times + 1, samples)
    scores = torch.tensor(x, requires_grad=True)
    wanted = torch.nn.functional.ctc_loss(
        scores.log_softmax(2), *map(torch.tensor, (labels, steps, lengths)), 0, "none", zero_infinity=True
    )
    wanted.sum().backward()
    losses, gradient = ctc_losses(x, labels, lengths, steps, 0)
    np.testing.assert_allclose(losses, wanted.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(gradient, scores.grad.numpy(), atol=1e-10)


@pytest.mark.parametrize("shape", [(5, 1, 4), (5, 1, 4, 1)])
@pytest.mark.parametrize(
    ("text", "row", "labels", "blank"),
    [
        (WARP, [[2, 0, 1]], [2, 1], 0),
        (WARP, [[2, 2, -1, 7]], [2, 2], 0),
        (WARP + " ctc_loss_param { blank_index: -1 }", [[2, 0, 3]], [2, 0], 3),
        (WARP + " ctc_loss_param { blank_index: 1 }", [[1, 1]], [], 1),
        (CTC, [[2, 0, 3, 3]], [2, 0], 3),
    ],
)
def test_labels_and_blanks(text, row, labels, blank, shape):
    def reference(x, _):
        return loss_of(x.reshape(5, 4), labels, blank)

    check_layer(text, [gaussian(shape), np.array(row, np.float32)], reference)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_is_a_mean_and_the_gradient_that_of_the_sum(backend):
    x, blank = gaussian((5, 6, 4)), 0
    steps = np.full(6, 5)
    losses, gradient = ctc_losses(x, rows(LABELS, -1).astype(int), np.array([len(row) for row in LABELS]), steps, blank)
    runner = Runner(WARP, [x, rows(LABELS, 0)], backend, loss_weight=3)
    np.testing.assert_allclose(runner.forward()[0], losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(runner.backward([np.float32(3)], [True, False])[0], 3 * gradient, atol=1e-6)
    halves = Runner(WARP, [x, rows(LABELS, 0)], backend, shard=Shard(0, 2)).run([np.float32(1)])
    np.testing.assert_allclose(halves.bottom_diffs[0], 2 * gradient, atol=1e-6)


def test_a_loss_of_fewer_time_steps():
    x = gaussian((7, 1, 4))
    found = Runner(CTC, [x, np.array([[0, 2]], np.float32)]).run([np.float32(1)])
    np.testing.assert_allclose(found.tops[0], loss_of(x[:5, 0].astype(np.float64), [0, 2], 3), rtol=1e-6)
    assert not found.bottom_diffs[0][5:].any()
    assert found.bottom_diffs[0][:5].all()


def test_scores_that_are_not_finite_show():
    x = gaussian((5, 2, 4))
    x[1, 1, 2] = np.nan
    assert np.isnan(Runner(WARP, [x, np.ones((2, 1), np.float32)]).forward()[0])


@pytest.mark.parametrize(("blank", "offset"), [(0, 1), (3, 0)])
def test_flags_and_columns_of_labels(blank, offset):
    """caffe_ocr's form of three bottoms: classes count from the one behind blank 0; empty sequences do not count."""
    x = gaussian((5, 3, 4))
    flags = np.ones((5, 3), np.float32)
    flags[0] = flags[3, 1] = 0
    labels = np.array([[0, 1, -1], [2, -1, -1], [-1, 2, -1], [-1, -1, -1], [-1, -1, -1]], np.float32)
    losses = [
        loss_of(x[:5, 0].astype(np.float64), [offset, 2 + offset], blank),
        loss_of(x[:3, 1].astype(np.float64), [1 + offset], blank),
    ]
    text = WARP + f" ctc_loss_param {{ blank_index: {blank} }}"
    found = Runner(text, [x, flags, labels]).run([np.float32(1)])
    np.testing.assert_allclose(found.tops[0], np.mean(losses), rtol=1e-6)
    assert found.bottom_diffs[0][:3, 1].all() and not found.bottom_diffs[0][3:, 1].any()
    assert not found.bottom_diffs[0][:, 2].any()


def test_lengths_of_both():
    x = gaussian((5, 2, 4))
    bottoms = [x, np.array([5, 3], np.float32), np.array([1, 2], np.float32), np.array([[1, 2], [9, 3]], np.float32)]
    wanted = [loss_of(x[:5, 0].astype(np.float64), [1], 0), loss_of(x[:3, 1].astype(np.float64), [2, 3], 0)]
    found = Runner(WARP, bottoms).forward()[0]
    np.testing.assert_allclose(found, np.mean(wanted), rtol=1e-6)


def zeros(*shapes):
    return [np.zeros(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("text", "inputs", "message"),
    [
        (WARP, zeros((5, 2), (2, 3)), "needs scores .time steps"),
        (WARP, zeros((5, 2, 0), (2, 3)), "none of them 0"),
        (WARP, zeros((5, 2, 4), (3, 3)), "a row of labels for each of 2 sequences"),
        (WARP, zeros((5, 2, 4), (5, 2), (2, 3)), "a column for each of 2 sequences"),
        (WARP, zeros((5, 2, 4), (4, 2), (3, 2)), "needs flags"),
        (WARP, zeros((5, 2, 4), (2,), (3,), (3, 2)), "two lengths"),
        (WARP + " ctc_loss_param { blank_index: 4 }", zeros((5, 2, 4), (2, 3)), "blank is class 4"),
        (CTC, zeros((5, 2, 5), (2, 3)), "alphabet_size 4"),
        (CTC, zeros((4, 2, 4), (2, 3)), "time_step is 5"),
        (DECODER, zeros((5, 2, 4), (3, 3)), "a row of labels"),
        (ACCURACY, zeros((2, 5, 4), (3, 3)), "a row of labels"),
        (ACCURACY, zeros((2, 5, 2), (2, 3)), "blank is class 2"),
    ],
)
def test_what_does_not_fit_is_refused(text, inputs, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(text, inputs)


def test_labels_and_lengths_outside_the_scores_are_refused():
    x = zeros((5, 2, 4))[0]
    with pytest.raises(DataError, match="label 1 of sequence 1 is class 4, outside the 4 classes"):
        Runner(WARP, [x, np.array([[1, 1], [1, 4]], np.float32)]).forward()
    with pytest.raises(DataError, match="sequence 1 has 6 time steps; there are 0 to 5"):
        Runner(WARP, [x, *map(np.float32, ([5, 6], [1, 1], [[1, 1]]))]).forward()
    with pytest.raises(DataError, match="sequence 1 has 2 labels; there are 0 to 1"):
        Runner(WARP, [x, *map(np.float32, ([5, 5], [1, 2], [[1, 1]]))]).forward()


# -- the decoder and the accuracies --------------------------------------------------------------------

PATHS = [[1, 1, 0, 1, 2], [0, 0, 0, 0, 0], [2, 1, 2, 1, 2], [2, 2, 2, 0, 0]]


def scores(paths, classes=3):
    """(T, N, C) whose highest score in each time step is the path's class."""
    x = gaussian((len(paths[0]), len(paths), classes))
    for n, path in enumerate(paths):
        x[range(len(path)), n, path] += 9
    return x


def distance(a, b):
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("blank", "merge"), [(0, True), (0, False), (-1, True)])
def test_decoder(blank, merge, backend):
    text = DECODER + f" ctc_decoder_param {{ blank_index: {blank} ctc_merge_repeated: {str(merge).lower()} }}"
    found = Runner(text, [scores(PATHS)], backend, phase=TEST).forward()[0]
    wanted = [spelled(path, blank % 3) if merge else [label for label in path if label != blank % 3] for path in PATHS]
    np.testing.assert_array_equal(found, rows(wanted, -1)[..., None, None])


def test_equal_scores_count_for_the_first_class():
    np.testing.assert_array_equal(Runner(DECODER, zeros((2, 1, 3))).forward()[0].ravel(), [-1, -1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_accuracies(backend):
    labels = [[1, 1, 2], [], [2, 2], [1, 2, 2, 1]]
    found = [spelled(path, 0) for path in PATHS]
    parts = [distance(a, b) / max(len(a), len(b), 1) for a, b in zip(labels, found, strict=True)]
    tops = Runner(DECODER, [scores(PATHS), rows(labels, 0)], backend, phase=TEST).forward()
    # The sequence without labels is right for the first number alone.
    np.testing.assert_allclose(tops[0], np.reshape([1 - np.mean(parts), 0.25], (1, 2, 1, 1)), rtol=1e-6)
    ended = rows(labels, -1)[..., None, None]
    np.testing.assert_array_equal(Runner(DECODER, [scores(PATHS), ended], backend).forward()[0], tops[0])


@pytest.mark.parametrize("columns", [2, 9])
def test_label_sequence_accuracy(columns):
    x = scores(PATHS).swapaxes(0, 1)
    labels = [[0, 1], [0], [1, 1], []]  # blank 2: found are [1, 0, 1], [0], [1, 1] and [0]
    found = Runner(ACCURACY, [x, rows(labels, 2, columns)], phase=TEST).forward()[0]
    assert (found, found.shape) == (0.5, ())

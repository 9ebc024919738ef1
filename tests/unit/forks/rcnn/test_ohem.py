"""Losses of online hard example mining: the loss of each position, and the divisor PRE_FIXED."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@pytest.mark.parametrize("kind", ["type: 'SoftmaxWithLossOHEM'", "type: 'SoftmaxWithLoss'"])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1, 1), (3, 4, 2, 3)])
def test_softmax_loss_of_each_position(kind, shape):
    labels = np.random.default_rng(1).integers(-1, shape[1], (shape[0], *shape[2:])).astype(np.float32)
    labels = labels.reshape(shape[0], 1, *shape[2:]) if len(shape) > 2 else labels

    def reference(x, labels):
        named = labels.reshape(shape[0], 1, *shape[2:]).astype(int)
        each = -np.take_along_axis(log_softmax(x), named % shape[1], 1).reshape(labels.shape)
        each = np.where(labels == -1, 0, each)
        return each.sum() / 32, np.exp(log_softmax(x)), each

    loss = "loss_param { ignore_label: -1 normalization: PRE_FIXED pre_fixed_normalizer: 32 }"
    inputs = [gaussian(shape) * 2, labels]
    check_layer(f"{kind} {loss}", inputs, reference, tops=3, gradients=False)
    check_layer(f"{kind} {loss}", inputs, lambda x, labels: reference(x, labels)[0])


def smooth(d, sigma=1.0):
    return np.where(abs(d) < 1 / sigma**2, 0.5 * (sigma * d) ** 2, abs(d) - 0.5 / sigma**2)


@pytest.mark.parametrize(
    ("settings", "divisor"),
    [("", "positions"), ("normalization: FULL", "positions"), ("normalization: BATCH_SIZE", "batch"),
     ("normalize: false", "batch"), ("normalization: NONE", 1), ("normalization: PRE_FIXED", 1),
     ("normalization: PRE_FIXED pre_fixed_normalizer: 128", 128),
     ("normalization: PRE_FIXED pre_fixed_normalizer: 0.5", 1)],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 2, 3)])
def test_smooth_l1_loss_ohem(settings, divisor, shape):
    positions = shape[0] * int(np.prod(shape[2:]))
    divisor = {"positions": positions, "batch": shape[0]}.get(divisor, divisor)

    def reference(a, b, w):
        each = smooth(w * (a - b)).sum(1).reshape(shape[0], 1, *(shape[2:] or (1, 1)))
        return each.sum() / divisor, each

    inputs = [gaussian(shape, i) for i in range(3)]
    text = f"type: 'SmoothL1LossOHEM' loss_param {{ {settings} }}"
    check_layer(text, inputs, reference, tops=2, gradients=False)
    check_layer(text, inputs, lambda *values: reference(*values)[0])


@pytest.mark.parametrize("weights", [0, 1, 2])
def test_smooth_l1_loss_of_r_fcn(weights):
    """The fork's SmoothL1Loss: PRE_FIXED and a second top; the default divides by N as before."""
    inputs = [gaussian((4, 6), i) for i in range(2 + weights)]

    def reference(a, b, *w):
        each = smooth((w[0] if w else 1) * (a - b), 2) * (w[1] if len(w) > 1 else 1)
        return each.sum() / 9, each.sum(1).reshape(4, 1, 1, 1)

    text = "type: 'SmoothL1Loss' smooth_l1_loss_param { sigma: 2 }"
    fixed = "loss_param { normalization: PRE_FIXED pre_fixed_normalizer: 9 }"
    check_layer(f"{text} {fixed}", inputs, reference, tops=2, gradients=False)
    check_layer(f"{text} {fixed}", inputs, lambda *values: reference(*values)[0])
    check_layer(text, inputs, lambda *values: reference(*values)[0] * 9 / 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigmoid_loss_with_a_fixed_divisor(backend):
    x, targets = gaussian((3, 4)), (gaussian((3, 4), 1) > 0).astype(np.float32)
    text = "type: 'SigmoidCrossEntropyLoss' loss_param {{ normalization: {} }}"
    one, fixed = (
        Runner(text.format(mode), [x, targets], backend).forward()[0]
        for mode in ("NONE", "PRE_FIXED pre_fixed_normalizer: 8")
    )
    assert_near(fixed, one / 8, 1e-6, "loss")


@pytest.mark.parametrize("tail", [(2, 3), (6,)])
def test_weighted_sigmoid_loss(tail):
    x, targets = gaussian((3, 4, 2, 3)), (gaussian((3, 4, *tail), 1) > 0).astype(np.float32)
    weights = (gaussian((3, 4, *tail), 2) > 0.5) * 0.25

    def reference(x, t, w):
        p = 1 / (1 + np.exp(-x))
        t, w = t.reshape(x.shape), w.reshape(x.shape)
        return -(w * (t * np.log(p) + (1 - t) * np.log(1 - p))).sum() / (w.sum() or 1)

    text = "type: 'SigmoidCrossEntropyLoss'"
    check_layer(text, [x, targets, weights.astype(np.float32)], reference, loss_weight=2)
    runner = Runner(text, [x, targets, np.zeros_like(targets)])
    loss = runner.forward()[0]
    diffs = runner.backward([np.ones((), np.float32)], [True, False, True])
    assert loss == 0 and not diffs[0].any() and not diffs[2].any()
    with pytest.raises(ConfigError, match="divided by their sum"):
        Runner(f"{text} loss_param {{ ignore_label: 1 }}", [x, targets, targets])
    with pytest.raises(ShapeError, match="weights must have"):
        Runner(text, [x, targets, targets[:2]])


def test_refused():
    with pytest.raises(ConfigError, match="third top has no definition with label_smoothing"):
        Runner("type: 'SoftmaxWithLoss' loss_param { label_smoothing: 0.1 }", [gaussian((2, 3)), np.zeros(2)], tops=3)
    with pytest.raises(ShapeError, match="at most four axes"):
        Runner("type: 'SmoothL1Loss'", [gaussian((2, 3, 1, 1, 1))] * 2, tops=2)

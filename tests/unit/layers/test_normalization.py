"""MVN, Normalize and the formulas of LRN."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError
from caffepy.layers.normalization import BY_ROOTS, GENERAL


def mvn(x, across, divide, eps=1e-9):
    x = x.reshape(x.shape + (1,) * (4 - x.ndim))
    axes = (1, 2, 3) if across else (2, 3)
    y = x - x.mean(axes, keepdims=True)
    return y / (np.sqrt((y * y).mean(axes, keepdims=True)) + eps) if divide else y


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 1, 2, 7), (2, 3, 6)])
def test_mvn(across, divide, shape):
    fields = f"across_channels: {str(across).lower()} normalize_variance: {str(divide).lower()}"
    check_layer(
        f"type: 'MVN' mvn_param {{ {fields} }}",
        [gaussian(shape) * 3 + 1],
        lambda x: mvn(x, across, divide),
        in_place=len(shape) == 4,
    )


def test_mvn_of_matrices():
    check_layer("type: 'MVN' mvn_param { across_channels: true }", [gaussian((3, 5))], lambda x: mvn(x, True, True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mvn_with_a_large_eps_has_caffes_gradient(backend):
    x, dy = gaussian((2, 3, 4, 5)).astype(np.float64), gaussian((2, 3, 4, 5), 1)
    result = Runner("type: 'MVN' mvn_param { eps: 0.5 }", [x.astype(np.float32)], backend).run([dy])
    y = mvn(x, False, True, 0.5)
    axes, keep = (2, 3), {"keepdims": True}
    divisor = x.std(axes, **keep) + 0.5
    assert_near(result.tops[0], y, 2e-5, "y")
    wanted = (dy - dy.mean(axes, **keep) - y * (y * dy).mean(axes, **keep)) / divisor
    assert_near(result.bottom_diffs[0], wanted, 2e-5, "dx")


def test_mvn_refuses():
    with pytest.raises(ShapeError, match="at most four axes"):
        Runner("type: 'MVN'", [gaussian((2, 3, 2, 2, 2))])
    with pytest.raises(ConfigError, match="works in place on four axes only"):
        Runner("type: 'MVN'", [gaussian((2, 3))], in_place=True)


def normalize(x, scale, across, eps):
    axes = tuple(range(1, x.ndim)) if across else (1,)
    scale = scale if scale.ndim == 0 else scale.reshape((-1,) + (1,) * (x.ndim - 2))
    return x / np.sqrt((x * x).sum(axes, keepdims=True) + eps) * scale


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 6, 1, 1), (3, 4), (2, 3, 7)])
def test_normalize(across, shared, shape):
    fields = f"across_spatial: {str(across).lower()} channel_shared: {str(shared).lower()} eps: 0.25"
    # One scale for all channels: with several, SSD's gradient is not the derivative (see the golden cases).
    scale = np.float32(20) if shared else np.full(shape[1], 20, np.float32)
    check_layer(
        f"type: 'Normalize' norm_param {{ {fields} }}",
        [gaussian(shape)],
        lambda x, s: normalize(x, s, across, 0.25),
        params=[scale],
        in_place=True,
    )


def test_normalize_of_ssd():
    """conv4_3_norm, with a scale that differs between channels, whose gradient leaves it out of the inner sum."""
    shape, scale = (2, 512, 38, 38), gaussian((512,), 2) + 20
    fields = "across_spatial: false channel_shared: false"
    x, dy = gaussian(shape) * 5, gaussian(shape, 1)
    result = Runner(f"type: 'Normalize' norm_param {{ {fields} }}", [x], params=[scale]).run([dy])
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    norm = np.sqrt((x * x).sum(1, keepdims=True) + 1e-10)
    unit, factors = x / norm, scale.reshape(1, -1, 1, 1).astype(np.float64)
    assert_near(result.tops[0], unit * factors, 1e-5, "y")
    assert_near(result.param_diffs[0], (unit * dy).sum((0, 2, 3)), 1e-5, "dscale")
    wanted = factors * (dy - unit * (unit * dy).sum(1, keepdims=True)) / norm
    assert_near(result.bottom_diffs[0], wanted, 1e-5, "dx")


def test_normalize_fills_its_scale():
    x = gaussian((2, 3, 4, 5))
    for filler, value in (("", 1), ("scale_filler { type: 'constant' value: 5 }", 5)):
        runner = Runner(f"type: 'Normalize' norm_param {{ {filler} }}", [x])
        assert runner.layer.blobs[0].shape == () and runner.layer.blobs[0].host_data() == value
    with pytest.raises(ShapeError, match="two to four axes"):
        Runner("type: 'Normalize'", [gaussian((4,))])


# -- LRN by square roots ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3))
def test_roots_are_the_power(index: int) -> None:
    general, by_roots = GENERAL[index], BY_ROOTS[index]
    assert general.parameters == by_roots.parameters
    rng = np.random.default_rng(index)
    for values in rng.uniform(0.01, 9, (20, len(general.parameters) - 2)):
        assert by_roots(*values, 0.5, 0.75) == pytest.approx(general(*values, 0.5, 0.75), rel=1e-12)

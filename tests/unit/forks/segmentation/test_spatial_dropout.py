"""SpatialDropout."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError

TEXT = "type: 'SpatialDropout' dropout_param { dropout_ratio: 0.25 }"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(8, 50, 3, 4), (8, 50, 2), (8, 50), (4, 30, 2, 3, 2)])
def test_drops_whole_channels(backend: str, shape: tuple[int, ...]) -> None:
    x = gaussian(shape)
    runner = Runner(TEXT, [x], backend)
    y = runner.forward()[0]
    factor = (y / x).reshape(*shape[:2], -1)
    np.testing.assert_allclose(factor, np.where(factor[..., :1] > 0, 4 / 3, 0) * np.ones(factor.shape), rtol=1e-5)
    kept = factor[..., 0] > 0
    assert 0.65 < kept.mean() < 0.85
    assert not np.array_equal(kept[0], kept[1])
    dx = runner.backward([np.ones(shape, np.float32)])[0]
    np.testing.assert_allclose(dx.reshape(factor.shape), factor, rtol=1e-5)


def test_gradients_in_place_and_other_phases() -> None:
    x = gaussian((2, 6, 3, 4))
    check_layer(TEXT, [x], in_place=True)
    check_layer(TEXT, [x], lambda x: x, phase=TEST, in_place=True)
    unscaled = "type: 'SpatialDropout' dropout_param { dropout_ratio: 0.25 scale_train: false }"
    check_layer(unscaled, [x], lambda x: 0.75 * x, phase=TEST, in_place=True)
    assert set(np.unique((Runner(unscaled, [x]).forward()[0] / x).round(5))) == {0, 1}


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="dropout_ratio is 1"):
        Runner("type: 'SpatialDropout' dropout_param { dropout_ratio: 1 }", [gaussian((2, 3))])
    with pytest.raises(ShapeError, match="at least two axes"):
        Runner("type: 'SpatialDropout'", [gaussian((3,))])

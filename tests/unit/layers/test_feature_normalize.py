"""Normalize of caffe-windows."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import Floats, Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.upgrade import upgrade_net

SHAPES = [(4, 6), (2, 5, 3), (2, 5, 3, 4)]


def normalize(more: str = "") -> str:
    return f"type: 'Normalize' normalize_param {{ {more} }}"


def norm_of(x: Floats, kind: str) -> Floats:
    return np.abs(x).sum(1, keepdims=True) if kind == "L1" else np.sqrt((x * x).sum(1, keepdims=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["L1", "L2"])
def test_formula_and_gradients(shape: tuple[int, ...], kind: str) -> None:
    x = spread(shape, step=0.05)
    settings = f"normalize_type: '{kind}'"
    if kind == "L2":
        check_layer(normalize(settings), [x], lambda x: x / norm_of(x, kind))
    top = (shape[0], 1, *(shape + (1, 1))[2:4])

    def reference(x: Floats) -> tuple[Floats, Floats]:
        return x / norm_of(x, kind), norm_of(x, kind).reshape(top)

    if kind == "L2":
        check_layer(normalize(f"{settings} bp_norm: true"), [x], reference, tops=2)
    check_layer(normalize(f"{settings} bp_norm: true"), [x], reference, tops=2, gradients=False)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", ["L1", "L2"])
def test_gradients_of_caffe_windows(kind: str, fixed: bool) -> None:
    """That of L1 takes the top's product with its gradient, as the fork does."""
    x, dy, dnorm = gaussian((4, 6)), gaussian((4, 6), 1), gaussian((4, 1, 1, 1), 2)
    settings = f"normalize_type: '{kind}' bp_norm: true" + (" fix_gradient: true" if fixed else "")
    found = Runner(normalize(settings), [x], tops=2).run([dy, dnorm]).bottom_diffs[0]
    norm = norm_of(x, kind)
    way = np.sign(x) if kind == "L1" else x / norm
    wanted = dy - way * (x / norm * dy).sum(1, keepdims=True)
    np.testing.assert_allclose(
        found, (wanted if fixed else wanted / norm) + way * dnorm[:, :, 0, 0], rtol=1e-4, atol=1e-5
    )
    alone = Runner(normalize(settings.replace("bp_norm: true", "")), [x], tops=2).run([dy, dnorm]).bottom_diffs[0]
    np.testing.assert_allclose(alone, wanted if fixed else wanted / norm, rtol=1e-4, atol=1e-5)


def test_which_of_both_forks() -> None:
    plain = "layer { name: 'n' type: 'Normalize' bottom: 'x' top: 'y' }"
    other = "layer { name: 'i' type: 'InnerProduct' bottom: 'y' top: 'z' inner_product_param { normalize: true } }"
    for text, feature in ((plain, False), (plain + other, True)):
        net = text_format.Parse(text, caffe_pb2.NetParameter())
        upgrade_net(net, "net")
        assert net.layer[0].HasField("normalize_param") == feature
    x = gaussian((4, 6))
    assert not Runner(normalize(), [x]).layer.blobs and Runner("type: 'Normalize'", [x]).layer.blobs
    assert not Runner("type: 'Normalize'", [x], tops=2).layer.blobs
    with pytest.raises(ConfigError, match="L2 or L1"):
        Runner(normalize("normalize_type: 'L3'"), [x])

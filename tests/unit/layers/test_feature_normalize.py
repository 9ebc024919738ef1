"""Normalize and ChannelScale of caffe-windows."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import TEST, Floats, Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError
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


# -- ChannelScale ----------------------------------------------------------------------------------------


def scale(more: str = "") -> str:
    return f"type: 'ChannelScale' channel_scale_param {{ {more} }}"


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_scale(shape: tuple[int, ...]) -> None:
    s = gaussian((shape[0], 1, *shape[2:]), 1)
    check_layer(scale(), [gaussian(shape), s], lambda x, s: x * s)


def test_parts_of_channel_scale() -> None:
    x, s, dy = gaussian((2, 3, 2, 2)), gaussian((2, 1, 2, 2), 1), gaussian((2, 3, 2, 2), 2)
    for more, y, dx, ds in (
        ("do_forward: false", x, dy * s, (dy * x).sum(1, keepdims=True)),
        ("do_backward_feature: false", x * s, dy, (dy * x).sum(1, keepdims=True)),
        ("do_backward_scale: false", x * s, dy * s, 0 * s),
    ):
        result = Runner(scale(more), [x, s]).run([dy])
        np.testing.assert_allclose(result.tops[0], y, rtol=1e-5)
        np.testing.assert_allclose(result.bottom_diffs[0], dx, rtol=1e-5)
        np.testing.assert_allclose(result.bottom_diffs[1], ds, rtol=1e-4, atol=1e-6)


def test_global_scale() -> None:
    x, s = gaussian((4, 3)), gaussian((4,), 1)
    runner = Runner(scale("global_scale: true"), [x, s], tops=2)
    mean = np.abs(s).mean()
    for wanted in (mean, mean, 0.99 * mean + 0.01 * 3 * mean):
        if wanted == mean or wanted is mean:
            y, average = runner.forward()
        else:
            y, average = runner.forward([x, 3 * s])
        np.testing.assert_allclose(average, [wanted], rtol=1e-5)
        np.testing.assert_allclose(y, x * wanted, rtol=1e-5)
    for more, wanted in (("max_global_scale: 0.1", 0.1), ("min_global_scale: 7", 7)):
        assert Runner(scale(f"global_scale: true {more}"), [x, s], tops=2).forward()[1] == pytest.approx([wanted])
    tested = Runner(scale("global_scale: true"), [x, s], params=[np.array([2.0])], phase=TEST)
    np.testing.assert_allclose(tested.forward()[0], 2 * x)
    with pytest.raises(ConfigError, match="lr_mult: 0"):
        Runner(scale("global_scale: true") + " param { lr_mult: 1 }", [x, s])


def test_bad_shapes() -> None:
    with pytest.raises(ShapeError, match="one a pixel"):
        Runner(scale(), [gaussian((4, 3)), gaussian((3,))])
    with pytest.raises(ShapeError, match="two to four axes"):
        Runner(scale(), [gaussian((4,)), gaussian((4,))])

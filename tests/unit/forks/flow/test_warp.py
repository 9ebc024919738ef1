"""Warp, FlowWarp and Grid, Resample and Downsample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net


def fractional(shape: tuple[int, ...], low: float, high: float, seed: int = 0) -> Any:
    """Numbers away from integers, where the derivative jumps."""
    values = np.random.default_rng(seed).uniform(low, high, shape)
    return (np.floor(values) + np.clip(values - np.floor(values), 0.2, 0.8)).astype(np.float32)


def sampled(x: Any, columns: Any, rows: Any, fill: float | None = None, last: float = 0) -> Any:
    """Bilinear interpolation; `fill` outside [0, size - 1 + last), or zeros around x."""
    y = np.zeros((*x.shape[:2], *rows.shape[1:]))
    for n in range(len(x)):
        h, w = np.floor(rows[n]).astype(int), np.floor(columns[n]).astype(int)
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            i, j = h + down, w + right
            if last:
                i, j = np.minimum(i, x.shape[2] - 1), np.minimum(j, x.shape[3] - 1)
            weight = (1 - abs(rows[n] - h - down)) * (1 - abs(columns[n] - w - right))
            inside = (i >= 0) & (i < x.shape[2]) & (j >= 0) & (j < x.shape[3])
            y[n] += np.where(inside, weight * x[n][:, i.clip(0, x.shape[2] - 1), j.clip(0, x.shape[3] - 1)], 0)
    if fill is not None:
        known = (rows >= 0) & (columns >= 0) & (rows <= x.shape[2] - 1 + last) & (columns <= x.shape[3] - 1 + last)
        y = np.where(known[:, None], y, fill)
    return y


def places(flow: Any) -> tuple[Any, Any]:
    rows, columns = np.meshgrid(np.arange(flow.shape[2]), np.arange(flow.shape[3]), indexing="ij")
    return columns + flow[:, 0], rows + flow[:, 1]


def test_displacements_of_pwc_net() -> None:
    x, flow = gaussian((2, 3, 5, 6)), fractional((2, 2, 5, 6), -3, 3)
    check_layer("type: 'Warp'", [x, flow], lambda x, flow: sampled(x, *places(flow), fill=0), step=1e-3)


def test_displacements_of_whole_pixels() -> None:
    """Values of pixels; the derivative is the mean of the two neighbours' differences."""
    x = gaussian((1, 1, 3, 4))
    flow = np.zeros((1, 2, 3, 4), np.float32)
    runner = Runner("type: 'Warp'", [x, flow])
    result = runner.run([np.ones(x.shape, np.float32)])
    assert np.array_equal(result.tops[0], x)
    steps = np.diff(x[0, 0], axis=1)
    wanted = (np.pad(steps, ((0, 0), (0, 1))) + np.pad(steps, ((0, 0), (1, 0)))) / 2
    assert result.bottom_diffs[1] is not None
    np.testing.assert_allclose(result.bottom_diffs[1][0, 0], wanted, rtol=1e-5, atol=1e-6)


def test_positions_of_liteflownet() -> None:
    x, positions = gaussian((2, 3, 5, 6)), fractional((2, 2, 4, 7), -2, 7)
    formula = lambda x, at: sampled(x, at[:, 0], at[:, 1])  # noqa: E731
    check_layer("type: 'Warp' warp_param { positions: true }", [x, positions], formula, step=1e-3)


@pytest.mark.parametrize(("setting", "fill"), [("", 0.0), ("flow_warp_param { fill_value: NOT_A_NUMBER }", np.nan)])
def test_displacements_of_flownet(setting: str, fill: float) -> None:
    reach = 3 if fill == 0 else 0
    x, flow = gaussian((2, 3, 5, 6)), fractional((2, 2, 5, 6), -reach, max(reach, 0.9))
    formula = lambda x, flow: sampled(x, *places(flow), fill=fill, last=0.999)  # noqa: E731
    check_layer(f"type: 'FlowWarp' {setting}", [x, flow], formula, step=1e-3)
    if fill != 0:
        outside = Runner(f"type: 'FlowWarp' {setting}", [x, flow + 7]).forward()[0]
        assert np.isnan(outside).all()


def test_shapes() -> None:
    image = gaussian((2, 3, 5, 6))
    for flow in ((2, 3, 5, 6), (1, 2, 5, 6), (2, 2, 5, 5), (2, 2, 5)):
        with pytest.raises(ShapeError):
            Runner("type: 'Warp'", [image, gaussian(flow)])


def test_grid() -> None:
    y = Runner("type: 'Grid'", [gaussian((2, 3, 4, 5))]).forward()[0]
    rows, columns = np.meshgrid(np.arange(4), np.arange(5), indexing="ij")
    assert np.array_equal(y, np.broadcast_to(np.stack([columns, rows]), (2, 2, 4, 5)))


NET = """
layer { name: 'in' type: 'Input' top: 'x' top: 'flow'
        input_param { shape { dim: 1 dim: 3 dim: 4 dim: 5 } shape { dim: 1 dim: 2 dim: 4 dim: 5 } } }
layer { name: 'grid' type: 'Grid' bottom: 'flow' top: 'grid' propagate_down: false }
layer { name: 'sum' type: 'Eltwise' bottom: 'flow' bottom: 'grid' top: 'at' eltwise_param { coeff: 1 coeff: 1 } }
layer { name: 'a' type: 'Warp' bottom: 'x' bottom: 'at' top: 'a' }
layer { name: 'b' type: 'Warp' bottom: 'x' bottom: 'flow' top: 'b' }
layer { name: 'c' type: 'Warp' bottom: 'x' bottom: 'at' top: 'c' warp_param { positions: false } }
"""


def test_positions_are_recognised() -> None:
    """A flow that contains the top of a Grid holds positions, unless warp_param says otherwise."""
    net = parse_text(NET, caffe_pb2.NetParameter(), "net")
    upgrade_net(net, "net")
    found = {layer.name: layer.warp_param.positions for layer in net.layer if layer.type == "Warp"}
    assert found == {"a": True, "b": False, "c": False}


# -- Resample and Downsample -----------------------------------------------------------------------------


def triangle(x: float) -> float:
    return x + 1 if -1 <= x < 0 else (1 - x if 0 <= x <= 1 else 0)


def cubic(x: float) -> float:
    d = abs(x)
    if d <= 1:
        return d * d * (1.5 * d - 2.5) + 1
    return d * (d * (-0.5 * d + 2.5) - 4) + 2 if d < 2 else 0


def resampled(height: int, width: int, kind: str, antialias: bool = True) -> Any:
    """FlowNet 2's kernel, pixel by pixel."""
    kernel, reach = (cubic, 4) if kind == "CUBIC" else (triangle, 2)

    def formula(x: Any, *_: Any) -> Any:
        fy, fx = x.shape[2] / height, x.shape[3] / width
        y = np.zeros((*x.shape[:2], height, width))
        widen = antialias and (fx > 1 or fy > 1)
        ax, ay = 1 / (fx if widen else 1), 1 / (fy if widen else 1)
        rx, ry = (2 if f < 1 else math.ceil(reach / a) for f, a in ((fx, ax), (fy, ay)))
        for i in range(height):
            for j in range(width):
                at_x, at_y = j * fx + fy / 2 - 0.5, i * fy + fx / 2 - 0.5
                near = (math.floor(abs(at) + 0.5) * (1 if at >= 0 else -1) for at in (at_x, at_y))
                near_x, near_y = near
                if kind == "NEAREST":
                    row, column = min(max(near_y, 0), x.shape[2] - 1), min(max(near_x, 0), x.shape[3] - 1)
                    y[:, :, i, j] = x[:, :, row, column]
                    continue
                total = 0.0
                for row in range(max(near_y - ry, 0), min(near_y + ry + 1, x.shape[2])):
                    for column in range(max(near_x - rx, 0), min(near_x + rx + 1, x.shape[3])):
                        weight = kernel(ax * (at_x - column)) * kernel(ay * (at_y - row))
                        y[:, :, i, j] += weight * x[:, :, row, column]
                        total += weight
                y[:, :, i, j] /= total or 1
        return y

    return formula


@pytest.mark.parametrize("kind", ["NEAREST", "LINEAR", "CUBIC"])
@pytest.mark.parametrize("size", [(3, 4), (11, 13), (7, 9), (4, 15)])
@pytest.mark.parametrize("antialias", [True, False])
def test_resample(kind: str, size: tuple[int, int], antialias: bool) -> None:
    fields = f"height: {size[0]} width: {size[1]} type: {kind} antialias: {'true' if antialias else 'false'}"
    x = gaussian((2, 3, 7, 9))
    check_layer(f"type: 'Resample' resample_param {{ {fields} }}", [x], resampled(*size, kind, antialias))


def test_size_of_the_second_bottom() -> None:
    x, other = gaussian((1, 2, 7, 9)), gaussian((3, 1, 4, 5))
    check_layer("type: 'Resample'", [x, other], resampled(4, 5, "LINEAR"))
    check_layer("type: 'Downsample'", [x, other], lambda x, other: downsampled(x, 4, 5))


def test_bad_settings() -> None:
    for kind, fields in (("Resample", "width: 3"), ("Resample", "width: 3 height: 3 type: AREA"), ("Downsample", "")):
        with pytest.raises(ConfigError):
            Runner(f"type: '{kind}' {kind.lower()}_param {{ {fields} }}", [gaussian((1, 1, 4, 4))])
    with pytest.raises(ShapeError, match="at least 2"):
        Runner("type: 'Downsample' downsample_param { top_height: 1 top_width: 4 }", [gaussian((1, 1, 4, 4))])


def downsampled(x: Any, height: int, width: int) -> Any:
    """Means of the pixels around each position, without missing ones; weights in float32 as in FlowNet 2's kernel."""
    one = np.float32(1)

    def weights_of(size: int, target: int, at: int) -> Any:
        position = np.float32(at) / np.float32(target - 1) * np.float32(size - 1)
        scale = np.float32(size - 1) / np.float32(target - 1)
        return np.maximum(one - np.abs(np.arange(size, dtype=np.float32) - position) / scale, 0)

    y = np.zeros((*x.shape[:2], height, width))
    for i in range(height):
        for j in range(width):
            rows, columns = weights_of(x.shape[2], height, i), weights_of(x.shape[3], width, j)
            weights = np.broadcast_to(np.outer(rows, columns), x.shape)
            missing = np.isnan(x)
            known = np.where(missing, 0, weights).sum(axis=(2, 3))
            lost = np.where(missing, weights, 0).sum(axis=(2, 3))
            total = (np.where(missing, 0, x) * weights).sum(axis=(2, 3))
            with np.errstate(invalid="ignore", divide="ignore"):
                y[:, :, i, j] = np.where(lost / known > 0.5, np.nan, total / known)
    return y


@pytest.mark.parametrize("size", [(3, 4), (2, 2), (12, 11), (7, 4)])
def test_downsample(size: tuple[int, int]) -> None:
    fields = f"top_height: {size[0]} top_width: {size[1]}"
    x = gaussian((2, 3, 7, 9))
    check_layer(f"type: 'Downsample' downsample_param {{ {fields} }}", [x], lambda x: downsampled(x, *size))


@pytest.mark.parametrize("size", [(9, 4), (3, 20), (13, 17)])
def test_positions_between_pixels_have_no_weight(size: tuple[int, int]) -> None:
    """A larger top has positions farther than the scale from each pixel: 0 / 0 in FlowNet 2's kernel, which is NaN."""
    x = gaussian((2, 2, 5, 6))
    runner = Runner(f"type: 'Downsample' downsample_param {{ top_height: {size[0]} top_width: {size[1]} }}", [x])
    y = runner.forward()[0]
    wanted = downsampled(x.astype(np.float64), *size)
    assert np.isnan(wanted).any() and np.isfinite(wanted).any()
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    dx = runner.backward([np.where(np.isnan(wanted), np.nan, 1).astype(np.float32)])[0]
    assert dx is not None and abs(dx.sum() - np.isfinite(wanted).sum()) < 1e-3


def test_missing_values() -> None:
    x = gaussian((1, 2, 8, 9))
    x[0, 0, 2:6, 3:7] = np.nan
    x[0, 1, 3, 4] = np.nan
    runner = Runner("type: 'Downsample' downsample_param { top_height: 5 top_width: 6 }", [x])
    y = runner.forward()[0]
    wanted = downsampled(x.astype(np.float64), 5, 6)
    assert np.isnan(wanted).any() and np.isfinite(wanted).any()
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    dx = runner.backward([np.where(np.isnan(wanted), np.nan, 1).astype(np.float32)])[0]
    assert dx is not None and np.isfinite(dx).all() and not dx[np.isnan(x)].any()
    assert abs(dx.sum() - np.isfinite(wanted).sum()) < 1e-4

"""Warp, FlowWarp and Grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian

from caffepy.errors import ShapeError
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

"""Check of one layer's gradient against central differences, for the tests of users' layer types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from caffepy.backend import create_backend
from caffepy.errors import ConfigError, RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext, layer_class
from caffepy.net.net import Net

Floats: TypeAlias = Any
"""A NumPy array, or values that become one."""

_DIRECTIONS = 4
"""Random directions in which each gradient is measured."""
_FLOOR = 1e-2
"""Sum of a gradient's terms below which float32's rounding of the tops hides it."""


def check_gradient(layer: str, *inputs: Floats, step: float = 1e-2, tolerance: float = 5e-3) -> list[Floats]:
    """Compare the gradients of a layer with central differences, on the CPU.

    The tops, weighted by random numbers w, make one number s. For each bottom and parameter v with gradient g and
    random directions d of -1, 0 and 1, ``(s(v + step d) - s(v - step d)) / (2 step)`` and the sum of ``g d`` must
    differ by at most ``tolerance`` times the sum of ``|g d|``. Labels and parameters with ``lr_mult: 0`` have no
    gradient.

    Args:
        layer: the layer's prototxt, as ``type: "ScaledTanH" scaled_tanh_param { alpha: 2 }``. Bottoms need no names;
            a layer with several tops gives theirs.
        inputs: the bottoms' arrays; float32. Keep them further than `step` from places without a derivative.
        step: length of a step.
        tolerance: relative difference.

    Returns:
        The tops' arrays.

    Raises:
        ConfigError: the layer cannot be built, or has no gradient.
        RunError: a gradient is wrong; the message names the layer, and the bottom or the parameter.
    """
    arrays = [np.asarray(value, np.float32) for value in inputs]
    net = _one_layer_net(layer, arrays)
    try:
        with net.backend.activate():
            return _check(net, arrays, step, tolerance)
    finally:
        net.close()


def _one_layer_net(text: str, arrays: list[Floats]) -> Net:
    """Return a net of Input layers and the layer."""
    param = parse_text(text, caffe_pb2.LayerParameter(), "layer")
    param.name = param.name or param.type
    names = [f"bottom{index}" for index in range(len(arrays))]
    param.bottom[:] = names
    net = caffe_pb2.NetParameter(force_backward=True)
    for name, array in zip(names, arrays, strict=True):
        net.layer.add(name=name, type="Input", top=[name]).input_param.shape.add(dim=array.shape)
    net.layer.append(param)
    upgrade_net(net, "layer")
    layer = net.layer[-1]
    kind = layer_class(layer.type, f"layer '{layer.name}'")
    if not layer.top:
        layer.top.extend(f"top{index}" for index in range(max(kind.tops[0], 1)))
    if not kind.has_backward:
        raise ConfigError(f"layer '{layer.name}' ({layer.type}): has no gradient; write its method backward")
    return Net(net, LayerContext(create_backend()))


def _check(net: Net, arrays: list[Floats], step: float, tolerance: float) -> list[Floats]:
    node = net.schedule[-1]
    for blob, array in zip(node.bottoms, arrays, strict=True):
        blob.load(array)
    net.forward()
    tops = [blob.host_data() for blob in node.tops]
    random = np.random.default_rng(0)
    weights = [random.uniform(0.5, 1.5, top.shape).astype(np.float32) for top in tops]
    if node.layer.is_loss:
        weights[0] = np.float32(node.layer.loss_weights[0])
    for blob, weight in zip(node.tops, weights, strict=True):
        net.backend.from_host(np.broadcast_to(weight, blob.shape), blob.diff)
    net.clear_param_diffs()
    net.backward()
    checked = [
        (f"bottom {index}", blob, blob.host_diff())
        for index, (blob, down) in enumerate(zip(node.bottoms, node.propagate_down, strict=True))
        if down and index not in node.layer.no_gradient_bottoms
    ]
    learned = zip(node.layer.blobs, node.layer.propagate_to_params, strict=True)
    checked += [
        (f"parameter {index}", blob, blob.host_diff()) for index, (blob, wanted) in enumerate(learned) if wanted
    ]
    objective = partial(_objective, net, weights)
    for name, blob, gradient in checked:
        for _ in range(_DIRECTIONS):
            direction = random.integers(-1, 2, gradient.shape)
            measured = _difference(objective, blob, direction, step)
            computed = float((gradient.astype(np.float64) * direction).sum())
            scale = max(float(np.abs(gradient * direction).sum()), _FLOOR)
            if not abs(measured - computed) <= tolerance * scale:
                raise RunError(
                    f"{node.layer.where}: the gradient of {name} is wrong: {computed:.6g} in a direction in which the "
                    f"tops change by {measured:.6g}"
                )
    return tops


def _objective(net: Net, weights: list[Floats]) -> float:
    """Return the sum of the weighted tops."""
    net.forward()
    tops = [blob.host_data().astype(np.float64) for blob in net.schedule[-1].tops]
    return float(sum((top * weight).sum() for top, weight in zip(tops, weights, strict=True)))


def _difference(objective: Callable[[], float], blob: Blob, direction: Floats, step: float) -> float:
    """Return the derivative in a direction as a central difference; the blob's values are restored."""
    values = blob.host_data()
    ends = []
    for sign in (1, -1):
        blob.load((values + sign * step * direction).astype(np.float32))
        ends.append(objective())
    blob.load(values)
    return (ends[0] - ends[1]) / (2 * step)

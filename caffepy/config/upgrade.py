"""Bringing nets and solvers written for older Caffes to the current format, in place.

The order is that of Caffe's ``upgrade_proto.cpp``: V0 layers to V1, data-transform fields, V1 to
`layer`, net inputs, BatchNorm's parameters.
"""

from __future__ import annotations

import logging

from caffepy.config.upgrade_v0 import upgrade_v0
from caffepy.config.upgrade_v1 import move_transforms, upgrade_v1
from caffepy.errors import ConfigError
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter

log = logging.getLogger(__name__)

BATCH_NORM_BLOBS = 3
"""Mean, variance and their common divisor: statistics, which no solver may touch."""

INPUT_AXES = 4
"""`input_dim` gives N, C, H and W of each input."""

SOLVER_TYPES = {
    SolverParameter.SGD: "SGD",
    SolverParameter.NESTEROV: "Nesterov",
    SolverParameter.ADAGRAD: "AdaGrad",
    SolverParameter.RMSPROP: "RMSProp",
    SolverParameter.ADADELTA: "AdaDelta",
    SolverParameter.ADAM: "Adam",
    SolverParameter.SAG: "SAG",
}


def upgrade_net(param: NetParameter, origin: str) -> None:
    """Upgrades `param` in place and logs one line when there was something to upgrade.

    Raises:
        ConfigError: old and new formats are mixed, or an old field has no meaning.
    """
    done = [
        name
        for name, step in (
            ("V0 layers", upgrade_v0),
            ("data-transform fields", move_transforms),
            ("V1 layers", upgrade_v1),
            ("input fields", upgrade_input),
            ("BatchNorm parameters", upgrade_batch_norm),
        )
        if step(param, origin)
    ]
    if done:
        log.info("Upgraded from an older format in %s: %s", origin, ", ".join(done))
    _warn_of_ignored_transforms(param, origin)


def upgrade_solver(param: SolverParameter, origin: str) -> None:
    """Upgrades `param` and the nets inside it in place; logs one line when ``solver_type`` was replaced.

    Raises:
        ConfigError: both ``type`` and ``solver_type`` are given.
    """
    if param.HasField("solver_type"):
        if param.HasField("type"):
            raise ConfigError(f"{origin}: both type and solver_type are given; keep type")
        param.type = SOLVER_TYPES[param.solver_type]
        param.ClearField("solver_type")
        log.info('Upgraded from an older format in %s: solver_type to type: "%s"', origin, param.type)
    if param.HasField("net_param"):
        upgrade_net(param.net_param, f"{origin}: net_param")
    if param.HasField("train_net_param"):
        upgrade_net(param.train_net_param, f"{origin}: train_net_param")
    for index, net in enumerate(param.test_net_param):
        upgrade_net(net, f"{origin}: test_net_param[{index}]")


def upgrade_input(param: NetParameter, origin: str) -> bool:
    """Turns ``input`` with ``input_shape`` or ``input_dim`` into an Input layer, the net's first.

    Inputs without any shape, as in old .caffemodels, are dropped. Returns whether there was an input.

    Raises:
        ConfigError: there are not as many shapes as inputs.
    """
    if not param.input:
        return False
    if param.input_shape or param.input_dim:
        _insert_input_layer(param, origin)
    for field in ("input", "input_shape", "input_dim"):
        param.ClearField(field)
    return True


def upgrade_batch_norm(param: NetParameter, origin: str) -> bool:
    """Sets ``lr_mult`` and ``decay_mult`` to 0 in BatchNorm layers that declare their three parameters.

    Returns whether that changed anything.
    """
    changed = False
    for layer in param.layer:
        if layer.type != "BatchNorm" or len(layer.param) != BATCH_NORM_BLOBS:
            continue
        for spec in layer.param:
            changed |= spec.lr_mult != 0 or spec.decay_mult != 0
            spec.lr_mult = 0
            spec.decay_mult = 0
    return changed


def _insert_input_layer(param: NetParameter, origin: str) -> None:
    shapes = _input_shapes(param, origin)
    rest = list(param.layer)
    del param.layer[:]
    layer = param.layer.add(name="input", type="Input", top=list(param.input))
    for shape in shapes:
        layer.input_param.shape.add(dim=shape)
    param.layer.extend(rest)


def _input_shapes(param: NetParameter, origin: str) -> list[list[int]]:
    count = len(param.input)
    if param.input_shape:
        if len(param.input_shape) != count:
            raise ConfigError(
                f"{origin}: {count} input but {len(param.input_shape)} input_shape; give one input_shape per input"
            )
        return [list(shape.dim) for shape in param.input_shape]
    if len(param.input_dim) != INPUT_AXES * count:
        raise ConfigError(
            f"{origin}: {len(param.input_dim)} input_dim for {count} input; give N, C, H and W of each input"
        )
    return [list(param.input_dim[INPUT_AXES * index : INPUT_AXES * (index + 1)]) for index in range(count)]


def _warn_of_ignored_transforms(param: NetParameter, origin: str) -> None:
    for layer in param.layer:
        for holder in ("data_param", "image_data_param", "window_data_param"):
            if not layer.HasField(holder):
                continue
            ignored = [
                name for name in ("scale", "mean_file", "crop_size", "mirror") if getattr(layer, holder).HasField(name)
            ]
            if ignored and layer.type != "WindowData":
                log.warning(
                    "%s: layer '%s': %s of %s has no effect, as in Caffe; move it to transform_param",
                    origin,
                    layer.name,
                    ", ".join(ignored),
                    holder,
                )

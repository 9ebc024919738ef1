"""Checks of a solver's settings before its net is built."""

from __future__ import annotations

import logging
import math

from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import FLOAT, SolverParameter
from caffepy.training.rules import RULES
from caffepy.utils.registry import suggest

log = logging.getLogger(__name__)

TRAIN_SOURCES = ("net", "net_param", "train_net", "train_net_param")

LR_POLICIES: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "plateau": ("gamma", "plateau_winsize"),
    "poly": ("power",),
    "sigmoid": ("gamma", "stepsize"),
    "multifixed": ("stagelr", "stageiter"),
    "stepearly": ("gamma", "stepearly"),
}
"""Learning-rate policies of both Caffes and of forks, with the fields that each needs besides ``base_lr``."""

DIVISOR_FIELDS = {
    "step": ("stepsize",),
    "sigmoid": ("stepsize",),
    "plateau": ("plateau_winsize",),
    "poly": ("max_iter",),
    "multifixed": ("stagelr", "stageiter"),
}
"""Fields by which a policy's formula divides."""

MOMENTUM_POLICIES = ("fixed", "poly", "opt")
WEIGHT_DECAY_POLICIES = ("fixed", "poly")
LARC_POLICIES = ("scale", "clip")
REGULARIZATIONS = ("L1", "L2", "WD")
EVAL_TYPES = ("classification", "detection")
AP_VERSIONS = ("Integral", "11point", "101point", "MaxIntegral")

MINIMUM = {
    "max_iter": 0,
    "base_lr": 0,
    "min_lr": 0,
    "display": 0,
    "test_interval": 0,
    "snapshot": 0,
    "average_loss": 1,
    "iter_size": 1,
    "gamma": 0,
    "stepsize": 1,
    "rampup_interval": 0,
    "rampup_lr": 0,
    "warmup_iter": 0,
    "warmup_start_lr": 0,
    "local_gw_ratio": 0,
    "stepearly": 1,
    "momentum_power": 0,
    "weight_decay_power": 0,
}
"""Minimum of each bounded field."""

MAX_PASSES = 2**16
"""Maximum iter_size: the random numbers and batches of all passes of an iteration are prepared together."""

_IGNORED = {
    "richness": "caffepy limits the workspaces of convolutions by the memory that is free",
    "group_id": "caffepy finds the devices of a host by itself",
    "engine": "it names Intel's library",
    "disabled_update": "caffepy's solver always makes the update",
}
"""Fields of forks that have no meaning in caffepy, and why."""


def check_solver(param: SolverParameter, origin: str = "solver") -> None:
    """Check that a solver's settings are complete and consistent.

    Args:
        param: an upgraded solver.
        origin: the solver's file, for messages.

    Raises:
        ConfigError: a setting is wrong, or the type is unknown; the message says what to change.
    """
    _check_train_source(param, origin)
    wanted = ("max_iter", "lr_policy") if param.lr_policy == "multifixed" else ("max_iter", "base_lr", "lr_policy")
    _check_present(param, wanted, "", origin)
    _check_finite(param, origin)
    _check_minimum(param, origin)
    _check_learning_rate(param, origin)
    _check_other_policies(param, origin)
    _check_rule(param, origin)
    _check_testing(param, origin)
    if "\0" in param.snapshot_prefix:
        raise ConfigError(f"{origin}: snapshot_prefix has a NUL character; remove it")
    if param.snapshot > 0 and not param.snapshot_prefix:
        raise ConfigError(f"{origin}: snapshot is {param.snapshot} but snapshot_prefix is empty; set snapshot_prefix")


def check_values(param: SolverParameter, origin: str = "solver") -> None:
    """Check the values that any solver needs, as Caffe does; a script's solver may lack settings that training needs.

    A script that steps by itself needs no `max_iter`, no `base_lr` if it sets the rate, and no `lr_policy` if it
    updates the parameters.

    Raises:
        ConfigError: a value is wrong; the message says what to change.
    """
    _check_finite(param, origin)
    _check_minimum(param, origin)
    if _has(param, "lr_policy"):
        _check_known("lr_policy", param.lr_policy, tuple(LR_POLICIES), origin)
    for name in DIVISOR_FIELDS.get(param.lr_policy, ()):
        _check_present(param, (name,), f', and lr_policy "{param.lr_policy}" needs it', origin)
    _check_other_policies(param, origin)
    _check_rule(param, origin)


def log_ignored(param: SolverParameter) -> None:
    """Log the settings that have no effect."""
    if param.solver_data_type != FLOAT:
        log.info("solver_data_type is ignored: parameters and history are always float32")
    for name, reason in _IGNORED.items():
        if _has(param, name):
            log.info("%s is ignored: %s", name, reason)


def _check_train_source(param: SolverParameter, origin: str) -> None:
    given = [name for name in TRAIN_SOURCES if _has(param, name)]
    if not given:
        raise ConfigError(f'{origin}: no net to train; add net: "FILE" (or one of {", ".join(TRAIN_SOURCES[1:])})')
    if len(given) > 1:
        raise ConfigError(f"{origin}: {' and '.join(given)} both name a net to train; keep one")


def _check_present(param: SolverParameter, names: tuple[str, ...], because: str, origin: str) -> None:
    for name in names:
        if not _has(param, name):
            raise ConfigError(f"{origin}: {name} is missing{because}; add {name}")


def _check_finite(param: SolverParameter, origin: str) -> None:
    for field, value in param.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{origin}: {field.name} is {value:g}; it must be a finite number")


def _check_minimum(param: SolverParameter, origin: str) -> None:
    for name, minimum in MINIMUM.items():
        value = getattr(param, name)
        # NVIDIA Caffe accepts a negative gamma for sigmoid; BVLC Caffe aborts
        may_be_negative = name == "gamma" and param.lr_policy == "sigmoid"
        if _has(param, name) and not value >= minimum and not may_be_negative:
            raise ConfigError(f"{origin}: {name} is {value:g}; it must be at least {minimum}")
    if param.iter_size > MAX_PASSES:
        raise ConfigError(f"{origin}: iter_size is {param.iter_size}; it must be at most {MAX_PASSES}")


def _check_learning_rate(param: SolverParameter, origin: str) -> None:
    policy = param.lr_policy
    _check_known("lr_policy", policy, tuple(LR_POLICIES), origin)
    _check_present(param, LR_POLICIES[policy], f', and lr_policy "{policy}" needs it', origin)
    if list(param.stepvalue) != sorted(set(param.stepvalue)):
        raise ConfigError(f"{origin}: stepvalue {list(param.stepvalue)} does not increase; sort the values")
    if policy == "multifixed":
        _check_stages(param, origin)
    if policy == "stepearly" and not (param.test_iter and param.test_interval):
        raise ConfigError(f'{origin}: lr_policy "stepearly" needs tests; add test_iter and test_interval')
    if _has(param, "warmup_start_lr") and not param.warmup_iter:
        log.warning("%s: warmup_start_lr has no effect without warmup_iter", origin)
    if policy == "poly" and param.base_lr < param.min_lr:
        raise ConfigError(f"{origin}: base_lr {param.base_lr:g} is below min_lr {param.min_lr:g}; lower min_lr")
    if _has(param, "rampup_lr") and not param.rampup_interval:
        log.warning("%s: rampup_lr has no effect without rampup_interval", origin)


def _check_stages(param: SolverParameter, origin: str) -> None:
    rates, ends = list(param.stagelr), list(param.stageiter)
    if len(rates) != len(ends):
        raise ConfigError(f"{origin}: {len(rates)} stagelr and {len(ends)} stageiter; give one of each for each stage")
    if not all(0 <= rate < math.inf for rate in rates):
        raise ConfigError(f"{origin}: a stagelr is {min(rates):g}; each must be a finite number, at least 0")
    if ends != sorted(set(ends)):
        raise ConfigError(f"{origin}: stageiter {ends} does not increase; sort the values")


def _check_other_policies(param: SolverParameter, origin: str) -> None:
    _check_known("momentum_policy", param.momentum_policy, MOMENTUM_POLICIES, origin)
    _check_known("weight_decay_policy", param.weight_decay_policy, WEIGHT_DECAY_POLICIES, origin)
    _check_known("regularization_type", param.regularization_type, REGULARIZATIONS, origin)
    if param.larc and param.local_lr_auto:
        raise ConfigError(f"{origin}: larc and local_lr_auto exclude each other; leave one of them out")
    if param.larc:
        _check_known("larc_policy", param.larc_policy, LARC_POLICIES, origin)
    if param.weight_decay_policy == "poly":
        _check_present(param, ("max_weight_decay",), ', and weight_decay_policy "poly" needs it', origin)


def _check_rule(param: SolverParameter, origin: str) -> None:
    """Compare the settings with what the update rule declares."""
    rule = RULES.get(param.type, origin)
    if param.regularization_type == "WD" and rule.decoupled_formula is None:
        able = [name for name in RULES if RULES.get(name).decoupled_formula is not None]
        raise ConfigError(
            f'{origin}: regularization_type "WD" is for solvers of type {" and ".join(able)}, and type is '
            f"{param.type}; use L2"
        )
    if not rule.takes_momentum and param.momentum:
        raise ConfigError(f"{origin}: {param.type} has no momentum, and momentum is {param.momentum:g}; remove it")
    for name in rule.below_one:
        if not 0 <= getattr(param, name) < 1:
            raise ConfigError(
                f"{origin}: {name} is {getattr(param, name):g}; with {param.type} it must be at least 0 and below 1"
            )


def _check_testing(param: SolverParameter, origin: str) -> None:
    _check_known("eval_type", param.eval_type, EVAL_TYPES, origin)
    _check_known("ap_version", param.ap_version, AP_VERSIONS, origin)
    for name in ("ap_version", "show_per_class_result"):
        if _has(param, name) and param.eval_type != "detection":
            log.warning('%s: %s has no effect without eval_type: "detection"', origin, name)
    own_nets = len(param.test_net) + len(param.test_net_param)
    shared = param.HasField("net") or param.HasField("net_param")
    tests = len(param.test_iter)
    if not tests and (own_nets or (shared and param.test_interval)):
        raise ConfigError(
            f"{origin}: test_iter is missing; add test_iter: N, the batches of one test, for each test net"
        )
    if tests < own_nets or (tests > own_nets and not shared):
        raise ConfigError(f"{origin}: {tests} test_iter for {own_nets} test nets; give one test_iter per test net")
    for batches in param.test_iter:
        if batches < 1:
            raise ConfigError(f"{origin}: test_iter is {batches}; it must be at least 1, or be left out to train only")
    if tests and not param.test_interval:
        raise ConfigError(f"{origin}: test_iter is given but test_interval is not; add test_interval")
    if param.test_state and len(param.test_state) != tests:
        raise ConfigError(
            f"{origin}: {len(param.test_state)} test_state for {tests} test nets; give none or one per test net"
        )


def _check_known(field: str, value: str, known: tuple[str, ...], origin: str) -> None:
    if value not in known:
        raise ConfigError(f"{origin}: unknown {field} '{value}'; {suggest(value, list(known))}")


def _has(param: SolverParameter, name: str) -> bool:
    """Return whether a field is set; for a repeated field, whether it has entries."""
    if hasattr(getattr(param, name), "append"):
        return len(getattr(param, name)) > 0
    return param.HasField(name)

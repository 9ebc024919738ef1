"""Solvers: the training loop, one file per update rule, learning-rate policies as pure functions.

parallel, plan and all parts above import it.
"""

from __future__ import annotations

import importlib
from typing import Any

from caffepy.backend.interface import Backend
from caffepy.config.solver_check import check_values
from caffepy.errors import ConfigError
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solvers.base import SOLVERS, Solver
from caffepy.solvers.callbacks import Action, SingleDevice, SolverCallback

__all__ = ["SOLVERS", "Action", "SingleDevice", "Solver", "SolverCallback", "create_solver", "solver_class"]

_RULES = ("adadelta", "adagrad", "adam", "nesterov", "rmsprop", "sag", "sgd")


def create_solver(param: SolverParameter, backend: Backend, **keywords: Any) -> Solver:
    """The solver of `param.type`; `keywords` are those of `Solver`.

    Raises:
        ConfigError: the type is unknown, the solver or its nets do not hold together, or it is no message at all.
    """
    if not isinstance(param, SolverParameter):
        raise ConfigError(f"create_solver needs a SolverParameter; caffepy.read_solver({param!r}) would read one")
    check_values(param)
    return solver_class(param.type)(param, backend, **keywords)


def solver_class(type_name: str) -> type[Solver]:
    """The class of a solver type.

    Raises:
        ConfigError: there is no such type; the message offers the nearest name.
    """
    for rule in _RULES:
        importlib.import_module(f"caffepy.solvers.rules.{rule}")
    return SOLVERS.get(type_name, "solver")

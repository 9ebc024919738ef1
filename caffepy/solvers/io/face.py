"""A solver as programs see it: how far it is, its callbacks, and what Python's prompt and notebooks show of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from caffepy.net import Net
from caffepy.net.describe import heading, table
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solvers.io.observers import Observers
from caffepy.solvers.loss import LossWindow
from caffepy.solvers.rules.update import Update
from caffepy.solvers.train_state import TrainState

_SHOWN = (
    "type", "base_lr", "lr_policy", "momentum", "weight_decay", "iter_size", "max_iter", "test_interval", "snapshot",
    "snapshot_prefix", "random_seed",
)  # fmt: skip
"""Fields of the solver's prototxt."""


P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="SolverFace")


def on_device(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """A solver's method that makes its device the calling thread's, so that programs need not."""

    @wraps(method)
    def function(self: Self, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.net.backend.activate():
            return method(self, *args, **kwargs)

    return function  # type: ignore[return-value]  # mypy takes self for a name here


class SolverFace:
    """What a program asks a solver."""

    param: SolverParameter
    net: Net
    test_nets: list[Net]
    state: TrainState
    observers: Observers

    @property
    def iteration(self) -> int:
        """How many iterations were made, those before a snapshot that was restored included."""
        return self.state.iteration

    @property
    def losses(self) -> LossWindow:
        """This device's losses of the last `average_loss` iterations whose loss was read."""
        return self.state.losses

    @property
    def update(self) -> Update:
        """The update of the parameters."""
        return self.state.update

    @property
    def last_pass(self) -> bool:
        """Whether the present pass is the iteration's last, whose backward pass completes the gradients."""
        return self.state.last_pass

    def add_callback(self, callback: Any) -> None:
        """Call an object's `after_iteration`, `after_test` and `after_snapshot`; see `caffepy.Callback`.

        Raises:
            ConfigError: it has none of these methods and is no function.
        """
        self.observers.add(callback)

    def __repr__(self) -> str:
        state, backend = self.state, self.net.backend
        losses = state.losses.values()
        loss = f", loss {losses[-1]:.6g}" if losses else ""
        return (
            f"<caffepy {self.param.type} solver of net '{self.net.name}': iteration {state.iteration} of "
            f"{self.param.max_iter}{loss}, on {backend.device_description()}>"
        )

    def _repr_html_(self) -> str:
        fields = [(name, getattr(self.param, name)) for name in _SHOWN if self.param.HasField(name)]
        nets = "".join(net._repr_html_() for net in (self.net, *self.test_nets))
        return heading(repr(self).strip("<>")) + table(("field", "value"), fields) + nets

"""What a program wants to hear of a solver's training: its callbacks, several a solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caffepy.errors import ConfigError
from caffepy.solvers.callbacks import Action
from caffepy.solvers.requests import Requests

EVENTS = ("after_iteration", "after_test", "after_snapshot")
"""The methods that a callback may have; each returns True to stop training."""


class Observers:
    """The callbacks of one solver, called in the order in which they were added.

    Args:
        requests: where a callback's stop goes, from which all devices hear of it.
        wait: returns when the device has finished the iterations that were made.
    """

    def __init__(self, requests: Requests, wait: Callable[[], None]) -> None:
        self._requests = requests
        self._wait = wait
        self._callbacks: list[Any] = []

    def add(self, callback: Any) -> None:
        """Call an object's methods among `EVENTS`, or a function after each iteration.

        Raises:
            ConfigError: it is neither a function nor has it such a method.
        """
        if not callable(callback) and not any(hasattr(callback, event) for event in EVENTS):
            raise ConfigError(
                f"a callback is a function, or has one of the methods {', '.join(EVENTS)}; {callback!r} is neither"
            )
        self._callbacks.append(callback)

    def after_iteration(self, solver: Any) -> None:
        """Call those whose `interval`, by default 1, divides the number of iterations made."""
        waited = False
        for callback in self._callbacks:
            function = getattr(callback, "after_iteration", None) or _function(callback)
            if function is None or solver.iteration % getattr(callback, "interval", 1):
                continue
            if not waited and getattr(callback, "waits", True):
                self._wait()
                waited = True
            self._stop_if(function(solver))

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of all that have it."""
        for callback in self._callbacks:
            if (function := getattr(callback, event, None)) is not None:
                self._stop_if(function(*arguments))

    def _stop_if(self, answer: Any) -> None:
        if answer is True:
            self._requests.ask_for(Action.STOP)


def _function(callback: Any) -> Callable[[Any], Any] | None:
    """A callback that is a function; an object with another event's method is none."""
    return None if any(hasattr(callback, event) for event in EVENTS) else callback

"""A failure as it is told to the user and to other ranks: what, and which rank, host, device, iteration and layer."""

from __future__ import annotations

from types import TracebackType

from caffepy.errors import CaffepyError, RunError, one_line
from caffepy.layers.core.base import Layer
from caffepy.parallel.store.records import Failure

__all__ = ["Failure", "describe_error", "exit_status", "failing_layer"]


def describe_error(error: BaseException) -> str:
    """What went wrong in one line: an error of ours as it stands, another with its type; the layer that was at work."""
    text = one_line(str(error) if isinstance(error, CaffepyError) else f"{type(error).__name__}: {error}")
    layer = failing_layer(error.__traceback__)
    if layer is None or f"'{layer.name}'" in text:
        return text
    return f"layer '{layer.name}' ({layer.type}): {text}"


def exit_status(error: BaseException) -> int:
    """What a process that ends with `error` returns."""
    return error.exit_status if isinstance(error, CaffepyError) else RunError.exit_status


def failing_layer(trace: TracebackType | None) -> Layer | None:
    """The innermost layer that was at work when the error was raised: the traceback holds its methods' `self`."""
    found = None
    while trace is not None:
        candidate = trace.tb_frame.f_locals.get("self")
        if isinstance(candidate, Layer):
            found = candidate
        trace = trace.tb_next
    return found

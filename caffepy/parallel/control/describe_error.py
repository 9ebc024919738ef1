"""The text of an error for the user and for other ranks: the error and the layer that raised it."""

from __future__ import annotations

from traceback import walk_tb

from caffepy.errors import describe
from caffepy.layers.core.base import Layer


def describe_error(error: BaseException) -> str:
    """`caffepy.errors.describe`, and the layer that was at work: the traceback holds its methods' `self`."""
    text = describe(error)
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    layer = next((owner for owner in reversed(owners) if isinstance(owner, Layer)), None)
    if layer is None or f"'{layer.name}'" in text:
        return text
    return f"layer '{layer.name}' ({layer.type}): {text}"

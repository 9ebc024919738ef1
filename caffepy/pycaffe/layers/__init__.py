"""`caffe.layers`: the layer types of `NetSpec` as attributes, and the Python layers of NVIDIA Caffe as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caffepy.pycaffe import net_spec


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function that makes a layer of this type. Importing a module here hides `net_spec.layers`."""
    function: Callable[..., Any] = getattr(net_spec.layers, name)
    return function

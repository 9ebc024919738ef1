"""Layer types, one family a file. `layer_class` returns the class of a type named in a prototxt."""

from __future__ import annotations

from caffepy.layers.layer import (
    Layer,
    LayerContext,
    PassCounter,
    is_registered,
    layer_class,
    register_layer,
    replaces_built_in,
)

__all__ = [
    "Layer",
    "LayerContext",
    "PassCounter",
    "is_registered",
    "layer_class",
    "register_layer",
    "replaces_built_in",
]

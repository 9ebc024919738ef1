"""Layer types, one family a file. `layer_class` returns the class of a type named in a prototxt."""

from __future__ import annotations

from caffepy.layers.core.base import Layer, LayerContext, PassCounter, layer_class, register_layer

__all__ = ["Layer", "LayerContext", "PassCounter", "layer_class", "register_layer"]

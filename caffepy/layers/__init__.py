"""Layer types, one family a file; `layer_class` finds them by the name that prototxts use.

net, solvers and all parts above import it.
"""

from __future__ import annotations

from caffepy.layers.core.base import Layer, LayerContext, PassCounter, layer_class, register_layer

__all__ = ["Layer", "LayerContext", "PassCounter", "layer_class", "register_layer"]

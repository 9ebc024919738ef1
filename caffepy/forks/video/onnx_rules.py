"""What the layer types of this family become in ONNX."""

from __future__ import annotations

from caffepy.forks.video.convolution3d import Pooling3DLayer
from caffepy.layers.export_rules import ONNX, OnnxView, Values


@ONNX.exports("Convolution3D", form="Conv; Reshape around it where `axis` is not 1")
def convolution_of_clips(view: OnnxView) -> Values:
    return ONNX.apply("Convolution", view)


@ONNX.exports("Deconvolution3D", form="ConvTranspose; Reshape around it where `axis` is not 1")
def deconvolution_of_clips(view: OnnxView) -> Values:
    return ONNX.apply("Deconvolution", view)


@ONNX.exports("Pooling3D", form="MaxPool, AveragePool, with Mul where the divisors differ")
def pooling_of_clips(view: OnnxView) -> str:
    layer = view.layer
    assert isinstance(layer, Pooling3DLayer)
    windows = view.windows(layer.geometry)
    if layer.is_max:
        return view.add("MaxPool", view.x, **windows.attributes)
    return view.average(view.x, windows)

"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

from caffepy.forks.video.convolution3d import Pooling3DLayer
from caffepy.layers.export_rules import ONNX, TORCH, OnnxView, TorchView, Values, call, pair


@ONNX.exports("Convolution3D", form="Conv; Reshape around it where `axis` is not 1")
def onnx_convolution_of_clips(view: OnnxView) -> Values:
    return ONNX.apply("Convolution", view)


@ONNX.exports("Deconvolution3D", form="ConvTranspose; Reshape around it where `axis` is not 1")
def onnx_deconvolution_of_clips(view: OnnxView) -> Values:
    return ONNX.apply("Deconvolution", view)


@ONNX.exports("Pooling3D", form="MaxPool, AveragePool, with Mul where the divisors differ")
def onnx_pooling_of_clips(view: OnnxView) -> str:
    layer = view.layer
    assert isinstance(layer, Pooling3DLayer)
    windows = view.windows(layer.geometry)
    if layer.is_max:
        return view.add("MaxPool", view.x, **windows.attributes)
    return view.average(view.x, windows)


@TORCH.exports("Convolution3D", form="nn.Conv1d, Conv2d or Conv3d")
def torch_convolution_of_clips(code: TorchView) -> Values:
    return TORCH.apply("Convolution", code)


@TORCH.exports("Deconvolution3D", form="nn.ConvTranspose1d, ConvTranspose2d or ConvTranspose3d")
def torch_deconvolution_of_clips(code: TorchView) -> Values:
    return TORCH.apply("Deconvolution", code)


@TORCH.exports("Pooling3D", form="nn.MaxPool3d, nn.AvgPool3d")
def torch_pooling_of_clips(code: TorchView) -> str:
    layer = code.layer
    assert isinstance(layer, Pooling3DLayer)
    g = layer.geometry
    if any(2 * pad > size for pad, size in zip(g.pad, g.kernel, strict=True)):
        raise code.refuse("a pad of more than half of the kernel")
    pad = pair(g.pad) if any(g.pad) else None
    name = "nn.MaxPool3d" if layer.is_max else "nn.AvgPool3d"
    return code.apply(call(name, pair(g.kernel), stride=pair(g.stride), padding=pad, ceil_mode=True))

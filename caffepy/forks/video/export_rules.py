"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

from caffepy.layers.export_rules import ONNX, TORCH, OnnxLayer, TorchLayer, call, exports, pair

exports("Convolution3D", onnx="Conv; Reshape around it where `axis` is not 1", torch="nn.Conv1d, Conv2d or Conv3d")(
    lambda view: view.as_type("Convolution")
)
exports(
    "Deconvolution3D",
    onnx="ConvTranspose; Reshape around it where `axis` is not 1",
    torch="nn.ConvTranspose1d, ConvTranspose2d or ConvTranspose3d",
)(lambda view: view.as_type("Deconvolution"))


@ONNX.exports("Pooling3D", form="MaxPool, AveragePool, with Mul where the divisors differ")
def onnx_pooling_of_clips(view: OnnxLayer) -> str:
    windows = view.windows(view.layer.geometry)
    if view.layer.is_max:
        return view.add("MaxPool", view.x, **windows.attributes)
    return view.average(view.x, windows)


@TORCH.exports("Pooling3D", form="nn.MaxPool3d, nn.AvgPool3d")
def torch_pooling_of_clips(code: TorchLayer) -> str:
    g = code.layer.geometry
    if any(2 * pad > size for pad, size in zip(g.pad, g.kernel, strict=True)):
        code.needs_onnx("a pad of more than half of the kernel")
    pad = pair(g.pad) if any(g.pad) else None
    name = "nn.MaxPool3d" if code.layer.is_max else "nn.AvgPool3d"
    return code.apply(call(name, pair(g.kernel), stride=pair(g.stride), padding=pad, ceil_mode=True))

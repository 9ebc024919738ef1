"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

from caffepy.layers.export_rules import exports

for convolution in ("Convolution3D", "NdConvolution"):
    exports(convolution, onnx="Conv; Reshape around it where `axis` is not 1", torch="nn.Conv1d, Conv2d or Conv3d")(
        lambda view: view.as_type("Convolution")
    )
exports(
    "Deconvolution3D",
    onnx="ConvTranspose; Reshape around it where `axis` is not 1",
    torch="nn.ConvTranspose1d, ConvTranspose2d or ConvTranspose3d",
)(lambda view: view.as_type("Deconvolution"))

for pooling in ("Pooling3D", "NdPooling", "PoolingND"):
    exports(
        pooling,
        onnx="MaxPool, AveragePool, with Mul where the divisors differ; global ones",
        torch="nn.MaxPool1d to 3d, nn.AvgPool1d to 3d; global ones nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d to 3d",
    )(lambda view: view.as_type("Pooling"))

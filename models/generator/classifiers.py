"""AlexNet, VGG-19, ResNet-152, SqueezeNet, MobileNet and DenseNet, with the public files' names of layers."""

from __future__ import annotations

from caffepy.formats.proto import caffe_pb2
from generator.builder import WEIGHT, Builder

MSRA = {"type": "msra"}
XAVIER = {"type": "xavier"}
UNDECAYED = [{"lr_mult": 1, "decay_mult": 0}]


def gaussian(std: float) -> dict[str, object]:
    return {"type": "gaussian", "std": std}


def alexnet() -> caffe_pb2.NetParameter:
    """Krizhevsky, Sutskever and Hinton, 2012: normalisation before pooling."""
    net = Builder("AlexNet", gaussian(0.01), bias=0.1)
    zero = {"bias_filler": {"type": "constant"}}
    net.imagenet(227, 256)
    x = net.relu("relu1", net.conv("conv1", "data", 96, 11, stride=4, **zero))
    x = net.pool("pool1", net.norm("norm1", x), 3, stride=2)
    x = net.relu("relu2", net.conv("conv2", x, 256, 5, pad=2, group=2))
    x = net.pool("pool2", net.norm("norm2", x), 3, stride=2)
    x = net.relu("relu3", net.conv("conv3", x, 384, 3, pad=1, **zero))
    x = net.relu("relu4", net.conv("conv4", x, 384, 3, pad=1, group=2))
    x = net.relu("relu5", net.conv("conv5", x, 256, 3, pad=1, group=2))
    x = net.pool("pool5", x, 3, stride=2)
    for item in ("6", "7"):
        x = net.relu(f"relu{item}", net.fc(f"fc{item}", x, 4096, weight_filler=gaussian(0.005)))
        x = net.drop(f"drop{item}", x)
    return net.classify(net.fc("fc8", x, 1000, **zero))


def vgg(net: Builder, convolutions: tuple[int, ...], first_pad: int = 1) -> dict[str, str]:
    """VGG's convolutions without the last pooling; gives the tops of stages, as conv1, pool1, ..., conv5."""
    x, stages = "data", {}
    for stage, (count, outputs) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True), 1):
        for item in range(1, count + 1):
            name = f"{stage}_{item}"
            pad = first_pad if name == "1_1" else 1
            x = net.relu(f"relu{name}", net.conv(f"conv{name}", x, outputs, 3, pad=pad))
        stages[f"conv{stage}"] = x
        if stage < 5:
            x = stages[f"pool{stage}"] = net.pool(f"pool{stage}", x, 2, stride=2)
    return stages


def vgg19() -> caffe_pb2.NetParameter:
    """Simonyan and Zisserman, 2014, configuration E."""
    net = Builder("VGG-19", MSRA)
    net.imagenet(224, 128, 25)
    bias = {"type": "constant", "value": 0.1}
    x = net.pool("pool5", vgg(net, (2, 2, 4, 4, 4))["conv5"], 2, stride=2)
    for item in ("6", "7"):
        x = net.relu(f"relu{item}", net.fc(f"fc{item}", x, 4096, weight_filler=gaussian(0.005), bias_filler=bias))
        x = net.drop(f"drop{item}", x)
    return net.classify(net.fc("fc8", x, 1000, weight_filler=gaussian(0.01)))


def residual_conv(net: Builder, name: str, bottom: str, outputs: int, kernel: int, stride: int = 1) -> str:
    """A convolution `res<name>` with `bn<name>` and `scale<name>`."""
    stride_too = {"stride": stride} if stride > 1 else {}
    pad = {"pad": kernel // 2} if kernel > 1 else {}
    x = net.conv(f"res{name}", bottom, outputs, kernel, bias_term=False, **pad, **stride_too)
    return net.batch_norm((f"bn{name}", f"scale{name}"), x)


def bottleneck(net: Builder, name: str, bottom: str, outputs: int, stride: int) -> str:
    """A residual block; the first one of a stage has a stride and a convolution in its shortcut."""
    shortcut = bottom
    if stride or name == "2a":
        shortcut = residual_conv(net, f"{name}_branch1", bottom, outputs, 1, stride or 1)
    x = bottom
    for part, width, kernel in (("a", outputs // 4, 1), ("b", outputs // 4, 3), ("c", outputs, 1)):
        x = residual_conv(net, f"{name}_branch2{part}", x, width, kernel, stride if part == "a" else 1)
        if part != "c":
            x = net.relu(f"res{name}_branch2{part}_relu", x)
    x = net.layer("Eltwise", f"res{name}", [shortcut, x], eltwise_param={"operation": "SUM"})
    return net.relu(f"res{name}_relu", x)


def resnet152() -> caffe_pb2.NetParameter:
    """He, Zhang, Ren and Sun, 2015; the stride of a stage is in its first 1 x 1 convolution."""
    net = Builder("ResNet-152", MSRA)
    net.imagenet(224, 32, 10)
    x = net.conv("conv1", "data", 64, 7, stride=2, pad=3, bias_term=False)
    x = net.relu("conv1_relu", net.batch_norm(("bn_conv1", "scale_conv1"), x))
    x = net.pool("pool1", x, 3, stride=2)
    for stage, blocks in ((2, "abc"), (3, 8), (4, 36), (5, "abc")):
        names = blocks if isinstance(blocks, str) else ["a", *(f"b{item}" for item in range(1, blocks))]
        for name in names:
            stride = 2 if name == "a" and stage > 2 else 0
            x = bottleneck(net, f"{stage}{name}", x, 64 * 2**stage, stride)
    return net.classify(net.fc("fc1000", net.pool("pool5", x, method="AVE"), 1000, weight_filler=XAVIER))


def fire(net: Builder, name: str, bottom: str, squeeze: int, expand: int) -> str:
    """A convolution that narrows, and two that widen side by side."""
    x = net.conv(f"{name}/squeeze1x1", bottom, squeeze, 1)
    x = net.relu(f"{name}/relu_squeeze1x1", x)
    one = net.relu(f"{name}/relu_expand1x1", net.conv(f"{name}/expand1x1", x, expand, 1))
    three = net.relu(f"{name}/relu_expand3x3", net.conv(f"{name}/expand3x3", x, expand, 3, pad=1))
    return net.concat(f"{name}/concat", [one, three])


def squeezenet() -> caffe_pb2.NetParameter:
    """Iandola et al., 2016, in its version 1.1."""
    net = Builder("SqueezeNet-1.1", XAVIER)
    net.imagenet(227, 32, 25)
    x = net.relu("relu_conv1", net.conv("conv1", "data", 64, 3, stride=2))
    x = net.pool("pool1", x, 3, stride=2)
    for item, squeeze, expand in (
        (2, 16, 64),
        (3, 16, 64),
        (4, 32, 128),
        (5, 32, 128),
        (6, 48, 192),
        (7, 48, 192),
        (8, 64, 256),
        (9, 64, 256),
    ):
        x = fire(net, f"fire{item}", x, squeeze, expand)
        if item in (3, 5):
            x = net.pool(f"pool{item}", x, 3, stride=2)
    x = net.conv("conv10", net.drop("drop9", x), 1000, 1, weight_filler=gaussian(0.01))
    return net.classify(net.pool("pool10", net.relu("relu_conv10", x), method="AVE"))


def normalised_conv(net: Builder, name: str, relu: str, bottom: str, shape: tuple[int, int], **fields: object) -> str:
    """A convolution of `shape` (outputs, kernel), its `/bn`, `/scale` and a ReLU; with `group` it is depthwise."""
    param = UNDECAYED if "group" in fields else WEIGHT
    x = net.conv(name, bottom, *shape, bias_term=False, param=param, **fields)
    return net.relu(relu, net.batch_norm((f"{name}/bn", f"{name}/scale"), x))


def separable(net: Builder, names: tuple[str, str], bottom: str, widths: tuple[int, int], stride: int) -> str:
    """A depthwise and a pointwise convolution called `names`; the ReLUs' names follow MobileNet's public file."""
    depthwise, pointwise = names
    number = depthwise.removeprefix("conv").removesuffix("/dw")
    fields = {"pad": 1, "group": widths[0]} | ({"stride": stride} if stride > 1 else {})
    x = normalised_conv(net, depthwise, f"relu{number}/dw", bottom, (widths[0], 3), **fields)
    return normalised_conv(net, pointwise, f"relu{number}/sep", x, (widths[1], 1))


MOBILENET = (
    ("2_1", 64, 1),
    ("2_2", 128, 2),
    ("3_1", 128, 1),
    ("3_2", 256, 2),
    ("4_1", 256, 1),
    ("4_2", 512, 2),
    ("5_1", 512, 1),
    ("5_2", 512, 1),
    ("5_3", 512, 1),
    ("5_4", 512, 1),
    ("5_5", 512, 1),
    ("5_6", 1024, 2),
    ("6", 1024, 1),
)
"""Blocks after the first convolution: number, outputs and stride."""


def mobilenet() -> caffe_pb2.NetParameter:
    """Howard et al., 2017, with width 1 at 224 x 224."""
    net = Builder("MobileNet", MSRA)
    net.imagenet(224, 64, mean_value=(103.94, 116.78, 123.68), scale=0.017)
    x, width = normalised_conv(net, "conv1", "relu1", "data", (32, 3), pad=1, stride=2), 32
    for name, outputs, stride in MOBILENET:
        x = separable(net, (f"conv{name}/dw", f"conv{name}/sep"), x, (width, outputs), stride)
        width = outputs
    return net.classify(net.conv("fc7", net.pool("pool6", x, method="AVE"), 1000, 1))


def pre_activated(net: Builder, name: str, relu: str, bottom: str) -> str:
    """BatchNorm, Scale and ReLU before a convolution, in a blob of their own since others read the bottom too."""
    return net.relu(relu, net.batch_norm((f"{name}/bn", f"{name}/scale"), bottom, f"{name}/bn", eps=1e-5))


def dense_layer(net: Builder, name: str, bottom: str) -> str:
    """32 more channels, after a bottleneck of 128."""
    x = pre_activated(net, f"conv{name}/x1", f"relu{name}/x1", bottom)
    x = net.conv(f"conv{name}/x1", x, 128, 1, bias_term=False)
    x = pre_activated(net, f"conv{name}/x2", f"relu{name}/x2", x)
    x = net.conv(f"conv{name}/x2", x, 32, 3, pad=1, bias_term=False)
    return net.concat(f"concat_{name}", [bottom, x])


def densenet121() -> caffe_pb2.NetParameter:
    """Huang, Liu, van der Maaten and Weinberger, 2016: growth 32, half the channels after each block."""
    net = Builder("DenseNet-121", MSRA)
    net.imagenet(224, 64, mean_value=(103.94, 116.78, 123.68), scale=0.017)
    x = net.conv("conv1", "data", 64, 7, stride=2, pad=3, bias_term=False)
    x, width = pre_activated(net, "conv1", "relu1", x), 64
    x = net.pool("pool1", x, 3, stride=2, pad=1, round_mode="FLOOR")
    for stage, layers in enumerate((6, 12, 24, 16), 2):
        for item in range(1, layers + 1):
            x = dense_layer(net, f"{stage}_{item}", x)
        width += 32 * layers
        x = pre_activated(net, f"conv{stage}_blk", f"relu{stage}_blk", x)
        if stage < 5:
            width //= 2
            x = net.conv(f"conv{stage}_blk", x, width, 1, bias_term=False)
            x = net.pool(f"pool{stage}", x, 2, "AVE", stride=2)
    return net.classify(net.conv("fc6", net.pool("pool5", x, method="AVE"), 1000, 1))

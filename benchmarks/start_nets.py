"""Nets of `start.py` that no model folder has: EfficientNet-B0, ShuffleNet v1 and U-Net, with random weights."""

from __future__ import annotations


class Text:
    """Layers of a prototxt, each on the top of the last."""

    def __init__(self, channels: int, side: int, batch: int) -> None:
        self.lines = [
            'layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param { '
            f"shape {{ dim: {batch} dim: {channels} dim: {side} dim: {side} }} shape {{ dim: {batch} }} }} }}"
        ]
        self.top, self.channels = "data", channels

    def add(self, kind: str, settings: str = "", bottoms: str = "", in_place: bool = False) -> str:
        """Add a layer; `bottoms` are names with blanks, by default the last top."""
        sources = bottoms.split() or [self.top]
        name = f"{kind.lower()}{len(self.lines)}"
        self.top = sources[0] if in_place else name
        text = " ".join(f'bottom: "{source}"' for source in sources)
        self.lines.append(f'layer {{ name: "{name}" type: "{kind}" {text} top: "{self.top}" {settings} }}')
        return self.top

    def convolve(self, outputs: int, kernel: int, stride: int = 1, group: int = 1, bias: bool = False) -> None:
        """Add a convolution with a pad that keeps the size."""
        self.channels = outputs
        settings = f"num_output: {outputs} kernel_size: {kernel} stride: {stride} pad: {kernel // 2} group: {group}"
        filler = 'weight_filler { type: "msra" }'
        self.add("Convolution", f"convolution_param {{ {settings} bias_term: {str(bias).lower()} {filler} }}")

    def normalise(self, activation: str = "") -> None:
        """Add BatchNorm, Scale and an activation."""
        self.add("BatchNorm", in_place=True)
        self.add("Scale", "scale_param { bias_term: true }", in_place=True)
        if activation:
            self.add(activation, in_place=activation == "ReLU")

    def classify(self, classes: int) -> str:
        """Add the mean of each channel, scores and the loss, and return the net's text."""
        self.add("Pooling", "pooling_param { pool: AVE global_pooling: true }")
        self.add("InnerProduct", f'inner_product_param {{ num_output: {classes} weight_filler {{ type: "xavier" }} }}')
        self.add("SoftmaxWithLoss", bottoms=f"{self.top} label")
        return "\n".join(self.lines)


def efficientnet_b0(batch: int) -> str:
    """Tan and Le 2019, table 1."""
    net = Text(3, 224, batch)
    net.convolve(32, 3, 2)
    net.normalise("Swish")
    stages = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
    )
    for expansion, outputs, repeats, first_stride, kernel in (*stages, (6, 320, 1, 1, 3)):
        for stride in (first_stride, *(1,) * (repeats - 1)):
            before, inputs = net.top, net.channels
            wide = expansion * inputs
            if expansion > 1:
                net.convolve(wide, 1)
                net.normalise("Swish")
            net.convolve(wide, kernel, stride, wide)
            net.normalise("Swish")
            image = net.top
            net.add("Pooling", "pooling_param { pool: AVE global_pooling: true }")
            net.convolve(max(1, inputs // 4), 1, bias=True)
            net.add("Swish")
            net.convolve(wide, 1, bias=True)
            net.add("Sigmoid", in_place=True)
            net.add("Reshape", "reshape_param { shape { dim: 0 dim: -1 } }")
            net.add("Scale", "scale_param { axis: 0 }", f"{image} {net.top}")
            net.convolve(outputs, 1)
            net.normalise()
            if stride == 1 and inputs == outputs:
                net.add("Eltwise", bottoms=f"{before} {net.top}")
    net.convolve(1280, 1)
    net.normalise("Swish")
    return net.classify(1000)


def shufflenet(batch: int) -> str:
    """Zhang et al. 2017, with 3 groups."""
    net = Text(3, 224, batch)
    net.convolve(24, 3, 2)
    net.normalise("ReLU")
    net.add("Pooling", "pooling_param { pool: MAX kernel_size: 3 stride: 2 }")
    for outputs, repeats in ((240, 4), (480, 8), (960, 4)):
        for stride in (2, *(1,) * (repeats - 1)):
            before, inputs = net.top, net.channels
            net.convolve(outputs // 4, 1, group=1 if inputs == 24 else 3)
            net.normalise("ReLU")
            net.add("ShuffleChannel", "shuffle_channel_param { group: 3 }")
            net.convolve(outputs // 4, 3, stride, outputs // 4)
            net.normalise()
            net.convolve(outputs - inputs if stride == 2 else outputs, 1, group=3)
            net.normalise()
            if stride == 2:
                main = net.top
                net.add("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 2 }", before)
                net.add("Concat", bottoms=f"{net.top} {main}")
                net.channels = outputs
            else:
                net.add("Eltwise", bottoms=f"{before} {net.top}")
            net.add("ReLU", in_place=True)
    return net.classify(1000)


def unet(batch: int) -> str:
    """Ronneberger et al. 2015, with pads that keep sizes, 256 by 256 pixels and 2 classes."""
    net = Text(3, 256, batch)
    left: list[str] = []
    for outputs in (64, 128, 256, 512, 1024):
        if left:
            net.add("Pooling", "pooling_param { pool: MAX kernel_size: 2 stride: 2 }")
        for _ in range(2):
            net.convolve(outputs, 3, bias=True)
            net.add("ReLU", in_place=True)
        left.append(net.top)
    for outputs in (512, 256, 128, 64):
        settings = f'num_output: {outputs} kernel_size: 2 stride: 2 weight_filler {{ type: "msra" }}'
        net.add("Deconvolution", f"convolution_param {{ {settings} }}")
        left.pop()
        net.add("Concat", bottoms=f"{left[-1]} {net.top}")
        for _ in range(2):
            net.convolve(outputs, 3, bias=True)
            net.add("ReLU", in_place=True)
    net.convolve(2, 1, bias=True)
    mask = f"shape {{ dim: {batch} dim: 1 dim: 256 dim: 256 }}"
    net.lines.append(f'layer {{ name: "mask" type: "DummyData" top: "mask" dummy_data_param {{ {mask} }} }}')
    net.lines.append('layer { name: "silence" type: "Silence" bottom: "label" }')
    net.add("SoftmaxWithLoss", bottoms=f"{net.top} mask")
    return "\n".join(net.lines)


NETS = {"efficientnet_b0": efficientnet_b0, "shufflenet": shufflenet, "unet": unet}

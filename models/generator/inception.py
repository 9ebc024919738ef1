"""Inception-v3 (Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, 2015), with the public file's names of layers."""

from __future__ import annotations

from caffepy.formats.proto import caffe_pb2
from generator.builder import Builder

Kernel = tuple[int, int]


class Inception(Builder):
    """A builder whose convolutions are followed by BatchNorm, Scale and ReLU."""

    def unit(self, name: str, bottom: str, outputs: int, kernel: Kernel = (1, 1), **fields: int) -> str:
        """A convolution without bias; `pad: 1` keeps the size, whatever the kernel."""
        keep = fields.pop("pad", 0)
        height, width = kernel
        size = {"pad": keep * (height // 2)} if keep else {}
        if height != width:
            size = {"kernel_h": height, "kernel_w": width, "pad_h": height // 2, "pad_w": width // 2}
        x = self.conv(name, bottom, outputs, height if height == width else 0, bias_term=False, **size, **fields)
        return self.relu(f"{name}_relu", self.batch_norm((f"{name}_bn", f"{name}_scale"), x, eps=0.001))

    def stem(self) -> str:
        """192 channels, an eighth of the image's size."""
        x = self.unit("conv1_3x3_s2", "data", 32, (3, 3), stride=2)
        x = self.unit("conv2_3x3_s1", x, 32, (3, 3))
        x = self.unit("conv3_3x3_s1", x, 64, (3, 3), pad=1)
        x = self.unit("conv4_3x3_reduce", self.pool("pool1_3x3_s2", x, 3, stride=2), 80)
        x = self.unit("conv4_3x3", x, 192, (3, 3))
        return self.pool("pool2_3x3_s2", x, 3, stride=2)

    def block_a(self, name: str, bottom: str, projected: int) -> str:
        """Figure 5 of the paper: 5 x 5 as it is, and two 3 x 3."""
        one = self.unit(f"{name}_1x1", bottom, 64)
        five = self.unit(f"{name}_5x5", self.unit(f"{name}_5x5_reduce", bottom, 48), 64, (5, 5), pad=1)
        three = self.unit(f"{name}_3x3_1", self.unit(f"{name}_3x3_reduce", bottom, 64), 96, (3, 3), pad=1)
        three = self.unit(f"{name}_3x3_2", three, 96, (3, 3), pad=1)
        pool = self.pool(f"{name}_pool", bottom, 3, "AVE", stride=1, pad=1)
        return self.concat(f"{name}_output", [one, five, three, self.unit(f"{name}_pool_proj", pool, projected)])

    def reduction_a(self, bottom: str) -> str:
        name = "reduction_a"
        pool = self.pool(f"{name}_pool", bottom, 3, stride=2)
        one = self.unit(f"{name}_3x3", bottom, 384, (3, 3), stride=2)
        two = self.unit(f"{name}_3x3_2", self.unit(f"{name}_3x3_2_reduce", bottom, 64), 96, (3, 3), pad=1)
        return self.concat(f"{name}_concat", [one, self.unit(f"{name}_3x3_3", two, 96, (3, 3), stride=2), pool])

    def block_b(self, name: str, bottom: str, width: int) -> str:
        """Figure 6 with n = 7: convolutions of 1 x 7 and 7 x 1."""
        pool = self.unit(f"{name}_1x1", self.pool(f"{name}_pool_ave", bottom, 3, "AVE", stride=1, pad=1), 192)
        one = self.unit(f"{name}_1x1_2", bottom, 192)
        seven = self.unit(f"{name}_1x7", self.unit(f"{name}_1x7_reduce", bottom, width), width, (1, 7))
        seven = self.unit(f"{name}_7x1", seven, 192, (7, 1))
        twice = self.unit(f"{name}_7x1_2", self.unit(f"{name}_7x1_reduce", bottom, width), width, (7, 1))
        twice = self.unit(f"{name}_1x7_2", twice, width, (1, 7))
        twice = self.unit(f"{name}_7x1_3", twice, width, (7, 1))
        twice = self.unit(f"{name}_1x7_3", twice, 192, (1, 7))
        return self.concat(f"{name}_concat", [one, seven, twice, pool])

    def auxiliary(self, bottom: str) -> None:
        """The classifier at the side, which weighs 0.4."""
        x = self.pool("auxiliary_loss_ave_pool", bottom, 5, "AVE", stride=3)
        x = self.fc("auxiliary_loss_fc", self.unit("auxiliary_loss_conv", x, 128), 768)
        x = self.fc("auxiliary_loss_classifier", self.relu("auxiliary_loss_fc_relu", x), 1000)
        self.loss(x, "auxiliary_loss", 0.4)

    def reduction_b(self, bottom: str) -> str:
        name = "reduction_b"
        pool = self.pool(f"{name}_pool", bottom, 3, stride=2)
        one = self.unit(f"{name}_3x3", self.unit(f"{name}_3x3_reduce", bottom, 192), 320, (3, 3), stride=2)
        two = self.unit(f"{name}_1x7", self.unit(f"{name}_1x7_reduce", bottom, 192), 192, (1, 7))
        two = self.unit(f"{name}_7x1", two, 192, (7, 1))
        return self.concat(f"{name}_concat", [one, self.unit(f"{name}_3x3_2", two, 192, (3, 3), stride=2), pool])

    def block_c(self, name: str, bottom: str, method: str) -> str:
        """Figure 7: 1 x 3 and 3 x 1 side by side."""
        pool = self.unit(f"{name}_1x1", self.pool(f"{name}_pool", bottom, 3, method, stride=1, pad=1), 192)
        parts = [self.unit(f"{name}_1x1_2", bottom, 320)]
        narrow = self.unit(f"{name}_1x3_reduce", bottom, 384)
        wide = self.unit(f"{name}_3x3", self.unit(f"{name}_3x3_reduce", bottom, 448), 384, (3, 3), pad=1)
        for x, suffix in ((narrow, ""), (wide, "_2")):
            parts += [self.unit(f"{name}_{h}x{w}{suffix}", x, 384, (h, w)) for h, w in ((1, 3), (3, 1))]
        return self.concat(f"{name}_concat", [*parts, pool])


def inception_v3() -> caffe_pb2.NetParameter:
    """Images of 299 x 299 with values from -1 to 1."""
    net = Inception("Inception-v3", {"type": "xavier"})
    net.imagenet(299, 32, 25, mean_value=(128, 128, 128), scale=1 / 128)
    x = net.stem()
    for item, projected in enumerate((32, 64, 64), 1):
        x = net.block_a(f"inception_a{item}", x, projected)
    x = net.reduction_a(x)
    for item, width in enumerate((128, 160, 160, 192), 1):
        x = net.block_b(f"inception_b{item}", x, width)
    net.auxiliary(x)
    x = net.reduction_b(x)
    for item, method in enumerate(("AVE", "MAX"), 1):
        x = net.block_c(f"inception_c{item}", x, method)
    x = net.drop("pool_8x8_s1_drop", net.pool("pool_8x8_s1", x, method="AVE"), 0.2)
    return net.classify(net.fc("classifier", x, 1000))

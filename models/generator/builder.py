"""Puts a net together layer by layer; every method adds layers and gives the top that the next one reads."""

from __future__ import annotations

from typing import Any

from caffepy.formats.proto import caffe_pb2

BIAS_TOO = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]
WEIGHT = [{"lr_mult": 1, "decay_mult": 1}]
SCALED = [{"lr_mult": 1, "decay_mult": 0}, {"lr_mult": 1, "decay_mult": 0}]
TRAIN, TEST = [{"phase": "TRAIN"}], [{"phase": "TEST"}]
CAFFE_MEAN = (104, 117, 123)
"""ImageNet's mean of blue, green and red."""


class Builder:
    """A net under construction.

    Args:
        name: the net's.
        filler: of the weights of convolutions and inner products.
        bias: value that their biases begin with.
    """

    def __init__(self, name: str, filler: dict[str, Any], bias: float | None = None):
        self.net = caffe_pb2.NetParameter(name=name)
        self.filler = filler
        self.bias_filler: dict[str, Any] = {"type": "constant"} | ({} if bias is None else {"value": bias})

    def layer(self, kind: str, name: str, bottoms: str | list[str], top: str = "", **fields: Any) -> str:
        """Any layer with one top, which is called like the layer unless said otherwise."""
        bottoms = [bottoms] if isinstance(bottoms, str) else bottoms
        self.net.layer.add(name=name, type=kind, bottom=bottoms, top=[top or name], **fields)
        return top or name

    def in_place(self, kind: str, name: str, blob: str, **fields: Any) -> str:
        return self.layer(kind, name, blob, blob, **fields)

    def conv(self, name: str, bottom: str, outputs: int, kernel: int, **fields: Any) -> str:
        """A convolution; `fields` are those of ConvolutionParameter, and `param` the layer's.

        `kernel` 0 leaves the size to `kernel_h` and `kernel_w`.
        """
        biased = fields.get("bias_term", True)
        param = fields.pop("param", BIAS_TOO if biased else WEIGHT)
        values: dict[str, Any] = {"num_output": outputs, "weight_filler": self.filler}
        values |= {"kernel_size": [kernel]} if kernel else {}
        values |= {"bias_filler": self.bias_filler} if biased else {}
        values |= {key: [value] if key in ("pad", "stride", "dilation") else value for key, value in fields.items()}
        return self.layer("Convolution", name, bottom, param=param, convolution_param=values)

    def fc(self, name: str, bottom: str, outputs: int, **fields: Any) -> str:
        """An inner product; `fields` are those of InnerProductParameter, and `param` the layer's."""
        param = fields.pop("param", BIAS_TOO)
        values = {"num_output": outputs, "weight_filler": self.filler, "bias_filler": self.bias_filler} | fields
        return self.layer("InnerProduct", name, bottom, param=param, inner_product_param=values)

    def relu(self, name: str, blob: str) -> str:
        return self.in_place("ReLU", name, blob)

    def drop(self, name: str, blob: str, ratio: float = 0.5) -> str:
        return self.in_place("Dropout", name, blob, dropout_param={"dropout_ratio": ratio})

    def pool(self, name: str, bottom: str, kernel: int = 0, method: str = "MAX", **fields: Any) -> str:
        """A pooling layer, over the whole image where no kernel is given."""
        size = {"kernel_size": kernel} if kernel else {"global_pooling": True}
        return self.layer("Pooling", name, bottom, pooling_param={"pool": method} | size | fields)

    def norm(self, name: str, bottom: str) -> str:
        """Local response normalisation, with AlexNet's numbers."""
        return self.layer("LRN", name, bottom, lrn_param={"local_size": 5, "alpha": 0.0001, "beta": 0.75})

    def batch_norm(self, names: tuple[str, str], bottom: str, top: str = "", eps: float = 0) -> str:
        """BatchNorm and the Scale after it, both called as given; in place unless there is a top."""
        fields = {"batch_norm_param": {"eps": eps}} if eps else {}
        top = self.layer("BatchNorm", names[0], bottom, top or bottom, **fields)
        return self.in_place("Scale", names[1], top, param=SCALED, scale_param={"bias_term": True})

    def concat(self, name: str, bottoms: list[str], axis: int = 1) -> str:
        fields = {} if axis == 1 else {"concat_param": {"axis": axis}}
        return self.layer("Concat", name, bottoms, **fields)

    def data(self, train: dict[str, Any], test: dict[str, Any], kind: str = "Data") -> None:
        """The two data layers; each dict holds the LayerParameter's fields that are its own."""
        for include, fields in ((TRAIN, train), (TEST, test)):
            self.net.layer.add(name="data", type=kind, top=["data", "label"], include=include, **fields)

    def imagenet(self, crop: int, batch: int, test_batch: int = 50, **transform: Any) -> None:
        """ImageNet's two LMDBs."""
        transform = {"crop_size": crop, "mean_value": CAFFE_MEAN} | transform
        sources = (("ilsvrc12_train_lmdb", batch, True), ("ilsvrc12_val_lmdb", test_batch, False))
        self.data(
            *(
                {
                    "transform_param": transform | {"mirror": mirror},
                    "data_param": {"source": source, "batch_size": size, "backend": "LMDB"},
                }
                for source, size, mirror in sources
            )
        )

    def loss(self, scores: str, name: str = "loss", weight: float | None = None) -> None:
        fields = {} if weight is None else {"loss_weight": [weight]}
        self.layer("SoftmaxWithLoss", name, [scores, "label"], **fields)

    def accuracy(self, scores: str) -> None:
        """Top-1 and top-5, in the test phase."""
        self.layer("Accuracy", "top-1", [scores, "label"], include=TEST)
        self.layer("Accuracy", "top-5", [scores, "label"], include=TEST, accuracy_param={"top_k": 5})

    def classify(self, scores: str) -> caffe_pb2.NetParameter:
        """The end of a classifier."""
        self.loss(scores)
        self.accuracy(scores)
        return self.net

"""FCN-8s, which labels pixels, and LRCN, which describes an image, with the public files' names of layers."""

from __future__ import annotations

from typing import Any

from caffepy.formats.proto import caffe_pb2
from generator.builder import CAFFE_MEAN, TEST, TRAIN, Builder
from generator.classifiers import MSRA, vgg

CLASSES = 21
FROZEN: list[dict[str, Any]] = [{"lr_mult": 0, "decay_mult": 0}, {"lr_mult": 0, "decay_mult": 0}]
SLOW: list[dict[str, Any]] = [{"lr_mult": 0.1, "decay_mult": 1}, {"lr_mult": 0.2, "decay_mult": 0}]
UNIFORM = {"type": "uniform", "min": -0.08, "max": 0.08}
WORDS, STATES = 8801, 1000


def _upsampled(net: Builder, name: str, bottom: str, factor: int) -> str:
    """Bilinear interpolation, which is not learned: a fixed transposed convolution from each class to itself."""
    return net.layer(
        "Deconvolution",
        name,
        bottom,
        param=[{"lr_mult": 0}],
        convolution_param={
            "num_output": CLASSES,
            "bias_term": False,
            "kernel_size": [2 * factor],
            "stride": [factor],
            "weight_filler": {"type": "bilinear"},
            "group": CLASSES,
        },
    )


def _cropped(net: Builder, name: str, bottoms: list[str], offset: int) -> str:
    return net.layer("Crop", name, bottoms, crop_param={"axis": 2, "offset": [offset]})


def fcn8s() -> caffe_pb2.NetParameter:
    """Long, Shelhamer and Darrell, 2015; batch 1, a loss that is summed over the pixels."""
    net = Builder("FCN-8s", MSRA)
    _segmentation_data(net)
    stages = vgg(net, (2, 2, 3, 3, 3), first_pad=100)
    x = net.pool("pool5", stages["conv5"], 2, stride=2)
    for item, kernel in (("6", 7), ("7", 1)):
        x = net.drop(f"drop{item}", net.relu(f"relu{item}", net.conv(f"fc{item}", x, 4096, kernel)))
    zero = {"weight_filler": {"type": "constant"}}
    x = _upsampled(net, "upscore2", net.conv("score_fr", x, CLASSES, 1, **zero), 2)
    for stage, offset, after in ((4, 5, "upscore_pool4"), (3, 9, "upscore8")):
        score = net.conv(f"score_pool{stage}", stages[f"pool{stage}"], CLASSES, 1, **zero)
        score = _cropped(net, f"score_pool{stage}c", [score, x], offset)
        x = net.layer("Eltwise", f"fuse_pool{stage}", [x, score], eltwise_param={"operation": "SUM"})
        x = _upsampled(net, after, x, 2 if stage == 4 else 8)
    score = _cropped(net, "score", [x, "data"], 31)
    loss = {"ignore_label": 255, "normalize": False}
    net.layer("SoftmaxWithLoss", "loss", [score, "label"], loss_param=loss)
    net.layer("Accuracy", "accuracy", [score, "label"], include=TEST, accuracy_param={"ignore_label": 255})
    return net.net


def _segmentation_data(net: Builder) -> None:
    """Images and, in a second LMDB of the same order, their labels as images of one channel."""
    for include, part in ((TRAIN, "train"), (TEST, "val")):
        for name in ("data", "label"):
            source = f"voc_{part}_{'images' if name == 'data' else 'labels'}_lmdb"
            fields: dict[str, Any] = {"data_param": {"source": source, "batch_size": 1, "backend": "LMDB"}}
            fields |= {"transform_param": {"mean_value": CAFFE_MEAN}} if name == "data" else {}
            net.net.layer.add(name=name, type="Data", top=[name], include=include, **fields)


def lrcn() -> caffe_pb2.NetParameter:
    """Donahue et al., 2014, factored with two layers: CaffeNet, which stays as it is, and two LSTMs."""
    net = Builder("lrcn_caffenet_to_lstm", {"type": "gaussian", "std": 0.01})
    _caption_data(net)
    image = _caffenet(net)
    words = net.layer(
        "Embed",
        "embedding",
        "input_sentence",
        "embedded_input_sentence",
        param=[{"lr_mult": 1}],
        embed_param={"input_dim": WORDS, "num_output": STATES, "bias_term": False, "weight_filler": UNIFORM},
    )
    recurrent = {"num_output": STATES, "weight_filler": UNIFORM, "bias_filler": {"type": "constant"}}
    x = net.layer("LSTM", "lstm1", [words, "cont_sentence"], recurrent_param=recurrent)
    x = net.layer("LSTM", "lstm2", [x, "cont_sentence", image], recurrent_param=recurrent)
    score = net.fc("predict", x, WORDS, axis=2, weight_filler=UNIFORM)
    net.layer(
        "SoftmaxWithLoss",
        "cross_entropy_loss",
        [score, "target_sentence"],
        loss_weight=[20],
        loss_param={"ignore_label": -1},
        softmax_param={"axis": 2},
    )
    net.layer(
        "Accuracy", "accuracy", [score, "target_sentence"], include=TEST, accuracy_param={"axis": 2, "ignore_label": -1}
    )
    return net.net


def _caption_data(net: Builder) -> None:
    """100 images a batch, and for each 20 time steps of a sentence: first axis time, second axis sentence."""
    transform = {"crop_size": 227, "mean_value": CAFFE_MEAN}
    for include, part, mirror in ((TRAIN, "train", True), (TEST, "val", False)):
        images = {"source": f"coco_{part}_images.txt", "batch_size": 100, "new_height": 256, "new_width": 256}
        net.net.layer.add(
            name="data",
            type="ImageData",
            top=["data", "label"],
            include=include,
            transform_param=transform | {"mirror": mirror},
            image_data_param=images,
        )
        net.net.layer.add(
            name="sentences",
            type="HDF5Data",
            include=include,
            top=["cont_sentence", "input_sentence", "target_sentence"],
            hdf5_data_param={"source": f"coco_{part}_sentences.txt", "batch_size": 20},
        )
    net.net.layer.add(name="silence", type="Silence", bottom=["label"])


def _caffenet(net: Builder) -> str:
    """CaffeNet without its softmax; only fc8 learns."""
    x = "data"
    for item, outputs, kernel, fields in (
        (1, 96, 11, {"stride": 4}),
        (2, 256, 5, {"pad": 2, "group": 2}),
        (3, 384, 3, {"pad": 1}),
        (4, 384, 3, {"pad": 1, "group": 2}),
        (5, 256, 3, {"pad": 1, "group": 2}),
    ):
        x = net.relu(f"relu{item}", net.conv(f"conv{item}", x, outputs, kernel, param=FROZEN, **fields))
        if item not in (3, 4):
            x = net.pool(f"pool{item}", x, 3, stride=2)
        if item in (1, 2):
            x = net.norm(f"norm{item}", x)
    for item in ("6", "7"):
        x = net.relu(f"relu{item}", net.fc(f"fc{item}", x, 4096, param=FROZEN))
        x = net.drop(f"drop{item}", x)
    return net.fc("fc8", x, 1000, param=SLOW)

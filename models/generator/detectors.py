"""SSD-300 with VGG-16 and MobileNet-SSD, both for Pascal VOC's 20 classes, with the public files' names of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caffepy.formats.proto import caffe_pb2
from generator.builder import CAFFE_MEAN, TEST, TRAIN, Builder
from generator.classifiers import XAVIER, normalised_conv, vgg

CLASSES = 21
"""20 and the background."""
SIZE = 300
SAMPLER = {"min_scale": 0.3, "max_scale": 1.0, "min_aspect_ratio": 0.5, "max_aspect_ratio": 2.0}
CONSTRAINTS = (*({"min_jaccard_overlap": least} for least in (0.1, 0.3, 0.5, 0.7, 0.9)), {"max_jaccard_overlap": 1.0})
DISTORT = {
    "brightness_prob": 0.5,
    "brightness_delta": 32,
    "contrast_prob": 0.5,
    "contrast_lower": 0.5,
    "contrast_upper": 1.5,
    "hue_prob": 0.5,
    "hue_delta": 18,
    "saturation_prob": 0.5,
    "saturation_lower": 0.5,
    "saturation_upper": 1.5,
    "random_order_prob": 0,
}


@dataclass(frozen=True)
class Source:
    """Where one scale's boxes are predicted.

    Attributes:
        blob: of the features; layers are called after it.
        sizes: the smallest and, unless 0, the largest box in pixels.
        ratios: sides of boxes beside 1, both ways round.
        step: pixels of the image from one position to the next; 0 takes it from the sizes.
    """

    blob: str
    sizes: tuple[float, float]
    ratios: tuple[int, ...]
    step: int = 0

    @property
    def boxes(self) -> int:
        return 1 + bool(self.sizes[1]) + 2 * len(self.ratios)


def voc_data(net: Builder, batch: int, expand: float, **transform: Any) -> None:
    """VOC's two LMDBs of annotated images, the training images cut, distorted and put on larger canvases."""
    resize = {"prob": 1, "resize_mode": "WARP", "height": SIZE, "width": SIZE}
    modes = ["LINEAR", "AREA", "NEAREST", "CUBIC", "LANCZOS4"]
    samplers: list[dict[str, Any]] = [{"max_sample": 1, "max_trials": 1}]
    samplers += [
        {"sampler": SAMPLER, "sample_constraint": constraint, "max_sample": 1, "max_trials": 50}
        for constraint in CONSTRAINTS
    ]
    train = transform | {"mirror": True, "resize_param": [resize | {"interp_mode": modes}], "distort_param": DISTORT}
    train |= {"emit_constraint": {"emit_type": "CENTER"}, "expand_param": {"prob": 0.5, "max_expand_ratio": expand}}
    test = transform | {"resize_param": [resize | {"interp_mode": modes[:1]}]}
    net.data(
        _annotated(train, samplers, {"source": "voc0712_trainval_lmdb", "batch_size": batch, "backend": "LMDB"}),
        _annotated(test, [{}], {"source": "voc07_test_lmdb", "batch_size": 8, "backend": "LMDB"}),
        "AnnotatedData",
    )


def _annotated(transform: dict[str, Any], samplers: list[dict[str, Any]], data: dict[str, Any]) -> dict[str, Any]:
    annotated = {"batch_sampler": samplers, "label_map_file": "labelmap_voc.prototxt"}
    return {"transform_param": transform, "data_param": data, "annotated_data_param": annotated}


def heads(net: Builder, sources: tuple[Source, ...], kernel: int, classes: int = CLASSES) -> None:
    """Boxes, classes and priors of every scale, and all of them one after the other."""
    for source in sources:
        for kind, values in (("loc", 4), ("conf", classes)):
            pad = {"pad": kernel // 2} if kernel > 1 else {}
            name = f"{source.blob}_mbox_{kind}"
            x = net.conv(name, source.blob, source.boxes * values, kernel, **pad)
            x = net.layer("Permute", f"{name}_perm", x, permute_param={"order": [0, 2, 3, 1]})
            net.layer("Flatten", f"{name}_flat", x, flatten_param={"axis": 1})
        prior: dict[str, Any] = {"min_size": [source.sizes[0]], "aspect_ratio": source.ratios, "offset": 0.5}
        prior |= {"max_size": [source.sizes[1]]} if source.sizes[1] else {}
        prior |= {"step": source.step} if source.step else {}
        prior |= {"flip": True, "clip": False, "variance": [0.1, 0.1, 0.2, 0.2]}
        net.layer("PriorBox", f"{source.blob}_mbox_priorbox", [source.blob, "data"], prior_box_param=prior)
    for kind, axis in (("loc_flat", 1), ("conf_flat", 1), ("priorbox", 2)):
        names = [f"{source.blob}_mbox_{kind}" for source in sources]
        net.layer("Concat", f"mbox_{kind.removesuffix('_flat')}", names, concat_param={"axis": axis})


def detect(net: Builder, classes: int = CLASSES) -> caffe_pb2.NetParameter:
    """The loss in training; in tests the detections and how good they are."""
    multibox = {
        "loc_loss_type": "SMOOTH_L1",
        "conf_loss_type": "SOFTMAX",
        "loc_weight": 1,
        "num_classes": classes,
        "share_location": True,
        "match_type": "PER_PREDICTION",
        "overlap_threshold": 0.5,
        "use_prior_for_matching": True,
        "background_label_id": 0,
        "use_difficult_gt": True,
        "neg_pos_ratio": 3,
        "neg_overlap": 0.5,
        "code_type": "CENTER_SIZE",
        "ignore_cross_boundary_bbox": False,
        "mining_type": "MAX_NEGATIVE",
    }
    net.layer(
        "MultiBoxLoss",
        "mbox_loss",
        ["mbox_loc", "mbox_conf", "mbox_priorbox", "label"],
        include=TRAIN,
        propagate_down=[True, True, False, False],
        loss_param={"normalization": "VALID"},
        multibox_loss_param=multibox,
    )
    shape = {"shape": {"dim": [0, -1, classes]}}
    x = net.layer("Reshape", "mbox_conf_reshape", "mbox_conf", reshape_param=shape, include=TEST)
    x = net.layer("Softmax", "mbox_conf_softmax", x, softmax_param={"axis": 2}, include=TEST)
    x = net.layer("Flatten", "mbox_conf_flatten", x, flatten_param={"axis": 1}, include=TEST)
    _detections(net, x, classes)
    return net.net


def _detections(net: Builder, scores: str, classes: int) -> None:
    output = {
        "num_classes": classes,
        "share_location": True,
        "background_label_id": 0,
        "code_type": "CENTER_SIZE",
        "nms_param": {"nms_threshold": 0.45, "top_k": 400},
        "keep_top_k": 200,
        "confidence_threshold": 0.01,
    }
    evaluate = {
        "num_classes": classes,
        "background_label_id": 0,
        "overlap_threshold": 0.5,
        "evaluate_difficult_gt": False,
    }
    x = net.layer(
        "DetectionOutput",
        "detection_out",
        ["mbox_loc", scores, "mbox_priorbox"],
        include=TEST,
        detection_output_param=output,
    )
    net.layer("DetectionEvaluate", "detection_eval", [x, "label"], include=TEST, detection_evaluate_param=evaluate)


SSD300 = (
    Source("conv4_3_norm", (30, 60), (2,), 8),
    Source("fc7", (60, 111), (2, 3), 16),
    Source("conv6_2", (111, 162), (2, 3), 32),
    Source("conv7_2", (162, 213), (2, 3), 64),
    Source("conv8_2", (213, 264), (2,), 100),
    Source("conv9_2", (264, 315), (2,), 300),
)


def ssd300() -> caffe_pb2.NetParameter:
    """Liu et al., 2015: VGG-16 with a dilated fc6, four more scales, and a learned length for conv4_3's features."""
    net = Builder("VGG_VOC0712_SSD_300x300", XAVIER)
    voc_data(net, 32, 4, mean_value=CAFFE_MEAN)
    stages = vgg(net, (2, 2, 3, 3, 3))
    x = net.pool("pool5", stages["conv5"], 3, stride=1, pad=1)
    x = net.relu("relu6", net.conv("fc6", x, 1024, 3, pad=6, dilation=6))
    x = net.relu("relu7", net.conv("fc7", x, 1024, 1))
    for item, width, fields in (
        (6, 256, {"pad": 1, "stride": 2}),
        (7, 128, {"pad": 1, "stride": 2}),
        (8, 128, {}),
        (9, 128, {}),
    ):
        x = net.relu(f"conv{item}_1_relu", net.conv(f"conv{item}_1", x, width, 1))
        x = net.relu(f"conv{item}_2_relu", net.conv(f"conv{item}_2", x, 2 * width, 3, **fields))
    length = {"across_spatial": False, "scale_filler": {"type": "constant", "value": 20}, "channel_shared": False}
    net.layer("Normalize", "conv4_3_norm", stages["conv4"], norm_param=length)
    heads(net, SSD300, kernel=3)
    return detect(net)


MOBILENET = (
    (1, 64, 1),
    (2, 128, 2),
    (3, 128, 1),
    (4, 256, 2),
    (5, 256, 1),
    (6, 512, 2),
    (7, 512, 1),
    (8, 512, 1),
    (9, 512, 1),
    (10, 512, 1),
    (11, 512, 1),
    (12, 1024, 2),
    (13, 1024, 1),
)
"""Number, outputs and stride of the separable convolutions."""
MOBILENET_SSD = (
    Source("conv11", (60, 0), (2,)),
    Source("conv13", (105, 150), (2, 3)),
    Source("conv14_2", (150, 195), (2, 3)),
    Source("conv15_2", (195, 240), (2, 3)),
    Source("conv16_2", (240, 285), (2, 3)),
    Source("conv17_2", (285, 300), (2, 3)),
)


def mobilenet_ssd() -> caffe_pb2.NetParameter:
    """MobileNet in place of VGG; boxes are predicted by 1 x 1 convolutions from 19 x 19 positions down to one."""
    net = Builder("MobileNet-SSD", {"type": "msra"})
    voc_data(net, 24, 4, mean_value=(127.5, 127.5, 127.5), scale=0.007843)
    x, width = normalised_conv(net, "conv0", "conv0/relu", "data", (32, 3), pad=1, stride=2), 32
    for item, outputs, stride in MOBILENET:
        name = f"conv{item}/dw"
        fields = {"pad": 1, "group": width} | ({"stride": stride} if stride > 1 else {})
        x = normalised_conv(net, name, f"{name}/relu", x, (width, 3), **fields)
        x, width = normalised_conv(net, f"conv{item}", f"conv{item}/relu", x, (outputs, 1)), outputs
    for item, outputs in ((14, 512), (15, 256), (16, 256), (17, 128)):
        x = normalised_conv(net, f"conv{item}_1", f"conv{item}_1/relu", x, (outputs // 2, 1))
        x = normalised_conv(net, f"conv{item}_2", f"conv{item}_2/relu", x, (outputs, 3), pad=1, stride=2)
    heads(net, MOBILENET_SSD, kernel=1)
    return detect(net)

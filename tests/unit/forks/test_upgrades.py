"""Settings of forks that have another meaning or name here, in nets that are read."""

from __future__ import annotations

from google.protobuf import text_format

from caffepy.formats.proto.caffe_pb2 import NetParameter
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net


def upgraded(text: str) -> NetParameter:
    net = parse_text(text, NetParameter(), "of_a_fork.prototxt")
    upgrade_net(net, "of_a_fork.prototxt")
    return net


def net(text: str) -> NetParameter:
    return text_format.Parse(text, NetParameter())


def test_a_detection_output_of_yolo_2_becomes_a_layer_of_its_own() -> None:
    layer = 'layer {{ name: "out" type: "{}" {} {{ {} }} }}'
    for given, wanted in (
        ("classes: 9 nms_threshold: 0.4 biases: 1 biases: 2", "num_classes: 9 nms_threshold: 0.4 biases: 1 biases: 2"),
        ("num_classes: 9 coords: 4 num_box: 1 confidence_threshold: 0.2 side: 7 biases: 1 biases: 2",) * 2,
        ("biases: 1 biases: 2", "num_classes: 20 biases: 1 biases: 2"),
    ):
        found = upgraded(layer.format("DetectionOutput", "detection_output_param", given))
        new = ("YoloDetectionOutput", "yolo_detection_output_param", f"{wanted} centers: true")
        assert found == net(layer.format(*new))
        assert upgraded(text_format.MessageToString(found)) == found
    for given in ("biases: 1 biases: 2 keep_top_k: 3", "num_classes: 9 coords: 4"):
        kept = layer.format("DetectionOutput", "detection_output_param", given)
        assert upgraded(kept) == net(kept)


def test_crop_finds_its_offset_in_nets_of_crf_as_rnn() -> None:
    crf, offset = 'layer { type: "MultiStageMeanfield" }', "crop_param { offset: 2 }"
    assert upgraded(f'layer {{ type: "Crop" }} {crf}') == net(f'layer {{ type: "AutoCrop" }} {crf}')
    for kept in (f'layer {{ type: "Crop" {offset} }} {crf}', 'layer { type: "Crop" }'):
        assert upgraded(kept) == net(kept)


def test_both_sides_of_a_crop_have_the_names_of_ssd() -> None:
    layer = 'layer {{ type: "{}" transform_param {{ {} }} }}'
    given, wanted = "crop_height: 144 crop_width: 56", "crop_h: 144 crop_w: 56"
    for kind in ("Data", "ImageData"):
        assert upgraded(layer.format(kind, given)) == net(layer.format(kind, wanted))
    for kind, text in (("ImageSegData", given), ("Data", "crop_height: 144")):
        assert upgraded(layer.format(kind, text)) == net(layer.format(kind, text))


def test_reshape_with_a_pixelshuffler_is_a_pixel_shuffle() -> None:
    kept = 'layer { type: "Reshape" reshape_param { pixelshuffler: 1 } }'
    assert upgraded(kept) == net(kept)
    assert upgraded(kept.replace(": 1", ": 2")) == net(kept.replace(": 1", ": 2").replace("Reshape", "PixelShuffle"))

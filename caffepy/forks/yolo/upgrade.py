"""DetectionOutput of caffe-yolov2 and caffe_yolo_v2 in nets that are read."""

from __future__ import annotations

from caffepy.formats.proto.caffe_pb2 import NetParameter, YoloDetectionOutputParameter

_FIELDS = ("side", "num_classes", "num_box", "coords", "confidence_threshold", "nms_threshold", "biases")
"""Fields of caffe-yolov2's DetectionOutput, by their names in YoloDetectionOutput; `classes` is caffe_yolo_v2's."""


def upgrade(net: NetParameter) -> None:
    """Make a YoloDetectionOutput of each DetectionOutput that has the settings of caffe-yolov2 and no others."""
    for layer in net.layer:
        old, new = layer.detection_output_param, layer.yolo_detection_output_param
        given = {field.name: value for field, value in old.ListFields()}
        if layer.type != "DetectionOutput" or not old.biases or not given.keys() <= {*_FIELDS, "classes"}:
            continue
        given.setdefault("num_classes", given.pop("classes", old.classes))
        layer.ClearField("detection_output_param")
        layer.type = "YoloDetectionOutput"
        new.MergeFrom(YoloDetectionOutputParameter(centers=True, **given))

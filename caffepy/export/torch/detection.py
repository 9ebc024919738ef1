"""SSD's priors and output, as classes."""

from __future__ import annotations

from caffepy.export.torch.code import LayerCode, exports
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.prior_box import PriorBoxLayer
from caffepy.layers.export_rules import call, number, numbers


@exports("PriorBox", form="a class")
def prior_box(code: LayerCode) -> str:
    layer, param = code.layer, code.param.prior_box_param
    assert isinstance(layer, PriorBoxLayer)
    if param.denser_prior_boxes:
        raise code.refuse("denser_prior_boxes")
    settings = {
        "max_sizes": tuple(map(int, param.max_size)) or None,
        "ratios": numbers([float(ratio) for ratio in layer.ratios]) if layer.ratios else None,
        "step": numbers(layer.step_size) if layer.step_size else None,
        "image": numbers(layer.image_size) if layer.image_size else None,
        "offset": None if param.offset == 0.5 else number(param.offset),
        "clip": True if param.clip else None,
        "variances": numbers(layer.variances),
    }
    return code.apply(call("PriorBox", tuple(map(int, param.min_size)), **settings), *code.inputs)


@exports("DetectionOutput", form="a class")
def detection_output(code: LayerCode) -> str:
    param = code.param.detection_output_param
    if param.HasField("use_polygon"):
        raise code.refuse("use_polygon")
    nms = param.nms_param
    code_type = caffe_pb2.PriorBoxParameter.CodeType.Name(param.code_type)
    settings = {
        "background": param.background_label_id or None,
        "threshold": number(nms.nms_threshold),
        "top_k": nms.top_k if nms.HasField("top_k") else None,
        "keep_top_k": None if param.keep_top_k < 0 else param.keep_top_k,
        "min_score": number(param.confidence_threshold) if param.HasField("confidence_threshold") else None,
        "eta": None if nms.eta == 1 else number(nms.eta),
        "code": None if code_type == "CENTER_SIZE" else f'"{code_type}"',
        "share_location": None if param.share_location else False,
        "variance_encoded": True if param.variance_encoded_in_target else None,
    }
    return code.apply(call("DetectionOutput", param.num_classes, **settings), *code.inputs[:3])

"""Each field of the schema that acts changes something, each refused field is named, and no other field is ignored."""

from __future__ import annotations

import functools
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from field_cases import (
    BOX_LOSS,
    BOXES,
    CLIP,
    CONV,
    CONV3D,
    DENSE,
    IMAGE,
    OUTPUT,
    OUTPUT_BOTTOMS,
    POOL,
    REGION,
    REGION_BOTTOMS,
    YOLO3,
    YOLO_OUTPUT,
    Case,
    changes,
    observe,
)
from google.protobuf.descriptor import Descriptor
from training import build_net

from caffepy.errors import ConfigError
from caffepy.formats.fields import NO_MEANING, REFUSED
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net
from caffepy.layers import layer_class

TESTS = Path(__file__).parents[2]
WIRE = TESTS / "golden" / "wire.json"
PROOFS = dict(re.findall(r"(?m)^([\w.]+): (.+)$", Path(__file__).with_name("field_proofs.txt").read_text()))
"""By field the test, under tests/, that gives it a value; cases of `field_cases` prove the others."""
AS_A_WHOLE = ("SolverState", "DataPosition", "SnapshotScore")
"""Messages that their tests write and read as a whole, without naming each field."""
ANNOTATION = r"(?:int|str|bool|float|Path|Any|list|dict|tuple|Floats|np|None|caffe_pb2|Net|Solver)\b|$"
"""What stands behind a colon where it is Python that names a type, not a prototxt."""
CHANGES = list(changes())


def messages(holder: Descriptor | None = None, prefix: str = "") -> Iterator[tuple[str, Descriptor]]:
    inner = caffe_pb2.DESCRIPTOR.message_types_by_name.values() if holder is None else holder.nested_types
    for message in inner:
        yield prefix + message.name, message
        yield from messages(message, f"{prefix}{message.name}.")


FIELDS = [f"{name}.{field.name}" for name, message in messages() for field in message.fields]
ACTING = [field for field in FIELDS if field not in REFUSED and field not in NO_MEANING]


def test_lists_name_fields_of_the_schema_once():
    assert {*REFUSED, *NO_MEANING, *PROOFS} <= set(FIELDS)
    assert not set(REFUSED) & set(NO_MEANING)
    assert set(PROOFS) <= set(ACTING)


def test_the_schema_has_every_field_of_both_caffes():
    wire = json.loads(WIRE.read_text())
    for caffe in wire.values():
        for message, fields in caffe["messages"].items():
            assert {f"{message}.{field}" for field in fields} <= set(FIELDS)


@functools.cache
def before(one: Case) -> dict[str, object]:
    found = observe(one)
    assert "error" not in found or "h: no such file" in str(found["error"]), found
    return found


@pytest.mark.parametrize("field, one, change", CHANGES, ids=[f"{c[0]}-{c[2].strip()[:24]}" for c in CHANGES])
def test_field_acts(field: str, one: Case, change: str):
    assert field in ACTING
    alike = observe(one, change) == before(one)
    assert not alike


def gives_a_value(name: str, text: str) -> bool:
    """Whether a test's text sets a field: in a prototxt, as an argument, by assignment, or by its name as a string."""
    ways = (
        rf"(?<![\w.]){name}:?\s*{{",
        rf"(?<![\w.(,]){name}\s*:\s*(?!{ANNOTATION})\S",
        rf"\b{name}=",
        rf"\.{name}\s*(?:[-+*/]?=[^=]|,|\.(?:add|append|extend|CopyFrom|MergeFrom)\b)",
        rf"\.{name}(?:\[[^]]*\]|(?:\.\w+)+)\s*=[^=]",
        rf"[\"']{name}[\"']",
    )
    return any(re.search(way, text, re.MULTILINE) for way in ways)


PROVEN = {field for field, _, _ in CHANGES}


@pytest.mark.parametrize("field", ACTING)
def test_acting_field_has_a_proof(field: str):
    """Cases of `field_cases`, tests that exist and give the field a value, or, for a message, proofs of its fields."""
    message, _, name = field.rpartition(".")
    if field in PROVEN:
        return
    proof = PROOFS.get(field)
    if proof is None:
        inner = dict(messages())[message].fields_by_name[name].message_type
        assert inner is not None, f"{field} has no proof"
        own = inner.full_name.partition(".")[2]
        assert any(key.startswith(f"{own}.") and (key in PROVEN or key in PROOFS) for key in ACTING), field
        return
    path = TESTS / proof
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    text = "".join(file.read_text() for file in files if file.exists())
    assert text and (message in AS_A_WHOLE or gives_a_value(name, text)), f"{proof} gives {field} no value"


def test_what_gives_a_field_a_value():
    for text in ("size: 3", "size { dim: 1 }", "f(size=3)", "param.size = 3", "param.size.add()", "param.size.x = 3"):
        assert gives_a_value("size", text), text
    for text in ("the size", "x.size == 3", "def f(size: int)", "for size in sizes", "len(net.size)", "    size: int"):
        assert not gives_a_value("size", text), text


# -- fields whose proof is here --------------------------------------------------------------------------


def test_windows_of_the_oldest_format_keep_their_settings():
    text = "det_fg_threshold: 0.6 det_bg_threshold: 0.3 det_fg_fraction: 0.4 det_context_pad: 5 det_crop_mode: 'square'"
    net = caffe_pb2.NetParameter()
    parse_text(f"layers {{ layer {{ name: 'w' type: 'window_data' {text} }} top: 'x' }}", net, "old.prototxt")
    upgrade_net(net, "old.prototxt")
    found = net.layer[0].window_data_param
    assert [found.fg_threshold, found.bg_threshold, found.fg_fraction] == pytest.approx([0.6, 0.3, 0.4])
    assert (found.context_pad, found.crop_mode) == (5, "square")


def test_image_lists_are_resized_and_turned_gray(tmp_path: Path):
    cv2.imwrite(str(tmp_path / "a.png"), np.full((4, 6, 3), 9, np.uint8))
    (tmp_path / "list").write_text(f"{tmp_path}/a.png 0\n")
    start = f"source: '{tmp_path}/list' "
    for more, shape in (
        ("", (1, 3, 4, 6)),
        ("new_height: 5 new_width: 7", (1, 3, 5, 7)),
        ("is_color: false", (1, 1, 4, 6)),
    ):
        net = build_net(
            f'layer {{ name: "d" type: "ImageData" top: "x" top: "y" image_data_param {{ {start}{more} }} }}'
        )
        assert net.blobs["x"].shape == shape
        net.close()


# -- what does not act -----------------------------------------------------------------------------------

VISUALIZE = f'type: "DetectionOutput" detection_output_param {{ {OUTPUT} }}'
REFUSED_CASES = (
    Case(VISUALIZE, OUTPUT_BOTTOMS, "detection_output_param", "visualize: true"),
    Case('type: "Split"', "2x3", "", "trt_param { deploy: 'd' model: 'm' }"),
    Case('type: "Split"', "2x3", "transform_param", "display: true"),
    Case('type: "Split"', "2x3", "transform_param", "pad: 3"),
    Case('type: "Split"', "2x3", "", "dense_crf_param { max_iter: 3 }"),
    Case('type: "Split"', "2x3", "trt_param", "trt_mode: FP16 deploy: 'd' model: 'm'"),
    Case('type: "Split"', "2x3", "region_loss_param", "softmax_tree: 'tree'"),
    Case('type: "Split"', "2x3", "focal_loss_param", "type: LINEAR"),
    Case('type: "Split"', "2x3", "annotated_data_param", "difficult_label_warmup: true"),
    Case('type: "Split"', "2x3", "image_data_param", "show_data: 1"),
    Case('type: "Split"', "2x3", "video_data_param", "show_data: true"),
    Case('type: "Split"', "2x3", "cpm_transform_param", "visualize: true | crop_size: 9"),
    Case('type: "Split"', "2x3", "lstm_debug_param", "expose: 'c_t=1'"),
    Case('type: "Split"', "2x3", "op_transform_param", "add_distance: true | center_swap_prob: 0.5"),
)


def test_refused_fields_are_refused_with_their_sentences():
    seen = {field for field, _, _ in changes(REFUSED_CASES)} | {
        f for f in REFUSED if f.startswith(("TRTParameter.", "DenseCRFParameter."))
    }
    assert seen == set(REFUSED)
    for field, one, change in changes(REFUSED_CASES):
        assert "error" not in observe(one)
        error = str(observe(one, change)["error"])
        assert error.startswith("layer 'L' (") and error.endswith(f"is refused: {REFUSED[field]}")


def test_a_refused_fields_default_is_accepted():
    one = Case(VISUALIZE, OUTPUT_BOTTOMS, "detection_output_param", "visualize: false")
    assert observe(one, one.changes) == observe(one)


MEANINGLESS = (
    Case(
        f'type: "Convolution" convolution_param {{ {CONV} }}',
        IMAGE,
        "convolution_param",
        "engine: CUDNN | force_nd_im2col: true | cudnn_convolution_algo_seeker: GET | conv_algos_override: '1,1,1'",
    ),
    Case(f'type: "Pooling" pooling_param {{ {POOL} }}', IMAGE, "pooling_param", "engine: CAFFE | torch_pooling: true"),
    *(
        Case(f'type: "{kind}"', IMAGE, f"{kind.lower()}_param", "engine: CAFFE")
        for kind in ("LRN", "Dropout", "ReLU", "Sigmoid", "TanH", "Softmax")
    ),
    Case('type: "BN"', IMAGE, "bn_param", "engine: CAFFE"),
    Case('type: "Concat"', IMAGE, "concat_param", "engine: MKLDNN"),
    Case('type: "Eltwise"', IMAGE, "eltwise_param", "engine: MKLDNN"),
    Case('type: "InnerProduct" inner_product_param { num_output: 2 }', IMAGE, "inner_product_param", "engine: MKLDNN"),
    Case('type: "ReLU"', IMAGE, "", "engine: 'MKLDNN' | quantization_param { bw_params: 8 scale_in: 3 }"),
    Case(
        f'type: "Convolution" convolution_param {{ {CONV} }}', IMAGE, "convolution_param", "conv_algorithm: 'winograd'"
    ),
    Case('type: "BatchNorm"', IMAGE, "batch_norm_param", "engine: CAFFE"),
    Case(f'type: "Convolution3D" convolution_param {{ {CONV3D} }}', CLIP, "convolution_param", "filter_group: 2"),
    Case(
        f'type: "Convolution3D" convolution3d_param {{ {CONV3D} }}',
        CLIP,
        "convolution3d_param",
        "filter_group: 2 | group: 2",
    ),
    Case('type: "SPP" spp_param { pyramid_height: 2 }', IMAGE, "spp_param", "engine: CAFFE"),
    Case(
        'type: "ReLU"',
        IMAGE,
        "",
        "phase: TEST | debug: true | forward_math: FLOAT16 | backward_math: FLOAT16 |cudnn_math_override: 1",
    ),
    Case(
        f'type: "MultiBoxLoss" multibox_loss_param {{ {BOX_LOSS} }}',
        BOXES,
        "multibox_loss_param",
        "ignore_difficult_gt: true",
    ),
    Case(VISUALIZE, OUTPUT_BOTTOMS, "detection_output_param", "visualize_threshold: 0.9 | save_file: 'film'"),
    Case(
        f'type: "RegionLoss" region_loss_param {{ {REGION} }}',
        REGION_BOTTOMS,
        "region_loss_param",
        "side: 2 | softmax: 0 | jitter: 0.5 | absolute: 0 | random: 0",
    ),
    Case(f'type: "Yolov3" yolov3_param {{ {YOLO3} }}', REGION_BOTTOMS, "yolov3_param", "side: 2 | noobject_scale: 3"),
    Case(
        f'type: "YoloDetectionOutput" yolo_detection_output_param {{ {YOLO_OUTPUT} }}',
        "1x14x4x4",
        "yolo_detection_output_param",
        "side: 2 | label_map_file: 'none'",
    ),
    Case(
        'type: "YoloSeg"',
        "2x3x4x4 2x3x4x4",
        "yolo_seg_param",
        "num_class: 7 | class_scale: 3 | use_logic_gradient: true | use_hardsigmoid: true",
    ),
    Case('type: "SegmentationEvaluate"', "2x3x4x4 2x3x4x4", "segmentation_evaluate_param", "num_classes: 9"),
    Case('type: "FocalLoss"', "4x3 4L3", "focal_loss_param", "beta: 3"),
    Case('type: "LabelSpecificAdd"', "4x3 4L3", "label_specific_add_param", "transform_test: true"),
    Case(
        'type: "InnerDistance" inner_distance_param { num_output: 3 weight_filler { type: "xavier" } }',
        IMAGE,
        "inner_distance_param",
        "bias_term: false | bias_filler { type: 'gaussian' } | transpose: true",
    ),
    Case('type: "ChannelScale"', IMAGE + " 2x1x6x6", "channel_scale_param", "init_global_scale: 3"),
    Case('type: "GeneralContrastiveLoss"', "4x3 4L3", "general_contrastive_loss_param", "square: true"),
    Case(
        f'type: "DenseBlock" denseblock_param {{ {DENSE} }}',
        IMAGE,
        "denseblock_param",
        "initChannel: 3 | pad_h: 2 | pad_w: 2 | conv_verticalStride: 2 | conv_horizentalStride: 2 | filter_H: 5 | "
        "filter_W: 5 | gpuIdx: 1 | BC_ultra_space_efficient: true | workspace_MB: 1",
    ),
)


@pytest.mark.parametrize("field, one, change", list(changes(MEANINGLESS)), ids=lambda value: str(value)[:40])
def test_fields_without_meaning_change_nothing(field: str, one: Case, change: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CAFFEPY_DIALECT", "bvlc")
    assert field in NO_MEANING
    same = observe(one, change) == observe(one)
    assert same


@pytest.mark.parametrize("name", ["TRT", "trt", "DenseCRF", "WindowSegData"])
def test_a_type_that_only_a_caffe_has_is_called_that(name: str):
    lacks = "that caffepy does not have"
    wanted = {
        "TRT": f"layer 'a': TRT is a layer of NVIDIA Caffe {lacks}: it runs a net with TensorRT",
        "DenseCRF": f"layer 'a': DenseCRF is a layer of DeepLab and PSPNet {lacks}: remove it",
        "WindowSegData": f"layer 'a': WindowSegData is a layer of DeconvNet {lacks}: cut the windows out",
    }
    with pytest.raises(ConfigError, match=wanted.get(name, "layer 'a': unknown layer type 'trt'")):
        layer_class(name, "layer 'a'")


@pytest.mark.parametrize(
    "page", ["reference/fields.md", "reference/layers.md", "reference/options.md", "how-to/onnx.md"]
)
def test_pages_are_up_to_date(page: str):
    docs = TESTS.parent / "docs"
    made = runpy.run_path(str(docs / "generate.py"))["PAGES"][page]()
    assert (docs / page).read_text() == made, "run python docs/generate.py"
    assert max(len(line) for line in made.splitlines() if not line.startswith("|")) <= 120

"""PriorBox: its boxes, what it refuses, and that it computes them once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, assert_near, backend_named

from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net


def build(text: str, backend: Any, map_size: tuple[int, int] = (3, 2), image: tuple[int, int] = (30, 44)) -> Net:
    features, pixels = (f"dim: 2 dim: 4 dim: {height} dim: {width}" for height, width in (map_size, image))
    text = f"""
    layer {{ name: "f" type: "Input" top: "f" input_param {{ shape {{ {features} }} }} }}
    layer {{ name: "i" type: "Input" top: "i" input_param {{ shape {{ {pixels} }} }} }}
    layer {{ name: "L" type: "PriorBox" bottom: "f" bottom: "i" top: "y" prior_box_param {{ {text} }} }}
    """
    return Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend))


def plain_boxes(param: Any, map_size: tuple[int, int], image: tuple[int, int]) -> list[list[float]]:
    """Box by box, as the definition says."""
    height, width = (param.img_h, param.img_w) if param.img_h else ((param.img_size,) * 2 if param.img_size else image)
    step_y = param.step_h or param.step or height / map_size[0]
    step_x = param.step_w or param.step or width / map_size[1]
    ratios: list[float] = []
    for ratio in param.aspect_ratio:
        if all(abs(ratio - other) > 1e-6 for other in [1, *ratios]):
            ratios += [ratio, 1 / ratio] if param.flip else [ratio]
    boxes = []
    for y in range(map_size[0]):
        for x in range(map_size[1]):
            for k, size in enumerate(map(int, param.min_size)):
                sides = [(size, size)]
                if param.max_size:
                    sides.append((math.sqrt(size * int(param.max_size[k])),) * 2)
                sides += [(size * math.sqrt(r), size / math.sqrt(r)) for r in ratios]
                cx, cy = (x + param.offset) * step_x, (y + param.offset) * step_y
                for w, h in sides:
                    box = [(cx - w / 2) / width, (cy - h / 2) / height, (cx + w / 2) / width, (cy + h / 2) / height]
                    boxes.append([min(max(v, 0), 1) for v in box] if param.clip else box)
                    if param.denser_prior_boxes:
                        low = (y + 1) * step_y
                        box = [box[0], (low - h / 2) / height, box[2], (low + h / 2) / height]
                        boxes.append([min(max(v, 0), 1) for v in box] if param.clip else box)
    return boxes


SIZES = st.sampled_from(
    ["", "img_size: 50", "img_h: 20 img_w: 60", "step: 7", "step_h: 5 step_w: 9", "img_size: 50 step: 7.5"]
)
BOXES = st.sampled_from(
    ["min_size: 10", "min_size: 6.9 min_size: 12", "min_size: 6 max_size: 9.7 min_size: 9 max_size: 20"]
)
RATIOS = st.sampled_from(
    ["", "aspect_ratio: 2", "aspect_ratio: 2 aspect_ratio: 3 aspect_ratio: 0.5", "aspect_ratio: 1"]
)
MORE = st.sampled_from(["", "flip: false", "clip: true", "offset: 0.25", "variance: 0.3", "denser_prior_boxes: true"])


@pytest.mark.parametrize("backend", BACKENDS)
@given(SIZES, BOXES, RATIOS, MORE)
@settings(max_examples=30, derandomize=True)
def test_boxes_against_a_plain_computation(backend: str, sizes: str, boxes: str, ratios: str, more: str) -> None:
    text = " ".join([sizes, boxes, ratios, more])
    param = text_format.Parse(text, caffe_pb2.PriorBoxParameter())
    device = backend_named(backend)
    with device.activate():
        net = build(text, device)
        net.forward()
        found = net.blobs["y"].host_data()
    wanted = np.array(plain_boxes(param, (3, 2), (30, 44))).ravel()
    assert_near(found[0, 0], wanted, 1e-6, "boxes")
    assert_near(found[0, 1], np.full(len(wanted), param.variance[0] if param.variance else 0.1), 1e-6, "variances")


def test_variances_of_their_own() -> None:
    net = build("min_size: 4 variance: 0.1 variance: 0.2 variance: 0.3 variance: 0.4", backend_named("cpu"))
    net.forward()
    np.testing.assert_allclose(net.blobs["y"].host_data()[0, 1, :8], np.tile([0.1, 0.2, 0.3, 0.4], 2), rtol=1e-6)


def test_boxes_are_computed_when_shapes_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, calls = build("min_size: 4", backend_named("cpu")), []
    layer = net.nodes[-1].layer
    plain = layer.reshape
    monkeypatch.setattr(layer, "reshape", lambda *blobs: (calls.append(1), plain(*blobs)))
    for _ in range(3):
        net.forward()
    assert not calls
    net.blobs["f"].reshape((2, 4, 5, 5))
    net.forward()
    assert len(calls) == 1
    assert net.blobs["y"].shape == (1, 2, 100)


def test_the_meta_device_knows_the_shape() -> None:
    net = build("min_size: 4 max_size: 6 aspect_ratio: 2", MetaBackend())
    net.forward()
    assert net.blobs["y"].shape == (1, 2, 3 * 2 * 4 * 4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "min_size is needed"),
        ("min_size: 0", "min_size is needed, in pixels, and must be at least 1"),
        ("min_size: 3 max_size: 3", "max_size 3 must be above its min_size 3"),
        ("min_size: 3 min_size: 4 max_size: 5", "has 1 max_size for 2 min_size"),
        ("min_size: 3 aspect_ratio: -1", "aspect_ratio must be above 0"),
        ("min_size: 3 variance: 0.1 variance: 0.2", "variance must be given once or four times"),
        ("min_size: 3 variance: 0", "variance must be given once or four times, and be above 0"),
        ("min_size: 3 img_size: 4 img_h: 4", "has img_size and img_h; keep img_size, or img_h and img_w"),
        ("min_size: 3 img_h: 4", "img_h and img_w must be given and be above 0"),
        ("min_size: 3 step: 4 step_w: 4", "has step and step_w; keep step, or step_h and step_w"),
        ("min_size: 3 step: 0", "step must be given and be above 0"),
    ],
)
def test_settings_that_do_not_hold_together(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer 'L' \(PriorBox\): {error}"):
        build(text, backend_named("cpu"))

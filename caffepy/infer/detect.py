"""Object detection in images with an SSD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.data.images import encode, opencv
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import decode_text, parse_text
from caffepy.infer.classify import ImageModel
from caffepy.infer.images import Floats, Steps
from caffepy.utils.files import atomic_write, read_data

_COLUMNS = 7
_MAX_BYTES = 1 << 24
_COLOURS = ((48, 48, 255), (48, 160, 48), (255, 96, 48), (0, 160, 255), (200, 48, 200), (160, 160, 0))
"""Blue, green, red."""


@dataclass(frozen=True)
class Box:
    """A detected object.

    Args:
        image: the image's name.
        label: class index.
        score: from 0 to 1.
        xmin: left edge in pixels of the image, like the other edges.
        ymin: upper edge.
        xmax: right edge.
        ymax: lower edge.
        name: class name from a label map, or "".
    """

    image: str
    label: int
    score: float
    xmin: float
    ymin: float
    xmax: float
    ymax: float
    name: str = ""


def detect(
    model: ImageModel,
    name: str,
    pixels: Floats,
    steps: Steps,
    least: float = 0.5,
    names: Mapping[int, str] | None = None,
) -> list[Box]:
    """Return the boxes in an image, highest scores first.

    Args:
        model: a net that ends in DetectionOutput.
        name: the image's name.
        pixels: the image as `steps` loads it.
        steps: from an image to the net's input.
        least: lowest score.
        names: names by label.

    Raises:
        ConfigError: the net has no DetectionOutput.
    """
    if all(layer.type != "DetectionOutput" for layer in model.model.net.layers):
        raise ConfigError("the net has no DetectionOutput layer; 'caffepy detect' needs the deploy net of an SSD")
    rows = model.run(steps.values(pixels)).reshape(-1, _COLUMNS)
    scale = np.array([pixels.shape[1], pixels.shape[0]] * 2, np.float32)
    boxes = []
    for _, label, score, *edges in rows[(rows[:, 1] >= 0) & (rows[:, 2] >= least)].tolist():
        # Clipped first: an edge of a net that was hardly trained may be too large for the product.
        left, top, right, bottom = (np.clip(np.array(edges, np.float32), 0, 1) * scale).tolist()
        boxes.append(Box(name, int(label), score, left, top, right, bottom, (names or {}).get(int(label), "")))
    return sorted(boxes, key=lambda box: -box.score)


def read_label_names(path: Path) -> dict[int, str]:
    """Return the names by label of a LabelMap prototxt.

    Raises:
        DataError: the file cannot be read.
        ConfigError: the file is not a LabelMap.
    """
    text = decode_text(read_data(path, _MAX_BYTES, f"label map '{path}'"), str(path))
    labels = parse_text(text, caffe_pb2.LabelMap(), str(path))
    return {item.label: item.display_name or item.name for item in labels.item}


def draw_boxes(image: Floats, boxes: Sequence[Box], path: Path) -> None:
    """Write an image (H, W, C) with boxes and their labels drawn on it, as JPEG or PNG by the file's suffix.

    Raises:
        ConfigError: the suffix is not supported.
        RunError: the file cannot be written.
    """
    cv2 = opencv()
    pixels = np.ascontiguousarray((np.clip(image, 0, 1) * 255).round().astype(np.uint8)[:, :, ::-1])
    canvas = np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy()
    thickness = max(1, round(min(canvas.shape[:2]) / 200))
    for box in reversed(boxes):
        _draw_box(cv2, canvas, box, thickness)
    try:
        content = encode(canvas, path.suffix or ".png")
    except DataError as error:
        raise ConfigError(f"'{path}': the suffix must be .png or .jpg") from error
    with atomic_write(path) as file:
        file.write(content)


def _draw_box(cv2: Any, canvas: Any, box: Box, thickness: int) -> None:
    """Draw a frame, and a bar with label and score above it, moved below or left if it does not fit."""
    colour = _COLOURS[box.label % len(_COLOURS)]
    left, top, right, bottom = (round(edge) for edge in (box.xmin, box.ymin, box.xmax, box.ymax))
    cv2.rectangle(canvas, (left, top), (right, bottom), colour, thickness)
    text = f"{box.name or box.label} {box.score:.2f}".encode("ascii", "replace").decode()
    scale = 0.4 + 0.1 * thickness
    (wide, tall), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, 1)
    left = max(0, min(left, canvas.shape[1] - wide))
    base = top - below if top > tall + below else top + tall + below
    cv2.rectangle(canvas, (left, base - tall - below), (left + wide, base + below), colour, -1)
    cv2.putText(canvas, text, (left, base), cv2.FONT_HERSHEY_SIMPLEX, scale, (255, 255, 255), 1, cv2.LINE_AA)

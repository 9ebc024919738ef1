"""The files of DetectionOutput's `save_output_param`: detections in the formats of VOC, COCO and ILSVRC."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from caffepy.config.text import decode_text, parse_text
from caffepy.files import atomic_write, read_regular
from caffepy.layers.core.base import Layer
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.host import warn
from caffepy.layers.detection.pixels import ImageSize, check_resize, read_image_sizes, to_pixels
from caffepy.proto import caffe_pb2

FORMATS = ("VOC", "COCO", "ILSVRC")
_MAX_BYTES = 1 << 24
"""Of a label map file."""
_MAX_DIGITS = 300
"""Of a number; a longer one has no value as a double."""
_Found = tuple[ImageSize, int, float, list[float]]
"""Image, label, score, and the box as left edge, top edge, width and height."""


def read_label_map(layer: Layer, name: str) -> dict[int, str]:
    """The names of the classes in a label map file.

    Raises:
        DataError: it cannot be read, or names a class twice.
        ConfigError: it is no label map.
    """
    path = layer.context.resolve(name)
    label_map = caffe_pb2.LabelMap()
    try:
        text = decode_text(read_regular(path, _MAX_BYTES), f"label_map_file {path}")
    except OSError as error:
        raise layer.data_error(f"label_map_file {path} cannot be read: {error.strerror}") from error
    parse_text(text, label_map, f"label_map_file {path}")
    names: dict[int, str] = {}
    for item in label_map.item:
        if item.label in names or item.name in names.values():
            raise layer.data_error(f"label_map_file {path} has the label {item.label} or the name '{item.name}' twice")
        names[item.label] = item.name
    return names


def _number(word: str) -> int | float | str:
    """The number that a word is, for JSON; else, and where no double has its value, the word."""
    if len(word) > _MAX_DIGITS:
        return word
    if word.lstrip("-").isdecimal() and word.count("-") <= word.startswith("-"):
        return int(word)
    whole, dot, part = word.partition(".")
    return float(word) if dot and part.isdecimal() and whole.lstrip("-").isdecimal() else word


class ResultFiles:
    """Collects the detections of `num_test_image` images and then writes them; begins anew with the next image.

    An image's name and size come from the lines of name_size_file, in order.

    Args:
        layer: the layer whose `save_output_param` says where and how.

    Raises:
        ConfigError: the settings do not hold together.
        DataError: a file that they name cannot be read.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        param = layer.param.detection_output_param
        self._param = param.save_output_param
        self._names = read_label_map(layer, self._param.label_map_file)
        self._images = read_image_sizes(layer, self._param.name_size_file)
        self._check(param)
        self._resize = self._param.resize_param if self._param.HasField("resize_param") else None
        given = self._param.HasField("num_test_image")
        self._count = self._param.num_test_image if given else len(self._images)
        if not 0 < self._count <= len(self._images):
            raise layer.error(
                f"num_test_image is {self._count}, but name_size_file has {len(self._images)} images; correct one"
            )
        self._folder = Path(self._param.output_directory)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._next, self._missing, self._begun = 0, 0, False
        self._found: list[_Found] = []

    def _check(self, param: caffe_pb2.DetectionOutputParameter) -> None:
        if self._param.output_format not in FORMATS:
            raise self._layer.error(
                f"output_format is '{self._param.output_format}'; it must be one of {', '.join(FORMATS)}"
            )
        if self._param.HasField("resize_param"):
            check_resize(self._layer, self._param.resize_param)
        self._classes = [c for c in range(param.num_classes) if c != param.background_label_id]
        missing = [c for c in self._classes if c not in self._names]
        if missing:
            raise self._layer.data_error(f"label_map_file {self._param.label_map_file} has no label {missing[0]}")
        for name in (self._names[c] for c in self._classes):
            if "/" in name or "\0" in name:
                raise self._layer.data_error(f"label_map_file: the name '{name}' cannot be part of a file's name")

    def begin(self, first_sample: int) -> None:
        """Let the first pass, of a resumed run perhaps, begin with the name of its first image; later passes go on.

        Args:
            first_sample: the pass's first, among all that are tested.
        """
        if not self._begun:
            self._next = self._missing = first_sample % self._count
        self._begun = True

    def add(self, rows: Rows) -> None:
        """Take the detections (K, 7) of the next image; writes the files if it is the last."""
        image = self._images[self._next]
        boxes = to_pixels(rows[:, 3:], image, self._resize)[0].astype(np.float64)
        boxes[:, 2:] = np.float32(boxes[:, 2:]) - np.float32(boxes[:, :2])
        rounded = np.copysign(np.floor(np.abs(boxes * 100) + 0.5), boxes) / 100
        for row, box in zip(rows, rounded, strict=True):
            self._found.append((image, int(row[1]), float(row[2]), [float(v) for v in box]))
        self._next += 1
        if self._next == self._count:
            self._write()
            if self._missing:
                warn(
                    self._layer,
                    f"the result files lack {self._missing} images that were tested before the run was resumed",
                )
            self._next = self._missing = 0
            self._found.clear()

    def _write(self) -> None:
        prefix = self._param.output_name_prefix
        if self._param.output_format == "COCO":
            self._write_text(f"{prefix}.json", json.dumps(list(map(self._as_json, self._found)), indent=4) + "\n")
        elif self._param.output_format == "ILSVRC":
            lines = [f"{image.name} {label} {_line(score, box)}" for image, label, score, box in self._found]
            self._write_text(f"{prefix}.txt", "".join(lines))
        else:
            for label in self._classes:
                lines = [f"{image.name} {_line(score, box)}" for image, own, score, box in self._found if own == label]
                self._write_text(f"{prefix}{self._names[label]}.txt", "".join(lines))

    def _as_json(self, found: _Found) -> dict[str, object]:
        image, label, score, box = found
        return {
            "image_id": _number(image.name),
            "category_id": _number(self._names[label]),
            "bbox": box,
            "score": float(f"{score:.9g}"),
        }

    def _write_text(self, name: str, text: str) -> None:
        with atomic_write(self._folder / name) as file:
            file.write(text.encode())


def _line(score: float, box: list[float]) -> str:
    """Score and whole pixels: xmin, ymin, xmax, ymax."""
    left, top, width, height = (int(value) for value in box)
    return f"{score:.6g} {left} {top} {left + width} {top + height}\n"

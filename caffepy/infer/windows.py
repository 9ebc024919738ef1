"""Classification of image windows, as in R-CNN (pycaffe's `detector.py` and `detect.py`).

Rich feature hierarchies for accurate object detection and semantic segmentation, arXiv:1311.2524.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import DataError, spreadsheet_text
from caffepy.infer.classify import ImageModel
from caffepy.infer.images import INPUT, ArrayError, Floats, ImageOptions, Transformer, load_image, resize_image
from caffepy.utils.files import atomic_write, read_data

EDGES = ("ymin", "xmin", "ymax", "xmax")
"""A window's edges in order; the last row and column are exclusive."""
_MAX_BYTES = 1 << 28
_MAX_COORDINATE = 2**31 - 1
"""The largest coordinate in pixels."""
_BATCH = 16
"""Windows per batch."""


@dataclass(frozen=True)
class Window:
    """A window of an image.

    Args:
        filename: the image's file.
        edges: the values of `EDGES` in pixels.
    """

    filename: str
    edges: tuple[int, ...]


def read_windows(path: Path) -> list[Window]:
    """Return the windows of a CSV file with the columns filename, xmin, ymin, xmax and ymax in any order.

    Raises:
        DataError: the file cannot be read, a column is missing, or a value is not a number.
    """
    text = read_data(path, _MAX_BYTES, f"windows '{path}'").decode("utf-8-sig", "surrogateescape")
    rows = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        missing = [name for name in ("filename", *EDGES) if name not in (rows.fieldnames or ())]
        if missing:
            raise DataError(
                f"windows '{path}' have no column {', '.join(missing)}; the first line must be "
                "filename,xmin,ymin,xmax,ymax"
            )
        windows = [_window(row, f"windows '{path}', line {rows.line_num}") for row in rows]
    except csv.Error as error:
        raise DataError(f"windows '{path}', line {rows.line_num}: {error}; write the file as CSV") from error
    if not windows:
        raise DataError(f"windows '{path}' has no line after its header; add a line for each window")
    return windows


def _window(row: dict[str, str | None], where: str) -> Window:
    try:
        numbers = [float(row[name] or "") for name in EDGES]
        edges = tuple(int(number) for number in numbers)
        if max(map(abs, edges)) > _MAX_COORDINATE:
            raise ValueError("the value is too large")
    except (ValueError, OverflowError):
        texts = ",".join(str(row[name]) for name in EDGES)
        raise DataError(f"{where}: {','.join(EDGES)} = {texts} are not four numbers; correct the line") from None
    return Window(row["filename"] or "", edges)


def classify_windows(
    model: ImageModel,
    windows: Sequence[Window],
    options: ImageOptions,
    context_pad: int,
    leave_out: Callable[[str, DataError], None] | None = None,
) -> Floats:
    """Return the net's first output for each window: (N, classes).

    Args:
        model: the net.
        windows: the windows; keep those of one image adjacent, because only the last image is cached.
        options: of the preprocessing of the values.
        context_pad: width in pixels of the input's border that shows what surrounds a window.
        leave_out: called with the name of an image that cannot be read, whose windows have no row then; None: the
            error is raised.

    Raises:
        ConfigError: the options do not fit.
        DataError: an image cannot be read.
        ArrayError: a window is not within its image, or `context_pad` does not fit the input.
    """
    channels, height, width = model.image_shape
    transformer = options.transformer((1, channels, height, width))
    check_context_pad(context_pad, height, width)
    mean = crop_mean(transformer, INPUT)
    dims = np.array([height, width, channels])
    image: Floats | None = None
    name = None
    results: list[Floats] = []
    inputs: list[Floats] = []
    for number, window in enumerate(windows, 1):
        if window.filename != name:
            image, name = _load(window.filename, channels != 1, leave_out), window.filename
        if image is not None:
            cropped = crop_window(image, window.edges, dims, context_pad, mean, name)
            inputs.append(transformer.preprocess(INPUT, cropped))
        if inputs and (len(inputs) == _BATCH or number == len(windows)):
            scores = model.run(np.stack(inputs))
            results.append(scores.reshape(len(inputs), -1))
            inputs = []
    return np.concatenate(results) if results else np.zeros((0, 0), np.float32)


def _load(name: str, color: bool, leave_out: Callable[[str, DataError], None] | None) -> Floats | None:
    try:
        return load_image(name, color)
    except DataError as error:
        if leave_out is None:
            raise
        leave_out(name, error)
        return None


def windows_as_csv(windows: Sequence[Window], scores: Floats) -> str:
    """Return CSV with filename, edges and class0, class1, … for each window, as in Caffe's detect.py."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["filename", *EDGES, *(f"class{number}" for number in range(scores.shape[1]))])
    for window, row in zip(windows, scores, strict=True):
        writer.writerow([spreadsheet_text(window.filename), *window.edges, *(f"{score:.6g}" for score in row)])
    return text.getvalue()


def write_windows_hdf5(path: Path, windows: Sequence[Window], scores: Floats) -> None:
    """Write datasets `filename` (N), `window` (N, 4) in the order of `EDGES`, and `prediction` (N, classes).

    Raises:
        RunError: the file cannot be written.
    """
    import h5py

    names = np.array([window.filename.encode("utf-8", "surrogateescape") for window in windows])
    with atomic_write(path) as target, h5py.File(target, "w") as file:
        file.create_dataset("filename", data=names)
        file.create_dataset("window", data=np.array([window.edges for window in windows], np.int64))
        file["window"].attrs["columns"] = np.array(EDGES, "S")
        file.create_dataset("prediction", data=scores)


# -- one window -----------------------------------------------------------------------------------------------


def check_context_pad(context_pad: int | None, height: int, width: int) -> None:
    """Reject a border that does not fit the net's input.

    Raises:
        ArrayError: the input is not square, or not larger than its borders.
    """
    if context_pad and (height != width or 2 * context_pad >= width):
        raise ArrayError(
            f"context_pad {context_pad} does not fit the net's input of {height} x {width}: it must be square and "
            "larger than two borders; give a smaller context_pad, or 0"
        )


def crop_mean(transformer: Transformer, in_: str) -> NDArray[np.float32]:
    """Return the mean in unprocessed values (H, W, K), which preprocessing maps to 0."""
    channels, height, width = transformer.inputs[in_][1:]
    mean = transformer.mean.get(in_)
    if mean is None:
        return np.zeros((height, width, channels), dtype=np.float32)
    image = mean.astype(np.float32)
    if in_ in transformer.channel_swap:
        image = image[np.argsort(transformer.channel_swap[in_])]
    return np.asarray(image.transpose(1, 2, 0) / np.float32(transformer.raw_scale.get(in_, 1.0)))


def crop_window(
    im: NDArray[Any],
    window: Sequence[int] | NDArray[Any],
    dims: NDArray[Any],
    context_pad: int,
    mean: NDArray[Any],
    name: str = "",
) -> NDArray[Any]:
    """Return a window (ymin, xmin, ymax, xmax) of an image, with its surroundings if `context_pad` is set.

    Args:
        im: the image (H, W, K).
        window: the window's edges.
        dims: H, W and K of the net's input.
        context_pad: width in pixels of the input's border that shows what surrounds the window.
        mean: fill value outside the image.
        name: the image's name for messages.

    Raises:
        ArrayError: the window, or with its surroundings, is not within the image.
    """
    top, left, bottom, right = (int(number) for number in window)
    if context_pad:
        crop = _with_context(im, np.array([top, left, bottom, right]), dims, context_pad, mean)
    else:
        crop = im[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    if crop.size == 0:
        edges = [top, left, bottom, right]
        of = f" '{name}'" if name else ""
        raise ArrayError(f"the window {edges} is empty in an image{of} of {im.shape[0]} x {im.shape[1]}")
    return crop


def _with_context(
    im: NDArray[Any], window: NDArray[Any], dims: NDArray[Any], context_pad: int, mean: NDArray[Any]
) -> NDArray[Any]:
    """Return the window with its surroundings at the input's size, filled with the mean outside the image."""
    size = int(dims[0])
    half = (window[2:] - window[:2] + 1) / 2
    reach = half * size / (size - 2 * context_pad)
    centre = window[:2] + half
    begin, end = np.round(centre - reach), np.round(centre + reach)
    scale = size / (end - begin + 1)
    pad = np.round(np.maximum(0, -begin) * scale).astype(int)
    begin, end = (np.clip(corner, 0, im.shape[:2]).astype(int) for corner in (begin, end))
    if np.any(end <= begin):
        return im[:0]
    inner = np.minimum(np.round((end - begin + 1) * scale).astype(int), size - pad)
    inside = resize_image(im[begin[0] : end[0], begin[1] : end[1]], np.maximum(inner, 1))
    crop: NDArray[np.float32] = np.ones(dims, dtype=np.float32) * mean
    crop[pad[0] : pad[0] + inner[0], pad[1] : pad[1] + inner[1]] = inside[: inner[0], : inner[1]]
    return crop

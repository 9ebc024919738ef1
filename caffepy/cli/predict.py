"""Commands that run a trained net on data: `caffepy classify`, `caffepy detect` and `caffepy extract_features`.

`classify` and `detect` predict for images (Caffe's `classify.py` and `detect.py`). `detect` prints the boxes of an SSD,
or classifies windows as Caffe's `detect.py` does. The fields of the net's Input layer, or the options of Caffe's
`classify.py`, say how images are prepared.

`extract_features` writes blobs of a net to databases as records, as Caffe's `extract_features.cpp` does.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import DeviceOptions, NetDeviceOptions, ReadsNets, engine_option, overwrite_option
from caffepy.cli.output import Unreadable, quiet_net, showing
from caffepy.errors import ConfigError, DataError, one_line, printable, spreadsheet_text
from caffepy.utils.options import (
    NEEDED,
    argument,
    file_list,
    fraction,
    name_list,
    natural,
    option,
    positive,
    record_shape,
    switch,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caffepy.infer.classify import ImageModel
    from caffepy.infer.detect import Box
    from caffepy.infer.images import ImageOptions, Steps
    from caffepy.infer.input_transform import ImagePreparation


log = logging.getLogger(__name__)


# -- options -------------------------------------------------------------------------------------------


_score = partial(fraction, what="a score")
_PREPARATION = ("mean_file", "raw_scale", "input_scale", "channel_swap")
"""Options that replace the preparation of the net's Input layer."""


def _order(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a channel order such as 2,1,0") from None


@dataclass(kw_only=True)
class _ImageCommand(DeviceOptions, ReadsNets):
    """A command that predicts for images; the options of the preparation are those of Caffe's `classify.py`."""

    paths: list[Path]
    model: Path = option("the deploy net", Path, default=NEEDED, flags=("--model", "--model-def"))
    weights: list[Path] = option(
        "its weights (default: random parameters)",
        file_list,
        "FILE",
        default=[],
        flags=("--weights", "--pretrained-model"),
    )
    output: Path | None = option("write here", Path)
    overwrite: bool = overwrite_option()
    format: str | None
    mean_file: str | None = option(
        "mean to subtract: values separated by commas, an .npy file or a .binaryproto (default: none)", metavar="MEAN"
    )
    raw_scale: float | None = option("factor before subtraction, for values from 0 to 1 (255)", float, "X")
    input_scale: float | None = option("factor after subtraction (1)", float, "X")
    channel_swap: tuple[int, ...] | None = option(
        "channel order as indices of red, green, blue (default: 2,1,0, which is blue, green, red)", _order, "ORDER"
    )
    ext: str = option("suffix of the files read from a folder (default: all image files)", default="", metavar="SUFFIX")
    engine: str = engine_option()


def inputs_and_output(args: _ImageCommand, suffixes: tuple[str, ...]) -> tuple[list[Path], Path | None]:
    """Return the input paths and the output of the positional arguments.

    The last of several paths is the output if it has one of the suffixes, or has no suffix and does not exist.
    """
    paths = list(args.paths)
    last = paths[-1]
    is_output = last.suffix in suffixes or not (last.suffix or os.path.exists(last))
    if args.output is None and len(paths) > 1 and is_output:
        return paths[:-1], last
    return paths, args.output


def _open(args: _ImageCommand) -> ImageModel:
    """Return the net of the command line."""
    from caffepy.cli.nets import single_device
    from caffepy.infer.classify import ImageModel

    return ImageModel(args.model, args.weights, single_device(args), args.threads, args.math, args.engine)


def image_options(args: _ImageCommand) -> ImageOptions:
    """Return the image options that the command line gives.

    Raises:
        DataError: the mean cannot be read.
    """
    from caffepy.infer.images import ImageOptions, read_any_mean

    given = {name: getattr(args, name) for name in _PREPARATION[1:] if getattr(args, name) is not None}
    return ImageOptions(mean=read_any_mean(args.mean_file or ""), **given)


def net_preparation(model: ImageModel, args: _ImageCommand, others: tuple[str, ...] = ()) -> ImagePreparation | None:
    """Return the preparation of the net's Input layer; None without one, or if options replace it, with a warning."""
    given = [f"--{name.replace('_', '-')}" for name in (*_PREPARATION, *others) if getattr(args, name) is not None]
    if model.model.prepares_images and given:
        log.warning(
            "%s: %s replaces the preparation that the net's Input layer has; images are prepared by the options alone",
            args.model,
            " and ".join(given),
        )
        return None
    return model.model.preparation()


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its unit in singular or plural."""
    return f"{number} {one if number == 1 else more or one + 's'}"


# -- `caffepy classify` --------------------------------------------------------------------------------


_SCORES = (".npy", ".csv", ".json")


@dataclass(kw_only=True)
class ClassifyCommand(_ImageCommand):
    """Classify images.

    Classify images: print the most likely classes, or write them as CSV or JSON, or all scores as .npy.

      caffepy classify cat.jpg --model deploy.prototxt --weights net.caffemodel --labels words.txt
      caffepy classify cat.jpg photos/ list.txt classes.csv --model deploy.prototxt --weights net.caffemodel
      caffepy classify cat.jpg --model old_deploy.prototxt --weights net.caffemodel --mean-file 104,117,123

    Inputs are image files, folders, lists (.txt, a path per line) and .npy files of images (N, H, W, C) with values
    from 0 to 1 in red, green, blue. Images are prepared by the fields of the net's Input layer, which 'caffepy deploy'
    writes. Without these fields, or with the options --mean-file, --raw-scale, --input-scale, --channel-swap or
    --images-dim, they are prepared as in Caffe's classify.py: resized to --images-dim, and scores are the average over
    ten crops, unless --center-only is given.
    """

    paths: list[Path] = argument(
        "images, folders, .txt lists or .npy files; behind them the output, .csv, .json or .npy (all scores)",
        Path,
        "PATH",
        nargs="+",
    )
    format: str | None = option(
        "form of the results (default: by the output's suffix, else text)", choices=("text", "csv", "json")
    )
    labels: Path | None = option("names of the classes, one per line", Path)
    top: int = option("classes to show", positive, default=5)
    center_only: bool = switch("use only the center crop")
    images_dim: tuple[int, ...] | None = option(
        "size of images before cropping (default: 256,256, or the input size if larger)", record_shape, "H,W"
    )

    def run(self) -> int:
        """Classify, and print or write the classes or all scores.

        Raises:
            ConfigError: the net has no image input, the preparation does not fit, or the output exists or has an
                image's suffix.
            DataError: no image can be read.
            SnapshotError: the weights do not fit.
        """
        from caffepy.infer.classify import classify
        from caffepy.infer.images import SUFFIXES, list_images

        if self.images_dim is not None and len(self.images_dim) != 2:
            raise ConfigError("--images-dim is a height and a width such as 256,256")
        paths, output = inputs_and_output(self, _SCORES)
        if output is not None:
            if output.suffix.lower() in SUFFIXES:
                raise ConfigError(
                    f"'{output}' is the output and has an image's suffix; name a .csv, .json or .npy file"
                )
            _check_output(self, output, paths)
        names = _names(self.labels)
        with quiet_net(), _open(self) as model:
            images = list_images(paths, self.ext)
            unreadable = Unreadable(image.name for image in images)
            scores = classify(
                model,
                images,
                _classify_steps(model, self),
                lambda image, error: unreadable.leave_out(image.name, error),
            )
        unreadable.check()
        form = self.format or {".csv": "csv", ".json": "json"}.get(output.suffix if output else "", "")
        if output is not None and not form:
            _write_scores(output, scores)
            return unreadable.exit_status
        found = [(name, _best(row, names, self.top)) for name, row in zip(unreadable.read, scores, strict=True)]
        text = {"csv": _classes_as_csv, "json": _classes_as_json}.get(form, _classes_as_text)(found)
        _write(output, text, counted(len(found), "image"))
        return unreadable.exit_status


def _classify_steps(model: ImageModel, args: ClassifyCommand) -> Steps:
    from caffepy.infer.images import net_steps

    preparation = net_preparation(model, args, ("images_dim",))
    channels, height, width = model.image_shape
    if preparation is not None:
        return net_steps(preparation, channels)
    size = args.images_dim or (256, 256)
    size = (max(size[0], height), max(size[1], width))
    return image_options(args).steps(model.image_shape, size, not args.center_only)


def _write_scores(output: Path, scores: NDArray[np.float32]) -> None:
    import numpy as np

    from caffepy.utils.files import atomic_write

    with atomic_write(output) as file:
        np.save(file, scores)
    print(f"{output}: {counted(len(scores), 'image')} x {counted(scores.shape[1], 'class', 'classes')}")


Class = tuple[int, str, float]
"""Label, name and score."""
Classified = list[tuple[str, list[Class]]]
"""Images with their best classes."""


def _best(scores: NDArray[np.float32], names: list[str], top: int) -> list[Class]:
    order = (-scores).argsort(kind="stable")[:top].tolist()
    return [(label, names[label] if label < len(names) else "", float(scores[label])) for label in order]


def _classes_as_text(found: Classified) -> str:
    lines = []
    for image, classes in found:
        lines.append(f"{one_line(image)}\n")
        lines += [f"  {score:8.4f}  {one_line(name or f'class {label}')}\n" for label, name, score in classes]
    return "".join(lines)


def _classes_as_json(found: Classified) -> str:
    rows = [
        {"image": image, "classes": [{"label": label, "name": name, "score": score} for label, name, score in classes]}
        for image, classes in found
    ]
    return json.dumps(rows, indent=1) + "\n"


def _classes_as_csv(found: Classified) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "label", "name", "score"])
    for image, classes in found:
        cells = [(label, spreadsheet_text(name), f"{score:.6g}") for label, name, score in classes]
        writer.writerows((spreadsheet_text(image), *row) for row in cells)
    return text.getvalue()


def _names(path: Path | None) -> list[str]:
    """Return names of classes from a file, one per line, such as Caffe's `synset_words.txt`."""
    if path is None:
        return []
    from caffepy.utils.files import read_regular

    try:
        return read_regular(path, 1 << 24).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise DataError(f"--labels {path}: cannot be read: {error.strerror}") from error


# -- `caffepy detect` ----------------------------------------------------------------------------------

_FIELDS = ("image", "label", "name", "score", "xmin", "ymin", "xmax", "ymax")
_BOXES = (".json", ".csv", ".h5", ".hdf5")


@dataclass(kw_only=True)
class DetectCommand(_ImageCommand):
    """Detect objects in images (SSD).

    Detect objects with a net that ends in DetectionOutput (SSD): boxes in pixels, as CSV, JSON or text.

      caffepy detect street.jpg --model deploy.prototxt --weights ssd.caffemodel --draw found.png
      caffepy detect photos/ boxes.json --model deploy.prototxt --weights ssd.caffemodel --label-map labelmap.prototxt
      caffepy detect street.jpg --model old_deploy.prototxt --weights ssd.caffemodel --mean-file 104,117,123

    Inputs and their preparation are those of 'caffepy classify'; an image is never cropped.

    With --crop-mode list, as in Caffe's detect.py, a classifier scores windows (R-CNN) from a CSV file with the header
    filename,xmin,ymin,xmax,ymax. The output, .csv or .h5, has a row of class scores for each window.

      caffepy detect windows.csv scores.h5 --crop-mode list --model deploy.prototxt --weights net.caffemodel
    """

    paths: list[Path] = argument(
        "images, folders, .txt lists, .npy files, or windows as .csv; behind them the output, .json or .csv, "
        "for windows .csv or .h5",
        Path,
        "PATH",
        nargs="+",
    )
    format: str | None = option(
        "form of the results (default: by the output's suffix, else csv)", choices=("text", "csv", "json")
    )
    crop_mode: str | None = option(
        "classify the windows of a CSV file", metavar="list", choices=("list", "selective_search")
    )
    context_pad: int = option(
        "for windows: width of the border with the window's surroundings, in input pixels", natural, default=16
    )
    threshold: float = option("lowest score", _score, "X", default=0.5)
    label_map: Path | None = option("prototxt with the labels' names", Path)
    draw: Path | None = option("write the image with its boxes; a folder for several images", Path, "PATH")

    def run(self) -> int:
        """Detect boxes, print or write them, and draw them on request; or classify windows.

        Raises:
            ConfigError: the net is not an SSD, an output exists or has an unknown suffix, or selective search is
                requested.
            DataError: the windows, or all images, cannot be read.
            SnapshotError: the weights do not fit.
        """
        paths, output = inputs_and_output(self, _BOXES)
        if self.crop_mode is not None:
            return _run_windows(self, paths, output)
        from caffepy.infer.detect import detect, draw_boxes, read_label_names
        from caffepy.infer.images import list_images

        if self.format is None:
            _check_suffix(output, "boxes", (".json", ".csv"))
        _check_output(self, output, paths)
        for path in paths:
            if path.suffix.lower() == ".csv":
                raise ConfigError(
                    f"'{path}' is not an image; to classify the windows that it lists, give --crop-mode list"
                )
        names = read_label_names(self.label_map) if self.label_map else {}
        found: list[Box] = []
        with quiet_net(), _open(self) as model:
            images = list_images(paths, self.ext)
            unreadable = Unreadable(image.name for image in images)
            steps = _detect_steps(model, self)
            pictures = _pictures(self.draw, [image.name for image in images])
            for drawn in pictures:
                _check_output(self, drawn, [image.content for image in images if isinstance(image.content, Path)])
            for image, picture in zip(images, pictures, strict=True):
                try:
                    pixels = steps.load(image)
                    boxes = detect(model, image.name, pixels, steps, self.threshold, names)
                except DataError as error:
                    unreadable.leave_out(image.name, error)
                    continue
                found += boxes
                if picture is not None:
                    draw_boxes(pixels, boxes, picture)
        unreadable.check()
        form = self.format or (output.suffix[1:] if output else "csv")
        text = {"json": _as_json, "csv": _as_csv}.get(form, _as_text)(found)
        _write(output, text, f"{counted(len(found), 'box', 'boxes')} in {counted(len(unreadable.read), 'image')}")
        return unreadable.exit_status


def _detect_steps(model: ImageModel, args: DetectCommand) -> Steps:
    """Return the steps from whole images to the net's input."""
    from caffepy.infer.images import net_steps

    preparation = net_preparation(model, args)
    if preparation is None:
        return image_options(args).steps(model.image_shape)
    if preparation.crops or preparation.pads:
        raise ConfigError(
            f"{args.model}: transform_param of the Input layer crops or pads images, and boxes are relative to whole "
            "images; remove its crop or FIT_LARGE_SIZE_AND_PAD"
        )
    return net_steps(preparation, model.image_shape[0])


def _run_windows(args: DetectCommand, paths: list[Path], output: Path | None) -> int:
    from caffepy.infer.images import ImageOptions
    from caffepy.infer.windows import classify_windows, read_windows, windows_as_csv, write_windows_hdf5

    if args.crop_mode == "selective_search":
        raise ConfigError(
            "--crop-mode selective_search needs a MATLAB package, which caffepy does not support; list "
            "windows in a CSV file and give --crop-mode list"
        )
    if args.draw is not None:
        raise ConfigError("--draw shows the boxes of an SSD; windows have none: leave it out")
    if args.format in ("text", "json"):
        raise ConfigError(f"--format {args.format}: scores of windows are written as CSV or HDF5; leave it out")
    _check_suffix(output, "windows", (".csv", ".h5", ".hdf5"))
    _check_output(args, output, paths)
    if len(paths) != 1:
        raise ConfigError(f"--crop-mode list takes one file of windows; {len(paths)} are given")
    windows = read_windows(paths[0])
    with quiet_net(), _open(args) as model:
        of_net = net_preparation(model, args)
        mean, scale = of_net.mean_and_scale() if of_net is not None else (None, 1.0)
        options = image_options(args) if of_net is None else ImageOptions(mean=mean, input_scale=scale)
        unreadable = Unreadable(dict.fromkeys(window.filename for window in windows))
        scores = classify_windows(model, windows, options, args.context_pad, unreadable.leave_out)
    unreadable.check()
    windows = [window for window in windows if window.filename not in unreadable.names]
    done = f"{counted(len(windows), 'window')} x {counted(scores.shape[1], 'class', 'classes')}"
    if output is None or output.suffix == ".csv":
        _write(output, windows_as_csv(windows, scores), done)
    else:
        write_windows_hdf5(output, windows, scores)
        print(f"{output}: {done}")
    return unreadable.exit_status


def _check_suffix(output: Path | None, what: str, endings: tuple[str, ...]) -> None:
    if output is not None and output.suffix not in endings:
        raise ConfigError(f"'{output}': {what} are written as {' or '.join(endings)}; name another file")


def _check_output(args: _ImageCommand, output: Path | None, read: list[Path]) -> None:
    """Check that a result may be written; `read` are the images, lists and arrays that the command reads."""
    from caffepy.utils.files import check_output

    if output is not None:
        check_output(output, args.overwrite, [*read, args.model, *args.weights])


def _write(output: Path | None, text: str, done: str) -> None:
    """Print a text, or write it to a file and print the file's name."""
    from caffepy.utils.files import atomic_write

    if output is None:
        print(text, end="")
        return
    with atomic_write(output) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    print(f"{output}: {done}")


def _pictures(draw: Path | None, names: list[str]) -> list[Path | None]:
    """Return the output path of each image with its boxes; the folder for several images is created."""
    if draw is None:
        return [None] * len(names)
    if len(names) == 1 and not draw.is_dir():
        return [draw]
    try:
        draw.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--draw {draw}: no folder for the pictures of {len(names)} images can be made there ({error.strerror}); "
            "name another one"
        ) from error
    stems = [f"{number:06d}" if name.endswith("]") else Path(name).stem for number, name in enumerate(names)]
    counts = Counter(stems)
    return [
        draw / (f"{stem}.png" if counts[stem] == 1 else f"{stem}_{number:06d}.png") for number, stem in enumerate(stems)
    ]


def _as_json(boxes: list[Box]) -> str:
    rows = [{name: asdict(box)[name] for name in _FIELDS} for box in boxes]
    return json.dumps(rows, indent=1) + "\n"


def _as_csv(boxes: list[Box]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for box in boxes:
        edges = (f"{edge:.1f}" for edge in (box.xmin, box.ymin, box.xmax, box.ymax))
        texts = spreadsheet_text(box.image), box.label, spreadsheet_text(box.name)
        writer.writerow([*texts, f"{box.score:.4f}", *edges])
    return text.getvalue()


def _as_text(boxes: list[Box]) -> str:
    lines: list[str] = []
    for image, group in groupby(boxes, key=lambda box: box.image):
        lines.append(f"{one_line(image)}\n")
        for box in group:
            edges = " ".join(f"{edge:7.1f}" for edge in (box.xmin, box.ymin, box.xmax, box.ymax))
            lines.append(f"  {box.score:8.4f} {edges}  {one_line(box.name or f'class {box.label}')}\n")
    return "".join(lines)


# -- `caffepy extract_features` ------------------------------------------------------------------------


@dataclass(kw_only=True)
class ExtractFeaturesCommand(NetDeviceOptions, ReadsNets):
    """Write blobs of a trained net as databases.

    Run a trained net in its TEST phase and write blobs to databases of float Datums, as Caffe's extract_features does.

    The net needs a data layer. Separate several blobs and databases by commas:

        caffepy extract_features net.caffemodel net.prototxt fc7,prob fc7_lmdb,prob_lmdb 10 lmdb GPU 0
    """

    weights: Path = argument("the .caffemodel", Path, "WEIGHTS")
    model: Path = argument("the net's prototxt", Path, "NET")
    blobs: list[str] = argument("names of blobs", name_list, "BLOBS")
    databases: list[str] = argument("the databases to write, one per blob", name_list, "DB_NAMES")
    batches: int = argument("number of batches", positive, "BATCHES")
    backend: str = argument("kind of database", choices=("lmdb", "leveldb"))
    device: str | None = argument("device of the net (CPU)", default=None, choices=("CPU", "GPU"))
    device_id: int = argument("index of the GPU (0)", int, "DEVICE_ID", default=0)
    overwrite: bool = overwrite_option("replace existing databases")

    def run(self) -> int:
        """Write the features and print the record counts.

        Raises:
            ConfigError: the numbers of databases and blobs differ, or the net has no such blob.
            CaffepyError: files, data or device cannot be used.
        """
        if len(self.blobs) != len(self.databases):
            raise ConfigError(f"{len(self.blobs)} blobs but {len(self.databases)} databases; name one for each blob")
        if self.device == "GPU" and self.gpus is None:
            self.gpus = [self.device_id]
        from caffepy.cli.nets import open_net
        from caffepy.data.sources.databases import open_writer
        from caffepy.formats.proto import caffe_pb2
        from caffepy.infer.features import check_blobs, extract_features

        with ExitStack() as stack:
            net = stack.enter_context(open_net(self.model, self, caffe_pb2.TEST, self.batches, [self.weights]))
            check_blobs(net, self.blobs)
            writers = [
                stack.enter_context(open_writer(Path(path), self.backend, self.overwrite)) for path in self.databases
            ]
            progress = stack.enter_context(showing("batches"))
            progress.total = self.batches
            extract_features(net, self.blobs, writers, self.batches, progress.advance)
        for path, blob, writer in zip(self.databases, self.blobs, writers, strict=True):
            print(f"{path}: {writer.count} records of '{printable(blob)}'")
        return 0

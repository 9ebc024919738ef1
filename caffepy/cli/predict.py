"""`caffepy classify` and `caffepy detect`: predictions for images (Caffe's `classify.py` and `detect.py`).

`detect` prints the boxes of an SSD, or classifies windows as Caffe's `detect.py` does."""

from __future__ import annotations

import argparse
import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.log import quiet_net
from caffepy.cli.options import Parser, add_device_options, add_engine_option
from caffepy.errors import ConfigError, DataError, one_line
from caffepy.options.types import file_list, natural, positive, record_shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caffepy.predict import Box, Preparation


def add_model_options(parser: Parser) -> None:
    """Add --model and --weights, for a deploy net."""
    parser.add_argument(
        "--model", "--model-def", type=Path, required=True, metavar="FILE", dest="model", help="the deploy net"
    )
    parser.add_argument(
        "--weights", "--pretrained-model", type=file_list, default=[], metavar="FILE", dest="weights",
        help="its weights (default: random parameters)",
    )  # fmt: skip


def add_preparation_options(parser: Parser) -> None:
    """Add --mean-file, --raw-scale, --input-scale, --channel-swap and --ext of Caffe's `classify.py`."""
    parser.add_argument(
        "--mean-file", default="", metavar="MEAN",
        help="mean to subtract: values separated by commas, an .npy file or a .binaryproto (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--raw-scale",
        type=float,
        default=255.0,
        metavar="X",
        help="factor before subtraction, for values from 0 to 1 (255)",
    )
    parser.add_argument("--input-scale", type=float, default=1.0, metavar="X", help="factor after subtraction (1)")
    parser.add_argument(
        "--channel-swap", type=_order, default=(2, 1, 0), metavar="ORDER",
        help="channel order as indices of red, green, blue (default: 2,1,0, which is blue, green, red)",
    )  # fmt: skip
    parser.add_argument("--ext", default="jpg", help="suffix of the files read from a folder (jpg)")


def preparation(args: argparse.Namespace) -> Preparation:
    """Return the preparation that the options describe.

    Raises:
        DataError: the mean cannot be read.
    """
    from caffepy.predict import Preparation
    from caffepy.predict.images import read_any_mean

    return Preparation(args.raw_scale, args.channel_swap, read_any_mean(args.mean_file), args.input_scale)


def counted(number: int, one: str, more: str = "") -> str:
    """Return a number with its unit in singular or plural."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def _order(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a channel order such as 2,1,0") from None


_CLASSIFY = """\
Classify images: print the most likely classes, or write all probabilities as .npy.

  caffepy classify cat.jpg --model deploy.prototxt --weights net.caffemodel --mean-file 104,117,123 --labels words.txt
  caffepy classify photos/ predictions.npy --model deploy.prototxt --weights net.caffemodel

The input is an image file, a folder (its files that end in --ext), or an .npy file of images (N, H, W, C) with values
from 0 to 1 in red, green, blue. Predictions are the average over ten crops, unless --center-only is given."""

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def add_parser_classify(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("classify", help="classify images", description=_CLASSIFY)
    parser.add_argument("input", type=Path, metavar="INPUT", help="an image, a folder or an .npy file")
    parser.add_argument("output", type=Path, nargs="?", metavar="OUTPUT.npy", help="write all probabilities here")
    add_model_options(parser)
    parser.add_argument("--labels", type=Path, metavar="FILE", help="names of the classes, one per line")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="classes to show (default: 5)")
    parser.add_argument("--center-only", action="store_true", help="use only the centre crop")
    parser.add_argument(
        "--images-dim", type=record_shape, default=(256, 256), metavar="H,W",
        help="size of images before cropping (default: 256,256, or the input size if larger)",
    )  # fmt: skip
    add_preparation_options(parser)
    add_device_options(parser, "default: the CPU")
    add_engine_option(parser)


def run_classify(args: argparse.Namespace) -> int:
    """Classify, and print or write the probabilities.

    Raises:
        ConfigError: the net has no image input, the preparation does not fit, or the output has an image's suffix.
        DataError: an image cannot be read.
        SnapshotError: the weights do not fit.
    """
    from caffepy.cli.devices import single_device
    from caffepy.files import atomic_write, check_writable
    from caffepy.predict import Model, classify, read_images

    if len(args.images_dim) != 2:
        raise ConfigError("--images-dim is a height and a width such as 256,256")
    if args.output is not None:
        _refuse_image(args.output)
        check_writable(args.output)
    names = _names(args.labels)
    with quiet_net(), Model(args.model, args.weights, single_device(args), args.threads, args.engine) as model:
        channels, height, width = model.image_shape
        images = read_images(args.input, channels, args.ext)
        size = (max(args.images_dim[0], height), max(args.images_dim[1], width))
        scores = classify(model, [image for _, image in images], preparation(args), size, args.center_only)
    if args.output is not None:
        import numpy as np

        with atomic_write(args.output) as file:
            np.save(file, scores)
        print(f"{args.output}: {counted(len(scores), 'image')} x {counted(scores.shape[1], 'class', 'classes')}")
        return 0
    for (path, _), row in zip(images, scores, strict=True):
        _print_best(path, row, names, args.top)
    return 0


def _refuse_image(path: Path) -> None:
    if path.suffix.lower() in _IMAGES:
        raise ConfigError(
            f"'{path}' is the output and has an image's suffix; name an .npy file, or, to classify several images, "
            "give their folder"
        )


def _names(path: Path | None) -> list[str]:
    """Return names of classes from a file, one per line, such as Caffe's `synset_words.txt`."""
    if path is None:
        return []
    from caffepy.files import read_regular

    try:
        return read_regular(path, 1 << 24).decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise DataError(f"--labels {path}: cannot be read: {error.strerror}") from error


def _print_best(path: str, scores: NDArray[np.float32], names: list[str], top: int) -> None:
    print(one_line(path))
    for index in (-scores).argsort(kind="stable")[:top].tolist():
        name = names[index] if index < len(names) else f"class {index}"
        print(f"  {scores[index]:8.4f}  {one_line(name)}")


_DETECT = """\
Detect objects with a net that ends in DetectionOutput (SSD): boxes in pixels, as CSV or JSON.

  caffepy detect street.jpg --model deploy.prototxt --weights ssd.caffemodel --mean-file 104,117,123 --draw found.png
  caffepy detect photos/ boxes.json --model deploy.prototxt --weights ssd.caffemodel --label-map labelmap.prototxt

With --crop-mode list, as in Caffe's detect.py, a classifier scores windows (R-CNN) from a CSV file with the header
filename,xmin,ymin,xmax,ymax. The output, .csv or .h5, has a row of class scores for each window.

  caffepy detect windows.csv scores.h5 --crop-mode list --model deploy.prototxt --weights net.caffemodel"""
_FIELDS = ("image", "label", "name", "score", "xmin", "ymin", "xmax", "ymax")


def add_parser_detect(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("detect", help="detect objects in images (SSD)", description=_DETECT)
    parser.add_argument(
        "input", type=Path, metavar="INPUT", help="an image, a folder, an .npy file; or windows as .csv"
    )
    parser.add_argument(
        "output",
        type=Path,
        nargs="?",
        metavar="OUTPUT",
        help="write .json or .csv, for windows .csv or .h5 (default: CSV to stdout)",
    )  # fmt: skip
    add_model_options(parser)
    parser.add_argument(
        "--crop-mode", choices=("list", "selective_search"), metavar="list", help="classify the windows of a CSV file"
    )
    parser.add_argument(
        "--context-pad", type=natural, default=16, metavar="N",
        help="for windows: width of the border with the window's surroundings, in input pixels (16)",
    )  # fmt: skip
    parser.add_argument("--threshold", type=_score, default=0.5, metavar="X", help="lowest score (0.5)")
    parser.add_argument("--label-map", type=Path, metavar="FILE", help="prototxt with the labels' names")
    parser.add_argument(
        "--draw", type=Path, metavar="PATH", help="write the image with its boxes; a folder for several images"
    )
    add_preparation_options(parser)
    add_device_options(parser, "default: the CPU")
    add_engine_option(parser)


def run_detect(args: argparse.Namespace) -> int:
    """Detect boxes, print or write them, and draw them on request; or classify windows.

    Raises:
        ConfigError: the net is not an SSD, an output's suffix is unknown, or selective search is requested.
        DataError: an image or the windows cannot be read.
        SnapshotError: the weights do not fit.
    """
    if args.crop_mode is not None:
        return _run_windows(args)
    from caffepy.cli.devices import single_device
    from caffepy.predict import Model, detect, draw_boxes, read_images
    from caffepy.predict.detect import read_label_names

    _check_output(args.output, "boxes", (".json", ".csv"))
    if args.input.suffix.lower() == ".csv":
        raise ConfigError(
            f"'{args.input}' is not an image; to classify the windows that it lists, give --crop-mode list"
        )
    names = read_label_names(args.label_map) if args.label_map else {}
    found: list[Box] = []
    with quiet_net(), Model(args.model, args.weights, single_device(args), args.threads, args.engine) as model:
        images = read_images(args.input, model.image_shape[0], args.ext)
        prepared = preparation(args)
        if args.draw is not None:
            _make_folder(args.draw, len(images))
        for number, image in enumerate(images):
            boxes = detect(model, image, prepared, args.threshold, names)
            found += boxes
            if args.draw is not None:
                draw_boxes(image[1], boxes, _picture(args.draw, image[0], number, len(images)))
    text = _as_json(found) if args.output and args.output.suffix == ".json" else _as_csv(found)
    _write(args.output, text, f"{counted(len(found), 'box', 'boxes')} in {counted(len(images), 'image')}")
    return 0


def _run_windows(args: argparse.Namespace) -> int:
    from caffepy.cli.devices import single_device
    from caffepy.predict import Model, classify_windows, read_windows
    from caffepy.predict.windows import windows_as_csv, write_windows_hdf5

    if args.crop_mode == "selective_search":
        raise ConfigError(
            "--crop-mode selective_search needs a MATLAB package, which caffepy does not support; list "
            "windows in a CSV file and give --crop-mode list"
        )
    if args.draw is not None:
        raise ConfigError("--draw shows the boxes of an SSD; windows have none: leave it out")
    _check_output(args.output, "windows", (".csv", ".h5", ".hdf5"))
    windows = read_windows(args.input)
    with quiet_net(), Model(args.model, args.weights, single_device(args), args.threads, args.engine) as model:
        scores = classify_windows(model, windows, preparation(args), args.context_pad)
    done = f"{counted(len(windows), 'window')} x {counted(scores.shape[1], 'class', 'classes')}"
    if args.output is None or args.output.suffix == ".csv":
        _write(args.output, windows_as_csv(windows, scores), done)
    else:
        write_windows_hdf5(args.output, windows, scores)
        print(f"{args.output}: {done}")
    return 0


def _check_output(output: Path | None, what: str, endings: tuple[str, ...]) -> None:
    from caffepy.files import check_writable

    if output is not None and output.suffix not in endings:
        raise ConfigError(f"'{output}': {what} are written as {' or '.join(endings)}; name another file")
    if output is not None:
        check_writable(output)


def _write(output: Path | None, text: str, done: str) -> None:
    """Print a text, or write it to a file and print the file's name."""
    from caffepy.files import atomic_write

    if output is None:
        print(text, end="")
        return
    with atomic_write(output) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    print(f"{output}: {done}")


def _picture(draw: Path, name: str, number: int, count: int) -> Path:
    """Return the output path of an image with its boxes."""
    if count == 1 and not draw.is_dir():
        return draw
    return draw / (f"{Path(name).stem}.png" if not name.endswith("]") else f"{number:06d}.png")


def _make_folder(draw: Path, count: int) -> None:
    """Create the output folder of several drawings.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        if count > 1:
            draw.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--draw {draw}: no folder for the pictures of {count} images can be made there ({error.strerror}); "
            "name another one"
        ) from error


def _score(text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if not 0 <= score <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a score from 0 to 1")
    return score


def _as_json(boxes: list[Box]) -> str:
    rows = [{name: asdict(box)[name] for name in _FIELDS} for box in boxes]
    return json.dumps(rows, indent=1) + "\n"


def _as_csv(boxes: list[Box]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for box in boxes:
        edges = (f"{edge:.1f}" for edge in (box.xmin, box.ymin, box.xmax, box.ymax))
        writer.writerow([box.image, box.label, box.name, f"{box.score:.4f}", *edges])
    return text.getvalue()

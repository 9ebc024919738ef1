"""`caffepy classify` and `caffepy detect`: what a net says of images (Caffe's `classify.py` and `detect.py`).

`detect` prints the boxes that an SSD finds, or as Caffe's `detect.py` the classes of windows."""

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
    """--model and --weights, of a deploy net."""
    parser.add_argument(
        "--model", "--model-def", type=Path, required=True, metavar="FILE", dest="model", help="the deploy net"
    )
    parser.add_argument(
        "--weights", "--pretrained-model", type=file_list, default=[], metavar="FILE", dest="weights",
        help="its weights (without them the net is random)",
    )  # fmt: skip


def add_preparation_options(parser: Parser) -> None:
    """--mean-file, --raw-scale, --input-scale, --channel-swap and --ext, of Caffe's `classify.py`."""
    parser.add_argument(
        "--mean-file", default="", metavar="MEAN",
        help="what is subtracted: values with commas, an .npy file or a .binaryproto (default: nothing)",
    )  # fmt: skip
    parser.add_argument(
        "--raw-scale", type=float, default=255.0, metavar="X", help="factor before that, of values from 0 to 1 (255)"
    )
    parser.add_argument("--input-scale", type=float, default=1.0, metavar="X", help="factor after that (1)")
    parser.add_argument(
        "--channel-swap", type=_order, default=(2, 1, 0), metavar="ORDER",
        help="order of the channels, of red, green and blue (default: 2,1,0, which is blue, green, red)",
    )  # fmt: skip
    parser.add_argument("--ext", default="jpg", help="of the files that are taken from a folder (jpg)")


def preparation(args: argparse.Namespace) -> Preparation:
    """What the options say.

    Raises:
        DataError: the mean cannot be read.
    """
    from caffepy.predict import Preparation
    from caffepy.predict.images import read_any_mean

    return Preparation(args.raw_scale, args.channel_swap, read_any_mean(args.mean_file), args.input_scale)


def counted(number: int, one: str, more: str = "") -> str:
    """A number and what it counts."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def _order(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no order of channels such as 2,1,0") from None


_CLASSIFY = """\
Say what an image shows: a table of the likeliest classes, or all probabilities as .npy.

  caffepy classify cat.jpg --model deploy.prototxt --weights net.caffemodel --mean-file 104,117,123 --labels words.txt
  caffepy classify photos/ predictions.npy --model deploy.prototxt --weights net.caffemodel

The input is an image file, a folder (its files that end in --ext), or an .npy file of images (N, H, W, C) whose values
are red, green and blue from 0 to 1. Predictions are the average over ten crops, unless --center-only is given."""

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def add_parser_classify(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("classify", help="say what images show", description=_CLASSIFY)
    parser.add_argument("input", type=Path, metavar="INPUT", help="an image, a folder or an .npy file")
    parser.add_argument("output", type=Path, nargs="?", metavar="OUTPUT.npy", help="write all probabilities here")
    add_model_options(parser)
    parser.add_argument("--labels", type=Path, metavar="FILE", help="names of the classes, one a line")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="classes to show (default: 5)")
    parser.add_argument("--center-only", action="store_true", help="the crop in the middle alone")
    parser.add_argument(
        "--images-dim", type=record_shape, default=(256, 256), metavar="H,W",
        help="images are resized to this before they are cropped (default: 256,256, or the input if that is larger)",
    )  # fmt: skip
    add_preparation_options(parser)
    add_device_options(parser, "default: the CPU")
    add_engine_option(parser)


def run_classify(args: argparse.Namespace) -> int:
    """Classify, and print or write the probabilities.

    Raises:
        ConfigError: the net takes no images, the preparation does not fit it, or the output is named as images are.
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
            f"'{path}' stands where the output is named, and probabilities are no image; name an .npy file, or put "
            "several images into a folder and give that"
        )


def _names(path: Path | None) -> list[str]:
    """Names of classes, one a line; of Caffe's `synset_words.txt` too."""
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
Find objects in images by a net that ends in DetectionOutput (SSD): boxes in pixels, as CSV or JSON.

  caffepy detect street.jpg --model deploy.prototxt --weights ssd.caffemodel --mean-file 104,117,123 --draw found.png
  caffepy detect photos/ boxes.json --model deploy.prototxt --weights ssd.caffemodel --label-map labelmap.prototxt

With --crop-mode list, as Caffe's detect.py: what a classifier says of windows that a CSV file lists under the header
filename,xmin,ymin,xmax,ymax (R-CNN). The output, .csv or .h5, has a row of class scores for each.

  caffepy detect windows.csv scores.h5 --crop-mode list --model deploy.prototxt --weights net.caffemodel"""
_FIELDS = ("image", "label", "name", "score", "xmin", "ymin", "xmax", "ymax")


def add_parser_detect(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("detect", help="find objects in images (SSD)", description=_DETECT)
    parser.add_argument(
        "input", type=Path, metavar="INPUT", help="an image, a folder, an .npy file; or windows as .csv"
    )
    parser.add_argument(
        "output",
        type=Path,
        nargs="?",
        metavar="OUTPUT",
        help="write .json or .csv, of windows .csv or .h5 (default: CSV to stdout)",
    )  # fmt: skip
    add_model_options(parser)
    parser.add_argument(
        "--crop-mode", choices=("list", "selective_search"), metavar="list", help="classify the windows of a CSV file"
    )
    parser.add_argument(
        "--context-pad", type=natural, default=16, metavar="N",
        help="of windows: width of the input's border that shows what is around the window, in its pixels (16)",
    )  # fmt: skip
    parser.add_argument("--threshold", type=_score, default=0.5, metavar="X", help="lowest score (0.5)")
    parser.add_argument("--label-map", type=Path, metavar="FILE", help="prototxt with the labels' names")
    parser.add_argument(
        "--draw", type=Path, metavar="PATH", help="write the image with its boxes; of several images into this folder"
    )
    add_preparation_options(parser)
    add_device_options(parser, "default: the CPU")
    add_engine_option(parser)


def run_detect(args: argparse.Namespace) -> int:
    """Find boxes, print or write them, and draw them if asked for; or classify windows.

    Raises:
        ConfigError: the net is no SSD, an output's ending is unknown, or the windows are to be searched for.
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
        raise ConfigError(f"'{args.input}' is no image; to classify the windows that it lists, give --crop-mode list")
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
            "--crop-mode selective_search needs a MATLAB package of its authors, which caffepy does not call; list "
            "windows of your own in a CSV file and give --crop-mode list"
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
    """Print a text, or write it and print the file's name."""
    from caffepy.files import atomic_write

    if output is None:
        print(text, end="")
        return
    with atomic_write(output) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    print(f"{output}: {done}")


def _picture(draw: Path, name: str, number: int, count: int) -> Path:
    """Where an image with its boxes goes."""
    if count == 1 and not draw.is_dir():
        return draw
    return draw / (f"{Path(name).stem}.png" if not name.endswith("]") else f"{number:06d}.png")


def _make_folder(draw: Path, count: int) -> None:
    """The folder of several images' pictures.

    Raises:
        ConfigError: it cannot be made.
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
        raise argparse.ArgumentTypeError(f"'{text}' is no score from 0 to 1")
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

"""`caffepy classify`: the classes of images (Caffe's `python/classify.py`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_device_options, add_engine_option
from caffepy.cli.tools.prepare import add_model_options, add_preparation_options, counted, preparation, quiet_net
from caffepy.errors import ConfigError, DataError, one_line
from caffepy.options.types import positive, record_shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DESCRIPTION = """\
Say what an image shows: a table of the likeliest classes, or all probabilities as .npy.

  caffepy classify cat.jpg --model deploy.prototxt --weights net.caffemodel --mean-file 104,117,123 --labels words.txt
  caffepy classify photos/ predictions.npy --model deploy.prototxt --weights net.caffemodel

The input is an image file, a folder (its files that end in --ext), or an .npy file of images (N, H, W, C) whose values
are red, green and blue from 0 to 1. Predictions are the average over ten crops, unless --center-only is given."""

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("classify", help="say what images show", description=_DESCRIPTION)
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


def run(args: argparse.Namespace) -> int:
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

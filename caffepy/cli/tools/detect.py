"""`caffepy detect`: the boxes that an SSD finds in images."""

from __future__ import annotations

import argparse
import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_device_options, file_list
from caffepy.cli.tools.prepare import add_engine_option, add_preparation_options, preparation, quiet_net
from caffepy.errors import ConfigError

if TYPE_CHECKING:
    from caffepy.predict import Box

_DESCRIPTION = """\
Find objects in images by a net that ends in DetectionOutput (SSD): boxes in pixels, as CSV or JSON.

  caffepy detect street.jpg --model deploy.prototxt --weights ssd.caffemodel --mean-file 104,117,123 --draw found.png
  caffepy detect photos/ boxes.json --model deploy.prototxt --weights ssd.caffemodel --label-map labelmap.prototxt

Caffe's detect.py, which classifies windows that are given, is caffepy.pycaffe's Detector."""
_FIELDS = ("image", "label", "name", "score", "xmin", "ymin", "xmax", "ymax")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("detect", help="find objects in images (SSD)", description=_DESCRIPTION)
    parser.add_argument("input", type=Path, metavar="INPUT", help="an image, a folder or an .npy file")
    parser.add_argument(
        "output", type=Path, nargs="?", metavar="OUTPUT", help="write .json or .csv (default: CSV to stdout)"
    )
    parser.add_argument(
        "--model", "--model-def", type=Path, required=True, metavar="FILE", dest="model", help="the deploy net"
    )
    parser.add_argument(
        "--weights", "--pretrained-model", type=file_list, default=[], metavar="FILE", dest="weights",
        help="its weights (without them the net is random)",
    )  # fmt: skip
    parser.add_argument("--threshold", type=_score, default=0.5, metavar="X", help="lowest score (0.5)")
    parser.add_argument("--label-map", type=Path, metavar="FILE", help="prototxt with the labels' names")
    parser.add_argument(
        "--draw", type=Path, metavar="PATH", help="write the image with its boxes; of several images into this folder"
    )
    add_preparation_options(parser)
    add_device_options(parser, "default: the CPU")
    add_engine_option(parser)


def run(args: argparse.Namespace) -> int:
    """Find boxes, print or write them, and draw them if asked for.

    Raises:
        ConfigError: the net is no SSD, or an output's ending is unknown.
        DataError: an image cannot be read.
        SnapshotError: the weights do not fit.
    """
    from caffepy.cli.devices import single_device
    from caffepy.files import atomic_write
    from caffepy.predict import Model, detect, draw_boxes, read_images
    from caffepy.predict.detect import read_label_names

    if args.output is not None and args.output.suffix not in (".json", ".csv"):
        raise ConfigError(f"'{args.output}': boxes are written as .json or .csv; name another file")
    names = read_label_names(args.label_map) if args.label_map else {}
    found: list[Box] = []
    with quiet_net(), Model(args.model, args.weights, single_device(args), args.threads, args.engine) as model:
        images = read_images(args.input, model.image_shape[0], args.ext)
        prepared = preparation(args)
        for number, image in enumerate(images):
            boxes = detect(model, image, prepared, args.threshold, names)
            found += boxes
            if args.draw is not None:
                draw_boxes(image[1], boxes, _picture(args.draw, image[0], number, len(images)))
    text = _as_json(found) if args.output and args.output.suffix == ".json" else _as_csv(found)
    if args.output is None:
        print(text, end="")
        return 0
    with atomic_write(args.output) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    print(f"{args.output}: {len(found)} boxes in {len(images)} image{'s' if len(images) > 1 else ''}")
    return 0


def _picture(draw: Path, name: str, number: int, count: int) -> Path:
    """Where an image with its boxes goes."""
    if count == 1 and not draw.is_dir():
        return draw
    draw.mkdir(parents=True, exist_ok=True)
    return draw / (f"{Path(name).stem}.png" if not name.endswith("]") else f"{number:06d}.png")


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

"""Options that `classify` and `detect` share: the net, and how an image becomes its input."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser
from caffepy.options.types import file_list

if TYPE_CHECKING:
    from caffepy.predict import Preparation


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


@contextmanager
def quiet_net() -> Iterator[None]:
    """Keep what is logged of the layers of a net out of stderr within a `with` block."""
    logger = logging.getLogger("caffepy.net")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def counted(number: int, one: str, more: str = "") -> str:
    """A number and what it counts."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def _order(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no order of channels such as 2,1,0") from None

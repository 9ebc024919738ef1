"""`caffepy import`: nets from ONNX, checked by running both."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_overwrite_flag
from caffepy.errors import ConfigError
from caffepy.utils.installation import install_command
from caffepy.utils.options import positive

if TYPE_CHECKING:
    from caffepy.net import Net

_IMPORT = """\
Write an ONNX file as NAME.prototxt and NAME.caffemodel. These are loaded and run on the same random input as the file
(by onnxruntime, where it is installed), and the largest difference is printed; above 1e-4 of the output's largest value
nothing is written. Unsupported nodes are listed together.

  caffepy import resnet18.onnx
  caffepy import detector.onnx --output models/detector --shape 1,3,320,320 --fold"""

LARGEST_AXES = 8


def input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse ``1,3,224,224``, for a model's only input, or ``name=1,3,224,224``."""
    name, _, sizes = text.rpartition("=")
    words = sizes.split(",")
    if len(words) > LARGEST_AXES or not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"'{text}' is not a shape such as 1,3,224,224 or data=1,3,224,224")
    return name, tuple(positive(word.strip()) for word in words)


def add_parser_import(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("import", help="read a net from ONNX", description=_IMPORT)
    parser.add_argument("model", type=Path, metavar="FILE", help="the .onnx file")
    parser.add_argument("--output", type=Path, metavar="NAME", help="path of both files without suffix")
    parser.add_argument(
        "--batch", type=positive, default=1, metavar="N", help="batch size if the file does not fix it (1)"
    )
    parser.add_argument(
        "--shape", type=input_shape, action="append", default=[], metavar="[INPUT=]N,C,H,W",
        help="shape of an input, if the file does not fix it",
    )  # fmt: skip
    parser.add_argument("--fold", action="store_true", help="merge BatchNorm and Scale into the layers before them")
    parser.add_argument("--no-check", action="store_true", help="do not compare net and file")
    add_overwrite_flag(parser)


def run_import(args: argparse.Namespace) -> int:
    """Write both files; print their contents and the largest difference.

    Raises:
        CaffepyError: the file cannot be used, or the difference is too large.
    """
    from caffepy.export.onnx.libraries import has_runtime, require_onnx

    require_onnx("to read ONNX files")
    from caffepy.export.onnx_import.read import build_imported, check_imported, imported_paths, write_imported
    from caffepy.utils.files import check_output

    base = args.output or (args.model.with_suffix("") if args.model.name else args.model)
    if base.is_dir():
        raise ConfigError(f"{base} is a folder; give --output a path without suffix, e.g. {base / args.model.stem}")
    param, net = build_imported(args.model, base.name, args.batch, dict(args.shape), args.fold)
    for path in imported_paths(base):
        check_output(path, args.overwrite, [args.model])

    def compare(loaded: Net) -> None:
        for one in check_imported(args.model, loaded):
            print(one)

    check = None
    if args.no_check:
        print("not compared, because of --no-check")
    elif not has_runtime():
        print(f"not compared: onnxruntime is not installed ({install_command('onnx')})")
    else:
        check = compare
    paths = write_imported(base, param, net, check)
    print(f"{paths[0]}: {len(param.layer)} layers; {paths[1]}: {sum(len(layer.blobs) for layer in net.layers)} blobs")
    return 0

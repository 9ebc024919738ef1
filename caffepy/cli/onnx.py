"""`caffepy export` and `caffepy import`: conversion of nets to and from ONNX, checked by running both."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_dialect_option, add_state_options
from caffepy.errors import ConfigError
from caffepy.installation import install_command
from caffepy.options.types import file_list, positive

if TYPE_CHECKING:
    from onnx import ModelProto

    from caffepy.net import Net

_EXPORT = """\
Write a net with its weights as an ONNX file. Net and file are run on the same random input (the file by onnxruntime),
and the largest difference is printed; above 1e-4 of the output's largest value nothing is written.

  caffepy export deploy.prototxt net.caffemodel net.onnx
  caffepy export deploy.prototxt net.caffemodel net.onnx --batch dynamic --fold"""

OPSETS = (13, 17, 21)
"""Oldest, default and newest operator version, as in caffepy.onnx.export.graph, which needs onnx."""


def batch_size(text: str) -> int | str:
    """Parse an integer of at least 1, or ``dynamic``."""
    return text if text == "dynamic" else positive(text)


def add_parser_export(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("export", help="write a net as ONNX", description=_EXPORT)
    parser.add_argument("model", type=Path, metavar="NET", help="the net's prototxt; a deploy net, with Input layers")
    parser.add_argument("weights", type=file_list, metavar="WEIGHTS", help=".caffemodel files, separated by commas")
    parser.add_argument("output", type=Path, metavar="OUT", help="the .onnx file to write")
    parser.add_argument(
        "--opset", type=positive, default=OPSETS[1], metavar="N",
        help=f"version of ONNX's operators, {OPSETS[0]} to {OPSETS[2]} (default {OPSETS[1]})",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=batch_size, metavar="N", help="the first axis of all inputs, or 'dynamic' for any batch"
    )
    parser.add_argument(
        "--phase", type=str.upper, choices=("TRAIN", "TEST"), default="TEST", help="the phase to export"
    )
    parser.add_argument("--fold", action="store_true", help="merge BatchNorm and Scale into the layers before them")
    parser.add_argument("--no-check", action="store_true", help="do not compare net and file")
    add_state_options(parser)
    add_dialect_option(parser)


def run_export(args: argparse.Namespace) -> int:
    """Write the file; print its contents and the largest difference.

    Raises:
        CaffepyError: the files cannot be used, or the difference is too large.
    """
    from caffepy.files import atomic_write
    from caffepy.onnx.libraries import has_runtime, require_onnx

    require_onnx("to write ONNX files")
    if not args.no_check and not has_runtime():
        raise ConfigError("onnxruntime, needed to check the file, is not installed: "
                          f"{install_command('onnx')}, or give --no-check")  # fmt: skip
    from caffepy.onnx.export.write import serialised

    net, model = _model(args)
    content = serialised(model)
    if not args.no_check:
        _check(net, content, args.batch == "dynamic")
    with atomic_write(args.output) as file:
        file.write(content)
    print(f"{args.output}: {len(model.graph.node)} nodes, opset {args.opset}, {len(content)} bytes")
    return 0


def _model(args: argparse.Namespace) -> tuple[Net, ModelProto]:
    from caffepy.onnx.export.prepare import Settings, build, open_for_export, varying_axes
    from caffepy.onnx.export.write import to_model
    from caffepy.onnx.fold import fold_batch_norms, with_parameters
    from caffepy.proto import caffe_pb2

    dynamic = args.batch == "dynamic"
    batch = None if dynamic else args.batch
    settings = Settings(caffe_pb2.Phase.Value(args.phase), args.level, args.stage, batch)
    net, param = open_for_export(args.model, args.weights, settings)
    source = net
    if args.fold:
        param = fold_batch_norms(with_parameters(param, net), net.context.nvidia)
        source = build(param, net.backend, args.model, net.context.dialect)
        source.copy_trained_layers_from(param, "the folded net")
    return net, to_model(source, args.opset, varying_axes(param, args.model) if dynamic else None)


def _check(net: Net, content: bytes, dynamic: bool) -> None:
    """Compare the outputs and print the difference; if the batch is dynamic, also for another batch size."""
    from caffepy.onnx.check import compare, larger_batch, random_inputs, refuse_large, run_net
    from caffepy.onnx.libraries import run_model

    inputs = random_inputs(net)
    for feeds in [inputs, larger_batch(inputs)] if dynamic else [inputs]:
        differences = compare(run_model(content, feeds), run_net(net, feeds))
        for one in differences:
            print(one)
        refuse_large(differences)


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


def run_import(args: argparse.Namespace) -> int:
    """Write both files; print their contents and the largest difference.

    Raises:
        CaffepyError: the file cannot be used, or the difference is too large.
    """
    from caffepy.onnx.libraries import has_runtime, require_onnx

    require_onnx("to read ONNX files")
    from caffepy.onnx.importer.read import build_imported, check_imported, write_imported

    base = args.output or (args.model.with_suffix("") if args.model.name else args.model)
    if base.is_dir():
        raise ConfigError(f"{base} is a folder; give --output a path without suffix, e.g. {base / args.model.stem}")
    param, net = build_imported(args.model, base.name, args.batch, dict(args.shape), args.fold)

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

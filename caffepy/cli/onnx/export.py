"""`caffepy export`: a net with its weights as an ONNX file, compared with the net by running both."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser, add_dialect_option, add_state_options
from caffepy.errors import ConfigError
from caffepy.options.types import file_list, positive

if TYPE_CHECKING:
    from onnx import ModelProto

    from caffepy.net import Net

_DESCRIPTION = """\
Write a net with its weights as an ONNX file. Net and file are run on the same random input (the file by onnxruntime),
and the largest difference is printed; above 1e-4 of the output's largest value nothing is written.

  caffepy export deploy.prototxt net.caffemodel net.onnx
  caffepy export deploy.prototxt net.caffemodel net.onnx --batch dynamic --fold"""

OPSETS = (13, 17, 21)
"""Oldest, default and newest version of the operators; those of caffepy.onnx.export.graph, which needs onnx."""


def batch_size(text: str) -> int | str:
    """A whole number of at least 1, or ``dynamic``."""
    return text if text == "dynamic" else positive(text)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("export", help="write a net as ONNX", description=_DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="NET", help="the net's prototxt; a deploy net, with Input layers")
    parser.add_argument("weights", type=file_list, metavar="WEIGHTS", help=".caffemodel files, divided by commas")
    parser.add_argument("output", type=Path, metavar="OUT", help="the .onnx file to write")
    parser.add_argument(
        "--opset", type=positive, default=OPSETS[1], metavar="N",
        help=f"version of ONNX's operators, {OPSETS[0]} to {OPSETS[2]} (default {OPSETS[1]})",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=batch_size, metavar="N", help="the first axis of all inputs, or 'dynamic' for any batch"
    )
    parser.add_argument(
        "--phase", type=str.upper, choices=("TRAIN", "TEST"), default="TEST", help="whose layers are taken"
    )
    parser.add_argument("--fold", action="store_true", help="merge BatchNorm and Scale into the layers before them")
    parser.add_argument("--no-check", action="store_true", help="do not compare net and file")
    add_state_options(parser)
    add_dialect_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file; print what it holds and how far it differs.

    Raises:
        CaffepyError: whatever is wrong with the files; a difference that is too large.
    """
    from caffepy.files import atomic_write
    from caffepy.onnx.libraries import has_runtime, require_onnx

    require_onnx("to write ONNX files")
    if not args.no_check and not has_runtime():
        raise ConfigError("onnxruntime, which the file is compared by, is not installed: pip install 'caffepy[onnx]', "
                          "or give --no-check")  # fmt: skip
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
    """Print how far the outputs differ, for any batch also with one image more."""
    from caffepy.onnx.check import compare, larger_batch, random_inputs, refuse_large, run_net
    from caffepy.onnx.libraries import run_model

    inputs = random_inputs(net)
    for feeds in [inputs, larger_batch(inputs)] if dynamic else [inputs]:
        differences = compare(run_model(content, feeds), run_net(net, feeds))
        for one in differences:
            print(one)
        refuse_large(differences)

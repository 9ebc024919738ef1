"""`caffepy export`: nets as ONNX files or PyTorch modules, checked by running both, and weights in other formats."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.cli.options import Parser, add_dialect_option, add_overwrite_flag, add_state_options
from caffepy.errors import ConfigError, RunError, printable
from caffepy.utils.installation import install_command
from caffepy.utils.options import file_list, positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from caffepy.formats.proto import caffe_pb2
    from caffepy.net import Net

    Arrays = Mapping[str, NDArray[Any]]

_DESCRIPTION = """\
Write a net with its weights as an ONNX file, as a PyTorch module (OUT.py with OUT.safetensors), or write its weights
alone as .safetensors, .caffemodel or .caffemodel.h5. Net and export are run on the same random input (by onnxruntime or
PyTorch), and the largest difference is printed; above a limit, relative to the output's largest value, nothing is
written: 1e-4 for ONNX, 1e-5 for PyTorch.

  caffepy export deploy.prototxt net.caffemodel net.onnx --batch dynamic --fold
  caffepy export deploy.prototxt net.caffemodel net.py
  caffepy export deploy.prototxt net.caffemodel net.safetensors"""

TARGETS = {".onnx": "onnx", ".py": "torch", ".safetensors": "weights", ".caffemodel": "weights", ".h5": "weights"}
"""What --to is by default, by the suffix of OUT."""
OPSETS = (13, 17, 21)
"""Oldest, default and newest operator version, as in caffepy.export.onnx.graph, which needs onnx."""
HALF_LIMIT = 0.01
"""Tolerance of the outputs with float16 weights, relative to the output's largest absolute value."""


def batch_size(text: str) -> int | str:
    """Parse an integer of at least 1, or ``dynamic``."""
    return text if text == "dynamic" else positive(text)


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("export", help="write a net as ONNX or for PyTorch", description=_DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="NET", help="the net's prototxt; a deploy net, with Input layers")
    parser.add_argument("weights", type=file_list, metavar="WEIGHTS", help="files of weights, separated by commas")
    parser.add_argument("output", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument(
        "--to", choices=("onnx", "torch", "weights"),
        help="the format: an ONNX file, a PyTorch module, or weights (default: by the suffix of OUT, else onnx)",
    )  # fmt: skip
    parser.add_argument(
        "--opset", type=positive, metavar="N",
        help=f"version of ONNX's operators, {OPSETS[0]} to {OPSETS[2]} (default {OPSETS[1]})",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=batch_size, metavar="N", help="the first axis of all inputs, or 'dynamic' for any batch"
    )
    parser.add_argument(
        "--phase", type=str.upper, choices=("TRAIN", "TEST"), default="TEST", help="the phase to export"
    )
    parser.add_argument("--fold", action="store_true", help="merge BatchNorm and Scale into the layers before them")
    parser.add_argument(
        "--half", action="store_true",
        help=f"store weights as float16; fails if an output changes by more than {HALF_LIMIT:g} of its largest value",
    )  # fmt: skip
    parser.add_argument("--no-check", action="store_true", help="do not compare net and export")
    add_overwrite_flag(parser)
    add_state_options(parser)
    add_dialect_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the files; print their contents and the largest difference.

    Raises:
        CaffepyError: the files cannot be used, or the difference is too large.
    """
    target = args.to or TARGETS.get(args.output.suffix, "onnx")
    if args.opset is not None and target != "onnx":
        raise ConfigError(f"--opset is for ONNX, and --to is {target}; leave it out")
    if target == "torch":
        return _export_torch(args)
    if target == "onnx":
        return _export_onnx(args)
    return _export_weights(args)


def _export_weights(args: argparse.Namespace) -> int:
    from caffepy.formats.caffemodel import write_caffemodel

    if TARGETS.get(args.output.suffix) != "weights":
        raise ConfigError(f"{args.output}: weights are written as .safetensors, .caffemodel or .caffemodel.h5")
    if args.half:
        raise ConfigError("--half is for ONNX and PyTorch: Caffe's weights are float32; leave it out")
    _check_output(args, args.output)
    net, _ = _open(args)
    if args.fold:
        raise ConfigError("--fold changes the layers that weights belong to; leave it out")
    write_caffemodel(args.output, net.name, net.layers)
    blobs = [blob for layer in net.layers for blob in layer.blobs]
    print(f"{args.output}: {len(blobs)} blobs, {sum(blob.count for blob in blobs)} numbers")
    return 0


# -- nets ----------------------------------------------------------------------------------------------


def _open(args: argparse.Namespace) -> tuple[Net, caffe_pb2.NetParameter]:
    """The net with its weights, and its message."""
    from caffepy.export.onnx.prepare import Settings, open_for_export
    from caffepy.formats.proto import caffe_pb2

    batch = None if args.batch == "dynamic" else args.batch
    settings = Settings(caffe_pb2.Phase.Value(args.phase), args.level, args.stage, batch)
    return open_for_export(args.model, args.weights, settings)


def _sources(args: argparse.Namespace) -> tuple[Net, Net, caffe_pb2.NetParameter]:
    """The net as read; the net to export, folded and rounded as the options say; and the message of the latter."""
    from caffepy.export.onnx.fold import fold_batch_norms, with_parameters
    from caffepy.export.onnx.prepare import build, round_to_half

    net, param = _open(args)
    source = net
    if args.fold or args.half:
        param = with_parameters(param, net)
        if args.fold:
            param = fold_batch_norms(param, net.context.nvidia)
        source = build(param, net.backend, args.model, net.context.dialect)
        source.copy_trained_layers_from(param, "the changed net")
    if args.half:
        round_to_half(source)
    return net, source, param


def _check_output(args: argparse.Namespace, *paths: Path) -> None:
    from caffepy.utils.files import check_output

    for path in paths:
        check_output(path, args.overwrite, (args.model, *args.weights))


def _check(
    net: Net,
    source: Net,
    args: argparse.Namespace,
    run_export: Callable[[Arrays], Arrays],
    run_alone: Callable[[Net, Arrays], Arrays],
    limit: float,
) -> None:
    """Compare the export with the net and print the differences; if the batch is dynamic, also for a larger batch.

    With --half the export is compared with the rounded net, and the rounded net with the net. `run_alone` exports and
    runs a net of one layer, for layers whose branches the net's inputs may not reach.
    """
    from caffepy.export.onnx.check import (
        compare,
        difference,
        larger_batch,
        layers_alone,
        random_inputs,
        refuse_large,
        run_net,
    )

    inputs = random_inputs(net)
    for feeds in [inputs, larger_batch(inputs)] if args.batch == "dynamic" else [inputs]:
        wanted = run_net(net, feeds)
        rounded = run_net(source, feeds) if args.half else wanted
        differences = compare(run_export(feeds), rounded)
        for one in differences:
            print(one)
        refuse_large(differences, limit)
        for name in wanted if args.half else ():
            if rounded[name].shape != wanted[name].shape:  # as many boxes as are found
                shapes = f"has the shape {rounded[name].shape}, not {wanted[name].shape}"
                print(f"float16 weights: output '{printable(name)}' {shapes}")
                continue
            change = difference(name, rounded[name], wanted[name])
            print(f"float16 weights: {change}")
            if not _finds_boxes(source, name):
                refuse_large([change], HALF_LIMIT, "export without --half")
    for alone, feeds in layers_alone(source):
        where = f"layer '{alone.name}' alone"
        try:
            differences = compare(run_alone(alone, feeds), run_net(alone, feeds))
            for one in differences:
                print(f"{where}: {one}")
            refuse_large(differences, limit)
        except RunError as error:
            raise RunError(f"{where}: {error}") from error


def _finds_boxes(net: Net, output: str) -> bool:
    """Whether an output's rows are found boxes, which a small change may reorder."""
    return any(node.layer.changes_shapes for node in net.nodes if net.outputs[output] in node.tops)


def _export_onnx(args: argparse.Namespace) -> int:
    from caffepy.export.onnx.libraries import has_runtime, require_onnx, run_model
    from caffepy.utils.files import atomic_write

    require_onnx("to write ONNX files")
    if not args.no_check and not has_runtime():
        raise ConfigError("onnxruntime, needed to check the file, is not installed: "
                          f"{install_command('onnx')}, or give --no-check")  # fmt: skip
    from caffepy.export.onnx.check import LIMIT
    from caffepy.export.onnx.prepare import varying_axes
    from caffepy.export.onnx.write import serialised, to_model

    _check_output(args, args.output)
    net, source, param = _sources(args)
    varying = varying_axes(param, args.model) if args.batch == "dynamic" else None
    opset = OPSETS[1] if args.opset is None else args.opset
    model = to_model(source, opset, varying, half=args.half)
    content = serialised(model)
    if not args.no_check:

        def run_alone(alone: Net, feeds: Arrays) -> Arrays:
            return run_model(serialised(to_model(alone, opset)), feeds)

        _check(net, source, args, lambda feeds: run_model(content, feeds), run_alone, LIMIT)
    with atomic_write(args.output) as file:
        file.write(content)
    print(f"{args.output}: {len(model.graph.node)} nodes, opset {opset}, {len(content)} bytes")
    return 0


def _export_torch(args: argparse.Namespace) -> int:
    from caffepy.export.onnx.prepare import as_half, varying_axes
    from caffepy.export.torch.check import LIMIT, require_torch, run_exported
    from caffepy.export.torch.write import to_torch
    from caffepy.formats.safetensors import SUFFIX, write_tensors

    if args.output.suffix != ".py":
        raise ConfigError(f"{args.output}: a PyTorch module is a .py file, with a {SUFFIX} file beside it; name one")
    if not args.no_check:
        require_torch("to check the module; or give --no-check")
    paths = [args.output, args.output.with_suffix(SUFFIX)]
    _check_output(args, *paths)
    net, source, param = _sources(args)
    text, parameters = to_torch(source, _varying_or_fixed(varying_axes, param, args))
    if args.half:
        parameters = {name: as_half(values) for name, values in parameters.items()}
    with tempfile.TemporaryDirectory(dir=args.output.parent, prefix=".caffepy-export-") as folder:

        def write(name: str, text: str, parameters: Arrays) -> list[Path]:
            files = [Path(folder) / name, (Path(folder) / name).with_suffix(SUFFIX)]
            files[0].write_text(text, encoding="utf-8")
            write_tensors(files[1], parameters)
            return files

        def run_alone(alone: Net, feeds: Arrays) -> Arrays:
            return run_exported(write(f"alone-{args.output.name}", *to_torch(alone))[0], feeds, list(alone.outputs))

        written = write(args.output.name, text, parameters)
        if not args.no_check:
            outputs = list(source.outputs)
            _check(net, source, args, lambda feeds: run_exported(written[0], feeds, outputs), run_alone, LIMIT)
        for new, path in zip(written, paths, strict=True):
            os.replace(new, path)
    print(f"{paths[0]}: {len(text.splitlines())} lines; {paths[1]}: {len(parameters)} tensors, "
          f"{paths[1].stat().st_size} bytes")  # fmt: skip
    return 0


def _varying_or_fixed(
    varying_axes: Callable[..., dict[str, list[bool]]], param: caffe_pb2.NetParameter, args: argparse.Namespace
) -> dict[str, Sequence[bool]]:
    """Which axes follow the batch; none, if the net has one batch only and the user does not want any."""
    from caffepy.errors import UserError

    try:
        return dict(varying_axes(param, args.model))
    except UserError:
        if args.batch == "dynamic":
            raise
        return {}

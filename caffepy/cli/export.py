"""Commands that convert nets: `caffepy export`, `caffepy quantize` and `caffepy import`.

`export` writes nets as ONNX files or PyTorch modules, checked by running both, and weights in other formats. `quantize`
writes a net as an ONNX model that computes with int8. `import` reads nets from ONNX, checked by running both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.cli.options import DialectOption, ReadsNets, StateOptions, overwrite_option
from caffepy.errors import ConfigError, DataError, RunError, UserError, printable
from caffepy.utils.installation import MissingExtraError, install_command
from caffepy.utils.options import argument, file_list, option, positive, switch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from caffepy.formats.proto import caffe_pb2
    from caffepy.net import Net

    Arrays = Mapping[str, NDArray[Any]]

# -- `caffepy export` ----------------------------------------------------------------------------------


TARGETS = {".onnx": "onnx", ".py": "torch", ".safetensors": "weights", ".caffemodel": "weights", ".h5": "weights"}
"""What --to is by default, by the suffix of OUT."""
OPSETS = (13, 17, 21)
"""Oldest, default and newest operator version, as in caffepy.export.onnx.write, which needs onnx."""
HALF_LIMIT = 0.01
"""Tolerance of the outputs with float16 weights, relative to the output's largest absolute value."""


def batch_size(text: str) -> int | str:
    """Parse an integer of at least 1, or ``dynamic``."""
    return text if text == "dynamic" else positive(text)


@dataclass(kw_only=True)
class ExportCommand(StateOptions, ReadsNets):
    """Write a net as ONNX or for PyTorch.

    Write a net with its weights as an ONNX file, as a PyTorch module (OUT.py with OUT.safetensors), or write its
    weights alone as .safetensors, .caffemodel or .caffemodel.h5. Net and export are run on the same random input (by
    onnxruntime or PyTorch), and the largest difference is printed; above a limit, relative to the output's largest
    value, nothing is written: 1e-4 for ONNX, 1e-5 for PyTorch.

      caffepy export deploy.prototxt net.caffemodel net.onnx --batch dynamic --fold
      caffepy export deploy.prototxt net.caffemodel net.py
      caffepy export deploy.prototxt net.caffemodel net.safetensors
    """

    model: Path = argument("the net's prototxt; a deploy net, with Input layers", Path, "NET")
    weights: list[Path] = argument("files of weights, separated by commas", file_list, "WEIGHTS")
    output: Path = argument("the file to write", Path, "OUT")
    to: str | None = option(
        "the format: an ONNX file, a PyTorch module, or weights (default: by the suffix of OUT, else onnx)",
        choices=("onnx", "torch", "weights"),
    )
    opset: int | None = option(
        f"version of ONNX's operators, {OPSETS[0]} to {OPSETS[2]} (default {OPSETS[1]})", positive
    )
    batch: int | str | None = option("the first axis of all inputs, or 'dynamic' for any batch", batch_size, "N")
    phase: str = option("the phase to export", str.upper, default="TEST", choices=("TRAIN", "TEST"))
    fold: bool = switch("merge BatchNorm and Scale into the layers before them")
    half: bool = switch(
        f"store weights as float16; fails if an output changes by more than {HALF_LIMIT:g} of its largest value"
    )
    no_check: bool = switch("do not compare net and export")
    overwrite: bool = overwrite_option()

    def run(self) -> int:
        """Write the files; print their contents and the largest difference.

        Raises:
            CaffepyError: the files cannot be used, or the difference is too large.
        """
        target = self.to or TARGETS.get(self.output.suffix, "onnx")
        if self.opset is not None and target != "onnx":
            raise ConfigError(f"--opset is for ONNX, and --to is {target}; leave it out")
        if target == "torch":
            return _export_torch(self)
        if target == "onnx":
            return _export_onnx(self)
        return _export_weights(self)


def _export_weights(args: ExportCommand) -> int:
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


def _open(args: ExportCommand) -> tuple[Net, caffe_pb2.NetParameter]:
    """The net with its weights, and its message."""
    from caffepy.export.prepare import Settings, open_for_export
    from caffepy.formats.proto import caffe_pb2

    batch = args.batch if isinstance(args.batch, int) else None
    settings = Settings(caffe_pb2.Phase.Value(args.phase), args.level, args.stage, batch)
    return open_for_export(args.model, args.weights, settings)


def _sources(args: ExportCommand) -> tuple[Net, Net, caffe_pb2.NetParameter]:
    """The net as read; the net to export, folded and rounded as the options say; and the message of the latter."""
    from caffepy.export.prepare import build, fold_batch_norms, round_to_half, with_parameters

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


def _check_output(args: ExportCommand, *paths: Path) -> None:
    from caffepy.utils.files import check_output

    for path in paths:
        check_output(path, args.overwrite, (args.model, *args.weights))


def _check(
    net: Net,
    source: Net,
    args: ExportCommand,
    run_export: Callable[[Arrays], Arrays],
    run_alone: Callable[[Net, Arrays], Arrays],
    limit: float,
) -> None:
    """Compare the export with the net and print the differences; if the batch is dynamic, also for a larger batch."""
    # With --half the export is compared with the rounded net, and the rounded net with the net. `run_alone` exports and
    # runs another net: one layer whose branches the net's inputs may not reach, or the layers before boxes.
    from caffepy.export.check import (
        compare,
        compare_outputs,
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
        differences = compare_outputs(run_export(feeds), rounded, source, feeds, run_alone, limit)
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


def _export_onnx(args: ExportCommand) -> int:
    from caffepy.export.onnx.libraries import Session, has_runtime, require_onnx
    from caffepy.utils.files import atomic_write

    require_onnx("to write ONNX files")
    if not args.no_check and not has_runtime():
        raise ConfigError(
            f"onnxruntime, needed to check the file, is not installed: {install_command('onnx')}, or give --no-check"
        )
    from caffepy.export.check import LIMIT
    from caffepy.export.onnx.write import run_as_onnx, serialised, to_model
    from caffepy.export.prepare import varying_axes

    _check_output(args, args.output)
    net, source, param = _sources(args)
    varying = varying_axes(param, args.model) if args.batch == "dynamic" else None
    opset = OPSETS[1] if args.opset is None else args.opset
    model = to_model(source, opset, varying, half=args.half)
    content = serialised(model)
    if not args.no_check:
        _check(net, source, args, Session(content).run, partial(run_as_onnx, opset=opset), LIMIT)
    with atomic_write(args.output) as file:
        file.write(content)
    print(f"{args.output}: {len(model.graph.node)} nodes, opset {opset}, {len(content)} bytes")
    return 0


def _export_torch(args: ExportCommand) -> int:
    from caffepy.export.prepare import as_half, varying_axes
    from caffepy.export.torch.write import LIMIT, Exported, require_torch, run_exported, to_torch
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
            _check(net, source, args, Exported(written[0], list(source.outputs)).run, run_alone, LIMIT)
        for new, path in zip(written, paths, strict=True):
            os.replace(new, path)
    print(
        f"{paths[0]}: {len(text.splitlines())} lines; {paths[1]}: {len(parameters)} tensors, "
        f"{paths[1].stat().st_size} bytes"
    )
    return 0


def _varying_or_fixed(
    varying_axes: Callable[..., dict[str, list[bool]]], param: caffe_pb2.NetParameter, args: ExportCommand
) -> dict[str, Sequence[bool]]:
    """Which axes follow the batch; none, if the net has one batch only and the user does not want any."""
    try:
        return dict(varying_axes(param, args.model))
    except UserError:
        if args.batch == "dynamic":
            raise
        return {}


# -- `caffepy quantize` --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class QuantizeCommand(DialectOption, ReadsNets):
    """Write a net as int8 ONNX.

    Write a net as an ONNX model that computes with int8 (QDQ format), by onnxruntime's static quantization. The ranges
    of activations come from images of the training set: from the TRAIN data layer of --like, or from --images, prepared
    as the deploy net's Input layer says. With --like, the accuracy of a classifier is printed before and after, on the
    TEST data layer.

      caffepy quantize deploy.prototxt net.caffemodel int8.onnx --like train_val.prototxt
      caffepy quantize deploy.prototxt net.caffemodel int8.onnx --images photos/ --samples 200
    """

    model: Path = argument("the deploy net's prototxt", Path, "NET")
    weights: list[Path] = argument("files of weights, separated by commas", file_list, "WEIGHTS")
    output: Path = argument("the .onnx file to write", Path, "OUT")
    like: Path | None = option("the train net, whose data layers give the images", Path)
    images: Path | None = option("a folder, a list or an image, in place of the train net's images", Path, "PATH")
    samples: int = option("images to calibrate with", positive, default=256)
    iterations: int = option("batches to score", positive, default=50)
    overwrite: bool = overwrite_option()

    def run(self) -> int:
        """Write the file; print the accuracy before and after. Return 1 if images of --images were left out.

        Raises:
            CaffepyError: the files cannot be used, no image can be read, or onnxruntime cannot quantize the net.
        """
        from caffepy.export.onnx.libraries import EXTRA, Session, has_runtime, require_onnx
        from caffepy.utils.files import atomic_write, check_output

        if (self.like is None) and (self.images is None):
            raise ConfigError("quantize needs images of the training set: --like train_val.prototxt or --images PATH")
        require_onnx("to quantize nets")
        if not has_runtime():
            raise MissingExtraError("onnxruntime", EXTRA, "to quantize nets")
        from caffepy.export.check import compare_outputs, difference, refuse_large, run_net
        from caffepy.export.onnx.quantize import quantize
        from caffepy.export.onnx.write import run_as_onnx, serialised, to_model
        from caffepy.export.prepare import (
            Settings,
            build,
            fold_batch_norms,
            open_for_export,
            varying_axes,
            with_parameters,
        )

        check_output(self.output, self.overwrite, filter(None, (self.model, *self.weights, self.like, self.images)))
        net, param = open_for_export(self.model, self.weights, Settings())
        folded = fold_batch_norms(with_parameters(param, net), net.context.nvidia)
        source = build(folded, net.backend, self.model, net.context.dialect)
        source.copy_trained_layers_from(folded, "the folded net")
        model = to_model(source, varying=varying_axes(folded, self.model))
        before = serialised(model)
        samples, status = _images(self, self.images, net) if self.images else (list(_samples(self, net)), 0)
        float_session = Session(before)
        own = run_net(net, samples[0])
        refuse_large(compare_outputs(float_session.run(samples[0]), own, net, samples[0], run_as_onnx))
        after = quantize(model, samples)
        with atomic_write(self.output) as file:
            file.write(after)
        print(f"{self.output}: {len(after)} bytes, {len(before)} before; calibrated with {len(samples)} images")
        int8_session = Session(after)
        wanted, found = float_session.run(samples[0]), int8_session.run(samples[0])
        for name in wanted:
            if found[name].shape == wanted[name].shape:  # a detector may find another number of boxes
                print(f"int8: {difference(name, found[name], wanted[name])}")
        if self.like is not None:
            _print_accuracy(self.like, self.iterations, net, float_session.run, int8_session.run)
        return status


def _samples(args: QuantizeCommand, net: Net) -> Iterator[Arrays]:
    """Yield --samples images of the training set, each as a batch of one."""
    from caffepy.export.onnx.quantize import open_data
    from caffepy.formats.proto import caffe_pb2

    count = 0
    assert args.like is not None  # without --images
    with open_data(args.like, caffe_pb2.TRAIN, net.inputs, net.backend, args.samples) as reader:
        while count < args.samples:
            inputs, _ = reader.batch()
            number = min(len(next(iter(inputs.values()))), args.samples - count)
            for index in range(number):
                yield {name: values[index : index + 1] for name, values in inputs.items()}
            count += number


def _images(args: QuantizeCommand, path: Path, net: Net) -> tuple[list[Arrays], int]:
    """Return the first readable images of --images, prepared as the Input layer says, and the exit status."""
    import numpy as np

    from caffepy.cli.output import Unreadable
    from caffepy.formats.paths import PathResolver
    from caffepy.infer.images import list_images
    from caffepy.infer.input_transform import ImagePreparation, has_preparation

    layer = next((node.layer.param for node in net.nodes if has_preparation(node.layer.param)), None)
    if layer is None or len(net.inputs) != 1:
        raise ConfigError(
            f"{args.model}: --images needs one Input layer that says how images become its values; 'caffepy deploy "
            "--like train_val.prototxt' writes its transform_param"
        )
    preparation = ImagePreparation(layer, net.blobs[layer.top[0]].shape, PathResolver(args.model))
    if path.suffix == ".npy":
        raise ConfigError(f"--images {path}: name a folder, a list or an image; arrays are not read")
    images = list_images([path])
    unreadable = Unreadable(image.name for image in images)
    samples: list[Arrays] = []
    for image in images:
        if len(samples) == args.samples:
            break
        assert isinstance(image.content, Path)
        try:
            samples.append({layer.top[0]: np.asarray(preparation(image.content))[None]})
        except DataError as error:
            unreadable.leave_out(image.name, error)
    unreadable.check()
    return samples, unreadable.exit_status


def _print_accuracy(like: Path, batches: int, net: Net, *runs: Callable[[Arrays], Arrays]) -> None:
    from caffepy.export.onnx.quantize import accuracies, open_data
    from caffepy.formats.proto import caffe_pb2

    output = next(iter(net.outputs))
    try:
        with open_data(like, caffe_pb2.TEST, net.inputs, net.backend, batches) as reader:
            (before, after), count = accuracies(runs, reader, batches, output)
    except ConfigError as error:  # no classifier, or no data to test with
        print(f"accuracy: not measured: {error}")
        return
    print(f"accuracy on {count} test images: {before:.4f} before, {after:.4f} after")


# -- `caffepy import` ----------------------------------------------------------------------------------


LARGEST_AXES = 8


def input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse ``1,3,224,224``, for a model's only input, or ``name=1,3,224,224``."""
    name, _, sizes = text.rpartition("=")
    words = sizes.split(",")
    if len(words) > LARGEST_AXES or not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"'{text}' is not a shape such as 1,3,224,224 or data=1,3,224,224")
    return name, tuple(positive(word.strip()) for word in words)


@dataclass(kw_only=True)
class ImportCommand(ReadsNets):
    """Read a net from ONNX.

    Write an ONNX file as NAME.prototxt and NAME.caffemodel. These are loaded and run on the same random input as the
    file (by onnxruntime, where it is installed), and the largest difference is printed; above 1e-4 of the output's
    largest value nothing is written. Unsupported nodes are listed together.

      caffepy import resnet18.onnx
      caffepy import detector.onnx --output models/detector --shape 1,3,320,320 --fold
    """

    model: Path = argument("the .onnx file", Path)
    output: Path | None = option("path of both files without suffix", Path, "NAME")
    batch: int = option("batch size if the file does not fix it", positive, default=1)
    shape: list[tuple[str, tuple[int, ...]]] = option(
        "shape of an input, if the file does not fix it", input_shape, "[INPUT=]N,C,H,W", default=[], repeatable=True
    )
    fold: bool = switch("merge BatchNorm and Scale into the layers before them")
    no_check: bool = switch("do not compare net and file")
    overwrite: bool = overwrite_option()

    def run(self) -> int:
        """Write both files; print their contents and the largest difference.

        Raises:
            CaffepyError: the file cannot be used, or the difference is too large.
        """
        from caffepy.export.onnx.libraries import has_runtime, require_onnx

        require_onnx("to read ONNX files")
        from caffepy.export.onnx_import.read import build_imported, check_imported, imported_paths, write_imported
        from caffepy.utils.files import check_output

        base = self.output or (self.model.with_suffix("") if self.model.name else self.model)
        if base.is_dir():
            raise ConfigError(f"{base} is a folder; give --output a path without suffix, e.g. {base / self.model.stem}")
        param, net = build_imported(self.model, base.name, self.batch, dict(self.shape), self.fold)
        for path in imported_paths(base):
            check_output(path, self.overwrite, [self.model])

        def compare(loaded: Net) -> None:
            for one in check_imported(self.model, loaded):
                print(one)

        check = None
        if self.no_check:
            print("not compared, because of --no-check")
        elif not has_runtime():
            print(f"not compared: onnxruntime is not installed ({install_command('onnx')})")
        else:
            check = compare
        paths = write_imported(base, param, net, check)
        print(
            f"{paths[0]}: {len(param.layer)} layers; {paths[1]}: {sum(len(layer.blobs) for layer in net.layers)} blobs"
        )
        return 0

"""`caffepy quantize`: a net as an ONNX model that computes with int8."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.cli.options import Parser, add_dialect_option, add_overwrite_flag
from caffepy.errors import ConfigError, DataError
from caffepy.utils.options import file_list, positive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from caffepy.net import Net

    Arrays = Mapping[str, NDArray[Any]]

_DESCRIPTION = """\
Write a net as an ONNX model that computes with int8 (QDQ format), by onnxruntime's static quantization. The ranges of
activations come from images of the training set: from the TRAIN data layer of --like, or from --images, prepared as the
deploy net's Input layer says. With --like, the accuracy of a classifier is printed before and after, on the TEST data
layer.

  caffepy quantize deploy.prototxt net.caffemodel int8.onnx --like train_val.prototxt
  caffepy quantize deploy.prototxt net.caffemodel int8.onnx --images photos/ --samples 200"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("quantize", help="write a net as int8 ONNX", description=_DESCRIPTION)
    parser.add_argument("model", type=Path, metavar="NET", help="the deploy net's prototxt")
    parser.add_argument("weights", type=file_list, metavar="WEIGHTS", help="files of weights, separated by commas")
    parser.add_argument("output", type=Path, metavar="OUT", help="the .onnx file to write")
    parser.add_argument("--like", type=Path, metavar="FILE", help="the train net, whose data layers give the images")
    parser.add_argument(
        "--images", type=Path, metavar="PATH", help="a folder, a list or an image, in place of the train net's images"
    )
    parser.add_argument("--samples", type=positive, default=256, metavar="N", help="images to calibrate with (256)")
    parser.add_argument("--iterations", type=positive, default=50, metavar="N", help="batches to score (50)")
    add_overwrite_flag(parser)
    add_dialect_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file; print the accuracy before and after. Return 1 if images of --images were left out.

    Raises:
        CaffepyError: the files cannot be used, no image can be read, or onnxruntime cannot quantize the net.
    """
    from caffepy.export.onnx.libraries import EXTRA, Session, has_runtime, require_onnx
    from caffepy.utils.files import atomic_write, check_output
    from caffepy.utils.installation import MissingExtraError

    if (args.like is None) and (args.images is None):
        raise ConfigError("quantize needs images of the training set: --like train_val.prototxt or --images PATH")
    require_onnx("to quantize nets")
    if not has_runtime():
        raise MissingExtraError("onnxruntime", EXTRA, "to quantize nets")
    from caffepy.export.onnx.check import compare, difference, refuse_large, run_net
    from caffepy.export.onnx.fold import fold_batch_norms, with_parameters
    from caffepy.export.onnx.prepare import Settings, build, open_for_export, varying_axes
    from caffepy.export.onnx.quantize import quantize
    from caffepy.export.onnx.write import serialised, to_model

    check_output(args.output, args.overwrite, filter(None, (args.model, *args.weights, args.like, args.images)))
    net, param = open_for_export(args.model, args.weights, Settings())
    folded = fold_batch_norms(with_parameters(param, net), net.context.nvidia)
    source = build(folded, net.backend, args.model, net.context.dialect)
    source.copy_trained_layers_from(folded, "the folded net")
    model = to_model(source, varying=varying_axes(folded, args.model))
    before = serialised(model)
    samples, status = (list(_samples(args, net)), 0) if args.images is None else _images(args, net)
    float_session = Session(before)
    refuse_large(compare(float_session.run(samples[0]), run_net(net, samples[0])))
    after = quantize(model, samples)
    with atomic_write(args.output) as file:
        file.write(after)
    print(f"{args.output}: {len(after)} bytes, {len(before)} before; calibrated with {len(samples)} images")
    int8_session = Session(after)
    wanted, found = float_session.run(samples[0]), int8_session.run(samples[0])
    for name in wanted:
        if found[name].shape == wanted[name].shape:  # a detector may find another number of boxes
            print(f"int8: {difference(name, found[name], wanted[name])}")
    if args.like is not None:
        _print_accuracy(args, net, float_session.run, int8_session.run)
    return status


def _samples(args: argparse.Namespace, net: Net) -> Iterator[Arrays]:
    """Yield --samples images of the training set, each as a batch of one.

    Raises:
        ConfigError: there are none.
    """
    from caffepy.export.onnx.quantize import open_data
    from caffepy.formats.proto import caffe_pb2

    count = 0
    with open_data(args.like, caffe_pb2.TRAIN, net.inputs, net.backend, args.samples) as reader:
        while count < args.samples:
            inputs, _ = reader.batch()
            number = min(len(next(iter(inputs.values()))), args.samples - count)
            for index in range(number):
                yield {name: values[index : index + 1] for name, values in inputs.items()}
            count += number


def _images(args: argparse.Namespace, net: Net) -> tuple[list[Arrays], int]:
    """Return the first readable images of --images, prepared as the Input layer says, and the exit status."""
    import numpy as np

    from caffepy.cli.unreadable import Unreadable
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
    if args.images.suffix == ".npy":
        raise ConfigError(f"--images {args.images}: name a folder, a list or an image; arrays are not read")
    images = list_images([args.images])
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


def _print_accuracy(args: argparse.Namespace, net: Net, *runs: Callable[[Arrays], Arrays]) -> None:
    from caffepy.export.onnx.quantize import accuracies, open_data
    from caffepy.formats.proto import caffe_pb2

    output, batches = next(iter(net.outputs)), args.iterations
    try:
        with open_data(args.like, caffe_pb2.TEST, net.inputs, net.backend, batches) as reader:
            (before, after), count = accuracies(runs, reader, batches, output)
    except ConfigError as error:  # no classifier, or no data to test with
        print(f"accuracy: not measured: {error}")
        return
    print(f"accuracy on {count} test images: {before:.4f} before, {after:.4f} after")

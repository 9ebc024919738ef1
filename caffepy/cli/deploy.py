"""`caffepy deploy`: the deploy net of a training net."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.log import quiet_net
from caffepy.cli.options import Parser
from caffepy.errors import DataError, SnapshotError, one_line
from caffepy.options.types import name_list, positive, record_shape

if TYPE_CHECKING:
    from caffepy.proto import caffe_pb2

_DESCRIPTION = """\
Make a deploy net from a training net: Input layers replace data layers, Softmax or Sigmoid replaces the losses with
that activation. Labels, accuracies, auxiliary classifiers, rates and fillers are removed. The result is written to
stdout, or to --output.

  caffepy deploy train_val.prototxt deploy.prototxt --weights model.caffemodel
  caffepy deploy lenet_train_test.prototxt --input data=1,28,28 --batch 16

The shape of an input is read from --input, crop_size, resize_param, new_height and new_width, or from the data if they
exist."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("deploy", help="make a deploy net from a training net", description=_DESCRIPTION)
    parser.add_argument("net", type=Path, metavar="NET.prototxt", help="the training net")
    parser.add_argument("output", type=Path, nargs="?", metavar="DEPLOY.prototxt", help="write here, not to stdout")
    parser.add_argument("--output", type=Path, metavar="FILE", dest="named_output", help="the same")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="records in a batch (default: 1)")
    parser.add_argument(
        "--input", type=_named_shape, action="append", default=[], metavar="NAME=C,H,W", dest="shapes",
        help="shape of one record of an input; repeat for several inputs",
    )  # fmt: skip
    parser.add_argument(
        "--outputs",
        type=name_list,
        default=[],
        metavar="LIST",
        help="output blobs (default: the predictions of its losses)",
    )
    parser.add_argument("--weights", type=Path, metavar="FILE", help="check that these weights fit the deploy net")


def run(args: argparse.Namespace) -> int:
    """Write the deploy net.

    Raises:
        ConfigError: the net cannot be read, has no outputs, or the shape of an input is unknown.
        SnapshotError: the weights do not fit.
        RunError: the file cannot be written.
    """
    from caffepy.config.load import read_net
    from caffepy.files import atomic_write
    from caffepy.net.deploy import deploy_net, plan_deploy

    output = args.output or args.named_output
    train = read_net(args.net)
    shapes = _shapes_of_data(train, args.net) | dict(args.shapes)
    net = deploy_net(train, plan_deploy(train, shapes, args.batch, args.outputs))
    with quiet_net():
        layers = _check(net, args.weights)
    text = "".join(_lines(train, net, args.net))
    if output is None:
        print(text, end="")
        return 0
    with atomic_write(output) as file:
        file.write(text.encode())
    fitting = f"; {layers} layers take their weights from {args.weights}" if args.weights else ""
    print(f"{output}: {len(net.layer)} layers{fitting}")
    return 0


def _named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, shape = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not an input with its shape, such as data=3,224,224")
    return name, record_shape(shape)


def _shapes_of_data(train: caffe_pb2.NetParameter, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of one record by top, for data layers whose data exist."""
    from caffepy.backend.meta import MetaBackend
    from caffepy.config.dialect import choose_dialect
    from caffepy.config.paths import PathResolver
    from caffepy.layers import LayerContext
    from caffepy.net.memory_plan import read_sample_shapes
    from caffepy.proto import caffe_pb2

    dialect = choose_dialect([train], lambda *line: None)
    context = LayerContext(MetaBackend(), phase=caffe_pb2.TEST, resolve=PathResolver(path), dialect=dialect)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in train.layer:
        try:
            single = caffe_pb2.NetParameter(layer=[layer])
            shapes |= read_sample_shapes(single, context) if not layer.bottom else {}
        except DataError:
            continue
    return shapes


def _check(net: caffe_pb2.NetParameter, weights: Path | None) -> int:
    """Check the deploy net by building it; return the number of layers with weights in the file.

    Raises:
        SnapshotError: the weights do not fit, or the weights of a layer are missing.
        CaffepyError: the net cannot be built.
    """
    from caffepy.backend import create_backend
    from caffepy.backend.meta import MetaBackend
    from caffepy.layers import LayerContext
    from caffepy.net import Net
    from caffepy.proto import caffe_pb2
    from caffepy.snapshot.caffemodel import read_caffemodel

    backend = MetaBackend() if weights is None else create_backend(None)
    built = Net(net, LayerContext(backend, phase=caffe_pb2.TEST))
    try:
        if weights is None:
            return 0
        taken = built.copy_trained_layers_from(read_caffemodel(weights), str(weights))
        lacking = [layer.name for layer in built.layers if layer.blobs and layer.name not in taken]
        if lacking:
            raise SnapshotError(
                f"{weights}: has no weights for layer '{lacking[0]}' ({len(lacking)} layers lack theirs)"
            )
        return len(taken)
    finally:
        built.close()


def _lines(train: caffe_pb2.NetParameter, net: caffe_pb2.NetParameter, path: Path) -> Iterator[str]:
    """Yield the prototxt, with the preparation of the inputs as comments at the top."""
    from google.protobuf import text_format

    yield f"# {one_line(path.name)} for predictions.\n"
    inputs = {layer.name for layer in net.layer if layer.type == "Input"}
    said = set()
    for layer in train.layer:
        for line in _preparation(layer) if inputs & set(layer.top) and not layer.bottom else ():
            if line not in said:
                said.add(line)
                yield f"# {one_line(line)}\n"
    yield text_format.MessageToString(net, as_utf8=True)


def _preparation(layer: caffe_pb2.LayerParameter) -> Iterator[str]:
    """Yield the data layer's transformations in words."""
    transform = layer.transform_param
    if transform.mean_value:
        yield f"'{layer.top[0]}': subtract {', '.join(f'{value:g}' for value in transform.mean_value)} per channel"
    if transform.mean_file:
        yield f"'{layer.top[0]}': subtract the mean image {transform.mean_file}"
    if transform.scale != 1:
        yield f"'{layer.top[0]}': multiply by {transform.scale:.9g}{', after that' if transform.mean_value else ''}"

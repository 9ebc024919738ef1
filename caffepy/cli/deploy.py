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
Make a deploy net of a training net: Input in place of the data layers, Softmax or Sigmoid in place of the losses that
begin with them, and neither labels nor accuracies, auxiliary classifiers, rates or fillers. It goes to stdout, or to
--output.

  caffepy deploy train_val.prototxt deploy.prototxt --weights model.caffemodel
  caffepy deploy lenet_train_test.prototxt --input data=1,28,28 --batch 16

The shape of an input follows from crop_size, from resize_param or new_height and new_width, from the data where they
are there, or from --input."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("deploy", help="make a deploy net of a training net", description=_DESCRIPTION)
    parser.add_argument("net", type=Path, metavar="NET.prototxt", help="the training net")
    parser.add_argument("output", type=Path, nargs="?", metavar="DEPLOY.prototxt", help="write here, not to stdout")
    parser.add_argument("--output", type=Path, metavar="FILE", dest="named_output", help="the same")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="records of a batch (default: 1)")
    parser.add_argument(
        "--input", type=_named_shape, action="append", default=[], metavar="NAME=C,H,W", dest="shapes",
        help="shape of one record of an input; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--outputs",
        type=name_list,
        default=[],
        metavar="LIST",
        help="blobs that the net gives, not those of its losses",
    )
    parser.add_argument("--weights", type=Path, metavar="FILE", help="check that these weights fit the deploy net")


def run(args: argparse.Namespace) -> int:
    """Write the deploy net.

    Raises:
        ConfigError: the net cannot be read, has no outputs, or the shape of an input is not known.
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
        raise argparse.ArgumentTypeError(f"'{text}' is no input with its shape such as data=3,224,224")
    return name, record_shape(shape)


def _shapes_of_data(train: caffe_pb2.NetParameter, path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of one record, by blob, of those data layers whose data are there."""
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
    """Build the deploy net, so that what is written is known to work; the number of layers that take the weights.

    Raises:
        SnapshotError: the weights do not fit, or a layer has none.
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
    """The prototxt, headed by how its inputs are to be prepared."""
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
    """What the data layer did to its records."""
    transform = layer.transform_param
    if transform.mean_value:
        yield f"'{layer.top[0]}': subtract {', '.join(f'{value:g}' for value in transform.mean_value)} per channel"
    if transform.mean_file:
        yield f"'{layer.top[0]}': subtract the mean image {transform.mean_file}"
    if transform.scale != 1:
        yield f"'{layer.top[0]}': multiply by {transform.scale:.9g}{', after that' if transform.mean_value else ''}"

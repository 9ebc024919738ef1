"""`caffepy deploy`: the deploy net of a training net."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import ReadsNets, overwrite_option
from caffepy.cli.output import quiet_net
from caffepy.errors import ConfigError, DataError, SnapshotError, one_line, printable
from caffepy.utils.options import argument, name_list, option, positive, record_shape

if TYPE_CHECKING:
    from caffepy.formats.proto import caffe_pb2


def _named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, shape = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not an input with its shape, such as data=3,224,224")
    return name, record_shape(shape)


@dataclass(kw_only=True)
class DeployCommand(ReadsNets):
    """Make a deploy net from a training net.

    Make a deploy net from a training net: Input layers replace data layers, Softmax or Sigmoid replaces the losses with
    that activation. Labels, accuracies, auxiliary classifiers, rates and fillers are removed. An Input layer gets the
    fields (transform_param, image_data_param) that say how classify, detect and caffepy.load prepare images. The result
    is written to stdout, or to --output.

      caffepy deploy train_val.prototxt deploy.prototxt --weights model.caffemodel
      caffepy deploy lenet_train_test.prototxt --input data=1,28,28 --batch 16
      caffepy deploy old_deploy.prototxt deploy.prototxt --like train_val.prototxt

    The shape of an input is read from --input, crop_size, resize_param, new_height and new_width, or from the data if
    they exist. DummyData, Parameter and Python layers stay, unless --input names their top. With --like, NET is a
    deploy net that stays as it is, except for the preparation of its images.
    """

    net: Path = argument("the training net", Path, "NET.prototxt")
    output: Path | None = argument("write here, not to stdout", Path, "DEPLOY.prototxt", default=None)
    named_output: Path | None = option("the same", Path, flags=("--output",))
    batch: int = option("records in a batch", positive, default=1)
    shapes: list[tuple[str, tuple[int, ...]]] = option(
        "shape of one record of an input; repeat for several inputs",
        _named_shape,
        "NAME=C,H,W",
        default=[],
        flags=("--input",),
        repeatable=True,
    )
    outputs: list[str] = option("output blobs (default: the predictions of its losses)", name_list, default=[])
    like: Path | None = option(
        "NET is a deploy net; prepare its images as the data layer of this training net does", Path, "TRAIN.prototxt"
    )
    image_size: tuple[int, ...] | None = option(
        "size of the images before the crop (default: as in the fields or the data)", record_shape, "H,W"
    )
    weights: Path | None = option("check that these weights fit the deploy net", Path)
    overwrite: bool = overwrite_option()

    def run(self) -> int:
        """Write the deploy net.

        Raises:
            ConfigError: the net cannot be read, has no outputs, the shape of an input is unknown, or the file exists.
            SnapshotError: the weights do not fit.
            RunError: the file cannot be written.
        """
        from google.protobuf import text_format

        from caffepy.formats.load import read_net
        from caffepy.utils.files import atomic_write, check_output

        if self.output is not None and self.named_output is not None:
            raise ConfigError(f"{self.output} and --output {self.named_output} are both the output; give one of them")
        output = self.output or self.named_output
        if self.image_size is not None and len(self.image_size) != 2:
            raise ConfigError("--image-size is a height and a width such as 256,256")
        if self.like is not None and (self.shapes or self.outputs or self.batch != 1):
            raise ConfigError("--like keeps the net; give it without --input, --outputs and --batch")
        if output is not None:
            check_output(output, self.overwrite, filter(None, (self.net, self.like, self.weights)))
        train = read_net(self.like or self.net)
        net = _made_from(train, self) if self.like is None else _prepared_like(read_net(self.net), train, self)
        _move_mean_files(net, self.like or self.net, output)
        with quiet_net():
            layers = _check(net, self.weights)
        text = f"# {one_line(self.net.name)} for predictions.\n{text_format.MessageToString(net, as_utf8=True)}"
        if output is None:
            print("\n".join(map(printable, text.split("\n"))), end="")
            return 0
        with atomic_write(output) as file:
            file.write(text.encode())
        fitting = f"; {layers} layers take their weights from {self.weights}" if self.weights else ""
        print(f"{output}: {len(net.layer)} layers{fitting}")
        return 0


def _made_from(train: caffe_pb2.NetParameter, args: DeployCommand) -> caffe_pb2.NetParameter:
    """Return the deploy net of a training net."""
    from caffepy.net.deploy import deploy_net, plan_deploy

    shapes = _shapes_of_data(train, args.net) | dict(args.shapes)
    planned = plan_deploy(train, shapes, args.batch, args.outputs)
    for name, _ in args.shapes:
        if name not in planned.inputs:
            known = ", ".join(planned.inputs) or "none"
            raise ConfigError(f"--input {name}: the deploy net has no such input; its inputs are {known}")
    return deploy_net(train, replace(planned, sizes=_image_sizes(train, args, planned.inputs)))


def _prepared_like(
    net: caffe_pb2.NetParameter, train: caffe_pb2.NetParameter, args: DeployCommand
) -> caffe_pb2.NetParameter:
    """Return a deploy net whose Input layers prepare images as the data layers of a training net."""
    from caffepy.formats.dialect import Dialect, choose_dialect
    from caffepy.net.deploy import copy_preparation, data_layer

    inputs = [layer for layer in net.layer if layer.type == "Input"]
    pairs = [(data_layer(train, layer.top[0]), layer) for layer in inputs]
    tops = list(dict.fromkeys(layer.top[0] for layer in train.layer if not layer.bottom and layer.top))
    if len(inputs) == len(tops) == 1:
        pairs = [(data_layer(train, tops[0]), inputs[0])]
    sizes = _image_sizes(train, args, tops)
    nvidia = choose_dialect([train], lambda *line: None) is Dialect.NVIDIA
    done = [
        copy_preparation(source, layer, sizes.get(source.top[0]), nvidia)
        for source, layer in pairs
        if source is not None
    ]
    if not any(done):
        found = ", ".join(layer.name for layer in inputs) or "it has none"
        raise ConfigError(
            f"{args.net}: none of its Input layers ({found}) takes images of 1 or 3 channels as a data layer of "
            f"{args.like} ({', '.join(tops) or 'it has none'}) gives them"
        )
    return net


def _image_sizes(train: caffe_pb2.NetParameter, args: DeployCommand, tops: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return height and width of the images before a crop by top: of --image-size, or of data that exist."""
    from caffepy.formats.proto import caffe_pb2

    if args.image_size is not None:
        return dict.fromkeys(tops, (args.image_size[0], args.image_size[1]))
    whole = caffe_pb2.NetParameter()
    whole.CopyFrom(train)
    for layer in whole.layer:
        for name in ("crop_size", "crop_h", "crop_w", "mean_file", "mean_value"):
            layer.transform_param.ClearField(name)
    cropped = {
        layer.top[0]
        for layer in train.layer
        if layer.type == "Data" and layer.top
        if layer.transform_param.crop_size or layer.transform_param.crop_h
    }
    shapes = _shapes_of_data(whole, args.like or args.net) if cropped else {}
    return {top: (shape[1], shape[2]) for top, shape in shapes.items() if top in cropped and len(shape) == 3}


def _move_mean_files(net: caffe_pb2.NetParameter, source: Path, output: Path | None) -> None:
    """Make paths of mean files that are relative to the training net's folder relative to the deploy net's."""
    folder = Path() if output is None else output.parent
    for layer in net.layer:
        mean = layer.transform_param.mean_file
        if mean and not Path(mean).exists() and (source.parent / mean).exists():
            layer.transform_param.mean_file = os.path.relpath(source.parent / mean, folder)


def _shapes_of_data(train: caffe_pb2.NetParameter, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of one record by top, for data layers whose data exist."""
    from caffepy.backend.meta import MetaBackend
    from caffepy.formats.dialect import choose_dialect
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext
    from caffepy.net.memory_plan import read_sample_shapes

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
    """Check the deploy net by building it; return the number of layers with weights in the file."""
    from caffepy.backend import create_backend
    from caffepy.backend.meta import MetaBackend
    from caffepy.formats.caffemodel import read_caffemodel
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext
    from caffepy.net import Net

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

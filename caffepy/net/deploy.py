"""Deploy nets: Input layers replace data layers; losses and training fields are removed.

An Input layer gets the fields that say how the data layer made its values of images; `infer/input_transform.py` reads
them. BVLC Caffe ignores them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.formats.dialect import LEAST_EPSILON, Dialect, choose_dialect
from caffepy.formats.load import filter_net, net_state
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LAYERS, is_known, is_registered
from caffepy.net.record_shape import told_shape

Shape = tuple[int, ...]
Layers = Sequence[caffe_pb2.LayerParameter]

_FILLER = caffe_pb2.FillerParameter.DESCRIPTOR
_CONSTANTS = {"DummyData", "Parameter", "Python"}
"""Layers without bottoms that the deploy net keeps, unless the shape of a top is given."""
_SCORES = {"Accuracy", "DetectionEvaluate", "Silence"}
_HEADS = {"SoftmaxWithLoss": "Softmax", "InfogainLoss": "Softmax", "SigmoidCrossEntropyLoss": "Sigmoid"}
"""Losses with a built-in activation, and that activation."""


@dataclass(frozen=True)
class Deploy:
    """The inputs and outputs of a deploy net.

    Attributes:
        inputs: shape by blob name.
        outputs: names of the output blobs; layers that lead to none of them are removed.
        softmax: the blob of scores to which a Softmax layer `prob` is added, or "".
        axis: the class axis of `softmax`.
        heads: layers appended to the net.
        sizes: height and width of the images before a crop, by input, where no field of the data layer gives them.
    """

    inputs: Mapping[str, Shape]
    outputs: Sequence[str] = field(default_factory=list)
    softmax: str = ""
    axis: int = 1
    heads: Layers = ()
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def wanted(self) -> set[str]:
        """The blobs that the net must compute."""
        return {*self.outputs, *([self.softmax] if self.softmax else [])}


def deploy_net(train: caffe_pb2.NetParameter, deploy: Deploy) -> caffe_pb2.NetParameter:
    """Return the deploy net of a train net: its test-phase layers between inputs and outputs.

    The result computes the same in both dialects, because the field that selects the train net's dialect (in the net, a
    data layer or a solver) may be missing from the deploy net.
    """
    net = caffe_pb2.NetParameter(name=train.name)
    for name, shape in deploy.inputs.items():
        added = net.layer.add(name=name, type="Input", top=[name], input_param={"shape": [{"dim": shape}]})
        source = data_layer(train, name)
        if source is not None:
            copy_preparation(source, added, deploy.sizes.get(name), _is_nvidia(train))
    kept = _leading_to(deploy.wanted, set(deploy.inputs), _test_layers(train))
    shared = Counter(param.name for layer in kept for param in layer.param if param.name)
    net.layer.extend(_without_training(layer, shared) for layer in kept)
    if _is_nvidia(train):
        for layer in net.layer:
            if layer.type == "BatchNorm" and layer.batch_norm_param.eps < np.float32(LEAST_EPSILON):
                layer.batch_norm_param.eps = LEAST_EPSILON
    if deploy.softmax:
        axis = {} if deploy.axis == 1 else {"softmax_param": {"axis": deploy.axis}}
        net.layer.add(name="prob", type="Softmax", bottom=[deploy.softmax], top=["prob"], **axis)
    net.layer.extend(deploy.heads)
    return net


def _test_layers(train: caffe_pb2.NetParameter, phase: int = caffe_pb2.TEST) -> list[caffe_pb2.LayerParameter]:
    return list(filter_net(train, net_state(phase, train.state, net_state(phase))).layer)


def _leading_to(wanted: set[str], inputs: set[str], layers: Layers) -> list[caffe_pb2.LayerParameter]:
    """Return the layers that compute the wanted blobs, searched backwards; in-place layers keep their bottom wanted."""
    wanted, kept = set(wanted), []
    for layer in reversed(layers):
        if wanted & set(layer.top) and not inputs & set(layer.top) - set(layer.bottom) and not _is_score(layer):
            wanted |= set(layer.bottom)
            kept.append(layer)
    return kept[::-1]


def _without_training(layer: caffe_pb2.LayerParameter, shared: Mapping[str, int]) -> caffe_pb2.LayerParameter:
    """Return a copy without rates, phases and fillers; shared parameters keep their names and share modes."""
    plain = caffe_pb2.LayerParameter()
    plain.CopyFrom(layer)
    for name in ("param", "phase", "include", "exclude"):
        plain.ClearField(name)
    if any(shared.get(param.name, 0) > 1 for param in layer.param):
        plain.param.extend(_sharing(param) for param in layer.param)
    for _, settings in plain.ListFields() if layer.type not in _CONSTANTS else ():
        for each in settings.DESCRIPTOR.fields if isinstance(settings, Message) else ():
            if each.message_type == _FILLER:
                settings.ClearField(each.name)
    return plain


def _sharing(param: caffe_pb2.ParamSpec) -> caffe_pb2.ParamSpec:
    """Return a ParamSpec with only the sharing fields of `param`."""
    kept = caffe_pb2.ParamSpec()
    for name in ("name", "share_mode"):
        if param.HasField(name):
            setattr(kept, name, getattr(param, name))
    return kept


def _is_nvidia(net: caffe_pb2.NetParameter) -> bool:
    return choose_dialect([net], lambda *line: None) is Dialect.NVIDIA


# -- how images become values -------------------------------------------------------------------------------

_TRANSFORMS = (
    "scale",
    "mean_file",
    "mean_value",
    "crop_size",
    "crop_h",
    "crop_w",
    "img_rand_resize_lower",
    "img_rand_resize_upper",
    "interpolation_algo_down",
    "interpolation_algo_up",
    "allow_upscale",
)
_OF_BYTES = {"Data", "ImageData", "AnnotatedData"}
"""Data layers that give images even without transform_param."""
_RESIZED = ("AnnotatedData", "VideoData")
"""Data layers that apply resize_param in both dialects."""


def data_layer(train: caffe_pb2.NetParameter, top: str) -> caffe_pb2.LayerParameter | None:
    """Return the data layer of the TEST phase, or else of any, whose first top has this name."""
    layers = [*_test_layers(train), *train.layer]
    return next((layer for layer in layers if not layer.bottom and layer.top[:1] == [top]), None)


def copy_preparation(
    source: caffe_pb2.LayerParameter,
    target: caffe_pb2.LayerParameter,
    size: tuple[int, int] | None = None,
    nvidia: bool = False,
) -> bool:
    """Write into an Input layer how a data layer makes values of images; return whether it makes them of images.

    Args:
        source: the data layer.
        target: the Input layer; its previous preparation is removed.
        size: height and width of the data layer's images, where its fields do not give them.
        nvidia: the data layer's net has NVIDIA's dialect.
    """
    shape = list(target.input_param.shape[0].dim) if target.input_param.shape else []
    is_image = len(shape) == 4 and shape[1] in (1, 3)
    if not is_image or not (source.type in _OF_BYTES or source.HasField("transform_param")):
        return False
    target.ClearField("transform_param")
    target.ClearField("image_data_param")
    given, listed, written = source.transform_param, source.image_data_param, target.transform_param
    written.SetInParent()
    cut = source.type != "WindowData"  # which resizes windows to the crop
    for name in _TRANSFORMS if cut else _TRANSFORMS[:3]:
        if name == "mean_value":
            written.mean_value.extend(given.mean_value)
        elif given.HasField(name):
            setattr(written, name, getattr(given, name))
    if given.resize_param and (source.type in _RESIZED or not nvidia):
        written.resize_param.append(given.resize_param[0])
        del written.resize_param[0].interp_mode[1:]
    elif side := (listed.new_dim or listed.short_side):
        resize = written.resize_param.add(resize_mode=caffe_pb2.ResizeParameter.FIT_SMALL_SIZE, height=side, width=side)
        resize.interp_mode.append(resize.CUBIC if listed.bicubic else resize.LINEAR)
    elif listed.new_height and listed.new_width:
        size = listed.new_height, listed.new_width
    if size is not None and cut and not written.resize_param:
        target.image_data_param.new_height, target.image_data_param.new_width = size
    return True


# -- inputs and outputs of the deploy net -------------------------------------------------------------------


def plan_deploy(
    train: caffe_pb2.NetParameter,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int = 1,
    outputs: Sequence[str] = (),
) -> Deploy:
    """Return the inputs and outputs of a train net's deploy net.

    Outputs are the blobs that losses compare with labels, and test-phase blobs that no layer reads. A loss with a lower
    loss_weight than another loss on the same labels belongs to an auxiliary classifier, which is removed. Losses with a
    built-in Softmax or Sigmoid are replaced by that layer. Inputs are the tops of data layers that lead to the outputs.

    Args:
        train: the net in the current format.
        shapes: shape of one record by input name; overrides `told_shape`, and makes an input of a top of DummyData,
            Parameter or Python.
        batch: records in a batch.
        outputs: names of the output blobs; empty derives them from the losses.

    Raises:
        ConfigError: the net has no outputs, or the shape of an input is unknown.
    """
    layers = _test_layers(train)
    heads: list[caffe_pb2.LayerParameter] = []
    if not outputs:
        outputs = _predictions(layers)
        heads = _make_heads([*layers, *_test_layers(train, caffe_pb2.TRAIN)], outputs, _is_nvidia(train))
    made = {top for layer in layers for top in layer.top}
    if missing := [name for name in outputs if name not in made]:
        raise ConfigError(f"the net has no blob '{missing[0]}' in its test phase; name another output")
    if not outputs:
        raise ConfigError("no blob of the net depends on layers that learn; name the output blobs with --outputs")
    return Deploy(
        _inputs(train, _leading_to(set(outputs), set(), layers), shapes or {}, batch), list(outputs), heads=heads
    )


def _inputs(
    train: caffe_pb2.NetParameter, kept: Layers, shapes: Mapping[str, Sequence[int]], batch: int
) -> dict[str, Shape]:
    """Return the tops of data layers that the kept layers read, with their shapes."""
    # Test data layers that belong to particular stages are looked up among all layers of the net. A layer of constants
    # becomes an input if `shapes` names a top of it.
    read = {bottom for layer in kept for bottom in layer.bottom}
    made = {top for layer in kept for top in layer.top}
    sources = [
        layer
        for layer in kept
        if not layer.bottom and (layer.type not in _CONSTANTS or not set(shapes).isdisjoint(layer.top))
    ]
    sources += [layer for layer in train.layer if not layer.bottom and (read - made) & set(layer.top)]
    nvidia = _is_nvidia(train)
    inputs: dict[str, Shape] = {}
    for layer in sources:
        told = told_shape(layer, nvidia)
        for index, top in enumerate(layer.top):
            if top in read and top not in inputs:
                shape = told[0] if told and index == 0 else None
                inputs[top] = _input_shape(layer, index, shapes.get(top, shape), batch)
    return inputs


def _is_loss(layer: caffe_pb2.LayerParameter) -> bool:
    return layer.type.endswith("Loss")


def _predictions(layers: Layers) -> list[str]:
    """Return the blobs that losses and scores judge, then unread tops, if they depend on learned layers."""
    learned = _learned_blobs(layers)
    losses = [layer for layer in layers if _is_loss(layer)]
    judges = [layer for layer in losses if not _is_auxiliary(layer, losses)]
    judges += [
        layer for layer in layers if layer.type == "DetectionEvaluate" or (layer.type == "Accuracy" and not judges)
    ]
    read = {bottom for layer in layers for bottom in layer.bottom}
    found = [bottom for layer in judges for bottom in layer.bottom]
    found += [top for layer in layers for top in layer.top if top not in read and not _is_score(layer)]
    return [name for name in dict.fromkeys(found) if name in learned]


def _is_score(layer: caffe_pb2.LayerParameter) -> bool:
    return _is_loss(layer) or layer.type in _SCORES


def _learned_blobs(layers: Layers) -> set[str]:
    """Return the blobs that depend on a layer which learns. A blob that depends on none is data or a target."""
    learned: set[str] = set()
    for layer in layers:
        if not _is_score(layer) and (_learns(layer) or learned & set(layer.bottom)):
            learned |= set(layer.top)
    return learned


def _learns(layer: caffe_pb2.LayerParameter) -> bool:
    """Return whether a layer has learned weights; of a program's own types with bottoms that is assumed."""
    if is_registered(layer.type):
        return bool(layer.bottom)
    return is_known(layer.type) and LAYERS.get(layer.type).learns


def _is_auxiliary(layer: caffe_pb2.LayerParameter, losses: Layers) -> bool:
    """Return whether another loss of the same type and labels has a greater weight."""
    return any(
        other.type == layer.type and other.bottom[1:] == layer.bottom[1:] and _weight(other) > _weight(layer)
        for other in losses
    )


def _weight(layer: caffe_pb2.LayerParameter) -> float:
    return layer.loss_weight[0] if layer.loss_weight else 1.0


def _make_heads(layers: Layers, outputs: Iterable[str], nvidia: bool) -> list[caffe_pb2.LayerParameter]:
    """Return Softmax and Sigmoid layers for outputs whose losses have them built in, unless the net has them already.

    NVIDIA Caffe's InfogainLoss takes probabilities and has no built-in Softmax (`infogain_loss_layer.cpp`).
    """
    types = {loss: head for loss, head in _HEADS.items() if not (nvidia and loss == "InfogainLoss")}
    heads: list[caffe_pb2.LayerParameter] = []
    for output in outputs:
        readers = [layer for layer in layers if output in layer.bottom[:1]]
        kinds = [types[layer.type] for layer in readers if layer.type in types]
        if not kinds or any(layer.type == kinds[0] for layer in readers):
            continue
        loss = next(layer for layer in readers if layer.type in types)
        name = f"{output}_prob" if heads else "prob"
        head = caffe_pb2.LayerParameter(name=name, type=kinds[0], bottom=[output], top=[name])
        if kinds[0] == "Softmax" and loss.softmax_param.axis != 1:
            head.softmax_param.axis = loss.softmax_param.axis
        heads.append(head)
    return heads


def _input_shape(layer: caffe_pb2.LayerParameter, index: int, shape: Sequence[int] | None, batch: int) -> Shape:
    """Return the shape of an input including the batch axis; `shape` is the shape of one record, or None."""
    name = layer.top[index]
    if shape is None and layer.type == "Input":
        given = layer.input_param.shape
        shape = given[index if len(given) > 1 else 0].dim[1:]
    if shape is None:
        raise ConfigError(
            f"layer '{layer.name}': the prototxt does not give the shape of '{name}'; give the shape of one record: "
            f"--input {name}=3,224,224"
        )
    return (batch, *shape)

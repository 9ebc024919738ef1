"""V1 nets (``layers`` with a type in capitals) to the current ``layer`` with a type in quotes."""

from __future__ import annotations

from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, V1LayerParameter

LAYER_TYPES = {
    V1LayerParameter.NONE: "",
    V1LayerParameter.ABSVAL: "AbsVal",
    V1LayerParameter.ACCURACY: "Accuracy",
    V1LayerParameter.ARGMAX: "ArgMax",
    V1LayerParameter.BNLL: "BNLL",
    V1LayerParameter.CONCAT: "Concat",
    V1LayerParameter.CONTRASTIVE_LOSS: "ContrastiveLoss",
    V1LayerParameter.CONVOLUTION: "Convolution",
    V1LayerParameter.DATA: "Data",
    V1LayerParameter.DECONVOLUTION: "Deconvolution",
    V1LayerParameter.DROPOUT: "Dropout",
    V1LayerParameter.DUMMY_DATA: "DummyData",
    V1LayerParameter.ELTWISE: "Eltwise",
    V1LayerParameter.EUCLIDEAN_LOSS: "EuclideanLoss",
    V1LayerParameter.EXP: "Exp",
    V1LayerParameter.FLATTEN: "Flatten",
    V1LayerParameter.HDF5_DATA: "HDF5Data",
    V1LayerParameter.HDF5_OUTPUT: "HDF5Output",
    V1LayerParameter.HINGE_LOSS: "HingeLoss",
    V1LayerParameter.IM2COL: "Im2col",
    V1LayerParameter.IMAGE_DATA: "ImageData",
    V1LayerParameter.INFOGAIN_LOSS: "InfogainLoss",
    V1LayerParameter.INNER_PRODUCT: "InnerProduct",
    V1LayerParameter.LRN: "LRN",
    V1LayerParameter.MEMORY_DATA: "MemoryData",
    V1LayerParameter.MULTINOMIAL_LOGISTIC_LOSS: "MultinomialLogisticLoss",
    V1LayerParameter.MVN: "MVN",
    V1LayerParameter.POOLING: "Pooling",
    V1LayerParameter.POWER: "Power",
    V1LayerParameter.RELU: "ReLU",
    V1LayerParameter.SIGMOID: "Sigmoid",
    V1LayerParameter.SIGMOID_CROSS_ENTROPY_LOSS: "SigmoidCrossEntropyLoss",
    V1LayerParameter.SILENCE: "Silence",
    V1LayerParameter.SLICE: "Slice",
    V1LayerParameter.SOFTMAX: "Softmax",
    V1LayerParameter.SOFTMAX_LOSS: "SoftmaxWithLoss",
    V1LayerParameter.SPLIT: "Split",
    V1LayerParameter.TANH: "TanH",
    V1LayerParameter.THRESHOLD: "Threshold",
    V1LayerParameter.WINDOW_DATA: "WindowData",
}

TRANSFORM_HOLDERS = {
    V1LayerParameter.DATA: "data_param",
    V1LayerParameter.IMAGE_DATA: "image_data_param",
    V1LayerParameter.WINDOW_DATA: "window_data_param",
}
"""Data layers whose own fields have moved to ``transform_param``."""

TRANSFORM_FIELDS = ("scale", "mean_file", "crop_size", "mirror")

PER_PARAMETER = {"param": "name", "blob_share_mode": "share_mode", "blobs_lr": "lr_mult", "weight_decay": "decay_mult"}
"""V1's parallel lists, one entry a parameter, and the field of ``ParamSpec`` that each became."""


def move_transforms(param: NetParameter, origin: str) -> bool:
    """Moves scale, mean file, crop and mirror of V1 data layers into ``transform_param``.

    Returns whether there were any.
    """
    moved = False
    for layer in param.layers:
        holder = TRANSFORM_HOLDERS.get(layer.type)
        if holder is not None and layer.HasField(holder):
            moved |= _move_fields(getattr(layer, holder), layer)
    return moved


def upgrade_v1(param: NetParameter, origin: str) -> bool:
    """Replaces ``layers`` by ``layer`` in place; returns whether there were any.

    Raises:
        ConfigError: the net has both.
    """
    if not param.layers:
        return False
    if param.layer:
        raise ConfigError(
            f"{origin}: both layer and layers are used; rewrite layers {{ type: POOLING }} "
            'as layer { type: "Pooling" } throughout'
        )
    for old in param.layers:
        upgrade_v1_layer(old, param.layer.add())
    del param.layers[:]
    return True


def upgrade_v1_layer(old: V1LayerParameter, new: LayerParameter) -> None:
    """Fills `new` with what `old` says. Fields of one name carry over, parallel lists become ``param``."""
    for field, value in old.ListFields():
        if field.name in PER_PARAMETER:
            _spread(field.name, value, new)
        elif field.name == "type":
            new.type = LAYER_TYPES[value]
        elif field.name != "layer":
            new.MergeFrom(LayerParameter(**{field.name: value}))


def _move_fields(holder: Message, layer: V1LayerParameter) -> bool:
    names = [name for name in TRANSFORM_FIELDS if holder.HasField(name)]
    for name in names:
        setattr(layer.transform_param, name, getattr(holder, name))
        holder.ClearField(name)
    return bool(names)


def _spread(name: str, values: list[object], new: LayerParameter) -> None:
    while len(new.param) < len(values):
        new.param.add()
    for spec, value in zip(new.param, values, strict=False):
        setattr(spec, PER_PARAMETER[name], value)

"""Upgrades of nets and solvers from older Caffe formats, in place.

Steps in the order of Caffe's ``upgrade_proto.cpp``: V0 layers (``layers { layer { ... } }``, Caffe's first format) to
V1 (``layers`` with a type in capitals), data-transform fields, V1 to `layer` with a type in quotes, types that are
others under a new name, net inputs, BatchNorm's parameters. Then come settings of forks that have another meaning or
name here: a family of `caffepy/forks` has a module `upgrade` for its own, with a function ``upgrade(net)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.formats.alias import apply_aliases
from caffepy.formats.fields import log_ignored_fields, refuse_fork_fields
from caffepy.formats.proto.caffe_pb2 import (
    ImageDataParameter,
    LayerParameter,
    LossParameter,
    NetParameter,
    SolverParameter,
    V0LayerParameter,
    V1LayerParameter,
    VideoDataParameter,
)
from caffepy.utils.registry import suggest
from caffepy.utils.subpackages import import_from_subpackages

log = logging.getLogger(__name__)

BATCH_NORM_BLOBS = 3
"""Mean, variance and their common scale factor: statistics that the solver must not update."""

INPUT_AXES = 4
"""`input_dim` has N, C, H and W for each input."""

SOLVER_TYPES = {
    SolverParameter.SGD: "SGD",
    SolverParameter.NESTEROV: "Nesterov",
    SolverParameter.ADAGRAD: "AdaGrad",
    SolverParameter.RMSPROP: "RMSProp",
    SolverParameter.ADADELTA: "AdaDelta",
    SolverParameter.ADAM: "Adam",
    SolverParameter.SAG: "SAG",
}


TRAIN_NETS = ("net_param", "train_net_param", "test_net_param")
"""Fields of a solver that hold nets."""


def upgrade_net(param: NetParameter, origin: str) -> None:
    """Upgrade `param` in place; log one line if anything changed.

    Raises:
        ConfigError: old and new formats are mixed, or an old field is invalid.
    """
    steps = [
        name
        for name, step in (
            ("V0 layers", upgrade_v0),
            ("data-transform fields", move_transforms),
            ("V1 layers", upgrade_v1),
            ("layer types under other names", apply_aliases),
            ("input fields", upgrade_input),
            ("BatchNorm parameters", upgrade_batch_norm),
            ("bn_stats_batch_size", upgrade_stats_batch_size),
        )
        if step(param, origin)
    ]
    if steps:
        log.info("Upgraded from an older format in %s: %s", origin, ", ".join(steps))
    for upgrade in _of_families():
        upgrade(param)
    log_ignored_fields(param, origin)
    _warn_about_ignored_transforms(param, origin)


@cache
def _of_families() -> list[Callable[[NetParameter], None]]:
    """Return `upgrade` of each family of forks that has a module `upgrade`."""
    return [module.upgrade for module in import_from_subpackages("caffepy.forks", "upgrade")]


def upgrade_solver(param: SolverParameter, origin: str) -> None:
    """Upgrade `param` and its nets in place; log a line if ``solver_type`` was replaced.

    Raises:
        ConfigError: both ``type`` and ``solver_type`` are given, or a field that only the registered schema of a fork
            has.
    """
    refuse_fork_fields(param, origin, "leave it out", skipped=TRAIN_NETS)
    if param.HasField("solver_type"):
        if param.HasField("type"):
            raise ConfigError(f"{origin}: both type and solver_type are given; keep type")
        param.type = SOLVER_TYPES[param.solver_type]
        param.ClearField("solver_type")
        log.info('Upgraded from an older format in %s: solver_type to type: "%s"', origin, param.type)
    if param.HasField("net_param"):
        upgrade_net(param.net_param, f"{origin}: net_param")
    if param.HasField("train_net_param"):
        upgrade_net(param.train_net_param, f"{origin}: train_net_param")
    for index, net in enumerate(param.test_net_param):
        upgrade_net(net, f"{origin}: test_net_param[{index}]")


def upgrade_input(param: NetParameter, origin: str) -> bool:
    """Convert ``input`` with ``input_shape`` or ``input_dim`` to an Input layer at the net's beginning.

    Inputs without a shape, as in old .caffemodels, are dropped. Return whether there was an input.

    Raises:
        ConfigError: the numbers of shapes and inputs differ.
    """
    if not param.input:
        return False
    if param.input_shape or param.input_dim:
        _insert_input_layer(param, origin)
    for field in ("input", "input_shape", "input_dim"):
        param.ClearField(field)
    return True


def upgrade_batch_norm(param: NetParameter, origin: str) -> bool:
    """Set ``lr_mult`` and ``decay_mult`` to 0 in BatchNorm layers that declare their three parameters.

    Return whether anything changed.
    """
    changed = False
    for layer in param.layer:
        if layer.type != "BatchNorm" or len(layer.param) != BATCH_NORM_BLOBS:
            continue
        for spec in layer.param:
            changed |= spec.lr_mult != 0 or spec.decay_mult != 0
            spec.lr_mult = 0
            spec.decay_mult = 0
    return changed


def upgrade_stats_batch_size(param: NetParameter, origin: str) -> bool:
    """Move Intel's ``bn_stats_batch_size`` to the BatchNorm layers that have no ``stats_batch_size``.

    Return whether the net had it.
    """
    if not param.HasField("bn_stats_batch_size"):
        return False
    for layer in param.layer:
        if layer.type == "BatchNorm" and not layer.batch_norm_param.HasField("stats_batch_size"):
            layer.batch_norm_param.stats_batch_size = param.bn_stats_batch_size
    param.ClearField("bn_stats_batch_size")
    return True


def _insert_input_layer(param: NetParameter, origin: str) -> None:
    shapes = _input_shapes(param, origin)
    rest = list(param.layer)
    del param.layer[:]
    layer = param.layer.add(name="input", type="Input", top=list(param.input))
    for shape in shapes:
        layer.input_param.shape.add(dim=shape)
    param.layer.extend(rest)


def _input_shapes(param: NetParameter, origin: str) -> list[list[int]]:
    count = len(param.input)
    if param.input_shape:
        if len(param.input_shape) != count:
            raise ConfigError(
                f"{origin}: {count} input but {len(param.input_shape)} input_shape; give one input_shape per input"
            )
        return [list(shape.dim) for shape in param.input_shape]
    if len(param.input_dim) != INPUT_AXES * count:
        raise ConfigError(
            f"{origin}: {len(param.input_dim)} input_dim for {count} input; give N, C, H and W of each input"
        )
    return [list(param.input_dim[INPUT_AXES * index : INPUT_AXES * (index + 1)]) for index in range(count)]


def _warn_about_ignored_transforms(param: NetParameter, origin: str) -> None:
    for layer in param.layer:
        for holder in ("data_param", "image_data_param", "window_data_param"):
            if not layer.HasField(holder):
                continue
            ignored = [
                name for name in ("scale", "mean_file", "crop_size", "mirror") if getattr(layer, holder).HasField(name)
            ]
            if ignored and layer.type != "WindowData":
                log.warning(
                    "%s: layer '%s': %s of %s has no effect, as in Caffe; move it to transform_param",
                    origin,
                    layer.name,
                    ", ".join(ignored),
                    holder,
                )


# -- V0 to V1 ------------------------------------------------------------------------------------------


V0_TYPES = {
    "accuracy": V1LayerParameter.ACCURACY,
    "bnll": V1LayerParameter.BNLL,
    "concat": V1LayerParameter.CONCAT,
    "conv": V1LayerParameter.CONVOLUTION,
    "data": V1LayerParameter.DATA,
    "dropout": V1LayerParameter.DROPOUT,
    "euclidean_loss": V1LayerParameter.EUCLIDEAN_LOSS,
    "flatten": V1LayerParameter.FLATTEN,
    "hdf5_data": V1LayerParameter.HDF5_DATA,
    "hdf5_output": V1LayerParameter.HDF5_OUTPUT,
    "im2col": V1LayerParameter.IM2COL,
    "images": V1LayerParameter.IMAGE_DATA,
    "infogain_loss": V1LayerParameter.INFOGAIN_LOSS,
    "innerproduct": V1LayerParameter.INNER_PRODUCT,
    "lrn": V1LayerParameter.LRN,
    "multinomial_logistic_loss": V1LayerParameter.MULTINOMIAL_LOGISTIC_LOSS,
    "pool": V1LayerParameter.POOLING,
    "relu": V1LayerParameter.RELU,
    "sigmoid": V1LayerParameter.SIGMOID,
    "softmax": V1LayerParameter.SOFTMAX,
    "softmax_loss": V1LayerParameter.SOFTMAX_LOSS,
    "split": V1LayerParameter.SPLIT,
    "tanh": V1LayerParameter.TANH,
    "window_data": V1LayerParameter.WINDOW_DATA,
}

PARAM_MESSAGES = {
    "conv": "convolution_param",
    "innerproduct": "inner_product_param",
    "pool": "pooling_param",
    "dropout": "dropout_param",
    "lrn": "lrn_param",
    "data": "data_param",
    "hdf5_data": "hdf5_data_param",
    "images": "image_data_param",
    "window_data": "window_data_param",
    "infogain_loss": "infogain_loss_param",
    "concat": "concat_param",
}
"""Parameter message of each V0 type."""

SETTINGS = {
    "num_output": ("num_output", ("conv", "innerproduct")),
    "biasterm": ("bias_term", ("conv", "innerproduct")),
    "weight_filler": ("weight_filler", ("conv", "innerproduct")),
    "bias_filler": ("bias_filler", ("conv", "innerproduct")),
    "pad": ("pad", ("conv", "pool")),
    "kernelsize": ("kernel_size", ("conv", "pool")),
    "group": ("group", ("conv",)),
    "stride": ("stride", ("conv", "pool")),
    "pool": ("pool", ("pool",)),
    "dropout_ratio": ("dropout_ratio", ("dropout",)),
    "local_size": ("local_size", ("lrn",)),
    "alpha": ("alpha", ("lrn",)),
    "beta": ("beta", ("lrn",)),
    "k": ("k", ("lrn",)),
    "source": ("source", ("data", "hdf5_data", "images", "window_data", "infogain_loss")),
    "batchsize": ("batch_size", ("data", "hdf5_data", "images", "window_data")),
    "rand_skip": ("rand_skip", ("data", "images")),
    "shuffle_images": ("shuffle", ("images",)),
    "new_height": ("new_height", ("images",)),
    "new_width": ("new_width", ("images",)),
    "concat_dim": ("concat_dim", ("concat",)),
    "det_fg_threshold": ("fg_threshold", ("window_data",)),
    "det_bg_threshold": ("bg_threshold", ("window_data",)),
    "det_fg_fraction": ("fg_fraction", ("window_data",)),
    "det_context_pad": ("context_pad", ("window_data",)),
    "det_crop_mode": ("crop_mode", ("window_data",)),
}
"""V0's flat settings: the current field name, and the V0 types that have the setting."""

V0_TRANSFORM_FIELDS = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}
V0_COMMON_FIELDS = ("name", "blobs", "blobs_lr", "weight_decay")


def upgrade_v0(param: NetParameter, origin: str) -> bool:
    """Upgrade V0 layers in place; merge padding layers into the layers that they feed.

    Return whether there were V0 layers. Settings that a layer type does not have are dropped with a warning, as in
    Caffe.

    Raises:
        ConfigError: an unknown type, or a padding layer that cannot be merged.
    """
    if not any(layer.HasField("layer") for layer in param.layers):
        return False
    merge_padding(param, origin)
    upgraded = [upgrade_v0_layer(layer, origin) for layer in param.layers]
    del param.layers[:]
    param.layers.extend(upgraded)
    return True


def merge_padding(param: NetParameter, origin: str) -> None:
    """Remove padding layers and set ``pad`` in the convolution or pooling layers after them."""
    producers: dict[str, V1LayerParameter] = {}
    for connection in param.layers:
        for index, bottom in enumerate(connection.bottom):
            source = producers.get(bottom)
            if source is not None and source.layer.type == "padding":
                _check_padding(source, connection, origin)
                connection.layer.pad = source.layer.pad
                connection.bottom[index] = source.bottom[0]
        for top in connection.top:
            producers[top] = connection
    for index in reversed(range(len(param.layers))):
        if param.layers[index].layer.type == "padding":
            del param.layers[index]


def upgrade_v0_layer(connection: V1LayerParameter, origin: str) -> V1LayerParameter:
    """Return the V1 layer equivalent to a V0 layer with its connections."""
    new = V1LayerParameter(bottom=connection.bottom, top=connection.top)
    old = connection.layer
    if old.HasField("type"):
        new.type = _layer_type(old, origin)
    for field, value in old.ListFields():
        if field.name in V0_COMMON_FIELDS:
            new.MergeFrom(V1LayerParameter(**{field.name: value}))
        elif field.name in V0_TRANSFORM_FIELDS:
            setattr(new.transform_param, V0_TRANSFORM_FIELDS[field.name], value)
        elif field.name == "hdf5_output_param" and old.type == "hdf5_output":
            new.hdf5_output_param.CopyFrom(value)
        elif field.name != "type" and not _set_setting(new, old.type, field.name, value):
            log.warning(
                "%s: layer '%s': %s has no meaning for type %s; ignored", origin, old.name, field.name, old.type
            )
    return new


def _check_padding(source: V1LayerParameter, connection: V1LayerParameter, origin: str) -> None:
    name = source.layer.name
    if connection.layer.type not in ("conv", "pool"):
        raise ConfigError(
            f"{origin}: padding layer '{name}' feeds '{connection.layer.name}' of type {connection.layer.type}; "
            "only conv and pool can be padded"
        )
    if len(connection.bottom) != 1 or len(source.bottom) != 1 or len(source.top) != 1:
        raise ConfigError(
            f"{origin}: padding layer '{name}' and '{connection.layer.name}' must have one bottom each, "
            "and the padding layer one top"
        )


def _layer_type(old: V0LayerParameter, origin: str) -> V1LayerParameter.LayerType:
    if old.type not in V0_TYPES:
        raise ConfigError(
            f"{origin}: layer '{old.name}': unknown V0 layer type '{old.type}'; {suggest(old.type, list(V0_TYPES))}"
        )
    return V0_TYPES[old.type]


def _set_setting(new: V1LayerParameter, old_type: str, name: str, value: object) -> bool:
    """Set a flat setting in the parameter message of the layer's type; return False if the type does not have it."""
    current, types = SETTINGS.get(name, ("", ()))
    if old_type not in types:
        return False
    message = getattr(new, PARAM_MESSAGES[old_type])
    repeated = hasattr(getattr(message, current), "append")
    message.MergeFrom(type(message)(**{current: [value] if repeated else value}))
    return True


# -- V1 to the current format --------------------------------------------------------------------------


V1_TYPES = {
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
    V1LayerParameter.DENSE_CRF: "DenseCRF",
    V1LayerParameter.HINGE_LOSS: "HingeLoss",
    V1LayerParameter.IM2COL: "Im2col",
    V1LayerParameter.IMAGE_DATA: "ImageData",
    V1LayerParameter.IMAGE_SEG_DATA: "ImageSegData",
    V1LayerParameter.INFOGAIN_LOSS: "InfogainLoss",
    V1LayerParameter.INNER_PRODUCT: "InnerProduct",
    V1LayerParameter.INTERP: "Interp",
    V1LayerParameter.LRN: "LRN",
    V1LayerParameter.MEMORY_DATA: "MemoryData",
    V1LayerParameter.MULTINOMIAL_LOGISTIC_LOSS: "MultinomialLogisticLoss",
    V1LayerParameter.MVN: "MVN",
    V1LayerParameter.POOLING: "Pooling",
    V1LayerParameter.POWER: "Power",
    V1LayerParameter.RELU: "ReLU",
    V1LayerParameter.SEG_ACCURACY: "SegAccuracy",
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
    V1LayerParameter.CONVOLUTION3D: "Convolution3D",
    V1LayerParameter.POOLING3D: "Pooling3D",
    V1LayerParameter.DECONVOLUTION3D: "Deconvolution3D",
    V1LayerParameter.CROP: "AutoCrop",
    V1LayerParameter.ELTWISE_ACCURACY: "EltwiseAccuracy",
    V1LayerParameter.UNPOOLING: "Unpooling",
    V1LayerParameter.BN: "BN",
    V1LayerParameter.WINDOW_SEG_DATA: "WindowSegData",
    V1LayerParameter.MULTI_STAGE_MEANFIELD: "MultiStageMeanfield",
    V1LayerParameter.VIDEO_DATA: "VideoData",
    V1LayerParameter.VIDEO_SEGMENTATION_DATA: "VideoSegmentationData",
    V1LayerParameter.VIDEO_WITH_VOXEL_TRUTH_DATA: "VideoWithVoxelTruthData",
    V1LayerParameter.VOXEL_SOFTMAX: "Softmax",
    V1LayerParameter.VOXEL_SOFTMAX_LOSS: "SoftmaxWithLoss",
}

V1_WORDS = {
    **{word: word for word in ("BN", "CRF", "CTC", "ELU", "GRU", "LRN", "LSTM", "MVN", "RNN", "ROI", "SPP")},
    "PRELU": "PReLU",
    "RELU": "ReLU",
    "TANH": "TanH",
}
"""Words of V1 types of forks that layer types write in another way than with one capital."""

TRANSFORM_HOLDERS = {
    V1LayerParameter.DATA: "data_param",
    V1LayerParameter.IMAGE_DATA: "image_data_param",
    V1LayerParameter.IMAGE_SEG_DATA: "image_data_param",
    V1LayerParameter.WINDOW_SEG_DATA: "image_data_param",
    V1LayerParameter.WINDOW_DATA: "window_data_param",
    V1LayerParameter.VIDEO_DATA: "image_data_param",
    V1LayerParameter.VIDEO_SEGMENTATION_DATA: "image_data_param",
    V1LayerParameter.VIDEO_WITH_VOXEL_TRUTH_DATA: "image_data_param",
}
"""Data layers whose fields moved to ``transform_param``."""

TRANSFORM_FIELDS = ("scale", "mean_file", "crop_size", "mirror")

PER_PARAMETER = {"param": "name", "blob_share_mode": "share_mode", "blobs_lr": "lr_mult", "weight_decay": "decay_mult"}
"""V1's parallel lists (one entry per parameter) and their fields in ``ParamSpec``."""


def move_transforms(param: NetParameter, origin: str) -> bool:
    """Move scale, mean file, crop and mirror of V1 data layers to ``transform_param``.

    Return whether there were any.
    """
    moved = False
    for layer in param.layers:
        holder = TRANSFORM_HOLDERS.get(layer.type)
        if holder is not None and layer.HasField(holder):
            moved |= _move_fields(getattr(layer, holder), layer)
    return moved


def upgrade_v1(param: NetParameter, origin: str) -> bool:
    """Replace ``layers`` by ``layer`` in place; return whether there were any.

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
    """Fill `new` from `old`. Fields of equal name are copied; parallel lists become ``param``."""
    for field, value in old.ListFields():
        if field.name in PER_PARAMETER:
            _set_param_specs(field.name, value, new)
        elif field.name == "type":
            new.type = V1_TYPES[value] if value in V1_TYPES else type_of_v1_name(V1LayerParameter.LayerType.Name(value))
        elif field.name == "softmaxloss_param":
            new.loss_param.MergeFrom(value)
        elif field.name != "layer":
            new.MergeFrom(LayerParameter(**{field.name: value}))
    if old.type == V1LayerParameter.VIDEO_DATA:
        _move_clip_settings(new)
    elif old.type == V1LayerParameter.VOXEL_SOFTMAX_LOSS:
        new.loss_param.normalization = LossParameter.FULL


def type_of_v1_name(name: str) -> str:
    """Return the layer type for a V1 type that only a fork's schema has: ``WindowSegData`` for ``WINDOW_SEG_DATA``."""
    return "".join(V1_WORDS.get(word, word.capitalize()) for word in name.split("_"))


def _move_clip_settings(layer: LayerParameter) -> None:
    """Move C3D's settings of clips from ``image_data_param`` to ``video_data_param``."""
    fields = VideoDataParameter.DESCRIPTOR.fields_by_name
    for field, value in layer.image_data_param.ListFields():
        if field.name in fields:
            layer.video_data_param.MergeFrom(VideoDataParameter(**{field.name: value}))
    layer.ClearField("image_data_param")


def _move_fields(holder: Message, layer: V1LayerParameter) -> bool:
    names = [name for name in TRANSFORM_FIELDS if holder.HasField(name)]
    for name in names:
        setattr(layer.transform_param, name, getattr(holder, name))
        holder.ClearField(name)
    if isinstance(holder, ImageDataParameter) and holder.HasField("mean_value"):
        if not layer.transform_param.HasField("mean_file"):  # C3D prefers the file
            layer.transform_param.mean_value.append(holder.mean_value)
        holder.ClearField("mean_value")
    return bool(names)


def _set_param_specs(name: str, values: list[object], new: LayerParameter) -> None:
    while len(new.param) < len(values):
        new.param.add()
    for spec, value in zip(new.param, values, strict=False):
        setattr(spec, PER_PARAMETER[name], value)

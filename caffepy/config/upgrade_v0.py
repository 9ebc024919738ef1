"""V0 nets (``layers { layer { ... } }``, the format of Caffe's first months) to V1."""

from __future__ import annotations

import logging

from caffepy.errors import ConfigError
from caffepy.proto.caffe_pb2 import NetParameter, V0LayerParameter, V1LayerParameter
from caffepy.registry import suggest

log = logging.getLogger(__name__)

LAYER_TYPES = {
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
"""The message that holds the settings of each V0 type that has any."""

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
"""V0's flat settings: what each is called now, and the V0 types that it belongs to."""

TRANSFORMS = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}
COMMON = ("name", "blobs", "blobs_lr", "weight_decay")


def upgrade_v0(param: NetParameter, origin: str) -> bool:
    """Upgrades V0 layers in place; padding layers go into the layer that they feed.

    Returns whether there were any. A setting that its layer's type never had is dropped with a
    warning, as Caffe does.

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
    """Removes padding layers and gives their ``pad`` to the convolution or pooling after them."""
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
    """The V1 layer that says what a V0 layer and its connections said."""
    new = V1LayerParameter(bottom=connection.bottom, top=connection.top)
    old = connection.layer
    if old.HasField("type"):
        new.type = _layer_type(old, origin)
    for field, value in old.ListFields():
        if field.name in COMMON:
            new.MergeFrom(V1LayerParameter(**{field.name: value}))
        elif field.name in TRANSFORMS:
            setattr(new.transform_param, TRANSFORMS[field.name], value)
        elif field.name == "hdf5_output_param" and old.type == "hdf5_output":
            new.hdf5_output_param.CopyFrom(value)
        elif field.name != "type" and not _set(new, old.type, field.name, value):
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
    if old.type not in LAYER_TYPES:
        raise ConfigError(
            f"{origin}: layer '{old.name}': unknown V0 layer type '{old.type}'; {suggest(old.type, list(LAYER_TYPES))}"
        )
    return LAYER_TYPES[old.type]


def _set(new: V1LayerParameter, old_type: str, name: str, value: object) -> bool:
    """Puts a flat setting into the message of its layer's type; false when the type has no such setting."""
    current, types = SETTINGS.get(name, ("", ()))
    if old_type not in types:
        return False
    message = getattr(new, PARAM_MESSAGES[old_type])
    repeated = hasattr(getattr(message, current), "append")
    message.MergeFrom(type(message)(**{current: [value] if repeated else value}))
    return True

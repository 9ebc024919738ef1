"""A net as plain lists and numbers, so that a Python without caffepy, its peer's, can build it.

Shapes of tops and of parameters are those of our own net, built without values; the peer's must come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zoo_nets import Made, net_param

from caffepy.backend.meta import MetaBackend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

Settings = dict[str, Any]
READERS: dict[str, Callable[[Any, Sequence[int]], Settings]] = {}
"""Settings of a layer, by its type, from its LayerParameter and the shape of its first bottom."""


def reader(*types: str) -> Callable[[Any], Any]:
    """Register a function for types of layers."""

    def register(function: Any) -> Any:
        READERS.update(dict.fromkeys(types, function))
        return function

    return register


def _axes(param: Any, name: str, axes: int, default: int) -> list[int]:
    """A setting for each spatial axis, given as one number, as one for each, or as _h and _w."""
    short = name.split("_")[0]
    sides = [f"{short}_{side}" for side in "hw" if f"{short}_{side}" in param.DESCRIPTOR.fields_by_name]
    if any(param.HasField(side) for side in sides):
        return [getattr(param, side) for side in sides]
    given = getattr(param, name)
    found = list(given) if hasattr(given, "__len__") else [given] if param.HasField(name) else []
    return found * axes if len(found) == 1 else found or [default] * axes


@reader("Convolution", "Deconvolution", "DepthwiseConvolution")
def _convolution(layer: Any, shape: Sequence[int]) -> Settings:
    param, axes = layer.convolution_param, len(shape) - 2
    return {
        "channels": shape[1],
        "outputs": param.num_output,
        "group": param.group,
        "bias": param.bias_term,
        "kernel": _axes(param, "kernel_size", axes, 1),
        "stride": _axes(param, "stride", axes, 1),
        "pad": _axes(param, "pad", axes, 0),
        "dilation": _axes(param, "dilation", axes, 1),
    }


@reader("Pooling")
def _pooling(layer: Any, shape: Sequence[int]) -> Settings:
    param = layer.pooling_param
    floor = param.round_mode == caffe_pb2.PoolingParameter.FLOOR or not param.ceil_mode
    return {
        "max": param.pool == caffe_pb2.PoolingParameter.MAX,
        "ceil": not floor,
        "kernel": list(shape[2:]) if param.global_pooling else _axes(param, "kernel_size", 2, 1),
        "stride": _axes(param, "stride", 2, 1),
        "pad": _axes(param, "pad", 2, 0),
    }


@reader("LRN")
def _lrn(layer: Any, shape: Sequence[int]) -> Settings:
    param = layer.lrn_param
    within = param.norm_region == caffe_pb2.LRNParameter.WITHIN_CHANNEL
    return {"size": param.local_size, "alpha": param.alpha, "beta": param.beta, "k": param.k, "within": within}


@reader("InnerProduct")
def _inner_product(layer: Any, shape: Sequence[int]) -> Settings:
    param = layer.inner_product_param
    return {"outputs": param.num_output, "bias": param.bias_term, "axis": param.axis % len(shape)}


@reader("BatchNorm")
def _batch_norm(layer: Any, shape: Sequence[int]) -> Settings:
    param = layer.batch_norm_param
    return {"eps": param.eps, "momentum": 1 - param.moving_average_fraction}


@reader("Scale")
def _scale(layer: Any, shape: Sequence[int]) -> Settings:
    return {"bias": layer.scale_param.bias_term, "axis": layer.scale_param.axis % len(shape)}


@reader("Bias")
def _bias(layer: Any, shape: Sequence[int]) -> Settings:
    return {"axis": layer.bias_param.axis % len(shape)}


@reader("Power")
def _power(layer: Any, shape: Sequence[int]) -> Settings:
    return {name: getattr(layer.power_param, name) for name in ("power", "scale", "shift")}


@reader("ShuffleChannel")
def _shuffle(layer: Any, shape: Sequence[int]) -> Settings:
    return {"group": layer.shuffle_channel_param.group}


@reader("ROIPooling")
def _regions(layer: Any, shape: Sequence[int]) -> Settings:
    return {"scale": layer.roi_pooling_param.spatial_scale}


@reader("ReLU")
def _relu(layer: Any, shape: Sequence[int]) -> Settings:
    return {"slope": layer.relu_param.negative_slope}


@reader("Eltwise")
def _eltwise(layer: Any, shape: Sequence[int]) -> Settings:
    param = layer.eltwise_param
    return {"operation": param.EltwiseOp.Name(param.operation), "coeff": list(param.coeff)}


@reader("Concat")
def _concat(layer: Any, shape: Sequence[int]) -> Settings:
    return {"axis": layer.concat_param.axis % len(shape)}


@reader("Slice")
def _slice(layer: Any, shape: Sequence[int]) -> Settings:
    return {"axis": layer.slice_param.axis % len(shape)}


@reader("Dropout")
def _dropout(layer: Any, shape: Sequence[int]) -> Settings:
    return {"ratio": layer.dropout_param.dropout_ratio}


@reader("Flatten")
def _flatten(layer: Any, shape: Sequence[int]) -> Settings:
    return {"axis": layer.flatten_param.axis, "end": layer.flatten_param.end_axis}


@reader("Permute")
def _permute(layer: Any, shape: Sequence[int]) -> Settings:
    order = list(layer.permute_param.order)
    return {"order": order + [axis for axis in range(len(shape)) if axis not in order]}


@reader("Softmax")
def _softmax(layer: Any, shape: Sequence[int]) -> Settings:
    return {"axis": layer.softmax_param.axis % len(shape)}


@reader("SoftmaxWithLoss")
def _softmax_loss(layer: Any, shape: Sequence[int]) -> Settings:
    param, kinds = layer.loss_param, caffe_pb2.LossParameter.NormalizationMode
    kind = kinds.Name(param.normalization)
    if not param.HasField("normalization") and param.HasField("normalize"):
        kind = "VALID" if param.normalize else "BATCH_SIZE"
    ignored = param.ignore_label if param.HasField("ignore_label") else None
    return {"axis": layer.softmax_param.axis % len(shape), "ignored": ignored, "divisor": kind}


@reader("ContrastiveLoss")
def _contrastive(layer: Any, shape: Sequence[int]) -> Settings:
    return {"margin": layer.contrastive_loss_param.margin}


@reader("Crop")
def _crop(layer: Any, shape: Sequence[int]) -> Settings:
    param, offsets = layer.crop_param, [0] * len(shape)
    count = len(shape) - param.axis
    offsets[param.axis :] = list(param.offset) * (count if len(param.offset) == 1 else 1) or [0] * count
    return {"offsets": offsets}


@reader("Normalize")
def _normalize(layer: Any, shape: Sequence[int]) -> Settings:
    if layer.norm_param.across_spatial or layer.norm_param.channel_shared:
        raise SystemExit(f"layer '{layer.name}': Normalize over all of an image has no peer")
    return {"eps": layer.norm_param.eps}


@reader("PriorBox")
def _prior_box(layer: Any, shape: Sequence[int]) -> Settings:
    param = layer.prior_box_param
    return {
        "small": list(param.min_size),
        "large": list(param.max_size),
        "ratios": list(param.aspect_ratio),
        "flip": param.flip,
        "clip": param.clip,
        "variance": list(param.variance),
        "offset": param.offset,
        "step": param.step or None,
    }


@reader("MultiBoxLoss")
def _multibox(layer: Any, shape: Sequence[int]) -> Settings:
    param = layer.multibox_loss_param
    return {
        "classes": param.num_classes,
        "threshold": param.overlap_threshold,
        "ratio": param.neg_pos_ratio,
        "overlap": param.neg_overlap,
        "background": param.background_label_id,
        "weight": param.loc_weight,
    }


@reader("LSTM")
def _lstm(layer: Any, shape: Sequence[int]) -> Settings:
    return {"outputs": layer.recurrent_param.num_output, "static": len(layer.bottom) > 2}


@reader("Embed")
def _embed(layer: Any, shape: Sequence[int]) -> Settings:
    return {"words": layer.embed_param.input_dim, "outputs": layer.embed_param.num_output}


@reader(
    "Split",
    "Reshape",
    "Sigmoid",
    "Silence",
    "SigmoidCrossEntropyLoss",
    "EuclideanLoss",
    "PReLU",
    "ReLU6",
    "TanH",
    "ELU",
    "Swish",
    "HardSwish",
    "AbsVal",
    "Axpy",
    "Upsample",
    "Interp",
    "SmoothL1Loss",
    "L1Loss",
)
def _nothing(layer: Any, shape: Sequence[int]) -> Settings:
    return {}


def describe(name: str, train: bool, batch: int) -> dict[str, Any]:
    """A net of the zoo: its inputs, layers with settings and shapes, and what it computes.

    Raises:
        SystemExit: a layer has no counterpart.
    """
    param, made = net_param(name, train, batch)
    phase = caffe_pb2.TRAIN if train else caffe_pb2.TEST
    net = Net(param, LayerContext(MetaBackend(), phase=phase))
    return {**describe_net(net, made), "name": name, "train": train, "batch": batch}


def describe_net(net: Net, made: dict[str, Made]) -> dict[str, Any]:
    """The same of a net that is built."""
    layers, losses = [], {}
    for layer in net.layers:
        param = layer.param
        if not param.bottom:
            continue
        if layer.type not in READERS:
            raise SystemExit(f"layer '{layer.name}': {layer.type} has no peer")
        shapes = [list(net.blobs[bottom].shape) for bottom in param.bottom]
        specs = [param.param[i] if i < len(param.param) else None for i in range(len(layer.blobs))]
        layers.append(
            {
                "name": layer.name,
                "type": layer.type,
                "bottoms": list(param.bottom),
                "tops": list(param.top),
                "settings": READERS[layer.type](param, shapes[0]),
                "bottom_shapes": shapes,
                "shapes": [list(net.blobs[top].shape) for top in param.top],
                "keys": [spec.name if spec and spec.name else f"{layer.name}:{i}" for i, spec in enumerate(specs)],
                "parameters": [list(blob.shape) for blob in layer.blobs],
                "frozen": [bool(spec and spec.HasField("lr_mult") and spec.lr_mult == 0) for spec in specs],
            }
        )
        if "Loss" in layer.type:
            losses[param.top[0]] = param.loss_weight[0] if param.loss_weight else 1.0
    return {"inputs": made, "layers": layers, "losses": losses, "outputs": list(net.outputs)}

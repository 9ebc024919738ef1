"""Parts of SSD's nets for `NetSpec`, with the names of SSD's `caffe.model_libs`: base nets, and heads.

Each function adds layers to a net under fixed names, so that weights of the published models fit.
"""
# ruff: noqa: N802 -- the names are SSD's

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caffepy.formats.proto import caffe_pb2
from caffepy.pycaffe.net_spec import NetSpec, layers, params

Settings = Mapping[str, Any]

WEIGHT = {"lr_mult": 1, "decay_mult": 1}
BIAS = {"lr_mult": 2, "decay_mult": 0}
FROZEN = {"lr_mult": 0, "decay_mult": 0}
ZERO = {"type": "constant", "value": 0}
LEARNED = {"param": [WEIGHT, BIAS], "weight_filler": {"type": "xavier"}, "bias_filler": ZERO}
"""Settings of a convolution with weights and biases."""
CLASSES = 1000


# -- files ---------------------------------------------------------------------------------------------


def check_if_exist(path: str) -> bool:
    """Return whether the path exists."""
    return Path(path).exists()


def make_if_not_exist(path: str) -> None:
    """Make a folder with its parents unless it exists."""
    Path(path).mkdir(parents=True, exist_ok=True)


# -- parts ---------------------------------------------------------------------------------------------


def UnpackVariable(var: Any, num: int) -> list[Any]:
    """Return a list of `num` values: `var` itself, or its only value repeated."""
    values = var if isinstance(var, list) else [var]
    if len(values) not in (1, num):
        raise ValueError(f"{var!r} has {len(values)} values; give 1 or {num}")
    return values if len(values) == num else values * num


def ConvBNLayer(
    net: NetSpec,
    from_layer: str,
    out_layer: str,
    use_bn: bool,
    use_relu: bool,
    num_output: int,
    kernel_size: Any,
    pad: Any,
    stride: Any,
    dilation: int = 1,
    use_scale: bool = True,
    lr_mult: float = 1,
    conv_prefix: str = "",
    conv_postfix: str = "",
    bn_prefix: str = "",
    bn_postfix: str = "_bn",
    scale_prefix: str = "",
    scale_postfix: str = "_scale",
    bias_prefix: str = "",
    bias_postfix: str = "_bias",
    **bn_params: Any,
) -> None:
    """Add a convolution, with `use_bn` BatchNorm and Scale (or Bias without `use_scale`), and with `use_relu` ReLU.

    Args:
        net: the net.
        from_layer: name of the bottom.
        out_layer: middle of the layers' names; the prefixes and postfixes surround it.
        use_bn: whether BatchNorm follows; the convolution then has no bias.
        use_relu: whether ReLU follows, named after the convolution.
        num_output: channels.
        kernel_size: one number, or [height, width].
        pad: likewise.
        stride: likewise.
        dilation: of the kernel.
        use_scale: whether Scale follows BatchNorm, else Bias.
        lr_mult: of the weights; twice as much for a bias.
        conv_prefix: of the convolution's name, and so on.
        conv_postfix: likewise.
        bn_prefix: likewise.
        bn_postfix: likewise.
        scale_prefix: likewise.
        scale_postfix: likewise.
        bias_prefix: likewise.
        bias_postfix: likewise.
        bn_params: eps (0.001), moving_average_fraction (0.999), and use_global_stats, which also freezes the Scale.
    """
    (kernel_h, kernel_w), (pad_h, pad_w), (stride_h, stride_w) = (
        UnpackVariable(value, 2) for value in (kernel_size, pad, stride)
    )
    if kernel_h == kernel_w:
        shape = {"kernel_size": kernel_h, "pad": pad_h, "stride": stride_h}
    else:
        shape = {
            "kernel_h": kernel_h,
            "kernel_w": kernel_w,
            "pad_h": pad_h,
            "pad_w": pad_w,
            "stride_h": stride_h,
            "stride_w": stride_w,
        }
    weight = {"lr_mult": lr_mult, "decay_mult": 1}
    if use_bn:
        learned: dict[str, Any] = {"param": [weight], "weight_filler": {"type": "gaussian", "std": 0.01}}
        learned["bias_term"] = False
    else:
        learned = {**LEARNED, "param": [weight, {"lr_mult": 2 * lr_mult, "decay_mult": 0}]}
    if dilation > 1:
        shape["dilation"] = dilation
    name = f"{conv_prefix}{out_layer}{conv_postfix}"
    net[name] = layers.Convolution(net[from_layer], num_output=num_output, **shape, **learned)
    if use_bn:
        fixed = bool(bn_params.get("use_global_stats", False))
        bn = f"{bn_prefix}{out_layer}{bn_postfix}"
        _add_batch_norm(net, name, bn, fixed, bn_params)
        rate = {"lr_mult": 0 if fixed else lr_mult, "decay_mult": 0}
        if use_scale:
            settings = {"bias_term": True, "param": [rate, rate], "filler": {"type": "constant", "value": 1.0}}
            scale = layers.Scale(net[bn], in_place=True, bias_filler=ZERO, **settings)
            net[f"{scale_prefix}{out_layer}{scale_postfix}"] = scale
        else:
            bias = layers.Bias(net[bn], in_place=True, param=[rate], filler=ZERO)
            net[f"{bias_prefix}{out_layer}{bias_postfix}"] = bias
    if use_relu:
        net[f"{name}_relu"] = layers.ReLU(net[name], in_place=True)


def _add_batch_norm(net: NetSpec, bottom: str, name: str, fixed: bool, settings: Settings) -> None:
    statistics: dict[str, Any] = {"param": [FROZEN] * 3, "eps": settings.get("eps", 0.001)}
    if fixed:
        statistics["use_global_stats"] = True
    else:
        statistics["moving_average_fraction"] = settings.get("moving_average_fraction", 0.999)
    net[name] = layers.BatchNorm(net[bottom], in_place=True, **statistics)


def ResBody(
    net: NetSpec,
    from_layer: str,
    block_name: str,
    out2a: int,
    out2b: int,
    out2c: int,
    stride: int,
    use_branch1: bool,
    dilation: int = 1,
    **bn_param: Any,
) -> None:
    """Add a bottleneck block of ResNet, `res<block_name>`.

    Args:
        net: the net.
        from_layer: name of the bottom.
        block_name: such as 2a.
        out2a: channels of the first convolution.
        out2b: of the second one, 3 x 3.
        out2c: of the third one.
        stride: of the first convolution.
        use_branch1: whether a convolution stands beside the three, else the bottom itself.
        dilation: of the second convolution.
        bn_param: settings of BatchNorm, as of `ConvBNLayer`.
    """
    result = f"res{block_name}"
    names: dict[str, Any] = {f"{kind}_prefix": f"{kind}{block_name}_" for kind in ("bn", "scale")}
    names |= {"conv_prefix": f"{result}_", "bn_postfix": "", "scale_postfix": ""}
    shortcut = from_layer
    if use_branch1:
        shortcut = f"{result}_branch1"
        ConvBNLayer(net, from_layer, "branch1", True, False, out2c, 1, 0, stride, **names, **bn_param)
    ConvBNLayer(net, from_layer, "branch2a", True, True, out2a, 1, 0, stride, **names, **bn_param)
    ConvBNLayer(
        net, f"{result}_branch2a", "branch2b", True, True, out2b, 3, dilation, 1, dilation=dilation, **names, **bn_param
    )
    ConvBNLayer(net, f"{result}_branch2b", "branch2c", True, False, out2c, 1, 0, 1, **names, **bn_param)
    net[result] = layers.Eltwise(net[shortcut], net[f"{result}_branch2c"])
    net[f"{result}_relu"] = layers.ReLU(net[result], in_place=True)


def InceptionTower(
    net: NetSpec, from_layer: str, tower_name: str, layer_params: Sequence[Settings], **bn_param: Any
) -> Any:
    """Add a chain of convolutions and poolings, `<tower_name>/<name>`, and return the last top.

    Args:
        net: the net.
        from_layer: name of the first bottom.
        tower_name: prefix of the names.
        layer_params: name and settings of each layer; a name with "pool" makes a Pooling, others a `ConvBNLayer`.
        bn_param: settings of BatchNorm.
    """
    for given in layer_params:
        settings = {key: value for key, value in given.items() if key != "name"}
        name = f"{tower_name}/{given['name']}"
        if "pool" in name:
            net[name] = layers.Pooling(net[from_layer], **settings)
        else:
            settings = {"use_bn": True, "use_relu": True, "use_scale": False, **settings, **bn_param}
            ConvBNLayer(net, from_layer, name, **settings)
        from_layer = name
    return net[from_layer]


def CreateAnnotatedDataLayer(
    source: str,
    batch_size: int = 32,
    backend: int = caffe_pb2.DataParameter.LMDB,
    output_label: bool = True,
    train: bool = True,
    label_map_file: str = "",
    anno_type: Any = None,
    transform_param: Settings | None = None,
    batch_sampler: Sequence[Settings] = ({},),
) -> Any:
    """Return the tops of an AnnotatedData layer, images and with `output_label` boxes.

    Args:
        source: the database.
        batch_size: images of a batch.
        backend: LMDB or LEVELDB.
        output_label: whether there is a second top.
        train: whether the layer belongs to TRAIN, else to TEST.
        label_map_file: names of the classes.
        anno_type: the type of annotations; None: the records'.
        transform_param: settings of the transformation.
        batch_sampler: how crops are drawn.
    """
    annotated = {"label_map_file": label_map_file, "batch_sampler": list(batch_sampler)}
    if anno_type is not None:
        annotated["anno_type"] = anno_type
    return layers.AnnotatedData(
        name="data",
        annotated_data_param=annotated,
        ntop=2 if output_label else 1,
        data_param={"batch_size": batch_size, "backend": backend, "source": source},
        include={"phase": caffe_pb2.TRAIN if train else caffe_pb2.TEST},
        transform_param=transform_param or {},
    )


# -- base nets -----------------------------------------------------------------------------------------


def _check(net: NetSpec, from_layer: str) -> None:
    if from_layer not in net.keys():  # noqa: SIM118 -- a NetSpec
        raise ValueError(f"the net has no layer '{from_layer}'; it has {', '.join(net.keys()) or 'none'}")


def _add_conv(net: NetSpec, bottom: str, number: str, num_output: int, **settings: Any) -> str:
    """Add conv<number> and relu<number>, and return the name of the latter."""
    net[f"conv{number}"] = layers.Convolution(net[bottom], num_output=num_output, **settings, **LEARNED)
    net[f"relu{number}"] = layers.ReLU(net[f"conv{number}"], in_place=True)
    return f"relu{number}"


def _add_pool(net: NetSpec, bottom: str, name: str, **settings: Any) -> str:
    net[name] = layers.Pooling(net[bottom], pool=params.Pooling.MAX, **settings)
    return name


def _add_norm(net: NetSpec, bottom: str, name: str, **settings: Any) -> str:
    net[name] = layers.LRN(net[bottom], **settings)
    return name


def _add_top(net: NetSpec, number: int, dropout: bool) -> str:
    """Add ReLU and Dropout on the last layer, and return the ReLU's name."""
    name = f"relu{number}"
    net[name] = layers.ReLU(net[net.keys()[-1]], in_place=True)
    if dropout:
        net[f"drop{number}"] = layers.Dropout(net[name], dropout_ratio=0.5, in_place=True)
    return name


def _add_fc(net: NetSpec, bottom: str, conv: Settings | None, dropout: bool, postfix: str = "") -> None:
    """Add fc6 and fc7, as convolutions with the settings of fc6 `conv`, or as InnerProduct."""
    if conv is None:
        net.fc6 = layers.InnerProduct(net[bottom], num_output=4096)
        net.fc7 = layers.InnerProduct(net[_add_top(net, 6, dropout)], num_output=4096)
    else:
        net[f"fc6{postfix}"] = layers.Convolution(net[bottom], **conv, **LEARNED)
        below = net[_add_top(net, 6, dropout)]
        net[f"fc7{postfix}"] = layers.Convolution(below, num_output=conv["num_output"], kernel_size=1, **LEARNED)
    _add_top(net, 7, dropout)


def _add_classes(net: NetSpec, fully_conv: bool, postfix: str = "") -> None:
    """Add fc8 and prob on the last layer."""
    below, name = net[net.keys()[-1]], f"fc8{postfix if fully_conv else ''}"
    if fully_conv:
        net[name] = layers.Convolution(below, num_output=CLASSES, kernel_size=1, **LEARNED)
    else:
        net[name] = layers.InnerProduct(below, num_output=CLASSES)
    net.prob = layers.Softmax(net[name])


def _freeze(net: NetSpec, names: Sequence[str]) -> None:
    for name in names:
        if name in net.keys():  # noqa: SIM118 -- a NetSpec
            net.update(name, {**LEARNED, "param": [FROZEN, FROZEN]})


def _fc6_of_six(reduced: bool, dilated: bool) -> Settings:
    """Settings of fc6 as a convolution over 6 x 6 pixels, or `reduced` to a kernel of 3 x 3."""
    size: dict[str, Any] = {"num_output": 1024 if reduced else 4096, "pad": 5 if dilated else 2}
    size["kernel_size"] = 3 if reduced else 6
    dilation = {(True, True): 5, (True, False): 2, (False, True): 2}.get((dilated, reduced))
    return size if dilation is None else {**size, "dilation": dilation}


def AlexNetBody(
    net: NetSpec,
    from_layer: str,
    need_fc: bool = True,
    fully_conv: bool = False,
    reduced: bool = False,
    dilated: bool = False,
    dropout: bool = True,
    need_fc8: bool = False,
    freeze_layers: Sequence[str] = (),
) -> NetSpec:
    """Add AlexNet (Intel Caffe's) and return the net; the arguments are those of `ZFNetBody`."""
    _check(net, from_layer)
    for number, settings in (
        ("1", {"num_output": 96, "kernel_size": 11, "stride": 4}),
        ("2", {"num_output": 256, "pad": 2, "stride": 1, "kernel_size": 5, "group": 2}),
    ):
        relu = _add_conv(net, from_layer, number, **settings)
        norm = _add_norm(net, relu, f"norm{number}", k=2, local_size=5, alpha=0.0001, beta=0.75)
        from_layer = _add_pool(net, norm, f"pool{number}", kernel_size=3, stride=2)
    common = {"pad": 1, "stride": 1, "kernel_size": 3}
    for number, more in (
        ("3", {"num_output": 384}),
        ("4", {"num_output": 384, "group": 2}),
        ("5", {"num_output": 256, "group": 2}),
    ):
        from_layer = _add_conv(net, from_layer, number, **more, **common)
    if need_fc:
        pool = _add_pool(net, from_layer, "pool5", pad=1, kernel_size=3, stride=1 if dilated else 2)
        _add_fc(net, pool, _fc6_of_six(reduced, dilated) if fully_conv else None, dropout, "_conv")
    if need_fc8:
        _add_classes(net, fully_conv, "_conv")
    _freeze(net, freeze_layers)
    return net


def ZFNetBody(
    net: NetSpec,
    from_layer: str,
    need_fc: bool = True,
    fully_conv: bool = False,
    reduced: bool = False,
    dilated: bool = False,
    dropout: bool = True,
    need_fc8: bool = False,
    freeze_layers: Sequence[str] = (),
) -> NetSpec:
    """Add the net of Zeiler and Fergus 2013 and return the net.

    Args:
        net: the net.
        from_layer: name of the images.
        need_fc: whether pool5, fc6 and fc7 follow.
        fully_conv: whether these are convolutions, else InnerProduct.
        reduced: whether the convolutions have 1024 channels and a kernel of 3 x 3.
        dilated: whether pool5 has stride 1, and fc6 a larger dilation for it.
        dropout: whether Dropout follows fc6 and fc7.
        need_fc8: whether fc8, for 1000 classes, and Softmax follow.
        freeze_layers: layers that do not learn.
    """
    _check(net, from_layer)
    within = {"local_size": 3, "alpha": 0.00005, "beta": 0.75, "norm_region": params.LRN.WITHIN_CHANNEL}
    for number, settings in (
        ("1", {"num_output": 96, "pad": 3, "kernel_size": 7, "stride": 2}),
        ("2", {"num_output": 256, "pad": 2, "kernel_size": 5, "stride": 2}),
    ):
        relu = _add_conv(net, from_layer, number, **settings)
        norm = _add_norm(net, relu, f"norm{number}", engine=params.LRN.CAFFE, **within)
        from_layer = _add_pool(net, norm, f"pool{number}", pad=1, kernel_size=3, stride=2)
    for number, channels in (("3", 384), ("4", 384), ("5", 256)):
        from_layer = _add_conv(net, from_layer, number, channels, pad=1, kernel_size=3)
    if need_fc:
        pool = _add_pool(net, from_layer, "pool5", pad=1, kernel_size=3, stride=1 if dilated else 2)
        _add_fc(net, pool, _fc6_of_six(reduced, dilated) if fully_conv else None, dropout)
    if need_fc8:
        _add_classes(net, fully_conv)
    _freeze(net, freeze_layers)
    return net


def VGGNetBody(
    net: NetSpec,
    from_layer: str,
    need_fc: bool = True,
    fully_conv: bool = False,
    reduced: bool = False,
    dilated: bool = False,
    nopool: bool = False,
    dropout: bool = True,
    freeze_layers: Sequence[str] = (),
    dilate_pool4: bool = False,
) -> NetSpec:
    """Add VGG-16 and return the net; `fully_conv`, `reduced` and `dilated` give the base net of SSD.

    Args:
        net: the net.
        from_layer: name of the images.
        need_fc: whether pool5, fc6 and fc7 follow.
        fully_conv: whether these are convolutions, else InnerProduct.
        reduced: whether the convolutions have 1024 channels and a kernel of 3 x 3.
        dilated: whether pool5 has stride 1, and fc6 a larger dilation for it.
        nopool: whether convolutions with stride 2 take the place of pooling.
        dropout: whether Dropout follows fc6 and fc7.
        freeze_layers: layers that do not learn.
        dilate_pool4: whether pool4 has stride 1, and the later layers a dilation for it.
    """
    _check(net, from_layer)
    dilation = 2 if dilate_pool4 and not nopool else 1
    for block, (channels, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3)), 1):
        for i in range(1, count + 1):
            from_layer = _add_conv(net, from_layer, f"{block}_{i}", channels, pad=1, kernel_size=3)
        if nopool:
            from_layer = _add_strided(net, from_layer, f"conv{block}_{count + 1}", channels, 2)
        elif block == 4 and dilation > 1:
            from_layer = _add_pool(net, from_layer, "pool4", kernel_size=3, stride=1, pad=1)
        else:
            from_layer = _add_pool(net, from_layer, f"pool{block}", kernel_size=2, stride=2)
    for i in range(1, 4):
        from_layer = _add_conv(net, from_layer, f"5_{i}", 512, pad=dilation, kernel_size=3, dilation=dilation)
    if need_fc:
        if nopool:
            from_layer = _add_strided(net, from_layer, "conv5_4", 512, 1 if dilated else 2)
        elif dilated:
            from_layer = _add_pool(net, from_layer, "pool5", pad=1, kernel_size=3, stride=1)
        else:
            from_layer = _add_pool(net, from_layer, "pool5", kernel_size=2, stride=2)
        kernel = 3 if reduced else 7
        dilation *= {(True, True): 6, (True, False): 2, (False, True): 3}.get((dilated, reduced), 1)
        fc6 = {"num_output": 1024 if reduced else 4096, "pad": dilation * (kernel - 1) // 2, "kernel_size": kernel}
        _add_fc(net, from_layer, {**fc6, "dilation": dilation} if fully_conv else None, dropout)
    _freeze(net, freeze_layers)
    return net


def _add_strided(net: NetSpec, bottom: str, name: str, channels: int, stride: int) -> str:
    settings = {"num_output": channels, "pad": 1, "kernel_size": 3, "stride": stride}
    net[name] = layers.Convolution(net[bottom], **settings, **LEARNED)
    return name


def _add_resnet(net: NetSpec, from_layer: str, repeats: tuple[int, int], dilated: bool, settings: Settings) -> None:
    """Add ResNet up to res5c; `repeats`: how many blocks follow 3a and 4a."""
    names: dict[str, Any] = {"bn_prefix": "bn_", "bn_postfix": "", "scale_prefix": "scale_", "scale_postfix": ""}
    ConvBNLayer(net, from_layer, "conv1", True, True, 64, 7, 3, 2, **names, **settings)
    last = _add_pool(net, "conv1", "pool1", kernel_size=3, stride=2)
    suffixes = [
        ["a", "b", "c"],
        *(["a", *(f"b{i}" for i in range(1, count + 1))] for count in repeats),
        ["a", "b", "c"],
    ]
    for stage, blocks in enumerate(suffixes, 2):
        width = 16 * 2**stage
        wide = stage == 5 and dilated
        stride = 1 if stage == 2 or wide else 2
        for suffix in blocks:
            first = suffix == "a"
            ResBody(
                net,
                last,
                f"{stage}{suffix}",
                width,
                width,
                4 * width,
                stride if first else 1,
                first,
                dilation=2 if wide else 1,
                **settings,
            )
            last = f"res{stage}{suffix}"


def ResNet101Body(
    net: NetSpec, from_layer: str, use_pool5: bool = True, use_dilation_conv5: bool = False, **bn_param: Any
) -> NetSpec:
    """Add ResNet-101 and return the net.

    Args:
        net: the net.
        from_layer: name of the images.
        use_pool5: whether the mean over all pixels follows.
        use_dilation_conv5: whether the last stage has a dilation of 2 in place of the stride.
        bn_param: settings of BatchNorm.
    """
    _add_resnet(net, from_layer, (3, 22), use_dilation_conv5, bn_param)
    if use_pool5:
        net.pool5 = layers.Pooling(net.res5c, pool=params.Pooling.AVE, global_pooling=True)
    return net


def ResNet152Body(
    net: NetSpec, from_layer: str, use_pool5: bool = True, use_dilation_conv5: bool = False, **bn_param: Any
) -> NetSpec:
    """Add ResNet-152 and return the net; the arguments are those of `ResNet101Body`."""
    _add_resnet(net, from_layer, (7, 35), use_dilation_conv5, bn_param)
    if use_pool5:
        net.pool5 = layers.Pooling(net.res5c, pool=params.Pooling.AVE, global_pooling=True)
    return net


# -- Inception -----------------------------------------------------------------------------------------


def _conv(channels: int, kernel: Any = 1, stride: int = 1, pad: Any = None) -> Settings:
    """Return the settings of a tower's convolution; the pad keeps the size unless it is given."""
    if isinstance(kernel, list):
        return {"num_output": channels, "kernel_size": kernel, "pad": [k // 2 for k in kernel], "stride": [1, 1]}
    return {"num_output": channels, "kernel_size": kernel, "pad": kernel // 2 if pad is None else pad, "stride": stride}


def _tower(*convolutions: Settings, pool: Settings | None = None) -> list[Settings]:
    """Return the layers of a tower with their names: pool, conv, conv_1, …"""
    first = [] if pool is None else [{"name": "pool", **pool}]
    return first + [{"name": f"conv_{i}" if i else "conv", **conv} for i, conv in enumerate(convolutions)]


_AVERAGE = {"pool": params.Pooling.AVE, "kernel_size": 3, "pad": 1, "stride": 1}
_HALVED = {"pool": params.Pooling.MAX, "kernel_size": 3, "pad": 0, "stride": 2}


def _add_mixed(net: NetSpec, from_layer: str, name: str, towers: Mapping[str, list[Settings]], bn: Settings) -> str:
    """Add towers, named after the block with these endings, and their concatenation; return its name."""
    tops = [InceptionTower(net, from_layer, f"{name}{ending}", tower, **bn) for ending, tower in towers.items()]
    net[f"{name}/join"] = layers.Concat(*tops, axis=1)
    return f"{name}/join"


def _add_reduction(net: NetSpec, from_layer: str, name: str, towers: Mapping[str, list[Settings]], bn: Settings) -> str:
    """As `_add_mixed`, with a max pooling of stride 2 as last tower, `<name>/pool`."""
    tops = [InceptionTower(net, from_layer, f"{name}{ending}", tower, **bn) for ending, tower in towers.items()]
    tops.append(InceptionTower(net, from_layer, name, _tower(pool=_HALVED), **bn))
    net[f"{name}/join"] = layers.Concat(*tops, axis=1)
    return f"{name}/join"


def _add_split(net: NetSpec, from_layer: str, name: str, convolutions: list[Settings], bn: Settings) -> Any:
    """Add a tower whose last top goes through 1 x 3 and 3 x 1 convolutions; return their concatenation."""
    InceptionTower(net, from_layer, name, convolutions, **bn)
    below, inner = f"{name}/{convolutions[-1]['name']}", f"{name}/mixed"
    halves = _tower(_conv(384, [1, 3]), _conv(384, [3, 1]))
    net[inner] = layers.Concat(*(InceptionTower(net, below, inner, [half], **bn) for half in halves), axis=1)
    return net[inner]


def InceptionV3Body(net: NetSpec, from_layer: str, output_pred: bool = False, **bn_param: Any) -> NetSpec:
    """Add Inception v3 (Szegedy et al. 2015) and return the net.

    Args:
        net: the net.
        from_layer: name of the images.
        output_pred: whether the mean over the pixels, the scores of 1008 classes and Softmax follow.
        bn_param: settings of BatchNorm.
    """
    stem: tuple[tuple[str, Settings], ...] = (
        ("conv", _conv(32, 3, 2, 0)),
        ("conv_1", _conv(32, 3, 1, 0)),
        ("conv_2", _conv(64, 3)),
        ("pool", _HALVED),
        ("conv_3", _conv(80)),
        ("conv_4", _conv(192, 3, 1, 0)),
        ("pool_1", _HALVED),
    )
    last = from_layer
    for name, settings in stem:
        if "pool" in settings:
            net[name] = layers.Pooling(net[last], **settings)
        else:
            ConvBNLayer(net, last, name, use_bn=True, use_relu=True, use_scale=False, **settings, **bn_param)
        last = name
    for number in range(3):
        last = _add_mixed(
            net,
            last,
            f"mixed_{number}" if number else "mixed",
            {
                "": _tower(_conv(64)),
                "/tower": _tower(_conv(48), _conv(64, 5)),
                "/tower_1": _tower(_conv(64), _conv(96, 3), _conv(96, 3)),
                "/tower_2": _tower(_conv(64 if number else 32), pool=_AVERAGE),
            },
            bn_param,
        )
    last = _add_reduction(
        net,
        last,
        "mixed_3",
        {
            "": _tower(_conv(384, 3, 2, 0)),
            "/tower": _tower(_conv(64), _conv(96, 3), _conv(96, 3, 2, 0)),
        },
        bn_param,
    )
    for number, width in ((4, 128), (5, 160), (6, 160), (7, 192)):
        row, column = _conv(width, [1, 7]), _conv(width, [7, 1])
        last = _add_mixed(
            net,
            last,
            f"mixed_{number}",
            {
                "": _tower(_conv(192)),
                "/tower": _tower(_conv(width), row, _conv(192, [7, 1])),
                "/tower_1": _tower(_conv(width), column, row, column, _conv(192, [1, 7])),
                "/tower_2": _tower(_conv(192), pool=_AVERAGE),
            },
            bn_param,
        )
    last = _add_reduction(
        net,
        last,
        "mixed_8",
        {
            "/tower": _tower(_conv(192), _conv(320, 3, 2, 0)),
            "/tower_1": _tower(_conv(192), _conv(192, [1, 7]), _conv(192, [7, 1]), _conv(192, 3, 2, 0)),
        },
        bn_param,
    )
    for number, pool in ((9, params.Pooling.AVE), (10, params.Pooling.MAX)):
        name = f"mixed_{number}"
        tops = [InceptionTower(net, last, name, _tower(_conv(320)), **bn_param)]
        tops.append(_add_split(net, last, f"{name}/tower", _tower(_conv(384)), bn_param))
        tops.append(_add_split(net, last, f"{name}/tower_1", _tower(_conv(448), _conv(384, 3)), bn_param))
        pooled = _tower(_conv(192), pool={**_AVERAGE, "pool": pool})
        tops.append(InceptionTower(net, last, f"{name}/tower_2", pooled, **bn_param))
        last = f"{name}/join"
        net[last] = layers.Concat(*tops, axis=1)
    if output_pred:
        net.pool_3 = layers.Pooling(net[last], pool=params.Pooling.AVE, kernel_size=8, pad=0, stride=1)
        net.softmax = layers.InnerProduct(net.pool_3, num_output=1008)
        net.softmax_prob = layers.Softmax(net.softmax)
    return net


# -- heads ---------------------------------------------------------------------------------------------


def _listed(values: Sequence[Any], index: int) -> list[Any]:
    """Return the entry as a list; empty where there is none."""
    if index >= len(values):
        return []
    return list(values[index]) if isinstance(values[index], (list, tuple)) else [values[index]]


def _check_lists(from_layers: Sequence[str], lists: Mapping[str, Sequence[Any]]) -> None:
    for name, values in lists.items():
        if (values or name == "min_sizes") and len(values) != len(from_layers):
            raise ValueError(f"{name} has {len(values)} entries for {len(from_layers)} from_layers; give one for each")
    for i, (largest, least) in enumerate(zip(lists["max_sizes"], lists["min_sizes"], strict=False)):
        counts = [len(value) if isinstance(value, (list, tuple)) else 1 for value in (largest, least)]
        if counts[0] not in (0, counts[1]):
            raise ValueError(f"max_sizes[{i}] has {counts[0]} numbers and min_sizes[{i}] {counts[1]}")


def _image_size(height: int, width: int) -> Settings:
    """Return PriorBox's settings of an image's size; empty if a side is 0."""
    if not height or not width:
        return {}
    return {"img_size": height} if height == width else {"img_h": height, "img_w": width}


def CreateMultiBoxHead(
    net: NetSpec,
    data_layer: str = "data",
    num_classes: int = 0,
    from_layers: Sequence[str] = (),
    use_objectness: bool = False,
    normalizations: Sequence[float] = (),
    use_batchnorm: bool = True,
    lr_mult: float = 1,
    use_scale: bool = True,
    min_sizes: Sequence[Any] = (),
    max_sizes: Sequence[Any] = (),
    prior_variance: Sequence[float] = (0.1,),
    aspect_ratios: Sequence[Any] = (),
    steps: Sequence[Any] = (),
    img_height: int = 0,
    img_width: int = 0,
    share_location: bool = True,
    flip: bool = True,
    clip: bool = True,
    offset: float = 0.5,
    inter_layer_depth: Sequence[int] = (),
    kernel_size: int = 1,
    pad: int = 0,
    conf_postfix: str = "",
    loc_postfix: str = "",
    **bn_param: Any,
) -> list[Any]:
    """Add SSD's predictions on feature maps, and return the tops mbox_loc, mbox_conf, mbox_priorbox (mbox_objectness).

    Args:
        net: the net.
        data_layer: name of the images.
        num_classes: with the background.
        from_layers: names of the feature maps; each list below has an entry for each of them, or is empty.
        use_objectness: whether a score of objects is predicted too.
        normalizations: initial scale of a Normalize layer on each map; -1: none.
        use_batchnorm: whether the convolutions have BatchNorm.
        lr_mult: of the convolutions.
        use_scale: not read, as in SSD.
        min_sizes: of the priors, one or a list.
        max_sizes: likewise.
        prior_variance: one number or four.
        aspect_ratios: of further priors.
        steps: distance of the priors.
        img_height: of the images if PriorBox shall not take it from them.
        img_width: likewise.
        share_location: whether all classes have the same boxes.
        flip: whether the inverse of each ratio makes a prior too.
        clip: whether priors are clipped to the image.
        offset: of the first prior, in steps.
        inter_layer_depth: channels of a convolution between the map and the predictions; 0: none.
        kernel_size: of the predictions.
        pad: likewise.
        conf_postfix: of the names of scores.
        loc_postfix: of the names of locations.
        bn_param: settings of BatchNorm.
    """
    if num_classes < 1:
        raise ValueError("give num_classes, with the background")
    lists = {
        "normalizations": normalizations,
        "min_sizes": min_sizes,
        "max_sizes": max_sizes,
        "steps": steps,
        "aspect_ratios": aspect_ratios,
        "inter_layer_depth": inter_layer_depth,
    }
    _check_lists(from_layers, lists)
    _check(net, data_layer)

    def predict(bottom: str, name: str, channels: int) -> Any:
        settings: dict[str, Any] = {
            "use_relu": False,
            "num_output": channels,
            "kernel_size": kernel_size,
            "pad": pad,
            "stride": 1,
        }
        ConvBNLayer(net, bottom, name, use_bn=use_batchnorm, lr_mult=lr_mult, **settings, **bn_param)
        net[f"{name}_perm"] = layers.Permute(net[name], order=[0, 2, 3, 1])
        net[f"{name}_flat"] = layers.Flatten(net[f"{name}_perm"], axis=1)
        return net[f"{name}_flat"]

    parts: dict[str, list[Any]] = {"loc": [], "conf": [], "priorbox": [], "objectness": []}
    for i, given in enumerate(from_layers):
        bottom = given
        if normalizations and normalizations[i] != -1:
            filler = {"type": "constant", "value": normalizations[i]}
            norm = layers.Normalize(net[bottom], scale_filler=filler, across_spatial=False, channel_shared=False)
            bottom = f"{bottom}_norm"
            net[bottom] = norm
        if inter_layer_depth and inter_layer_depth[i] > 0:
            settings: dict[str, Any] = {"num_output": inter_layer_depth[i], "kernel_size": 3, "pad": 1, "stride": 1}
            ConvBNLayer(
                net,
                bottom,
                f"{bottom}_inter",
                use_bn=use_batchnorm,
                use_relu=True,
                lr_mult=lr_mult,
                **settings,
                **bn_param,
            )
            bottom = f"{bottom}_inter"
        sizes, largest, ratios = (_listed(values, i) for values in (min_sizes, max_sizes, aspect_ratios))
        count = len(sizes) * (1 + bool(largest) + len(ratios) * (1 + flip))
        boxes = 4 * count * (1 if share_location else num_classes)
        parts["loc"].append(predict(bottom, f"{bottom}_mbox_loc{loc_postfix}", boxes))
        parts["conf"].append(predict(bottom, f"{bottom}_mbox_conf{conf_postfix}", count * num_classes))
        priors = {"min_size": sizes, "max_size": largest, "aspect_ratio": ratios, "step": steps[i] if steps else None}
        if ratios:
            priors["flip"] = flip
        given_settings = {name: value for name, value in priors.items() if value or name == "flip"}
        net[f"{bottom}_mbox_priorbox"] = layers.PriorBox(
            net[bottom],
            net[data_layer],
            clip=clip,
            variance=list(prior_variance),
            offset=offset,
            **given_settings,
            **_image_size(img_height, img_width),
        )
        parts["priorbox"].append(net[f"{bottom}_mbox_priorbox"])
        if use_objectness:
            parts["objectness"].append(predict(bottom, f"{bottom}_mbox_objectness", 2 * count))
    for kind, tops in parts.items():
        if tops:
            net[f"mbox_{kind}"] = layers.Concat(*tops, axis=2 if kind == "priorbox" else 1)
    return [net[f"mbox_{kind}"] for kind, tops in parts.items() if tops]

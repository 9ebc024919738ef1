"""Layers that move, join, cut and reduce elements."""

from __future__ import annotations

from caffepy.export.torch.code import LayerCode, exports
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.export_rules import call, number

_Eltwise, _Reduction = caffe_pb2.EltwiseParameter, caffe_pb2.ReductionParameter


@exports("Concat", form="torch.cat")
def concat(code: LayerCode) -> str:
    param = code.param.concat_param
    if param.per_fla_fuse:
        raise code.refuse("per_fla_fuse")
    axis = code.axis(param.concat_dim if param.HasField("concat_dim") else param.axis)
    return f"torch.cat([{', '.join(code.inputs)}], dim={axis})"


@exports("Slice", form="split")
def cut(code: LayerCode) -> str:
    param = code.param.slice_param
    axis = code.axis(param.slice_dim if param.HasField("slice_dim") else param.axis)
    if len(code.tops) == 1:
        return code.x
    return f"{code.x}.split({[top.shape[axis] for top in code.tops]}, dim={axis})"


@exports("Eltwise", form="+, * or torch.maximum")
def eltwise(code: LayerCode) -> str:
    param = code.param.eltwise_param
    if param.operation == _Eltwise.MAX:
        value = code.x
        for other in code.inputs[1:]:
            value = f"torch.maximum({value}, {other})"
        return value
    if param.operation == _Eltwise.PROD:
        return " * ".join(code.inputs)
    factors = list(param.coeff) or [1.0] * len(code.inputs)
    terms = [
        name if factor == 1 else f"{number(factor)} * {name}" for name, factor in zip(code.inputs, factors, strict=True)
    ]
    return " + ".join(terms).replace("+ -1.0 * ", "- ")


@exports("Flatten", form="flatten")
def flatten(code: LayerCode) -> str:
    param = code.param.flatten_param
    first, last = code.axis(param.axis), code.axis(param.end_axis)
    return f"{code.x}.flatten({first})" if last == code.rank - 1 else f"{code.x}.flatten({first}, {last})"


@exports("Reshape", form="reshape")
def reshape(code: LayerCode) -> str:
    return f"{code.x}.reshape({code.shape_of(code.tops[0])})"


@exports("Permute", form="permute")
def permute(code: LayerCode) -> str:
    order = list(code.param.permute_param.order)
    order += [axis for axis in range(code.rank) if axis not in order]
    return f"{code.x}.permute({', '.join(map(str, order))})"


@exports("Crop", form="slices")
def crop(code: LayerCode) -> str:
    param, shape = code.param.crop_param, code.tops[0].shape
    first = code.axis(param.axis)
    offsets = list(param.offset) or [0]
    offsets = offsets if len(offsets) > 1 else offsets * (code.rank - first)
    parts = [f"{begin}:{begin + shape[first + index]}" for index, begin in enumerate(offsets)]
    return f"{code.x}[{', '.join([':'] * first + parts)}]"


@exports("Tile", form="repeat")
def tile(code: LayerCode) -> str:
    param = code.param.tile_param
    repeats = [1] * code.rank
    repeats[code.axis(param.axis)] = param.tiles
    return f"{code.x}.repeat({', '.join(map(str, repeats))})"


@exports("Reduction", form="sum or mean")
def reduction(code: LayerCode) -> str:
    param = code.param.reduction_param
    texts = {
        _Reduction.MEAN: "{}.mean(-1)",
        _Reduction.ASUM: "{}.abs().sum(-1)",
        _Reduction.SUMSQ: "{}.square().sum(-1)",
    }
    value = texts.get(param.operation, "{}.sum(-1)").format(f"{code.x}.flatten({code.axis(param.axis)})")
    return value if param.coeff == 1 else f"{number(param.coeff)} * {value}"


@exports("Softmax", form="nn.Softmax")
def softmax(code: LayerCode) -> str:
    return code.apply(call("nn.Softmax", dim=code.axis(code.param.softmax_param.axis)))


@exports("ArgMax", form="a class")
def arg_max(code: LayerCode) -> str:
    param = code.param.argmax_param
    top_k = None if param.top_k == 1 else param.top_k
    if param.HasField("axis"):
        values = True if param.out_max_val else None
        return code.apply(call("ArgMax", code.axis(param.axis), top_k=top_k, values=values))
    if param.out_max_val:
        raise code.refuse("out_max_val without axis")
    return (
        f"{code.apply(call('ArgMax', 1, top_k=top_k), f'{code.x}.flatten(1)')}.reshape({code.shape_of(code.tops[0])})"
    )


@exports("Embed", form="nn.Embedding; a class with a bias")
def embed(code: LayerCode) -> str:
    sizes = code.layer.blobs[0].shape
    if code.param.embed_param.bias_term:
        return code.apply(call("Embed", *sizes), weight=code.weights(0), bias=code.weights(1))
    return code.apply(call("nn.Embedding", *sizes), f"{code.x}.long()", weight=code.weights(0))


@exports("Filter", form="an index")
def filter_samples(code: LayerCode) -> list[str]:
    if code.param.HasField("filter_param"):
        raise code.refuse("filter_param")
    return [f"{name}[{code.inputs[-1]}.flatten().long() != 0]" for name in code.inputs[:-1]]


@exports("BatchReindex", form="an index")
def batch_reindex(code: LayerCode) -> str:
    return f"{code.x}[{code.inputs[1]}.long()]"


@exports("Parameter", form="a class")
def parameter(code: LayerCode) -> str:
    return f"{code.submodule(call('Constant', *code.layer.blobs[0].shape), weight=code.weights(0))}()"

"""Layers over time steps, as classes."""

from __future__ import annotations

from caffepy.export.torch.code import LayerCode, exports
from caffepy.layers.export_rules import call


@exports("LSTM", form="a class; the states begin at 0")
def lstm(code: LayerCode) -> str:
    return _recurrent(code, "LSTM", ("hidden.weight",))


@exports("RNN", form="a class; the state begins at 0")
def rnn(code: LayerCode) -> str:
    return _recurrent(code, "RNN", ("hidden.weight", "output.weight", "output.bias"))


def _recurrent(code: LayerCode, name: str, own: tuple[str, ...]) -> str:
    param, blobs = code.param.recurrent_param, code.layer.blobs
    if param.expose_hidden:
        raise code.refuse("expose_hidden")
    has_static = len(code.inputs) > 2
    keys = ["input.weight", "input.bias", *["static.weight"] * has_static, *own]
    parameters = {key: code.weights(index) for index, key in enumerate(keys)}
    static = blobs[2].shape[1] if has_static else None
    return code.apply(call(name, blobs[0].shape[1], param.num_output, static_inputs=static), *code.inputs, **parameters)

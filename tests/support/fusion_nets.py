"""Small nets whose layers are fused, and the comparison of what they compute with the layers by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from google.protobuf import text_format

from caffepy.backend import create_backend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

CPU = create_backend(None, 1)
DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 3 dim: 5 dim: 6 dim: 7 } shape { dim: 3 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
"""
LOSS = """
layer { name: "pool" type: "Pooling" bottom: "%s" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def convolution(name: str, bottom: str, top: str, outputs: int = 8, bias: bool = False) -> str:
    return f"""layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{top}" convolution_param {{
      num_output: {outputs} kernel_size: 3 pad: 1 bias_term: {str(bias).lower()} weight_filler {{ type: "msra" }}
      bias_filler {{ type: "uniform" min: -1 max: 1 }} }} }}"""


def changed(text: str, setting: str, kernel: int) -> str:
    """A convolution with another setting in place of its padding, and another kernel."""
    return text.replace("pad: 1", setting).replace("kernel_size: 3", f"kernel_size: {kernel}")


def norm(name: str, bottom: str, top: str, bias: bool = True) -> str:
    return f"""layer {{ name: "{name}" type: "BatchNorm" bottom: "{bottom}" top: "{top}" }}
    layer {{ name: "{name}_scale" type: "Scale" bottom: "{top}" top: "{top}" scale_param {{
      filler {{ type: "uniform" min: 0.5 max: 2 }} bias_term: {str(bias).lower()}
      bias_filler {{ type: "uniform" min: -1 max: 1 }} }} }}"""


def relu(blob: str, top: str = "") -> str:
    return f'layer {{ name: "{top or blob}_relu" type: "ReLU" bottom: "{blob}" top: "{top or blob}" }}'


def total(name: str, first: str, second: str, top: str = "") -> str:
    return f'layer {{ name: "{name}" type: "Eltwise" bottom: "{first}" bottom: "{second}" top: "{top or name}" }}'


STEPS: dict[str, Callable[..., str]] = {
    "conv": convolution,
    "biased": partial(convolution, bias=True),
    "norm": norm,
    "unbiased": partial(norm, bias=False),
    "relu": relu,
    "sum": total,
}


def chain(steps: str, last: str) -> str:
    """A net of data, layers as in `conv c data c; relu c`, and a loss of the last blob."""
    calls = [step.split() for step in steps.split(";")]
    return DATA + "".join(STEPS[kind](*names) for kind, *names in calls) + LOSS % last


def build(text: str, fuse: bool, phase: int = caffe_pb2.TRAIN) -> Net:
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    return Net(param, LayerContext(CPU, phase=phase, seed=7), fuse=fuse)


def run(net: Net, passes: int) -> dict[str, Any]:
    """Losses and the parameters' values and gradients of some passes, gradients added up."""
    found: dict[str, Any] = {}
    net.clear_param_diffs()
    for index in range(passes):
        net.forward()
        found[f"loss {index}"] = net.loss()
        if net.phase == caffe_pb2.TRAIN:
            net.backward()
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            found[f"{layer.name}[{index}]"] = blob.host_data()
            if net.phase == caffe_pb2.TRAIN and layer.propagate_to_params[index]:
                found[f"d {layer.name}[{index}]"] = blob.host_diff()
    return found


def layer(kind: str, bottoms: str, tops: str = "", setting: str = "") -> str:
    """In place unless tops are given."""
    tops = tops or bottoms
    names = "".join(f' bottom: "{b}"' for b in bottoms.split()) + "".join(f' top: "{t}"' for t in tops.split())
    return f'layer {{ name: "{kind}_{tops.replace(" ", "_")}" type: "{kind}"{names} {setting} }}\n'


def in_place(blob: str, *kinds: str) -> str:
    """Layers that work in place one after the other; settings may follow a type's name."""
    text = ""
    for number, kind in enumerate(kinds):
        name, _, setting = kind.partition(" ")
        text += layer(name, blob, "", setting).replace(f'name: "{name}_', f'name: "{name}{number}_')
    return text


def check_alike(text: str, passes: int = 2) -> Net:
    """Compare the fused net with the plain one; returns the fused one."""
    fused = build(text, True)
    ours, plain = run(fused, passes), run(build(text, False), passes)
    assert ours.keys() == plain.keys()
    for key, values in plain.items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)
    return fused


def names_of(net: Net) -> list[str]:
    return [node.layer.name for node in net.schedule]


SCALE = 'Scale scale_param { bias_term: true filler { type: "uniform" min: 0.5 max: 2 } }'
STORED = "BatchNorm batch_norm_param { use_global_stats: true eps: 1 }"
KEEPING = [
    "PReLU",
    SCALE,
    "AbsVal",
    "Power power_param { power: 2 shift: 0.3 }",
    "Clip clip_param { min: -0.4 max: 0.7 }",
    "Swish",
    "BNLL",
    "AbsVal\nLog log_param { shift: 1.5 }",
    "ReLU relu_param { negative_slope: -0.3 }",
]
"""Layers that need their bottom for the gradient and keep it where they work in place."""

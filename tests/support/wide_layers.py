"""The layers of `wide_nets`: templates of their settings in which `<a|b>` is one of several texts.

`$N`, `$C`, `$H` and `$W` stand for the first bottom's sizes, `tops:2` for two tops, `tame` for settings with which no
number grows much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

OUTPUTS = "num_output: <1|2|3|5|7|17>"
XAVIER = "weight_filler { type: 'xavier' } bias_filler { type: 'uniform' min: -0.5 max: 0.5 }"
FILLER = "filler { type: 'uniform' min: 0.5 max: 1.5 } bias_filler { type: 'uniform' min: -0.5 max: 0.5 }"
WINDOW = "kernel_size: <1|1|2|3|3|4> stride: <1|1|1|2|3> pad: <0|0|1|2>"
SIDES = "kernel_h: <1|2|3|5> kernel_w: <1|2|3> stride_h: <1|2> stride_w: <1|2> pad_h: <0|1> pad_w: <0|1>"
CONVOLUTION = f"<{WINDOW} <|dilation: 2>|{SIDES}> bias_term: <true|false> {XAVIER}"

SINGLE: dict[str, list[str]] = {
    "Convolution": [
        *[f"convolution_param {{ {OUTPUTS} {CONVOLUTION} }}"] * 3,
        f"convolution_param {{ num_output: $C group: $C {CONVOLUTION} }}",
        f"convolution_param {{ num_output: <2|4|6> group: 2 {CONVOLUTION} }}",
        f"convolution_param {{ {OUTPUTS} kernel_size: <1|2> axis: 2 {XAVIER} }}",
    ],
    "Deconvolution": [
        f"convolution_param {{ {OUTPUTS} {CONVOLUTION} }}",
        f"convolution_param {{ num_output: $C group: $C {CONVOLUTION} }}",
    ],
    "DepthwiseConvolution": [f"convolution_param {{ num_output: $C group: $C {CONVOLUTION} }}"],
    "ConvolutionDepthwise": [f"convolution_param {{ num_output: $C {CONVOLUTION} }}"],
    "InnerProduct": [
        f"inner_product_param {{ {OUTPUTS} bias_term: <true|false> transpose: <true|false> axis: <1|1|2|-1> {XAVIER} }}"
    ],
    "Pooling": [
        f"pooling_param {{ pool: <MAX|AVE> <{WINDOW}|{SIDES}> <|round_mode: FLOOR> }}",
        "pooling_param { pool: <MAX|AVE> global_pooling: true }",
    ],
    "LRN": [
        "lrn_param { local_size: <1|3|5> alpha: <0.5|1e-4> beta: <0.75|0.5> k: <1|2> "
        "norm_region: <ACROSS_CHANNELS|ACROSS_CHANNELS|WITHIN_CHANNEL> }"
    ],
    "BatchNorm": [
        *["batch_norm_param { eps: <0.1|0.5> <|scale_bias: true> }"] * 2,
        "batch_norm_param { eps: <0.1|0.5> use_global_stats: <true|true|false> <|scale_bias: true> }",
    ],
    "BN": [
        "bn_param { slope_filler { type: 'uniform' min: 0.5 max: 2 } bias_filler { value: 0.3 } eps: 1 }",
        "bn_param { slope_filler { value: 1 } eps: 1 <inverse_std|frozen>: true }",
        "bn_param { bn_mode: INFERENCE scale_filler { type: 'uniform' min: 0.5 max: 2 } }",
    ],
    "Scale": [
        *[f"scale_param {{ bias_term: <true|false> {FILLER} }}"] * 2,
        f"scale_param {{ axis: <0|1|2|-1> num_axes: <-1|0|1|2> bias_term: <true|false> {FILLER} }}",
    ],
    "Bias": [
        "bias_param { filler { type: 'uniform' min: -1 max: 1 } }",
        "bias_param { axis: <0|1|2|-1> num_axes: <-1|0|1|2> filler { type: 'uniform' min: -1 max: 1 } }",
    ],
    "MVN": ["mvn_param { normalize_variance: <true|false> across_channels: <true|false> eps: 0.5 }"],
    "Normalize": ["norm_param { across_spatial: <true|false> channel_shared: <true|false> eps: 0.5 }"],
    "ReLU": ["", "", "relu_param { negative_slope: <0.1|-0.2> }"],
    "ReLU6": [""],
    "HardSwish": [""],
    "Mish": [""],
    "PReLU": [
        "prelu_param { filler { type: 'uniform' min: -0.3 max: 0.6 } channel_shared: <true|false> }",
    ],
    "ELU": ["elu_param { alpha: <1|0.5> }"],
    "Swish": ["swish_param { beta: <1|1.5> }"],
    "Clip": ["clip_param { min: -0.5 max: 0.8 }"],
    "Threshold": ["threshold_param { threshold: 0.5 }"],
    "Power": ["tame power_param { scale: -0.7 shift: 0.2 }", "power_param { power: <2|3> shift: 0.5 }", "tame"],
    "Exp": ["exp_param { scale: 0.2 <|base: 2> }"],
    "Log": ["log_param { shift: 1.1 }"],
    "AbsVal": [""],
    "BNLL": [""],
    "Sigmoid": [""],
    "TanH": [""],
    "Dropout": ["dropout_param { dropout_ratio: <0.3|0.5> }"],
    "Softmax": ["softmax_param { axis: <1|1|0|2|-1> }"],
    "Flatten": ["", "flatten_param { axis: <0|1|2> end_axis: <1|2|-1> }"],
    "Reshape": [
        "reshape_param { shape { dim: 0 dim: -1 } }",
        "reshape_param { shape { dim: 0 dim: 0 dim: -1 } }",
        "reshape_param { shape { dim: 0 dim: -1 dim: $C dim: 1 } }",
        "reshape_param { shape { dim: -1 } axis: 1 num_axes: <1|2> }",
        "reshape_param { shape { dim: 1 } axis: <1|2|-1> num_axes: 0 }",
        "reshape_param { shape { dim: $H dim: -1 dim: 1 dim: $N } }",
    ],
    "Permute": [
        "permute_param { order: 0 order: 2 order: 3 order: 1 }",
        "permute_param { order: <0|1> order: <2|0> order: <1|3> }",
        "permute_param { order: 1 order: 0 }",
    ],
    "Tile": ["tile_param { axis: <0|1|2|-1> tiles: <1|2|3> }"],
    "Reduction": ["reduction_param { operation: <SUM|MEAN|ASUM|SUMSQ> axis: <0|1|1|2> coeff: <1|0.1> }"],
    "ArgMax": ["argmax_param { out_max_val: <true|false> top_k: <1|2> <|axis: <1|2>> }"],
    "ShuffleChannel": ["shuffle_channel_param { group: <1|2|3|$C> }"],
    "Interp": ["interp_param { height: <1|3|6> width: <2|5> }", "interp_param { zoom_factor: 2 }"],
    "Upsample": ["upsample_param { scale: 2 }"],
    "SPP": ["spp_param { pyramid_height: <1|2> pool: <MAX|AVE> }"],
    "Im2col": [f"convolution_param {{ {WINDOW} }}"],
    "Slice": [
        "tops:2 slice_param { axis: <0|1|1|2|-1> }",
        "tops:2 slice_param { axis: <1|1|2|-1> slice_point: <1|2> }",
        "tops:3 slice_param { axis: <1|1|2> slice_point: 1 slice_point: <2|3> }",
    ],
    "Split": ["tops:2", "tops:3"],
    "Concat": ["concat_param { axis: <0|1|2> }"],
    "Eltwise": [""],
}
"""Layers of one bottom."""

RECURRENT = f"recurrent_param {{ num_output: <1|3|5> {XAVIER} }}"
PAIRS: dict[str, list[tuple[str, ...]]] = {
    "Eltwise": [
        *[("", "same")] * 4,
        ("eltwise_param { coeff: <1|-0.5> coeff: <2|1> }", "same"),
        ("eltwise_param { operation: <MAX|PROD|SUM> }", "same"),
        ("eltwise_param { operation: <MAX|PROD|SUM> }", "same", "same"),
    ],
    "Concat": [("concat_param { axis: <0|1|1|2|-1> }", "any"), ("concat_param { axis: 1 }", "any", "any")],
    "Crop": [("crop_param { axis: <1|2|2|3> offset: <0|1> }", "any"), ("", "any")],
    "Scale": [("scale_param { axis: <0|1> }", "any"), ("scale_param { axis: 0 bias_term: true }", "N normal")],
    "Bias": [("bias_param { axis: <0|1> }", "any")],
    "Axpy": [("", "same", "same")],
    "Embed": [
        (f"only embed_param {{ {OUTPUTS} input_dim: 5 bias_term: <true|false> {XAVIER} }}", "N ids:5"),
        (f"only embed_param {{ {OUTPUTS} input_dim: 3 bias_term: <true|false> {XAVIER} }}", "NxC ids:3"),
    ],
    "BatchReindex": [("", "3 ids:$N"), ("", "N ids:$N")],
    "LSTM": [(RECURRENT, "NxC cont"), (RECURRENT, "NxC cont", "CxH normal")],
    "RNN": [(RECURRENT, "NxC cont")],
    "ROIPooling": [
        ("roi_pooling_param { pooled_h: <1|2|3> pooled_w: <1|2> spatial_scale: <1|0.5> }", "3x5 rois:$N"),
    ],
    "InnerProduct": [(f"only inner_product_param {{ {OUTPUTS} {XAVIER} }}",)],
}
"""Layers of several bottoms, and where the others come from."""

PAIR_WEIGHTS = {"Eltwise": 6, "Concat": 4, "Crop": 2, "Scale": 2}
"""How often each of these types is taken; 1 if not here."""

USUAL = (
    ("Convolution", "BatchNorm"),
    ("Convolution", "Scale"),
    ("Convolution", "ReLU"),
    ("Convolution", "Bias"),
    ("Deconvolution", "BatchNorm"),
    ("InnerProduct", "ReLU"),
    ("BatchNorm", "Scale"),
    ("BatchNorm", "Eltwise"),
    ("BatchNorm", "ReLU"),
    ("Scale", "Eltwise"),
    ("Scale", "ReLU"),
    ("Bias", "ReLU"),
    ("Eltwise", "ReLU"),
    ("ReLU", "Convolution"),
    ("ReLU", "Pooling"),
)
"""Types that often stand one behind the other."""

LOSSES: list[tuple[str, ...]] = [
    *[("SoftmaxWithLoss", "<|loss_weight: 0.5> <|loss_param { ignore_label: 0 }>", "labels")] * 2,
    ("SoftmaxWithLoss", "loss_param { normalization: <FULL|VALID|BATCH_SIZE|NONE> }", "labels"),
    ("EuclideanLoss", "<|loss_weight: 2>", "target"),
    ("SmoothL1Loss", "", "target"),
    ("L1Loss", "", "target"),
    ("SigmoidCrossEntropyLoss", "", "unit"),
    ("HingeLoss", "hinge_loss_param { norm: <L1|L2> }", "labels"),
    ("Accuracy", "accuracy_param { top_k: 1 }", "labels"),
]

IN_PLACE = {
    "ReLU",
    "ReLU6",
    "HardSwish",
    "Mish",
    "PReLU",
    "ELU",
    "Swish",
    "Clip",
    "Power",
    "Exp",
    "Log",
    "AbsVal",
    "BNLL",
    "Sigmoid",
    "TanH",
    "Dropout",
    "Scale",
    "Bias",
    "BatchNorm",
    "BN",
    "Softmax",
}
FUSIBLE = tuple(
    sorted(
        {
            *IN_PLACE - {"ReLU6", "HardSwish", "Mish"},
            "Convolution",
            "Deconvolution",
            "InnerProduct",
            "Pooling",
            "Eltwise",
            "Concat",
            "Slice",
            "Split",
            "LRN",
            "Flatten",
            "Reshape",
        }
    )
)
"""Of `fusible_net`: types that are fused, and some between them."""
BOUNDING = {"Sigmoid", "TanH", "Softmax", "Clip", "ReLU6", "Normalize", "Threshold"}
POSITIVE = {"ReLU6", "AbsVal", "Sigmoid", "Softmax", "Exp", "BNLL", "Threshold"}
WILD = {"Power", "Exp"}
"""Types whose outputs may be huge if their bottoms are."""
STOPPING = {"ArgMax", "Threshold", "Embed", "BatchReindex", "ROIPooling", "Accuracy"}
"""Types of which no gradient is asked for a bottom."""
WEIGHTS = {
    "Convolution": 14,
    "BatchNorm": 8,
    "Scale": 6,
    "ReLU": 8,
    "InnerProduct": 8,
    "Log": 3,
    "Pooling": 4,
    "Split": 2,
    "Slice": 3,
    "Deconvolution": 3,
    "DepthwiseConvolution": 2,
    "Bias": 2,
    "LRN": 2,
    "Softmax": 2,
    "Reshape": 3,
    "Permute": 2,
    "Concat": 0.3,
    "Eltwise": 0.3,
}
"""How often each type is taken; 1 if not here."""


def _rois(generator: np.random.Generator, shape: tuple[int, ...], limit: int) -> Any:
    """Regions: image, and corners within -1 to 6."""
    corners = generator.integers(-1, 4, (*shape[:-1], 2))
    images = generator.integers(0, limit, (*shape[:-1], 1))
    return np.concatenate([images, corners, corners + generator.integers(0, 5, corners.shape)], axis=-1)


INPUT_KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...], int], Any]] = {
    "normal": lambda generator, shape, _: generator.standard_normal(shape),
    "target": lambda generator, shape, _: generator.standard_normal(shape),
    "unit": lambda generator, shape, _: generator.uniform(0, 1, shape),
    "ids": lambda generator, shape, limit: generator.integers(0, max(1, limit), shape),
    "cont": lambda generator, shape, _: generator.integers(0, 2, shape),
    "rois": _rois,
}
"""What numbers an input takes, by name: made of a generator, a shape and a limit."""

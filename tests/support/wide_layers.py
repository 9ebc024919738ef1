"""What `wide_nets` knows of the layers whose templates it draws: how often, behind which, and with which numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from layer_templates import IN_PLACE, SHARED, WIDE, Template

SINGLE: dict[str, list[str]] = {}
"""Settings of layers of one bottom."""
PAIRS: dict[str, list[Template]] = {}
"""Settings of layers of several bottoms, and where the others come from."""
for _kind in sorted({*SHARED, *WIDE}):
    for _settings, _, *_others in SHARED.get(_kind, []) + WIDE.get(_kind, []):
        if _others:
            PAIRS.setdefault(_kind, []).append((_settings, *_others))
        else:
            SINGLE.setdefault(_kind, []).append(_settings)

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
    ("Permute", "Flatten"),
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

FUSIBLE = tuple(
    sorted(
        {
            *IN_PLACE - {"ReLU6", "HardSwish", "Mish", "SeLU", "SeLu", "SeLUDropout", "SeLuDropout"},
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
            "Permute",
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
    "Permute": 6,
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

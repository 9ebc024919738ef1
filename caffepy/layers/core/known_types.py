"""The layer types that caffepy has, by module, and those of both Caffes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

OF_BOTH = frozenset(
    [
        "AbsVal",
        "Accuracy",
        "ArgMax",
        "BNLL",
        "BatchNorm",
        "BatchReindex",
        "Bias",
        "Concat",
        "ContrastiveLoss",
        "Convolution",
        "Crop",
        "Data",
        "Deconvolution",
        "Dropout",
        "DummyData",
        "ELU",
        "Eltwise",
        "Embed",
        "EuclideanLoss",
        "Exp",
        "Filter",
        "Flatten",
        "HDF5Data",
        "HDF5Output",
        "HingeLoss",
        "Im2col",
        "ImageData",
        "InfogainLoss",
        "InnerProduct",
        "Input",
        "LRN",
        "LSTM",
        "LSTMUnit",
        "Log",
        "MVN",
        "MemoryData",
        "MultinomialLogisticLoss",
        "PReLU",
        "Pooling",
        "Power",
        "Python",
        "RNN",
        "ReLU",
        "Reduction",
        "Reshape",
        "SPP",
        "Scale",
        "Sigmoid",
        "SigmoidCrossEntropyLoss",
        "Silence",
        "Slice",
        "Softmax",
        "SoftmaxWithLoss",
        "Split",
        "TanH",
        "Threshold",
        "Tile",
        "WindowData",
    ]
)
OF_BVLC = frozenset(["Clip", "Parameter", "Swish"])
OF_NVIDIA = frozenset(
    [
        "AnnotatedData",
        "Axpy",
        "DetectNetTransformation",
        "DetectionEvaluate",
        "DetectionOutput",
        "L1Loss",
        "MultiBoxLoss",
        "Normalize",
        "Permute",
        "PriorBox",
        "SmoothL1Loss",
        "TRT",
        "VideoData",
    ]
)
_ADVICE = {"TRT": "it runs a net with TensorRT; run the net that its deploy field names instead"}


def describe_missing(type_name: str) -> str:
    """A sentence on a type that a Caffe has; empty if none does."""
    for names, owner in ((OF_BOTH, "both Caffes"), (OF_BVLC, "BVLC Caffe"), (OF_NVIDIA, "NVIDIA Caffe")):
        if type_name in names:
            advice = _ADVICE.get(type_name, "docs/reference/layers.md lists those that it has")
            return f"{type_name} is a layer of {owner} that caffepy does not have: {advice}"
    return ""


_FOLDER = Path(__file__).parents[1]
_REGISTERED = re.compile(r"^@register_layer\(([^)]*)\)", re.MULTILINE)
_NAME = re.compile(r"[\"'](\w+)[\"']")


@cache
def layer_modules() -> dict[str, str]:
    """The module of each type, as the sources say; empty where there are no sources.

    Importing all modules takes longer than most nets need.
    """
    found = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        module = ".".join(("caffepy.layers", *path.relative_to(_FOLDER).with_suffix("").parts))
        for registered in _REGISTERED.finditer(path.read_text(encoding="utf-8")):
            found.update(dict.fromkeys(_NAME.findall(registered[1]), module))
    return found

"""The layer types of both Caffes, and the module of each layer type of caffepy."""

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
OF_FORKS = {"DenseCRF": "DeepLab and PSPNet", "WindowSegData": "DeconvNet"}
"""Types of forks that caffepy refuses by name, and the projects that have them."""
_ADVICE = {
    "TRT": "it runs a net with TensorRT; run the net that its deploy field names instead",
    "DenseCRF": "remove it, and refine the scores with a program for conditional random fields (pydensecrf)",
    "WindowSegData": "cut the windows out of the images and labels once, and read the parts with ImageSegData",
}


def describe_missing(type_name: str) -> str:
    """Return the message for a layer type of one of the Caffes that caffepy lacks; empty for any other name."""
    for names, owner in ((OF_BOTH, "both Caffes"), (OF_BVLC, "BVLC Caffe"), (OF_NVIDIA, "NVIDIA Caffe")):
        if type_name in names:
            advice = _ADVICE.get(type_name, "docs/reference/layers.md lists the layer types of caffepy")
            return f"{type_name} is a layer of {owner} that caffepy does not have: {advice}"
    if type_name in OF_FORKS:
        owner = OF_FORKS[type_name]
        return f"{type_name} is a layer of {owner} that caffepy does not have: {_ADVICE[type_name]}"
    return ""


_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("layers", "forks")
_REGISTERED = re.compile(r"^@register_layer\(([^)]*)\)", re.MULTILINE)
_NAME = re.compile(r"[\"'](\w+)[\"']")


@cache
def layer_modules() -> dict[str, str]:
    """Return the module of each layer type, found by scanning the sources for `@register_layer`.

    A new file needs no entry in a list, and a net imports only the modules of its own layers. The result is empty where
    the sources are not installed.
    """
    modules = {}
    for path in (path for folder in _FOLDERS for path in sorted((_PACKAGE / folder).rglob("*.py"))):
        module = ".".join(("caffepy", *path.relative_to(_PACKAGE).with_suffix("").parts))
        for registered in _REGISTERED.finditer(path.read_text(encoding="utf-8")):
            modules.update(dict.fromkeys(_NAME.findall(registered[1]), module))
    return modules

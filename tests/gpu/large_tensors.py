"""Layers on blobs of nearly 2^31 elements, forward and backward, beside the same layers on a few of their samples.

    python tests/gpu/large_tensors.py                                # on a GPU with 130 GiB
    python tests/gpu/large_tensors.py --elements 10000 --cpu         # tries the program itself

No test of pytest's: it takes minutes and most of a large GPU's memory. In each case one layer works on random numbers.
Only the gradients of a few samples, the first and the last among them, are not zero, so that parameters' gradients must
be those of a small net of these samples, whose tops and gradients the large net must have as well. One line a case:
name, dtype, seconds, and ok or what is wrong; exit status 1 where something is.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import text_format

from caffepy.backend import Backend, Each, RandomStream, Scalar, create_backend, expression
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

MOST = 2**31 - 1
TOLERANCES = {"FLOAT": 2e-4, "FLOAT16": 2e-2, "BFLOAT16": 1e-1}
"""Of the largest number: other kernels, which add up in another order, may run where there are fewer samples."""
IMAGE = (64, 32, 32)
ODD = (7, 31, 33)
"""Channels and rows that allow no wide loads."""


@expression
def within_range(x: Each, low: Scalar, span: Scalar) -> Each:
    return low + span * x


@expression
def whole_within_range(x: Each, low: Scalar, span: Scalar) -> Each:
    return min(floor(low + span * x), low + span - 1)  # noqa: F821 -- the language of formulas has it


@dataclass
class Input:
    """A bottom of the layer.

    Args:
        shape: of a sample.
        low: smallest number.
        high: one past the largest.
        integers: whole numbers only, which have no gradient.
        learned: whether there is a gradient to compare.
    """

    shape: tuple[int, ...] = IMAGE
    low: float = -1.0
    high: float = 1.0
    integers: bool = False
    learned: bool = True


@dataclass
class Case:
    """A layer.

    Args:
        name: of the case.
        layer: text of the layers that read `data`, `data1`, ….
        inputs: their bottoms.
        gradient: ``samples`` (that of each sample follows from its own), ``loss`` (the layer makes it itself),
            ``batch`` (that too, divided by the number of samples) or ``none`` (forward only).
        check: looks at the large net in place of the comparison of tops and gradients.
        family: of convolutions' candidates, and a part of a candidate's name, which have to be used.
        plane: in place of IMAGE take one channel of a large plane.
    """

    name: str
    layer: str
    inputs: Sequence[Input] = (Input(),)
    gradient: str = "samples"
    check: Callable[[Backend, Net, int], str] | None = None
    family: tuple[str, str] | None = None
    plane: bool = False
    dtypes: Sequence[str] = ("FLOAT", "FLOAT16")


def layer(kind: str, settings: str = "", bottoms: int = 1, tops: Sequence[str] = ("top",)) -> str:
    """Text of a layer that reads the inputs."""
    lines = [f'bottom: "data{i or ""}"' for i in range(bottoms)] + [f'top: "{top}"' for top in tops]
    return f'layer {{ name: "layer" type: "{kind}" {" ".join(lines)} {settings} }}'


def convolution(kind: str, outputs: int, size: int, more: str = "") -> str:
    """Text of a convolution with random weights."""
    fillers = 'weight_filler { type: "msra" } bias_filler { type: "uniform" min: -1 max: 1 }'
    return layer(kind, f"convolution_param {{ num_output: {outputs} kernel_size: {size} {fillers} {more} }}")


def pooling(settings: str) -> str:
    return layer("Pooling", f"pooling_param {{ {settings} }}")


# -- what is not alike in the small net ----------------------------------------------------------------


def mean_of(backend: Backend, array: Any) -> float:
    """The mean of an array, its sum made by the device."""
    total = backend.zeros(())
    backend.reduce(within_range, (array, 0.0, 1.0 / array.size), (total,))
    return float(backend.to_host(total))


def check_dropout(backend: Backend, net: Net, count: int) -> str:
    """Each number is 0 or twice what it was, and about half of them are 0."""
    for sample in (0, count - 1):
        x, y, dx = (backend.to_host(net.blobs[b].data[sample : sample + 1]) for b in ("data", "top", "data"))
        kept = y != 0
        if not np.allclose(y[kept], 2 * x[kept], rtol=1e-3, atol=1e-3) or not 0.4 < kept.mean() < 0.6:
            return f"sample {sample}: {kept.mean():.3f} of the numbers are kept"
        backend.fill(net.blobs["top"].diff[sample : sample + 1], 1.0)
    net.backward()
    for sample in (0, count - 1):
        dx, y = (backend.to_host(a[sample : sample + 1]) for a in (net.blobs["data"].diff, net.blobs["top"].data))
        x = backend.to_host(net.blobs["data"].data[sample : sample + 1])
        if not np.array_equal(dx[x != 0] != 0, y[x != 0] != 0):
            return f"sample {sample}: gradients pass where numbers do not"
    return ""


def check_batch_norm(backend: Backend, net: Net, count: int) -> str:
    """The batch's statistics, and outputs and gradients that follow from them."""
    mean, variance, passes = (blob.host_data() for blob in net.layers[-1].blobs[:3])
    allowed = 0.01 + 6 / math.sqrt(net.blobs["data"].count / len(mean))
    if np.abs(mean / passes).max() > allowed or np.abs(variance / passes * 3 - 1).max() > allowed:
        return f"mean {np.abs(mean / passes).max():g}, variance {(variance / passes).mean():g} and not 0 and 1/3"
    rows = (1, -1, *(1,) * (len(net.blobs["data"].shape) - 2))
    deviation = np.sqrt(variance / passes).reshape(rows)
    generator = np.random.default_rng(3)
    backend.fill(net.blobs["top"].diff, 0)
    slopes = {}
    for sample in (0, count - 1):
        x, y = (backend.to_host(net.blobs[b].data[sample : sample + 1]) for b in ("data", "top"))
        wanted = (x - (mean / passes).reshape(rows)) / deviation
        if np.abs(y - wanted).max() > 0.02:
            return f"sample {sample}: the output is off by {np.abs(y - wanted).max():g}"
        slopes[sample] = generator.standard_normal(x.shape, np.float32)
        backend.from_host(slopes[sample], net.blobs["top"].diff[sample : sample + 1])
    net.backward()
    for sample, slope in slopes.items():
        found = backend.to_host(net.blobs["data"].diff[sample : sample + 1])
        allowed = 0.02 * np.abs(slope / deviation).max() + 20 / count
        if np.abs(found - slope / deviation).max() > allowed:
            return f"sample {sample}: the gradient is off by {np.abs(found - slope / deviation).max():g}"
    return ""


def check_sum(backend: Backend, net: Net, count: int) -> str:
    """The mean of everything, and a gradient that is the same everywhere."""
    found = float(net.blobs["top"].host_data())
    if abs(found - 0.5) > max(5e-3, 2 / math.sqrt(net.blobs["data"].count)):
        return f"the mean is {found:g} and not 0.5"
    backend.fill(net.blobs["top"].diff, float(net.blobs["data"].count))
    net.backward()
    for sample in (0, count - 1):
        slope = backend.to_host(net.blobs["data"].diff[sample : sample + 1])
        if np.abs(slope - 1).max() > 1e-2:
            return f"sample {sample}: gradients of {slope.min():g} to {slope.max():g} and not 1"
    return ""


def check_accuracy(backend: Backend, net: Net, count: int) -> str:
    """As many hits as by chance, among 8 classes."""
    found = float(net.blobs["top"].host_data())
    places = math.prod(net.blobs["data1"].shape)
    return "" if abs(found - 0.125) < 0.005 + 2 / math.sqrt(places) else f"{found:g} and not 0.125"


LABELS = Input((), 0, 8, integers=True)
NO_SCALE = "loss_param { normalization: NONE }"
WEIGHTS = 'weight_filler { type: "xavier" }'
FILL = 'filler { type: "uniform" min: 0.5 max: 1.5 }'

CASES = [
    Case("ReLU", layer("ReLU"), (Input(ODD),)),
    Case("ReLU of large planes", layer("ReLU"), plane=True),
    Case("leaky ReLU in place", layer("ReLU", "relu_param { negative_slope: 0.1 }", tops=("data",))),
    Case("PReLU", layer("PReLU"), (Input(ODD),)),
    Case("ELU", layer("ELU")),
    Case("Sigmoid", layer("Sigmoid"), (Input(ODD),)),
    Case("TanH", layer("TanH")),
    Case("AbsVal", layer("AbsVal")),
    Case("BNLL", layer("BNLL")),
    Case("Power", layer("Power", "power_param { power: 2 scale: 0.5 shift: 2 }")),
    Case("Exp", layer("Exp")),
    Case("Log", layer("Log", "log_param { shift: 2 }"), (Input(ODD),)),
    Case("Threshold", layer("Threshold"), gradient="none"),
    Case("HardSwish", layer("HardSwish")),
    Case("Dropout", layer("Dropout"), check=check_dropout),
    Case("Eltwise sum", layer("Eltwise", "eltwise_param { coeff: 1 coeff: -2 }", 2), (Input(), Input())),
    Case("Eltwise product", layer("Eltwise", "eltwise_param { operation: PROD }", 2), (Input(ODD), Input(ODD))),
    Case("Eltwise maximum", layer("Eltwise", "eltwise_param { operation: MAX }", 2), (Input(), Input())),
    Case("Concat", layer("Concat", "", 2), (Input(ODD), Input((9, 31, 33)))),
    Case("Slice", layer("Slice", "slice_param { slice_point: 24 }", tops=("top", "other"))),
    Case("Split", layer("Split", tops=("top", "other"))),
    Case("Flatten", layer("Flatten")),
    Case("Flatten of large planes", layer("Flatten"), plane=True),
    Case("Reshape", layer("Reshape", "reshape_param { shape { dim: 0 dim: 32 dim: -1 dim: 64 } }")),
    Case("Permute", layer("Permute", "permute_param { order: 0 order: 2 order: 3 order: 1 }")),
    Case("Tile", layer("Tile", "tile_param { tiles: 3 }"), (Input(ODD),)),
    Case("Crop", layer("Crop", "crop_param { axis: 2 offset: 3 }", 2), (Input(), Input((1, 20, 20), learned=False))),
    Case("ShuffleChannel", layer("ShuffleChannel", "shuffle_channel_param { group: 8 }")),
    Case("Pooling, maximum", pooling("pool: MAX kernel_size: 3 stride: 2")),
    Case("Pooling, maximum, padded", pooling("pool: MAX kernel_size: 3 stride: 1 pad: 1"), (Input(ODD),)),
    Case("Pooling, maximum, of large planes", pooling("pool: MAX kernel_size: 3 stride: 1 pad: 1"), plane=True),
    Case("Pooling, average", pooling("pool: AVE kernel_size: 3 stride: 2")),
    Case("Pooling, average, padded", pooling("pool: AVE kernel_size: 3 stride: 1 pad: 1"), (Input(ODD),)),
    Case("Pooling, global maximum", pooling("pool: MAX global_pooling: true")),
    Case("Pooling, global average", pooling("pool: AVE global_pooling: true"), (Input(ODD),)),
    Case("LRN", layer("LRN", "lrn_param { alpha: 0.1 }")),
    Case("LRN, odd channels", layer("LRN", "lrn_param { alpha: 0.1 local_size: 3 }"), (Input(ODD),)),
    Case("LRN within channels", layer("LRN", "lrn_param { norm_region: WITHIN_CHANNEL local_size: 3 }")),
    Case("BatchNorm, stored", layer("BatchNorm", "batch_norm_param { use_global_stats: true eps: 1 }")),
    Case("BatchNorm", layer("BatchNorm"), (Input(ODD),), check=check_batch_norm),
    Case("BatchNorm, wide", layer("BatchNorm"), check=check_batch_norm),
    Case("Scale", layer("Scale", f"scale_param {{ bias_term: true {FILL} }}"), (Input(ODD),)),
    Case("Bias", layer("Bias", f"bias_param {{ {FILL} }}")),
    Case("MVN", layer("MVN")),
    Case("Normalize", layer("Normalize", "norm_param { across_spatial: false }")),
    Case("Softmax", layer("Softmax")),
    Case("Softmax of rows", layer("Softmax"), (Input((1000,)),)),
    Case("SoftmaxWithLoss", layer("SoftmaxWithLoss", NO_SCALE, 2), (Input((1000,)), LABELS), "loss"),
    Case(
        "SoftmaxWithLoss of planes",
        layer("SoftmaxWithLoss", NO_SCALE, 2),
        (Input((8, 64, 64)), Input((1, 64, 64), 0, 8, integers=True)),
        "loss",
    ),
    Case(
        "SigmoidCrossEntropyLoss",
        layer("SigmoidCrossEntropyLoss", NO_SCALE, 2),
        (Input(ODD), Input(ODD, 0, 1, learned=False)),
        "loss",
    ),
    Case("EuclideanLoss", layer("EuclideanLoss", "", 2), (Input(ODD), Input(ODD)), "batch"),
    Case(
        "Accuracy",
        layer("Accuracy", "", 2),
        (Input((8, 64, 64)), Input((1, 64, 64), 0, 8, integers=True)),
        "none",
        check_accuracy,
    ),
    Case("ArgMax", layer("ArgMax", "argmax_param { axis: 1 }"), gradient="none"),
    Case("Reduction of samples", layer("Reduction", "reduction_param { operation: SUMSQ axis: 1 }"), (Input(ODD),)),
    Case(
        "Reduction of all",
        layer("Reduction", "reduction_param { operation: MEAN }"),
        (Input(ODD, 0, 1),),
        check=check_sum,
        dtypes=("FLOAT",),
    ),
    Case("InnerProduct", layer("InnerProduct", f"inner_product_param {{ num_output: 40 {WEIGHTS} }}")),
    Case(
        "Embed",
        layer("Embed", f"embed_param {{ num_output: 65536 input_dim: 9 {WEIGHTS} }}"),
        (Input((), 0, 9, integers=True),),
    ),
    Case("Convolution 3x3", convolution("Convolution", 64, 3, "pad: 1")),
    Case("Convolution 3x3, odd channels", convolution("Convolution", 7, 3, "pad: 1"), (Input(ODD),)),
    Case("Convolution 1x1", convolution("Convolution", 64, 1)),
    Case("Convolution in groups", convolution("Convolution", 64, 3, "pad: 1 group: 4")),
    Case(
        "Convolution of products",
        convolution("Convolution", 16, 3, "pad: 1 bias_term: false"),
        (Input((16, 32, 32)),),
        family=("products", ""),
    ),
    Case("Convolution, depthwise", convolution("Convolution", 64, 3, "pad: 1 group: 64"), family=("depthwise", "")),
    Case(
        "Convolution, depthwise walk",
        convolution("Convolution", 64, 3, "pad: 1 group: 64"),
        family=("depthwise", "walk"),
    ),
    Case(
        "Convolution, large depthwise",
        convolution("Convolution", 64, 7, "pad: 3 group: 64"),
        family=("large depthwise", ""),
    ),
    Case("Deconvolution", convolution("Deconvolution", 32, 4, "pad: 1 stride: 2")),
    Case("Im2col", layer("Im2col", "convolution_param { kernel_size: 3 pad: 1 }"), (Input((16, 32, 32)),)),
    Case("Interp", layer("Interp", "interp_param { zoom_factor: 2 }")),
    Case("Upsample", layer("Upsample", "upsample_param { scale: 2 }")),
]


class OneFamily:
    """A tuner that takes one candidate wherever there is one, else the first that needs no check.

    Args:
        family: the candidates' family.
        part: of the candidate's name.
    """

    enabled = True

    def __init__(self, family: str, part: str) -> None:
        self._family, self._part = family, part
        self.used = 0

    def will_time(self, task: Any, resources: Any) -> bool:
        """Whether kernels are compiled ahead: none, as one candidate is."""
        return False

    def choose(self, task: Any, families: Sequence[Any], operands: Any, resources: Any) -> Any:
        """The candidate."""
        own = [c for f in families if f.name == self._family for c in f.candidates() if self._part in c.name]
        others = (c for f in families if not f.checked for c in f.candidates())
        for wanted, candidates in ((True, own), (False, others)):
            for candidate in candidates:
                if candidate.prepare():
                    self.used += wanted
                    return candidate
        return None


@dataclass
class Run:
    """A case in one dtype.

    Args:
        case: the layer.
        kind: the blobs' dtype as prototxts call it.
        backend: the device.
        elements: of the largest blob.
    """

    case: Case
    kind: str
    backend: Backend
    elements: int
    inputs: list[Input] = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        side = min(4095, max(8, math.isqrt(self.elements // 30)))
        self.inputs = [Input((1, side, side))] if self.case.plane else list(self.case.inputs)
        sizes = [math.prod(blob.shape) for blob in self.net(1).blobs.values()]
        self.count = max(8, min(self.elements // max(sizes), 2**24 if any(not i.shape for i in self.inputs) else MOST))

    def net(self, count: int) -> Net:
        """The net for so many samples."""
        text = f"force_backward: true default_forward_type: {self.kind} default_backward_type: {self.kind}\n"
        for i, given in enumerate(self.inputs):
            dims = " ".join(f"dim: {d}" for d in (count, *given.shape))
            name = f"data{i or ''}"
            text += f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}\n'
        param = text_format.Parse(text + self.case.layer, caffe_pb2.NetParameter())
        net = Net(param, LayerContext(self.backend, caffe_pb2.TRAIN, seed=5))
        net.reshape()
        return net

    def fill(self, net: Net) -> None:
        """Random numbers for the inputs."""
        for number, (blob, given) in enumerate(zip(self._bottoms(net), self.inputs, strict=True)):
            self.backend.random_uniform(blob.data, RandomStream(9, number), (0, 0))
            formula, span = whole_within_range if given.integers else within_range, given.high - given.low
            self.backend.apply(formula, (blob.data, float(given.low), float(span)), (blob.data,))

    def _bottoms(self, net: Net) -> list[Blob]:
        return [net.blobs[f"data{i or ''}"] for i in range(len(self.inputs))]

    def __call__(self) -> str:
        """What is wrong, if anything."""
        case, backend, large = self.case, self.backend, self.net(self.count)
        self.fill(large)
        generator = np.random.default_rng(1)
        inner = generator.integers(1, self.count - 1, 0 if case.plane else 2).tolist()
        picks = sorted({0, *inner, self.count - 1})
        given = [self._samples(blob.data, picks) for blob in self._bottoms(large)]
        self._set_statistics(large)
        large.clear_param_diffs()
        large.forward()
        if case.check is not None:
            return case.check(backend, large, self.count)
        small = self.net(len(picks))
        self._set_statistics(small)
        for blob, values in zip(self._bottoms(small), given, strict=True):
            backend.from_host(values, blob.data)
        small.clear_param_diffs()
        small.forward()
        problems = []
        tops = [name for name in large.outputs if large.blobs[name].shape[:1] == (self.count,)]
        losses = [name for name in large.outputs if not large.blobs[name].shape]
        problems += [f"'{n}' is not finite" for n in losses if not np.isfinite(large.blobs[n].host_data())]
        for name in tops:
            found, wanted = self._samples(large.blobs[name].data, picks), small.blobs[name].host_data()
            problems += self._difference(f"top '{name}'", found, wanted)
        if case.gradient == "none":
            return "; ".join(problems)
        if case.gradient == "samples":
            self._set_gradients(large, small, tops, picks)
        large.backward()
        small.backward()
        return "; ".join(problems + self._gradient_problems(large, small, picks))

    def _set_statistics(self, net: Net) -> None:
        """Statistics other than none for a BatchNorm that has stored ones."""
        found = net.layers[-1]
        if found.type == "BatchNorm" and self.case.check is None:
            for blob, value in zip(found.blobs[:3], (0.25, 2.0, 1.0), strict=True):
                self.backend.fill(blob.data, value)

    def _samples(self, array: Any, picks: Sequence[int]) -> Any:
        return np.concatenate([self.backend.to_host(array[i : i + 1]) for i in picks])

    def _set_gradients(self, large: Net, small: Net, tops: Sequence[str], picks: Sequence[int]) -> None:
        """Random ones for the samples that are compared, zeros for all others."""
        generator = np.random.default_rng(2)
        for name in tops:
            blob = large.blobs[name]
            self.backend.fill(blob.diff, 0)
            values = generator.standard_normal((len(picks), *blob.shape[1:]), np.float32)
            for value, i in zip(values, picks, strict=True):
                self.backend.from_host(value[None], blob.diff[i : i + 1])
            self.backend.from_host(values, small.blobs[name].diff)

    def _gradient_problems(self, large: Net, small: Net, picks: Sequence[int]) -> list[str]:
        problems = []
        factor = self.count / len(picks) if self.case.gradient == "batch" else 1.0
        for one, other, given in zip(self._bottoms(large), self._bottoms(small), self.inputs, strict=True):
            if given.integers or not given.learned:
                continue
            found, wanted = self._samples(one.diff, picks) * np.float32(factor), other.host_diff()
            problems += self._difference(f"gradient of '{one.name}'", found, wanted)
            rest = next(i for i in range(self.count) if i not in picks)
            if self.case.gradient == "samples" and self._samples(one.diff, [rest]).any():
                problems.append(f"gradient of '{one.name}': sample {rest} has one, and its top has none")
        if self.case.gradient == "samples":
            for one, other in zip(large.parameters.parameters, small.parameters.parameters, strict=True):
                if one.lr_mult:
                    problems += self._difference(f"parameter {one.index}", one.blob.host_diff(), other.blob.host_diff())
        return problems

    def _difference(self, what: str, found: Any, wanted: Any) -> list[str]:
        if not np.isfinite(wanted).all() or not np.abs(wanted).max() > 0:
            return [f"{what}: the small net has nothing to compare with"]
        if not np.isfinite(found).all():
            return [f"{what}: not finite"]
        # In half precision the loss's own gradients may be as small as its smallest numbers.
        limit = TOLERANCES[self.kind] * np.abs(wanted).max() + (2.0**-23 if self.kind != "FLOAT" else 0)
        far = np.abs(found - wanted).max()
        return [] if far <= limit else [f"{what}: off by {far:g}, allowed are {limit:g}"]


@contextmanager
def backend_of(arguments: argparse.Namespace, case: Case) -> Iterator[Backend]:
    """A backend for one case, whose memory is free afterwards."""
    made: Any = create_backend(None) if arguments.cpu else create_backend(arguments.gpu, math="fp32", autotune=False)
    forced = None
    if case.family is not None and not arguments.cpu:
        forced = made._resources.tuner = OneFamily(*case.family)
    try:
        with made.activate():
            yield made
        if forced is not None and not forced.used:
            raise RuntimeError(f"no candidate of {case.family}")
    finally:
        gc.collect()
        made.trim()
        made.close()


def attempt(arguments: argparse.Namespace, case: Case, kind: str) -> str:
    """What is wrong with a case; an exception is one line."""
    try:
        with backend_of(arguments, case) as backend:
            return Run(case, kind, backend, arguments.elements)()
    except Exception as error:
        if arguments.verbose:
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=MOST, help="of the largest blob of each case")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, in FLOAT only")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--seconds", type=float, default=400, help="no case begins later")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    arguments = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(arguments.seconds + 60, exit=True)
    begin, wrong, left, done = time.monotonic(), [], 0, 0
    for kind in ("FLOAT",) if arguments.cpu else ("FLOAT", "FLOAT16"):
        for case in CASES:
            if arguments.only not in case.name or kind not in case.dtypes:
                continue
            if time.monotonic() - begin > arguments.seconds:
                left += 1
                continue
            start = time.monotonic()
            problem = attempt(arguments, case, kind)
            done += 1
            wrong += [f"{case.name} in {kind}"] if problem else []
            print(f"{case.name:36} {kind:8} {time.monotonic() - start:6.2f} s  {problem or 'ok'}", flush=True)
    seconds = time.monotonic() - begin
    print(f"SUMMARY large tensors: {done} cases, {len(wrong)} wrong, {left} not begun, {seconds:.0f} s: {wrong}")
    faulthandler.cancel_dump_traceback_later()
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())

"""Convolution, pooling and LRN on the CPU over a grid of shapes: caffepy's time beside PyTorch's.

    python benchmarks/cpu_shapes.py [--torch /path/to/python] [--threads 2] [--rounds 3] [--limit 1.2] [name ...]

Each layer of the grid is run forward, for the gradient of its bottom and for that of its weights, each by itself.
caffepy runs its layers; PyTorch runs the same shapes in a process of its own, by another interpreter if PyTorch is not
installed beside caffepy, both in its plain layout and channels last, of which the faster counts. The two sides take
turns; a figure is the median over the rounds of each round's median, a ratio the median of the rounds' ratios. Names
are matched by their beginnings. At the end the rows above `--limit` are named, the worst first.

Two cores of an AMD EPYC (Zen 4), a virtual machine that others use too, so times of the processor with one thread
(of the clock in the first column); PyTorch 2.13, vectors of sixteen. 241 ratios, before and after what is named below:

                                 before                    after
    median                       1.28                      1.00
    worst                        433 (3-d depthwise)       2.7 (depthwise 512, 14, weights)
    above 10 / 2 / 1.2           14 / 80 / 125             0 / 4 / 55

    forward, data, weights       before                    after
    depthwise 32, 112            3.36   2.49   2.87        1.05   1.07   1.08
    depthwise 5x5 odd            5.77   3.99   0.59        1.28   0.70   0.27
    depthwise multiplier 2       2.35   1.83   5.01        0.38   0.33   0.34
    group 32 of 4 3x3            2.77   3.07   2.45        0.78   0.89   0.25
    1-d depthwise                51.9   71.0   12.6        1.48   1.62   0.38
    3-d 32                       4.25   8.68   5.91        1.24   1.28   1.43
    3-d depthwise                433    29.6   23.1        2.05   0.37   0.32
    3-d group 4                  34.7   54.8   15.1        1.44   1.78   0.82
    1x1 2048, 1, batch 8         6.44   1.93   2.64        0.58   0.53   0.75
    whole image 7x7              7.19   5.94   1.00        1.28   1.28   0.39
    average one channel          3.65   6.45               0.91   1.70

What was learnt:

- Convolutions over one and three axes were NumPy's im2col. All spatial axes but the last taken as one, they are the
  same tables of taps and windows as two axes have. What is left of their ratio is the way to channels last and back:
  1-d depthwise took 15.6 ms with loops for it, 6.5 with squares turned in registers.
- A group of four channels uses a quarter of a vector. Several groups in one vector cost a shuffle for each product and
  save three of four; depthwise is the case without a shuffle, eight pixels at a time in registers.
- Masked loads are as good as plain ones with AVX-512, but not with AVX2: depthwise 32, 112 went from 4.3 to 2.4 ms.
- Weights are packed once a pass. For few windows that is most of the work: products then read the weights where they
  lie. Where weights are packed against their order, squares turned in registers halve the time (3x3 512, batch 1).
- Average pooling is a sum over rows, then over columns: 13x13 windows take 0.2 of PyTorch's time.

oneDNN by ctypes (the wheel onednn-cpu-gomp 2023.2, oneDNN 3.2, shares GNU's OpenMP with numba; the newer wheel `onednn`
needs SYCL and TBB), both in the same process, plain weights brought to its order each time; its time and ours in ms:

                                 AVX-512: forward, data, weights          AVX2
    3x3 64, 56, batch 8          17/18  17/19  22/22                      22/24  22/24  47/29
    3x3 256, 14, batch 8         18/18  17/17  20/27                      21/21  19/24  34/37
    1x1 512, 14, batch 16        20/17  16/18  18/22                      18/23  19/23  26/31
    depthwise 32, 112            2.5/3.7  3.0/3.0  2.9/3.5                2.7/4.5  2.7/4.2  7.3/4.7
    depthwise 512, 14            0.38/0.56  0.46/0.72  0.50/1.24          1.1/1.7  0.94/1.7  1.9/2.4
    group 32 of 4 3x3            10/5.4  7.3/7.1  15/4.2                  28/12  17/10  29/6.4
    depthwise dilated            0.40/0.81  5.3/0.51  5.1/0.64            0.78/2.0  7.4/1.7  16/1.3
    large 15x15                  12/13  12/13  5607/18

It wins with depthwise layers, is nearly even with dense ones, and has cliffs of its own. What is left of ours: rows of
512 channels lie 2 KiB apart, so that the pixels of a row fall into two sets of the first cache, and the gradient of
depthwise weights passes over each row once for every column of the kernel.

Two threads on the same machine, when it was less busy (3 rounds): depthwise 512, 14 at 1.06, 0.98 and 1.71 of PyTorch's
time, depthwise 1024, 7, batch 1 at 0.88, 0.61 and 1.85. A second thread for work of ten microseconds made the latter
ten times slower on a busy machine, so the least work of a thread is four times as much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROUP_SECONDS = 0.02
GROUPS = 3
Passes = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One layer.

    Args:
        name: of the row.
        x: the bottom's shape.
        outputs: num_output of a convolution.
        kernel: along every axis, as stride, pad and dilation are.
        group: of a convolution.
        kind: convolution, deconvolution, max, average, across or within.
    """

    name: str
    x: tuple[int, ...]
    outputs: int = 0
    kernel: int | tuple[int, ...] = 3
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    group: int = 1
    kind: str = "convolution"

    @property
    def kernels(self) -> tuple[int, ...]:
        return self.kernel if isinstance(self.kernel, tuple) else (self.kernel,) * (len(self.x) - 2)


def _convolutions() -> Iterator[Case]:
    yield Case("first 7x7/2, batch 8", (8, 3, 224, 224), 64, 7, 2, 3)
    yield Case("first 3x3/2, batch 1", (1, 3, 224, 224), 32, 3, 2, 1)
    yield Case("3x3 64, 56, batch 8", (8, 64, 56, 56), 64, 3, 1, 1)
    yield Case("3x3 256, 14, batch 8", (8, 256, 14, 14), 256, 3, 1, 1)
    yield Case("3x3 512, 7, batch 1", (1, 512, 7, 7), 512, 3, 1, 1)
    yield Case("3x3 128/2, 56, batch 8", (8, 128, 56, 56), 128, 3, 2, 1)
    yield Case("3x3 64, 56, batch 1", (1, 64, 56, 56), 64, 3, 1, 1)
    yield Case("1x1 256, 14, batch 1", (1, 256, 14, 14), 1024, 1)
    yield Case("1x1 1024, 7, batch 1", (1, 1024, 7, 7), 1024, 1)
    yield Case("1x1 512, 14, batch 16", (16, 512, 14, 14), 512, 1)
    yield Case("1x1 64, 56, batch 8", (8, 64, 56, 56), 256, 1)
    yield Case("1x1/2 256, 56, batch 8", (8, 256, 56, 56), 512, 1, 2)
    yield Case("1x1 2048, 1, batch 8", (8, 2048, 1, 1), 1000, 1)
    yield Case("odd channels 3x3 17 to 31", (8, 17, 35, 37), 31, 3, 1, 1)
    yield Case("odd channels 1x1 33 to 65", (8, 33, 35, 37), 65, 1)
    yield Case("one output 3x3", (8, 64, 56, 56), 1, 3, 1, 1)
    yield Case("one channel 5x5", (64, 1, 28, 28), 20, 5)
    yield Case("11x11/4", (8, 3, 227, 227), 96, 11, 4)
    yield Case("large 15x15", (4, 16, 56, 56), 16, 15, 1, 7)
    yield Case("large 31x31, one channel", (4, 1, 64, 64), 8, 31)
    yield Case("whole image 7x7", (8, 512, 7, 7), 256, 7)
    yield Case("1x7", (8, 128, 17, 17), 128, (1, 7), 1, 0)
    yield Case("7x1", (8, 128, 17, 17), 128, (7, 1), 1, 0)
    yield Case("dilated 3x3 by 2", (8, 64, 28, 28), 64, 3, 1, 2, 2)
    yield Case("dilated 3x3 by 6", (2, 256, 28, 28), 256, 3, 1, 6, 6)
    yield Case("dilated 3x3 by 2, stride 2", (8, 64, 28, 28), 64, 3, 2, 2, 2)


def _groups() -> Iterator[Case]:
    yield Case("group 2 of 48 5x5", (8, 96, 27, 27), 256, 5, 1, 2, 1, 2)
    yield Case("group 32 of 4 3x3", (8, 128, 56, 56), 128, 3, 1, 1, 1, 32)
    yield Case("group 32 of 8 3x3/2", (8, 256, 56, 56), 256, 3, 2, 1, 1, 32)
    yield Case("group 32 of 32 3x3", (8, 1024, 7, 7), 1024, 3, 1, 1, 1, 32)
    yield Case("group 3 of 80 1x1", (8, 240, 28, 28), 240, 1, 1, 0, 1, 3)
    yield Case("group 16 of 2 to 1", (8, 32, 56, 56), 16, 3, 1, 1, 1, 16)
    yield Case("group 8 of 5 to 3", (8, 40, 28, 28), 24, 3, 1, 1, 1, 8)
    yield Case("group 32 of 4, dilated", (8, 128, 28, 28), 128, 3, 1, 2, 2, 32)
    yield Case("depthwise 32, 112", (8, 32, 112, 112), 32, 3, 1, 1, 1, 32)
    yield Case("depthwise 64/2, 112", (8, 64, 112, 112), 64, 3, 2, 1, 1, 64)
    yield Case("depthwise 512, 14", (8, 512, 14, 14), 512, 3, 1, 1, 1, 512)
    yield Case("depthwise 1024, 7, batch 1", (1, 1024, 7, 7), 1024, 3, 1, 1, 1, 1024)
    yield Case("depthwise 5x5 odd", (8, 75, 28, 28), 75, 5, 1, 2, 1, 75)
    yield Case("depthwise 9x9", (4, 96, 28, 28), 96, 9, 1, 4, 1, 96)
    yield Case("depthwise dilated", (8, 128, 28, 28), 128, 3, 1, 2, 2, 128)
    yield Case("depthwise multiplier 2", (8, 64, 56, 56), 128, 3, 1, 1, 1, 64)
    yield Case("depthwise multiplier 8", (8, 16, 56, 56), 128, 3, 1, 1, 1, 16)


def _other_axes() -> Iterator[Case]:
    yield Case("1-d 64", (16, 64, 1000), 64, 3, 1, 1)
    yield Case("1-d dilated 32", (8, 32, 4000), 32, 9, 1, 32, 8)
    yield Case("1-d group 4, stride 2", (16, 64, 1000), 128, 5, 2, 2, 1, 4)
    yield Case("1-d depthwise", (16, 128, 1000), 128, 7, 1, 3, 1, 128)
    yield Case("3-d 3 to 32", (2, 3, 16, 56, 56), 32, 3, 1, 1)
    yield Case("3-d 32", (2, 32, 8, 28, 28), 32, 3, 1, 1)
    yield Case("3-d 64/2", (2, 64, 8, 28, 28), 64, 3, 2, 1)
    yield Case("3-d 1x1x1 64", (2, 64, 8, 28, 28), 128, 1)
    yield Case("3-d 1x3x3", (2, 32, 8, 28, 28), 64, (1, 3, 3))
    yield Case("3-d group 4", (2, 32, 8, 28, 28), 32, 3, 1, 1, 1, 4)
    yield Case("3-d depthwise", (2, 64, 8, 28, 28), 64, 3, 1, 1, 1, 64)
    yield Case("3-d dilated", (2, 16, 8, 28, 28), 16, 3, 1, 2, 2)
    kind = "deconvolution"
    yield Case("transposed 4x4/2 64", (8, 64, 28, 28), 64, 4, 2, 1, kind=kind)
    yield Case("transposed 2x2/2 128 to 64", (4, 128, 28, 28), 64, 2, 2, kind=kind)
    yield Case("transposed 3x3 64", (8, 64, 28, 28), 64, 3, 1, 1, kind=kind)
    yield Case("transposed 16x16/8 21", (2, 21, 28, 28), 21, 16, 8, 4, kind=kind)
    yield Case("transposed 64x64/32 21", (1, 21, 10, 10), 21, 64, 32, kind=kind)
    yield Case("transposed depthwise 4x4/2", (4, 64, 28, 28), 64, 4, 2, 1, 1, 64, kind)
    yield Case("transposed depthwise 16x16/8", (2, 21, 28, 28), 21, 16, 8, 4, 1, 21, kind)
    yield Case("transposed group 4", (8, 64, 28, 28), 64, 4, 2, 1, 1, 4, kind)
    yield Case("transposed 3-d 2/2", (2, 32, 4, 14, 14), 32, 2, 2, kind=kind)
    yield Case("transposed 1-d 4/2", (8, 64, 500), 64, 4, 2, 1, kind=kind)


def _others() -> Iterator[Case]:
    for kind in ("max", "average"):
        yield Case(f"{kind} 2x2/2", (8, 64, 56, 56), 0, 2, 2, kind=kind)
        yield Case(f"{kind} 3x3/2", (8, 64, 113, 113), 0, 3, 2, kind=kind)
        yield Case(f"{kind} 3x3/1 pad 1", (8, 192, 28, 28), 0, 3, 1, 1, kind=kind)
        yield Case(f"{kind} 5x5/3", (8, 75, 56, 56), 0, 5, 3, 1, kind=kind)
        yield Case(f"{kind} 13x13/1", (1, 256, 20, 20), 0, 13, 1, 6, kind=kind)
        yield Case(f"{kind} global", (8, 1024, 7, 7), 0, 7, 1, kind=kind)
        yield Case(f"{kind} global, batch 1", (1, 512, 28, 28), 0, 28, 1, kind=kind)
        yield Case(f"{kind} one channel", (64, 1, 56, 56), 0, 2, 2, kind=kind)
        yield Case(f"{kind} batch 1", (1, 64, 112, 112), 0, 3, 2, kind=kind)
    yield Case("LRN across 5", (8, 96, 55, 55), kernel=5, kind="across")
    yield Case("LRN across 3, batch 1", (1, 64, 112, 112), kernel=3, kind="across")
    yield Case("LRN across 9, odd", (8, 33, 28, 28), kernel=9, kind="across")
    yield Case("LRN within 3", (8, 32, 28, 28), kernel=3, kind="within")
    yield Case("LRN within 5", (8, 96, 27, 27), kernel=5, kind="within")


CASES = [*_convolutions(), *_groups(), *_other_axes(), *_others()]
ALPHA, BETA = 1e-4, 0.75


# -- caffepy --------------------------------------------------------------------------------------------------


def layer_text(case: Case) -> str:
    """The layer as prototxt."""
    if case.kind in ("across", "within"):
        region = "ACROSS_CHANNELS" if case.kind == "across" else "WITHIN_CHANNEL"
        fields = f"norm_region: {region} local_size: {case.kernel} alpha: {ALPHA} beta: {BETA}"
        return f'type: "LRN" lrn_param {{ {fields} }}'
    if case.kind in ("max", "average"):
        fields = f"kernel_size: {case.kernel} stride: {case.stride} pad: {case.pad} round_mode: FLOOR"
        return f'type: "Pooling" pooling_param {{ pool: {"MAX" if case.kind == "max" else "AVE"} {fields} }}'
    sizes = " ".join(f"kernel_size: {size}" for size in case.kernels)
    fields = f"num_output: {case.outputs} {sizes} stride: {case.stride} pad: {case.pad} dilation: {case.dilation}"
    filler = 'weight_filler { type: "gaussian" std: 0.1 } bias_term: false'
    return f'type: "{case.kind.capitalize()}" convolution_param {{ {fields} group: {case.group} {filler} }}'


def caffepy_passes(case: Case, threads: int) -> Passes:
    """The passes of caffepy's layer."""
    import numpy as np
    from google.protobuf import text_format

    from caffepy.backend import create_backend
    from caffepy.layers.core.base import LayerContext
    from caffepy.net import Net
    from caffepy.proto import caffe_pb2

    shape = " ".join(f"dim: {size}" for size in case.x)
    text = f'force_backward: true layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {shape} }} }} }}'
    text += f'layer {{ name: "y" bottom: "x" top: "y" {layer_text(case)} }}'
    backend = create_backend(None, threads)
    net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend, caffe_pb2.TRAIN, 1))
    layer, (x, y) = net.layers[-1], (net.blobs["x"], net.blobs["y"])
    random = np.random.default_rng(0)
    backend.from_host(random.standard_normal(x.shape, dtype=np.float32), x.data)
    layer.forward([x], [y])
    backend.from_host(random.standard_normal(y.shape, dtype=np.float32), y.diff)

    def backward(down: bool) -> None:
        layer.propagate_to_params = [not down] * len(layer.blobs)
        layer.backward([y], [down], [x])

    passes: Passes = {"forward": lambda: layer.forward([x], [y]), "data": lambda: backward(True)}
    return {**passes, "weights": lambda: backward(False)} if layer.blobs else passes


# -- PyTorch --------------------------------------------------------------------------------------------------


def _torch_layer(case: Case) -> Callable[[Any], Any]:
    import torch.nn.functional as F

    size, half = case.kernels[0], (case.kernels[0] - 1) // 2
    if case.kind == "max":
        return lambda x: F.max_pool2d(x, size, case.stride, case.pad)
    if case.kind == "average":
        return lambda x: F.avg_pool2d(x, size, case.stride, case.pad)
    if case.kind == "across":
        return lambda x: F.local_response_norm(x, size, ALPHA, BETA)
    return lambda x: x * (1 + ALPHA * F.avg_pool2d(x * x, size, 1, half)) ** -BETA


def _torch_convolution(case: Case, x: Any, layout: Any) -> Passes:
    import torch

    axes, transposed = len(case.x) - 2, case.kind == "deconvolution"
    first, second = (case.x[1], case.outputs) if transposed else (case.outputs, case.x[1])
    weights = (0.1 * torch.randn(first, second // case.group, *case.kernels)).contiguous(memory_format=layout)
    moves = ([case.stride] * axes, [case.pad] * axes, [case.dilation] * axes, transposed, [0] * axes, case.group)

    def forward() -> Any:
        return torch.ops.aten.convolution(x, weights, None, *moves)

    def backward(data: bool) -> Any:
        return torch.ops.aten.convolution_backward(dy, x, weights, None, *moves, [data, not data, False])

    dy = torch.randn_like(forward()).contiguous(memory_format=layout)
    return {"forward": forward, "data": lambda: backward(True), "weights": lambda: backward(False)}


def torch_passes(case: Case, last: bool) -> Passes:
    """The passes of PyTorch's layer, channels last if `last`."""
    import torch

    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(len(case.x), torch.contiguous_format) if last else torch.contiguous_format
    x = torch.randn(case.x).contiguous(memory_format=layout)
    if case.outputs:
        return _torch_convolution(case, x, layout)
    layer = _torch_layer(case)
    x.requires_grad_(True)
    y = layer(x)
    dy = torch.randn_like(y)

    def forward() -> Any:
        with torch.no_grad():
            return layer(x)

    return {"forward": forward, "data": lambda: torch.autograd.grad(y, x, dy, retain_graph=True)}


def serve(threads: int) -> None:
    """Answer each case number on a line of the input with PyTorch's times."""
    import torch

    torch.set_num_threads(threads)
    for line in sys.stdin:
        case = CASES[int(line)]
        kinds = (False,) if len(case.x) == 3 else (False, True)
        layouts = [measure(torch_passes(case, last), threads) for last in kinds]
        print(json.dumps({name: min(times[name] for times in layouts) for name in layouts[0]}), flush=True)


# -- the comparison -------------------------------------------------------------------------------------------


def measure(passes: Passes, threads: int) -> dict[str, float]:
    """Milliseconds of each pass, the median of several groups."""
    # With one thread it is the processor's time, which other programs disturb less; several spin while they wait.
    clock = time.process_time if threads == 1 else time.perf_counter
    return {name: 1000 * _median_seconds(run, clock) for name, run in passes.items()}


def _median_seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    run()
    start = clock()
    run()
    count = max(1, min(200, int(GROUP_SECONDS / max(1e-6, clock() - start))))
    times = []
    for _ in range(GROUPS):
        start = clock()
        for _ in range(count):
            run()
        times.append((clock() - start) / count)
    return statistics.median(times)


@contextmanager
def peer(interpreter: str, threads: int) -> Iterator[Callable[[int], dict[str, float]]]:
    """A process that measures PyTorch: asks it for the times of a case."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONPATH", None)
    command = [interpreter, str(Path(__file__).resolve()), "--serve", "--threads", str(threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, replies = process.stdin, process.stdout

        def ask(number: int) -> dict[str, float]:
            requests.write(f"{number}\n")
            requests.flush()
            line = replies.readline()
            if not line:
                raise SystemExit(f"{interpreter} cannot measure '{CASES[number].name}': has it PyTorch?")
            result: dict[str, float] = json.loads(line)
            return result

        try:
            yield ask
        finally:
            requests.close()


def compare(number: int, ask: Callable[[int], dict[str, float]], options: argparse.Namespace) -> dict[str, float]:
    """Print a case's row; the ratio of each of its passes."""
    case = CASES[number]
    passes = caffepy_passes(case, options.threads)
    rounds = [(measure(passes, options.threads), ask(number)) for _ in range(options.rounds)]
    ratios, columns = {}, []
    for name in passes:
        ours, theirs = (statistics.median(sides[i][name] for sides in rounds) for i in (0, 1))
        ratios[name] = statistics.median(a[name] / b[name] for a, b in rounds)
        columns.append(f"{ours:9.3f} {theirs:9.3f} {ratios[name]:6.2f}")
    print(f"{case.name:30}" + " |".join(columns), flush=True)
    return ratios


def report(table: dict[str, dict[str, float]], limit: float) -> None:
    """Name the rows above the limit, the worst first."""
    ratios = {f"{name}, {kind}": ratio for name, row in table.items() for kind, ratio in row.items()}
    worst = sorted(ratios, key=lambda name: -ratios[name])
    print(f"\nmedian of {len(ratios)} ratios {statistics.median(ratios.values()):.2f}; above {limit}, the worst first:")
    for name in [name for name in worst if ratios[name] > limit] or worst[:1]:
        print(f"{ratios[name]:7.2f}  {name}")


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of the rows' names; all by default")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("--serve", action="store_true", help="be the peer")
    options = parser.parse_args()
    if options.serve:
        serve(options.threads)
        return
    sys.path.insert(0, str(ROOT))
    title = f"{'caffepy':>9} {'PyTorch':>9} {'ratio':>6}"
    print(" " * 30 + "milliseconds forward, for the gradient of the bottom, for that of the weights")
    print(" " * 30 + " |".join([title] * 3))
    table = {}
    with peer(options.torch, options.threads) as ask:
        for number, case in enumerate(CASES):
            if not options.names or case.name.startswith(tuple(options.names)):
                table[case.name] = compare(number, ask, options)
    report(table, options.limit)


if __name__ == "__main__":
    main()

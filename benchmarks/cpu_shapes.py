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

Later changes, measured in turns with what was there before, one thread, shortest of several groups in ms (PyTorch's
time is that of this program on the same day, the machine busy; this table replaces those rows of the one above, which
has not been taken anew as a whole):

    forward, data, weights       before                    after                     PyTorch
    depthwise 512, 14            0.541  0.477  0.909       0.369  0.524  0.547       0.328  0.325  0.292
    depthwise 64/2, 112                 8.51                      5.95
    1-d depthwise                4.23   4.28               2.51   2.68               2.6    3.2
    1-d group 4, stride 2        4.17   3.52               3.02   3.05               4.2    5.9
    3-d 1x1x1 64                 4.64   5.40   6.09        3.17   3.72   4.06        3.76   4.08   3.16
    3-d depthwise                1.76   1.52               1.01   1.12               0.93   8.2
    3-d 32                       7.23   7.12   8.02        6.38   6.23   7.78        6.17   6.24   6.83
    11x11/4                             98.6                      23.9                      88
    first 7x7/2, batch 8                97.8                      31.2                      96
    large 31x31, one channel            12.1                      0.79                      3.5
    3-d 3 to 32                         29.5                      13.4                      28.6
    max 3x3/1 pad 1 / 13x13      1.19 / 2.23               0.71 / 0.77
    max global / batch 1         0.077 / 0.088             0.041 / 0.036
    average global / batch 1     0.049 / 0.045             0.032 / 0.027
    LRN within 3 / 5, forward    1.11 / 3.27               0.29 / 0.81
    LRN within 3 / 5, data       2.20 / 6.36               0.51 / 1.59

AVX2 only, one thread, a busy machine, ratios: 11x11/4 1.05, 0.50 and 0.91; large 31x31 0.45, 0.26 and 0.24; depthwise
32, 112 0.97, 1.03 and 0.43; depthwise 64/2 1.55, 1.24 and 1.00; depthwise 512, 14 0.90, 1.39 and 1.58; depthwise 9x9
1.68, 1.42 and 0.24 (nine taps do not fit sixteen registers, so pixels share nothing); group 32 of 8 3x3/2 1.50, 0.86
and 1.71.

What was learnt:

- A pixel of a depthwise row meets three taps: eight pixels read ten columns instead of 24. With stride two they read
  17 of 24, which did not pay forward (1.14 of the time). For groups of four channels the gradient of the weights got
  slower so (1.09 and 1.18), as each product of a shuffle was there before: it keeps the loop over single columns.
- Rows of 512 channels: the next vector's lines fetched ahead (software prefetch) took the gradient of the weights from
  0.65-0.71 to 0.61 of the time before (0.91 to 0.69 with 32 channels).
- Passes of a strided gradient over the whole batch read it from memory once a phase; a few images at a time: 0.71.
- Exchanging axes costs memory, not instructions: in squares of 64 by 64, and a part of the batch at a time so that
  both orders stay in the second cache, it took half the time (1-d depthwise 0.66 in all).
- One or three channels fill a fifth of a vector. The columns of the kernel beside them fill it, and the products are
  added up in a second pass: 0.07 to 0.58 of the time for gradients of first layers.
- Maxima of four vectors at once: neighbouring lines of memory, and four chains of comparisons instead of one.

And before:

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
from pathlib import Path
from typing import Any

from shape_cases import ALPHA, BETA, CASES, Case, layer_text

ROOT = Path(__file__).resolve().parent.parent
GROUP_SECONDS = 0.02
GROUPS = 3
Passes = dict[str, Callable[[], Any]]


# -- caffepy --------------------------------------------------------------------------------------------------


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

    size = case.along(case.kernel)[0]
    half = (size - 1) // 2
    if case.kind == "max":
        return lambda x: F.max_pool2d(x, size, case.stride, case.pad, ceil_mode=case.ceil)
    if case.kind == "average":
        return lambda x: F.avg_pool2d(x, size, case.stride, case.pad, case.ceil)
    if case.kind == "across":
        return lambda x: F.local_response_norm(x, size, ALPHA, BETA)
    return lambda x: x * (1 + ALPHA * F.avg_pool2d(x * x, size, 1, half)) ** -BETA


def _torch_convolution(case: Case, x: Any, layout: Any) -> Passes:
    import torch

    transposed = case.kind == "deconvolution"
    first, second = (case.x[1], case.outputs) if transposed else (case.outputs, case.x[1])
    weights = (0.1 * torch.randn(first, second // case.group, *case.along(case.kernel))).contiguous(
        memory_format=layout
    )
    stride, pad, dilation, more = (case.along(size) for size in (case.stride, case.pad, case.dilation, 0))
    moves = (stride, pad, dilation, transposed, more, case.group)

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


def narrow_vectors() -> None:
    """Let this process compute with AVX2 only; before numba or PyTorch is imported."""
    os.environ |= {"NUMBA_CPU_NAME": "haswell", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    os.environ |= {"OPENBLAS_CORETYPE": "Haswell", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    try:
        from llvmlite import binding
    except ModuleNotFoundError:  # the peer's interpreter
        return
    features = binding.get_host_cpu_features()
    features.update((name, False) for name in features if name.startswith("avx512"))
    binding.get_host_cpu_features = lambda: features


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
    parser.add_argument(
        "--avx2", action="store_true", help="vectors of eight on both sides, whatever the processor has"
    )
    parser.add_argument("--serve", action="store_true", help="be the peer")
    options = parser.parse_args()
    if options.avx2:
        narrow_vectors()
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

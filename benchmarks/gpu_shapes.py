"""Convolution, pooling and LRN on a GPU over a grid of shapes: caffepy's time beside PyTorch's, in the same process.

    python benchmarks/gpu_shapes.py [--seconds 100] [--dtypes FLOAT,FLOAT16] [--limit 1.2] [--skip 140] [--count 70]
        [name ...]

The grid is that of cpu_shapes.py, and the smaller of its shapes again with 64 images: dense, grouped and depthwise
convolutions with and without multiplier, dilated, transposed, over one, two and three axes, with small and large
kernels, odd channels, one image and many; pooling of every kind, and LRN. Each is run forward, for the gradient of its
bottom and for that of its weights, each by itself. caffepy runs its layers with tuned kernels that give the same bits
in every run; PyTorch runs channels last with TF32 and `cudnn.benchmark`. Times are the device's, of a CUDA graph of
ten runs, the median of three. Rows come in a drawn order, the same every time, so that a run that `--seconds` ends has
seen some of everything. At the end the ratios above `--limit` are named, the worst first.

H200s. Of the 608 rows 598 were run once, in four runs, the last of 346 rows with 932 ratios, median 0.84, 7 above 1.2;
before it 252 rows in runs of 142 (of fewer rows than there are now), 74 and 36. Of the last ten of the drawn order only
depthwise 9x9 was run. All that were above 1.2, with the kernels of backend/cuda/convolution/own_kernels, microseconds:

                                                            before   caffepy   PyTorch   ratio
    whole image 7x7, 64 images, FLOAT16         weights     21         8.4      10.1     0.83
    1x1 1024, 7, one image, FLOAT16             weights      5.7       4.0       5.7     0.69
    3x3 512, 7, one image, FLOAT16              weights     10         6.1       6.8     0.90
    large 31x31, one channel, FLOAT             data       155        11.5      80.0     0.14
    the same, 64 images                         data       773        95.6     963       0.10
    large 15x15, 64 images, FLOAT               weights    667       263       426       0.62
    1-d group 4, stride 2, 64 images, FLOAT     weights     75        22.7      52.0     0.44
    1-d depthwise, FLOAT16                      forward     22         5.3       5.9     0.89
    depthwise multiplier 3, 64 images, FLOAT    weights    672        50.1     395       0.13
    the same                                    forward    380        43.0     283       0.15
    the same                                    data       370        42.2     370       0.11
    group 8 of 30 1x1, FLOAT                    forward     25.5       8.3      21.1     0.39

1-d dilated 512, causal, 64 images, FLOAT16, data had 1.28 (567 us) and was not measured again: it is tried as a forward
convolution now, which takes 382.

Those of the last run, with the kernels for large depthwise windows and for data gradients of few channels. The rows
marked * are not this benchmark's: kernels were launched behind one another without a graph, which counts the host's
launches of short ones, and before their last changes.

                                                            before   caffepy   PyTorch   ratio
    depthwise 31x31, 64 images, FLOAT           forward  37955       621      3812      0.16
    the same                                    data     13005       623     12931      0.05
    the same                                    weights  50318       818      3825      0.21
    depthwise 31x31, 64 images, FLOAT16         forward  12123       651      4942      0.13 *
    the same                                    weights  16305       883     16080      0.05 *
    transposed depthwise 16x16/8, FLOAT         forward    348        11.0     238      0.05
    the same                                    data        60        22.0      60      0.37
    the same, 64 images, FLOAT16                weights   2570       742      1859      0.40 *
    3-d first 3x7x7/2, FLOAT                    data       341       164       250      0.66 *
    1x15, one channel, FLOAT                    data        25.4       9.8      19.6    0.50
    the same, 64 images                         data       134        56.3     121      0.47
    depthwise 9x9, FLOAT                        forward      -         7.3     122      0.06

What was learnt:
- cuDNN's plans for three spatial axes take half the time with channels last, and changing the order of 64 images takes
  longer than the convolution, so blobs lie so.
- Pooling over the whole plane by one thread a channel leaves the device idle where there is one image; so do large
  windows over small planes with eight channels a thread. Halves that are kept as words until they are added up take
  half the time in a 13x13 window.
- A window as large as the image is a matrix product: 480 us by cuDNN, 14 by cuBLAS (64 images, FLOAT).
- The gradient to data of a large window is faster as a forward convolution: 1890 to 770 us (31x31, FLOAT, 64 images).
- A convolution with a channel multiplier is a depthwise one of an image in which each channel stands several times; to
  write that image takes little of what is saved. cuBLAS computes all groups of 1x1 windows in one launch.
- Of cuDNN's plans for a depthwise convolution over one axis two run, one of 22.7 us and one of 7.1 that it compiles.
  The second was chosen in five tunings of five, but not in one run before, whose ratio was 3.38; a kernel of our own is
  tried as well now. A candidate is lost when its first run takes more than a second, with the loading of its library,
  or when its first timed run is disturbed: each is a single measurement.
- 31x31 took thirteen times PyTorch's time for want of a candidate, it seems: where both have cuDNN's plans alone the
  times are even, elsewhere PyTorch runs depthwise kernels of its own, which take nine times what the arithmetic takes
  (64 images: 24.7 GFLOP, 0.4 ms). A convolution, its gradient to data for each phase of the stride, and that to weights
  are the same sums, so one text has them all: a thread uses each number that it loads 7 or 4 times.
- A transposed depthwise convolution with 21 channels, written eight at a time, took 533 us for 270 MB. Stores that do
  not fill 32 aligned bytes would explain it, at six cycles of a multiprocessor each; packs may have all channels now.
- In full float32 cuDNN leaves most of the device idle with one image: products of unrolled windows, split along the
  sum, take a quarter of the time of ResNet-50.
- Weights' gradients are float32 here also in FLOAT16, PyTorch's are halves: with few pixels most bytes are theirs (a
  7x7 image to 256 outputs: 25.7 MB, 12.8 as halves, and 3.3 of the factors). Written once by a block that has whole
  sums, they take less time than PyTorch's halves all the same; PyTorch with a copy to float32 behind takes 26.9 us
  there, 9.4 for 1x1 1024 and 13.5 for 3x3 512. And they were added to what was there, until the benchmark told each
  pass to begin anew.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from peers.torch_shapes import Passes, torch_passes
from shape_cases import CASES, Case, layer_text

CALLS, GROUPS = 10, 3
MAX_ELEMENTS = 1 << 26
"""Of a bottom with 64 images."""


def grid() -> list[Case]:
    """The shapes in their drawn order."""
    many = [replace(case, name=f"{case.name}, 64 images", x=(64, *case.x[1:])) for case in CASES if case.x[0] < 64]
    cases = CASES + [case for case in many if _elements(case) <= MAX_ELEMENTS]
    random.Random(1).shuffle(cases)
    return cases


def _elements(case: Case) -> int:
    count = max(case.x[1], case.outputs)
    for size in (case.x[0], *case.x[2:]):
        count *= size
    return count


def our_passes(case: Case, dtype: str, backend: Any) -> Passes:
    """The passes of caffepy's layer; the backend must be active."""
    import numpy as np
    from google.protobuf import text_format

    from caffepy.layers.core.base import LayerContext
    from caffepy.net import Net
    from caffepy.proto import caffe_pb2

    shape = " ".join(f"dim: {size}" for size in case.x)
    text = f'force_backward: true layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {shape} }} }} }}'
    text += f'layer {{ name: "y" bottom: "x" top: "y" {layer_text(case)} }}'
    text += f"default_forward_type: {dtype} default_backward_type: {dtype}"
    net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend, caffe_pb2.TRAIN, 1))
    layer, (x, y) = net.layers[-1], (net.blobs["x"], net.blobs["y"])
    generator = np.random.default_rng(0)
    backend.from_host(generator.standard_normal(x.shape, dtype=np.float32), x.data)
    net.forward()  # makes the copies of weights in halves, which layers alone do not
    backend.from_host(generator.standard_normal(y.shape, dtype=np.float32), y.diff)

    def backward(down: bool) -> None:
        layer.propagate_to_params = [not down] * len(layer.blobs)
        for blob in layer.blobs:
            blob.gradient_started = False  # gradients are written, not added to those of a pass before
        layer.backward([y], [down], [x])

    passes: Passes = {"forward": lambda: layer.forward([x], [y]), "data": lambda: backward(True)}
    return {**passes, "weights": lambda: backward(False)} if layer.blobs else passes


def our_times(case: Case, dtype: str, backend: Any) -> dict[str, float]:
    """Ours, in microseconds."""
    import cupy

    times, stream = {}, backend.stream
    with backend.activate():
        for name, run in our_passes(case, dtype, backend).items():
            run()
            run()
            stream.begin_capture()
            for _ in range(CALLS):
                run()
            graph = stream.end_capture()
            times[name] = microseconds(lambda graph=graph: graph.launch(stream), cupy.cuda, stream)
    return times


def their_times(case: Case, dtype: str) -> dict[str, float]:
    """PyTorch's."""
    import cupy
    import torch

    torch.set_default_dtype(torch.float16 if dtype == "FLOAT16" else torch.float32)
    times, stream = {}, torch.cuda.Stream()
    clock = cupy.cuda.ExternalStream(stream.cuda_stream)
    with torch.device("cuda"), torch.cuda.stream(stream):
        for name, run in torch_passes(case, True).items():
            run()
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):  # autograd's backward runs on the stream of its forward pass
                for _ in range(CALLS):
                    run()
            times[name] = microseconds(graph.replay, cupy.cuda, clock)
    return times


def microseconds(launch: Callable[[], Any], cuda: Any, stream: Any) -> float:
    """Of one of the calls in a graph, the median of several launches on a stream of CuPy's."""
    times = []
    for _ in range(GROUPS + 1):
        start, end = cuda.Event(), cuda.Event()
        start.record(stream)
        launch()
        end.record(stream)
        end.synchronize()
        times.append(cuda.get_elapsed_time(start, end) * 1e3 / CALLS)
    return statistics.median(times[1:])


def compare(case: Case, dtype: str, backend: Any) -> dict[str, float]:
    """Print a row; the ratio of each of its passes."""
    ours, theirs = our_times(case, dtype, backend), their_times(case, dtype)
    ratios = {name: ours[name] / theirs[name] for name in ours}
    columns = (f"{ours[name]:9.1f} {theirs[name]:9.1f} {ratio:6.2f}" for name, ratio in ratios.items())
    print(f"{case.name:40}{dtype:8}" + " |".join(columns), flush=True)
    return ratios


def rows(options: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """The shapes and dtypes that are asked for."""
    for case in grid():
        if not options.names or case.name.startswith(tuple(options.names)):
            for dtype in options.dtypes.split(","):
                yield case, dtype


def report(ratios: dict[str, float], limit: float) -> None:
    """Name the ratios above the limit, the worst first."""
    worst = sorted(ratios, key=lambda name: -ratios[name])
    above = [name for name in worst if ratios[name] > limit]
    print(f"\nmedian of {len(ratios)} ratios {statistics.median(ratios.values()):.2f}; {len(above)} above {limit}:")
    for name in above or worst[:1]:
        print(f"{ratios[name]:7.2f}  {name}")


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of the rows' names; all by default")
    parser.add_argument("--dtypes", default="FLOAT,FLOAT16")
    parser.add_argument("--seconds", type=float, default=0, help="after which no row begins; 0: all are run")
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("--skip", type=int, default=0, help="rows at the beginning that an earlier run has seen")
    parser.add_argument("--count", type=int, help="rows to run behind these; all by default")
    options = parser.parse_args()
    end = time.monotonic() + (options.seconds or float("inf"))

    import torch

    from caffepy.backend.cuda.backend import CudaBackend

    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    print(f"{'microseconds':48}forward, for the gradient of the bottom, for that of the weights")
    print(f"{'':48}" + " |".join([f"{'caffepy':>9} {'PyTorch':>9} {'ratio':>6}"] * 3))
    backend, ratios, missing = CudaBackend(0, "tf32"), {}, []
    for case, dtype in islice(rows(options), options.skip, options.count and options.skip + options.count):
        if time.monotonic() > end:
            missing.append(f"{case.name} {dtype}")
            continue
        try:
            found = compare(case, dtype, backend)
        except Exception as error:  # one shape that fails does not hide the others
            print(f"{case.name:40}{dtype:8}failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        ratios |= {f"{case.name} {dtype}, {name}": ratio for name, ratio in found.items()}
    if missing:
        print(f"\n{len(missing)} rows were left out for want of time, such as {', '.join(missing[:4])}")
    report(ratios, options.limit)
    backend.close()


if __name__ == "__main__":
    main()

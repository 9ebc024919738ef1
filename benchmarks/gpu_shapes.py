"""Convolution, pooling and LRN on a GPU over a grid of shapes: caffepy's time beside PyTorch's, in the same process.

    python benchmarks/gpu_shapes.py [--seconds 100] [--dtypes FLOAT,FLOAT16] [--limit 1.2] [--skip 140] [--count 70]
        [name ...]

The grid is that of cpu_shapes.py, and the smaller of its shapes again with 64 images: dense, grouped and depthwise
convolutions, dilated, transposed, over two and three axes, one image and many; pooling of both kinds, and LRN. Each is
run forward, for the gradient of its bottom and for that of its weights, each by itself. caffepy runs its layers with
tuned kernels that give the same bits in every run; PyTorch runs channels last with TF32 and `cudnn.benchmark`. Times
are the device's, of a CUDA graph of ten runs, the median of three. Rows come in a drawn order, the same every time, so
that a run that `--seconds` ends has seen some of everything. At the end the ratios above `--limit` are named, the worst
first.
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

    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers.layer import LayerContext
    from caffepy.net import Net

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

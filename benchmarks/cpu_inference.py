"""Inference on the CPU: milliseconds of a call beside onnxruntime's, taken in turns in the same run.

    python benchmarks/cpu_inference.py [--threads 2] [--rounds 5] [--batch 1] [mobilenet resnet50 ...]

Ours is the model that `caffepy.load` returns, called with a NumPy array; `engine` is the same with
`engine="onnxruntime"`. onnxruntime itself runs our export of the net, made in memory, with as many threads. Each side
has a process of its own that is asked for one group of calls at a time; a figure is the median over the groups, a ratio
the median of the rounds' ratios, memory the process's largest resident set. With one thread a time is the processor's,
which other programs disturb less. FCN-8s has images of 128 by 128.

Two cores of an AMD EPYC (Zen 4, AVX-512), a virtual machine, 3 rounds, onnxruntime 1.31.1. Two threads, other programs
at rest for the most part:

                 caffepy   engine   onnxruntime   ratio   engine   memory, MiB
    mobilenet       6.71     6.01          6.20    1.06     1.01    242 / 360 / 296
    resnet50       41.46    40.03         41.06    1.08     0.99    595 / 989 / 781
    squeezenet      4.13     3.94          3.91    1.04     0.99    187 / 259 / 231
    densenet121    31.03    37.08         36.68    0.85     1.00    318 / 482 / 392
    fcn8s         377.83   337.53        394.93    1.03     0.95   2363 / 4462 / 3405

One thread of the busy machine, when kernels were still called by Python layer by layer:

    mobilenet       16.0     12.7          12.5    1.25     1.02    222 / 360 / 242
    resnet50        94.4     83.8          84.5    1.12     0.95    548 / 976 / 722
    squeezenet      11.2      8.7           8.3    1.34     1.00    183 / 257 / 176
    densenet121     80.9     69.0          68.6    1.18     1.03    281 / 479 / 328

What was learnt:

- Weights packed once, and results finished in the tiles, save a quarter of ResNet-50's and MobileNet's time; how much
  each does was not measured. With weights packed before, tiles are faster for products of few pixels too.
- Bias, residual and ReLU in passes of NumPy run on one thread.
- 49 pixels in blocks of 24 are three items, of which the first thread of two gets two: channels are shared out instead.
- A parallel region costs 6 microseconds more than a call (10.6 and 4.9, medians of 2,000) where a core is free. On a
  busy machine a region waits for a thread that has no core, for milliseconds: two threads are slower than one then.
- Python takes 35 to 60 microseconds a layer, NumPy's copies (Concat) 25 to 130 each, and a second thread does nothing
  meanwhile. Calls of kernels that are written down in the second pass and made again in one parallel region for the
  whole net, copies among them, brought SqueezeNet from 5.4 to 4.3 ms and MobileNet from 7.3 to 6.3 on two threads.
- Blocks of 24 pixels shared out in halves leave one thread waiting: the longer share of two is 1.15 of an even one
  for 56 x 56 pixels, 1.29 for 28 x 28, 1.65 for 14 x 14 with 192 channels or fewer, counted by tiles. Blocks of whole
  tiles and parts of the panels, the division with the shortest longest share: 1.03 to 1.09, of which most is weights
  read twice. Only 7 x 7 with 32 channels stays at 1.23: there are no more tiles.
- In the region a thread takes chunks of its own share, then the others', and waits only for chunks that another is
  computing. So a thread without a core holds up nothing but the end of the pass: once, at a load of six, ours
  took 14.6 and 15.5 ms (MobileNet, SqueezeNet) and onnxruntime 25.1 and 22.4.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NETS = ("mobilenet", "resnet50", "squeezenet", "densenet121", "fcn8s")
SIZES = {"fcn8s": 128}
"""Height and width of images where they are not the prototxt's."""
SIDES = ("caffepy", "engine", "onnxruntime")
SECONDS = 0.2
"""Of a group of calls."""


def model_of(net: str, batch: int, threads: int, engine: str | None) -> tuple[Any, Any]:
    """A model with random parameters that keep numbers of one size, and images for it."""
    import numpy as np
    from google.protobuf import text_format

    import caffepy
    from caffepy.config.load import read_net
    from caffepy.inference.loading import load

    path = ROOT / "models" / net / "deploy.prototxt"
    param = read_net(path)
    shape = next(layer for layer in param.layer if layer.type == "Input").input_param.shape[0].dim
    shape[0] = batch
    shape[2:] = [SIZES.get(net, size) for size in shape[2:]]
    images = np.random.default_rng(1).standard_normal(tuple(shape), np.float32)
    folder = Path(os.environ["CAFFEPY_BENCHMARK"])
    prototxt, weights = folder / f"{net}.prototxt", folder / f"{net}.caffemodel"
    if not weights.exists():
        prototxt.write_text(text_format.MessageToString(param))
        weights.write_bytes(random_parameters(caffepy.load(prototxt, threads=threads).net).SerializeToString())
    return load(prototxt, weights, threads=threads, engine=engine), images


def random_parameters(net: Any) -> Any:
    """Weights of He's spread; statistics of numbers that are normal already."""
    import numpy as np

    from caffepy.net.weights import to_blob_proto
    from caffepy.proto import caffe_pb2

    generator, result = np.random.default_rng(1), caffe_pb2.NetParameter()
    for layer in net.layers:
        if not layer.blobs:
            continue
        message = result.layer.add(name=layer.name, type=layer.type)
        for index, blob in enumerate(layer.blobs):
            if layer.type in ("BatchNorm", "Scale"):
                blob.data[...] = float(index > 0 if layer.type == "BatchNorm" else index == 0)
            else:
                spread = (2 / max(1, np.prod(blob.shape[1:]))) ** 0.5
                blob.data[...] = generator.standard_normal(blob.shape, np.float32) * spread
            message.blobs.append(to_blob_proto(blob.host_data()))
    return result


def caller(net: str, side: str, batch: int, threads: int) -> Callable[[], Any]:
    """One call of a side."""
    model, images = model_of(net, batch, threads, "onnxruntime" if side == "engine" else None)
    if side != "onnxruntime":
        return lambda: model(images)
    import onnxruntime

    from caffepy.onnx.export.write import to_model

    varying = {name: [True] + [False] * (len(blob.shape) - 1) for name, blob in model.net.blobs.items() if blob.shape}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(
        to_model(model.net, varying=varying).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {session.get_inputs()[0].name: images}
    model.close()
    return lambda: session.run(None, feeds)


def serve(net: str, side: str, options: argparse.Namespace) -> None:
    """Answer each line of the input with the milliseconds of a group of calls and this process's memory in MiB."""
    call = caller(net, side, options.batch, options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    count = max(3, min(100, int(SECONDS / (time.perf_counter() - start))))
    print("ready", flush=True)
    for _ in sys.stdin:
        times = []
        for _ in range(count):
            start = clock()
            call()
            times.append((clock() - start) * 1e3)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps([statistics.median(times), memory]), flush=True)


class Peer:
    """A process that measures one side."""

    def __init__(self, net: str, side: str, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--threads", str(options.threads), "--batch", str(options.batch)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(
            [*command, "--side", side, net], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side failed; its error stands above")
        return line

    def measure(self) -> tuple[float, float]:
        """Milliseconds and MiB."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        milliseconds, memory = json.loads(self._read())
        return milliseconds, memory

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare(net: str, options: argparse.Namespace) -> None:
    """Print a net's row."""
    peers = [Peer(net, side, options) for side in SIDES]
    try:
        rounds = [[peer.measure() for peer in peers] for _ in range(options.rounds)]
    finally:
        for peer in peers:
            peer.close()
    medians = [statistics.median(one[side][0] for one in rounds) for side in range(len(SIDES))]
    ratios = [statistics.median(one[side][0] / one[-1][0] for one in rounds) for side in range(len(SIDES) - 1)]
    memory = " / ".join(f"{max(one[side][1] for one in rounds):.0f}" for side in range(len(SIDES)))
    print(f"{net:12}" + "".join(f"{m:12.2f}" for m in medians) + "".join(f"{r:10.2f}" for r in ratios) + f"   {memory}",
          flush=True)  # fmt: skip


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS), help=", ".join(NETS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help="measure one side in this process")
    options = parser.parse_args()
    if options.side:
        serve(options.nets[0], options.side, options)
        return
    import tempfile

    print(f"{'net':12}" + "".join(f"{side:>12}" for side in SIDES) + f"{'ratio':>10}{'engine':>10}   memory, MiB")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CAFFEPY_BENCHMARK"] = folder
        for net in options.nets:
            compare(net, options)


if __name__ == "__main__":
    main()

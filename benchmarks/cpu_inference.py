"""Inference on the CPU: milliseconds of a call beside onnxruntime's, taken in turns in the same run.

    python benchmarks/cpu_inference.py [--threads 2] [--rounds 5] [--batch 1] [mobilenet resnet50 ...]

Ours is the model that `caffepy.load` returns, called with a NumPy array; `engine` is the same with
`engine="onnxruntime"`. onnxruntime itself runs our export of the net, made in memory, with as many threads. Each side
has a process of its own that is asked for one group of calls at a time; a figure is the median over the groups, a ratio
the median of the rounds' ratios, memory the process's largest resident set. With one thread a time is the processor's,
which other programs disturb less. FCN-8s has images of 128 by 128.
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
    from caffepy.formats.load import read_net
    from caffepy.infer.model import load

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

    from caffepy.formats.binary import to_blob_proto
    from caffepy.formats.proto import caffe_pb2

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

    from caffepy.export.onnx.write import to_model

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
    print(
        f"{net:12}" + "".join(f"{m:12.2f}" for m in medians) + "".join(f"{r:10.2f}" for r in ratios) + f"   {memory}",
        flush=True,
    )


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

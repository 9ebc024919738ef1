"""Repeats, in many processes that share a GPU and their caches, what has once gone wrong there.

    python tests/gpu/stress.py --processes 15 --seconds 240

A round scores a net as `test_parameters_gpu.py` does, in each dtype, behind unfinished work of another stream; every
tenth has three solver threads that tune and capture at the same time, as in `test_engine.py`. Caches are new now and
then, for all processes at once. A line says which arrays were zeros where results differ from the first round's. No
test of pytest's; exit status 1 where anything differed, failed or hung.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROUNDS_A_CACHE = 40
ROUNDS_A_CAPTURE = 10
PARTS = ("c", "n", "s", "d", "i")


def is_zero(array: Any) -> bool:
    """Whether an array of the device or the host is zeros alone."""
    return not bool((np.asarray(array.get() if hasattr(array, "get") else array) != 0).any())


def zeros_of(net: Any) -> str:
    """Names of the arrays of a net that are zeros, which have been used by now."""
    found = [f"blob {name}" for name, blob in net.blobs.items() if is_zero(blob.data)]
    for layer in net.layers:
        found += [f"{layer.name}[{i}]" for i, blob in enumerate(layer.blobs) if is_zero(blob.host_data())]
        found += [
            f"{layer.name}[{i}] in {kind}"
            for i, blob in enumerate(layer.blobs)
            for kind, copy in blob.copies.items()
            if is_zero(copy)
        ]
        found += [
            f"{layer.name}.{name}" for name in ("_one",) if hasattr(layer, name) and is_zero(getattr(layer, name))
        ]
    for node in net.schedule:
        parts = zip(("factor", "term", "weights"), getattr(node.layer, "folded", ()), strict=False)
        found += [f"{node.layer.name} folded {name}" for name, array in parts if is_zero(array)]
    return ", ".join(found) or "none"


def disturb(backend: Any, generator: Any) -> None:
    """Leave work unfinished on the thread's current stream, whose memory is free for others as far as CuPy knows."""
    import cupy

    from caffepy.backend.cuda.compiler import launch_blocks, library_kernel

    blocks = [cupy.empty(int(size), "float32") for size in generator.integers(8, 40_000, 20)]
    launch_blocks(library_kernel("tuning", "idle"), (1,), (1,), (int(generator.integers(1, 8_000_000)),))
    for block in blocks:
        block.data.memset_async(0, block.nbytes, cupy.cuda.get_current_stream())


class Scores:
    """Rounds of scoring, each compared with the first.

    Args:
        prefix: of lines.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.wrong = 0
        self.first: dict[str, Any] = {}
        self.generator = np.random.default_rng(os.getpid())

    def run(self, number: int) -> None:
        """One round; half of them on a backend that is new."""
        from caffepy.backend import create_backend

        gpu, other = create_backend(0, math="fp32", autotune=False), create_backend(0, math="fp32", autotune=False)
        try:
            for kind in ("FLOAT16", "FLOAT", "BFLOAT16"):
                if number % 2:
                    with other.activate():  # as the fixture `backend` leaves it
                        self._score(gpu, kind, number)
                else:
                    self._score(gpu, kind, number)
        finally:
            gpu.close()
            other.close()

    def _score(self, gpu: Any, kind: str, number: int) -> None:
        import test_parameters_gpu as test
        from google.protobuf import text_format

        from caffepy.formats.proto import caffe_pb2
        from caffepy.layers.layer import LayerContext
        from caffepy.net import Net
        from caffepy.net.executor import ForwardExecutor

        param = text_format.Parse(test.NET, caffe_pb2.NetParameter())
        param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
        disturb(gpu, self.generator)
        if number % 3 == 0:
            test.keep_busy(gpu, float(self.generator.uniform(0, 0.02)))
        nets = [Net(param, LayerContext(gpu, caffe_pb2.TEST, seed=5), fuse=True) for _ in range(2)]
        with gpu.activate():
            for net, leaves in zip(nets, (False, True), strict=True):
                runner = ForwardExecutor(net)
                if leaves:
                    runner.offload_to_host()
                gpu.from_host(test.images(), net.blobs["data"].data)
                for turn in range(3):
                    runner.forward()
                    found = net.blobs["i"].host_data()
                    wanted = self.first.setdefault(kind, found)
                    if not np.array_equal(found, wanted):
                        self.wrong += 1
                        off = np.abs(found - wanted).max()
                        where = f"round {number} {kind} pass {turn} leaves {leaves} captured {runner.captured}"
                        print(f"{self.prefix} MISMATCH {where}: off by {off:g}, zeros: {zeros_of(net)}", flush=True)
                runner.close()


def capture_in_threads() -> str:
    """Three solver threads that tune and capture at once; what is wrong, if anything."""
    import test_engine as engine

    from caffepy.backend import create_backend

    results: dict[Any, Any] = {}
    errors: list[str] = []

    def work(number: int) -> None:
        try:
            own = create_backend(0, math="fp32")
            with engine.solver_of(own, "residual", engine.SHAPES[0]) as solver:
                results[number] = engine.train(solver, 20)
                if not solver.graph_executor.captured:
                    errors.append(f"thread {number} is not captured")
            own.close()
        except Exception as error:
            errors.append(f"thread {number}: {type(error).__name__}: {error}")
            traceback.print_exc()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        if thread.is_alive():
            faulthandler.dump_traceback()
            return "a thread hangs"
    for number in (1, 2):
        try:
            if not errors:
                engine.check_same_bits(results[0], results[number])
        except AssertionError as error:
            errors.append(f"threads 0 and {number} differ: {' '.join(str(error).split())[:200]}")
    return "; ".join(errors)


def worker(arguments: argparse.Namespace) -> int:
    """The rounds of one process."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
    prefix = f"[{arguments.worker}]"
    scores, captures, failed, number = Scores(prefix), 0, 0, 0
    end = time.monotonic() + arguments.seconds
    while number < arguments.rounds and time.monotonic() < end:
        os.environ["XDG_CACHE_HOME"] = f"{arguments.caches}/{number // ROUNDS_A_CACHE}"
        try:
            scores.run(number)
            if number % ROUNDS_A_CAPTURE == ROUNDS_A_CAPTURE // 2 and end - time.monotonic() > 60:
                captures += 1
                problem = capture_in_threads()
                if problem:
                    failed += 1
                    print(f"{prefix} CAPTURE round {number}: {problem}", flush=True)
        except Exception:
            failed += 1
            print(f"{prefix} ERROR round {number}: {' '.join(traceback.format_exc().split())[-600:]}", flush=True)
        number += 1
    print(f"{prefix} DONE {number} {captures} {scores.wrong} {failed}", flush=True)
    return 1 if scores.wrong or failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=100_000, help="of each process")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--caches", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(arguments.seconds + (210 if arguments.worker is None else 180), exit=True)
    if arguments.worker is not None:
        return worker(arguments)
    with tempfile.TemporaryDirectory(prefix="caffepy-stress-", ignore_cleanup_errors=True) as caches:
        own = [sys.executable, __file__, "--rounds", str(arguments.rounds), "--seconds", str(arguments.seconds)]
        lines = [
            subprocess.Popen(
                [*own, "--caches", caches, "--worker", str(i)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for i in range(arguments.processes)
        ]
        outputs: list[str] = [""] * len(lines)

        def read(i: int) -> None:
            outputs[i] = lines[i].communicate()[0]

        readers = [threading.Thread(target=read, args=(i,)) for i in range(len(lines))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    numbers = np.zeros(4, int)
    for i, output in enumerate(outputs):
        text = [line for line in output.splitlines() if not line.startswith(f"[{i}] DONE")]
        done = [line for line in output.splitlines() if line.startswith(f"[{i}] DONE")]
        numbers += np.array(done[-1].split()[2:], int) if done else np.array([0, 0, 0, 1])
        print("\n".join(text[-60:]), end="\n" if text else "")
    rounds, captures, wrong, failed = numbers
    print(
        f"SUMMARY stress: {len(lines)} processes, {rounds} rounds of 3 dtypes and 6 passes, {captures} captures by 3 "
        f"threads, {wrong} passes differ, {failed} failures"
    )
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the input pipeline sustains: reading alone, the way to the GPU, and how long a GPU waits for its data.

    python benchmarks/reader.py [--gpu 0 [--train]] [--seconds 1] [--threads 1,2,4]

Makes LMDBs of random images in a temporary folder: 28 x 28 grey ones for batches of 64 (LeNet), and 3 x 256 x 256 ones
for batches of 256 that are cropped to 227 x 227, mirrored and have a mean subtracted (CaffeNet). They stay in the page
cache, so this is not about disks. Prints images a second of the reader alone for several numbers of threads. On a GPU
also the time of a batch's copy and of its transformation, beside the time that its bytes need at the card's peak; and,
for a layer that is replayed from a CUDA graph beside a kernel that keeps the GPU busy as long as a net would, by how
much the data make an iteration longer. With `--train` the nets themselves are trained with `caffepy train`, from LMDB
and from images that are made up once and stay on the GPU: what the whole way from the file costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from scaling import images_per_second, write_solver

from caffepy.backend import Backend, create_backend
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.input.prefetching import passes_per_block
from caffepy.layers.layer import LayerContext, layer_class

IN_FLIGHT = 4
"""Iterations that the host goes ahead of the GPU."""
BANDWIDTH = 4.3e12
"""Bytes a second of a copy within an H200."""

SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long now, begin;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
}
"""


@dataclass(frozen=True)
class Case:
    """A set of images, and the nets that take it.

    Args:
        name: for the table.
        records: how many are written.
        shape: (C, H, W) of one.
        batch: the net's batch size.
        transform: its transform_param.
        nets: milliseconds of an iteration without input, by net and dtype.
        trained: `benchmarks/scaling.py`'s name of the net to train, its type, and for how many iterations.
    """

    name: str
    records: int
    shape: tuple[int, int, int]
    batch: int
    transform: str
    nets: tuple[tuple[str, str, float], ...]
    trained: tuple[tuple[str, str, int], ...]


CASES = (
    Case(
        "28 x 28",
        60000,
        (1, 28, 28),
        64,
        "scale: 0.00390625",
        (("LeNet FLOAT", "float32", 0.107), ("LeNet FLOAT, twice as fast", "float32", 0.053)),
        (("lenet", "FLOAT", 30000),),
    ),
    Case(
        "256 x 256 x 3, crop 227, mirror",
        1024,
        (3, 256, 256),
        256,
        "crop_size: 227 mirror: true mean_value: 104 mean_value: 117 mean_value: 123",
        (("CaffeNet FLOAT16", "float16", 4.2), ("CaffeNet FLOAT", "float32", 8.4)),
        (("caffenet", "FLOAT16", 800), ("caffenet", "FLOAT", 400)),
    ),
)


def write(case: Case, path: Path) -> None:
    """The LMDB of a case."""
    channels, height, width = case.shape
    pixels = np.random.default_rng(0).integers(0, 256, (256, channels * height * width), dtype=np.uint8)

    def datums() -> Iterator[tuple[bytes, caffe_pb2.Datum]]:
        for n in range(case.records):
            data = pixels[n % len(pixels)].tobytes()
            yield record_key(n), caffe_pb2.Datum(channels=channels, height=height, width=width, data=data, label=n % 10)

    write_datums(path, datums())


def data_layer(case: Case, data: str) -> caffe_pb2.LayerParameter:
    """A Data layer's parameters, given the text of its data_param."""
    text = f"name: 'data' type: 'Data' top: 'data' top: 'label' data_param {{ {data} }}"
    return text_format.Parse(f"{text} transform_param {{ {case.transform} }}", caffe_pb2.LayerParameter())


def make_layer(
    case: Case, path: Path, backend: Backend, threads: int, dtype: str = "float32", shuffle: bool = False
) -> tuple[Any, list[Blob]]:
    """A Data layer and its tops."""
    data = f"source: '{path}' backend: LMDB batch_size: {case.batch} threads: {threads} shuffle: {str(shuffle).lower()}"
    param = data_layer(case, data)
    layer: Any = layer_class("Data")(param, LayerContext(backend, caffe_pb2.TRAIN, seed=1))
    tops = [Blob(backend, name="data", dtype=dtype), Blob(backend, name="label")]
    layer.setup([], tops)
    return layer, tops


def reader_rate(case: Case, path: Path, threads: int, shuffle: bool, seconds: float) -> float:
    """Images a second that the loader puts into plain memory."""
    layer, _ = make_layer(case, path, create_backend(threads=1), threads, shuffle=shuffle)
    loader, slot = layer.make_loader(), layer.byte_images(case.batch).slot
    passes = passes_per_block(slot)
    blocks = [np.zeros(passes * slot.size, np.uint8) for _ in range(4)]
    done, begin = 0, 0.0
    while done < 8 or time.perf_counter() - begin < seconds:
        if done == 4:
            begin = time.perf_counter()
        firsts = [(done * passes + i) * case.batch for i in range(passes)]
        filled = loader.load_bytes(firsts, case.batch, slot, blocks[done % 4])
        assert filled == passes, (filled, passes)
        done += 1
    rate = (done - 4) * passes * case.batch / (time.perf_counter() - begin)
    loader.close()
    layer.close()
    return rate


def prefetcher_rate(case: Case, path: Path, threads: int, seconds: float) -> float:
    """Images a second that come out of the prefetching thread when nobody does anything with them."""
    layer, _ = make_layer(case, path, create_backend(threads=1), threads)
    number, start = 0, 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or start == 0:
        batch = layer._start_prefetcher().get(number)
        number += batch.passes
        layer._start_prefetcher().release(batch)
        if start == 0 and time.perf_counter() - begin > seconds / 4:
            start, begin = number, time.perf_counter()
    rate = (number - start) * case.batch / (time.perf_counter() - begin)
    layer.close()
    return rate


def show_reader(case: Case, path: Path, threads: list[int], seconds: float) -> None:
    """The table of the reader alone."""
    print(f"\n{case.name}: images/s of the reader alone, batches of {case.batch}")
    print(f"{'threads':>8} {'in order':>12} {'shuffled':>12} {'prefetched':>12}")
    for count in threads:
        rates = [reader_rate(case, path, count, shuffle, seconds) for shuffle in (False, True)]
        print(f"{count:8d} {rates[0]:12,.0f} {rates[1]:12,.0f} {prefetcher_rate(case, path, count, seconds):12,.0f}")


# -- on a GPU --------------------------------------------------------------------------------------------


def milliseconds(stream: Any, work: Callable[[], Any]) -> float:
    """Median time of 20 runs on a stream after three more."""
    import cupy

    times = []
    for turn in range(23):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        if turn >= 3:
            times.append(cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times)


def show_steps(case: Case, path: Path, backend: Any, dtype: str) -> None:
    """Time of one batch's copy and transformation."""
    import cupy

    layer, tops = make_layer(case, path, backend, 4, dtype)
    layer.prefetch_to_device(0)
    layer.forward([], tops)
    to_device = cupy.cuda.runtime.memcpyHostToDevice
    slot, ring = layer.byte_images(case.batch).slot, layer._transfer.ring
    memory = backend.host_memory(ring.block * slot.size)
    copy = milliseconds(
        backend.stream,
        lambda: cupy.cuda.runtime.memcpyAsync(
            ring.memory.data.ptr, memory.ctypes.data, memory.size, to_device, backend.stream.ptr
        ),
    )
    graph = backend.capture(lambda: [layer.forward([], tops) for _ in range(10)])
    transform = milliseconds(backend.stream, graph.launch) / 10
    pixels = case.batch * slot.channels * slot.height * slot.width
    floor = (pixels + tops[0].data.nbytes) / BANDWIDTH * 1e3
    print(
        f"{dtype:9} copy {copy / ring.block:.4f} ms a batch in blocks of {ring.block} "
        f"({memory.size / copy / 1e6:.1f} GB/s), transformation {transform:.4f} ms, its bytes alone {floor:.4f} ms"
    )
    layer.close()


class Iterations:
    """Iterations as a solver runs them: fed, replayed from a graph, a few ahead of the device.

    Args:
        backend: the GPU.
        layer: the data layer.
        tops: its tops.
        busy: milliseconds that the rest of the net takes.
    """

    def __init__(self, backend: Any, layer: Any, tops: list[Blob], busy: float) -> None:
        import cupy

        self._backend = backend
        self._layer = layer
        self._mailbox = backend.device_scalars(1, 1)
        self._marks: list[Any] = []
        self._number = 0
        self.feeding = 0.0
        kernel = cupy.RawKernel(SPIN, "spin")
        spin = lambda: kernel((1,), (1,), (np.uint64(busy * 1e6),))  # noqa: E731
        layer.prefetch_to_device(0)
        layer.forward([], tops)
        spin()
        layer.context.passes.on_device = self._mailbox.counters[0]
        self._graph = backend.capture(lambda: (layer.forward([], tops), spin()))
        layer.release_batch(0)
        self._number = 1

    def run(self, seconds: float, feed: bool) -> float:
        """Milliseconds of an iteration; without `feed` the same batch is taken again and again."""
        self._backend.synchronize()
        begin, count, number = time.perf_counter(), 0, self._number
        while time.perf_counter() - begin < seconds:
            started = time.perf_counter()
            if feed:
                self._layer.prefetch_to_device(number)
            self.feeding += time.perf_counter() - started
            self._mailbox.send([0.0], [(number, 0)])
            self._graph.launch()
            if feed:
                self._layer.release_batch(number)
            self._marks.append(self._backend.record_event())
            if len(self._marks) >= IN_FLIGHT:
                self._marks.pop(0).wait()
            count += 1
            number += 1 if feed else 0
        self._backend.synchronize()
        self._number = number
        return (time.perf_counter() - begin) / count * 1e3


def show_waiting(case: Case, path: Path, backend: Any, threads: int, seconds: float) -> None:
    """How much longer an iteration is because its data have to come."""
    for name, dtype, busy in case.nets:
        layer, tops = make_layer(case, path, backend, threads, dtype)
        loop = Iterations(backend, layer, tops, busy)
        without = loop.run(seconds, feed=False)
        loop.run(seconds / 2, feed=True)
        loop.feeding, waited, first = 0.0, sum(layer.waited().values()), loop._number
        fed = loop.run(2 * seconds, feed=True)
        passes = loop._number - first
        print(
            f"{name}: {without:.4f} ms an iteration with the same batch always, {fed:.4f} ms fed: "
            f"{max(fed - without, 0) / fed:.1%} of the time waited for; {case.batch / fed * 1e3:,.0f} images/s; the "
            f"solver's thread spent {loop.feeding / passes * 1e6:.1f} us a pass on feeding, "
            f"{(sum(layer.waited().values()) - waited) / passes * 1e6:.1f} us of them waiting"
        )
        layer.close()


def show_training(case: Case, path: Path, folder: Path, device: list[str]) -> None:
    """What `caffepy train` reaches with images from LMDB, beside made-up ones."""
    for name, kind, iterations in case.trained:
        solver = write_solver(folder, name, iterations, kind, case.batch)
        command = [sys.executable, "-m", "caffepy", "train", "--solver", str(solver), *device]
        made_up = images_per_second(command, folder)
        param = text_format.Parse(solver.read_text(), caffe_pb2.SolverParameter())
        param.net_param.layer[0].CopyFrom(data_layer(case, f"source: '{path}' backend: LMDB batch_size: {case.batch}"))
        solver.write_text(text_format.MessageToString(param))
        rates = [images_per_second(command, folder) for _ in range(2)]
        lost = " and ".join(f"{1 - rate / made_up:.1%}" for rate in rates)
        print(f"{name} {kind} trained: {made_up:,.0f} images/s with made-up images, {lost} less from LMDB", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = ",".join(str(count) for count in (1, 2, 4, 8, 16) if count <= cores)
    parser.add_argument("--gpu", type=int, help="number of a GPU; without it only the reader is measured")
    parser.add_argument("--train", action="store_true", help="with --gpu: train the nets as well")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--threads", default=counts, help="numbers of threads to try")
    options = parser.parse_args()
    if options.train and options.gpu is None:
        parser.error("--train needs --gpu")
    backend: Any = None if options.gpu is None else create_backend(options.gpu)
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(CASES):
            path = Path(folder) / str(index)
            write(case, path)
            show_reader(case, path, [int(count) for count in options.threads.split(",")], options.seconds)
            if backend is None:
                continue
            with backend.activate():
                for dtype in sorted({dtype for _, dtype, _ in case.nets}):
                    show_steps(case, path, backend, dtype)
                show_waiting(case, path, backend, 0, options.seconds)
            if options.train:
                show_training(case, path, Path(folder), ["--gpus", str(options.gpu)])
    if backend is not None:
        backend.close()


if __name__ == "__main__":
    main()

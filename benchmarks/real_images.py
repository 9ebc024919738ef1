"""Training from encoded images: what the readers reach, and what a GPU trains from JPEGs beside made-up images.

    python benchmarks/real_images.py [--rows caffenet,ssd300] [--cores 16] [--seconds 4]

Makes JPEGs that look like photographs (smooth noise, shapes and grain, quality 90) and LMDBs of them in a temporary
folder; epochs repeat and the files stay in the page cache, so this is not about disks. For each row:

- `reading`: `caffepy time --data`, the data layer alone;
- `made up`, `from JPEGs`: `caffepy train`, with images that are made up once and stay on the GPU, and from the LMDB.
  SSD300 is also trained with `recompress: false`. Images a second and the share of waiting for data are those of the
  log's lines after the first ten seconds; `cores` are those that the process and its readers used;
- `PyTorch`: `peers/torch_images.py`, torchvision's decoder in as many worker processes as there are cores, the loader
  alone and with a net of torchvision.

Without a GPU only `reading` is measured. `--rows decoder` measures OpenCV without a loader.
`--cores` binds all of it to so many cores. The default run takes less than ten minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from google.protobuf import text_format
from scaling import synthetic_net

from caffepy.data.sources.databases import record_key, write_datums
from caffepy.formats.load import read_net
from caffepy.formats.proto import caffe_pb2

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 150
"""Seconds that a run may take."""
START_SECONDS = 10
"""Seconds of a training that are not measured: readers start, graphs are captured, and each reader compiles a kernel
after some thousand images, if it is not in the cache."""
DISPLAY = 20
"""Iterations between two lines of the log."""
STARTED = "] Iteration 0 "
"""Part of the line that a training logs after its first iteration, which compiles kernels."""
RESIZE = (
    "img_rand_resize_lower: 256 img_rand_resize_upper: 480 interpolation_algo_down: INTER_LINEAR "
    "interpolation_algo_up: INTER_LINEAR"
)


@dataclass(frozen=True)
class Row:
    """A net and the images that it is trained from.

    Args:
        folder: of the net, below models/.
        size: height and width of the images.
        batch: the net's batch size.
        kind: the net's type.
        crop: the net's input size.
        guess: images a second that a core reads about.
        transform: fields that are added to transform_param.
        peer: net of torchvision.
    """

    folder: str
    size: tuple[int, int]
    batch: int
    kind: str
    crop: int
    guess: int
    transform: str = ""
    peer: str = ""


ROWS = {
    "caffenet": Row("caffenet", (256, 256), 256, "FLOAT16", 227, 1500, peer="alexnet"),
    "resnet50": Row("resnet50", (256, 256), 256, "FLOAT16", 224, 1500),
    "resnet50-resize": Row("resnet50", (375, 500), 256, "FLOAT16", 224, 700, RESIZE, peer="resnet50"),
    "ssd300": Row("ssd300", (375, 500), 32, "FLOAT16", 300, 100),
}
DISTINCT = {(256, 256): 2048, (375, 500): 1024}
"""Different images of each size."""


# -- images ----------------------------------------------------------------------------------------------


def photograph(seed: int, height: int, width: int) -> bytes:
    """A JPEG file: smooth noise at four scales, circles and lines, grain."""
    cv2.setNumThreads(1)
    rng = np.random.default_rng(seed)
    image = np.zeros((height, width, 3), np.float32) + rng.uniform(70, 180, 3).astype(np.float32)
    for cells, contrast in ((3, 70), (8, 45), (24, 30), (64, 12)):
        noise = rng.standard_normal((max(height * cells // width, 2), cells, 3)).astype(np.float32)
        noise = 0.8 * noise.mean(2, keepdims=True) + 0.4 * noise
        image += contrast * cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
    for _ in range(8):
        color, at = rng.uniform(0, 255, 3).tolist(), (int(rng.integers(width)), int(rng.integers(height)))
        if rng.random() < 0.5:
            cv2.circle(image, at, int(rng.integers(8, width // 5)), color, -1, cv2.LINE_AA)
        else:
            cv2.line(image, at, (int(rng.integers(width)), int(rng.integers(height))), color, 3, cv2.LINE_AA)
    image += 3 * rng.standard_normal((height, width, 1)).astype(np.float32)
    settings = [cv2.IMWRITE_JPEG_QUALITY, 90]
    return bytes(cv2.imencode(".jpg", np.clip(image, 0, 255).astype(np.uint8), settings)[1].tobytes())


def make_images(size: tuple[int, int], cores: int) -> list[bytes]:
    """The files of one size."""
    make = partial(photograph, height=size[0], width=size[1])
    with ProcessPoolExecutor(cores) as pool:
        return list(pool.map(make, range(DISTINCT[size]), chunksize=16))


def annotated(image: bytes, number: int) -> caffe_pb2.AnnotatedDatum:
    """A record of a detector's database: an image with two boxes."""
    record = caffe_pb2.AnnotatedDatum(type=caffe_pb2.AnnotatedDatum.BBOX)
    record.datum.CopyFrom(caffe_pb2.Datum(data=image, encoded=True, label=-1))
    for label, (left, top) in ((1 + number % 20, (0.1, 0.2)), (1 + number % 7, (0.5, 0.4))):
        group = record.annotation_group.add(group_label=label)
        box = group.annotation.add(instance_id=0).bbox
        box.xmin, box.ymin, box.xmax, box.ymax = left, top, left + 0.4, top + 0.5
    return record


def write_databases(folder: Path, rows: Sequence[Row], cores: int) -> None:
    """Write the LMDBs and the peer's files of some rows."""
    for size in sorted({row.size for row in rows}):
        images = make_images(size, cores)
        name = f"{size[0]}x{size[1]}"
        print(f"{len(images)} JPEGs of {name}, {np.mean([len(image) for image in images]) / 1000:.1f} kB", flush=True)
        datums = (caffe_pb2.Datum(data=image, encoded=True, label=n % 1000) for n, image in enumerate(images))
        write_datums(folder / name, ((record_key(n), datum) for n, datum in enumerate(datums)))
        if any(row.folder == "ssd300" and row.size == size for row in rows):
            records = (annotated(image, n) for n, image in enumerate(images))
            write_datums(folder / f"{name}-boxes", ((record_key(n), record) for n, record in enumerate(records)))
        np.save(folder / f"{name}-bytes.npy", np.frombuffer(b"".join(images), np.uint8))
        np.save(folder / f"{name}-ends.npy", np.cumsum([len(image) for image in images]))


# -- nets ------------------------------------------------------------------------------------------------


def data_layer(row: Row, folder: Path, threads: int = 0) -> caffe_pb2.LayerParameter:
    """The net's data layer in TRAIN, over our database."""
    net = read_net(ROOT / "models" / row.folder / "train_val.prototxt")
    layer = next(each for each in net.layer if each.type in ("Data", "AnnotatedData"))
    name = f"{row.size[0]}x{row.size[1]}" + ("-boxes" if layer.type == "AnnotatedData" else "")
    layer.data_param.source, layer.data_param.batch_size = str(folder / name), row.batch
    layer.data_param.threads = threads
    layer.annotated_data_param.ClearField("label_map_file")
    text_format.Merge(row.transform, layer.transform_param)
    return layer


def write_solver(path: Path, net: caffe_pb2.NetParameter) -> Path:
    """A solver that trains until it is stopped."""
    param = caffe_pb2.SolverParameter(
        net_param=net,
        base_lr=1e-6,
        lr_policy="fixed",
        momentum=0.9,
        weight_decay=0.0005,
        max_iter=10**7,
        display=DISPLAY,
        random_seed=1,
        snapshot_after_train=False,
        type="SGD",
    )
    path.write_text(text_format.MessageToString(param))
    return path


# -- runs ------------------------------------------------------------------------------------------------


def processor_seconds(process: int) -> float:
    """Seconds of the processor that a process and its children have used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    children = " ".join(path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")).split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(int(child)) for child in children)


def train(row: Row, solver: Path, gpu: int, seconds: float) -> tuple[float, str, float]:
    """Train for some seconds after a start; images a second, the share of waiting for data, and the cores used."""
    command = [sys.executable, "-m", "caffepy", "train", "--solver", str(solver), "--gpus", str(gpu)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    end = threading.Timer(LIMIT, process.kill)
    end.start()
    lines, displayed, since = list[str](), list[str](), ""
    before = begin = cores = 0.0
    try:
        for line in process.stderr:
            lines.append(line)
            if STARTED in line and not since:
                time.sleep(START_SECONDS)
                before, begin, since = processor_seconds(process.pid), time.monotonic(), time.strftime("%H:%M:%S")
            elif since and line[:1] == "I" and line.split(maxsplit=2)[1] >= since:
                displayed.append(line)
                lasted = time.monotonic() - begin
                if not cores and lasted >= seconds and sum(" iter/s" in each for each in displayed) > 1:
                    cores = (processor_seconds(process.pid) - before) / lasted
                    process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        end.cancel()
        process.kill()
    rates = [float(rate) for rate in re.findall(r"Iteration \d+ \(([\d.]+) iter/s", "".join(displayed))]
    if not rates:
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(lines)[-3000:]}")
    waits = [float(share) for share in re.findall(r"    Waited for data (\d+) %", "".join(displayed))]
    for notice in re.findall(r"\] (.*processes read.*)", "".join(lines)):
        print(f"{'':34}{notice}")
    return row.batch * len(rates) / sum(1 / rate for rate in rates), f"{sum(waits) / len(rates):.0f} %", cores


def read(row: Row, folder: Path, options: Sequence[str], seconds: float, cores: int) -> None:
    """Print what the data layer reads alone."""
    threads = cores if "--cpu" in options else 0  # on the CPU backend one thread reads by default
    net = caffe_pb2.NetParameter(name="data", layer=[data_layer(row, folder, threads)])
    path = folder / "data.prototxt"
    path.write_text(text_format.MessageToString(net))
    iterations = max(int(seconds * row.guess * cores / row.batch), 8)
    command = [sys.executable, "-m", "caffepy", "time", "--model", str(path), "--data", *options, "--iterations"]
    result = subprocess.run([*command, str(iterations)], capture_output=True, text=True, timeout=LIMIT)
    found = re.findall(r"\t(\d+) images/s.*, ([\d.]+) cores used", result.stderr)
    if not found:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    shares = re.findall(r"\t(.*) of the threads' time", result.stderr)
    show("reading", float(found[-1][0]), cores=float(found[-1][1]), more=shares[-1] if shares else "")


def show(label: str, rate: float, waited: str = "", cores: float | None = None, more: str = "") -> None:
    """Print a line of the table."""
    used = "" if cores is None else f"{cores:.1f} cores"
    share = f"waited {waited}" if waited else ""
    print(f"  {label:28}{rate:10,.0f} images/s  {share:14} {used:11} {more}".rstrip(), flush=True)


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Print a row's lines."""
    row = ROWS[name]
    print(f"{name}: {row.size[0]}x{row.size[1]} to {row.crop}x{row.crop}, batches of {row.batch}", flush=True)
    gpu = arguments.gpu
    read(row, folder, ["--cpu"] if gpu is None else ["--gpu", str(gpu)], arguments.seconds, arguments.cores)
    if gpu is None:
        return
    net = synthetic_net(folder, row.folder, row.batch, row.kind)  # with images that are made up once
    show("made up", *train(row, write_solver(folder / "solver.prototxt", net), gpu, arguments.seconds))
    learned = [layer for layer in net.layer if layer.bottom]
    del net.layer[:]
    net.layer.extend([data_layer(row, folder), *learned])
    solver = write_solver(folder / "solver.prototxt", net)
    show("from JPEGs", *train(row, solver, gpu, arguments.seconds))
    if row.folder == "ssd300":
        net.layer[0].annotated_data_param.recompress = False
        without = write_solver(folder / "solver.prototxt", net)
        show("without recompression", *train(row, without, gpu, arguments.seconds))
    if row.peer and has("torch", "torchvision"):
        for line in peer(row, folder, arguments):
            print(line, flush=True)


def has(*modules: str) -> bool:
    """Whether modules are installed."""
    return all(importlib.util.find_spec(module) is not None for module in modules)


def peer(row: Row, folder: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """PyTorch's lines of a row."""
    program = ROOT / "benchmarks" / "peers" / "torch_images.py"
    files = folder / f"{row.size[0]}x{row.size[1]}"
    command = [sys.executable, str(program), str(files), row.peer, str(row.crop), str(row.batch), str(arguments.cores)]
    command += [str(arguments.seconds), str(arguments.gpu), *(["256", "480"] if row.transform else [])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if result.returncode:
        yield f"  PyTorch failed: {result.stderr[-1000:]}"
    yield from result.stdout.splitlines()


# -- decoders alone --------------------------------------------------------------------------------------


def measure_decoders(folder: Path, arguments: argparse.Namespace) -> None:
    """Print what OpenCV decodes in threads, without a loader."""
    for size in sorted(DISTINCT):
        name = folder / f"{size[0]}x{size[1]}"
        memory, ends = np.load(f"{name}-bytes.npy"), np.load(f"{name}-ends.npy").tolist()
        files = [memory[begin:end] for begin, end in zip([0, *ends], ends, strict=False)][:1024]
        for count in sorted({1, 4, arguments.cores}):
            show(f"{size[0]}x{size[1]} OpenCV, {count} threads", decoder_rate(files, count))


def decode(batch: Sequence[Any]) -> None:
    """Decode files with OpenCV."""
    for file in batch:
        cv2.imdecode(file, cv2.IMREAD_COLOR)


def decoder_rate(files: list[np.ndarray], count: int) -> float:
    """Images a second of `count` threads, with batches of 64."""
    done, ready = [0] * count, threading.Barrier(count)

    def work(thread: int) -> float:
        at = 64 * thread
        decode(files[:64])
        ready.wait(30)
        begin = time.monotonic()
        while time.monotonic() < begin + 1.5:
            decode(files[at % 1024 : at % 1024 + 64])
            done[thread] += 64
            at += 64 * count
        return time.monotonic() - begin

    with ThreadPoolExecutor(count) as pool:
        seconds = max(pool.map(work, range(count)))
    return sum(done) / seconds


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = sorted(os.sched_getaffinity(0))
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of {', '.join(ROWS)}, decoder")
    parser.add_argument("--cores", type=int, default=min(len(available), 16), help="cores to use")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--gpu", type=int, help="the GPU's number (default: 0, if there is one; -1: none)")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, available[: arguments.cores])
    if arguments.gpu is None and has("cupy"):
        probe = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
        found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
        arguments.gpu = 0 if found.returncode == 0 and int(found.stdout) > 0 else None
    arguments.gpu = None if arguments.gpu == -1 else arguments.gpu
    names = arguments.rows.split(",")
    rows = [ROWS[name] for name in names if name in ROWS] if names != ["decoder"] else list(ROWS.values())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        begin = time.monotonic()
        write_databases(folder, rows, arguments.cores)
        print(f"made in {time.monotonic() - begin:.0f} s; {arguments.cores} cores", flush=True)
        for name in names:
            if name == "decoder":
                measure_decoders(folder, arguments)
            else:
                measure(name, folder, arguments)
        print(f"all in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

"""Loaders whose batches other processes fill, which the trainer's GIL does not limit.

Owns the processes and the trainer's end of their pipes; `reading_process.py` is the other end.
`caffepy.layers.input.images` imports it.

Each request is a line of JSON; the first one has the layer's settings. An answer is a line of JSON and the batch's
bytes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.types import ImageSlot
from caffepy.data.loader import ImageLoader
from caffepy.data.prefetch import Batch
from caffepy.errors import AbortedError, CaffepyError, DataError, RunError
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.utils.process_fork import free_after_fork, tell_after_fork

logger = logging.getLogger(__name__)

_PIPE_BYTES = 1 << 20
"""Wanted size of a pipe's buffer: each time it is empty, the trainer's thread sleeps and wakes."""
_END_SECONDS = 5.0
"""Limit of the wait for the end of a process."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Variables that set the threads of libraries; there is a process for each core."""
_START = """
import os
answers = os.dup(1)
os.dup2(2, 1)  # what libraries print does not get among the answers
from caffepy.layers.input.reading_process import main
main(answers)
"""


def reading_task(layer: PrefetchingLayer, folder: str, seed: int, stream: int) -> dict[str, Any] | None:
    """Return the settings of a process that reads for a data layer in training; None: another process cannot.

    Args:
        layer: the data layer.
        folder: the working directory in which the layer opened its source; scripts may have left it.
        seed: of the loader's random numbers.
        stream: of the loader's random numbers.
    """
    context = layer.context
    if not type(layer).__module__.startswith("caffepy.") or not sys.executable:  # a plugin's layer; an embedded Python
        return None
    if isinstance(context.resolve, PathResolver):
        prototxt = context.resolve.prototxt
    elif context.resolve is Path:
        prototxt = None
    else:  # a function of the caller
        return None
    param = caffe_pb2.LayerParameter()
    param.CopyFrom(layer.param)
    for settings in (param.data_param, param.image_data_param):
        settings.threads = 1
    return {
        "layer": b64encode(param.SerializeToString()).decode(),
        "folder": folder,
        "prototxt": None if prototxt is None else str(prototxt),
        "dialect": None if context.dialect is None else context.dialect.value,
        "devices": context.shard.parts,
        "seed": seed,
        "stream": stream,
        "fingerprint": source_fingerprint(layer),
    }


def source_fingerprint(layer: PrefetchingLayer) -> dict[str, str]:
    """Return `PrefetchingLayer.fingerprint`; empty if a record that it needs cannot be read."""
    try:
        return layer.fingerprint()
    except DataError:
        return {}


class ProcessLoader:
    """A `Loader` whose batches another process fills. The process starts with the first batch.

    Args:
        task: of `reading_task`.
        own: the layer's loader in this process; it names records.
        where: the layer, for messages.
        warned: warnings that the log has; shared by the layer's loaders.
    """

    def __init__(self, task: dict[str, Any], own: ImageLoader, where: str, warned: set[str]) -> None:
        self._task = task
        self._own = own
        self._where = where
        self._warned = warned
        self._first = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = free_after_fork(threading.Lock())
        """Between the start of the process and `close`."""
        self.stages: dict[str, float] = {}
        """Seconds that the process has spent in each stage (`caffepy.logs.performance_report`)."""
        self.processor_seconds = 0.0
        """Seconds of the processor that the process has used."""
        tell_after_fork(self)

    def forked(self) -> None:
        """Leave the process to the parent; the next batch starts another one."""
        self._process = None

    @property
    def reading(self) -> str:
        """The first record of the current batch, for messages."""
        return self._own.describe(self._first)

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the samples [first, first + count) as float32.

        Raises:
            DataError: a record cannot be read or transformed; the message names it.
            RunError: the process has ended.
        """
        self._first = first
        answer = self._ask({"first": first, "count": count, "rows": batch.least_rows, "tops": len(batch.arrays)})
        batch.least_rows = answer["rows"]
        for top, shape in enumerate(answer["shapes"]):
            batch.array(top, tuple(shape))
        for memory in batch.array_bytes():
            self._read_into(memory)

    def load_bytes(self, firsts: Sequence[int], count: int, slot: ImageSlot, block: NDArray[np.uint8]) -> int:
        """Fill slots as `ImageLoader.load_bytes` does.

        Raises:
            RunError: the process has ended.
        """
        self._first = firsts[0]
        filled: int = self._ask({"firsts": list(map(int, firsts)), "count": count, "slot": slot.shape})["filled"]
        self._read_into(block[: filled * slot.size])
        return filled

    def close(self) -> None:
        """End the process, which loses nothing. Thread-safe; idempotent."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it waits for a dead network drive
            process.wait(_END_SECONDS)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the process's answer to a request."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json_line(request))
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._ended(process)
        answer: dict[str, Any] = json.loads(line)
        self.stages, self.processor_seconds = answer["stages"], answer["processor"]
        for warning in answer["warnings"]:
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning("%s", warning)
        if "data_error" in answer:
            raise DataError(answer["data_error"])
        if "error" in answer:
            raise RunError(answer["error"])
        return answer

    def _read_into(self, memory: NDArray[np.uint8]) -> None:
        process, done = self._running(), 0
        answers = cast(BufferedReader, process.stdout)
        while done < memory.size:
            count = answers.readinto(memory[done:].data)
            if not count:
                raise self._ended(process)
            done += count

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise AbortedError(f"{self._where}: closed")
            if self._process is None:
                self._process = _start(self._task)
            return self._process

    def _ended(self, process: subprocess.Popen[bytes]) -> CaffepyError:
        if self._closed:
            return AbortedError(f"{self._where}: closed while waiting for data")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        return RunError(
            f"{self._where}: the process that reads {self.reading} has ended with exit status {process.returncode}; "
            "-9 is the system's answer to a lack of memory: use fewer cores (taskset), each of which has a process"
        )


def json_line(message: dict[str, Any]) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def _start(task: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a process that reads, and give it its task. It ends with this process, whose pipe it reads."""
    folder = str(Path(__file__).resolve().parents[3])  # of the package
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _START],  # -P: a file of the working directory may have a module's name
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=task["folder"],
        env=environment,
        start_new_session=True,  # Ctrl-C stops the trainer, which then needs no more batches
    )
    assert process.stdin is not None
    assert process.stdout is not None
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # more than the user may have
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    with suppress(OSError):  # it has ended; the first request notices it
        process.stdin.write(json_line(task))
    return process

"""The process that reads for a data layer in training: fills batches and sends them to the trainer.

`process_loader.py` starts it with `main`, and describes requests and answers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from base64 import b64decode
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import create_backend
from caffepy.backend.types import ImageSlot
from caffepy.data.images import single_threaded_opencv
from caffepy.data.prefetch import Batch
from caffepy.data.sharding import Shard
from caffepy.data.workers import keep_freed_memory
from caffepy.errors import CaffepyError, DataError
from caffepy.formats.dialect import Dialect
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.images import ImagesLayer
from caffepy.layers.input.process_loader import json_line, source_fingerprint
from caffepy.layers.layer import LayerContext, layer_class

_ADVICE = "leave the data as they are while a net reads them, or set threads: 1"


class _Warnings(logging.Handler):
    """Keeps the log's warnings for the next answer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main(output: int) -> None:
    """Fill batches until the trainer's process closes its end of the pipe.

    Args:
        output: file descriptor for the answers.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(output, "wb")
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    keep_freed_memory()
    reader: _Reader | None = None
    task = json.loads(requests.readline() or b"{}")
    with single_threaded_opencv(), suppress(BrokenPipeError):
        for line in requests:
            parts: list[NDArray[np.uint8]] = []
            answer: dict[str, Any] = {}
            try:
                reader = reader or _Reader(task)
                answer, parts = reader.fill(json.loads(line))
            except DataError as error:
                answer = {"data_error": str(error)}
            except CaffepyError as error:
                answer = {"error": str(error)}
            except Exception as error:
                reading = "" if reader is None else f" {reader.loader.reading}"
                answer = {"error": f"reading{reading} failed: {type(error).__name__}: {error}"}
            stages = {} if reader is None else reader.loader.stages.totals()
            spent = {"stages": stages, "processor": time.process_time()}
            answers.write(json_line({**answer, **spent, "warnings": warnings.texts}))
            warnings.texts = []
            for part in parts:
                answers.write(part.data)
            answers.flush()


class _Reader:
    """A data layer's loader in a process of its own.

    Args:
        task: of `reading_task`.

    Raises:
        DataError: the source cannot be read, or is not the one that the trainer has opened.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        dialect = task["dialect"]
        context = LayerContext(
            create_backend(threads=1),
            caffe_pb2.TRAIN,
            shard=Shard(world_size=task["devices"]),
            resolve=PathResolver(task["prototxt"]),
            dialect=None if dialect is None else Dialect(dialect),
        )
        param = caffe_pb2.LayerParameter.FromString(b64decode(task["layer"]))
        layer = layer_class(param.type)(param, context)
        assert isinstance(layer, ImagesLayer)
        try:
            layer.open_source()
        except DataError as error:
            raise DataError(f"{error}, although it could be read when the net was made: {_ADVICE}") from error
        found = source_fingerprint(layer)
        for name, before in task["fingerprint"].items():
            if found.get(name) != before:
                raise DataError(
                    f"{layer.where}: {name} was {before} when the net was made, and is {found.get(name)} now: {_ADVICE}"
                )
        self.loader = layer.image_loader(task["seed"], task["stream"])
        self._batch = Batch(0)

    def fill(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
        """Return the answer to a request, and the parts of the batch."""
        if "slot" in request:
            slot = ImageSlot(*request["slot"])
            block = self._batch.reserve(slot, len(request["firsts"]))
            filled = self.loader.load_bytes(request["firsts"], request["count"], slot, block)
            return {"filled": filled}, [block[: filled * slot.size]]
        if len(self._batch.arrays) != request["tops"]:
            self._batch = Batch(request["tops"])
        batch = self._batch
        batch.least_rows = request["rows"]
        self.loader.load(request["first"], request["count"], batch)
        return {"shapes": [array.shape for array in batch.arrays], "rows": batch.least_rows}, batch.array_bytes()

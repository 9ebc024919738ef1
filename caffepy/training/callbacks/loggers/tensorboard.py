"""The logger for TensorBoard; tensorboardX writes the event files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

# Its SummaryWriter writes in a thread; if that fails, for example on a full disk, the caller waits for ever.
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import directory_check
from tensorboardX.summary import make_histogram

from caffepy.errors import RunError
from caffepy.training.callbacks.loggers.contract import Logger, Run

_BINS = 64


class TensorBoardLogger(Logger):
    """Writes an event file into a folder.

    Its first event is the start of a session at the run's first iteration: TensorBoard then hides what earlier files of
    the folder have from this iteration on.

    Args:
        folder: the folder, which is made.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: Run) -> None:
        """Open the file.

        Raises:
            RunError: it cannot be written.
        """
        try:
            directory_check(self._folder)
            # A process that resumes within the second would otherwise write the same file.
            self._writer = EventsWriter(os.path.join(self._folder, "events"), f".{os.getpid()}.{run.iteration}")
            self._write(run.iteration, session_log=SessionLog(status=SessionLog.START))
        except OSError as error:
            raise RunError(f"{self._folder}: cannot be written: {error.strerror or error}") from error

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(iteration, summary=Summary(value=numbers))

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        histograms = [
            Summary.Value(tag=name, histo=make_histogram(array.astype(float), _BINS)) for name, array in values.items()
        ]
        self._write(iteration, summary=Summary(value=histograms))

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, iteration: int, **content: Any) -> None:
        self._writer.write_event(Event(step=iteration, wall_time=time.time(), **content))
        self._writer.flush()

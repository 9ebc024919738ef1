"""Event files of TensorBoard, read back as its documentation describes them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorboardX")

from tensorboardX.proto.event_pb2 import Event, SessionLog

from caffepy.errors import RunError
from caffepy.training.callbacks.loggers import Run, TensorBoardLogger


def events(folder: Path) -> Iterator[Any]:
    """The events of a folder's files: length (8 bytes), its checksum (4), the event and its checksum (4)."""
    for path in sorted(folder.iterdir()):
        content, place = path.read_bytes(), 0
        while place < len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            yield Event.FromString(content[place + 12 : place + 12 + size])
            place += size + 16


def test_an_event_file_has_scalars_and_histograms(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path / "a" / "b"))
    logger.start(Run(300, {}))
    logger.scalars(300, {"loss": 0.5, "test0/accuracy": 0.75})
    logger.histograms(400, {"parameters/ip/0": np.arange(10, dtype=np.float32)})
    first, session, scalars, histogram = events(tmp_path / "a" / "b")  # readable before the logger is closed
    logger.close(failed=False)
    assert first.file_version == "brain.Event:2"
    assert (session.step, session.session_log.status) == (300, SessionLog.START)
    assert scalars.step == 300
    assert {value.tag: value.simple_value for value in scalars.summary.value} == {"loss": 0.5, "test0/accuracy": 0.75}
    (value,) = histogram.summary.value
    assert (histogram.step, value.tag) == (400, "parameters/ip/0")
    assert (value.histo.min, value.histo.max, value.histo.sum, sum(value.histo.bucket)) == (0, 9, 45, 10)


def test_a_resumed_training_adds_a_file(tmp_path: Path) -> None:
    for start in (0, 2):
        logger = TensorBoardLogger(str(tmp_path))
        logger.start(Run(start, {}))
        logger.scalars(start, {"loss": 1.0})
        logger.close(failed=False)
    assert [event.step for event in events(tmp_path) if event.HasField("summary")] == [0, 2]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        TensorBoardLogger(str(tmp_path / "file")).start(Run(0, {}))

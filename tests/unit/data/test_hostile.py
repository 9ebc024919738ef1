"""Data files that strangers made: a sentence that names the file, and no memory taken for what they only promise."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from caffepy.data.images import resize_image
from caffepy.data.prefetch import Prefetcher
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.workers import Workers
from caffepy.errors import DataError, RunError


def test_a_size_that_cannot_be_made_is_named() -> None:
    with pytest.raises(DataError, match=r"cannot be transformed: OpenCV.s resize says [^\n]*$"):
        resize_image(np.zeros((3, 2, 2), np.uint8), 2**31 - 1, 2**31 - 1)


def test_lists_and_images_that_are_no_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match="cannot be read: it is a FIFO, not a regular file"):
        ImageListSource(tmp_path / "fifo")
    (tmp_path / "list").write_text(f"fifo 1\n/dev/zero 2\n{'x' * 5000} 3\n")
    source = ImageListSource(tmp_path / "list", f"{tmp_path}/")
    for number, message in enumerate(["it is a FIFO", "No such file", "File name too long"]):
        with pytest.raises(DataError, match=f"cannot be read: {message}"):
            source.read(number)


# -- readers that die --------------------------------------------------------------------------------------


class Mute:
    """A loader that fails and cannot say what it reads."""

    @property
    def reading(self) -> str:
        raise MemoryError

    def load(self, *arguments: object) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        """Nothing is open."""


def test_a_reader_that_cannot_say_what_it_read_is_noticed_at_once() -> None:
    subject = Prefetcher([Mute()], lambda number: number, 1, 1, where="layer 'd'", timeout=300)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="layer 'd': reading failed: KeyboardInterrupt"):
        subject.get(0)


def test_a_reader_that_ends_without_a_word_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetcher, "_fail", lambda *_: None)
    subject = Prefetcher([Mute()], lambda number: number, 1, 1, where="layer 'd'", timeout=300)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="layer 'd': the prefetch thread has ended"):
        subject.get(0)


def test_workers_go_on_without_a_helper_that_was_killed() -> None:
    workers, done = Workers(3), list[int]()
    workers.run(done.append, range(50))
    workers._jobs.put(None)  # one of the helpers ends
    while all(thread.is_alive() for thread in workers._started):
        time.sleep(0.01)
    workers.run(done.append, range(50))
    assert sorted(done) == sorted([*range(50)] * 2)
    workers.close()

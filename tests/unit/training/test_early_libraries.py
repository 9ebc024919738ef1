"""CUDA's libraries are found where packages and systems have them, and only what is not in memory is read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from caffepy.training import early_libraries


def library(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(b"library")
    return path


def test_packages_are_preferred_and_all_come_in_the_order_of_their_use(tmp_path: Path) -> None:
    site, system = tmp_path / "site", tmp_path / "system"
    engines = library(site / "nvidia/cudnn/lib", "libcudnn_engines_precompiled.so.9")
    graph = library(site / "nvidia/cudnn/lib", "libcudnn_graph.so.9")
    common = library(system, "libcudnn_ops.so.9")
    library(system, "libcudnn_graph.so.9")
    library(system, "libcudnn_adv.so.9")
    core = library(site / "cupy/_core", "core.so")
    library(site / "cupy/_core", "core.pyx")
    found = early_libraries.library_files([str(tmp_path / "absent"), "", str(site)], [str(system)])
    assert found == [core, graph, engines, common]


def test_more_than_memory_has_to_spare_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path / "nvidia/cudnn/lib", "libcudnn_ops.so.9")
    assert len(early_libraries.library_files([str(tmp_path)], [])) == 1
    monkeypatch.setattr(early_libraries, "_free_memory", lambda: 4 * len(b"library") - 1)
    assert early_libraries.library_files([str(tmp_path)], []) == []


class System:
    """preadv of a system that has some pieces of files in memory."""

    def __init__(self, pieces: set[int], piece: int) -> None:
        self.pieces = pieces
        self.piece = piece
        self.read: list[int] = []

    def preadv(self, file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT:
            if offset // self.piece not in self.pieces:
                raise OSError(errno.EAGAIN, "not in memory")
            return 1
        self.read.append(offset // self.piece)
        return len(buffers[0])


def test_what_is_in_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(50))
    system = System({1, 3}, 10)
    monkeypatch.setattr(os, "preadv", system.preadv)
    assert early_libraries.read(path, memoryview(bytearray(10))) == 30
    assert system.read == [0, 2, 4]


def test_a_system_that_cannot_say_what_is_in_memory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(50))

    def preadv(file: int, buffers: Any, offset: int, flags: int = 0) -> int:
        assert flags, "nothing is read"
        raise OSError(errno.EOPNOTSUPP, "not known here")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match="not known here"):
        early_libraries.read(path, memoryview(bytearray(10)))


def test_files_that_cannot_be_read_do_not_keep_others_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = library(tmp_path, "there")
    seen = []
    monkeypatch.setattr(early_libraries, "library_files", lambda: [tmp_path / "absent", there])
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset, flags=0: seen.append(offset) or 1)
    early_libraries.begin.cache_clear()
    thread = early_libraries.begin()
    thread.join(300)
    assert not thread.is_alive()
    early_libraries.begin.cache_clear()
    assert seen == [3]

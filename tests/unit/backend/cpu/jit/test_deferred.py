"""Kernels that Python works off until numba pays: both forms compute the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from caffepy.backend.cpu.jit import compiler as cpu_cache
from caffepy.backend.cpu.jit.deferred import Bytes, Int, JitThreshold, Words, deferred_kernel, part, read_at
from caffepy.backend.types import host_address


@part
def _doubled(x: Int) -> Int:
    return 2 * x


@part
def _doubled_and_one(x: Int) -> Int:
    return _doubled(x) + 1


@deferred_kernel
def _results_of(begin: Int, end: Int, x: Words, out: Words) -> None:
    for i in range(begin, end):
        out[i] = _doubled_and_one(x[i]) + _doubled(1)


@deferred_kernel
def _read(begin: Int, end: Int, file: Int, buffer: Bytes, at: Int, out: Words) -> None:
    out[0] = read_at(file, at, 3, 1)
    out[1] = buffer[0]


def test_python_computes_what_the_machine_code_does() -> None:
    x, compiled, plain = np.arange(5), np.zeros(5, np.int64), np.zeros(5, np.int64)
    _results_of.run(1, 5, 5, x, compiled)
    _results_of.interpret(0, 5, x.data, plain)
    assert compiled.tolist() == plain.tolist() == [3, 5, 7, 9, 11]


def test_both_read_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    with path.open("rb") as file:
        for descriptor, expected in ((file.fileno(), [3, ord("b")]), (-1, [-1, 0])):
            for run in (lambda *a: _read.run(1, 1, 1, *a), lambda *a: _read.interpret(0, 1, *a)):
                buffer, out = np.zeros(4, np.uint8), np.zeros(2, np.int64)
                run(descriptor, buffer, host_address(buffer), out)
                assert out.tolist() == expected


def test_a_kernel_pays_where_numba_is_there_and_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cache, "kernels_folder", lambda: tmp_path)
    cold, later = (deferred_kernel(_results_of.interpret) for _ in range(2))
    assert [cold.should_compile(items, 10, 100) for items in (4, 6, 1)] == [False, False, True]
    cold.run(1, 5, 5, np.arange(5), np.zeros(5, np.int64))
    assert later.should_compile(1, 10, 100), "it is in the cache"


def test_patience_ends_after_so_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numba")
    patience = JitThreshold(10)
    assert [patience.ends(items) for items in (4, 6, 1)] == [False, False, True]


LMDB = """
import sys
from pathlib import Path
from caffepy.data.sources.databases import LmdbSource
import caffepy.data.loader, caffepy.layers.input.images
source = LmdbSource(Path(sys.argv[1]))
print(len(source.read(3)), "numba" in sys.modules)
"""


def test_a_short_look_into_an_lmdb_needs_no_numba(tmp_path: Path) -> None:
    import lmdb

    with lmdb.open(str(tmp_path / "db"), map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        for i in range(5):
            transaction.put(b"%d" % i, b"x" * (10 + i))
    command = [sys.executable, "-c", LMDB, str(tmp_path / "db")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["13", "False"]

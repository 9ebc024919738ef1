"""Files in memory that lose pages: they read as zeros, are counted, and nothing else than they is spared SIGBUS."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import mmap, os, sys, threading
from caffepy.backend.cpu.jit.compiler import MappedFile
file = open(sys.argv[1], "w+b")
file.write(bytes([7]) * 5 * mmap.PAGESIZE)
file.flush()
mapped = MappedFile(file.fileno(), 5 * mmap.PAGESIZE)
"""


def run_mapped(path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", BEGIN + text, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")])
def test_pages_that_a_file_has_lost_read_as_zeros(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_mapped(
        tmp_path / "file",
        """
os.truncate(sys.argv[1], 2 * mmap.PAGESIZE)
other = threading.Thread(target=lambda: print(int(mapped.memory[: 3 * mmap.PAGESIZE].sum()) // mmap.PAGESIZE))
other.start()
other.join()
print(int(mapped.memory.sum()) // mmap.PAGESIZE, mapped.pages_lost)
os.truncate(sys.argv[1], 5 * mmap.PAGESIZE)
print(int(mapped.memory.sum()) // mmap.PAGESIZE, mapped.pages_lost)
again = MappedFile(file.fileno(), 5 * mmap.PAGESIZE)
print(int(again.memory.sum()) // mmap.PAGESIZE, again.pages_lost)
""",
        *options,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["14", "14", "3", "14", "3", "14", "0"]


@pytest.mark.parametrize("forgotten", [False, True])
def test_other_memory_raises_sigbus_as_ever(tmp_path: Path, forgotten: bool) -> None:
    """Also where a file was that is not mapped any more: the handler's table has forgotten it."""
    done = run_mapped(
        tmp_path / "file",
        f"""
memory, forgotten = mapped.memory, {forgotten}
other = mmap.mmap(file.fileno(), mmap.PAGESIZE)
os.truncate(sys.argv[1], 0)
if forgotten:
    del mapped
print("reading", flush=True)
memory[0] if forgotten else other[0]
""",
    )
    assert done.stdout == "reading\n"
    assert done.returncode == -signal.SIGBUS


def test_a_handler_that_came_later_is_not_lost(tmp_path: Path) -> None:
    """The next file that is mapped puts ours before it; what is not ours goes to it."""
    done = run_mapped(
        tmp_path / "file",
        """
import faulthandler
faulthandler.enable()
again = MappedFile(file.fileno(), 5 * mmap.PAGESIZE)
other = mmap.mmap(file.fileno(), mmap.PAGESIZE)
os.truncate(sys.argv[1], 0)
print(mapped.memory.sum(), again.memory.sum(), flush=True)
other[0]
""",
    )
    assert done.stdout == "0 0\n"
    assert done.returncode == -signal.SIGBUS and "Fatal Python error: Bus error" in done.stderr


def test_rows_of_the_table_are_used_again(tmp_path: Path) -> None:
    done = run_mapped(
        tmp_path / "file",
        """
for _ in range(3000):
    MappedFile(file.fileno(), 5)
kept = []
try:
    while len(kept) < 2000:
        kept.append(MappedFile(file.fileno(), 5))
except OSError as error:
    print(len(kept), error)
""",
    )
    assert (done.returncode, done.stdout) == (0, "1023 1024 files are mapped already\n"), done.stderr

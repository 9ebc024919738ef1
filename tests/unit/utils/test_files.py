"""Regular files are read, and anything else is refused with a sentence; shared libraries are loaded."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from ctypes import c_double
from pathlib import Path

import pytest

from caffepy.utils.files import load_library, open_regular, read_list, read_regular


def test_a_regular_file_is_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b", 3) == b"abc"


@pytest.mark.parametrize(
    "path, message",
    [
        ("/dev/zero", "it is a device, not a regular file"),
        ("/tmp", "it is a folder, not a regular file"),
        ("a\0b", "the path has a NUL character"),
        ("x" * 5000, "File name too long"),
        ("\ud800", "characters that the locale cannot express"),
        ("/not/there", "No such file"),
    ],
)
def test_what_is_no_regular_file_is_refused(path: str, message: str) -> None:
    with pytest.raises(OSError, match=message):
        open_regular(path)


def test_neither_a_fifo_nor_a_socket_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is a FIFO, not a regular file"):
        open_regular(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="it is a socket, not a regular file"):
            open_regular(tmp_path / "socket")


def test_a_file_that_becomes_a_fifo_between_look_and_opening_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    looked = os.stat(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda path: looked)
    with pytest.raises(OSError, match="it is a FIFO, not a regular file"):
        open_regular(tmp_path / "fifo")


def test_a_file_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    with pytest.raises(OSError, match="has 1099511627776 bytes, more than the 1000 that are read"):
        read_regular(tmp_path / "large", 1000)


def test_a_file_that_says_it_is_empty_is_read_up_to_the_limit() -> None:
    with pytest.raises(OSError, match="more than the 3 that are read"):
        read_regular("/proc/self/status", 3)


def test_a_byte_order_mark_is_no_part_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbfcaf\xe9.png 1\n")
    assert os.fsencode(read_list(tmp_path / "list", 100, "list")) == b"caf\xe9.png 1\n"


# -- shared libraries ------------------------------------------------------------------------------------


LOADS_A_PIPE = """
import sys, threading
from caffepy.utils.files import load_library

def load():
    try:
        load_library(sys.argv[1])
    except OSError as error:
        print(error)

thread = threading.Thread(target=load)
thread.start()
open(sys.argv[1], "wb").close()
thread.join()
"""
"""Its thread waits within dlopen until its main thread has opened the other end of the pipe."""


def test_other_threads_go_on(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    done = subprocess.run(
        [sys.executable, "-c", LOADS_A_PIPE, str(path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert "pipe: file too short" in done.stdout


def test_its_functions_can_be_called() -> None:
    cosine = load_library("libm.so.6").cos
    cosine.argtypes, cosine.restype = [c_double], c_double
    assert cosine(1.0) == pytest.approx(math.cos(1.0))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(OSError, match=r"libabsent\.so"):
        load_library("libabsent.so")

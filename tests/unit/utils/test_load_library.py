"""Shared libraries are loaded while other threads go on."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from ctypes import c_double
from pathlib import Path

import pytest

from caffepy.utils.files import load_library

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

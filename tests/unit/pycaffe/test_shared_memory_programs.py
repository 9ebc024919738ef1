"""Random programs that write blobs before any pass do what a plain model of Caffe's memory does."""

from __future__ import annotations

from random_programs import run_program
from shared_memory_programs import Program


def test_programs_do_what_caffe_does() -> None:
    for seed in range(2001, 2009):
        run_program(seed, 25, Program)

"""Random programs on nets and solvers do what a plain model of Caffe does; `tests/support/random_programs.py`."""

from __future__ import annotations

import pytest
from random_programs import run_program

PROGRAMS = 10


@pytest.mark.parametrize("first", range(1900, 2050, PROGRAMS))
def test_programs_do_what_caffe_does(first: int) -> None:
    for seed in range(first, first + PROGRAMS):
        run_program(seed, steps=30)

"""What a fault case is: something that goes wrong, and what must be true of the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
from subprocess_training import SubprocessTraining


@dataclass(frozen=True)
class FaultCase:
    """A fault that comes over a run; the tests try it once, `endurance.py` as often as it is told.

    Args:
        kind: what happens.
        where: to whom.
        check: makes it happen in some round (0, 1, …: rounds differ in when it happens), checks everything that is
            promised and returns the seconds from the fault to the end of all processes.
        mpi: needs mpirun.
        further: left to `endurance.py`, because another place of the same kind stands for it in the tests.
    """

    kind: str
    where: str
    check: Callable[[SubprocessTraining, int], float]
    mpi: bool = False
    further: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


Trials = dict[FaultCase, Future[float]]
"""Cases that are being tried; a result is the seconds from the fault to the end."""


def parameters(cases: Sequence[FaultCase]) -> list[object]:
    """The tests' cases as pytest takes them."""
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.mpi] if case.mpi else [])
        for case in cases
        if not case.further
    ]

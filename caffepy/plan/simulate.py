"""One training iteration as a discrete simulation: computing on one stream, all-reduces on another.

A bucket's all-reduce begins when its last gradient is there and the reduction before it is over; the update of all
parameters follows the last of them. Times may have any one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced by one call.

    Args:
        last: number of the backward step after which all of its gradients are there.
        communication: what its all-reduce takes.
    """

    last: int
    communication: float


@dataclass(frozen=True)
class Timeline:
    """When things happened, from the beginning of the iteration.

    Args:
        step: end of the iteration.
        compute: what the iteration takes on a device that trains alone.
        communication: all all-reduces together.
        reductions: beginning and end of each bucket's all-reduce.
    """

    step: float
    compute: float
    communication: float
    reductions: tuple[tuple[float, float], ...]

    @property
    def exposed(self) -> float:
        """Time that communication costs in the end: what computing does not hide."""
        return max(self.step - self.compute, 0.0)

    @property
    def efficiency(self) -> float:
        """compute / step: 1 where all communication is hidden."""
        return self.compute / self.step if self.step > 0 else 1.0


def simulate(
    before: float,
    backward: Sequence[float],
    buckets: Sequence[Bucket],
    overlap: bool = True,
    contention: float = 0.0,
    update: float = 0.0,
) -> Timeline:
    """Run one iteration.

    Args:
        before: everything before the backward pass whose gradients are reduced: data, forward, earlier passes.
        backward: the steps of the backward pass in the order in which they run.
        buckets: in the order in which they are ready.
        overlap: reduce while backward goes on; else all reductions come after it.
        contention: which part of the device an all-reduce takes from computing: 0 none (copy engines and a few of a
            GPU's multiprocessors), 1 all (MPI on the only core).
        update: of all parameters, after all of that.
    """
    assert 0 <= contention <= 1 and all(0 <= bucket.last < len(backward) for bucket in buckets)
    work = [before, *backward, update]
    device = _Device(
        work=work,
        needs=[0] * (len(work) - 1) + [len(buckets)],
        costs=[bucket.communication for bucket in buckets],
        after=[2 + bucket.last if overlap else len(work) - 1 for bucket in buckets],
        rate=1.0 - contention,
    )
    while not device.done:
        device.advance()
    compute = sum(work)
    step = max(device.now, compute)  # the two are sums in different orders
    return Timeline(step, compute, sum(bucket.communication for bucket in buckets), tuple(device.reductions))


@dataclass
class _Device:
    """Two streams and what they have to do, each in its order.

    Args:
        work: pieces of computing.
        needs: for each piece how many reductions come before it.
        costs: the reductions.
        after: for each reduction how many pieces of work come before it.
        rate: of computing while there is a reduction.
    """

    work: list[float]
    needs: list[int]
    costs: list[float]
    after: list[int]
    rate: float
    now: float = 0.0
    pieces: int = 0
    """Pieces of work that are done."""
    reductions: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and end of the reductions that are done."""
    _spent: float = 0.0
    """What was done of the present piece."""
    _begun: float | None = None
    """When the present reduction began."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left."""
        return self.pieces == len(self.work) and len(self.reductions) == len(self.costs)

    def advance(self) -> None:
        """Go on to the next moment in which something is done."""
        reduced = len(self.reductions)
        computing = self.pieces < len(self.work) and self.needs[self.pieces] <= reduced
        reducing = reduced < len(self.costs) and self.after[reduced] <= self.pieces
        assert computing or reducing, "the streams wait for each other"
        rate = self.rate if reducing else 1.0
        begun = self.now if self._begun is None else self._begun
        computed = self.now + (self.work[self.pieces] - self._spent) / rate if computing and rate > 0 else inf
        ended = begun + self.costs[reduced] if reducing else inf
        then = max(min(computed, ended), self.now)
        self._spent += (then - self.now) * rate if computing else 0.0
        self._begun = begun if reducing else None
        self.now = then
        if computed <= then:
            self.pieces, self._spent = self.pieces + 1, 0.0
        if ended <= then:
            self.reductions.append((begun, then))
            self._begun = None

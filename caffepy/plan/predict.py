"""Predicts what training takes on a cluster, from a profile and the cost of all-reduces.

An iteration is simulated: computing on one stream, all-reduces on another. A bucket's all-reduce begins when its last
gradient is there and the reduction before it is over; the update of all parameters follows the last of them. Times of
the simulation may have any one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from caffepy.plan.model import AUTO, Cluster, all_reduce
from caffepy.plan.profile import Profile


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


GRADIENT_BYTES = 4
"""A gradient is float32 unless it is compressed for the wire."""


def cut_into_buckets(gradients: Sequence[tuple[int, int]], threshold: float) -> list[tuple[int, int]]:
    """Collect gradients in the order in which they are finished until a bucket holds `threshold` bytes, and so on.

    Args:
        gradients: for each the step of the backward pass that finishes it, and its bytes.
        threshold: bytes; 0 makes each gradient a bucket.

    Returns:
        For each bucket the step that completes it, and its bytes.
    """
    buckets, size = [], 0
    for step, finished in gradients:
        size += finished
        if size >= threshold:
            buckets.append((step, size))
            size = 0
    return [*buckets, (gradients[-1][0], size)] if size else buckets


@dataclass(frozen=True)
class Exchange:
    """How gradients are exchanged.

    Args:
        overlap: while the backward pass goes on; None: as the profile says, see `overlaps`. Without it they are
            reduced at once, after the backward pass.
        bucket_bytes: a bucket is reduced when it holds so much; None: the profile's `reduce_buckets` equal parts.
        wire_bytes: of a gradient on its way: 4, or 2 where it is compressed to half precision.
        algorithm: of the all-reduce, see `caffepy.plan.model`.
        contention: see `simulate`.
    """

    overlap: bool | None = None
    bucket_bytes: float | None = None
    wire_bytes: int = GRADIENT_BYTES
    algorithm: str = AUTO
    contention: float = 0.0

    def overlaps(self, profile: Profile) -> bool:
        """Whether communication runs beside the backward pass: unless `layer_wise_reduce` or one bucket for all
        gradients says that it does not."""
        if self.overlap is not None:
            return self.overlap
        return profile.layer_wise_reduce and (profile.reduce_buckets != 1 or self.bucket_bytes is not None)

    def buckets(self, profile: Profile) -> list[tuple[int, int]]:
        """For each bucket the number of the backward step that completes it, and the bytes of its gradients."""
        gradients = [(len(profile.layers) - 1 - gradient.layer, gradient.bytes) for gradient in profile.gradients]
        total = profile.gradient_bytes
        threshold = self.bucket_bytes
        if threshold is None:
            threshold = total / profile.reduce_buckets if profile.reduce_buckets else 0.0  # 0: for each parameter
        if not self.overlaps(profile):
            threshold = total
        return cut_into_buckets(gradients, threshold)

    def sent(self, size: int) -> float:
        """What gradients of `size` bytes are on the wire."""
        return size * self.wire_bytes / GRADIENT_BYTES


@dataclass(frozen=True)
class Prediction:
    """Training on one cluster.

    Args:
        nodes: how many there are.
        devices: in all.
        step_ms: an iteration.
        compute_ms: what it takes on a device alone.
        communication_ms: all of its all-reduces.
        exposed_ms: what they add to the iteration.
        images_per_second: of all devices together.
        efficiency: images_per_second over as many times that of one device.
        algorithm: of the largest bucket's all-reduce.
    """

    nodes: int
    devices: int
    step_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    images_per_second: float
    efficiency: float
    algorithm: str


def predict(profile: Profile, cluster: Cluster, exchange: Exchange) -> Prediction:
    """What data-parallel training takes if every device does what the profile's did (weak scaling)."""
    profile = profile.fitted()
    cut = exchange.buckets(profile)
    costs = [all_reduce(exchange.sent(size), cluster, exchange.algorithm) for _, size in cut]
    buckets = [Bucket(last, 1e3 * seconds) for (last, _), (seconds, _) in zip(cut, costs, strict=True)]
    backward = [layer.backward_ms for layer in reversed(profile.layers)]
    before = profile.iteration_ms - profile.update_ms - sum(backward)
    overlap = exchange.overlaps(profile)
    timeline = simulate(max(before, 0.0), backward, buckets, overlap, exchange.contention, profile.update_ms)
    return Prediction(
        cluster.nodes,
        cluster.devices,
        timeline.step,
        timeline.compute,
        timeline.communication,
        timeline.exposed,
        1e3 * profile.batch * cluster.devices / timeline.step if timeline.step > 0 else 0.0,
        timeline.efficiency,
        max(costs, default=(0.0, "none"))[1],
    )


def sweep(profile: Profile, nodes: Sequence[int], cluster: Cluster, exchange: Exchange) -> list[Prediction]:
    """A prediction for each number of nodes, all else as in `cluster`."""
    return [predict(profile, replace(cluster, nodes=count), exchange) for count in nodes]

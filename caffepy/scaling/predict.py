"""Prediction of training times on a cluster, from a profile and the cost of all-reduces.

An iteration is simulated with computation on one stream and all-reduces on another. A bucket's all-reduce starts when
its last gradient is complete and the preceding reduction has ended. The parameter update follows the last all-reduce.
The simulation is independent of the time unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from caffepy.scaling.model import AUTO, Cluster, all_reduce
from caffepy.scaling.profile import Profile


@dataclass(frozen=True)
class Bucket:
    """Gradients reduced by one call.

    Args:
        last: index of the backward step that completes the bucket.
        communication: time of its all-reduce.
    """

    last: int
    communication: float


@dataclass(frozen=True)
class Timeline:
    """Times of a simulated iteration, from its start.

    Args:
        step: end of the iteration.
        compute: time of the iteration without communication.
        communication: total time of all all-reduces.
        reductions: start and end of each bucket's all-reduce.
    """

    step: float
    compute: float
    communication: float
    reductions: tuple[tuple[float, float], ...]

    @property
    def exposed(self) -> float:
        """Communication time that computation does not hide."""
        return max(self.step - self.compute, 0.0)

    @property
    def efficiency(self) -> float:
        """compute / step; 1 if all communication is hidden."""
        return self.compute / self.step if self.step > 0 else 1.0


def simulate(
    before: float,
    backward: Sequence[float],
    buckets: Sequence[Bucket],
    overlap: bool = True,
    contention: float = 0.0,
    update: float = 0.0,
) -> Timeline:
    """Simulate one iteration.

    Args:
        before: time before the backward pass whose gradients are reduced: data, forward, earlier passes.
        backward: times of the backward steps in order.
        buckets: the buckets in the order of completion.
        overlap: reduce during the backward pass; else after it.
        contention: share of the device that an all-reduce takes from computation: 0 none (GPUs), 1 all (MPI on a single
            core).
        update: time of the update of all parameters.
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
    step = max(device.now, compute)  # the sums differ in rounding
    return Timeline(step, compute, sum(bucket.communication for bucket in buckets), tuple(device.reductions))


@dataclass
class _Device:
    """Two in-order streams and their work.

    Args:
        work: times of the computation steps.
        needs: for each step the number of reductions that it waits for.
        costs: times of the reductions.
        after: for each reduction the number of steps that it waits for.
        rate: speed of computation during a reduction.
    """

    work: list[float]
    needs: list[int]
    costs: list[float]
    after: list[int]
    rate: float
    now: float = 0.0
    pieces: int = 0
    """The number of completed steps."""
    reductions: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of the completed reductions."""
    _spent: float = 0.0
    """Completed part of the current step."""
    _begun: float | None = None
    """Start of the current reduction."""

    @property
    def done(self) -> bool:
        """Whether all work is complete."""
        return self.pieces == len(self.work) and len(self.reductions) == len(self.costs)

    def advance(self) -> None:
        """Advance to the next completion of a step or reduction."""
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
"""Bytes of an uncompressed gradient element (float32)."""


def cut_into_buckets(gradients: Sequence[tuple[int, int]], threshold: float) -> list[tuple[int, int]]:
    """Divide gradients, in the order of completion, into buckets of at least `threshold` bytes.

    Args:
        gradients: for each the backward step that completes it, and its bytes.
        threshold: bytes; 0: one bucket per gradient.

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
    """Settings of the gradient exchange.

    Args:
        overlap: exchange during the backward pass; None: as in the profile, see `overlaps`. False: one reduction after
            the backward pass.
        bucket_bytes: minimum size of a bucket; None: `reduce_buckets` equal parts as in the profile.
        wire_bytes: bytes per transferred gradient element: 4, or 2 with half-precision compression.
        algorithm: all-reduce algorithm, see `caffepy.scaling.model`.
        contention: see `simulate`.
    """

    overlap: bool | None = None
    bucket_bytes: float | None = None
    wire_bytes: int = GRADIENT_BYTES
    algorithm: str = AUTO
    contention: float = 0.0

    def overlaps(self, profile: Profile) -> bool:
        """Return whether communication overlaps with the backward pass. By default it does, unless the profile has
        `layer_wise_reduce: false` or a single bucket."""
        if self.overlap is not None:
            return self.overlap
        return profile.layer_wise_reduce and (profile.reduce_buckets != 1 or self.bucket_bytes is not None)

    def buckets(self, profile: Profile) -> list[tuple[int, int]]:
        """Return for each bucket the backward step that completes it, and the bytes of its gradients."""
        gradients = [(len(profile.layers) - 1 - gradient.layer, gradient.bytes) for gradient in profile.gradients]
        total = profile.gradient_bytes
        threshold = self.bucket_bytes
        if threshold is None:
            threshold = total / profile.reduce_buckets if profile.reduce_buckets else 0.0  # 0: one per parameter
        if not self.overlaps(profile):
            threshold = total
        return cut_into_buckets(gradients, threshold)

    def sent(self, size: int) -> float:
        """Return the transferred bytes of gradients of `size` bytes."""
        return size * self.wire_bytes / GRADIENT_BYTES


@dataclass(frozen=True)
class Prediction:
    """The prediction for one cluster.

    Args:
        nodes: the number of nodes.
        devices: the total number of devices.
        step_ms: time of an iteration.
        compute_ms: time of an iteration on a single device.
        communication_ms: total time of its all-reduces.
        exposed_ms: time that all-reduces add to the iteration.
        images_per_second: total of all devices.
        efficiency: images_per_second over devices times the speed of a single device.
        algorithm: all-reduce algorithm of the largest bucket.
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
    """Predict data-parallel training with the profile's batch on every device (weak scaling)."""
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
    """Return a prediction for each number of nodes, otherwise as in `cluster`."""
    return [predict(profile, replace(cluster, nodes=count), exchange) for count in nodes]

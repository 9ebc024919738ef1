"""Puts profile, cost of all-reduce and simulation together: what training takes on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caffepy.plan.model import AUTO, Cluster, all_reduce
from caffepy.plan.profile import Profile
from caffepy.plan.simulate import Bucket, simulate

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

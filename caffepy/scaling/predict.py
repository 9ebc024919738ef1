"""Prediction of training times on a cluster, from a profile and the cost of all-reduces, and output of predictions.

An iteration is simulated with computation on one stream and all-reduces on another. A bucket's all-reduce starts when
its last gradient is complete and the preceding reduction has ended. The parameter update follows the last all-reduce.
The simulation is independent of the time unit.

Predictions are written as a table, CSV and plot.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from caffepy.errors import ConfigError
from caffepy.scaling.model import AUTO, Cluster, Link, all_reduce
from caffepy.scaling.profile import Profile
from caffepy.utils.files import atomic_write
from caffepy.utils.installation import MissingExtraError


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
    """Simulate one iteration."""
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
    """Divide gradients, in the order of completion, into buckets of at least `threshold` bytes."""
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


# -- output --------------------------------------------------------------------------------------------

HEAD = ("nodes", "devices", "step ms", "compute ms", "communication ms", "exposed ms", "images/s", "efficiency")
MEBIBYTE = 2**20


def format_table(predictions: Sequence[Prediction]) -> list[str]:
    """Return the lines of an aligned table with a header."""
    rows = [HEAD, *(_row(prediction) for prediction in predictions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def _row(prediction: Prediction) -> tuple[str, ...]:
    times = (prediction.step_ms, prediction.compute_ms, prediction.communication_ms, prediction.exposed_ms)
    rate = f"{prediction.images_per_second:,.{0 if prediction.images_per_second >= 1000 else 1}f}"
    return (
        str(prediction.nodes),
        str(prediction.devices),
        *(f"{t:.3f}" for t in times),
        rate,
        f"{prediction.efficiency:.3f}",
    )


def describe(profile: Profile, cluster: Cluster, exchange: Exchange) -> Iterator[str]:
    """Yield lines with the inputs of the prediction."""
    alone = 1e3 * profile.batch / profile.iteration_ms if profile.iteration_ms else 0.0
    yield f"{profile.net}, batch {profile.batch} per device, {profile.device}: {alone:,.1f} images/s alone"
    passes = f"{profile.passes} x " if profile.passes > 1 else ""
    yield (
        f"An iteration: {profile.iteration_ms:.3f} ms = {passes}(forward {profile.forward_ms:.3f} + backward "
        f"{profile.backward_ms:.3f}) + update {profile.update_ms:.3f} + other {profile.other_ms:.3f}"
    )
    buckets = exchange.buckets(profile)
    sent = exchange.sent(profile.gradient_bytes) / MEBIBYTE
    when = "during the backward pass" if exchange.overlaps(profile) else "after the backward pass"
    yield f"Gradients: {sent:.2f} MiB in {len(buckets)} bucket{'s' * (len(buckets) != 1)}, reduced {when}"
    yield f"Inside a node: {_link(cluster.inside)}"
    if math.isfinite(cluster.between.bandwidth):
        yield f"Between nodes: {_link(cluster.between)}"


def _link(link: Link) -> str:
    text = f"{link.bandwidth / 1e9:.4g} GB/s, {link.latency * 1e6:.3g} us"
    return "; ".join([text, *(f"from {least / MEBIBYTE:.4g} MiB on {_link(longer)}" for least, longer in link.longer)])


def write_csv(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write every field of the predictions, with a header.

    Raises:
        RunError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Prediction)])
    writer.writerows(astuple(prediction) for prediction in predictions)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def load_figure() -> Any:
    """Return matplotlib's Figure class, which needs no display.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plot", "for --plot") from None
    return Figure


def write_plot(path: Path, predictions: Sequence[Prediction], title: str) -> None:
    """Draw time and efficiency over the number of devices.

    Args:
        path: the suffix selects the format: .png, .svg, .pdf.
        predictions: the predictions in any order.
        title: title of the plot.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: matplotlib does not support the suffix.
        RunError: the file cannot be written.
    """
    figure = load_figure()(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    times, rates = figure.subplots(1, 2)
    by_devices = sorted(predictions, key=lambda prediction: prediction.devices)
    _draw_times(times, by_devices)
    _draw_efficiency(rates, by_devices)
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=path.suffix.lstrip(".") or "png", dpi=120)
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}") from error
    with atomic_write(path) as file:
        file.write(picture.getvalue())


def _draw_times(axes: Any, predictions: Sequence[Prediction]) -> None:
    positions = range(len(predictions))
    compute = [prediction.compute_ms for prediction in predictions]
    exposed = [prediction.exposed_ms for prediction in predictions]
    hidden = [max(prediction.communication_ms - prediction.exposed_ms, 0.0) for prediction in predictions]
    axes.bar(positions, compute, label="compute", color="tab:blue")
    axes.bar(positions, exposed, bottom=compute, label="exposed communication", color="tab:red")
    axes.plot(positions, hidden, "o", label="hidden communication", color="tab:green")
    axes.set_xticks(positions, [str(prediction.devices) for prediction in predictions])
    axes.set(xlabel="devices", ylabel="ms per iteration")
    axes.legend()


def _draw_efficiency(axes: Any, predictions: Sequence[Prediction]) -> None:
    devices = [prediction.devices for prediction in predictions]
    axes.plot(devices, [prediction.efficiency for prediction in predictions], "o-", color="tab:blue")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="devices", ylabel="efficiency", ylim=(0, 1.05))
    axes.grid(True, alpha=0.3)

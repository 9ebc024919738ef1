"""Output of predictions as a table, CSV and plot."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from caffepy.errors import ConfigError
from caffepy.scaling.model import Cluster, Link
from caffepy.scaling.predict import Exchange, Prediction
from caffepy.scaling.profile import Profile
from caffepy.utils.files import atomic_write
from caffepy.utils.installation import MissingExtraError

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

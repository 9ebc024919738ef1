"""Charts of training logs, drawn by matplotlib.

`CHARTS` are the numbered chart types of Caffe's `tools/extra/plot_training_log.py.example`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caffepy.errors import ConfigError, DataError
from caffepy.logs.read import LogRow, TrainingLog
from caffepy.utils.files import atomic_write
from caffepy.utils.installation import install_command

FORMATS = ("png", "svg", "pdf")
AXES = {"iterations": "Iters", "seconds": "Seconds"}
_QUANTITIES = ("Test accuracy", "Test loss", "Train learning rate", "Train loss")
CHARTS = tuple((quantity, axis) for quantity in _QUANTITIES for axis in AXES)
"""Caffe's chart types by number: quantity and x axis."""
_MANY_POINTS = 150
"""Lines with at least this number of points get a running mean."""
_STYLES = ("-", "--", ":", "-.")
_SAFE_NAME = 60


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Args:
        label: name in the legend.
        x: iterations or seconds.
        y: values; NaN at a restart, where the line is interrupted.
        log: number of the log, which selects the colour.
        style: number of the quantity, which selects the line style.
        marked: whether points are marked.
    """

    label: str
    x: list[float]
    y: list[float]
    log: int
    style: int
    marked: bool


def plot_logs(
    logs: Sequence[TrainingLog],
    path: Path | str,
    chart: int | None = None,
    x: str = "iterations",
    outputs: Sequence[str] = (),
    log_scale: bool = False,
) -> None:
    """Draw logs into one picture.

    Args:
        logs: the logs.
        path: of the file, ending in .png, .svg or .pdf.
        chart: one of Caffe's chart types, an index of `CHARTS`; None: one chart of losses and one of scores.
        x: iterations or seconds. A chart type overrides it.
        outputs: names of outputs to draw in place of losses and scores.
        log_scale: whether the y axis is logarithmic, except for scores.

    Raises:
        ConfigError: the ending or the chart type is unknown, or matplotlib is not installed.
        DataError: the logs have no values for a chart.
        RunError: the file cannot be written.
    """
    path = Path(path)
    picture_format(path)
    panels, x = _panels(logs, chart, x, outputs)
    figure = _new_figure((9, 1 + 3.6 * len(panels)))
    _draw(figure, panels, AXES[x], log_scale, len(logs))
    _save(figure, path)


def picture_format(path: Path) -> str:
    """Return the format that a picture's name ends in.

    Raises:
        ConfigError: the ending is unknown.
    """
    ending = path.suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise ConfigError(f"'{path}': charts end in .{', .'.join(FORMATS)}; name another file")
    return ending


def check_drawing(path: Path) -> None:
    """Check, before training, that a picture can be drawn to `path`.

    Raises:
        ConfigError: the ending is unknown, matplotlib is not installed, or there is no such folder.
    """
    picture_format(path)
    _new_figure((1, 1))
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"'{path}': there is no folder {path.parent}; make it first")


def draw_rates(
    path: Path, rates: Sequence[float], losses: Sequence[float], means: Sequence[float], chosen: float | None
) -> None:
    """Draw the losses of a learning-rate range test over the rates.

    Args:
        path: of the file, ending in .png, .svg or .pdf.
        rates: learning rates.
        losses: the loss at each rate.
        means: its running mean.
        chosen: the rate to mark; None: none.

    Raises:
        ConfigError: the ending is unknown, or matplotlib is not installed.
        RunError: the file cannot be written.
    """
    figure = _new_figure((9, 4.6))
    axes = figure.subplots()
    axes.plot(rates, losses, linewidth=0.8, alpha=0.3, color="C0")
    axes.plot(rates, means, linewidth=1.4, color="C0", label="loss, running mean")
    if chosen is not None:
        axes.axvline(chosen, linestyle="--", linewidth=1.0, color="C3", label=f"falls fastest at {chosen:.2g}")
    lowest, first = min(means), max(means[0], min(means))
    margin = max(first - lowest, 1e-9)
    axes.set_ylim(lowest - 0.2 * margin, first + margin)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


# -- curves -----------------------------------------------------------------------------------------------


def _panels(
    logs: Sequence[TrainingLog], chart: int | None, x: str, outputs: Sequence[str]
) -> tuple[dict[str, list[Curve]], str]:
    """Return the charts by title, from top to bottom, and the x axis."""
    if chart is not None:
        if not 0 <= chart < len(CHARTS):
            raise ConfigError(f"there is no chart type {chart}; 'caffepy plot_training_log --help' lists them")
        quantity, x = CHARTS[chart]
        panels = {f"{quantity} vs. {AXES[x]}": list(_chart(logs, quantity, x))}
    elif outputs:
        panels = {name: list(_of_output(logs, name, x)) for name in outputs}
    else:
        losses = [*_chart(logs, "Train loss", x), *_scores(logs, x, losses=True)]
        panels = {"loss": losses, "scores": list(_scores(logs, x, losses=False))}
        panels = {title: curves for title, curves in panels.items() if curves}
    missing = [title for title, curves in panels.items() if not curves]
    if missing or not panels:
        names = sorted({name for log in logs for row in (*log.train, *log.test) for name in row.outputs})
        raise DataError(
            f"the logs have nothing for '{', '.join(missing)}'; their outputs: {', '.join(names) or 'none'}"
        )
    return panels, x


def _chart(logs: Sequence[TrainingLog], quantity: str, x: str) -> Iterator[Curve]:
    """Yield the lines of one of Caffe's charts, one for each log."""
    for number, log in enumerate(logs):
        label = f"{_name(logs, log)}{quantity.lower()}"
        if quantity == "Train loss":
            yield from _curve(label, log.train, lambda row: row.loss, x, number)
        elif quantity == "Train learning rate":
            yield from _curve(label, log.train, lambda row: row.learning_rate, x, number)
        else:
            output = _first_test_output(log, loss=quantity == "Test loss")
            yield from _curve(label, log.test, _output(output), x, number, 1, True)


def _first_test_output(log: TrainingLog, loss: bool) -> str:
    """Return the test net's first output that is (or is not) a loss. (Caffe's tool uses #1 and #0.)"""
    names = list(dict.fromkeys(name for row in log.test for name in row.outputs))
    return next((name for name in names if _is_loss(name) == loss), "")


def _scores(logs: Sequence[TrainingLog], x: str, losses: bool) -> Iterator[Curve]:
    """Yield the test nets' outputs that are losses; or the test nets' and the train net's other outputs."""
    kinds = [("test", True)] if losses else [("test", True), ("train", False)]
    names = [
        (kind, name)
        for kind, _ in kinds
        for name in dict.fromkeys(name for log in logs for row in getattr(log, kind) for name in row.outputs)
        if _is_loss(name) == losses
    ]
    for style, (kind, name) in enumerate(names):
        yield from _of_output(logs, name, x, style + losses, kind)


def _of_output(
    logs: Sequence[TrainingLog], name: str, x: str, style: int = 0, only: str | None = None
) -> Iterator[Curve]:
    """Yield the lines of an output of train and test nets."""
    for number, log in enumerate(logs):
        for kind in ("train", "test") if only is None else (only,):
            rows: list[LogRow] = getattr(log, kind)
            for net in sorted({row.net for row in rows}):
                numbered = f" of net {net}" if net else ""
                label = f"{_name(logs, log)}{kind} {name}{numbered}"
                net_rows = [row for row in rows if row.net == net]
                shift = style + (kind == "test" and only is None)
                yield from _curve(label, net_rows, _output(name), x, number, shift, kind == "test")


def _output(name: str) -> Callable[[LogRow], float | None]:
    """Return a function that returns the output `name` of a row."""
    return lambda row: row.outputs.get(name)


def _curve(
    label: str,
    rows: Sequence[LogRow],
    value: Callable[[LogRow], float | None],
    x: str,
    log: int,
    style: int = 0,
    marked: bool = False,
) -> Iterator[Curve]:
    """Yield the line through the rows that have the value, if any."""
    xs: list[float] = []
    ys: list[float] = []
    run = rows[0].run if rows else 0
    for row in rows:
        if (y := value(row)) is None:
            continue
        if row.run != run:
            run = row.run
            xs.append(math.nan)
            ys.append(math.nan)
        xs.append(row.iteration if x == "iterations" else row.seconds)
        ys.append(y)
    if any(math.isfinite(y) for y in ys):
        yield Curve(label, xs, ys, log, style, marked)


def _is_loss(name: str) -> bool:
    return "loss" in name.lower()


def _name(logs: Sequence[TrainingLog], log: TrainingLog) -> str:
    """Return the log's name as a prefix of labels; empty if there is one log."""
    name = log.path.stem
    return "" if len(logs) == 1 else f"{name[:_SAFE_NAME]}: "


# -- drawing ----------------------------------------------------------------------------------------------


def _new_figure(size: tuple[float, float]) -> Any:
    """Return an empty picture, width and height in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"charts need matplotlib: {install_command('plot')}") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=picture_format(path), dpi=120)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())


def _draw(figure: Any, panels: dict[str, list[Curve]], x_label: str, log_scale: bool, logs: int) -> None:
    panel_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for axes, (title, curves) in zip(panel_axes[:, 0], panels.items(), strict=True):
        _draw_panel(axes, title, curves, log_scale and title != "scores", logs)
    panel_axes[-1, 0].set_xlabel(x_label)


def _draw_panel(axes: Any, title: str, curves: Sequence[Curve], log_scale: bool, logs: int) -> None:
    for number, curve in enumerate(curves):
        colour = f"C{curve.log % 10}" if logs > 1 else f"C{number % 10}"
        style = _STYLES[curve.style % len(_STYLES)] if logs > 1 else "-"
        marker = "o" if curve.marked and len(curve.x) < _MANY_POINTS else ""
        many = len(curve.x) >= _MANY_POINTS and not curve.marked
        style_args = {"color": colour, "linestyle": style, "marker": marker, "markersize": 3}
        axes.plot(
            curve.x,
            curve.y,
            linewidth=0.8 if many else 1.4,
            alpha=0.3 if many else 1.0,
            label="_" if many else _plain(curve.label),
            **style_args,
        )
        if many:
            axes.plot(curve.x, _running_mean(curve.y), linewidth=1.4, label=_plain(curve.label), **style_args)
    axes.set_title(_plain(title), fontsize=11, parse_math=False)
    axes.set_yscale("log" if log_scale else "linear")
    axes.grid(alpha=0.3)
    legend = axes.legend(fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _plain(text: str) -> str:
    """Return a printable label. matplotlib hides labels with a leading underscore, which gets a space."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: 2 * _SAFE_NAME])
    return f" {shown}" if shown.startswith("_") else shown


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the running mean of the finite values, over a window of 1/40 of the line."""
    half = max(2, len(values) // 80)
    means = []
    for index, value in enumerate(values):
        window = [v for v in values[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        means.append(sum(window) / len(window) if window and not math.isnan(value) else math.nan)
    return means

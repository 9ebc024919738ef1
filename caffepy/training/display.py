"""What training shows: its log lines, in the words of Caffe's `solver.cpp`, the loss in them and the time they took."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from caffepy.backend.interface import Backend
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.logs.performance_report import WARM_UP, Performance, format_waits
from caffepy.net import Net
from caffepy.training.callback import SolverCallback
from caffepy.training.rules import GradientScaler
from caffepy.training.schedule import Schedule

log = logging.getLogger(__name__)

_WAIT_SHARE = 0.05
"""Share of waiting for data from which a display shows it."""


class RootLog:
    """Logs lines that are alike on all devices: at info level on the root, at debug level on the others.

    Args:
        is_root: whether this device is the root; a solver that joins other devices changes it.
    """

    def __init__(self, is_root: bool) -> None:
        self.is_root = is_root

    def __call__(self, message: str, *arguments: object) -> None:
        log.log(logging.INFO if self.is_root else logging.DEBUG, message, *arguments, stacklevel=2)


class LossWindow:
    """The losses of the last iterations of this device.

    Args:
        length: the solver's `average_loss`.
    """

    def __init__(self, length: int) -> None:
        self._losses: deque[float] = deque(maxlen=max(length, 1))
        self.added = 0
        """How many losses were entered, those included that have left the window."""

    def add(self, loss: float) -> None:
        """Enter the loss of one iteration."""
        self._losses.append(loss)
        self.added += 1

    @property
    def last(self) -> float | None:
        """The loss that was entered last; None before the first. Thread-safe."""
        try:
            return self._losses[-1]
        except IndexError:
            return None

    def mean(self) -> float:
        """The mean of what is in the window; 0 before the first loss."""
        return sum(self._losses) / max(len(self._losses), 1)

    def averaged(self, callback: SolverCallback) -> list[float]:
        """The window averaged over all devices, the oldest loss first; every device must call it."""
        values = callback.sum_over_devices(np.array(self._losses, np.float64))
        return [float(value) for value in values / callback.world_size]

    def mean_over_devices(self, callback: SolverCallback) -> float | None:
        """The mean over all devices; None before the first loss; every device must call it."""
        losses = self.averaged(callback)
        return sum(losses) / len(losses) if losses else None

    def values(self) -> list[float]:
        """This device's losses, the oldest first."""
        return list(self._losses)

    def restore(self, losses: list[float]) -> None:
        """Fill the window from a snapshot."""
        self._losses.clear()
        self._losses.extend(losses)


class DisplayedValues(NamedTuple):
    """The values of the last display.

    Args:
        iteration: of which.
        loss: the mean of the last `average_loss` iterations over all devices.
        outputs: the train net's, averaged over all devices, by blob name; empty where only the loss was displayed.
    """

    iteration: int
    loss: float
    outputs: dict[str, np.ndarray]


class Clock:
    """Adds up the seconds of training iterations, without the first ones, tests and snapshots.

    Args:
        performance: where iterations and seconds are added.
        backend: made to finish before the clock is stopped.
        on_start: called once, when the first iterations are over and seconds begin to count.
        waits: returns the seconds of waiting for data until now, by stage; empty: no data layer reads ahead.
    """

    def __init__(
        self,
        performance: Performance,
        backend: Backend,
        on_start: Callable[[], None],
        waits: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._performance = performance
        self._backend = backend
        self._started: float | None = None
        self._active = False
        self._on_start = on_start
        self._waits = waits
        self._waits_at_start: dict[str, float] = {}
        self._waits_shown: dict[str, float] = {}
        self._shown = time.monotonic()
        self._shown_iteration: int | None = None

    def tick(self) -> None:
        """One more iteration is done; it counts if the clock ran."""
        self._performance.made += 1
        if self._started is not None:
            self._performance.iterations += 1
        elif self._active:
            self.resume()

    def pause(self) -> None:
        """Stop for something that is not training."""
        self._active = False
        if self._started is not None:
            self._backend.synchronize()
            self._performance.seconds += time.monotonic() - self._started
            if waits := self._waits():
                self._performance.waits = _difference(waits, self._waits_at_start)
            self._started = None

    def resume(self) -> None:
        """Count seconds again, once the first iterations are over."""
        self._active = True
        if self._performance.made >= WARM_UP and self._started is None:
            self._backend.synchronize()
            if self._performance.iterations == 0:
                self._on_start()
                self._waits_at_start = self._waits()
            self._started = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no seconds within a `with` block."""
        active = self._active
        self.pause()
        yield
        if active:
            self.resume()

    def elapsed(self) -> tuple[int, float]:
        """Iterations that were timed until now, and their seconds."""
        running = time.monotonic() - self._started if self._started is not None else 0.0
        return self._performance.iterations, self._performance.seconds + running

    def lap(self, iteration: int) -> tuple[float, float]:
        """Iterations a second and seconds since the last call; (0, seconds) on the first one."""
        now = time.monotonic()
        seconds = now - self._shown
        done = iteration - self._shown_iteration if self._shown_iteration is not None else 0
        self._shown, self._shown_iteration = now, iteration
        return done / seconds if seconds > 0 else 0.0, seconds

    def lap_waits(self) -> dict[str, float]:
        """Seconds of waiting for data since the last call, by stage; empty on the first call."""
        before, self._waits_shown = self._waits_shown, self._waits()
        return _difference(self._waits_shown, before) if before else {}


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {stage: seconds - before.get(stage, 0.0) for stage, seconds in after.items()}


class Display:
    """Shows loss and outputs, averaged over all devices, and the update; every device must call the same methods.

    Args:
        param: the solver.
        net: the train net.
        guard: of the update: shows clipping, skipped updates and the loss scale.
        clock: gives the seconds between two displays.
        schedule: knows how many epochs were made.
        log: takes the lines.
    """

    def __init__(
        self, param: SolverParameter, net: Net, guard: GradientScaler, clock: Clock, schedule: Schedule, log: RootLog
    ) -> None:
        self._param = param
        self._net = net
        self._guard = guard
        self._clock = clock
        self._schedule = schedule
        self._log = log
        self.shown: DisplayedValues | None = None
        """The values of the last display."""

    def show_iteration(self, iteration: int, loss: float, callback: SolverCallback) -> None:
        """``Iteration 100 (54 iter/s, 1.85s/100 iters), loss = 0.21`` and a line for each output.

        NVIDIA's `solver.cpp` prints ``iter)`` and, where the number of records is known, the epochs made and in all:
        ``Iteration 100 (54 iter/s, 1.85s/100 iter), 0.5/20ep, loss = 0.21``.

        Args:
            iteration: the one that was just made.
            loss: this device's.
            callback: the other devices.
        """
        blobs = [blob.host_data().astype(np.float64).ravel() for blob in self._net.outputs.values()]
        values = callback.sum_over_devices(np.concatenate([[loss], *blobs])) / callback.world_size
        rate, seconds = self._clock.lap(iteration)
        self._log(
            "Iteration %d (%.6g iter/s, %.6gs/%d %s, loss = %.6g",
            iteration,
            rate,
            seconds,
            self._param.display,
            self._unit(iteration),
            values[0],
        )
        self.shown = DisplayedValues(iteration, float(values[0]), by_name(self._net, values[1:]))
        for line in output_lines(self._net, values[1:]):
            self._log("    Train net output #%s", line)
        waits = self._clock.lap_waits()
        if sum(waits.values()) >= _WAIT_SHARE * seconds > 0:
            self._log("    Waited for data %s", format_waits(waits, seconds))

    def _unit(self, iteration: int) -> str:
        if not self._net.context.nvidia:
            return "iters)"
        epochs = self._schedule.epochs_per_iteration
        if epochs is None:
            return "iter)"
        return f"iter), {round(epochs * iteration, 1):g}/{round(epochs * self._param.max_iter, 1):g}ep"

    def show_loss(self, iteration: int, loss: float, callback: SolverCallback) -> None:
        """``Iteration 1000, loss = 0.21``; arguments as of `show_iteration`."""
        mean = float(callback.sum_over_devices(np.array([loss]))[0] / callback.world_size)
        self.shown = DisplayedValues(iteration, mean, {})
        self._log("Iteration %d, loss = %.6g", iteration, mean)

    def show_update(self, iteration: int, due: bool, rate: float, momentum: float, weight_decay: float) -> None:
        """Show rate and skipped updates where the display is `due`; clipping also where reading it does not wait."""
        if due:
            self._show_rate(iteration, rate, momentum, weight_decay)
        if due or not self._net.backend.asynchronous:
            self._show_clipping()
        if due:
            self.show_skipped(iteration)

    def _show_rate(self, iteration: int, rate: float, momentum: float, weight_decay: float) -> None:
        """``Iteration 100, lr = 0.01``, in the words of the net's dialect, so that the dialect's log parsers read it.

        BVLC's `sgd_solver.cpp` prints the rate alone: its parse_log.sh takes the line's ninth word, where a comma would
        be part of the number. NVIDIA's PrintRate adds the momentum, the rate that both amount to, the weight decay and
        the loss scale.
        """
        if not self._net.context.nvidia:
            self._log("Iteration %d, lr = %.6g", iteration, rate)
            return
        amounts_to = rate / (1 - momentum) if momentum < 1 else np.inf
        scale = float(self._net.backend.to_host(self._guard.loss_scale))
        self._log(
            "Iteration %d, lr = %.6g, m = %.6g, lrm = %.6g, wd = %.6g, gs = %.6g",
            iteration,
            rate,
            momentum,
            amounts_to,
            weight_decay,
            scale,
        )

    def _show_clipping(self) -> None:
        """What clipping did to the last gradients, if anything."""
        norm = self._guard.clipped()
        if norm is not None:
            limit = self._param.clip_gradients
            self._log(
                "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor %.6g",
                norm,
                limit,
                limit / norm,
            )

    def show_skipped(self, iteration: int) -> None:
        """``Iteration 100, 2 updates skipped since the last display, ...``, if there were any."""
        count = self._guard.newly_skipped()
        if count:
            self._log(
                "Iteration %d, %d update%s skipped since the last display, because gradients were not finite",
                iteration,
                count,
                "s" * (count > 1),
            )


def output_lines(net: Net, values: np.ndarray) -> Iterator[str]:
    """``0: loss = 0.21 (* 1 = 0.21 loss)`` for each element of the outputs, given as one flat array."""
    index = 0
    for name, blob in net.outputs.items():
        weight = net.loss_weight(blob)
        for value in values[index : index + blob.count]:
            share = f" (* {weight:.6g} = {weight * value:.6g} loss)" if weight else ""
            yield f"{index}: {name} = {value:.6g}{share}"
            index += 1


def by_name(net: Net, values: np.ndarray) -> dict[str, np.ndarray]:
    """The elements of the outputs, given as one flat array, in the outputs' shapes by blob name."""
    outputs, start = {}, 0
    for name, blob in net.outputs.items():
        outputs[name] = values[start : start + blob.count].reshape(blob.shape)
        start += blob.count
    return outputs


def duration(seconds: float) -> str:
    """``1h 2m 5s``; hours and minutes only where there are any."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    parts = [f"{hours}h"] * (hours > 0) + [f"{minutes}m"] * (whole >= 60) + [f"{whole % 60}s"]
    return " ".join(parts)

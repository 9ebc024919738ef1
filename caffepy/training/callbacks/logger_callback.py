"""The callback that hands the values of a training to loggers; P2PSync makes it on rank 0's first device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from caffepy.errors import CaffepyError, ConfigError, UserError, one_line
from caffepy.training.callbacks.loggers import Logger, Run
from caffepy.training.solver import Solver

log = logging.getLogger(__name__)

_MOST_ELEMENTS = 100
"""Elements of an output that are logged one by one; larger outputs are left out."""


class LoggerCallback:
    """Collects values at each display, each test and each `histogram_interval`, and hands them to loggers.

    A logger that raises is not called any more.

    Args:
        solver: rank 0's first, before its first iteration, with its snapshot restored.
        loggers: with their names in messages.
        histogram_interval: iterations between histograms; 0: none.

    Raises:
        UserError: a logger refuses what it is given.
        CaffepyError: a logger cannot start, and training begins with iteration 0.
    """

    def __init__(self, solver: Solver, loggers: Sequence[tuple[str, Logger]], histogram_interval: int) -> None:
        self._solver = solver
        self._loggers: list[tuple[str, Logger]] = []
        self._histogram_interval = histogram_interval
        self._pending: dict[str, float] = {}
        """Values of the present iteration."""
        self._measured = (0, 0.0, 0.0)
        """What `_measure` gave at the last display."""
        # On a GPU this compiles and allocates, which must not happen while other devices wait in an all-reduce.
        solver.update.gradient_norm()
        if solver.param.display == 0:
            log.warning("the solver's display is 0: loggers get scores of tests only; set display")
        try:
            self._start(loggers)
        except BaseException:
            self.close(failed=True)
            raise

    def _start(self, loggers: Sequence[tuple[str, Logger]]) -> None:
        run = _run(self._solver)
        for name, logger in loggers:
            self._loggers.append((name, logger))
            try:
                logger.start(run)
            except UserError:
                raise
            except Exception as error:
                if run.iteration:
                    self._remove(name, logger, error)
                elif isinstance(error, CaffepyError):
                    raise
                else:
                    raise ConfigError(f"--log {name}: {_described(error)}; correct it, or leave it out") from error
            else:
                log.info("Logging to %s", name)

    # -- the solver's events -------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether values of this iteration are read from the device."""
        return self._display_is_due or self._histograms_are_due

    def after_test(self, solver: Solver, scores: Sequence[Mapping[str, np.ndarray]]) -> None:
        for index, outputs in enumerate(scores):
            self._pending.update(_named(f"test{index}", outputs))

    def after_iteration(self, solver: Solver) -> None:
        if solver.clock.elapsed()[0] == 0:  # the first iterations are not timed; what they waited does not count either
            self._measured = self._measure()
        if self._display_is_due:
            self._pending.update(self._display_values())
        self._write(solver.iteration - 1)
        if self._histograms_are_due and self._loggers:
            arrays = dict(self._arrays())
            self._tell(lambda logger: logger.histograms(solver.iteration - 1, arrays))

    def close(self, failed: bool) -> None:
        """Write the scores and the loss after the last iteration, and close the loggers. Callable twice.

        Args:
            failed: whether training ended with an error.
        """
        solver = self._solver
        if solver.shown is not None and solver.shown.iteration == solver.iteration:
            self._pending["loss"] = solver.shown.loss
        self._write(solver.iteration)
        self._tell(lambda logger: logger.close(failed))
        self._loggers = []

    # -- values --------------------------------------------------------------------------------------

    @property
    def _display_is_due(self) -> bool:
        shown = self._solver.shown
        return shown is not None and shown.iteration == self._solver.iteration - 1 and bool(self._loggers)

    @property
    def _histograms_are_due(self) -> bool:
        interval = self._histogram_interval
        return interval > 0 and (self._solver.iteration - 1) % interval == 0 and bool(self._loggers)

    def _display_values(self) -> dict[str, float]:
        solver, shown = self._solver, self._solver.shown
        assert shown is not None
        values = {"loss": shown.loss, **dict(_named("train", shown.outputs))}
        values["learning_rate"] = solver.hyperparameters.rate
        norm = solver.update.gradient_norm()
        if norm is not None:
            values["gradient_norm"] = norm
        return values | self._speed()

    def _measure(self) -> tuple[int, float, float]:
        """Timed iterations until now, their seconds, and seconds of waiting for data."""
        return *self._solver.clock.elapsed(), sum(self._solver.net.waited().values())

    def _speed(self) -> dict[str, float]:
        """Iterations and images a second and the share of waiting since the last display, without tests and snapshots.

        Empty before the first display after the first iterations.
        """
        solver, before, self._measured = self._solver, self._measured, self._measure()
        iterations, seconds, waited = (now - then for now, then in zip(self._measured, before, strict=True))
        if not iterations or not seconds > 0:
            return {}
        rate = iterations / seconds
        return {
            "speed/iterations_per_second": rate,
            "speed/images_per_second": rate * solver.performance.batch * solver.net.context.shard.parts,
            "speed/waiting_share": min(waited / seconds, 1.0),
        }

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Finite values of each parameter and of its gradient."""
        solver = self._solver
        for parameter in solver.net.parameters.parameters:
            name = f"{parameter.layer.name}/{parameter.index}"
            arrays = {f"parameters/{name}": parameter.blob.data}
            if parameter.lr_mult != 0 and not solver.param.snapshot_diff:  # then `diff` has the update's step
                arrays[f"gradients/{name}"] = parameter.blob.diff
            for key, array in arrays.items():
                values = np.ravel(solver.backend.to_host(array))
                if (finite := values[np.isfinite(values)]).size:
                    yield key, finite

    # -- the loggers ---------------------------------------------------------------------------------

    def _write(self, iteration: int) -> None:
        values, self._pending = self._pending, {}
        if values:
            self._tell(lambda logger: logger.scalars(iteration, values))

    def _tell(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:
                self._remove(name, logger, error)

    def _remove(self, name: str, logger: Logger, error: Exception) -> None:
        log.warning(
            "--log %s failed and is off from iteration %d on; training continues: %s",
            name,
            self._solver.iteration,
            _described(error),
        )
        log.debug("traceback of --log %s", name, exc_info=error)
        self._loggers = [pair for pair in self._loggers if pair[1] is not logger]
        with suppress(Exception):
            logger.close(failed=True)


def _described(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _named(prefix: str, outputs: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """``PREFIX/OUTPUT``, or ``PREFIX/OUTPUT/0`` and so on for outputs with several elements."""
    for name, array in outputs.items():
        values = np.ravel(array).tolist()
        if len(values) == 1:
            yield f"{prefix}/{name}", values[0]
        elif len(values) <= _MOST_ELEMENTS:
            yield from ((f"{prefix}/{name}/{index}", value) for index, value in enumerate(values))


def _run(solver: Solver) -> Run:
    settings: dict[str, bool | int | float | str] = {"net_name": solver.net.name}
    for field, value in solver.param.ListFields():
        if field.enum_type is not None and isinstance(value, int):
            settings[field.name] = field.enum_type.values_by_number[value].name
        elif isinstance(value, float):
            settings[field.name] = float(f"{value:.7g}")  # a float32, as the prototxt has it
        elif isinstance(value, bool | int | str):
            settings[field.name] = value
    settings["devices"] = solver.shard.world_size
    settings["images_per_iteration"] = solver.performance.batch * solver.net.context.shard.parts
    identifiers = solver.resolve.output(f"{solver.param.snapshot_prefix}_loggers.json")
    known = solver.param.snapshot_prefix and Path(identifiers).parent.is_dir()
    return Run(solver.iteration, settings, Path(identifiers) if known else None)

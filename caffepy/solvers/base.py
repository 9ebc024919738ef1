"""The training loop (Caffe's `solver.cpp`): gradients, exchange, update, tests, snapshots, in one visible place.

An update rule is a subclass with one method, `update`. Others that train together with this device are known as a
`SolverCallback` only.
"""

from __future__ import annotations

import copy
import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from caffepy import snapshot
from caffepy.backend import Each, expression
from caffepy.backend.base import Array, Backend
from caffepy.config.paths import PathResolver
from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError, NonFiniteError
from caffepy.net import debug
from caffepy.proto.caffe_pb2 import FLOAT, SolverParameter
from caffepy.registry import Registry
from caffepy.report import Performance
from caffepy.solvers import policies
from caffepy.solvers.callbacks import Action, SingleDevice, SolverCallback
from caffepy.solvers.clock import Clock
from caffepy.solvers.display import Display
from caffepy.solvers.loss import LossWindow
from caffepy.solvers.nets import NetFactory
from caffepy.solvers.segments import Segment, merge_segments
from caffepy.solvers.state import history_arrays, restore_state, save_state
from caffepy.solvers.testing import run_test

log = logging.getLogger(__name__)

SOLVERS: Registry[type[Solver]] = Registry("solver type")

CHECK_INTERVAL = 20
"""Iterations after which an asynchronous device is asked for its loss, to notice one that is not finite."""


@expression
def square(x: Each) -> Each:
    return x * x


@dataclass
class Step:
    """The numbers of one update of one segment.

    Args:
        rate: learning rate times lr_mult.
        momentum: the iteration's momentum.
        scale: factor of the gradient: clipping and 1 / iter_size.
        l2: weight decay times decay_mult if regularization_type is L2, else 0.
        l1: the same for L1.
    """

    rate: float
    momentum: float
    scale: float
    l2: float
    l1: float


class Solver(ABC):
    """Trains a net on one device.

    Args:
        param: the solver's prototxt, upgraded. A negative random_seed makes this solver draw one.
        backend: the device, active in the calling thread.
        shard: its place among all that train together.
        resolve: finds the files that the solver names.
        callback: those that train together; None: nobody else.
        request: asked once an iteration what somebody outside wants.
        keep_going: log a loss that is not finite instead of stopping.

    Raises:
        ConfigError: solver and nets do not hold together.
    """

    histories: ClassVar[int] = 1
    """Values of history that the rule keeps for each parameter."""

    def __init__(
        self,
        param: SolverParameter,
        backend: Backend,
        *,
        shard: Shard | None = None,
        resolve: PathResolver | None = None,
        callback: SolverCallback | None = None,
        request: Callable[[], Action] | None = None,
        keep_going: bool = False,
    ) -> None:
        self.param = copy.deepcopy(param)
        self.backend = backend
        self.shard = shard or Shard()
        self.resolve = resolve or PathResolver(None)
        self.callback: SolverCallback = callback or SingleDevice()
        self.keep_going = keep_going
        self._request = request
        _refuse_unsupported(self.param)
        if self.param.random_seed < 0:
            self.param.random_seed = secrets.randbits(31)
        self.iteration = 0
        self.current_step = 0
        self.stopped_early = False
        self.losses = LossWindow(self.param.average_loss)
        self._requests: set[Action] = set()
        self._snapshot_at = -1
        self._build_nets()
        self.performance = Performance(batch=self.net.batch_size() * self.param.iter_size)
        self.clock = Clock(self.performance, backend)
        self.display = Display(self)
        if self.param.snapshot or (self.param.snapshot_after_train and self.param.snapshot_prefix):
            snapshot.check_prefix(self._snapshot_paths()[0])

    def _build_nets(self) -> None:
        factory = NetFactory(self.param, self.backend, self.shard, self.resolve)
        self.net = factory.train_net()
        for names in self.param.weights:
            self.load_weights([self.resolve(name.strip()) for name in names.split(",")])
        self.test_nets = factory.test_nets(self.net)
        self.history: list[Array] = [self.net.parameters.new_history() for _ in range(self.histories)]
        self.segments = merge_segments(self.net.parameters.parameters)

    def load_weights(self, paths: list[Path]) -> None:
        """Copy trained layers from .caffemodel files, later ones over earlier ones.

        Raises:
            SnapshotError: a file cannot be read or does not fit.
        """
        for path in paths:
            self.log("Finetuning from %s", path)
            self.net.copy_trained_layers_from(snapshot.read_weights(path), str(path))

    def log(self, message: str, *arguments: object) -> None:
        """Log a line if this device is the root, else at debug level."""
        log.log(logging.INFO if self.callback.is_root else logging.DEBUG, message, *arguments, stacklevel=2)

    # -- the loop ------------------------------------------------------------------------------------

    def solve(self, resume_from: Path | None = None) -> None:
        """Train to max_iter, with Caffe's snapshot, loss and test at the end.

        Args:
            resume_from: a .solverstate (or .solverstate.h5).

        Raises:
            NonFiniteError: the loss is not finite any more.
            SnapshotError: `resume_from` cannot be read or does not fit.
        """
        self.log("Solving %s", self.net.name)
        self.log("Learning Rate Policy: %s", self.param.lr_policy)
        if resume_from is not None:
            self.restore(resume_from)
        self.stopped_early = False
        self.step(max(self.param.max_iter - self.iteration, 0))
        if self.param.snapshot_after_train and self._snapshot_at != self.iteration:
            self.snapshot()
        if self.stopped_early:
            self.log("Optimization stopped early.")
            return
        self._finish()
        self.log("Optimization Done.")

    def step(self, iterations: int) -> None:
        """Make so many iterations, with the tests and snapshots that fall due."""
        self.callback.on_start(self)
        end = self.iteration + iterations
        self.clock.resume()
        while self.iteration < end and not self.stopped_early:
            if self._due(self.param.test_interval) and (self.iteration > 0 or self.param.test_initialization):
                self.test_all()
            if Action.STOP not in self._requests:
                self._iterate()
            self._act_on_requests()
        self.clock.pause()

    def _iterate(self) -> None:
        display = self._due(self.param.display)
        self.net.debug_info = display and self.param.debug_info
        self._compute_gradients(display or self._needs_loss())
        if display:
            self.display.show_iteration()
        self._exchange_gradients()
        self._apply_update(display)
        self.iteration += 1
        self.clock.tick()

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _needs_loss(self) -> bool:
        """Whether the loss is read though it is not shown: always where that does not cost a wait."""
        return not self.backend.asynchronous or self.param.average_loss > 1 or self._due(CHECK_INTERVAL)

    def _compute_gradients(self, read_loss: bool) -> None:
        self.net.clear_param_diffs()
        loss = 0.0
        for _ in range(self.param.iter_size):
            self.net.forward()
            if read_loss:
                loss += self._read_loss()
            self.net.backward()
        if read_loss:
            self.losses.add(loss / self.param.iter_size)
        if self.backend.asynchronous:
            self.backend.synchronize()
            self.net.check()

    def _read_loss(self) -> float:
        loss = self.net.loss()
        if not math.isfinite(loss):
            self._report_non_finite(loss)
        return loss

    def _report_non_finite(self, loss: float) -> None:
        self.net.check()
        node = self.net.first_non_finite()
        message = f"iteration {self.iteration}: the loss is {loss:g}"
        if node is not None:
            message += f"; the first layer whose output is not finite is '{node.layer.name}' ({node.layer.type})"
            if not all(self.backend.all_finite(blob.data) for blob in node.layer.blobs):
                message += ", and its parameters are not finite either"
        if not self.keep_going:
            raise NonFiniteError(f"{message}; lower base_lr, set clip_gradients, or go on with --keep-going")
        log.warning("%s", message)

    def _exchange_gradients(self) -> None:
        """Average gradients and requests over all devices, so that all act in the same iteration."""
        self._poll()
        if self.callback.world_size == 1:
            self.callback.on_gradients_ready(self)
            return
        flags = self.net.parameters.flags
        for i, action in enumerate((Action.STOP, Action.SNAPSHOT)):
            if action in self._requests:
                self.backend.fill(flags[i : i + 1], 1.0)
        self.callback.on_gradients_ready(self)
        asked = self.backend.to_host(flags)[:2] > 0
        if asked.any():
            self.backend.fill(flags, 0.0)
        self._requests = {a for a, yes in zip((Action.STOP, Action.SNAPSHOT), asked, strict=True) if yes}

    def _poll(self) -> None:
        """Take what was asked for; twice, because a snapshot and a stop may both be waiting."""
        for _ in range(2):
            action = self._request() if self._request is not None else Action.NONE
            if action is Action.NONE:
                return
            self._requests.add(action)

    def _act_on_requests(self) -> None:
        if self._due(self.param.snapshot) or Action.SNAPSHOT in self._requests:
            self.snapshot()
        if Action.STOP in self._requests:
            self.stopped_early = True
        self._requests.clear()

    def _finish(self) -> None:
        """A last forward pass to show the loss and a last test, where they fall due."""
        if self._due(self.param.display):
            self.net.forward()
            self.losses.add(self._read_loss())
            self.net.check()
            self.display.show_loss()
        if self._due(self.param.test_interval):
            self.test_all()

    # -- the update ----------------------------------------------------------------------------------

    @abstractmethod
    def update(self, data: Array, diff: Array, history: list[Array], step: Step) -> None:
        """Change one segment's parameters and history, given the gradient; one kernel, one pass over the memory.

        Args:
            data: parameters, flat.
            diff: their gradients, averaged over the devices, not yet normalised or regularised; left as they are.
            history: `histories` arrays of the same size.
            step: the numbers of this update.
        """

    def _apply_update(self, display: bool) -> None:
        rate = self._next_rate()
        if display:
            self.log("Iteration %d, lr = %.6g", self.iteration, rate)
        parameters = self.net.parameters
        before = self.backend.to_host(parameters.data) if self.net.debug_info else None
        scale = self._clip_scale() / self.param.iter_size
        momentum = policies.momentum(self.param, self.iteration, rate)
        decay = policies.weight_decay(self.param, self.iteration)
        for segment in self.segments:
            place = slice(segment.start, segment.stop)
            step = self._step(segment, rate, momentum, scale, decay)
            self.update(parameters.data[place], parameters.diff[place], [h[place] for h in self.history], step)
        if before is not None:
            debug.log_update(parameters, before)

    def _next_rate(self) -> float:
        rate, step = policies.learning_rate(self.param, self.iteration, self.current_step)
        if step != self.current_step and self.param.lr_policy == "multistep":
            self.log("MultiStep Status: Iteration %d, step = %d", self.iteration, step)
        self.current_step = step
        return rate

    def _step(self, segment: Segment, rate: float, momentum: float, scale: float, decay: float) -> Step:
        l2 = self.param.regularization_type == "L2"
        local = decay * segment.decay_mult
        return Step(rate * segment.lr_mult, momentum, scale, local if l2 else 0.0, 0.0 if l2 else local)

    def _clip_scale(self) -> float:
        """clip_gradients / norm where the L2 norm of all gradients is larger than that, else 1."""
        limit = self.param.clip_gradients
        if limit < 0 or not self.net.parameters.size:
            return 1.0
        total = self.backend.zeros(())
        self.backend.reduce(square, (self.net.parameters.gradients,), (total,))
        norm = math.sqrt(float(self.backend.to_host(total)))
        if not norm > limit:
            return 1.0
        self.log(
            "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor %.6g",
            norm, limit, limit / norm,
        )  # fmt: skip
        return limit / norm

    # -- tests ---------------------------------------------------------------------------------------

    def test_all(self) -> list[dict[str, np.ndarray]]:
        """Score every test net; for each its outputs' means over test_iter batches.

        A stop that is asked for meanwhile ends the tests where this device trains alone.
        """
        with self._not_training():
            scores = []
            for index in range(len(self.test_nets)):
                score = run_test(self, index)
                if score is None:
                    self.log("Test interrupted.")
                    break
                scores.append(score)
            return scores

    def interrupted(self) -> bool:
        """Whether a test should end at once; devices that train together finish it."""
        if self.callback.world_size > 1:
            return False
        self._poll()
        return Action.STOP in self._requests

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        running = self.clock.running
        self.clock.pause()
        yield
        if running:
            self.clock.resume()

    # -- snapshots -----------------------------------------------------------------------------------

    def snapshot(self) -> Path:
        """Write weights and state; the root writes, the others wait. Returns the .solverstate's path.

        Raises:
            RunError: it could not be written; the older snapshots are as they were.
        """
        with self._not_training():
            state = save_state(self)
            weights, path = self._snapshot_paths()
            state.learned_net = str(weights)
            if self.callback.is_root:
                kind = "HDF5" if path.suffix == ".h5" else "binary proto"
                self.log("Snapshotting to %s file %s", kind, weights)
                snapshot.write_weights(weights, self.net, self.param.snapshot_diff)
                self.log("Snapshotting solver state to %s file %s", kind, path)
                snapshot.write_state(path, state, history_arrays(self))
            self._snapshot_at = self.iteration
            self.callback.barrier()
            return path

    def _snapshot_paths(self) -> tuple[Path, Path]:
        hdf5 = self.param.snapshot_format == SolverParameter.HDF5
        weights, state = snapshot.snapshot_names(self.param.snapshot_prefix, self.iteration, hdf5)
        return self.resolve.output(weights), self.resolve.output(state)

    def restore(self, path: Path) -> None:
        """Go on from a snapshot of caffepy's or of either Caffe's.

        Raises:
            SnapshotError: it cannot be read, or is of another solver or net.
        """
        self.log("Restoring previous solver status from %s", path)
        restore_state(self, Path(path))
        self._snapshot_at = self.iteration

    def close(self) -> None:
        """End what the nets' layers started. Callable twice."""
        for net in (self.net, *self.test_nets):
            net.close()


def _refuse_unsupported(param: SolverParameter) -> None:
    """Refuse settings that would silently train differently than they say."""
    for field, used in (
        ("larc", param.larc),
        ("test_and_snapshot_last_epochs", param.test_and_snapshot_last_epochs > 0),
        ("eval_type", param.eval_type != "classification"),
    ):
        if used:
            raise ConfigError(f"solver: {field} is not supported; remove it")
    if param.solver_data_type != FLOAT:
        log.warning("solver_data_type is ignored: parameters and history are kept in float32")

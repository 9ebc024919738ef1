"""The training loop (Caffe's `solver.cpp`): iterations, tests, snapshots and what is asked for, in one visible place.

What an iteration does is in `eager.py`, how it is captured and replayed in `replay.py`. An update rule is a subclass
with a formula, `rule`, and its numbers. Others that train together with this device are known as a `SolverCallback`
only.
"""

from __future__ import annotations

import copy
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np

from caffepy.backend import Array, Backend, Expression
from caffepy.config.paths import PathResolver
from caffepy.config.solver_check import refuse_unsupported
from caffepy.data.schedule import Shard
from caffepy.net.memory.plan import describe
from caffepy.proto.caffe_pb2 import SolverParameter, SolverState
from caffepy.registry import Registry
from caffepy.report import Performance
from caffepy.snapshot.files import check_snapshot_folder, read_weights
from caffepy.solvers.callbacks import Action, SingleDevice, SolverCallback
from caffepy.solvers.capacity import naming_largest_batch
from caffepy.solvers.clock import Clock
from caffepy.solvers.eager import EagerIteration
from caffepy.solvers.execution_options import ExecutionOptions
from caffepy.solvers.graph_runner import CudaGraphRunner
from caffepy.solvers.hyperparameters import Hyperparameters
from caffepy.solvers.io.display import Display
from caffepy.solvers.io.state import adopt_state, restore_state, snapshot_paths, write_snapshot
from caffepy.solvers.io.testing import run_test
from caffepy.solvers.loss import LossWindow, check_finite, check_skipped, finite_loss
from caffepy.solvers.nets import NetFactory
from caffepy.solvers.requests import Requests
from caffepy.solvers.rules.update import MAX_SKIPPED, Update
from caffepy.trace import NO_TRACE, NoTrace

log = logging.getLogger(__name__)

SOLVERS: Registry[type[Solver]] = Registry("solver type")

CHECK_INTERVAL = 20
"""Iterations after which an asynchronous device is asked for its loss, to notice one that is not finite."""


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
        engine: how iterations are run.
        trace: takes the times of what this device does.
        guard: leave out updates whose gradients are not finite also where the net itself does not need it.
        max_skipped: updates left out in a row after which training ends.
        timeout: longest wait for data, in seconds.

    Raises:
        ConfigError: solver and nets do not hold together.
    """

    histories: ClassVar[int] = 1
    """Values of history that the rule keeps for each parameter."""
    rule: ClassVar[Expression]
    """The update, see `Update`."""

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
        engine: ExecutionOptions | None = None,
        trace: NoTrace = NO_TRACE,
        guard: bool = False,
        max_skipped: int = MAX_SKIPPED,
        timeout: float = 600.0,
    ) -> None:
        self.param = copy.deepcopy(param)
        self.backend = backend
        self.shard = shard or Shard()
        self.resolve = resolve or PathResolver(None)
        self.callback: SolverCallback = callback or SingleDevice()
        self.keep_going = keep_going
        self.engine = engine or ExecutionOptions()
        self.trace = trace
        refuse_unsupported(self.param)
        if self.param.random_seed < 0:
            self.param.random_seed = secrets.randbits(31)
        self.iteration = 0
        self.current_step = 0
        self.stopped_early = False
        self.losses = LossWindow(self.param.average_loss)
        self.requests = Requests(request, alone=self.callback.world_size == 1)
        self.restored: SolverState | None = None
        """What `restore` read, without history."""
        self._snapshot_at = -1
        self._averaged_at = 0
        self._guard, self._max_skipped = guard, max_skipped
        # Where nobody looks at blobs between the layers, these may be fused and blobs share memory.
        hidden = self.backend.captures and not self.param.debug_info
        fuse, share = (wanted and hidden for wanted in (self.engine.fuse, self.engine.share))
        self._factory = NetFactory(self.param, self.backend, self.shard, self.resolve, fuse, share, timeout)
        with naming_largest_batch(self._factory, self.histories):
            self._build_nets()
        self.performance = Performance(batch=self.net.batch_size() * self.param.iter_size)
        self.clock = Clock(self.performance, backend)
        self.display = Display(self)
        writes = self.param.snapshot or (self.param.snapshot_after_train and self.param.snapshot_prefix)
        if self.callback.is_root and writes:
            check_snapshot_folder(snapshot_paths(self)[0])

    def _build_nets(self) -> None:
        factory = self._factory
        self.net = factory.train_net()
        self.net.trace = self.trace
        for names in self.param.weights if self.callback.is_root else ():
            self.load_weights([self.resolve(name.strip()) for name in names.split(",")])
        self.test_nets = factory.test_nets(self.net)
        if factory.share:
            plan = factory.share_memory()
            self.log("%s", describe(plan, self.histories, self.backend.name))
        self.history: list[Array] = [self.net.parameters.new_history() for _ in range(self.histories)]
        for net in (self.net, *self.test_nets):
            net.prepare()
            net.keeps_copies = False
        half = "float16" in self.net.parameters.copies
        clip, guard = self.param.clip_gradients, half or self._guard
        self.updating = Update(self.net, self.rule, self.history, clip, guard, self._max_skipped)
        self.numbers = Hyperparameters(self)
        self.eager = EagerIteration(self)
        self.replay = CudaGraphRunner(self)

    def load_weights(self, paths: list[Path]) -> None:
        """Copy trained layers from .caffemodel files, later ones over earlier ones.

        Raises:
            SnapshotError: a file cannot be read or does not fit.
        """
        for path in paths:
            self.log("Finetuning from %s", path)
            self.net.copy_trained_layers_from(read_weights(path), str(path))
        self._refresh_copies()

    def _refresh_copies(self) -> None:
        """Bring the parameters' copies in other dtypes up to date after somebody else than an update changed them."""
        self.net.parameters.refresh(self.net.parameters.copies)

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
        self.display.show_skipped()
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
        self._averaged_at = self.iteration
        self._refresh_copies()
        end = self.iteration + iterations
        self.clock.resume()
        while self.iteration < end and not self.stopped_early:
            if self._due(self.param.test_interval) and (self.iteration > 0 or self.param.test_initialization):
                self.test_all()
            if Action.STOP not in self.requests:
                with naming_largest_batch(self._factory, self.histories):
                    self._iterate()
            self._act_on_requests()
        self.replay.settle()
        if self.requests:
            self._act_on_requests()
        self.clock.pause()

    def _iterate(self) -> None:
        display = self._due(self.param.display)
        self.net.debug_info = display and self.param.debug_info
        self.trace.begin(self.iteration)
        self.requests.poll()
        self.numbers.send()
        if self.callback.world_size > 1:
            self.requests.told()
        read_loss = display or self._needs_loss()
        if self.replay.captured and self.replay.run():
            if read_loss:
                self._look_at_loss(display)
        else:
            self.eager.run(display, read_loss)
            self.replay.capture()
        if read_loss:
            check_skipped(self)
        self.requests.hear(self.replay.behind)
        self.iteration += 1
        self.clock.tick()
        self.callback.on_iteration(self)

    def _look_at_loss(self, display: bool) -> None:
        loss = self.replay.loss()
        check_finite(self, loss)
        self.net.raise_device_errors()
        self.losses.add(loss)
        if display:
            self.display.show_iteration()
            self.display.show_update()

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _needs_loss(self) -> bool:
        """Whether the loss is read though it is not shown: always where that does not cost a wait."""
        return not self.backend.asynchronous or self.param.average_loss > 1 or self._due(CHECK_INTERVAL)

    def _act_on_requests(self) -> None:
        wanted = self._due(self.param.snapshot) or Action.SNAPSHOT in self.requests
        if wanted and self._snapshot_at != self.iteration:
            self.snapshot()
        if Action.STOP in self.requests:
            self.stopped_early = True
        self.requests.clear()

    def _finish(self) -> None:
        """A last forward pass to show the loss and a last test, where they fall due."""
        if self._due(self.param.display):
            with self._keeping_statistics():
                self.net.forward()
            self.losses.add(finite_loss(self))
            self.net.raise_device_errors()
            self.display.show_loss()
        if self._due(self.param.test_interval):
            self.test_all()

    def _average_statistics(self) -> None:
        """Let all devices have the same running statistics, so that what is tested and saved is one model.

        Once an iteration: to average what is alike already could round it, and a resumed run has the averaged ones.
        """
        if self.callback.world_size == 1 or self._averaged_at == self.iteration:
            return
        self._averaged_at = self.iteration
        if arrays := self.net.statistics(local_only=True):
            self.callback.average_over_devices(arrays)

    @contextmanager
    def _keeping_statistics(self) -> Iterator[None]:
        """Let a forward pass of the train net, which is no part of training, leave the running statistics alone."""
        arrays = self.net.statistics()
        kept = [self.backend.zeros(tuple(array.shape)) for array in arrays]
        for array, before in zip(arrays, kept, strict=True):
            self.backend.copy(array, before)
        yield
        for array, before in zip(arrays, kept, strict=True):
            self.backend.copy(before, array)

    # -- what an iteration is made of ----------------------------------------------------------------

    @abstractmethod
    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        """The rule's own numbers in this iteration, in the order of its last arguments."""

    def passes(self) -> range:
        """The numbers of the present iteration's forward passes."""
        number = self.net.context.passes.number
        return range(number, number + self.param.iter_size)

    @property
    def last_pass(self) -> bool:
        """Whether the present pass is the iteration's last, whose backward pass completes the gradients."""
        return self.eager.last_pass

    @property
    def keeps_blobs(self) -> bool:
        """Whether blobs between the layers hold what they held when the loss was computed."""
        return not (self.replay.captured or self._factory.share)

    # -- tests ---------------------------------------------------------------------------------------

    def test_all(self) -> list[dict[str, np.ndarray]]:
        """Score every test net; for each its outputs' means over test_iter batches.

        A stop that is asked for meanwhile ends the tests where this device trains alone.
        """
        self.replay.settle()
        with self._not_training(), self.trace.span("test"):
            self._average_statistics()
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
        self.requests.poll()
        return Action.STOP in self.requests

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
        self.replay.settle()
        with self._not_training(), self.trace.span("snapshot"):
            if self.replay.captured and self.iteration > 0:
                finite_loss(self)  # nobody may have looked at it for some iterations
            self._average_statistics()
            self.callback.on_snapshot(self)
            path = write_snapshot(self)
            self._snapshot_at = self.iteration
            self.callback.barrier()
            return path

    def restore(self, path: Path) -> None:
        """Go on from a snapshot of caffepy's or of either Caffe's.

        Raises:
            SnapshotError: it cannot be read, or is of another solver or net.
        """
        self.log("Restoring previous solver status from %s", path)
        self.restored = restore_state(self, Path(path))
        self._refresh_copies()
        self._snapshot_at = self.iteration

    def adopt(self, state: SolverState) -> None:
        """Go on from what another device's solver has `restored`; its weights and history come in `on_start`."""
        adopt_state(self, state)
        self._snapshot_at = self.iteration

    def close(self) -> None:
        """Give graphs back and end what the nets' layers started. Callable twice."""
        self.replay.drop()
        for net in (self.net, *self.test_nets):
            net.close()

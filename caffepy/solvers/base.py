"""The training loop (Caffe's `solver.cpp`): iterations, tests, snapshots and requests, in one visible place.

What an iteration does is in `eager.py`, how it is captured and replayed in `graph_runner.py`. An update rule is a
subclass with a formula, `rule`, and its hyperparameters. The devices that train together with this one are behind a
`SolverCallback`.
"""

from __future__ import annotations

import copy
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from caffepy.backend import Array, Backend, Expression
from caffepy.config.paths import PathResolver
from caffepy.config.solver_check import log_ignored
from caffepy.data.schedule import Shard
from caffepy.errors import SnapshotError, StopRequestedError
from caffepy.net.memory_plan import describe
from caffepy.options import ExecutionOptions, RetentionPolicy
from caffepy.options.solver import MAX_SKIPPED
from caffepy.progress import interactive, progress_bar
from caffepy.proto.caffe_pb2 import SolverParameter, SolverState
from caffepy.registry import Registry
from caffepy.report import Performance
from caffepy.snapshot.caffemodel import TrainedLayers, check_caffemodel_size, copy_trained_layers, read_caffemodel
from caffepy.snapshot.files import check_snapshot, remove_unfinished
from caffepy.snapshot.solverstate import (
    check_solverstate_size,
    find_learned_net,
    history_arrays,
    read_solverstate,
)
from caffepy.solvers.callbacks import Action, SingleDevice, SolverCallback
from caffepy.solvers.capacity import suggest_batch_size_on_oom
from caffepy.solvers.clock import Clock
from caffepy.solvers.eager import EagerIteration
from caffepy.solvers.epochs import duration, ends_of_last_epochs
from caffepy.solvers.graph_runner import CudaGraphRunner
from caffepy.solvers.hyperparameters import Hyperparameters
from caffepy.solvers.io.averaging import StatisticsAverage
from caffepy.solvers.io.display import Display
from caffepy.solvers.io.face import SolverFace, on_device
from caffepy.solvers.io.observers import Observers
from caffepy.solvers.io.retention import SnapshotRetention
from caffepy.solvers.io.state import adopt_state, check_fits, history_views, snapshot_paths, write_snapshot
from caffepy.solvers.io.testing import run_tests
from caffepy.solvers.iteration import IterationSteps
from caffepy.solvers.loss import LossWindow
from caffepy.solvers.loss_check import LossCheck
from caffepy.solvers.net_factory import NetFactory
from caffepy.solvers.requests import Requests
from caffepy.solvers.rules.larc import Larc
from caffepy.solvers.rules.update import Update
from caffepy.solvers.statistics import preserve_running_stats
from caffepy.solvers.train_state import RootLog, TrainState
from caffepy.trace import NO_TRACE, Tracer

log = logging.getLogger(__name__)

SOLVERS: Registry[type[Solver]] = Registry("solver type")

CHECK_INTERVAL = 20
"""Iterations after which an asynchronous device is asked for its loss, to notice one that is not finite."""


class Solver(SolverFace, ABC):
    """Trains a net on one device.

    Args:
        param: the solver's prototxt, upgraded. A negative random_seed makes this solver draw one.
        backend: the device, active in the calling thread.
        shard: its rank among all that train together.
        resolve: finds the files that the solver names.
        callback: the other devices; None: there are none.
        request: asked in every iteration for a stop or a snapshot, as signals want them.
        keep_going: log a loss that is not finite instead of stopping.
        engine: how iterations are run.
        trace: takes the times of what this device does.
        guard: skip updates whose gradients are not finite also where the net itself does not need it.
        max_skipped: updates skipped in a row after which training ends.
        timeout: longest wait for data, in seconds.
        keep: which snapshots stay when a newer one is written.

    Raises:
        ConfigError: solver and nets do not hold together.
    """

    histories: ClassVar[int] = 1
    """Values of history that the rule keeps for each parameter."""
    rule: ClassVar[Expression]
    """The update, see `Update`."""
    least_delta: ClassVar[float] = 0.0
    """What `delta` is at least in NVIDIA's dialect."""

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
        trace: Tracer = NO_TRACE,
        guard: bool = False,
        max_skipped: int = MAX_SKIPPED,
        timeout: float = 600.0,
        keep: RetentionPolicy | None = None,
    ) -> None:
        self.param = copy.deepcopy(param)
        self.backend = backend
        self.shard = shard or Shard()
        self.resolve = resolve or PathResolver(None)
        self.callback: SolverCallback = callback or SingleDevice()
        self._created = time.monotonic()
        self.log = RootLog(self.callback.is_root)
        self.requests = Requests(request, alone=self.callback.world_size == 1)
        self.stopped_early = False
        self.restored: SolverState | None = None
        """What `restore` read, without history."""
        self._resumed: Path | None = None
        """The .solverstate that `restore` read."""
        self._snapshot_at = -1
        options = engine or ExecutionOptions()
        log_ignored(self.param)
        if self.param.random_seed < 0:
            self.param.random_seed = secrets.randbits(31)
        # Where debug_info does not read the blobs between layers, layers may be fused and blobs share memory.
        hidden = not self.param.debug_info
        fuse, share = options.fuse and hidden, options.share and hidden
        self._factory = NetFactory(self.param, self.backend, self.shard, self.resolve, fuse, share, timeout)
        self._factory.check_wait = self.requests.check_wait
        with suggest_batch_size_on_oom(self._factory, self.histories), self.backend.activate():
            self._build_nets(trace, options.eager)
            self.state = self._new_state(trace, guard, max_skipped)
            self._build_parts(options.eager, keep_going)
            ends_of_last_epochs(self.param, self.net)  # raises before training where no layer counts records
        self._keeper = SnapshotRetention(self.state, keep or RetentionPolicy())
        self._writes = bool(
            self.param.snapshot_prefix
            and (self.param.snapshot or self.param.snapshot_after_train or self.param.test_and_snapshot_last_epochs)
        )
        """Whether training writes snapshots without a request."""
        if self.callback.is_root and self._writes:
            check_snapshot(snapshot_paths(self.state, self.param.max_iter)[1], self.net.layers)
            remove_unfinished(self.resolve.output(self.param.snapshot_prefix))
        if self.param.snapshot:
            self._check_sizes()

    def _check_sizes(self) -> None:
        """Fail before training, not at its first snapshot, if that would be too large for its format."""
        weights, state = snapshot_paths(self.state, self.param.max_iter)
        if self.callback.is_root and state.suffix != ".h5":
            check_caffemodel_size(weights, self.net.name, self.net.layers, self.param.snapshot_diff)
            shapes = [parameter.blob.shape for parameter in self.net.parameters.parameters]
            check_solverstate_size(state, shapes * self.histories)

    def _build_nets(self, trace: Tracer, eager: bool) -> None:
        factory = self._factory
        self.net = factory.train_net(trace)
        for names in self.param.weights if self.callback.is_root else ():
            self.load_weights([self.resolve(name.strip()) for name in names.split(",")])
        self._tests = factory.test_runners(self.net, eager, lazily=self.callback.world_size == 1)
        self.test_nets = [runner.net for runner in self._tests]
        factory.spare_programs()
        if factory.share:
            plan = factory.share_memory()
            self.log("%s", describe(plan, self.histories, self.backend.name))
        self.history: list[Array] = [self.net.parameters.new_history() for _ in range(self.histories)]
        for net in (self.net, *self.test_nets):
            net.prepare()
            net.keeps_copies = False

    def _new_state(self, trace: Tracer, guard: bool, max_skipped: int) -> TrainState:
        guard = guard or "float16" in self.net.parameters.copies
        clip = self.param.clip_gradients
        return TrainState(
            param=self.param,
            backend=self.backend,
            shard=self.shard,
            resolve=self.resolve,
            callback=self.callback,
            trace=trace,
            log=self.log,
            requests=self.requests,
            losses=LossWindow(self.param.average_loss),
            net=self.net,
            tests=self._tests,
            history=self.history,
            update=Update(
                self.net,
                self.update_rule(),
                self.history,
                clip,
                guard,
                max_skipped,
                self.make_larc(),
                store_change=self.param.snapshot_diff,
            ),
        )

    def _build_parts(self, eager: bool, keep_going: bool) -> None:
        state = self.state
        self._hyperparameters = Hyperparameters(state, self.hyperparameters)
        steps = self._steps = IterationSteps(state, self._hyperparameters)
        self.graph_runner = CudaGraphRunner(state, steps, eager)
        self._loss_check = LossCheck(state, self.graph_runner, keep_going, self._factory.share)
        self.performance = Performance(batch=self.net.batch_size() * self.param.iter_size)
        self.clock = Clock(self.performance, self.backend, self.callback.on_clock_start)
        self._display = Display(state, self.clock, self._hyperparameters)
        self._eager = EagerIteration(state, steps, self._display, self._loss_check)
        self._average = StatisticsAverage(state)
        self.observers = Observers(self.requests, partial(self.callback.wait_for_device, self.backend.synchronize))

    def load_weights(self, paths: list[Path]) -> None:
        """Copy trained layers from .caffemodel files, later ones over earlier ones; raises SnapshotError."""
        for path in paths:
            self.log("Finetuning from %s", path)
            self._copy_layers(read_caffemodel(path), path)
        self._refresh_copies()

    def _copy_layers(self, weights: TrainedLayers, path: Path) -> None:
        copy_trained_layers(self.net.layers, weights, str(path), self.net.context.log_level)

    def _refresh_copies(self) -> None:
        """Bring the parameters' copies in other dtypes up to date after something else than an update changed them."""
        self.net.parameters.refresh(self.net.parameters.copies)

    # -- the loop ------------------------------------------------------------------------------------

    @on_device
    def solve(self, resume_from: Path | None = None) -> None:
        """Train to max_iter, with Caffe's snapshot, loss and test at the end.

        Args:
            resume_from: a .solverstate (or .solverstate.h5).

        Raises:
            NonFiniteError: the loss is not finite any more.
            SnapshotError: `resume_from` cannot be read or does not fit.
            ConfigError: the last snapshot would be too large for its format.
        """
        self.log("Solving %s", self.net.name)
        self.log("Learning Rate Policy: %s", self.param.lr_policy)
        if self.param.snapshot_after_train:
            self._check_sizes()
        if resume_from is not None:
            self.restore(resume_from)
        self.step(max(self.param.max_iter - self.iteration, 0), progress=False)
        self._display.show_skipped()
        if self.param.snapshot_after_train and self._snapshot_at != self.iteration:
            self.snapshot()
        if self.stopped_early:
            self.log("Optimization stopped early.")
            return
        with suppress(StopRequestedError):
            self._finish()
        self.log("Optimization Done.")
        self.log("Optimization Done in %s", duration(time.monotonic() - self._created))

    @on_device
    def step(self, iterations: int, progress: bool | None = None) -> None:
        """Make `iterations` more, with the tests and snapshots that fall due; fewer where a stop is requested.

        Args:
            iterations: how many.
            progress: show a progress bar; None: in notebooks and at Python's prompt.
        """
        self.callback.on_start()
        self._average.begin()
        self._refresh_copies()
        end, self.stopped_early = self.iteration + iterations, False
        self.clock.resume()
        shown = interactive() if progress is None else progress
        with progress_bar(lambda: self.iteration, lambda: end, wanted=shown):
            while self.iteration < end and not self.stopped_early:
                self._advance()
        self.graph_runner.drain()
        if self.requests:
            self._act_on_requests()
        self.clock.pause()

    def _advance(self) -> None:
        """The test that falls due, an iteration, and what is requested after it."""
        if self._test_is_due() and (self.iteration > 0 or self.param.test_initialization):
            self.test_all()
        if Action.STOP not in self.requests:
            with self.state.unless_stopped(), suggest_batch_size_on_oom(self._factory, self.histories):
                self._iterate()
        self._act_on_requests()

    def _iterate(self) -> None:
        display = self._due(self.param.display)
        self.net.debug_info = display and self.param.debug_info
        self.state.trace.begin(self.iteration)
        self.state.fetch(self.state.passes())
        self.requests.poll()
        self._hyperparameters.send()
        if self.callback.world_size > 1:
            self.requests.mark_sent()
        read_loss = display or self._needs_loss()
        if self.graph_runner.captured and self.graph_runner.run():
            if read_loss:
                self._read_replayed_loss(display)
        else:
            self._eager.run(display, read_loss)
            self.graph_runner.capture()
        if read_loss:
            self._loss_check.check_skipped()
        self.requests.receive(self.graph_runner.behind)
        self.state.iteration += 1
        self.clock.tick()
        self.callback.on_iteration()
        self.observers.after_iteration(self)

    def apply_update(self) -> None:
        """Change the parameters by their diffs, as the end of an iteration does, and count one (Caffe's function)."""
        self._hyperparameters.send()
        self._steps.update()
        self.state.iteration += 1

    def _read_replayed_loss(self, display: bool) -> None:
        loss = self.graph_runner.loss()
        self._loss_check.check(loss)
        self.net.raise_device_errors()
        self.losses.add(loss)
        if display:
            self._display.show_iteration()
            self._display.show_update()

    def _test_is_due(self) -> bool:
        return self._due(self.param.test_interval) or self._ends_epoch()

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _ends_epoch(self) -> bool:
        """Whether one of the `test_and_snapshot_last_epochs` ends here; counted anew, as the solver may join others."""
        return self.iteration in ends_of_last_epochs(self.param, self.net)

    def _needs_loss(self) -> bool:
        """Whether the loss is read though it is not shown: always where reading it does not wait for the device."""
        follows_loss = self.param.average_loss > 1 or self.param.lr_policy == "plateau"
        return not self.backend.asynchronous or follows_loss or self._due(CHECK_INTERVAL)

    def _snapshot_is_due(self) -> bool:
        return self._due(self.param.snapshot) or self._ends_epoch()

    def _act_on_requests(self) -> None:
        wanted = self._snapshot_is_due() or Action.SNAPSHOT in self.requests
        if wanted and self._snapshot_at != self.iteration:
            self.snapshot()
        if Action.STOP in self.requests:
            self.stopped_early = True
        self.requests.clear()

    def _finish(self) -> None:
        """A last forward pass to show the loss and a last test, where they fall due."""
        if self._due(self.param.display):
            self.state.fetch(self.state.passes()[:1])
            with preserve_running_stats(self.net):
                self.net.forward()
            self.losses.add(self._loss_check.read())
            self.net.raise_device_errors()
            self._display.show_loss()
        if self._test_is_due():
            self.test_all()

    # -- what an iteration is made of ----------------------------------------------------------------

    @abstractmethod
    def hyperparameters(self, rate: float, momentum: float) -> tuple[float, ...]:
        """The values of the rule's last arguments in this iteration."""

    def update_rule(self) -> Expression:
        """The rule that this solver's settings ask for."""
        return self.rule

    def make_larc(self) -> Larc | None:
        """What gives each parameter its own rate, if the solver asks for that."""
        if self.param.larc:
            log.warning("larc has no effect on a solver of type %s, as in NVIDIA Caffe", self.param.type)
        return None

    @property
    def delta(self) -> float:
        """The solver's `delta`, in NVIDIA's dialect with its lower limit."""
        return max(self.param.delta, self.least_delta) if self.net.context.nvidia else self.param.delta

    # -- tests ---------------------------------------------------------------------------------------

    @on_device
    def test_all(self) -> list[dict[str, np.ndarray]]:
        """Score every test net; for each its outputs' means over test_iter batches.

        A stop that is requested meanwhile ends the tests where this device trains alone.
        """
        self.graph_runner.drain()
        if Action.STOP in self.requests and self.callback.world_size > 1:
            return []
        with self._not_training(), self.state.trace.span("test"):
            self.average_statistics()
            started = time.monotonic()
            scores = run_tests(self.state)
            if self._snapshot_at == self.iteration:
                self._keeper.note_scores(scores)
            if self.test_nets:
                self.log("Tests completed in %.6gs", time.monotonic() - started)
            self.observers.tell("after_test", self, scores)
            return scores

    def average_statistics(self) -> None:
        """Make the running statistics of all devices the same; called by all of them."""
        self._average.take()

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        running = self.clock.running
        self.clock.pause()
        yield
        if running:
            self.clock.resume()

    # -- snapshots -----------------------------------------------------------------------------------

    @on_device
    def snapshot(self) -> Path:
        """Write weights and state; the root writes, the others wait. Returns the .solverstate's path.

        Raises:
            RunError: it could not be written; the older snapshots are as they were.
        """
        self.graph_runner.drain()
        with self._not_training(), self.state.trace.span("snapshot"):
            if self.graph_runner.captured and self.iteration > 0:
                self._loss_check.read()  # it may not have been read for some iterations
            self.average_statistics()
            self.callback.on_snapshot()
            path = write_snapshot(self.state)
            self._snapshot_at = self.iteration
            self._keeper.wrote(path)
            self.callback.barrier()
            self.observers.tell("after_snapshot", self, path)
            return path

    @on_device
    def restore(self, path: Path) -> None:
        """Resume from a .solverstate of caffepy's or of either Caffe's, and the .caffemodel that it names.

        Raises:
            SnapshotError: a file cannot be read, or is of another solver or net; nothing was changed.
        """
        path = Path(path)
        self.log("Restoring previous solver status from %s", path)
        stored = read_solverstate(path)
        saved = stored.message
        check_fits(self.state, saved, path)
        if saved.HasField("learned_net"):
            self._restore_weights(find_learned_net(saved, path))
        else:
            log.warning("%s names no learned_net: the weights stay as they are, as in Caffe", path)
        for part, values in zip(history_views(self.state), history_arrays(stored, path), strict=True):
            self.backend.from_host(values.reshape(part.shape), part)
        saved.ClearField("history")
        adopt_state(self.state, saved)
        self.restored, self._resumed = saved, path
        self._refresh_copies()
        self._snapshot_at = self.iteration

    def _restore_weights(self, path: Path) -> None:
        """Copy all parameters of the net from a .caffemodel, or none."""
        weights = read_caffemodel(path)
        stored = {layer.name for layer in weights.message.layer}
        for parameter in self.net.parameters.parameters:
            if parameter.layer.name not in stored:
                raise SnapshotError(
                    f"{path}: has no layer '{parameter.layer.name}', which the net has; it is of another net"
                )
        self._copy_layers(weights, path)

    def check_earlier_snapshots(self) -> None:
        """Warn, before training and behind `restore`, of earlier snapshots with the solver's prefix.

        Raises:
            ConfigError: training would replace or remove one of another net.
        """
        param, last = self.param, self.param.max_iter
        epochs = ends_of_last_epochs(param, self.net)

        def writes(iteration: int) -> bool:
            due = param.snapshot > 0 and iteration % param.snapshot == 0
            due = due or iteration in epochs or (param.snapshot_after_train and iteration == last)
            return due and self.iteration < iteration <= last

        if self._writes and self.iteration < last:
            self._keeper.check_earlier(writes, self._resumed)

    def adopt(self, state: SolverState) -> None:
        """Resume from what another device's solver has `restored`; its weights and history come in `on_start`."""
        adopt_state(self.state, state)
        self._snapshot_at = self.iteration

    def close(self) -> None:
        """Free graphs and close the nets. Callable twice."""
        self.graph_runner.drop()
        for runner in self.state.tests:
            runner.close()
        self.net.close()

"""The training loop (Caffe's `solver.cpp`): iterations, tests, snapshots and requests, in one visible place.

What a solver type computes is in `rules.py`, how iterations are captured and replayed in `graph_executor.py`. The
devices that train together with this one are behind a `SolverCallback`.
"""

from __future__ import annotations

import copy
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from caffepy.backend import Array, Backend
from caffepy.data.sharding import Shard
from caffepy.errors import CaffepyError, ConfigError, NonFiniteError, SnapshotError, StopRequestedError
from caffepy.formats.caffemodel import TrainedLayers, check_caffemodel_size, read_caffemodel, write_caffemodel
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import SolverParameter, SolverState
from caffepy.formats.snapshot_files import check_snapshot, remove_unfinished
from caffepy.formats.solverstate import (
    check_solverstate_size,
    find_learned_net,
    history_arrays,
    read_solverstate,
    write_solverstate,
)
from caffepy.logs.performance_report import Performance
from caffepy.logs.trace import NO_TRACE, Tracer
from caffepy.net import Net
from caffepy.net import describe as debug
from caffepy.net.describe import heading, table
from caffepy.net.executor import ForwardExecutor
from caffepy.net.graph import Node
from caffepy.net.memory_plan import describe
from caffepy.net.trained_layers import copy_trained_layers
from caffepy.training.callback import Action, IterationCallbacks, SingleDevice, SolverCallback
from caffepy.training.display import Clock, Display, DisplayedValues, LossWindow, RootLog, duration
from caffepy.training.evaluate import Evaluator
from caffepy.training.graph_executor import GraphExecutor
from caffepy.training.net_factory import NetFactory, suggest_batch_size_on_oom
from caffepy.training.policies import Hyperparameters
from caffepy.training.retention import SnapshotRetention
from caffepy.training.rules import RULES, Update
from caffepy.training.solver_check import check_values, log_ignored
from caffepy.training.state import (
    SavedSolver,
    check_fits,
    data_positions,
    history_views,
    restore_positions,
    snapshot_paths,
)
from caffepy.training.stop_requests import FLAGS, StopRequests
from caffepy.utils.options import MAX_SKIPPED, ExecutionOptions, RetentionPolicy
from caffepy.utils.progress import interactive, progress_bar

log = logging.getLogger(__name__)

CHECK_INTERVAL = 20
"""Iterations after which an asynchronous device is asked for its loss, to notice one that is not finite."""
_SHOWN = (
    "type",
    "base_lr",
    "lr_policy",
    "momentum",
    "weight_decay",
    "iter_size",
    "max_iter",
    "test_interval",
    "snapshot",
    "snapshot_prefix",
    "random_seed",
)
"""Fields of the solver's prototxt that notebooks show."""

P = ParamSpec("P")
T = TypeVar("T")


def on_device(method: Callable[Concatenate[Solver, P], T]) -> Callable[Concatenate[Solver, P], T]:
    """A solver's method that makes its device the calling thread's, so that programs need not."""

    @wraps(method)
    def function(solver: Solver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with solver.backend.activate():
            return method(solver, *args, **kwargs)

    return function


@dataclass(frozen=True)
class TrainContext:
    """What a solver is given besides its prototxt and its device.

    Args:
        shard: the device's rank among all that train together.
        resolve: finds the files that the solver names.
        callback: the other devices.
        request: asked in every iteration for a stop or a snapshot, as signals want them; None: there are none.
        engine: how iterations are run.
        trace: takes the times of what this device does.
        keep: which snapshots stay when a newer one is written.
        keep_going: log a loss that is not finite instead of stopping.
        guard: skip updates whose gradients are not finite also where the net itself does not need it.
        max_skipped: updates skipped in a row after which training ends.
        timeout: longest wait for data, in seconds.
    """

    shard: Shard = field(default_factory=Shard)
    resolve: PathResolver = field(default_factory=lambda: PathResolver(None))
    callback: SolverCallback = field(default_factory=SingleDevice)
    request: Callable[[], Action] | None = None
    engine: ExecutionOptions = field(default_factory=ExecutionOptions)
    trace: Tracer = NO_TRACE
    keep: RetentionPolicy = field(default_factory=RetentionPolicy)
    keep_going: bool = False
    guard: bool = False
    max_skipped: int = MAX_SKIPPED
    timeout: float = 600.0


class Solver:
    """Trains a net on one device.

    Args:
        param: the solver's prototxt, upgraded. A negative random_seed makes this solver draw one.
        backend: the device, active in the calling thread.
        context: whatever else it needs.

    Raises:
        ConfigError: the type is unknown, or solver and nets do not hold together.
    """

    def __init__(self, param: SolverParameter, backend: Backend, context: TrainContext) -> None:
        self._created = time.monotonic()
        rule = RULES.get(param.type, "solver")
        self.param = param = copy.deepcopy(param)
        self.backend = backend
        self.shard, self.resolve, self.callback = context.shard, context.resolve, context.callback
        self.log = RootLog(self.callback.is_root)
        self.requests = StopRequests(context.request, alone=self.world_size == 1)
        self._trace, self._keep_going = context.trace, context.keep_going
        self.iteration = 0
        """How many iterations were made, those before a snapshot that was restored included."""
        self.losses = LossWindow(param.average_loss)
        """This device's losses of the last `average_loss` iterations whose loss was read."""
        self.last_pass = True
        """Whether the present pass is the iteration's last, whose backward pass completes the gradients."""
        self.stopped_early = False
        self.restored: SolverState | None = None
        """What `restore` read, without history."""
        self.planned_memory: int | None = None
        """Bytes of all nets and the update as planned; None: blobs do not share memory, and there is no plan."""
        self.resumed_from: Path | None = None
        """The .solverstate that `restore` read."""
        self._snapshot_at = -1
        """The iteration of the last snapshot."""
        self._averaged_at = 0
        """The iteration after which the running statistics were averaged last."""
        log_ignored(param)
        if param.random_seed < 0:
            param.random_seed = secrets.randbits(31)
        histories, engine = rule.histories(), context.engine
        # Where debug_info does not read the blobs between layers, layers may be fused and blobs share memory.
        fuse, share = (wanted and not param.debug_info for wanted in (engine.fuse, engine.share))
        self._factory = NetFactory(
            param, backend, self.shard, self.resolve, fuse, share, context.timeout, self.requests.check_wait
        )
        with suggest_batch_size_on_oom(self._factory, histories), backend.activate():
            self.net = self._factory.train_net(context.trace)
            for names in param.weights if self.callback.is_root else ():
                self.load_weights([self.resolve(name.strip()) for name in names.split(",")])
            alone = self.world_size == 1
            self.tests = self._factory.test_executors(self.net, engine.eager, lazily=alone)
            """Run the test nets, in Caffe's order."""
            self.test_nets = [executor.net for executor in self.tests]
            self.history: list[Array] = self._allocate(histories)
            self.replicated: list[Array] = []
            """Further arrays that all devices get from the root before the first iteration."""
            guard = context.guard or "float16" in self.net.parameters.copies
            chosen = rule(param, self.net.context.nvidia)
            self.update = Update(self.net, chosen, self.history, guard, context.max_skipped)
            self.hyperparameters = Hyperparameters(param, self.net, self.requests, self.update.numbers, self.log)
            self._eager = engine.eager
            self.graph_executor = self._new_graph_executor()
            self._last_epoch_ends()  # raises before training where no layer counts records
        self.performance = Performance(batch=self.net.batch_size() * param.iter_size)
        self.clock = Clock(self.performance, backend, lambda: self.callback.on_clock_start(), self.net.waited)
        self._display = Display(param, self.net, self.update.guard, self.clock, self.log)
        self.retention = SnapshotRetention(param, self.resolve, self.net, self.test_nets, context.keep, self.log)
        self._observers = IterationCallbacks(partial(self.requests.ask_for, Action.STOP))
        self._check_snapshots()

    # -- construction --------------------------------------------------------------------------------

    def _allocate(self, histories: int) -> list[Array]:
        """Allocate the memory of nets and update; the update's history."""
        self._factory.spare_programs()
        if self._factory.share:
            plan = self._factory.share_memory()
            self.planned_memory = plan.total(histories)
            self.log("%s", describe(plan, histories, self.backend.name))
        history = [self.net.parameters.new_history() for _ in range(histories)]
        for net in (self.net, *self.test_nets):
            net.prepare()
            net.keeps_copies = False
        return history

    def _new_graph_executor(self) -> GraphExecutor:
        captures = not self._eager and not self.param.debug_info
        return GraphExecutor(
            self.net, self.param.iter_size, self, self.callback, self.requests, self._trace, self.log, captures
        )

    @property
    def world_size(self) -> int:
        """How many devices train together."""
        return self.callback.world_size

    @on_device
    def join(self, callback: SolverCallback, shard: Shard, random_seed: int) -> None:
        """Train with other devices from now on; called by all of them at the same point.

        Args:
            callback: the other devices.
            shard: this device's rank among all.
            random_seed: of all.
        """
        self.graph_executor.drain()
        self.graph_executor.drop()
        for executor in self.tests:
            executor.drop()
        self.callback, self.shard = callback, shard
        self.param.random_seed = random_seed
        self.log.is_root = callback.is_root
        self.requests.join_others()
        self.graph_executor = self._new_graph_executor()
        self.tests = [ForwardExecutor(net, self._eager, lazily=False) for net in self.test_nets]
        for net in (self.net, *self.test_nets):
            net.join(shard, random_seed)

    def load_weights(self, paths: list[Path]) -> None:
        """Copy trained layers from .caffemodel files, later ones over earlier ones; raises SnapshotError."""
        for path in paths:
            self.log("Finetuning from %s", path)
            self.copy_layers(read_caffemodel(path), path)
        self._refresh_copies()

    def copy_layers(self, weights: TrainedLayers, path: Path) -> None:
        """Copy the layers of a file that has been read, by name; raises SnapshotError."""
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
        self._display.show_skipped(self.iteration)
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
        self._averaged_at = self.iteration  # the root has given all devices its statistics
        self._refresh_copies()
        end, self.stopped_early = self.iteration + iterations, False
        self.clock.resume()
        shown = interactive() if progress is None else progress
        with progress_bar(lambda: self.iteration, lambda: end, wanted=shown):
            while self.iteration < end and not self.stopped_early:
                if self._test_is_due() and (self.iteration > 0 or self.param.test_initialization):
                    self.test_all()
                if Action.STOP not in self.requests:
                    self._try_iteration()
                self._act_on_requests()
        self.graph_executor.drain()
        if self.requests:
            self._act_on_requests()
        self.clock.pause()

    def _try_iteration(self) -> None:
        """Make an iteration; none if a stop is requested while it waits for its data, which it does before all else."""
        try:
            with suggest_batch_size_on_oom(self._factory, len(self.history)):
                self._iterate()
        except StopRequestedError:
            self.log("Iteration %d waits for its data and is not made", self.iteration)

    def _iterate(self) -> None:
        """Fetch data; forward, backward, exchange of gradients and update, as graphs or call by call."""
        display = self._due(self.param.display)
        read_loss = display or self._needs_loss()
        self.net.debug_info = display and self.param.debug_info
        self._trace.begin(self.iteration)
        self._fetch(self._passes)
        self.requests.poll()
        self._send_hyperparameters()
        if self.world_size > 1:
            self.requests.mark_sent()
        if not (self.graph_executor.captured and self.graph_executor.run(self._passes)):
            self._run_eagerly(display, read_loss)
            self.graph_executor.capture()
        elif read_loss:
            self._read_replayed_loss(display)
        if read_loss:
            self.update.guard.check_skipped(self.iteration)
        self.requests.receive(self.graph_executor.behind)
        self.iteration += 1
        self.clock.tick()
        self.callback.on_iteration()
        self._observers.after_iteration(self, self._wait_for_device)

    @property
    def _passes(self) -> range:
        """The numbers of the present iteration's forward passes."""
        number = self.net.context.passes.number
        return range(number, number + self.param.iter_size)

    def _fetch(self, passes: range) -> None:
        """Have the data of some passes copied to the device."""
        for number in passes:
            self.net.prefetch_to_device(number)

    def _send_hyperparameters(self) -> None:
        losses = self.losses.averaged(self.callback) if self.param.lr_policy == "plateau" else []
        loss = sum(losses) / len(losses) if losses else None
        self.hyperparameters.send(self.iteration, self._passes, loss)

    def _run_eagerly(self, display: bool, read_loss: bool) -> None:
        """Put an iteration on the device call by call."""
        self._forward_backward(read_loss)
        if display:
            self._display.show_iteration(self.iteration, self.losses.mean(), self.callback, self._epochs_per_iteration)
        several = self.world_size > 1
        if several and self.backend.asynchronous:
            # A pass may compile, tune and allocate, which can wait for all work of the process on any of its devices,
            # an all-reduce included that this device has not joined.
            self.callback.barrier()
        self.exchange_gradients()
        if several:
            self._wait_for_device()
            flags = self.backend.to_host(self.net.parameters.flags[: len(FLAGS)])
            self.requests.expect(lambda: flags)
        before = self.backend.to_host(self.net.parameters.data) if self.net.debug_info else None
        self.update_parameters()
        if display or not self.backend.asynchronous:
            self._show_update(display)
        if before is not None:
            debug.log_update(self.net.parameters, before)

    def _forward_backward(self, read_loss: bool) -> None:
        loss = 0.0
        for index in range(self.param.iter_size):
            self.begin_pass(index)
            with self._trace.span("forward"):
                self.net.forward()
            if read_loss:
                loss += self._checked(self.net.loss())
            with self._trace.span("backward"):
                self.net.backward()
        if read_loss:
            self.losses.add(loss / self.param.iter_size)
        if self.backend.asynchronous:
            self.backend.synchronize()
            self.net.raise_device_errors()

    def _read_replayed_loss(self, display: bool) -> None:
        loss = self._checked(self.graph_executor.loss())
        self.net.raise_device_errors()
        self.losses.add(loss)
        if display:
            self._display.show_iteration(self.iteration, self.losses.mean(), self.callback, self._epochs_per_iteration)
            self._show_update(True)

    def _show_update(self, due: bool) -> None:
        """Show rate and skipped updates where the display is `due`; what clipping did always."""
        values = self.hyperparameters
        if due:
            self._display.show_rate(self.iteration, values.rate, values.momentum, values.weight_decay)
        self._display.show_clipping()
        if due:
            self._display.show_skipped(self.iteration)

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
            self._fetch(self._passes[:1])
            with preserve_running_stats(self.net):
                self.net.forward()
            self.losses.add(self._checked(self.net.loss()))
            self.net.raise_device_errors()
            self._display.show_loss(self.iteration, self.losses.mean(), self.callback)
        if self._test_is_due():
            self.test_all()

    def _wait_for_device(self) -> None:
        self.callback.wait_for_device(self.backend.synchronize)

    # -- what an iteration asks of the device besides its passes: eager and captured ones alike ------

    def begin_pass(self, index: int) -> None:
        """Before each of an iteration's passes: where its random numbers begin, and that gradients start anew."""
        self.net.context.passes.on_device = self.hyperparameters.counter(index)
        if index == 0:
            self.net.clear_param_diffs()
            self.update.clear_changes()
        self.last_pass = index == self.param.iter_size - 1
        if self.last_pass and self.world_size > 1:
            self.backend.copy(self.hyperparameters.flags, self.net.parameters.flags[: len(FLAGS)])

    def exchange_gradients(self) -> None:
        """Average gradients and requests over all devices, so that all act in the same iteration."""
        with self._trace.span("exchange"):
            self.callback.on_gradients_ready()

    def update_parameters(self) -> None:
        """Change the parameters by their gradients."""
        with self._trace.span("update"):
            self.update.run(*self.hyperparameters.factors())

    def apply_update(self) -> None:
        """Change the parameters by their diffs, as the end of an iteration does, and count one (Caffe's function)."""
        self._send_hyperparameters()
        self.update_parameters()
        self.iteration += 1

    # -- what falls due ------------------------------------------------------------------------------

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _test_is_due(self) -> bool:
        interval, offset = self.param.test_interval, self.param.test_offset
        due = interval > 0 and (self.iteration - offset) % interval == 0
        return due or self.iteration in self._last_epoch_ends()

    def _snapshot_is_due(self) -> bool:
        return self._due(self.param.snapshot) or self.iteration in self._last_epoch_ends()

    def _needs_loss(self) -> bool:
        """Whether the loss is read though it is not shown: always where reading it does not wait for the device."""
        follows_loss = self.param.average_loss > 1 or self.param.lr_policy == "plateau"
        return not self.backend.asynchronous or follows_loss or self._due(CHECK_INTERVAL)

    def _last_epoch_ends(self) -> frozenset[int]:
        """The iterations after which `test_and_snapshot_last_epochs` asks for a test and a snapshot."""
        # Epochs are counted back from max_iter, which ends the last one (NVIDIA Caffe's `Solver::Step`); anew in each
        # iteration, as the solver may join others.
        count = self.param.test_and_snapshot_last_epochs
        if count <= 0:
            return frozenset()
        part = self._epochs_per_iteration
        if part is None:
            raise ConfigError(
                "solver: test_and_snapshot_last_epochs needs a data layer that knows how many records an epoch has; "
                "this net has none, use test_interval and snapshot"
            )
        back = [math.floor(epoch / part) for epoch in range(count)]
        return frozenset(self.param.max_iter - iterations for iterations in back if iterations < self.param.max_iter)

    @property
    def _epochs_per_iteration(self) -> float | None:
        """By the net's first layer that knows how many records an epoch has; None if there is none."""
        sizes = [size for layer in self.net.layers if (size := layer.epoch_size()) is not None]
        return self._global_batch * self.param.iter_size / sizes[0] if sizes else None

    @property
    def _global_batch(self) -> int:
        """Samples of all devices in a pass."""
        return self.net.batch_size() * self.net.context.shard.parts

    # -- a loss that is not finite -------------------------------------------------------------------

    def _checked(self, loss: float) -> float:
        """A loss that is finite; with `keep_going` any, with a warning."""
        if math.isfinite(loss):
            return loss
        self.net.raise_device_errors()
        message = f"the loss is {loss:g}"
        node = self._first_non_finite()
        if node is not None:
            when = "" if self._keeps_blobs else "in another forward pass "
            message += f"; {when}the first layer whose output is not finite is '{node.layer.name}' ({node.layer.type})"
            if not all(self.backend.all_finite(blob.data) for blob in node.layer.blobs):
                message += ", and its parameters are not finite either"
        if not self._keep_going:
            advice = "lower base_lr, set clip_gradients, or go on with --keep-going"
            raise NonFiniteError(f"{message}; {advice}", self.iteration)
        log.warning("iteration %d: %s", self.iteration, message)
        return loss

    @property
    def _keeps_blobs(self) -> bool:
        """Whether blobs between the layers hold what they held when the loss was computed."""
        return not (self.graph_executor.captured or self._factory.share)

    def _first_non_finite(self) -> Node | None:
        """Where what is not finite began, as far as one device can tell that is about to stop."""
        if self._keeps_blobs:
            return self.net.first_non_finite()
        if self._keep_going or any(layer.communicates() for layer in self.net.layers):
            return None
        self.graph_executor.drain()
        try:
            return self.net.first_non_finite(anew=True)
        except CaffepyError:
            return None  # what stops training is the loss

    # -- tests ---------------------------------------------------------------------------------------

    @on_device
    def test_all(self) -> list[dict[str, np.ndarray]]:
        """Score every test net; for each its outputs' means over test_iter batches.

        A stop that is requested meanwhile ends the tests where this device trains alone.
        """
        self.graph_executor.drain()
        if Action.STOP in self.requests and self.world_size > 1:
            return []
        with self._not_training(), self._trace.span("test"):
            self.average_statistics()
            self._observers.tell("before_test", self)
            started = time.monotonic()
            evaluator = Evaluator(self.param, self.net, self.shard, self.callback, self.log, self._interrupted)
            scores = evaluator.run_all(self.tests, self.iteration)
            if self._snapshot_at == self.iteration:
                self.retention.note_scores(self.iteration, scores)
            if self.param.lr_policy == "stepearly" and scores and scores[0]:
                self.hyperparameters.note_score(self.iteration, float(np.ravel(next(iter(scores[0].values())))[0]))
            if self.test_nets:
                self.log("Tests completed in %.6gs", time.monotonic() - started)
            self._observers.tell("after_test", self, scores)
            if self.callback.world_size > 1:  # a stop after a test ends training with the net that was tested
                self.requests.agree(self.callback.sum_over_devices)
            return scores

    def _interrupted(self) -> bool:
        """Whether a test should end at once; devices that train together finish it."""
        if self.world_size > 1:
            return False
        self.requests.poll()
        return Action.STOP in self.requests

    def average_statistics(self) -> None:
        """Make the running statistics of all devices the same, unless they are; called by all of them.

        At most once an iteration: averaging equal numbers could round them, and a resumed run starts from them.
        """
        if self.world_size == 1 or self._averaged_at == self.iteration:
            return
        self._averaged_at = self.iteration
        if arrays := self.net.statistics(local_only=True):
            self.callback.average_over_devices(arrays)

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
        self.graph_executor.drain()
        with self._not_training(), self._trace.span("snapshot"):
            if self.graph_executor.captured and self.iteration > 0:
                self._checked(self.net.loss())  # it may not have been read for some iterations
            self.average_statistics()
            self.callback.on_snapshot()
            path = self._write_snapshot()
            self._snapshot_at = self.iteration
            self.retention.wrote(path)
            self.callback.barrier()
            self._observers.tell("after_snapshot", self, path)
            return path

    def _write_snapshot(self) -> Path:
        """Write weights and state if this device is the root; every device must call it."""
        saved = self._save_state()
        weights, path = snapshot_paths(self.param, self.resolve, self.iteration)
        saved.learned_net = str(weights)
        saved.blob_count = len(self.history) * len(self.net.parameters.parameters)
        if self.callback.is_root:
            kind = "HDF5" if path.suffix == ".h5" else "binary proto"
            self.log("Snapshotting to %s file %s", kind, weights)
            write_caffemodel(weights, self.net.name, self.net.layers, self.param.snapshot_diff)
            self.log("Snapshotting solver state to %s file %s", kind, path)
            write_solverstate(path, saved, map(self.backend.to_host, history_views(self.net, self.history)))
        return path

    def _save_state(self) -> SolverState:
        """Everything but weights, their path and history; every device must call it."""
        values, guard, larc = self.hyperparameters, self.update.guard, self.update.larc
        saved = SolverState(iter=self.iteration, current_step=values.current_step)
        if self.param.lr_policy == "plateau":
            saved.minimum_loss, saved.iter_last_event = values.plateau.minimum_loss, values.plateau.last_event
        if self.param.lr_policy == "stepearly":
            saved.minimum_loss, saved.iter_last_event = -values.step_early.best, values.step_early.tests
        saved.seed = self.param.random_seed
        saved.pass_number = self.net.context.passes.number
        saved.solver_type = self.param.type
        saved.global_batch = self._global_batch
        saved.loss_window.extend(self.losses.averaged(self.callback))
        saved.test_pass_number.extend(net.context.passes.number for net in self.test_nets)
        if guard.adaptive:
            saved.loss_scale = float(self.backend.to_host(guard.loss_scale))
            saved.good_steps = guard.good_steps
        for iteration, score in sorted(self.retention.scores.items()):
            saved.snapshot_score.add(iter=iteration, name=self.retention.score_name, value=score)
        if self.param.larc_turbo and larc is not None:
            saved.larc_correlation.extend(self.backend.to_host(larc.correlation).tolist())
        saved.data_position.extend(data_positions((self.net, *self.test_nets)))
        return saved

    @on_device
    def restore(self, path: Path, strict: bool = False) -> None:
        """Resume from a .solverstate of caffepy's or of either Caffe's, and the .caffemodel that it names.

        Args:
            path: the .solverstate.
            strict: refuse files that were changed after caffepy wrote them, instead of logging a warning.

        Raises:
            SnapshotError: a file cannot be read, or is of another solver or net; nothing was changed.
        """
        path = Path(path)
        self.log("Restoring previous solver status from %s", path)
        stored = read_solverstate(path, strict)
        saved = stored.message
        check_fits(saved, path, self.net, len(self.history), self.param.type)
        if saved.HasField("learned_net"):
            self._restore_weights(find_learned_net(saved, path), strict)
        else:
            log.warning("%s names no learned_net: the weights stay as they are, as in Caffe", path)
        for part, values in zip(history_views(self.net, self.history), history_arrays(stored, path), strict=True):
            self.backend.from_host(values.reshape(part.shape), part)
        saved.ClearField("history")
        self.adopt(saved)
        self.restored, self.resumed_from = saved, path
        self._refresh_copies()

    def _restore_weights(self, path: Path, strict: bool) -> None:
        """Copy all parameters of the net from a .caffemodel, or none."""
        weights = read_caffemodel(path, strict)
        stored = {layer.name for layer in weights.message.layer}
        for parameter in self.net.parameters.parameters:
            if parameter.layer.name not in stored:
                raise SnapshotError(
                    f"{path}: has no layer '{parameter.layer.name}', which the net has; it is of another net"
                )
        self.copy_layers(weights, path)

    def adopt(self, saved: SolverState) -> None:
        """Resume from what another device's solver has `restored`; its weights and history come in `on_start`."""
        self._adopt(saved)
        self._snapshot_at = self.iteration

    def _adopt(self, saved: SolverState) -> None:
        """Take over everything but weights and history."""
        values, larc, name = self.hyperparameters, self.update.larc, self.retention.score_name
        self.update.guard.restore_loss_scale(saved.loss_scale, saved.good_steps)
        if larc is not None:
            larc.restore(saved.larc_correlation)
        self.iteration = saved.iter
        values.current_step = saved.current_step
        values.plateau.minimum_loss, values.plateau.last_event = saved.minimum_loss, saved.iter_last_event
        values.step_early.best, values.step_early.tests = -saved.minimum_loss, saved.iter_last_event
        self.losses.restore(list(saved.loss_window))
        self.retention.scores = {score.iter: score.value for score in saved.snapshot_score if score.name == name}
        self._restore_random(saved)
        restore_positions((self.net, *self.test_nets), saved.data_position)
        if saved.HasField("global_batch") and saved.global_batch != self._global_batch:
            log.warning(
                "the snapshot was made with %d samples an iteration and pass, now there are %d",
                saved.global_batch,
                self._global_batch,
            )

    def _restore_random(self, saved: SolverState) -> None:
        """Set seed and pass numbers; a snapshot of Caffe's has none, the passes then follow from the iteration."""
        if saved.HasField("seed"):
            if saved.seed != self.param.random_seed:
                log.info("random numbers go on from the snapshot's seed %d", saved.seed)
            self.param.random_seed = saved.seed
        for net in (self.net, *self.test_nets):
            net.context.seed = self.param.random_seed
        for executor in self.tests:
            executor.drop()  # their graphs draw from the old seed
        has_passes = saved.HasField("pass_number")
        self.net.context.passes.number = saved.pass_number if has_passes else saved.iter * self.param.iter_size
        for net, number in zip(self.test_nets, saved.test_pass_number, strict=False):
            net.context.passes.number = number

    def save_in_memory(self) -> SavedSolver:
        """The whole state; the device must be idle, and every device must call it."""
        flat = (self.net.parameters.data, *self.history)
        return SavedSolver(self._save_state(), [np.array(self.backend.to_host(array)) for array in flat])

    def restore_from_memory(self, saved: SavedSolver) -> None:
        """Take over the state of a solver of the same prototxt."""
        for array, values in zip((self.net.parameters.data, *self.history), saved.arrays, strict=True):
            self.backend.from_host(values, array)
        self.net.parameters.written()
        self._adopt(saved.message)
        self._refresh_copies()

    # -- checks before training ----------------------------------------------------------------------

    @property
    def writes_snapshots(self) -> bool:
        """Whether training writes snapshots without a request."""
        param = self.param
        wanted = param.snapshot or param.snapshot_after_train or param.test_and_snapshot_last_epochs
        return bool(param.snapshot_prefix and wanted)

    def _check_snapshots(self) -> None:
        """Fail before training, not at the first snapshot."""
        if self.callback.is_root and self.writes_snapshots:
            check_snapshot(snapshot_paths(self.param, self.resolve, self.param.max_iter)[1], self.net.layers)
            remove_unfinished(self.resolve.output(self.param.snapshot_prefix))
        if self.param.snapshot:
            self._check_sizes()

    def _check_sizes(self) -> None:
        """Fail where a snapshot would be too large for its format."""
        weights, state = snapshot_paths(self.param, self.resolve, self.param.max_iter)
        if self.callback.is_root and state.suffix != ".h5":
            check_caffemodel_size(weights, self.net.name, self.net.layers, self.param.snapshot_diff)
            shapes = [parameter.blob.shape for parameter in self.net.parameters.parameters]
            check_solverstate_size(state, shapes * len(self.history))

    def check_earlier_snapshots(self) -> None:
        """Warn, before training and behind `restore`, of earlier snapshots with the solver's prefix.

        Raises:
            ConfigError: training would replace or remove one of another net.
        """
        param, last = self.param, self.param.max_iter
        epochs = self._last_epoch_ends()

        def writes(iteration: int) -> bool:
            due = param.snapshot > 0 and iteration % param.snapshot == 0
            due = due or iteration in epochs or (param.snapshot_after_train and iteration == last)
            return due and self.iteration < iteration <= last

        if self.writes_snapshots and self.iteration < last:
            self.retention.check_earlier(writes, self.resumed_from)

    # -- for programs --------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Call an object's methods `after_iteration`, `before_test` and so on; see `caffepy.Callback`.

        Raises:
            ConfigError: it has none of these methods and is no function.
        """
        self._observers.add(callback)

    def close(self) -> None:
        """Free graphs and close the nets. Callable twice."""
        self.graph_executor.drop()
        for executor in self.tests:
            executor.close()
        self.net.close()

    @property
    def shown(self) -> DisplayedValues | None:
        """The values of the last display; None before the first display."""
        return self._display.shown

    def __repr__(self) -> str:
        losses = self.losses.values()
        loss = f", loss {losses[-1]:.6g}" if losses else ""
        return (
            f"<caffepy {self.param.type} solver of net '{self.net.name}': iteration {self.iteration} of "
            f"{self.param.max_iter}{loss}, on {self.backend.device_description()}>"
        )

    def _repr_html_(self) -> str:
        fields = [(name, getattr(self.param, name)) for name in _SHOWN if self.param.HasField(name)]
        nets = "".join(net._repr_html_() for net in (self.net, *self.test_nets))
        return heading(repr(self).strip("<>")) + table(("field", "value"), fields) + nets


def create_solver(param: SolverParameter, backend: Backend, **context: Any) -> Solver:
    """The solver of a prototxt.

    Args:
        param: as `Solver` takes it.
        backend: the device, active in the calling thread.
        context: fields of a `TrainContext`; None: the default.

    Raises:
        ConfigError: the type is unknown, the solver or its nets do not hold together, or it is no message at all.
    """
    if not isinstance(param, SolverParameter):
        raise ConfigError(f"create_solver needs a SolverParameter; caffepy.read_solver({param!r}) would read one")
    check_values(param)
    return Solver(param, backend, TrainContext(**{name: value for name, value in context.items() if value is not None}))


@contextmanager
def preserve_running_stats(net: Net) -> Iterator[None]:
    """Restore the running statistics and states after a forward pass of the train net that is no part of training."""
    arrays = [*net.statistics(), *net.state()]
    saved = [net.backend.zeros(tuple(array.shape)) for array in arrays]
    for array, before in zip(arrays, saved, strict=True):
        net.backend.copy(array, before)
    yield
    for array, before in zip(arrays, saved, strict=True):
        net.backend.copy(before, array)

"""The training loop (Caffe's `solver.cpp`): iterations, tests, snapshots and requests, in one visible place.

What a solver type computes is in `rules.py`, how iterations are captured and replayed in `graph_executor.py`. The
devices that train together with this one are behind a `SolverCallback`.
"""

from __future__ import annotations

import copy
import math
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from caffepy.backend import Array, Backend
from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, StopRequestedError
from caffepy.formats.caffemodel import read_caffemodel
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.layers.layer import LayerContext
from caffepy.logs.performance_report import Performance
from caffepy.logs.trace import NO_TRACE, Tracer
from caffepy.net import describe as debug
from caffepy.net.describe import heading, table
from caffepy.net.executor import ForwardExecutor, preserve_running_stats
from caffepy.net.memory_plan import describe
from caffepy.training.callback import Action, IterationCallbacks, SingleDevice, SolverCallback
from caffepy.training.display import Clock, Display, DisplayedValues, LossWindow, RootLog, duration
from caffepy.training.evaluate import Evaluator
from caffepy.training.graph_executor import GraphExecutor
from caffepy.training.net_factory import NetFactory, suggest_batch_size_on_oom
from caffepy.training.non_finite import report_non_finite
from caffepy.training.policies import Hyperparameters
from caffepy.training.rules import RULES, Update
from caffepy.training.schedule import Schedule
from caffepy.training.snapshot import Snapshots
from caffepy.training.solver_check import check_values, log_ignored
from caffepy.training.stop_requests import FLAGS, StopRequests
from caffepy.utils.options import MAX_SKIPPED, ExecutionOptions, RetentionPolicy
from caffepy.utils.progress import interactive, progress_bar

_SHOWN = (
    "type base_lr lr_policy momentum weight_decay iter_size max_iter test_interval snapshot snapshot_prefix random_seed"
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


class Solver:
    """Trains a net on one device.

    Args:
        param: the solver's prototxt, upgraded. A negative random_seed makes this solver draw one.
        backend: the device, active in the calling thread.
        shard: the device's rank among all that train together; None: it trains alone.
        resolve: finds the files that the solver names; None: relative to the working folder.
        callback: the other devices; None: there are none.
        request: asked in every iteration for a stop or a snapshot, as signals want them; None: there are none.
        engine: how iterations are run; None: as `ExecutionOptions` has it.
        trace: takes the times of what this device does.
        keep: which snapshots stay when a newer one is written; None: all.
        keep_going: log a loss that is not finite instead of stopping.
        guard: skip updates whose gradients are not finite also where the net itself does not need it.
        max_skipped: updates skipped in a row after which training ends.
        timeout: longest wait for data, in seconds.

    Raises:
        ConfigError: the type is unknown, or solver and nets do not hold together.
    """

    def __init__(
        self,
        param: SolverParameter,
        backend: Backend,
        *,
        shard: Shard | None = None,
        resolve: PathResolver | None = None,
        callback: SolverCallback | None = None,
        request: Callable[[], Action] | None = None,
        engine: ExecutionOptions | None = None,
        trace: Tracer = NO_TRACE,
        keep: RetentionPolicy | None = None,
        keep_going: bool = False,
        guard: bool = False,
        max_skipped: int = MAX_SKIPPED,
        timeout: float = 600.0,
    ) -> None:
        self._created = time.monotonic()
        rule = RULES.get(param.type, "solver")
        self.param = param = copy.deepcopy(param)
        self.backend = backend
        self.shard, self.resolve = shard or Shard(), resolve or PathResolver(None)
        self.callback = callback or SingleDevice()
        self.log = RootLog(self.callback.is_root)
        self.requests = StopRequests(request, alone=self.world_size == 1)
        self._trace, self._keep_going = trace, keep_going
        self.iteration = 0
        """How many iterations were made, those before a snapshot that was restored included."""
        self.losses = LossWindow(param.average_loss)
        """This device's losses of the last `average_loss` iterations whose loss was read."""
        self.last_pass = True
        """Whether the present pass is the iteration's last, whose backward pass completes the gradients."""
        self.stopped_early = False
        self.planned_memory: int | None = None
        """Bytes of all nets and the update as planned; None: blobs do not share memory, and there is no plan."""
        self._averaged_at = 0
        """The iteration after which the running statistics were averaged last."""
        log_ignored(param)
        if param.random_seed < 0:
            param.random_seed = secrets.randbits(31)
        histories, engine = rule.histories(), engine or ExecutionOptions()
        # Where debug_info does not read the blobs between layers, layers may be fused and blobs share memory.
        fuse, share = (wanted and not param.debug_info for wanted in (engine.fuse, engine.share))
        shared = LayerContext(
            backend,
            shard=self.shard,
            resolve=self.resolve,
            timeout=timeout,
            check_wait=self.requests.check_wait,
        )
        self._factory = NetFactory(param, shared, fuse, share)
        with suggest_batch_size_on_oom(self._factory, histories), backend.activate():
            self.net = self._factory.train_net(trace)
            for names in param.weights if self.callback.is_root else ():
                self.load_weights([self.resolve(name.strip()) for name in names.split(",")])
            alone = self.world_size == 1
            self.tests = self._factory.test_executors(self.net, engine.eager, lazily=alone)
            """Run the test nets, in Caffe's order."""
            self.test_nets = [executor.net for executor in self.tests]
            self._factory.spare_programs()
            if self._factory.share:
                plan = self._factory.share_memory()
                self.planned_memory = plan.total(histories)
                self.log("%s", describe(plan, histories, backend.name))
            self.history: list[Array] = [self.net.parameters.new_history() for _ in range(histories)]
            for net in (self.net, *self.test_nets):
                net.prepare()
                net.keeps_copies = False
            self.replicated: list[Array] = []
            """Further arrays that all devices get from the root before the first iteration."""
            guard = guard or "float16" in self.net.parameters.copies
            chosen = rule(param, self.net.context.nvidia)
            self.update = Update(self.net, chosen, self.history, guard, max_skipped)
            self.hyperparameters = Hyperparameters(
                param,
                self.net,
                self.requests,
                self.update.numbers,
                lambda: self.losses.mean_over_devices(self.callback),
                self.log,
            )
            self._eager = engine.eager
            self.graph_executor = self._new_graph_executor()
            self.schedule = Schedule(param, self.net)
        self.performance = Performance(batch=self.net.batch_size() * param.iter_size)
        self.clock = Clock(self.performance, backend, lambda: self.callback.on_clock_start(), self.net.waited)
        self._display = Display(param, self.net, self.update.guard, self.clock, self.schedule, self.log)
        self._observers = IterationCallbacks(partial(self.requests.ask_for, Action.STOP))
        self.snapshots = Snapshots(self, keep or RetentionPolicy())

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
            self.net.copy_trained_layers_from(read_caffemodel(path), str(path))
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
            self.snapshots.check_sizes()
        if resume_from is not None:
            self.restore(resume_from)
        self.step(max(self.param.max_iter - self.iteration, 0), progress=False)
        self._display.show_skipped(self.iteration)
        if self.param.snapshot_after_train and self.snapshots.iteration != self.iteration:
            self.snapshot()
        if self.stopped_early:
            self.log("Optimization stopped early.")
            return
        with suppress(StopRequestedError):
            if self.schedule.display_is_due(self.iteration):
                self.net.prefetch_to_device(self.net.context.passes.number)
                with preserve_running_stats(self.net):
                    self.net.forward()
                self.losses.add(self._checked(self.net.loss()))
                self.net.raise_device_errors()
                self._display.show_loss(self.iteration, self.losses.mean(), self.callback)
            if self.schedule.test_is_due(self.iteration):
                self.test_all()
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
        self.net.parameters.refresh(self.net.parameters.copies)
        end, self.stopped_early = self.iteration + iterations, False
        self.clock.resume()
        shown = interactive() if progress is None else progress
        with progress_bar(lambda: self.iteration, lambda: end, wanted=shown):
            while self.iteration < end and not self.stopped_early:
                with self._compile_helper():
                    self._test_and_iterate()
                self._act_on_requests()
        self.graph_executor.drain()
        if self.requests:
            self._act_on_requests()
        self.clock.pause()

    def _compile_helper(self) -> AbstractContextManager[None]:
        """Let another process compile half of the kernels of the net's first pass, if this device trains alone."""
        if self.world_size > 1 or self.net.context.passes.number > 0:
            return nullcontext()
        return self.backend.compile_helper(lambda: chain([self.update_parameters], self.net.reversed_passes()))

    def _test_and_iterate(self) -> None:
        """Test if tests are due, then make one iteration, unless a stop is requested."""
        tested = self.iteration > 0 or self.param.test_initialization
        if tested and self.schedule.test_is_due(self.iteration):
            self.test_all()
        if Action.STOP in self.requests:
            return
        try:
            with suggest_batch_size_on_oom(self._factory, len(self.history)):
                self._iterate()
        except StopRequestedError:  # while a device that trains alone waited for data, before all else
            self.log("Iteration %d waits for its data and is not made", self.iteration)

    def _iterate(self) -> None:
        """Make one iteration layer by layer; once it is captured, `_replay` launches its work on the device as graphs.

        Each pass adds its gradients to those of the passes before it.
        """
        net, iteration, several = self.net, self.iteration, self.world_size > 1
        display = self.schedule.display_is_due(iteration)
        read_loss = display or self.schedule.loss_is_due(iteration)
        net.debug_info = display and self.param.debug_info
        self._trace.begin(iteration)

        for number in net.context.passes.following(self.param.iter_size):
            net.prefetch_to_device(number)
        self.requests.poll()
        passes = net.context.passes.following(self.param.iter_size)  # a program that was asked may have made others
        self.hyperparameters.send(iteration, passes)
        if several:
            self.requests.mark_sent()
        if self.graph_executor.captured and self._replay(passes, display, read_loss):
            return

        loss = 0.0
        for index in range(self.param.iter_size):
            self.begin_pass(index)
            with self._trace.span("forward"):
                net.forward()
            if read_loss:
                loss += self._checked(net.loss())
            with self._trace.span("backward"):
                net.backward()
        if read_loss:
            self.losses.add(loss / self.param.iter_size)
        if self.backend.asynchronous:
            self.backend.synchronize()
            net.raise_device_errors()
        if display:
            self._display.show_iteration(iteration, self.losses.mean(), self.callback)

        if several and self.backend.asynchronous:
            # A pass may compile, tune and allocate, which can wait for all work of the process on any of its devices,
            # an all-reduce included that this device has not joined.
            self.callback.barrier()
        self.exchange_gradients()
        if several:
            self.callback.wait_for_device(self.backend.synchronize)
            flags = self.backend.to_host(net.parameters.flags[: len(FLAGS)])
            self.requests.expect(lambda: flags)

        before = self.backend.to_host(net.parameters.data) if net.debug_info else None
        self.update_parameters()
        self._display.show_update(iteration, display, *self.hyperparameters.shown)
        if before is not None:
            debug.log_update(net.parameters, before)
        self.graph_executor.capture()
        self._count(read_loss)

    def _replay(self, passes: range, display: bool, read_loss: bool) -> bool:
        """Make an iteration, whose data and hyperparameters were sent, as graphs; False: the data have other shapes."""
        if not self.graph_executor.run(passes):
            return False
        if read_loss:
            loss = self._checked(self.graph_executor.loss())
            self.net.raise_device_errors()
            self.losses.add(loss)
        if display:
            self._display.show_iteration(self.iteration, self.losses.mean(), self.callback)
            self._display.show_update(self.iteration, True, *self.hyperparameters.shown)
        self._count(read_loss)
        return True

    def _count(self, read_loss: bool) -> None:
        """Count an iteration, and let others see it."""
        if read_loss:
            self.update.guard.check_skipped(self.iteration)
        self.requests.receive(self.graph_executor.behind)
        self.iteration += 1
        self.clock.tick()
        self.callback.on_iteration()
        self._observers.after_iteration(self, lambda: self.callback.wait_for_device(self.backend.synchronize))

    def _act_on_requests(self) -> None:
        wanted = self.schedule.snapshot_is_due(self.iteration) or Action.SNAPSHOT in self.requests
        if wanted and self.snapshots.iteration != self.iteration:
            self.snapshot()
        if Action.STOP in self.requests:
            self.stopped_early = True
        self.requests.clear()

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
        self.hyperparameters.send(self.iteration, self.net.context.passes.following(self.param.iter_size))
        self.update_parameters()
        self.iteration += 1

    def _checked(self, loss: float) -> float:
        """A loss that is finite; with `keep_going` any, with a warning."""
        if not math.isfinite(loss):
            shared = self._factory.share
            report_non_finite(loss, self.iteration, self.net, self.graph_executor, shared, self._keep_going)
        return loss

    # -- tests ---------------------------------------------------------------------------------------

    @on_device
    def test_all(self) -> list[dict[str, np.ndarray]]:
        """Score every test net; for each its outputs' means over test_iter batches.

        A stop that is requested meanwhile ends the tests where this device trains alone.
        """
        self.graph_executor.drain()
        if Action.STOP in self.requests and self.world_size > 1:
            return []
        with self.clock.paused(), self._trace.span("test"):
            self.average_statistics()
            self._observers.tell("before_test", self)
            started = time.monotonic()
            evaluator = Evaluator(self.param, self.net, self.shard, self.callback, self.log, self.requests.stop_at_once)
            scores = evaluator.run_all(self.tests, self.iteration)
            if self.snapshots.iteration == self.iteration:
                self.snapshots.retention.note_scores(self.iteration, scores)
            if self.param.lr_policy == "stepearly" and scores and scores[0]:
                self.hyperparameters.note_score(self.iteration, float(np.ravel(next(iter(scores[0].values())))[0]))
            if self.test_nets:
                self.log("Tests completed in %.6gs", time.monotonic() - started)
            self._observers.tell("after_test", self, scores)
            if self.callback.world_size > 1:  # a stop after a test ends training with the net that was tested
                self.requests.agree(self.callback.sum_over_devices)
            return scores

    def average_statistics(self) -> None:
        """Make the running statistics of all devices the same, unless they are; called by all of them.

        At most once an iteration: averaging equal numbers could round them, and a resumed run starts from them.
        """
        if self.world_size == 1 or self._averaged_at == self.iteration:
            return
        self._averaged_at = self.iteration
        if arrays := self.net.statistics(local_only=True):
            self.callback.average_over_devices(arrays)

    @on_device
    def snapshot(self) -> Path:
        """Write weights and state; the root writes, the others wait. Returns the .solverstate's path.

        Raises:
            RunError: it could not be written; the older snapshots are as they were.
        """
        self.graph_executor.drain()
        with self.clock.paused(), self._trace.span("snapshot"):
            if self.graph_executor.captured and self.iteration > 0:
                self._checked(self.net.loss())  # it may not have been read for some iterations
            self.average_statistics()
            self.callback.on_snapshot()
            path = self.snapshots.write()
            self.callback.barrier()
            self._observers.tell("after_snapshot", self, path)
            return path

    @on_device
    def restore(self, path: Path, strict: bool = False) -> None:
        """Resume from a .solverstate of caffepy's or of either Caffe's, and the .caffemodel that it names.

        Args:
            path: the .solverstate.
            strict: refuse files that were changed after caffepy wrote them, instead of logging a warning.

        Raises:
            SnapshotError: a file cannot be read, or is of another solver or net; nothing was changed.
        """
        self.snapshots.restore(Path(path), strict)

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
        fields = [(name, getattr(self.param, name)) for name in _SHOWN.split() if self.param.HasField(name)]
        nets = "".join(net._repr_html_() for net in (self.net, *self.test_nets))
        return heading(repr(self).strip("<>")) + table(("field", "value"), fields) + nets


def create_solver(param: SolverParameter, backend: Backend, **context: Any) -> Solver:
    """The solver of a prototxt.

    Args:
        param: as `Solver` takes it.
        backend: the device, active in the calling thread.
        context: keywords of `Solver`; None: the default.

    Raises:
        ConfigError: the type is unknown, the solver or its nets do not hold together, or it is no message at all.
    """
    if not isinstance(param, SolverParameter):
        raise ConfigError(f"create_solver needs a SolverParameter; caffepy.read_solver({param!r}) would read one")
    check_values(param)
    return Solver(param, backend, **{name: value for name, value in context.items() if value is not None})

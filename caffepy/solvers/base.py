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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from caffepy import snapshot
from caffepy.backend import Array, Backend, Expression
from caffepy.backend.protocols import Fetch, Mark
from caffepy.config.paths import PathResolver
from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError, NonFiniteError, RunError
from caffepy.net import debug
from caffepy.net.capture import Program, Step
from caffepy.net.memory import describe
from caffepy.proto.caffe_pb2 import FLOAT, SolverParameter
from caffepy.registry import Registry
from caffepy.report import Performance
from caffepy.solvers import policies
from caffepy.solvers.callbacks import Action, SingleDevice, SolverCallback
from caffepy.solvers.capacity import naming_largest_batch
from caffepy.solvers.clock import Clock
from caffepy.solvers.display import Display
from caffepy.solvers.engine import Engine
from caffepy.solvers.loss import LossWindow
from caffepy.solvers.nets import NetFactory
from caffepy.solvers.state import history_arrays, restore_state, save_state
from caffepy.solvers.testing import run_test
from caffepy.solvers.update import Update
from caffepy.trace import NO_TRACE, NoTrace

log = logging.getLogger(__name__)

SOLVERS: Registry[type[Solver]] = Registry("solver type")

CHECK_INTERVAL = 20
"""Iterations after which an asynchronous device is asked for its loss, to notice one that is not finite."""


IN_FLIGHT = 3
"""Iterations that a device may be behind the host: enough to keep it busy, too few to run far ahead of a peer."""
STOP, SNAPSHOT, SCALE, L2, L1, RULE = range(6)
"""Places of the mailbox's numbers: the two requests, factors of gradient and regularisation, then the rule's own."""


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
        engine: Engine | None = None,
        trace: NoTrace = NO_TRACE,
    ) -> None:
        self.param = copy.deepcopy(param)
        self.backend = backend
        self.shard = shard or Shard()
        self.resolve = resolve or PathResolver(None)
        self.callback: SolverCallback = callback or SingleDevice()
        self.keep_going = keep_going
        self.engine = engine or Engine()
        self.trace = trace
        self._request = request
        _refuse_unsupported(self.param)
        if self.param.random_seed < 0:
            self.param.random_seed = secrets.randbits(31)
        self.iteration = 0
        self.current_step = 0
        self.stopped_early = False
        self.losses = LossWindow(self.param.average_loss)
        self._requests: set[Action] = set()
        self._marks: deque[Mark] = deque()
        self._answers: deque[Fetch] = deque()
        self._rate = 0.0
        self.last_pass = True
        """Whether the present pass is the iteration's last, whose backward pass completes the gradients."""
        self._snapshot_at = -1
        self._hides_blobs = self.backend.captures and not self.param.debug_info
        """Whether nobody looks at blobs between the layers, so that these may be fused and blobs share memory."""
        fuse, share = (wanted and self._hides_blobs for wanted in (self.engine.fuse, self.engine.share))
        self._factory = NetFactory(self.param, self.backend, self.shard, self.resolve, fuse, share)
        with naming_largest_batch(self._factory, self.histories):
            self._build_nets()
        self.performance = Performance(batch=self.net.batch_size() * self.param.iter_size)
        self.clock = Clock(self.performance, backend)
        self.display = Display(self)
        if self.param.snapshot or (self.param.snapshot_after_train and self.param.snapshot_prefix):
            snapshot.check_prefix(self._snapshot_paths()[0])

    def _build_nets(self) -> None:
        factory = self._factory
        self.net = factory.train_net()
        self.net.trace = self.trace
        for names in self.param.weights:
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
        self.updating = Update(self.net, self.rule, self.history, self.param.clip_gradients, guard=half)
        numbers = RULE + len(self.rule_numbers(0.0, 0.5))
        self.mailbox = self.backend.mailbox(numbers, self.param.iter_size)
        self.losses_of_passes = self.backend.zeros(())
        self.program = Program(self.backend, self._steps())

    def load_weights(self, paths: list[Path]) -> None:
        """Copy trained layers from .caffemodel files, later ones over earlier ones.

        Raises:
            SnapshotError: a file cannot be read or does not fit.
        """
        for path in paths:
            self.log("Finetuning from %s", path)
            self.net.copy_trained_layers_from(snapshot.read_weights(path), str(path))
        self._refresh_copies()

    def _refresh_copies(self) -> None:
        """Bring the parameters' copies in other storages up to date after somebody else than an update changed them."""
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
        self._refresh_copies()
        end = self.iteration + iterations
        self.clock.resume()
        while self.iteration < end and not self.stopped_early:
            if self._due(self.param.test_interval) and (self.iteration > 0 or self.param.test_initialization):
                self.test_all()
            if Action.STOP not in self._requests:
                with naming_largest_batch(self._factory, self.histories):
                    self._iterate()
            self._act_on_requests()
        self._settle()
        if self._requests:
            self._act_on_requests()
        self.clock.pause()

    def _iterate(self) -> None:
        display = self._due(self.param.display)
        self.net.debug_info = display and self.param.debug_info
        self.trace.begin(self.iteration)
        self._poll()
        self._send_numbers()
        if self.callback.world_size > 1:
            self._requests.clear()  # they are on their way, and are acted on when all devices have heard them
        if self.program.captured:
            self._replay(display)
        else:
            self._run_eagerly(display)
            self._capture()
        self.iteration += 1
        self.clock.tick()

    def _run_eagerly(self, display: bool) -> None:
        self._compute_gradients(display or self._needs_loss())
        if display:
            self.display.show_iteration()
        self._exchange_gradients()
        self._hear_requests()
        with self.trace.span("update"):
            self._apply_update(display)

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _needs_loss(self) -> bool:
        """Whether the loss is read though it is not shown: always where that does not cost a wait."""
        return not self.backend.asynchronous or self.param.average_loss > 1 or self._due(CHECK_INTERVAL)

    def _compute_gradients(self, read_loss: bool) -> None:
        loss = 0.0
        for index in range(self.param.iter_size):
            self._begin_pass(index)
            with self.trace.span("forward"):
                self.net.forward()
            if read_loss:
                loss += self._read_loss()
            with self.trace.span("backward"):
                self.net.backward()
        if read_loss:
            self.losses.add(loss / self.param.iter_size)
        if self.backend.asynchronous:
            self.backend.synchronize()
            self.net.check()

    def _begin_pass(self, index: int) -> None:
        """Before each of an iteration's passes: where its random numbers begin, and that gradients start anew."""
        self.net.context.passes.on_device = self.mailbox.counters[index]
        if index == 0:
            self.net.clear_param_diffs()
        self.last_pass = index == self.param.iter_size - 1
        if self.last_pass and self.callback.world_size > 1:
            self.backend.copy(self.mailbox.array[STOP : SNAPSHOT + 1], self.net.parameters.flags[:2])

    def _read_loss(self) -> float:
        loss = self.net.loss()
        if not math.isfinite(loss):
            self._report_non_finite(loss)
        return loss

    def _report_non_finite(self, loss: float) -> None:
        self.net.check()
        hidden = self.program.captured or self._factory.share
        node = None if hidden else self.net.first_non_finite()
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
        with self.trace.span("exchange"):
            self.callback.on_gradients_ready(self)

    def _hear_requests(self) -> None:
        """What any of the devices asked for."""
        if self.callback.world_size > 1:
            self.callback.settle(self.backend.synchronize)
            self._take_requests(self.backend.to_host(self.net.parameters.flags))

    def _take_requests(self, flags: np.ndarray) -> None:
        pairs = zip((Action.STOP, Action.SNAPSHOT), flags[:2], strict=True)
        self._requests = {action for action, asked in pairs if asked > 0}

    def _poll(self) -> None:
        """Take what was asked for; twice, because a snapshot and a stop may both be waiting."""
        for _ in range(2):
            action = self._request() if self._request is not None else Action.NONE
            if action is Action.NONE:
                return
            self._requests.add(action)

    def _act_on_requests(self) -> None:
        wanted = self._due(self.param.snapshot) or Action.SNAPSHOT in self._requests
        if wanted and self._snapshot_at != self.iteration:
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

    # -- captured iterations -------------------------------------------------------------------------

    def _steps(self) -> list[Step]:
        """All that an iteration asks of the device, in order: the very calls that run eagerly."""
        net = self.net
        steps = []
        for index in range(self.param.iter_size):
            steps.append(Step("the start of a pass", partial(self._begin_pass, index)))
            for node in net.schedule:
                steps.append(Step(node.layer.name, partial(net.forward_node, node), node.layer.not_captured()))
            if self.param.iter_size > 1:
                steps.append(Step("the loss", partial(net.add_loss, self.losses_of_passes, index > 0)))
            for node in reversed(net.schedule):
                steps.append(Step(node.layer.name, partial(net.backward_node, node), node.layer.not_captured()))
        steps.append(Step("the exchange of gradients", self._exchange_gradients, self.callback.not_captured()))
        steps.append(Step("the update", self._update))
        return steps

    def _capture(self) -> None:
        """Make graphs of an iteration that has just run eagerly, if the device can."""
        if not self.backend.captures or self.engine.eager or self.param.debug_info:
            return
        self.backend.trim()  # what tuning and compiling the first iteration took
        number = self.net.context.passes.number
        self.program = Program(self.backend, self._steps())
        try:
            with self.trace.paused():
                self.program.capture()
        except RunError as error:
            self.program.drop()
            self.engine = replace(self.engine, eager=True)
            self.log("Iterations are not captured into graphs: %s", error)
        finally:
            self.net.context.passes.number = number

    def _replay(self, display: bool) -> None:
        """An iteration as graphs; the host goes on while the device computes."""
        net, passes = self.net, range(self.net.context.passes.number, self._next_pass())
        for number in passes:
            net.feed(number)
        if net.changed_shapes():
            self._recapture(display)
            return
        with self.trace.span("iteration"):
            self.program.run()
        for number in passes:
            net.consumed(number)
        net.context.passes.number = passes.stop
        self._keep_pace()
        if display or self._needs_loss():
            self._look_at_loss(display)

    def _next_pass(self) -> int:
        return self.net.context.passes.number + self.param.iter_size

    def _recapture(self, display: bool) -> None:
        """The data have another shape: run once eagerly and capture anew."""
        self.program.drop()
        self._settle()
        self._run_eagerly(display)
        self._capture()

    def _keep_pace(self) -> None:
        """Let the device be at most a few iterations behind, and hear what was asked for in the one it finished."""
        if self.callback.world_size > 1:
            self._answers.append(self.backend.fetch(self.net.parameters.flags[:2]))
        self._marks.append(self.backend.mark())
        if len(self._marks) >= IN_FLIGHT:
            self.callback.settle(self._marks.popleft().wait)
            if self.callback.world_size > 1:
                self._take_requests(self._answers.popleft().get())

    def _settle(self) -> None:
        """Wait until the device has done all that it was asked for."""
        if self._marks:
            self.callback.settle(self._marks[-1].wait)
            self._marks.clear()
            for answer in self._answers:
                flags = answer.get()
                if flags.any():
                    self._take_requests(flags)
            self._answers.clear()

    def _look_at_loss(self, display: bool) -> None:
        self.callback.settle(self._marks[-1].wait)
        several = self.param.iter_size > 1
        loss = float(self.backend.to_host(self.losses_of_passes)) / self.param.iter_size if several else self.net.loss()
        if not math.isfinite(loss):
            self._report_non_finite(loss)
        self.net.check()
        self.losses.add(loss)
        if display:
            self.display.show_iteration()
            self._show_update()

    # -- the update ----------------------------------------------------------------------------------

    @abstractmethod
    def rule_numbers(self, rate: float, momentum: float) -> tuple[float, ...]:
        """The rule's own numbers in this iteration, in the order of its last arguments."""

    def _send_numbers(self) -> None:
        """Put what is different in each iteration where the device finds it."""
        param = self.param
        self._rate = self._next_rate()
        momentum = policies.momentum(param, self.iteration, self._rate)
        decay = policies.weight_decay(param, self.iteration)
        l2 = param.regularization_type == "L2"
        requests = [float(action in self._requests) for action in (Action.STOP, Action.SNAPSHOT)]
        scales = [1 / param.iter_size, decay if l2 else 0.0, 0.0 if l2 else decay]
        context = self.net.context
        numbers = range(context.passes.number, self._next_pass())
        counters = [(n, context.first_sample(n) if context.first_sample else 0) for n in numbers]
        self.mailbox.send([*requests, *scales, *self.rule_numbers(self._rate, momentum)], counters)

    def _next_rate(self) -> float:
        rate, step = policies.learning_rate(self.param, self.iteration, self.current_step)
        if step != self.current_step and self.param.lr_policy == "multistep":
            self.log("MultiStep Status: Iteration %d, step = %d", self.iteration, step)
        self.current_step = step
        return rate

    def _update(self) -> None:
        values = self.mailbox.values
        self.updating.run(values[SCALE], values[L2], values[L1], values[RULE:])

    def _apply_update(self, display: bool) -> None:
        parameters = self.net.parameters
        before = self.backend.to_host(parameters.data) if self.net.debug_info else None
        self._update()
        if display or not self.backend.asynchronous:
            self._show_update(display)
        if before is not None:
            debug.log_update(parameters, before)

    def _show_update(self, display: bool = True) -> None:
        if display:
            self.log("Iteration %d, lr = %.6g", self.iteration, self._rate)
        norm = self.updating.clipped()
        if norm is not None:
            limit = self.param.clip_gradients
            self.log(
                "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor %.6g",
                norm, limit, limit / norm,
            )  # fmt: skip
        if display and self.updating.adaptive:
            self.log("Iteration %d, loss scale = %g", self.iteration, self.backend.to_host(self.updating.loss_scale))

    # -- tests ---------------------------------------------------------------------------------------

    def test_all(self) -> list[dict[str, np.ndarray]]:
        """Score every test net; for each its outputs' means over test_iter batches.

        A stop that is asked for meanwhile ends the tests where this device trains alone.
        """
        self._settle()
        with self._not_training(), self.trace.span("test"):
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
        self._settle()
        with self._not_training(), self.trace.span("snapshot"):
            self._refuse_to_save_nonsense()
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

    def _refuse_to_save_nonsense(self) -> None:
        """Look at the loss, which nobody may have done for some iterations, before it is too late."""
        if self.program.captured and self.iteration > 0 and not math.isfinite(loss := self.net.loss()):
            self._report_non_finite(loss)

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
        self._refresh_copies()
        self._snapshot_at = self.iteration

    def close(self) -> None:
        """Give graphs back and end what the nets' layers started. Callable twice."""
        self.program.drop()
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
        log.info("solver_data_type: parameters and history are kept in float32 all the same, which loses nothing")

"""The manager of a training run, one in each process; duties and names are those of NVIDIA Caffe's `parallel.cpp`.

It joins the world, agrees with the other ranks on the options, makes communicators, starts a `P2PSync` thread for each
device, waits, and reports. While it waits, the main thread takes signals, makes MPI calls for the threads where MPI
wants that, and ends all ranks when one fails.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial

from caffepy.distributed.connect import DeviceCommunicators
from caffepy.distributed.device_threads import DeviceThreads, bind_rank, device_names, device_specs
from caffepy.distributed.failures import Failures
from caffepy.distributed.liveness import Heartbeat, Watchdog, describe_error
from caffepy.distributed.placement import Cores
from caffepy.distributed.processes.launcher import refuse_foreign_launcher
from caffepy.distributed.processes.world import World, create_world
from caffepy.distributed.rendezvous import connect_training
from caffepy.distributed.store.store import ControlChannel
from caffepy.errors import RunError
from caffepy.formats.proto.caffe_pb2 import SolverState
from caffepy.training.callback import Action
from caffepy.training.consistency import agree_on_options, agree_on_start
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_sync import P2PSync
from caffepy.training.run_summary import (
    check_picture,
    check_trace,
    describe_batch,
    gather_trace,
    log_run,
    report_performance,
)
from caffepy.training.snapshot import SavedSolver
from caffepy.training.solver import Solver
from caffepy.training.stop_requests import SignalRequests
from caffepy.utils.options import TIMEOUT

logger = logging.getLogger(__name__)


class P2PManager:
    """Trains with all devices of all ranks.

    Args:
        options: the run, or a function that makes it; the function is called on every rank after they have joined, so
            that a mistake that all of them find is reported once.
        on_begin: called on rank 0 with the first device's solver when all devices are ready.
    """

    _world: World
    _failures: Failures

    def __init__(
        self, options: TrainOptions | Callable[[], TrainOptions], on_begin: Callable[[Solver], None] | None = None
    ) -> None:
        self._on_begin = on_begin
        self._source = options if callable(options) else lambda: options
        self._syncs: DeviceThreads[P2PSync] = DeviceThreads()
        self._heartbeats: list[Heartbeat] = []
        self._watchdog: Watchdog | None = None
        self._started = False
        """Whether all devices of all ranks are ready and training has begun."""

    def run(self) -> None:
        """Train to the end, or until a signal stops it.

        Raises:
            CaffepyError: whatever is wrong, if this is the only process, or if all ranks found it before training began
                (then on the root; the others raise SystemExit). An error of one rank alone ends all processes here.
        """
        with create_world() as self._world:
            self._failures = Failures(self._world, self._syncs)
            self._world.watch(self._failures.raise_first)
            try:
                self._run()
            except BaseException as error:
                self._failures.end(error)
                raise
            finally:
                self._failures.close()

    @property
    def iteration(self) -> int:
        """The iteration of this process's first solver, for progress bars. Thread-safe."""
        return self._syncs[0].heartbeat.iteration() if len(self._syncs) else 0

    @property
    def trained(self) -> SavedSolver:
        """The state of this process's first solver, after a `run` whose options keep it."""
        saved = self._syncs[0].trained
        assert saved is not None
        return saved

    def _run(self) -> None:
        channel = self._world.channel
        if channel is not None:  # without MPI nothing else tells that a rank ends while options are compared
            self._watch(channel, TIMEOUT)
        options, cores = self._agree()
        log_run(self._world, options)
        signals = self._signals(options)
        self._make_syncs(options, cores, signals)
        self._watch(channel or connect_training(self._world), options.timeout)
        signals.install()
        try:
            state = self._start()
            self._train(state)
            self._report(options)
        finally:
            signals.restore()

    # -- before training ----------------------------------------------------------------------------

    def _agree(self) -> tuple[TrainOptions, Cores]:
        world = self._world
        world.run_on_all(lambda: refuse_foreign_launcher(world.rank, world.size))
        options = world.run_on_all(self._checked_options)
        self._failures.verbose = options.verbose
        world.run_on_all(partial(check_trace, options.trace, world.rank, options.overwrite))
        world.run_on_all(partial(check_picture, options.lr_find, world.rank, options.overwrite))
        cores = bind_rank(world, gpus=options.devices is not None)
        return agree_on_options(world, options), cores

    def _checked_options(self) -> TrainOptions:
        options = self._source()
        options.check()
        return options

    def _signals(self, options: TrainOptions) -> SignalRequests:
        effects: dict[int, str] = {
            signal.SIGINT: options.sigint_effect,
            signal.SIGHUP: options.sighup_effect,
            signal.SIGTERM: options.sigterm_effect,
        }
        return SignalRequests(effects, self._failures.interrupted_again, lambda: self._failures.failed)

    def _make_syncs(self, options: TrainOptions, cores: Cores, signals: SignalRequests) -> None:
        world, count, on_gpus = self._world, len(options.local_devices), options.devices is not None
        communicators = DeviceCommunicators(world, count, on_gpus, options.compression, options.timeout)
        per_device = options.batch == "per-device"
        specs = device_specs(world, options.local_devices, cores, options.threads, per_device, options.overfit_batches)
        names = device_names(world, specs)
        for spec in specs:
            # Signals go to one thread of a process; its solver sends the request on with the gradients.
            request = signals if spec.index == 0 else _no_request
            connect = communicators.connector(spec.index, spec.device, spec.label)
            self._syncs.append(P2PSync(spec, options, connect, request, self._on_change, names))
        self._heartbeats += [sync.heartbeat for sync in self._syncs]

    def _watch(self, channel: ControlChannel, timeout: float) -> None:
        if self._watchdog is None:
            peer_failed = self._failures.peer_failed
            self._watchdog = Watchdog(self._world, channel, self._heartbeats, timeout, peer_failed)
            self._failures.watch(self._watchdog)
        self._watchdog.timeout = timeout

    # -- training -----------------------------------------------------------------------------------

    def _start(self) -> SolverState | None:
        """Start the threads, each of which builds its solver; what the root's has restored, once all are ready."""
        self._syncs.start()
        self._syncs.wait(lambda sync: sync.ready.is_set(), self._world, self._failures.raise_first)
        errors = (_as_exception(sync.error) for sync in self._syncs if sync.error is not None)
        self._world.raise_on_all(next(errors, None))
        solver = self._syncs[0].solver
        assert solver is not None
        state = agree_on_start(self._world, solver)
        if self._world.rank == 0:
            describe_batch(solver.net.param, solver.performance.batch, solver.net.context.shard)
            logger.info("Starting Optimization")
            if self._on_begin is not None:
                self._on_begin(solver)
        return state

    def _train(self, state: SolverState | None) -> None:
        """Let the threads train, and wait for them."""
        self._started = True
        for sync in self._syncs:
            sync.go(state)
        self._syncs.wait(lambda sync: sync.finished.is_set(), self._world, self._failures.raise_first)
        self._failures.raise_first()
        for sync in self._syncs:
            error = sync.error
            if error is None and not sync.completed:
                text = "training has ended before max_iter, and no device said why; go on from the last snapshot"
                error = RunError(text)
            if error is not None:
                self._failures.device_failed(error, sync.location)
        self._failures.raise_first()

    def _on_change(self, sync: P2PSync) -> None:
        """A thread is ready, has failed or has finished; called in that thread."""
        if sync.error is not None and self._started:
            self._failures.device_failed(sync.error, sync.location)
        self._syncs.changed()

    def _report(self, options: TrainOptions) -> None:
        if not options.check_only:
            report_performance(self._world, [sync.performance for sync in self._syncs], options.single_rate)
        gather_trace(self._world, options.trace, [sync.events for sync in self._syncs])


def _no_request() -> Action:
    return Action.NONE


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RunError(describe_error(error))

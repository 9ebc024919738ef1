"""The manager of a training run: one in each process, from joining the world to the performance report.

Global rank 0 makes the NCCL unique id, MPI hands it out, one `P2PSync` thread starts for each device of this process,
all share a `SharedScores` buffer, and the threads are joined. The main thread meanwhile takes signals, makes MPI calls
for the threads where MPI wants that, and ends everybody when anybody fails. Duties and names: NVIDIA Caffe's
`parallel.cpp`.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from caffepy.config.paths import PathResolver
from caffepy.data.schedule import Shard
from caffepy.errors import AbortedError, CaffepyError, ConfigError, PeerError, RunError
from caffepy.parallel.agreement import check_alike, describe_nets, describe_run
from caffepy.parallel.batch import describe_batch
from caffepy.parallel.communicators.factory import DeviceCommunicators
from caffepy.parallel.control.connect import connect_training
from caffepy.parallel.control.failure import Failure, describe_error, exit_status
from caffepy.parallel.control.watchdog import Watchdog
from caffepy.parallel.hardware.affinity import Cores, current_cores, take_cores
from caffepy.parallel.options import OptionsSource, TrainOptions
from caffepy.parallel.p2p_sync import P2PSync, Place
from caffepy.parallel.processes.create import create_world
from caffepy.parallel.processes.gpu_assignment import refuse_shared, share_gpus
from caffepy.parallel.processes.launcher import find_launcher, refuse_foreign_launcher
from caffepy.parallel.processes.world import World
from caffepy.parallel.signals import SignalRequests
from caffepy.proto.caffe_pb2 import SolverParameter, SolverState
from caffepy.report import format_report
from caffepy.snapshot.files import newest_snapshot
from caffepy.solvers.callbacks import Action
from caffepy.trace import pack_events, unpack_events, write_trace

logger = logging.getLogger(__name__)

_POLL = 0.2
"""Seconds between looks at the threads when nothing wakes the manager."""
_JOIN_SECONDS = 2.0
"""How long a failed run waits for its threads, all together."""
_LAST_RESORT_SECONDS = 6.0
"""When a process ends after a failure, whatever its main thread is stuck in."""
_INTERRUPTED = 130
_TELL_SECONDS = 1.0
"""How long the others may take to hear of a failure, and rank 0 to answer."""


class P2PManager:
    """Trains with all devices of all ranks.

    Args:
        options: the run, or a function that makes it; the function is called on every rank after they have joined, so
            that a mistake that all of them find is reported once.
    """

    def __init__(self, options: TrainOptions | OptionsSource) -> None:
        self._source: OptionsSource = options if callable(options) else lambda: options
        self._world = World()
        self._syncs: list[P2PSync] = []
        self._watchdog: Watchdog | None = None
        self._failure: Failure | None = None
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._changed = threading.Event()
        self._heard = threading.Event()
        """Set when another rank has told the user of a failure."""
        self._started = False
        self._verbose = False

    def run(self) -> None:
        """Train to the end, or until a signal stops it.

        Raises:
            CaffepyError: whatever is wrong, if this is the only process, or if all ranks found it before training began
                (then on the root; the others raise SystemExit). An error of one rank alone ends all processes here.
        """
        try:
            self._world = create_world()
            self._world.while_waiting = self._raise_failure
            self._run()
        except BaseException as error:
            self._end(error)
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    @property
    def iteration(self) -> int:
        """The iteration that this process's first solver has come to; for progress bars, in any thread."""
        return self._syncs[0].heartbeat.iteration() if self._syncs else 0

    # -- the run ------------------------------------------------------------------------------------

    def _run(self) -> None:
        world = self._world
        world.run_on_all(lambda: refuse_foreign_launcher(world.rank, world.size))
        options = world.run_on_all(self._options)
        self._verbose = options.verbose
        world.run_on_all(partial(_check_trace, options, world.rank))
        cores = self._take_cores(options)
        options = self._settle(options)
        signals = SignalRequests(
            {
                signal.SIGINT: options.sigint_effect,
                signal.SIGHUP: options.sighup_effect,
                signal.SIGTERM: options.sigterm_effect,
            },
            self._interrupted_again,
            lambda: self._failure is not None,
        )
        self._make_syncs(options, cores, signals)
        self._watchdog = Watchdog(
            world, connect_training(world), [sync.heartbeat for sync in self._syncs], options.timeout, self._peer_failed
        )
        self._watchdog.start()
        signals.install()
        try:
            self._train(options)
        finally:
            signals.restore()

    def _options(self) -> TrainOptions:
        options = self._source()
        options.check()
        return options

    def _take_cores(self, options: TrainOptions) -> Cores:
        if find_launcher() is None:
            return current_cores()
        return take_cores(self._world.local_rank, self._world.local_size, divide=options.devices is None)

    def _settle(self, options: TrainOptions) -> TrainOptions:
        """What all ranks must have alike: checked, or taken from the root."""
        world = self._world
        options = self._share_gpus(options)
        names = world.all_gather(None if options.devices is None else len(options.devices))
        counts = world.all_gather(len(options.local_devices))
        for rank in range(1, world.size):
            if names[rank] != names[0] or counts[rank] != counts[0]:
                error = ConfigError(
                    f"ranks have different devices: {world.name(0)} has {_count(names[0], counts[0])}, "
                    f"{world.name(rank)} has {_count(names[rank], counts[rank])}; give every rank as many"
                )
                world.raise_on_all(error)
        self._check_gpus(options)
        if world.size > 1:
            check_alike(world, world.run_on_all(lambda: describe_run(options)))
        solver = SolverParameter()
        solver.CopyFrom(options.solver)
        if solver.random_seed < 0:
            solver.random_seed = secrets.randbelow(1 << 31)
        solver.random_seed = world.broadcast(solver.random_seed)
        found = world.run_on_all(lambda: _find_snapshot(options) if world.rank == 0 else None)
        return replace(
            options, solver=solver, snapshot=world.broadcast(found), weights=world.broadcast(options.weights)
        )

    def _share_gpus(self, options: TrainOptions) -> TrainOptions:
        """Where nobody has said which GPUs a rank takes, its part of its machine's."""
        shares = self._world.all_gather(options.share_gpus)
        if not all(shares):
            if any(shares):
                error = ConfigError("some ranks name their devices and others do not: give all of them --gpus")
                self._world.raise_on_all(error)
            return options
        from caffepy.parallel.communicators.nccl import gpu_identity

        found = options.devices or []
        seen = self._world.run_on_all(lambda: [(device, gpu_identity(device)) for device in found])
        return replace(options, devices=share_gpus(self._world, seen))

    def _check_gpus(self, options: TrainOptions) -> None:
        """Refuse two ranks of one machine that name the same GPU; NCCL would say no more than 'invalid usage'."""
        devices = options.devices
        if devices is None or self._world.size == 1:
            return
        from caffepy.parallel.communicators.nccl import gpu_identity

        refuse_shared(self._world, self._world.run_on_all(lambda: [gpu_identity(device) for device in devices]))

    def _make_syncs(self, options: TrainOptions, cores: Cores, signals: SignalRequests) -> None:
        devices = options.local_devices
        count = len(devices)
        world = self._world
        communicators = DeviceCommunicators(
            world, count, options.devices is not None, options.compression, options.timeout
        )
        threads = options.threads or max(1, cores.count // count)
        labels = [_label(i, device, count) for i, device in enumerate(devices)]
        names = self._name_devices(labels)
        for i, device in enumerate(devices):
            shard = Shard(world.rank * count + i, world.size * count, count, options.per_device_batch)
            place = Place(i, device, labels[i], None if device is not None else threads, shard)
            request = signals if i == 0 else _nothing
            connect = partial(communicators.connect, i)
            self._syncs.append(P2PSync(place, options, connect, request, self._thread_changed, names))

    def _train(self, options: TrainOptions) -> None:
        for sync in self._syncs:
            sync.start()
        self._wait(lambda sync: sync.ready.is_set())
        errors = (_as_exception(sync.error) for sync in self._syncs if sync.error is not None)
        self._world.raise_on_all(next(errors, None))
        state = self._agree_on_start()
        if self._world.rank == 0:
            describe_batch(self._syncs[0])
            logger.info("Starting Optimization")
        self._started = True
        for sync in self._syncs:
            sync.go(state)
        self._wait(lambda sync: sync.finished.is_set())
        self._raise_failure()
        self._refuse_early_end()
        self._report(options)
        self._write_trace(options)

    def _agree_on_start(self) -> SolverState | None:
        """Refuse ranks that read different files under the same name; returns what the root has restored, if it has."""
        world, solver = self._world, self._syncs[0].solver
        assert solver is not None
        if world.size > 1:
            check_alike(world, world.run_on_all(lambda: describe_nets(solver)))
        restored = world.broadcast(None if solver.restored is None else solver.restored.SerializeToString())
        return None if restored is None else SolverState.FromString(restored)

    def _name_devices(self, labels: list[str]) -> list[str]:
        """What messages call each of all devices, given the labels of this rank's."""
        world = self._world
        several = world.size > 1
        return [
            f"{world.name(rank)}, device {label}" if several else f"device {label}"
            for rank, others in enumerate(world.all_gather(labels))
            for label in others
        ]

    def _wait(self, reached: Callable[[P2PSync], bool]) -> None:
        """Wait until all threads have come to a point, or one has failed."""
        while not all(reached(sync) for sync in self._syncs):
            self._raise_failure()
            self._changed.clear()
            if self._world.serves:
                self._world.serve()
            elif not all(reached(sync) for sync in self._syncs):
                self._changed.wait(_POLL)

    def _refuse_early_end(self) -> None:
        """Raise where training has ended, nobody has asked for that and nobody knows why."""
        for sync in self._syncs:
            error, solver = sync.error, sync.solver
            if solver is None or (solver.iteration < solver.param.max_iter and not solver.stopped_early):
                text = "training has ended before max_iter, and no device said why; go on from the last snapshot"
                error = error or RunError(text)
            if error is not None:
                self._fail(Failure(self._locate(sync, error), exit_status(error), error=error))
        self._raise_failure()

    def _report(self, options: TrainOptions) -> None:
        ranks = self._world.all_gather([sync.performance for sync in self._syncs])
        if self._world.rank == 0:
            for line in format_report(ranks, options.single_rate):
                logger.info("%s", line)

    def _write_trace(self, options: TrainOptions) -> None:
        """Gather all devices' events at the root, which writes them as one file."""
        if options.trace is None:
            return
        gathered = self._world.all_gather(pack_events([sync.events for sync in self._syncs]))
        if self._world.rank == 0:
            spans = write_trace(options.trace, (device for rank in gathered for device in unpack_events(rank)))
            if spans == 0:
                logger.warning("%s is empty: no iteration of --trace-iterations was trained", options.trace)
            else:
                logger.info("Wrote a trace of %d spans to %s: open it in https://ui.perfetto.dev", spans, options.trace)

    # -- failures -----------------------------------------------------------------------------------

    def _thread_changed(self, sync: P2PSync) -> None:
        """A solver thread is ready, has failed or has finished; called in that thread."""
        error = sync.error
        if error is not None and self._started:
            # Whoever is released from a wait is so after the failure was kept, which this one then does not replace.
            self._fail(Failure(self._locate(sync, error), exit_status(error), error=error))
        self._changed.set()

    def _locate(self, sync: P2PSync, error: BaseException) -> str:
        """The error with its place before it, as far as there are several."""
        world = self._world
        parts = [world.name(world.rank)] if world.size > 1 else []
        if sync.world_size > 1:
            parts += [f"device {sync.place.label}", f"iteration {sync.heartbeat.iteration()}"]
        text = describe_error(error)
        if isinstance(error, AbortedError):
            text = f"training was stopped, and no device said why ({text}); go on from the last snapshot"
        return f"{', '.join(parts)}: {text}" if parts else text

    def _peer_failed(self, failure: Failure) -> None:
        """The watchdog found out; called in its thread, while the main thread may be stuck in MPI."""
        if failure.reported:
            self._heard.set()
        self._fail(failure)
        if self._world.size > 1:
            self._report_failure()
            timer = threading.Timer(_LAST_RESORT_SECONDS, self._world.end, (failure.status,))
            timer.daemon = True
            timer.start()

    def _fail(self, failure: Failure) -> None:
        """Keep the first failure and release everybody in this process who waits."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
        for sync in self._syncs:
            sync.abort()
        self._changed.set()

    def _raise_failure(self) -> None:
        """In the main thread: raise what another thread met."""
        failure = self._failure
        if failure is None:
            return
        error = failure.error
        if self._world.size > 1 or error is None:
            raise PeerError(failure.message) from error
        if isinstance(error, CaffepyError):
            error.args = (failure.message,)
            raise error
        if len(self._syncs) > 1:
            raise RunError(failure.message) from error
        raise error

    def _end(self, error: BaseException) -> None:
        """Release and join this process's threads; end the world too, unless all ranks have agreed on the error."""
        world = self._world
        if self._failure is None:
            place = f"{world.name(world.rank)}: " if world.size > 1 else ""
            self._fail(Failure(f"{place}{describe_error(error)}", exit_status(error), error=error))
        failure = self._failure
        assert failure is not None
        alone = world.size == 1 or world.ended_together
        if not alone:
            self._report_failure(through_root=True)
        deadline = time.monotonic() + _JOIN_SECONDS
        for sync in self._syncs:
            sync.join(max(0.0, deadline - time.monotonic()))
        if not alone:
            world.end(failure.status)

    def _report_failure(self, through_root: bool = False) -> None:
        """Print the failure, unless some rank has, and tell the other ranks; returns when that is done.

        A second thread that comes here waits for the first: whoever returns may end the process.

        Args:
            through_root: leave the printing to rank 0, so that ranks that fail at once report one error; if it does not
                answer, print all the same. Not for the watchdog's thread, which hears the answer.
        """
        with self._reporting:
            with self._lock:
                failure = self._failure
                if failure is None or failure.reported:
                    return
                self._failure = replace(failure, reported=True)
            if self._heard.is_set():
                return
            if through_root and self._world.rank != 0 and self._watchdog is not None:
                self._watchdog.tell_failure(failure)
                if self._heard.wait(_TELL_SECONDS):
                    if self._verbose:
                        logger.debug("%s", failure.message, exc_info=failure.error)
                    return
            logger.error("%s", failure.message, exc_info=failure.error if self._verbose else None)
            if self._watchdog is not None:
                self._watchdog.tell_failure(replace(failure, reported=True))

    def _interrupted_again(self) -> None:
        message = "interrupted again: ending at once"
        logger.error(message)
        if self._watchdog is not None:
            # In a thread: this handler may have interrupted the main thread where that holds the channel's lock.
            failure = Failure(message, _INTERRUPTED, reported=True)
            telling = threading.Thread(target=self._watchdog.tell_failure, args=(failure,), daemon=True)
            telling.start()
            telling.join(_TELL_SECONDS)
        self._world.end(_INTERRUPTED)


def _check_trace(options: TrainOptions, rank: int) -> None:
    """Refuse a trace that the root could not write once training is over."""
    if rank == 0 and options.trace is not None and not options.trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace {options.trace}: there is no folder {options.trace.parent}; make it first")


def _find_snapshot(options: TrainOptions) -> Path | None:
    """The snapshot to resume from, on the root."""
    if not options.resume_newest:
        return options.snapshot
    prefix = (options.resolve or PathResolver(None)).output(options.solver.snapshot_prefix)
    newest = newest_snapshot(prefix)
    if newest is None:
        logger.info("no whole snapshot with the prefix %s: training starts from the beginning", prefix)
    return newest


def _label(index: int, device: int | None, count: int) -> str:
    """What messages call one of this rank's devices."""
    if device is not None:
        return str(device)
    return f"CPU {index}" if count > 1 else "CPU"


def _nothing() -> Action:
    """Signals go to one thread of a process; its wishes reach the others with the gradients."""
    return Action.NONE


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RunError(describe_error(error))


def _count(gpus: int | None, devices: int) -> str:
    kind = "CPU solver" if gpus is None else "GPU"
    return f"{devices} {kind}{'s' if devices != 1 else ''}"

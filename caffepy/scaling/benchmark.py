"""Times all-reduces with the communicators that training uses, and checks their results.

The numbers are those of nccl-tests: algorithm bandwidth is bytes of the array a
second, bus bandwidth that times 2 (n - 1) / n, what each of n devices sends and receives in a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from caffepy.backend import Backend, create_backend
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.connect import Connector, DeviceCommunicators
from caffepy.distributed.device_threads import DeviceThread, DeviceThreads, bind_rank
from caffepy.distributed.failures import Failures
from caffepy.distributed.liveness import Heartbeat, Watchdog
from caffepy.distributed.processes.world import World
from caffepy.distributed.rendezvous import connect_training
from caffepy.errors import ConfigError, PeerError
from caffepy.utils.clocks import suspend_aware_seconds
from caffepy.utils.options import TIMEOUT

_WARM_UP = 5
_TOGETHER = 20
"""All-reduces that a GPU gets at once: a launch takes as long as a small one, and training puts them in graphs."""
_PATTERN = 7
_GRACE = 10.0
"""How much longer than the watchdog the main thread waits for a result: the watchdog knows the late device."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of `caffepy bench allreduce`.

    Args:
        devices: this rank's GPUs; None: the CPU.
        solvers: threads of this rank where it is the CPU.
        communicator: ``nccl``, ``mpi``, ``tcp`` or ``local``.
        sizes: of the arrays, in bytes.
        iterations: measurements of each size.
        dtype: of the elements.
        timeout: longest wait for one size, in seconds.
    """

    devices: list[int] | None
    solvers: int
    communicator: str
    sizes: tuple[int, ...]
    iterations: int = 20
    dtype: str = "float32"
    timeout: float = TIMEOUT

    @property
    def local_devices(self) -> list[int | None]:
        """One entry for each thread of this rank."""
        return [None] * self.solvers if self.devices is None else list(self.devices)

    def check(self, ranks: int, transport: str = "mpi") -> None:
        """Refuse options that do not go together.

        Args:
            ranks: processes in all.
            transport: `World.transport`.

        Raises:
            ConfigError: the communicator does not connect these devices, or there is only one device.
        """
        kind = self.communicator
        if (kind == "nccl") != (self.devices is not None):
            wanted = "GPUs; name them with --gpus" if kind == "nccl" else "arrays in host memory; say --cpu"
            raise ConfigError(f"--communicator {kind} is for {wanted}")
        if kind == "local" and ranks > 1:
            raise ConfigError("--communicator local connects threads of one process; start one, with --cpu-solvers")
        if kind in ("mpi", "tcp") and ranks == 1:
            raise ConfigError(f"--communicator {kind} connects processes: start several with caffepy launch or mpirun")
        if kind in ("mpi", "tcp") and kind != transport:
            raise ConfigError(f"--communicator {kind}: these processes are connected by {transport}; leave it out")
        if kind == "mpi" and self.dtype == "float16":
            raise ConfigError("--dtype float16 is not for --communicator mpi; MPI has no such type")
        if len(self.local_devices) * ranks < 2:
            raise ConfigError("an all-reduce needs several devices: --cpu-solvers 2, two GPUs, or two ranks")


@dataclass(frozen=True)
class Timing:
    """The result for one size.

    Args:
        size: bytes of the array.
        count: its elements.
        seconds: the median of an all-reduce on the slowest device.
        wrong: wrong elements, on all devices together.
        devices: the number of devices.
    """

    size: int
    count: int
    seconds: float
    wrong: int
    devices: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds if self.seconds > 0 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """algorithm_bandwidth * 2 (n - 1) / n."""
        return self.algorithm_bandwidth * 2 * (self.devices - 1) / self.devices


def measure_size(
    backend: Backend, communicator: Communicator, size: int, options: BenchmarkOptions, heartbeat: Heartbeat
) -> Timing:
    """Measure and check all-reduces of one size; called by all devices' threads."""
    dtype, what = options.dtype, f"an all-reduce of {size} bytes"
    devices = communicator.size
    count = max(1, size // np.dtype(dtype).itemsize)
    base = np.arange(count) % _PATTERN
    array = backend.zeros((count,), dtype)
    wait = partial(communicator.wait_on_device, backend.synchronize)

    backend.from_host((base + communicator.rank + 1).astype(dtype), array)
    with heartbeat.collective(what):
        communicator.all_reduce(array, average=False)
        wait()
    total = (base * devices + devices * (devices + 1) // 2).astype(dtype)
    wrong = int(np.count_nonzero(backend.to_host(array) != total))

    backend.from_host((base + communicator.rank + 1).astype(dtype), array)
    marked = partial(heartbeat.collective, what)
    seconds = _time(backend, partial(communicator.all_reduce, array), wait, options.iterations, marked)
    mean = (base + (devices + 1) / 2).astype(dtype)
    close = np.isclose(backend.to_host(array), mean, rtol=1e-2 if dtype == "float16" else 1e-5)
    wrong += int(np.count_nonzero(~close))

    measured = np.zeros((devices, 2))
    measured[communicator.rank] = seconds, wrong
    with heartbeat.collective("the sum of the results"):
        measured = communicator.sum(measured)
    return Timing(count * np.dtype(dtype).itemsize, count, measured[:, 0].max(), int(measured[:, 1].sum()), devices)


def _time(
    backend: Backend,
    work: Callable[[], None],
    wait: Callable[[], None],
    iterations: int,
    marked: Callable[[], AbstractContextManager[None]],
) -> float:
    """The median seconds of `work`; asynchronous work is captured and launched `_TOGETHER` times at once."""
    together = _TOGETHER if backend.asynchronous else 1

    def several() -> None:
        for _ in range(together):
            work()

    with marked():
        several()
        wait()
    run = backend.capture(several).launch if backend.captures else several
    seconds = []
    for _ in range(_WARM_UP + iterations):
        with marked():
            begin = backend.record_timed_event()
            run()
            end = backend.record_timed_event()
            wait()
        seconds.append(end.seconds_since(begin) / together)
    return median(seconds[_WARM_UP:])


class _BenchmarkThread(DeviceThread):
    """Calls a function with its backend and communicator; the other arguments are those of `DeviceThread`.

    Args:
        measure: called in the thread.
    """

    def __init__(self, measure: Callable[[Backend, Communicator], None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._measure = measure

    def _create_backend(self) -> Backend:
        return create_backend(self._device, 1)

    def _work(self, backend: Backend) -> None:
        self._communicator = self._connect()
        self._measure(backend, self._communicator)
        self._communicator.barrier()


class AllReduceBenchmark:
    """A benchmark of all devices of all ranks.

    Args:
        world: the processes.
        options: what to measure, checked; the same on all ranks except for the GPUs, which `assign_gpus` gave out.
        on_timing: called with each result, in a thread, on every rank.
    """

    def __init__(self, world: World, options: BenchmarkOptions, on_timing: Callable[[Timing], None]) -> None:
        self._world = world
        self._options = options
        self._on_timing = on_timing
        self._threads: DeviceThreads[_BenchmarkThread] = DeviceThreads()
        self._failures = Failures(world, self._threads)
        self._last_result = suspend_aware_seconds()
        self._heartbeats: list[Heartbeat] = []

    def run(self) -> None:
        """Measure.

        Raises:
            PeerError: an operation has lasted longer than the timeout; the message says which device is late.
            CaffepyError: the first failure, if this is the only process; several processes end with it.
        """
        world, options = self._world, self._options
        bind_rank(world, gpus=options.devices is not None)
        self._make_threads()
        channel = world.channel or connect_training(world)
        self._failures.watch(Watchdog(world, channel, self._heartbeats, options.timeout, self._failures.peer_failed))
        try:
            self._threads.start()
            self._threads.wait(lambda thread: thread.finished.is_set(), world, self._check)
            self._failures.raise_first()
        except BaseException as error:
            self._failures.end(error)
            raise
        finally:
            self._failures.close()

    def _make_threads(self) -> None:
        options, devices = self._options, self._options.local_devices
        on_gpus = options.devices is not None
        connect = DeviceCommunicators(self._world, len(devices), on_gpus, timeout=options.timeout).connect
        for index, device in enumerate(devices):
            self._heartbeats.append(Heartbeat(f"CPU {index}" if device is None else str(device)))
            connector = Connector(partial(connect, index))
            own = partial(self._measure, index), f"bench {index}", device, str(device), connector
            self._threads.append(_BenchmarkThread(*own, partial(self._on_change, index)))

    def _measure(self, index: int, backend: Backend, communicator: Communicator) -> None:
        options, heartbeat = self._options, self._heartbeats[index]
        for size in options.sizes:
            timing = measure_size(backend, communicator, size, options, heartbeat)
            if index == 0:  # all devices have the same results
                self._last_result = suspend_aware_seconds()
                self._on_timing(timing)

    def _on_change(self, index: int) -> None:
        error = self._threads[index].error
        if error is not None:
            self._failures.device_failed(error, "")
        self._threads.changed()

    def _check(self) -> None:
        """Raise the first failure, or PeerError if there was no result for too long."""
        self._failures.raise_first()
        seconds = self._options.timeout + _GRACE
        if suspend_aware_seconds() - self._last_result > seconds:
            raise PeerError(f"no all-reduce has ended for {seconds:g} s: another device is stuck or gone")

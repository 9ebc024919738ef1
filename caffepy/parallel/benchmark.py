"""Times all-reduces with the communicators that training uses, and checks their results.

Owns the threads and the timing; the numbers are those of nccl-tests: algorithm bandwidth is bytes of the array a
second, bus bandwidth that times 2 (n - 1) / n, what each of n devices sends and receives in a ring.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from caffepy.awake import awake_seconds
from caffepy.backend import Backend, create_backend
from caffepy.errors import AbortedError, ConfigError, PeerError
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.communicators.factory import DeviceCommunicators
from caffepy.parallel.control.failure import describe_error, exit_status
from caffepy.parallel.hardware.affinity import bind_near_gpu, take_cores
from caffepy.parallel.processes.gpu_assignment import refuse_shared
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.parallel.processes.world import World

logger = logging.getLogger(__name__)

_POLL = 0.05
_WARM_UP = 5
_TOGETHER = 20
"""All-reduces that a GPU gets at once: a launch takes as long as a small one, and training puts them in graphs."""
_JOIN_SECONDS = 2.0
_PATTERN = 7


@dataclass(frozen=True)
class BenchmarkOptions:
    """What is to be measured.

    Args:
        devices: this rank's GPUs; None: the CPU.
        solvers: threads of this rank where it is the CPU.
        communicator: ``nccl``, ``mpi`` or ``local``.
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
    timeout: float = 300.0

    @property
    def local_devices(self) -> list[int | None]:
        """One entry for each thread of this rank."""
        return [None] * self.solvers if self.devices is None else list(self.devices)

    def check(self, ranks: int) -> None:
        """Refuse what cannot be measured.

        Args:
            ranks: processes in all.

        Raises:
            ConfigError: a communicator that does not connect these devices, or a single device.
        """
        kind = self.communicator
        if (kind == "nccl") != (self.devices is not None):
            wanted = "GPUs; name them with --gpus" if kind == "nccl" else "arrays in host memory; say --cpu"
            raise ConfigError(f"--communicator {kind} is for {wanted}")
        if kind == "local" and ranks > 1:
            raise ConfigError("--communicator local connects threads of one process; start one, with --cpu-solvers")
        if kind == "mpi" and ranks == 1:
            raise ConfigError("--communicator mpi connects processes: start several with caffepy launch or mpirun")
        if kind == "mpi" and self.dtype == "float16":
            raise ConfigError("--dtype float16 is not for --communicator mpi; MPI has no such type")
        if len(self.local_devices) * ranks < 2:
            raise ConfigError("one device has nobody to reduce with: --cpu-solvers 2, two GPUs, or two ranks")


@dataclass(frozen=True)
class Timing:
    """One size's result.

    Args:
        size: bytes of the array.
        count: its elements.
        seconds: the median of an all-reduce on the slowest device.
        wrong: elements with a wrong result, on all devices together.
        devices: how many took part.
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


def measure_size(backend: Backend, communicator: Communicator, size: int, iterations: int, dtype: str) -> Timing:
    """Measure and check all-reduces of one size; called by all devices' threads."""
    devices = communicator.size
    count = max(1, size // np.dtype(dtype).itemsize)
    base = np.arange(count) % _PATTERN
    array = backend.zeros((count,), dtype)
    wait = partial(communicator.wait_on_device, backend.synchronize)

    backend.from_host((base + communicator.rank + 1).astype(dtype), array)
    communicator.all_reduce(array, average=False)
    wait()
    total = (base * devices + devices * (devices + 1) // 2).astype(dtype)
    wrong = int(np.count_nonzero(backend.to_host(array) != total))

    backend.from_host((base + communicator.rank + 1).astype(dtype), array)
    seconds = _time(backend, partial(communicator.all_reduce, array), wait, iterations)
    mean = (base + (devices + 1) / 2).astype(dtype)
    close = np.isclose(backend.to_host(array), mean, rtol=1e-2 if dtype == "float16" else 1e-5)
    wrong += int(np.count_nonzero(~close))

    everybody = np.zeros((devices, 2))
    everybody[communicator.rank] = seconds, wrong
    everybody = communicator.sum(everybody)
    return Timing(count * np.dtype(dtype).itemsize, count, everybody[:, 0].max(), int(everybody[:, 1].sum()), devices)


def _time(backend: Backend, work: Callable[[], None], wait: Callable[[], None], iterations: int) -> float:
    """The median seconds of `work`: by itself where it has happened on return, else many of them at once, captured."""
    together = _TOGETHER if backend.asynchronous else 1

    def several() -> None:
        for _ in range(together):
            work()

    several()
    wait()
    run = backend.capture(several).launch if backend.captures else several
    seconds = []
    for _ in range(_WARM_UP + iterations):
        begin = backend.record_timed_event()
        run()
        end = backend.record_timed_event()
        wait()
        seconds.append(end.seconds_since(begin) / together)
    return median(seconds[_WARM_UP:])


class _Device(threading.Thread):
    """One device's part.

    Args:
        index: which of this rank's.
        options: what to measure.
        connect: makes a device's communicator; called in the thread.
        on_timing: told each result.
    """

    def __init__(
        self,
        index: int,
        options: BenchmarkOptions,
        connect: Callable[[int], Communicator],
        on_timing: Callable[[Timing], None],
    ) -> None:
        super().__init__(name=f"bench {index}", daemon=True)
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self.communicator: Communicator | None = None
        self._index = index
        self._options = options
        self._connect = connect
        self._on_timing = on_timing

    def run(self) -> None:
        """Connect, measure all sizes, close."""
        device = self._options.local_devices[self._index]
        backend: Backend | None = None
        try:
            if device is not None:
                from caffepy.backend.cuda.device import device_properties

                bind_near_gpu(device_properties(device).pci_bus_id, str(device))
            backend = create_backend(device, 1)
            with backend.activate():
                self.communicator = self._connect(self._index)
                self._measure(backend, self.communicator)
        except BaseException as error:
            self.error = error
        finally:
            if self.communicator is not None:
                self.communicator.abort() if self.error is not None else self.communicator.close()
            if backend is not None:
                backend.close()
            self.finished.set()

    def _measure(self, backend: Backend, communicator: Communicator) -> None:
        options = self._options
        for size in options.sizes:
            timing = measure_size(backend, communicator, size, options.iterations, options.dtype)
            self._on_timing(timing)
        communicator.barrier()


class AllReduceBenchmark:
    """A benchmark of all devices of all ranks.

    Args:
        world: the processes.
        options: what to measure, the same on all ranks but for the GPUs.
        on_timing: told each result, in a thread, on every rank.
    """

    def __init__(self, world: World, options: BenchmarkOptions, on_timing: Callable[[Timing], None]) -> None:
        self._world = world
        self._options = options
        self._on_timing = on_timing
        self._devices: list[_Device] = []
        self._heard = awake_seconds()

    def run(self) -> None:
        """Measure.

        Raises:
            ConfigError: what is asked for does not go together.
            CaffepyError: whatever failed, if this is the only process; several end with the first that fails.
        """
        world = self._world
        world.run_on_all(lambda: self._options.check(world.size))
        if find_launcher() is not None:
            take_cores(world.local_rank, world.local_size, divide=self._options.devices is None)
        self._make_devices()
        try:
            self._wait()
        except BaseException as error:
            self._end(error)
            raise

    def _make_devices(self) -> None:
        options, world = self._options, self._world
        count = len(options.local_devices)
        if options.devices is not None:
            self._refuse_shared_gpus(options.devices)
        connect = DeviceCommunicators(world, count, options.devices is not None, timeout=options.timeout).connect
        self._devices = [_Device(i, options, connect, self._hear if i == 0 else _ignore) for i in range(count)]
        for device in self._devices:
            device.start()

    def _refuse_shared_gpus(self, devices: list[int]) -> None:
        from caffepy.parallel.communicators.nccl import check_nccl, gpu_identity

        self._world.run_on_all(check_nccl)
        refuse_shared(self._world, self._world.run_on_all(lambda: [gpu_identity(device) for device in devices]))

    def _hear(self, timing: Timing) -> None:
        self._heard = awake_seconds()
        self._on_timing(timing)

    def _wait(self) -> None:
        """Serve and wait until all threads have ended.

        Raises:
            PeerError: nothing has ended for too long.
        """
        while not all(device.finished.is_set() for device in self._devices):
            failed = [device.error for device in self._devices if device.error is not None]
            if failed:
                raise _culprit(failed)
            if awake_seconds() - self._heard > self._options.timeout:
                seconds = self._options.timeout
                raise PeerError(f"no all-reduce has ended for {seconds:g} s: another device is stuck or gone")
            if self._world.serves:
                self._world.serve()
            else:
                next(device for device in self._devices if not device.finished.is_set()).finished.wait(_POLL)
        if failed := [device.error for device in self._devices if device.error is not None]:
            raise _culprit(failed)

    def _end(self, error: BaseException) -> None:
        """Release this process's threads, and end the others."""
        for device in self._devices:
            if device.communicator is not None:
                device.communicator.abort()
        deadline = time.monotonic() + _JOIN_SECONDS
        for device in self._devices:
            device.join(max(0.0, deadline - time.monotonic()))
        if self._world.size > 1:
            logger.error("%s: %s", self._world.name(self._world.rank), describe_error(error))
            self._world.end(exit_status(error))


def _culprit(errors: list[BaseException]) -> BaseException:
    """The error that came first: the others were released because of it."""
    return next((error for error in errors if not isinstance(error, AbortedError)), errors[0])


def _ignore(timing: Timing) -> None:
    """All devices have the same results; one of each process tells them."""

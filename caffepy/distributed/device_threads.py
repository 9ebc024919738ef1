"""The device threads of this process: number, label, cores and part of the data of each; their start, wait and end."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from caffepy.backend import Backend
from caffepy.data.sharding import Shard
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.connect import Connector
from caffepy.distributed.placement import Cores, bind_near_gpu, current_cores, take_cores
from caffepy.distributed.processes.launcher import find_launcher
from caffepy.distributed.processes.world import World

_TRAININGS = itertools.count(1)


@dataclass(frozen=True)
class DeviceSpec:
    """One device of this process.

    Args:
        index: its number in this process.
        device: its GPU, or None for the CPU.
        label: what messages and the report call it.
        threads: its CPU threads; None leaves the number to the backend.
        shard: its part of the data; holds its number among all devices.
    """

    index: int
    device: int | None
    label: str
    threads: int | None
    shard: Shard

    @property
    def full_name(self) -> str:
        """The device as the trace calls it: ``rank 1 on host7: GPU 0``."""
        device = self.label if self.device is None else f"GPU {self.label}"
        return f"rank {self.shard.rank // self.shard.devices_per_rank} on {socket.gethostname()}: {device}"


def device_specs(
    world: World,
    devices: Sequence[int | None],
    cores: Cores,
    threads: int | None = None,
    per_device_batch: bool = False,
    overfit_batches: int = 0,
) -> list[DeviceSpec]:
    """The devices that this rank computes with.

    Args:
        world: the processes.
        devices: GPUs, or None for each solver on the CPU.
        cores: the rank's, which its CPU solvers divide.
        threads: CPU threads of each solver; None: its part of `cores`.
        per_device_batch: see `Shard`; so is `overfit_batches`.
    """
    count = len(devices)
    threads = threads or max(1, cores.count // count)
    training = next(_TRAININGS)
    return [
        DeviceSpec(
            index,
            device,
            _label(index, device, count),
            threads if device is None else None,
            Shard(world.rank * count + index, world.size * count, count, per_device_batch, overfit_batches, training),
        )
        for index, device in enumerate(devices)
    ]


def device_names(world: World, specs: Sequence[DeviceSpec]) -> list[str]:
    """What messages call each device of all ranks, given this rank's; called by all ranks."""
    several = world.size > 1
    return [
        f"{world.name(rank)}, device {label}" if several else f"device {label}"
        for rank, labels in enumerate(world.all_gather([spec.label for spec in specs]))
        for label in labels
    ]


def bind_rank(world: World, gpus: bool) -> Cores:
    """The cores of this rank: all that the process may use, or under a launcher the rank's part of the host.

    Args:
        world: the processes.
        gpus: the rank computes on GPUs; then the ranks of a host share its cores.
    """
    if find_launcher() is None:
        return current_cores()
    return take_cores(world.local_rank, world.local_size, divide=not gpus)


def _label(index: int, device: int | None, count: int) -> str:
    if device is not None:
        return str(device)
    return f"CPU {index}" if count > 1 else "CPU"


_POLL = 0.2
"""Seconds between two checks while no thread reports a change."""


class DeviceThread(ABC):
    """A thread that owns a device's backend and communicator.

    Args:
        name: the thread's.
        device: its GPU, or None for the CPU.
        label: what messages call the device.
        connect: makes the thread's communicator; called in the thread, with the device current.
        on_change: called in the thread when it has failed or finished.
    """

    def __init__(
        self,
        name: str,
        device: int | None,
        label: str,
        connect: Connector,
        on_change: Callable[[], None],
    ) -> None:
        self.error: BaseException | None = None
        """The first error of the thread."""
        self.finished = threading.Event()
        self._device = device
        self._label = label
        self._connect = connect
        self._on_change = on_change
        self._communicator: Communicator | None = None
        self._backend: Backend | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread (StartInternalThread in Caffe's `internal_thread.cpp`)."""
        self._thread.start()

    def abort(self) -> None:
        """Wake the thread from all waits for other devices. Callable from any thread."""
        # The thread may wait for its communicator, or in it, or have none yet.
        self._connect.give_up()
        if self._communicator is not None:
            self._communicator.abort()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end (WaitAll); returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @abstractmethod
    def _create_backend(self) -> Backend:
        """The device's backend; `_run` closes it."""

    @abstractmethod
    def _work(self, backend: Backend) -> None:
        """What the thread is for; called with the device current. Sets `_communicator`, which `_close` closes."""

    def _release(self) -> None:  # noqa: B027 (a benchmark has nothing to release)
        """Release what uses the communicator; called before that is closed."""

    def _run(self) -> None:
        try:
            # Before the backend: pinned memory is placed near the core that takes it, and later threads inherit the
            # mask.
            self._bind()
            self._backend = self._create_backend()
            with self._backend.activate():
                self._work(self._backend)
        except BaseException as error:
            self._fail(error)
        try:
            self._close()
        except BaseException as error:
            self._fail(error)
        self.finished.set()
        self._on_change()

    def _bind(self) -> None:
        """Bind the thread to cores near its GPU, before it allocates memory and starts further threads."""
        if self._device is not None:
            from caffepy.backend.cuda.device import device_properties

            bind_near_gpu(device_properties(self._device).pci_bus_id, self._label)

    def _fail(self, error: BaseException) -> None:
        """Report an error at once: closing may have to wait for other devices."""
        self.error = self.error or error
        self._on_change()

    def _close(self) -> None:
        # An error ends the other devices' waits at once; closing in order would wait for them.
        if self._communicator is not None and self.error is not None:
            self._communicator.abort()
        self._release()
        if self._communicator is not None:
            self._communicator.close()
        if self._backend is not None:
            self._backend.close()


ThreadT = TypeVar("ThreadT", bound=DeviceThread)


class DeviceThreads(list[ThreadT]):
    """The device threads of this process; the main thread starts them and waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Event()

    def start(self) -> None:
        """Start all threads."""
        for thread in self:
            thread.start()

    def changed(self) -> None:
        """Wake the main thread in `wait`. Callable from any thread."""
        self._changed.set()

    def wait(self, reached: Callable[[ThreadT], bool], world: World, check: Callable[[], None]) -> None:
        """Wait until all threads have reached a point; meanwhile make the MPI calls that they ask for.

        Args:
            reached: whether a thread has reached the point.
            world: the processes.
            check: called at least every 0.2 s; ends the wait by raising.
        """
        while not all(map(reached, self)):
            check()
            # Cleared before the condition is tested: a change in between sets it again, and the wait ends.
            self._changed.clear()
            if world.serves:
                # `serve` itself waits for calls, so there is no other pause here.
                world.serve()
            elif not all(map(reached, self)):
                self._changed.wait(_POLL)

    def abort(self) -> None:
        """Wake all threads, and the main thread, from their waits. Callable from any thread."""
        for thread in self:
            thread.abort()
        self._changed.set()

    def join(self, seconds: float) -> None:
        """Wait for the end of all threads, for at most `seconds` in all."""
        deadline = time.monotonic() + seconds
        for thread in self:
            thread.join(max(0.0, deadline - time.monotonic()))

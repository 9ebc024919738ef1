"""The one place that makes communicators: for the device threads of training and `caffepy bench`, and for the ranks of
`caffepy.distributed`. Those of device threads may be made by a thread of their own while nets are built.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator, SharedSums
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.communicators.store_communicator import StoreCommunicator
from caffepy.distributed.processes.world import World
from caffepy.distributed.store.store import Store
from caffepy.errors import AbortedError

logger = logging.getLogger(__name__)


_POLL = 0.2
"""Seconds between two looks whether the wait is still worth it."""


class Connector:
    """Makes a device thread's communicator, in that thread.

    Args:
        connect: makes it.
    """

    def __init__(self, connect: Callable[[], Communicator]) -> None:
        self._connect = connect

    def begin(self) -> None:
        """Start to connect, if that can be done ahead of the call."""

    def give_up(self) -> None:
        """End a wait for the communicator. Callable from any thread."""

    def __call__(self) -> Communicator:
        """The communicator.

        Raises:
            AbortedError: training was stopped meanwhile.
            CaffepyError: what `connect` raised.
        """
        return self._connect()


class AsyncConnector(Connector):
    """Makes the communicator in a thread of its own, while the solver builds its nets: NCCL's start takes seconds.

    NCCL's call returns only when all devices have made it. Where one of them fails before that, the thread is left
    behind, and the process does not wait for it.

    Args:
        connect: makes it, in any thread.
        name: the device's, for the thread's name.
    """

    def __init__(self, connect: Callable[[], Communicator], name: str = "") -> None:
        super().__init__(connect)
        self._name = name
        self._done = threading.Event()
        self._begun = False
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._result: Communicator | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        self._begun = True
        threading.Thread(target=self._run, name=f"connect {self._name}", daemon=True).start()

    def _run(self) -> None:
        try:
            result = self._connect()
        except BaseException as error:
            self._error = error
        else:
            with self._lock:
                self._result = result
                # Decided under the lock together with the result: either `give_up` finds the communicator, or this
                # thread finds that it is unwanted.
                unwanted = self._given_up.is_set()
            if unwanted:
                result.abort()
        self._done.set()

    def give_up(self) -> None:
        """End the wait for the communicator and abort it, also one that comes later. Callable from any thread."""
        with self._lock:
            self._given_up.set()
            result = self._result
        if result is not None:
            result.abort()

    def __call__(self) -> Communicator:
        """The communicator; waits for the thread that makes it, or makes it here if none has begun."""
        if not self._begun:
            return self._connect()
        # Short waits, because the thread may be stuck in NCCL's call for good and never set the event.
        while not self._done.wait(_POLL):
            if self._given_up.is_set():
                raise AbortedError("training was stopped")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class DeviceCommunicators:
    """Connects the device threads of all ranks; made by the main threads of all ranks together.

    Args:
        world: the processes.
        count: this rank's device threads.
        on_gpus: the devices are GPUs.
        compress: how gradients travel, one of `defaults.COMPRESSIONS`.
        timeout: the watchdog's, in seconds.
    """

    def __init__(self, world: World, count: int, on_gpus: bool, compress: str = "none", timeout: float = 300.0) -> None:
        self._group = ThreadGroup(count, timeout)
        self._ranks = world.communicator()
        self._compress = compress
        self._inter_node = world.several_hosts
        self._unique_id = _share_unique_id(world) if on_gpus and count * world.size > 1 else None
        # With NCCL no gradient goes through host memory.
        self._shared = None if self._unique_id is not None else self._share_memory(world)
        if compress != "none" and self._unique_id is None and self._ranks is None and world.rank == 0:
            logger.info("--compression %s changes nothing: there is no other rank to send gradients to", compress)

    def connect(self, index: int) -> Communicator:
        """The communicator of this rank's device `index`; called in its thread, with its GPU current."""
        local = LocalCommunicator(self._group, index)
        host: Communicator = local
        if self._ranks is not None:
            host = HierarchicalCommunicator(local, self._ranks, self._compress, self._inter_node, self._shared)
        if self._unique_id is None:
            return host
        return connect_gpu(host, self._unique_id, self._compress)

    def connector(self, index: int, device: int | None, label: str) -> Connector:
        """`connect` for a device, which can begin while the net is built where that takes long: with NCCL.

        Args:
            index: as for `connect`.
            device: the GPU's number.
            label: what messages call the device.
        """
        if self._unique_id is None or device is None:
            return Connector(partial(self.connect, index))
        from caffepy.distributed.communicators.nccl import use_gpu

        def connect() -> Communicator:
            use_gpu(device)  # of the thread that this is called in
            return self.connect(index)

        return AsyncConnector(connect, label)

    def _share_memory(self, world: World) -> SharedSums | None:
        # Memory is shared on one machine only; with --compression the ranks exchange compressed copies instead.
        if self._ranks is None or self._inter_node or self._compress != "none":
            return None
        # Communicators of their own: barriers have no names, and those of different kinds must not be taken for each
        # other.
        arrived, added = world.communicator(), world.communicator()
        assert arrived is not None and added is not None
        return SharedSums(self._ranks, arrived, added)


def connect_gpu(host: Communicator, unique_id: Any, compress: str = "none") -> Communicator:
    """NCCL's communicator of the current GPU; called by all ranks at about the same time.

    Args:
        host: connects the same ranks through host memory.
        unique_id: from `nccl.new_unique_id` of rank 0.
        compress: how gradients travel, one of `defaults.COMPRESSIONS`.

    Raises:
        PeerError: NCCL could not connect them.
    """
    from caffepy.distributed.communicators.nccl import NcclCommunicator

    return NcclCommunicator(host.size, unique_id, host.rank, host, compress)


def connect_by_store(store: Store, rank: int, size: int, timeout: float | None) -> Communicator:
    """A communicator of ranks that share nothing but a store; arguments as in `StoreCommunicator`."""
    return StoreCommunicator(store, rank, size, timeout)


def _share_unique_id(world: World) -> Any:
    from caffepy.distributed.communicators.nccl import check_nccl, new_unique_id

    # Checked on all ranks first: one without NCCL would leave the others waiting in its connection.
    world.run_on_all(check_nccl)
    return world.broadcast(new_unique_id() if world.rank == 0 else None)


def connect_alone(ranks: Communicator, timeout: float) -> Communicator:
    """A communicator of processes with one CPU solver each, whose all-reduces begin during the backward pass.

    Args:
        ranks: connects the processes.
        timeout: longest wait in seconds.
    """
    return HierarchicalCommunicator(LocalCommunicator(ThreadGroup(1, timeout), 0), ranks)

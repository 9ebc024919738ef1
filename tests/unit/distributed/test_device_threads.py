"""Threads that own a device, and the main thread's waits for them."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from fake_world import FakeWorld

from caffepy.backend import Backend, create_backend
from caffepy.data.sharding import Shard
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.connect import Connector
from caffepy.distributed.device_threads import DeviceSpec, DeviceThread, DeviceThreads, device_names, device_specs
from caffepy.distributed.placement import Cores
from caffepy.errors import AbortedError, DeviceError, RunError


class Communicator(LocalCommunicator):
    """Logs how it ends."""

    def __init__(self, group: ThreadGroup, rank: int, log: list[str]) -> None:
        super().__init__(group, rank)
        self.log = log

    def abort(self) -> None:
        self.log.append("abort")
        super().abort()

    def close(self) -> None:
        self.log.append("close communicator")
        super().close()


class Worker(DeviceThread):
    """A device's thread that takes part in a barrier of two, or fails."""

    def __init__(self, error: BaseException | None = None, create: BaseException | None = None) -> None:
        self.connector = Connector(lambda: Communicator(ThreadGroup(2, 300), 0, self.log))
        super().__init__("worker", None, "CPU", self.connector, lambda: self.log.append("change"))
        self.log: list[str] = []
        self.work_error, self.create_error = error, create
        self.release_error: BaseException | None = None
        self.connected = threading.Event()

    def _create_backend(self) -> Backend:
        if self.create_error is not None:
            raise self.create_error
        backend = create_backend(None, 1)
        backend.close = lambda: self.log.append("close backend")  # type: ignore[method-assign]
        return backend

    def _work(self, backend: Backend) -> None:
        self._communicator = self._connect()
        self.connected.set()
        if self.work_error is not None:
            raise self.work_error
        self._communicator.barrier()

    def _release(self) -> None:
        self.log.append("release")
        if self.release_error is not None:
            raise self.release_error


def ended(worker: Worker) -> Worker:
    worker.start()
    assert worker.join(300)
    assert worker.finished.is_set()
    return worker


def test_an_error_is_reported_before_the_thread_closes_what_it_has() -> None:
    worker = ended(Worker(RunError("broken")))
    assert str(worker.error) == "broken"
    assert worker.log == ["change", "abort", "release", "close communicator", "close backend", "change"]


def test_a_thread_without_a_backend_has_nothing_to_close() -> None:
    worker = ended(Worker(create=DeviceError("there is no such device", "use another")))
    assert isinstance(worker.error, DeviceError)
    assert worker.log == ["change", "release", "change"]


def test_the_first_error_is_kept() -> None:
    worker = Worker(RunError("first"))
    worker.release_error = RunError("second")
    assert str(ended(worker).error) == "first"
    assert worker.log.count("change") == 3


def test_abort_wakes_a_thread_from_a_collective() -> None:
    worker = Worker()
    worker.start()
    assert worker.connected.wait(300)
    worker.abort()
    assert worker.join(300)
    assert isinstance(worker.error, AbortedError)


def test_abort_ends_the_wait_for_a_communicator() -> None:
    given_up: list[bool] = []
    worker = Worker()
    worker.connector.give_up = lambda: given_up.append(True)  # type: ignore[method-assign]
    worker.abort()
    assert given_up == [True]


def test_a_thread_that_was_not_started_can_be_aborted_and_joined() -> None:
    worker = Worker()
    worker.abort()
    assert worker.join(0.0)


class Still:
    """A thread that has reached a point when it is told to."""

    def __init__(self) -> None:
        self.reached = False
        self.joined: list[float] = []
        self.aborted = False

    def join(self, seconds: float) -> bool:
        self.joined.append(seconds)
        time.sleep(min(seconds, 0.05))
        return False

    def abort(self) -> None:
        self.aborted = True


def still_threads(count: int) -> DeviceThreads[Any]:
    threads: DeviceThreads[Any] = DeviceThreads()
    for _ in range(count):
        threads.append(Still())
    return threads


def test_wait_returns_when_all_threads_have_reached_the_point() -> None:
    threads = still_threads(2)
    checks = []

    def check() -> None:
        threads[min(len(checks), 1)].reached = True
        checks.append(None)
        threads.changed()

    threads.wait(lambda thread: bool(thread.reached), FakeWorld(), check)
    assert len(checks) == 2


def test_wait_ends_by_the_error_of_its_check() -> None:
    def check() -> None:
        raise RunError("a rank is gone")

    with pytest.raises(RunError, match="a rank is gone"):
        still_threads(1).wait(lambda thread: bool(thread.reached), FakeWorld(), check)


def test_wait_makes_the_mpi_calls_of_the_threads() -> None:
    threads = still_threads(1)

    class Serving(FakeWorld):
        serves = True  # type: ignore[assignment]

        def serve(self) -> None:
            threads[0].reached = True

    threads.wait(lambda thread: bool(thread.reached), Serving(), lambda: None)
    assert threads[0].reached


def test_join_takes_its_time_for_all_threads_together() -> None:
    threads = still_threads(3)
    threads.join(0.08)
    waits = [thread.joined[0] for thread in threads]
    assert 0.08 >= waits[0] > waits[1] > waits[2] == 0.0


# -- what devices are called, and what each of them takes ------------------------------------------------


CORES = Cores((0, 1, 2, 3, 4), 5)


@pytest.mark.parametrize(("threads", "expected"), [(None, 2), (7, 7)])
def test_cpu_solvers_divide_the_cores_of_their_rank(threads: int | None, expected: int) -> None:
    specs = device_specs(FakeWorld(3, 1), [None] * 2, CORES, threads, per_device_batch=True)
    assert specs == [
        DeviceSpec(0, None, "CPU 0", expected, Shard(2, 6, 2, True)),
        DeviceSpec(1, None, "CPU 1", expected, Shard(3, 6, 2, True)),
    ]


def test_gpus_leave_the_number_of_threads_to_their_backend() -> None:
    (spec,) = device_specs(FakeWorld(), [3], CORES, 7)
    assert spec == DeviceSpec(0, 3, "3", None, Shard(0, 1, 1))
    assert spec.full_name == f"rank 0 on {socket.gethostname()}: GPU 3"


def test_there_is_a_thread_for_each_of_many_solvers() -> None:
    specs = device_specs(FakeWorld(), [None] * 9, CORES)
    assert {spec.threads for spec in specs} == {1}


def test_messages_name_rank_and_device_as_far_as_there_are_several() -> None:
    alone = device_specs(FakeWorld(), [None], CORES)
    assert device_names(FakeWorld(), alone) == ["device CPU"]
    world = FakeWorld(2, answer=lambda rank, labels: ["4"])
    assert device_names(world, alone) == ["rank 0 on h0, device CPU", "rank 1 on h1, device 4"]
    assert alone[0].full_name.endswith(": CPU")

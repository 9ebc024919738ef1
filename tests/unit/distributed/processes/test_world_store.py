"""The world of processes without MPI; threads play the ranks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from process_groups import free_port, run_threads

from caffepy.distributed.communicators.communicator import Collective, Op
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator
from caffepy.distributed.connect import DeviceCommunicators
from caffepy.distributed.processes import world as create
from caffepy.distributed.processes import world as store_world
from caffepy.distributed.processes.launcher import SECRET, VARIABLES, StoreAddress, find_launcher, find_mpi_launcher
from caffepy.distributed.processes.world import StoreWorld
from caffepy.distributed.store import server as rendezvous_module
from caffepy.errors import AbortedError, ConfigError, PeerError, UserError
from caffepy.logs.performance_report import Performance

TOLD = dict(zip(VARIABLES, ("1", "4", "a", "29500"), strict=True))
TORCHRUN = {**TOLD, "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_RANK": "1"}
AGENT = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
ALONE = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
POD = {**TOLD, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "name", "port"),
    [
        (TOLD, "a launcher without MPI", 29500),
        (TORCHRUN, "torchrun", 29500),
        (AGENT, "torchrun", 29501),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, "torchrun", 29500),
        ({**STEP, **TORCHRUN}, "torchrun", 29500),  # srun starts a torchrun on each node
        ({**TORCHRUN, "PMIX_RANK": "0"}, "torchrun", 29500),
        ({**ALONE, **TOLD}, "a launcher without MPI", 29500),  # in a shell that srun opened
        ({**STEP, **TOLD}, "srun", None),
        ({**OPEN_MPI, **TORCHRUN}, "Open MPI's mpirun", None),
        ({**AGENT, "MASTER_PORT": "65535"}, None, None),
        ({**TOLD, "RANK": "4"}, None, None),
        ({**TOLD, "RANK": "0", "WORLD_SIZE": "1"}, None, None),
        ({**TOLD, "MASTER_ADDR": ""}, None, None),
    ],
)
def test_a_launcher_without_mpi_is_known_by_its_variables(
    environment: dict[str, str], name: str | None, port: int | None
) -> None:
    found = find_launcher(environment)
    assert (found and found.name, found and found.store and found.store.port) == (name, port)
    if found is not None and found.store is not None:
        assert (found.rank, found.size, found.again) == (1, 4, "")
        assert find_mpi_launcher(environment) != found


@pytest.mark.parametrize(
    ("environment", "near"),
    [(TOLD, True), (POD, False), ({**POD, "LOCAL_WORLD_SIZE": "2"}, False), ({**POD, "LOCAL_WORLD_SIZE": "4"}, True)],
)
def test_localhost_is_not_the_loopback_address_to_a_pod_of_several(environment: dict[str, str], near: bool) -> None:
    launcher = find_launcher(environment)
    assert launcher is not None and launcher.store is not None and launcher.store.near == near


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears of failures besides the store: who meets one need not wait for a monitor."""
    monkeypatch.setenv(SECRET, "known")
    monkeypatch.setattr(store_world, "_FAILURE_SECONDS", 0.1)


def run_worlds(size: int, action: Callable[[StoreWorld], Any], timeout: float = 300.0, late: float = 0.0) -> list[Any]:
    """What `action` gives on each rank, or its error."""
    address = StoreAddress(size, "127.0.0.1", free_port(), True)

    def work(rank: int) -> Any:
        if rank == 0:
            time.sleep(late)
        world = StoreWorld(rank, address, timeout)
        try:
            return action(world)
        finally:
            world.close()

    return run_threads(size, work)


def test_the_variables_make_this_world(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(create, "find_launcher", lambda: find_launcher(TOLD))
    monkeypatch.setattr(store_world, "StoreWorld", lambda rank, address: made.append((rank, address)))
    create.create_world()
    assert made == [(1, StoreAddress(4, "a", 29500, True))]


def test_ranks_tell_each_other_values_whoever_comes_first() -> None:
    def work(world: StoreWorld) -> Any:
        own = [Performance(batch=world.rank), (world.rank, b"\xff")]
        seen = world.all_gather(own), world.broadcast({"of": world.rank})
        return world.rank, world.size, world.local_rank, world.local_size, world.several_hosts, seen

    gathered = [[Performance(batch=rank), (rank, b"\xff")] for rank in range(3)]
    expected = [(rank, 3, rank, 3, False, (gathered, {"of": 0})) for rank in range(3)]
    assert run_worlds(3, work, late=0.2) == expected


def test_an_error_of_one_rank_ends_all_and_names_it() -> None:
    def work(world: StoreWorld) -> Any:
        try:
            world.raise_on_all(ConfigError("no such file") if world.rank == 1 else None)
        except SystemExit as leaving:
            return leaving.code
        return "went on"

    root, *others = run_worlds(3, work)
    assert isinstance(root, UserError) and str(root) == f"rank 1 on {os.uname().nodename}: no such file"
    assert others == [2, 2]


@pytest.mark.parametrize("compress", ["none", "fp16"])
@pytest.mark.parametrize("machines", [1, 2])
def test_devices_sum_in_the_order_of_ranks_through_shared_memory_or_the_store(machines: int, compress: str) -> None:
    def work(world: StoreWorld) -> Any:
        world.machines = [str(rank * machines // world.size) for rank in range(world.size)]
        device = DeviceCommunicators(world, 1, False, compress).connect(0)
        assert isinstance(device, HierarchicalCommunicator)
        memory = device.allocate_gradients(1000)
        assert (memory is not None) == (machines == 1 and compress == "none")
        array = np.empty(1000, np.float32) if memory is None else memory
        array[...] = np.random.default_rng(world.rank).standard_normal(1000, np.float32)
        device.all_reduce(array)
        begun = device.all_reduce_async(array, nullcontext())
        begun.synchronize()
        total = device.sum(np.array([world.rank, 1.0]))
        device.barrier()
        return array.copy(), total.tolist()

    own = [np.random.default_rng(rank).standard_normal(1000, np.float32) for rank in range(4)]
    mean = (own[0] + own[1] + own[2] + own[3]) * np.float32(0.25)
    for array, total in run_worlds(4, work):
        np.testing.assert_allclose(array, mean, rtol=0, atol=0 if compress == "none" else 1e-2)
        assert total == [6.0, 4.0]


def test_communicators_do_not_take_each_others_arrays() -> None:
    def work(world: StoreWorld) -> Any:
        first, second = world.communicator(), world.communicator()
        turns = (first, second) if world.rank else (second, first)
        works = {}
        for communicator in turns:
            array = np.full(2, 10.0 if communicator is first else 20.0)
            works[communicator is first] = communicator.start(Collective(Op.ALL_GATHER, array, np.empty((2, 2)))), array
        for work, _ in works.values():
            work.synchronize()
        return [float(communicator.sum([1.0 + world.rank])[0]) for communicator in (first, second)]

    assert run_worlds(2, work) == [[3.0, 3.0]] * 2


def test_a_rank_that_is_lost_is_named_to_all() -> None:
    def work(world: StoreWorld) -> Any:
        if world.rank == 1:
            world.channel.close()  # type: ignore[union-attr]
            return None
        return world.all_gather(world.rank)

    results = run_worlds(3, work)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerError)
        assert str(results[rank]).startswith(f"rank 1 on {os.uname().nodename} (process {os.getpid()}) at iteration 0")


def test_what_the_monitor_knows_replaces_the_stores_error() -> None:
    def check() -> None:
        raise PeerError("rank 1 is on fire")

    def work(world: StoreWorld) -> Any:
        if world.rank == 1:
            world.channel.close()  # type: ignore[union-attr]
            return None
        world.watch(check)
        return world.all_gather(world.rank)

    assert str(run_worlds(2, work)[0]) == "rank 1 is on fire"


def test_abort_wakes_the_waits_of_this_process_and_tells_nobody() -> None:
    def work(world: StoreWorld) -> Any:
        communicator = world.communicator()
        waiting = communicator.start(Collective(Op.BARRIER)) if world.rank == 0 else None
        communicator.abort()
        world.all_gather(None)  # no failure has come into the store
        with pytest.raises(AbortedError, match="training was stopped" if waiting else "the communicator was aborted"):
            waiting.synchronize() if waiting else communicator.barrier()
        return True

    assert run_worlds(2, work) == [True, True]


def test_a_failure_that_ends_a_wait_is_the_monitors_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver thread that hears of it first stays silent once the monitor has aborted it; else it speaks."""

    def work(world: StoreWorld) -> Any:
        if world.rank == 0:
            world.channel.fail("rank 7 has failed")  # type: ignore[union-attr]
            return True
        with pytest.raises(PeerError, match="^rank 7 has failed$"):
            world.communicator().barrier()
        other = world.communicator()
        threading.Timer(0.2, other.abort).start()
        monkeypatch.setattr(store_world, "_FAILURE_SECONDS", 10.0)
        with pytest.raises(AbortedError, match="training was stopped"):
            other.barrier()
        return True

    assert run_worlds(2, work) == [True, True]


def test_a_rank_that_does_not_come_is_named() -> None:
    address = StoreAddress(3, "127.0.0.1", free_port(), True)
    results = run_threads(2, lambda rank: StoreWorld(rank, address, 0.5))
    assert "the ranks' rendezvous at 127.0.0.1:" in str(results[0])
    assert str(results[0]).endswith("has waited 0.5 s for rank 2 to join")
    assert all(isinstance(result, PeerError) for result in results)


def test_a_port_in_use_and_another_secret_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    address = StoreAddress(2, "127.0.0.1", free_port(), True)

    def work(rank: int) -> Any:
        return StoreWorld(rank, address, 2.0)

    secrets = iter(["one", "another"])
    monkeypatch.setattr(store_world, "find_secret", lambda *_, **__: next(secrets))
    messages = " ".join(map(str, run_threads(2, work)))
    assert "this is another job's address, or the ranks' secrets differ" in messages
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", address.port)), pytest.raises(UserError, match="is in use: choose another"):
        work(0)


def test_training_without_a_secret_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(SECRET)
    with caplog.at_level(logging.WARNING):
        run_worlds(2, lambda world: None)
    (message,) = caplog.messages
    assert message.startswith("training without MPI without a secret: any process that reaches 127.0.0.1:")


@pytest.mark.parametrize(
    ("host", "near", "bound"),
    [("localhost", True, "localhost"), ("localhost", False, ""), ("127.0.0.2", False, "127.0.0.2"), ("a", True, "")],
)
def test_rank_0_listens_where_the_others_were_told(
    monkeypatch: pytest.MonkeyPatch, host: str, near: bool, bound: str
) -> None:
    monkeypatch.setattr(rendezvous_module, "ControlServer", lambda memory, own, address, secret: address)
    found: Any = rendezvous_module.listen(None, None, (host, 5), "", near)  # type: ignore[arg-type]
    assert found == (bound, 5)


def test_rank_0_ends_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(store_world, "end_process", lambda status: ended.append((world_rank(), status)))
    ranks: dict[int, int] = {}

    def world_rank() -> int:
        return ranks[threading.get_ident()]

    def work(world: StoreWorld) -> None:
        ranks[threading.get_ident()] = world.rank
        time.sleep(0.1 * world.rank)
        world.end(1)
        world.channel.close()  # type: ignore[union-attr]

    run_worlds(3, work)
    assert ended[-1] == (0, 1) and sorted(ended) == [(0, 1), (1, 1), (2, 1)]

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from process_groups import run_threads

from caffepy.distributed import rendezvous as connect
from caffepy.distributed.communicators.mpi import MainThreadDispatcher
from caffepy.distributed.processes.launcher import Launcher, check_launcher, find_launcher, refuse_foreign_launcher
from caffepy.distributed.processes.world import (
    MpiWorld,
    SingleProcess,
    StoreWorld,
    World,
    create_world,
    machine_identity,
)
from caffepy.errors import CaffepyError, ConfigError, InternalError, PeerError, RunError, UserError


class FakeWorld(SingleProcess):
    """One rank among several whose exchanged values are given."""

    def __init__(self, rank: int, others: list[object]) -> None:
        super().__init__()
        self.rank, self.size = rank, len(others)
        self.hosts = [f"host{i}" for i in range(self.size)]
        self._others = others

    def all_gather(self, value):  # type: ignore[no-untyped-def]
        gathered = list(self._others)
        gathered[self.rank] = value
        return gathered


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, (3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script: nothing was launched
        ({"PMIX_RANK": "2"}, (2, None)),
        ({"OMPI_COMM_WORLD_RANK": "²", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "9" * 5000}, None),
    ],
)
def test_launchers_are_known_by_their_variables(
    environment: dict[str, str], expected: tuple[int, int | None] | None
) -> None:
    found = find_launcher(environment)
    assert (found and (found.rank, found.size)) == expected


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "name", "again"),
    [
        ({**STEP, "SLURM_MPI_TYPE": "pmix"}, "srun", "srun -n 2 --mpi=pmix"),
        (STEP, "srun", "srun -n 2"),
        ({**STEP, **HYDRA, "PMI_JOBID": "7.1", "SLURM_MPI_TYPE": "pmi2"}, "srun", "srun -n 4 --mpi=pmi2"),
        ({**STEP, **HYDRA}, "mpiexec", "mpirun -np 4"),  # Hydra, whose helpers srun started
        ({**HYDRA, "SLURM_MPI_TYPE": "pmi2"}, "mpiexec", "mpirun -np 4"),
    ],
)
def test_srun_is_told_from_hydra(environment: dict[str, str], name: str, again: str) -> None:
    found = find_launcher(environment)
    assert found is not None
    assert (found.name, found.again) == (name, again)


def test_without_a_launcher_no_mpi_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.distributed.processes.world.find_launcher", lambda: None)
    world = create_world()
    assert (type(world), world.size, world.communicator()) == (SingleProcess, 1, None)


@pytest.mark.parametrize("kind", [SingleProcess, MpiWorld, StoreWorld])
def test_a_world_is_a_contract_and_each_kind_implements_it_alone(kind: type[World]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        World(0, ["host"], ["machine"])  # type: ignore[abstract]
    assert World.__abstractmethods__ <= vars(kind).keys()
    assert kind.__bases__ == (World,)


def test_a_launcher_of_another_mpi_is_refused_once() -> None:
    launcher = Launcher("mpiexec", 0, 4)
    with pytest.raises(UserError, match="mpiexec started 4 processes, but Open MPI v5.0, .* sees 1: .* different MPIs"):
        check_launcher(launcher, 1, "Open MPI v5.0, package: x")
    with pytest.raises(UserError, match="but MPICH Version: 5.0.2, the MPI"):
        check_launcher(launcher, 1, "MPICH Version:      5.0.2\nMPICH Release date: today")
    with pytest.raises(SystemExit) as leaving:
        check_launcher(Launcher("mpiexec", 3, 4), 1, "Open MPI v5.0")
    assert leaving.value.code == 2
    check_launcher(launcher, 4, "")
    check_launcher(Launcher("a PMIx launcher", 0, None), 4, "")


@pytest.mark.parametrize(("options", "way"), [(" --mpi=pmi2", "--mpi=pmi2"), ("", "--mpi=none")])
def test_sruns_wrong_way_is_named(options: str, way: str) -> None:
    wanted = (
        f"srun started 4 processes, .* sees 1: srun's {way} is none that this library knows. Start with caffepy launch"
    )
    with pytest.raises(UserError, match=wanted):
        check_launcher(Launcher("srun", 0, 4, options), 1, "Open MPI v5.0.11, package: x")


def test_an_error_of_all_ranks_is_raised_by_the_root_as_it_is() -> None:
    error = ConfigError("no such file")
    with pytest.raises(ConfigError) as raised:
        FakeWorld(0, [None, ("no such file", 2)]).raise_on_all(error)
    assert raised.value is error
    with pytest.raises(SystemExit) as leaving:
        FakeWorld(1, [("no such file", 2), None]).raise_on_all(error)
    assert leaving.value.code == 2


@pytest.mark.parametrize("kind", [UserError, RunError, InternalError])
def test_the_root_ends_with_the_status_of_the_rank_that_failed(kind: type[CaffepyError]) -> None:
    """mpirun's own status is that of whichever rank ends first."""
    with pytest.raises(kind, match="^rank 1 on host1: odd$") as caught:
        FakeWorld(0, [None, ("odd", kind.exit_status)]).raise_on_all(None)
    assert caught.value.exit_status == kind.exit_status
    with pytest.raises(SystemExit) as ended:
        FakeWorld(1, [None, None]).raise_on_all(kind("odd"))
    assert ended.value.code == kind.exit_status


def test_an_error_of_one_rank_names_it() -> None:
    with pytest.raises(UserError, match="^rank 1 on host1: disk is gone$"):
        FakeWorld(0, [None, ("disk is gone", 2)]).raise_on_all(None)
    with pytest.raises(RunError, match="^rank 0 on host0: ValueError: odd$"):
        FakeWorld(0, [None, None]).raise_on_all(ValueError("odd"))


TOLD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
ONE, SECOND = SingleProcess(), FakeWorld(1, [None, None])


@pytest.mark.parametrize(
    ("world", "environment", "message"),
    [
        (ONE, {}, None),
        (ONE, {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (ONE, {"WORLD_SIZE": "1"}, None),
        (SECOND, {"RANK": "1", "WORLD_SIZE": "2"}, None),
        (ONE, {**TOLD, "MASTER_ADDR": "a"}, None),  # another world, which is not asked
        (
            ONE,
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"},
            "^the environment has RANK=1 and WORLD_SIZE=4 but no MASTER_PORT: set RANK, WORLD_SIZE, MASTER_ADDR, "
            "MASTER_PORT as torchrun does, or start with mpirun -np 4 caffepy train …, or caffepy launch "
            "--nproc-per-node 4 -- train …; to train in one process unset RANK and WORLD_SIZE$",
        ),
        (ONE, {"RANK": "1", "WORLD_SIZE": "1"}, "has RANK=1 and WORLD_SIZE=1 but no MASTER_ADDR .* mpirun -np 2 caffe"),
        (ONE, {**TOLD, "RANK": "x"}, "has RANK=x and WORLD_SIZE=4 and MASTER_PORT=29500: RANK counts from 0 to"),
        (ONE, {**TOLD, "RANK": "4"}, "has RANK=4 and WORLD_SIZE=4 and MASTER_PORT=29500: RANK counts from 0 to"),
        (ONE, {**TOLD, "MASTER_PORT": "65536"}, "and MASTER_PORT=65536: RANK .* MASTER_PORT is a port"),
        (ONE, {**TOLD, "WORLD_SIZE": "9" * 5000}, "RANK counts from 0"),
        (ONE, {"RANK": "0"}, "has RANK=0 but no WORLD_SIZE and MASTER_ADDR and MASTER_PORT: set RANK"),
        (ONE, {"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK and MASTER_ADDR"),
        (ONE, {**TOLD, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "but MPI says rank 0 of 1 processes"),
        (SECOND, {"WORLD_SIZE": "2"}, "has WORLD_SIZE=2 but no RANK"),
        (
            SECOND,
            {"RANK": "0", "WORLD_SIZE": "2"},
            "has RANK=0 and WORLD_SIZE=2, but MPI says rank 1 of 2 processes: unset RANK and WORLD_SIZE",
        ),
        (SECOND, {"RANK": "1", "WORLD_SIZE": "8"}, "but MPI says rank 1 of 2 processes"),
    ],
)
def test_torchruns_variables_are_refused_unless_they_say_what_mpi_says(
    world: SingleProcess, environment: dict[str, str], message: str | None
) -> None:
    if message is None:
        refuse_foreign_launcher(world.rank, world.size, environment)
        return
    with pytest.raises(UserError, match=message):
        refuse_foreign_launcher(world.rank, world.size, environment)


def test_machines_are_told_apart_by_boot_and_network(tmp_path: Path) -> None:
    def machine(name: str, boot: str | None, network: bool = True) -> str:
        system = tmp_path / name
        (system / "sys/kernel/random").mkdir(parents=True)
        (system / "self/ns").mkdir(parents=True)
        if boot is not None:
            (system / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
        if network:
            (system / "self/ns/net").write_text("")
        return machine_identity(system)

    one, other_boot, other_network = machine("a", "1"), machine("b", "2"), machine("c", "1")
    assert len({one, other_boot, other_network}) == 3
    assert one == machine_identity(tmp_path / "a")
    name = socket.gethostname()
    assert (machine("d", None), machine("e", "1", network=False)) == (name, f"1/{name}")
    assert machine_identity() == machine_identity() != ""


class FakeMpi:
    """MPI whose ranks are threads: as much of mpi4py as `MpiWorld` calls."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []
        self._barrier = threading.Barrier(size)
        self._arrived = [0] * size
        self._rows: list[object] = [None] * size

    def of(self, rank: int) -> SimpleNamespace:
        """What a rank imports."""

        def exchange(name: str, value: object) -> list[object]:
            self.calls.append(name)
            self._rows[rank] = value
            self._barrier.wait(300)
            rows = list(self._rows)
            self._barrier.wait(300)
            return rows

        def bcast(value: object) -> object:
            return exchange("bcast", value if rank == 0 else None)[0]

        def barrier() -> SimpleNamespace:
            self._arrived[rank] += 1
            count = self._arrived[rank]
            return SimpleNamespace(Test=lambda: min(self._arrived) >= count)

        allgather = partial(exchange, "allgather")
        comm = SimpleNamespace(rank=rank, size=self.size, allgather=allgather, bcast=bcast, Ibarrier=barrier)
        return SimpleNamespace(
            THREAD_MULTIPLE=3,
            Query_thread=lambda: 3,
            Get_library_version=lambda: "fake",
            COMM_WORLD=SimpleNamespace(Dup=lambda: comm),
        )


def worlds(monkeypatch: pytest.MonkeyPatch, fake: FakeMpi, action: Callable[[MpiWorld], object]) -> list[object]:
    """What `action` gives on each rank."""
    own = threading.local()
    monkeypatch.setattr("caffepy.distributed.processes.world.load_mpi", lambda: fake.of(own.rank))

    def work(rank: int) -> object:
        own.rank = rank
        return action(MpiWorld(Launcher("mpirun", rank, fake.size)))

    return run_threads(fake.size, work)


def test_a_broadcast_is_a_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, value = FakeMpi(3), {"id": bytes(range(128))}

    def broadcast(world: MpiWorld) -> object:
        return world.broadcast(value if world.rank == 0 else None)

    assert worlds(monkeypatch, fake, broadcast) == [value] * 3
    assert fake.calls == ["allgather"] * 3 + ["bcast"] * 3


def test_a_broadcast_whose_root_does_not_come_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise PeerError("rank 0 is gone")

    def broadcast(world: MpiWorld) -> object:
        world.watch(end)
        return None if world.rank == 0 else world.broadcast(None)

    results = worlds(monkeypatch, FakeMpi(2), broadcast)
    assert results[0] is None and str(results[1]) == "rank 0 is gone"


def test_machines_of_one_name_are_not_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["a", "b", "a", "b"])
    lock = threading.Lock()

    def identity() -> str:
        with lock:
            return next(names)

    monkeypatch.setattr("caffepy.distributed.processes.world.machine_identity", identity)
    found = worlds(monkeypatch, FakeMpi(4), lambda world: (world.machines, world.local_size, world.several_hosts))
    for machines, local_size, several in found:  # type: ignore[attr-defined]
        assert sorted(machines) == ["a", "a", "b", "b"] and local_size == 2 and several


@pytest.mark.parametrize(
    ("machines", "own", "bound", "told"),
    [
        (["x", "x"], ["10.0.0.5"], "127.0.0.1", ["127.0.0.1"]),
        (["x", "y"], ["10.0.0.5"], "10.0.0.5", ["10.0.0.5"]),
        (["x", "y"], ["10.0.0.5", "192.168.1.5"], "", ["10.0.0.5", "192.168.1.5"]),
        (["x", "y"], [], "127.0.0.1", ["127.0.0.1"]),
    ],
)
def test_rank_0_listens_no_wider_than_the_ranks_need(
    monkeypatch: pytest.MonkeyPatch, machines: list[str], own: list[str], bound: str, told: list[str]
) -> None:
    listening, offered, tried = [], [], []

    def listen(memory: object, member: object, address: tuple[str, int], secret: str) -> SimpleNamespace:
        listening.append(address)
        return SimpleNamespace(port=5)

    def broadcast(value: object) -> object:
        offered.append(value)
        return offered[0]

    def refuse(find: Callable[[], tuple[list[tuple[str, int]], str]], *_: object) -> None:
        tried.append([host for host, _ in find()[0]])
        raise PeerError("refused")

    monkeypatch.setattr(connect, "own_addresses", lambda: own)
    monkeypatch.setattr(connect, "ControlServer", listen)
    monkeypatch.setattr(connect, "ControlClient", refuse)
    for rank in range(2):
        world = FakeWorld(rank, [None, None])
        world.hosts, world.machines = ["same", "same"], machines
        monkeypatch.setattr(world, "broadcast", broadcast)
        connect.connect_training(world)
    assert listening == [(bound, 0)] and tried == [told]


def test_no_error_is_agreed_on_silently() -> None:
    FakeWorld(0, [None, None]).raise_on_all(None)
    assert SingleProcess().run_on_all(lambda: 5) == 5


def test_calls_of_threads_run_on_the_main_thread_where_mpi_wants_it() -> None:
    import threading

    service = MainThreadDispatcher(direct=False)
    ran_on: list[int] = []
    thread = threading.Thread(target=lambda: service.call(lambda: ran_on.append(threading.get_ident())), daemon=True)
    thread.start()
    while thread.is_alive():
        service.serve()
    assert ran_on == [threading.get_ident()]


class Closing(FakeWorld):
    """One rank that notes what it is told at its end."""

    def __init__(self, agreed: bool) -> None:
        super().__init__(1, [None, None])
        self.ended_together = agreed
        self.told: list[str] = []
        self.channel = SimpleNamespace(fail=self.told.append)  # type: ignore[assignment]

    def close(self) -> None:
        self.told.append("left")


@pytest.mark.parametrize(
    ("error", "agreed", "told"),
    [
        (None, False, "left"),
        (ConfigError("all found it"), True, "left"),
        (ConfigError("odd"), False, "rank 1 on host1: odd"),
        (KeyboardInterrupt(), False, "rank 1 on host1: interrupted"),
        (SystemExit(0), False, "rank 1 on host1: SystemExit: 0"),
        (MemoryError("full"), False, "rank 1 on host1: MemoryError: full"),
    ],
)
def test_a_rank_leaves_in_good_order_or_tells_the_others_why(
    error: BaseException | None, agreed: bool, told: str
) -> None:
    world = Closing(agreed)
    with suppress(BaseException), world:
        if error is not None:
            raise error
    assert world.told == [told]


def test_a_process_that_has_not_left_ends_the_others_at_its_exit() -> None:
    code = """\
from caffepy.distributed.processes.launcher import joining, left
joining(lambda status: print('ended', status))
"""
    ends = {"raise KeyboardInterrupt": "ended 130", "raise SystemExit(0)": "ended 1", "left()": "", "pass": "ended 1"}
    for last, printed in ends.items():
        done = subprocess.run([sys.executable, "-c", code + last], capture_output=True, text=True, timeout=300)
        assert done.stdout.strip() == printed, done.stderr


def test_what_such_a_call_raises_reaches_its_thread() -> None:
    def fail() -> None:
        raise TimeoutError("too late")

    service = MainThreadDispatcher(direct=False)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(service.call, fail)
        end = time.monotonic() + 10
        while not call.done() and time.monotonic() < end:
            service.serve()
        service.abort()
        with pytest.raises(TimeoutError, match="too late"):
            call.result()

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from process_groups import free_port
from subprocess_training import REPOSITORY, program_environment

from caffepy import distributed
from caffepy.errors import UserError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_a_group_of_one() -> None:
    assert not distributed.is_initialized()
    group = distributed.init_process_group(timeout=timedelta(seconds=5))
    assert distributed.is_initialized()
    assert (distributed.get_rank(), distributed.get_world_size(), distributed.get_local_rank()) == (0, 1, 0)
    assert (group.timeout, group.backend, distributed.get_group()) == (5.0, "tcp", group)
    distributed.destroy_process_group()
    assert not distributed.is_initialized()


@pytest.mark.parametrize("backend", ["tcp", "mpi"])
def test_every_function_alone(backend: str) -> None:
    array, other = np.arange(3.0), np.zeros(3)
    with distributed.init_process_group(backend):
        distributed.broadcast(array)
        distributed.all_reduce(array, distributed.AVG)
        distributed.reduce(array, 0, distributed.MAX)
        distributed.barrier(async_op=True).wait()
        for call in (
            lambda: distributed.all_gather([other], array),
            lambda: distributed.gather(array, [other]),
            lambda: distributed.scatter(other, [array]),
            lambda: distributed.reduce_scatter(other, [array], distributed.PRODUCT),
            lambda: distributed.all_to_all([other], [array]),
        ):
            other[:] = 9.0
            call()
            assert other.tolist() == array.tolist() == [0.0, 1.0, 2.0]
        for refused in (distributed.send, distributed.recv, distributed.isend, distributed.irecv):
            with pytest.raises(UserError, match="cannot send to itself"):
                refused(array, 0)


def test_two_groups_are_refused() -> None:
    with distributed.init_process_group(), pytest.raises(UserError, match="init_process_group was called before"):
        distributed.init_process_group()


@pytest.mark.parametrize(
    "call", [distributed.get_rank, distributed.destroy_process_group, lambda: distributed.all_reduce(np.zeros(2))]
)
def test_without_a_group(call: Any) -> None:
    with pytest.raises(UserError, match="there is no process group: call caffepy.distributed.init_proc"):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "Glo"}, "backend 'Glo' is not known; known: nccl, mpi, tcp"),
        ({"backend": 3}, "backend '3' is not known"),
        ({"timeout": 0}, "timeout is 0; it must be a positive number of seconds"),
        ({"timeout": timedelta(seconds=-1)}, "timeout is -1 day"),
        ({"device_id": 0}, "init_process_group: device_id is for backend 'nccl'"),
        ({"init_method": "smoke://signals"}, "init_method 'smoke://signals' is none of"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        distributed.init_process_group(**arguments)
    assert not distributed.is_initialized()


def run_script(rank: int, port: int, code: str) -> subprocess.Popen[str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CAFFEPY_JOB_SECRET": "known to both",
    }
    environment = program_environment(variables)
    environment["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), environment["PYTHONPATH"]))
    begin = "import numpy as np\nfrom caffepy import distributed as d\nd.init_process_group(timeout=300)\n"
    command = [sys.executable, "-c", begin + code]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run_scripts(first: str, second: str) -> list[tuple[int, str]]:
    """Exit status and output of two scripts that form a group."""
    port = free_port()
    scripts = [run_script(rank, port, code) for rank, code in enumerate((first, second))]
    try:
        outputs = [script.communicate(timeout=300)[0] for script in scripts]
    finally:
        for script in scripts:
            script.kill()
    return [(script.returncode, output) for script, output in zip(scripts, outputs, strict=True)]


def test_scripts_that_forget_to_destroy_the_group_end_well() -> None:
    code = "x = np.full(3, d.get_rank() + 1.0); d.all_reduce(x); print(x)"
    assert run_scripts(code, code) == [(0, "[3. 3. 3.]\n")] * 2


def test_a_script_that_dies_of_an_error_tells_why() -> None:
    (first, heard), (second, said) = run_scripts("d.barrier()", "{}['key']")
    assert (first, second) == (1, 1)
    assert "barrier: rank 1 on " in heard.splitlines()[-1] and heard.splitlines()[-1].endswith("KeyError: 'key'")
    assert said.splitlines()[-1] == "KeyError: 'key'"


def test_groups_and_objects_alone() -> None:
    with distributed.init_process_group() as group:
        part = distributed.new_group([0])
        assert not isinstance(part, distributed.GroupMember)
        assert (part.size, distributed.get_backend()) == (1, "tcp")
        found: list[Any] = [None]
        distributed.all_gather_object(found, {"a": [1, None]}, group=part)
        assert found == [{"a": [1, None]}]
        distributed.gather_object(np.float32(3), found)
        assert found == [3.0] and type(found[0]) is np.float32
        distributed.broadcast_object_list(found)
        assert found == [3.0]
        distributed.scatter_object_list(found, [(1, "x")])
        assert found == [(1, "x")]
        with pytest.raises(UserError, match="broadcast_object_list: a object does not travel"):
            group.broadcast_object_list([object()])
    assert part.destroyed


@pytest.mark.parametrize("ranks", [[], [1], [-1], [0, 0], ["0"], [0.5]])
def test_ranks_of_a_new_group_are_checked(ranks: Any) -> None:
    with distributed.init_process_group(), pytest.raises(UserError, match="name different ranks from 0 to 0"):
        distributed.new_group(ranks)

"""A script over `caffepy.distributed`; the tests start several at once.

    distributed_program.py ACTION [VICTIM]     the environment's INIT, BACKEND and TIMEOUT go to init_process_group

ACTION is ``check`` (everything), or what rank VICTIM does while all others reduce: ``kill`` itself, ``raise``,
``sleep``, ``leave``, ``exit`` with status 3, call another operation (``differ``), or bring an array of another
``size``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
from collectives import Checker

from caffepy import distributed

_LATE = 4.0
"""Seconds after which the others have given a sleeping rank up."""


def misbehave(action: str) -> None:
    """What the victim does."""
    os.write(2, f"fault at {time.time()}\n".encode())
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise ValueError("injected")
    if action == "exit":
        sys.exit(3)
    if action == "leave":
        distributed.destroy_process_group()
    if action in ("sleep", "leave"):
        time.sleep(_LATE)
    if action == "differ":
        distributed.broadcast(np.zeros(3, np.float64))
    if action == "size":
        distributed.all_reduce(np.zeros(5, np.float32))


def check_subgroups(group: distributed.ProcessGroup) -> None:
    """Groups of one rank, of all but the first, and of all; arrays and objects of each."""
    everybody = list(range(group.size))
    for ranks in ([group.size - 1], everybody[1:], everybody):
        part = distributed.new_group(ranks)
        if group.rank not in ranks:
            assert part is distributed.GroupMember.NON_GROUP_MEMBER
            continue
        assert not isinstance(part, distributed.GroupMember)
        assert (part.rank, part.size) == (ranks.index(group.rank), len(ranks))
        assert part.backend == group.backend == distributed.get_backend()
        array = np.full(3, group.rank, np.float32)
        part.all_reduce(array)
        assert array.tolist() == [sum(ranks)] * 3
        own = {"rank": group.rank, "array": np.arange(group.rank)}
        found: list[Any] = [None] * part.size
        part.all_gather_object(found, own)
        assert [each["rank"] for each in found] == ranks
        assert [len(each["array"]) for each in found] == ranks
        objects = [(group.rank, b"x")]
        distributed.broadcast_object_list(objects, src=ranks[-1], group=part)
        assert objects == [(ranks[-1], b"x")]
        gathered = [None] * part.size if part.rank == 0 else None
        part.gather_object(group.rank, gathered)
        assert gathered == (ranks if part.rank == 0 else None)


def main() -> None:
    """Run the action."""
    group = distributed.init_process_group(
        os.environ.get("BACKEND"), os.environ.get("INIT"), timeout=float(os.environ.get("TIMEOUT", "30"))
    )
    action = sys.argv[1]
    if action == "check":
        checks = Checker(group).everything()
        check_subgroups(group)
        distributed.destroy_process_group()
        os.write(1, f"rank {group.rank} of {group.size} over {group.backend}: {checks} checks\n".encode())
        return
    array = np.ones(4, np.float32)
    for _ in range(3):
        distributed.all_reduce(array, distributed.MAX)
    if group.rank == int(sys.argv[2]):
        misbehave(action)
    else:
        distributed.all_reduce(array)


if __name__ == "__main__":
    main()

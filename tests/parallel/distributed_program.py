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


def main() -> None:
    """Run the action."""
    group = distributed.init_process_group(
        os.environ.get("BACKEND"), os.environ.get("INIT"), timeout=float(os.environ.get("TIMEOUT", "30"))
    )
    action = sys.argv[1]
    if action == "check":
        checks = Checker(group).everything()
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

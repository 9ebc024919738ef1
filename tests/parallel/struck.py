"""caffepy's command line, over which a signal or an error comes at one moment between its first import and its exit.

STRIKE="kind rank moment" in the environment names a signal or MemoryError, the rank, and the moment: the one in which
the main thread enters its n-th different function of caffepy. With ``count 0 0`` rank 0 prints how many it has entered.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = f"{os.sep}caffepy{os.sep}"
_LONGEST = 300
"""Seconds after which a run ends whose tests were killed and did not end it."""


def strike(kind: str, moment: int) -> None:
    """Let a fault come over this process."""
    seen: set[CodeType] = set()

    def look(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in seen or PACKAGE not in code.co_filename or not code.co_flags & CO_NEWLOCALS:
            return
        seen.add(code)
        if len(seen) != moment:
            return
        sys.setprofile(None)
        where = f"{Path(code.co_filename).name}:{code.co_name}"
        os.write(2, f"{kind} in {where}\nfault at {time.time()}\n".encode())
        if kind == "MemoryError":
            raise MemoryError("injected")
        os.kill(os.getpid(), getattr(signal, kind))

    sys.setprofile(look)
    if kind == "count":
        atexit.register(lambda: os.write(2, f"entered {len(seen)} functions\n".encode()))


if __name__ == "__main__":
    signal.alarm(_LONGEST)
    kind, rank, moment = os.environ["STRIKE"].split()
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK")) == rank:
        strike(kind, int(moment))
    import program

    sys.exit(program.main(program.arguments()))

"""How a process that has joined other ranks exits: it leaves them in good order, or it ends them.

Python finalises MPI when a process exits, and MPI_Finalize waits for all ranks. A rank that exits for a reason of its
own, such as Ctrl-C while MPI starts, would wait for ranks that wait for it.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable

from caffepy.errors import exit_status

_end: Callable[[int], None] | None = None
"""Ends the ranks that this process has joined and not left."""


def joining(end: Callable[[int], None]) -> None:
    """Have `end` called with an exit status when this process exits without having `left`; called before it joins."""
    global _end
    _end = end


def left() -> None:
    """This process has left the other ranks in good order, or all have agreed on the error with which they end."""
    global _end
    _end = None


def end_unless_left(status: int) -> None:
    """End the joined ranks, if this process has not left them."""
    if _end is None:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a further one ends the process, and so the launcher the job
    _end(status)


def _exit() -> None:
    end_unless_left(exit_status(getattr(sys, "last_value", None)))


# Python calls the later one first. An interrupt that comes at that moment would be lost with the function it ends.
atexit.register(_exit)
atexit.register(lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) if _end is not None else None)

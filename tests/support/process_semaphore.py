"""A semaphore between the processes that run tests, for what the machine has too little of for all at once."""

from __future__ import annotations

import fcntl
import getpass
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def semaphore(name: str, count: int, timeout: float = 300.0) -> Iterator[None]:
    """A block that at most so many threads and processes of this user are in.

    Args:
        name: the same in all that share it.
        count: how many may be in their blocks.
        timeout: seconds to wait.

    Raises:
        TimeoutError: others were in their blocks for so long.
    """
    end = time.monotonic() + timeout
    with ExitStack() as stack:
        paths = (Path(tempfile.gettempdir(), f"{name}-{getpass.getuser()}-{i}.lock") for i in range(count))
        files = [stack.enter_context(path.open("w")) for path in paths]
        while not any(map(_locked, files)):
            if time.monotonic() > end:
                raise TimeoutError(f"others have {name} for longer than {timeout:.0f} s")
            time.sleep(0.05)
        yield


def _locked(file: IO[str]) -> bool:
    """Whether a file could be locked, for as long as it is open."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False

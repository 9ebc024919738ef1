"""Start a function in several processes of this host that may form a process group; a failure ends all of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from caffepy.distributed.default import destroy_process_group, get_group, is_initialized
from caffepy.distributed.launch.launchers import RANK, Rendezvous
from caffepy.distributed.processes.launcher import SECRET
from caffepy.errors import PeerError, RunError, UserError, describe

_POLL_SECONDS = 0.2
_FAILURE_SECONDS = 2.0
"""Seconds to wait for further errors after the first one, which may not be the cause."""
_END_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_PR_SET_PDEATHSIG = 1
_LONGEST_TEXT = 20000
"""Maximum length of an error with its traceback; less than a pipe's capacity."""
_PEER, _OWN = b"p", b"o"


@dataclass
class _Child:
    """One process, and the pipe through which it reports its error."""

    rank: int
    process: SpawnProcess
    pipe: Connection
    text: str = ""
    peers: bool = False
    """Whether `text` reports another process's failure."""

    def read(self) -> None:
        """Read the error that the process has sent, if any."""
        with suppress(EOFError, OSError):
            if not self.text and self.pipe.poll():
                message = self.pipe.recv_bytes()
                self.peers, self.text = message[:1] == _PEER, message[1:].decode(errors="replace")

    @property
    def failed(self) -> bool:
        return bool(self.text) or self.process.exitcode not in (None, 0)

    def describe(self) -> str:
        """Return the cause of the process's failure."""
        code = self.process.exitcode
        if self.text:
            return f"rank {self.rank}: {self.text}"
        if code is not None and code < 0:
            return f"rank {self.rank} was ended by {signal.Signals(-code).name}"
        return f"rank {self.rank} has ended with status {code} without an error message"


class ProcessContext:
    """The processes of `spawn` with ``join=False``.

    Args:
        children: the processes, in the order of ranks.
    """

    def __init__(self, children: list[_Child]) -> None:
        self._children = children

    @property
    def processes(self) -> list[SpawnProcess]:
        """The processes, in the order of ranks."""
        return [child.process for child in self._children]

    def pids(self) -> list[int | None]:
        """Return the numbers of the processes."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of all processes; return whether all have ended within `timeout` seconds.

        Raises:
            RunError: as in `spawn`; all other processes are ended.
        """
        if not _wait(self._children, timeout):
            return False
        try:
            _raise_failure(self._children)
        finally:
            _end(self._children)
        return True


def spawn(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, daemon: bool = False
) -> ProcessContext | None:
    """Call ``fn(rank, *args)`` in processes of this host, as `torch.multiprocessing.spawn`.

    `fn` calls `init_process_group`, which needs no arguments: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    and a secret are in the environment of each process. A group that `fn` leaves open is destroyed after it. The
    processes import the function's module again: call `spawn` under `if __name__ == "__main__":`, and in a notebook
    import the function from a module.

    Args:
        fn: a module-level function.
        args: its arguments after the rank; they are pickled.
        nprocs: the number of processes.
        join: wait for the end of all processes.
        daemon: start daemonic processes, which cannot start processes.

    Returns:
        None; with ``join=False`` the context of the running processes.

    Raises:
        UserError: nprocs is not a positive integer.
        RunError: the function raised in a process, or a process died; the message contains the error, the cause its
            traceback. All other processes are ended.
    """
    if not callable(fn):
        raise UserError(f"spawn: fn is a {type(fn).__name__}; it must be a function: spawn(fn, args=(), nprocs=1)")
    if not isinstance(args, (tuple, list)):
        raise UserError(f"spawn: args is a {type(args).__name__}; it must be a tuple: spawn(fn, args=(), nprocs=1)")
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise UserError(f"spawn: nprocs is {nprocs!r}; it must be an integer of 1 or more")
    rendezvous = Rendezvous().complete()
    shared = {
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": str(rendezvous.address),
        "MASTER_PORT": str(rendezvous.port),
        SECRET: secrets.token_hex(),
    }
    children: list[_Child] = []
    try:
        for rank in range(nprocs):
            variables = {**shared, RANK: str(rank), "LOCAL_RANK": str(rank)}
            children.append(_start(rank, variables, fn, (rank, *args), daemon))
        context = ProcessContext(children)
        if not join:
            return context
        context.join()
    except BaseException:
        _end(children)
        raise
    return None


def _start(rank: int, variables: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...], daemon: bool) -> _Child:
    # A fork would copy the parent's threads' locks, CUDA context and MPI state, none of which survives it.
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe(duplex=False)
    process = context.Process(
        target=_work, args=(other, os.getpid(), variables, fn, args), name=f"caffepy rank {rank}", daemon=daemon
    )
    try:
        process.start()
    except BaseException:
        own.close()
        raise
    finally:
        # The child has its own copy. As long as this one is open, the end of the child would not close the pipe.
        other.close()
    return _Child(rank, process, own)


def _wait(children: list[_Child], timeout: float | None) -> bool:
    """Wait until all have ended; after a failure, only until the others have sent their errors."""
    limit = None if timeout is None else time.monotonic() + timeout
    end: float | None = None
    while any(child.process.is_alive() for child in children):
        running = [child.process.sentinel for child in children if child.process.is_alive()]
        pipes = [child.pipe for child in children if not child.text and child.process.is_alive()]
        left = _POLL_SECONDS if limit is None else max(0.0, limit - time.monotonic())
        wait([*running, *pipes], min(_POLL_SECONDS, left))
        for child in children:
            child.read()
        # The first error that arrives may be that of a rank whose peer has failed: the cause gets some time to arrive.
        if end is None and any(child.failed for child in children):
            end = time.monotonic() + _FAILURE_SECONDS
        if end is not None and time.monotonic() > end:
            return True
        if end is None and limit is not None and time.monotonic() > limit:
            return False
    for child in children:
        child.read()
    return True


def _raise_failure(children: list[_Child]) -> None:
    """Raise the most likely cause: a process's own error, else a sudden death, else an error about a peer."""
    failed = sorted((child for child in children if child.failed), key=lambda child: (child.peers, not child.text))
    if not failed:
        return
    first, _, trace = failed[0].describe().partition("\n")
    raise RunError(f"spawn: {first}") from (RunError(trace) if trace else None)


def _end(children: list[_Child]) -> None:
    """End the processes that are still running."""
    running = [child.process for child in children if child.process.is_alive()]
    for process in running:
        process.terminate()
    end = time.monotonic() + _END_SECONDS
    for process in running:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
    for child in children:
        child.process.join(_END_SECONDS)
        child.pipe.close()


# -- in the process -----------------------------------------------------------------------------------


def _work(
    pipe: Connection, parent: int, variables: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Call the function and leave its group; an error is sent to the parent before the peers notice it."""
    _end_with(parent)
    os.environ.update(variables)
    try:
        fn(*args)
        _leave()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            _leave()
            return
        # Before the group is aborted: the peers' errors, which follow from this one, must not reach the parent first.
        _send_error(pipe, error)
        _abort_group(error)
        sys.exit(1)


def _leave() -> None:
    if is_initialized():
        destroy_process_group()


def _send_error(pipe: Connection, error: BaseException) -> None:
    kind = _PEER if isinstance(error, PeerError) else _OWN
    text = f"{describe(error)}\n{traceback.format_exc()}"
    with suppress(OSError):
        pipe.send_bytes(kind + text[:_LONGEST_TEXT].encode(errors="replace"))


def _abort_group(error: BaseException) -> None:
    """Abort the other processes' waits."""
    with suppress(UserError, PeerError):
        group = get_group()
        group.abort(group.failure or group.describe_failure(error))


def _end_with(parent: int) -> None:
    """Make the kernel end this process with its parent; exit at once if the parent has ended already."""
    with suppress(OSError, AttributeError):
        # A parent that is killed cannot end its children; the kernel does it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended before prctl was called, which then sends nothing.
    if os.getppid() != parent:
        os._exit(1)

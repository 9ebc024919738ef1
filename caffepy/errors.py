"""Every error that caffepy raises on purpose, and the exit status that each means.

A message says the mistake, its place, and the remedy. `UserError` is a mistake in the
user's input (exit status 2); `RunError` is a failure while running (exit status 1);
`InternalError` is a mistake in caffepy (exit status 70).
"""

from __future__ import annotations

import re

LONGEST_MESSAGE = 4000
"""Characters of an error's line; the middle of a longer one is left out."""
NO_THREADS = (
    "the system gives this process no more threads: raise the limit of processes (ulimit -u, a container's pids "
    "limit), or end other programs"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def printable(text: str) -> str:
    """A name as a terminal, a log line or a table can show it: control characters and line breaks are escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_message(text: str) -> str:
    """A message of the log, as `printable`; tabs stay, since they separate the columns of Caffe's `time`."""
    return "\t".join(map(printable, text.split("\t")))


def spreadsheet_text(text: str) -> str:
    """A name as a cell of CSV: printable, and behind an apostrophe where a spreadsheet would read a formula."""
    return printable(f"'{text}" if text[:1] in tuple("=+-@\t\r\n") and not _NUMBER.fullmatch(text) else text)


def one_line(text: str) -> str:
    """A message as one line of at most `LONGEST_MESSAGE` characters; control characters are escaped."""
    line = printable(text.strip())
    if len(line) <= LONGEST_MESSAGE:
        return line
    half = LONGEST_MESSAGE // 2
    return f"{line[:half]} [... {len(line) - 2 * half} characters ...] {line[-half:]}"


class CaffepyError(Exception):
    """Base of caffepy's errors; the command line prints the message and no traceback."""

    exit_status = 1


class UserError(CaffepyError):
    """Something the user gave is wrong; the message says what to change."""

    exit_status = 2


class ConfigError(UserError):
    """A prototxt or a command-line option does not hold together."""


class OptionError(ConfigError):
    """An option of the command line is unknown, or its value is invalid."""


class ShapeError(UserError):
    """Blobs of shapes that do not fit, with the layer that found them."""


class BlobSizeError(ShapeError):
    """A blob has more elements than Caffe's blobs may have; fewer samples in a batch may be possible."""


class DataError(UserError):
    """A record source is absent or truncated, or its records do not fit the net."""


class SnapshotError(UserError):
    """A .caffemodel or .solverstate cannot be read or does not fit the net or solver."""


class DeviceError(UserError):
    """A requested device, driver or library is not available."""


class OutOfMemoryError(DeviceError):
    """A device has too little free memory.

    Args:
        problem: the layer or step, the bytes it requested and the bytes available.
        advice: what the user can do.
        available: bytes that the net could use in all: free ones and those it already holds; None if unknown.
    """

    def __init__(self, problem: str, advice: str, available: int | None = None) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem = problem
        self.advice = advice
        self.available = available

    def within(self, where: str) -> OutOfMemoryError:
        """The same error with the layer or step at fault before its message."""
        return OutOfMemoryError(f"{where}: {self.problem}", self.advice, self.available)

    def advising(self, advice: str) -> OutOfMemoryError:
        """The same error with better advice."""
        return OutOfMemoryError(self.problem, advice, self.available)


class RunError(CaffepyError):
    """Training or testing failed while running."""


class InternalError(RunError):
    """A mistake in caffepy itself: an unexpected exception."""

    exit_status = 70  # EX_SOFTWARE of sysexits.h


class NonFiniteError(RunError):
    """The loss became NaN or infinite, or too many updates in a row were skipped.

    Args:
        reason: the mistake and the remedy.
        iteration: in which; the message begins with it.
    """

    def __init__(self, reason: str, iteration: int) -> None:
        super().__init__(f"iteration {iteration}: {reason}")
        self.reason = reason
        self.iteration = iteration


class PeerError(RunError):
    """Another solver thread or MPI rank failed, ended or kept the others waiting."""


class AbortedError(PeerError):
    """This thread was released from a wait because another one failed first."""


def lacks_threads(error: BaseException) -> bool:
    """Whether an error is Python's RuntimeError for a thread that cannot be started."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


_CANNOT_MAP = ("failed to map segment from shared object", "cannot map zero-fill pages", "Cannot allocate memory")
"""What the dynamic loader says where there is no memory for a library."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that the process cannot have more memory, for its data or to load a library."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, (ImportError, OSError)) and any(text in str(error) for text in _CANNOT_MAP)


def describe(error: BaseException) -> str:
    """An error in one line; other errors than CaffepyError with their type."""
    if lacks_threads(error):
        return NO_THREADS
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return one_line(str(error) if isinstance(error, CaffepyError) else f"{type(error).__name__}: {error}")


INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 + SIGINT."""


def exit_status(error: BaseException | None) -> int:
    """The exit status of a process that ends with `error`, or for an unknown reason where there is none."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.exit_status if isinstance(error, CaffepyError) else RunError.exit_status


class StopRequestedError(AbortedError):
    """A stop was requested while a solver waited for its data; the solver catches it."""

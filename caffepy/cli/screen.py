"""What `caffepy train` shows on a terminal (summary, short log lines, live line), and how that terminal is found.

The whole log goes to a file. Only `caffepy.cli.train` uses this module. Where stderr is no terminal, the log is as
`caffepy.cli.output` writes it.

The terminal that shows this process's stderr is found also where mpirun or `caffepy launch` passes stderr on through a
pipe. MPI's launchers pass on whole lines only, so a line that is redrawn has to be written to their terminal itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from caffepy import version
from caffepy.distributed.launch.run import LINE, TERMINAL
from caffepy.distributed.processes.launcher import find_launcher
from caffepy.errors import printable, printable_message
from caffepy.formats.paths import PathResolver
from caffepy.training.options import TrainOptions
from caffepy.utils.glog import GlogFormatter, StderrHandler, log_folder
from caffepy.utils.progress import progress_bar

if TYPE_CHECKING:
    from caffepy.training.solver import Solver


_NAMES = 11
"""Columns of the names in the summary."""


class ScreenFormatter(logging.Formatter):
    """Formats records as ``11:29:00 message``, with ``warning:`` or ``error:`` before the messages of these levels.

    Args:
        ends: formats the error that ends the command; None: as `GlogFormatter`.
    """

    def __init__(self, ends: logging.Formatter | None = None) -> None:
        super().__init__()
        self._ends = ends or GlogFormatter()

    def format(self, record: logging.LogRecord) -> str:
        """`11:29:00 Iteration 100, loss = 0.25`."""
        if getattr(record, "ends", False):
            return self._ends.format(record)
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {level}{printable_message(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class LogFile(logging.Handler):
    """Writes records to a file; keeps them until it is opened. A full disk does not stop training."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(GlogFormatter())
        self.path: Path | None = None
        self._file: TextIO | None = None
        self._kept: list[str] = []

    def open(self, path: Path | None) -> None:
        """Create the file; in the folder of temporary files if `path` is None or cannot be created."""
        self.acquire()
        try:
            self.path, self._file = _create(path)
            kept, self._kept = self._kept, []
            for line in kept:
                self._write(line)
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write or keep one record."""
        line = self.format(record)
        if self._file is None:
            self._kept.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        assert self._file is not None
        with suppress(OSError, ValueError):
            self._file.write(f"{line}\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        super().close()


def _create(path: Path | None) -> tuple[Path, TextIO]:
    if path is not None:
        with suppress(OSError, ValueError):
            return path, path.open("x", encoding="utf-8", errors="backslashreplace")
    number, name = tempfile.mkstemp(".log", "caffepy-")
    return Path(name), os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace")


class TrainingScreen:
    """The terminal during a training; a context manager.

    Args:
        terminal: where lines are written.
        solver_file: the solver's file, for the summary.
    """

    def __init__(self, terminal: TextIO, solver_file: Path) -> None:
        self._terminal = terminal
        self._solver_file = solver_file
        self._options: TrainOptions | None = None
        self._solver: Solver | None = None
        self._log_folder = log_folder()
        self._log_file = LogFile()
        self._stack = ExitStack()
        self._bar = ExitStack()
        self._handlers = [h for h in logging.getLogger("caffepy").handlers if isinstance(h, StderrHandler)]

    def __enter__(self) -> TrainingScreen:
        logger = logging.getLogger("caffepy")
        if self._terminal is not sys.stderr:
            self._stack.callback(self._terminal.close)
        if self._log_folder is None:
            logger.addHandler(self._log_file)
        self._stack.callback(self._log_file.close)
        self._stack.callback(logger.removeHandler, self._log_file)
        for handler in self._handlers:
            self._stack.callback(setattr, handler, "write_line", handler.write_line)
            self._stack.callback(handler.setFormatter, handler.formatter)
            self._stack.callback(handler.removeFilter, self._shows)
            handler.write_line = self._write
            handler.setFormatter(ScreenFormatter(handler.formatter))
            handler.addFilter(self._shows)
        self._write(f"caffepy {version.__version__}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._stack.close()

    def _shows(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown: before the first iteration only warnings and errors."""
        return self._solver is not None or record.levelno > logging.INFO

    # -- the events of a training --------------------------------------------------------------------

    def read(self, options: TrainOptions) -> None:
        """Called when the options are known: opens the log file beside the snapshots, unless GLOG_log_dir has one."""
        self._options = options
        if self._log_folder is None:
            self._log_file.open(log_path(options))

    def begin(self, solver: Solver) -> None:
        """Called on rank 0 when all devices are ready: shows the summary and, from the first iteration on, the bar."""
        assert self._options is not None
        columns = shutil.get_terminal_size().columns
        with suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._terminal.fileno()).columns or columns
        for line in summary(self._solver_file, self._options, solver, self._log_folder or self._log_file.path, columns):
            with suppress(OSError, ValueError):
                self._write(line)
        self._solver = solver
        end = solver.iteration + 1 if self._options.check_only else solver.param.max_iter
        status = partial(live_values, solver)
        bar = progress_bar(lambda: solver.iteration, lambda: end, wanted=True, status=status, file=self._terminal)
        self._bar.enter_context(bar)

    def end(self) -> None:
        """Called when training is over: closes the bar."""
        self._bar.close()

    def _write(self, line: str) -> None:
        self._terminal.write(f"{printable(line)}\n")
        self._terminal.flush()


def log_path(options: TrainOptions) -> Path | None:
    """Return the path of a new log file, ``PREFIX_20261127-231500.log``; None for a temporary file."""
    prefix = options.solver.snapshot_prefix
    if not prefix or options.check_only or options.lr_find is not None:  # they write nothing beside snapshots
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return (options.resolve or PathResolver(None)).output(f"{prefix}_{stamp}.log")


def live_values(solver: Solver) -> str:
    """Return what the live line shows behind the bar: ``loss 0.25, lr 0.01``."""
    loss = solver.losses.last if solver.shown is None else solver.shown.loss
    parts = [] if loss is None else [f"loss {loss:.4g}"]
    return ", ".join([*parts, f"lr {solver.hyperparameters.rate:.3g}"])


# -- the summary ------------------------------------------------------------------------------------------


def summary(solver_file: Path, options: TrainOptions, solver: Solver, log_file: Path | None, columns: int) -> list[str]:
    """Return the lines of the summary, none wider than `columns` where its words allow.

    Args:
        solver_file: the solver's file.
        options: the training's.
        solver: of the first device.
        log_file: where the log is written.
        columns: width of the terminal.
    """
    lines = []
    for name, text in _entries(solver_file, options, solver, log_file):
        indent = " " * (_NAMES + 2)
        wrapped = textwrap.wrap(
            text, max(columns - len(indent) - 1, 20), break_long_words=False, break_on_hyphens=False
        )
        lines += [f"  {name:<{_NAMES}}{wrapped[0] if wrapped else ''}", *(indent + line for line in wrapped[1:])]
    return lines


def _entries(
    solver_file: Path, options: TrainOptions, solver: Solver, log_file: Path | None
) -> Iterator[tuple[str, str]]:
    param, net, shard = solver.param, solver.net, solver.shard
    yield (
        "solver",
        f"{solver_file}: {param.type}, {param.lr_policy}, base_lr {param.base_lr:g}, {param.max_iter} iterations",
    )
    if options.assignments:
        yield "set", ", ".join(options.assignments)
    learned = sum(parameter.blob.count for parameter in net.parameters.parameters)
    layers = sum(layer.type != "Split" for layer in net.layers)
    tests = len(solver.test_nets)
    tested = f"; {tests} test net{'s' * (tests > 1)}" if tests else "; no test net"
    yield "net", f"{net_files(options)}: {layers} layers, {learned:,} parameters{tested}"
    if solver.snapshots.resumed_from is not None:
        yield "resumed", f"from {solver.snapshots.resumed_from}, iteration {solver.iteration}"
    elif options.weights:
        yield "weights", ", ".join(map(str, options.weights))
    ranks = shard.world_size // shard.devices_per_rank
    processes = f"{ranks} processes, each with " if ranks > 1 else ""
    count = f"{shard.devices_per_rank} x " if shard.devices_per_rank > 1 else ""
    yield "devices", f"{processes}{count}{solver.backend.device_description()}"
    batch = solver.performance.batch
    yield "batch", f"{batch} per device, {batch * shard.world_size} in all"
    if solver.planned_memory is not None:
        yield "memory", f"{solver.planned_memory / 2**20:,.1f} MiB per device"
    if solver.snapshots.wanted and not options.check_only:
        every = f"every {param.snapshot} iterations" if param.snapshot else "at the end"
        yield "snapshots", f"{param.snapshot_prefix}_iter_N, {every}"
    if log_file is not None:
        yield "log", str(log_file)
    if notice := interrupt_notice():
        yield "Ctrl-C", notice


def net_files(options: TrainOptions) -> str:
    """Return the names of the net's files; the net's own name if the solver contains it."""
    param = options.solver
    for field in ("net", "train_net"):
        if param.HasField(field):
            return str(getattr(param, field))
    return param.net_param.name or param.train_net_param.name or "net"


def interrupt_notice() -> str:
    """Return what Ctrl-C does if the launcher leaves no time for a snapshot; else ""."""
    launcher = find_launcher()
    if launcher is None or launcher.store is not None or launcher.name == "srun" or os.environ.get(LINE):
        return ""
    return (
        f"{launcher.name} kills training within half a second, too soon for most snapshots; "
        f"'caffepy launch --nproc-per-node {launcher.size or 'N'} -- train ...' lets it write one"
    )


# -- the terminal --------------------------------------------------------------------------------------

_PROGRAMS = frozenset(
    ("mpirun", "mpiexec", "prterun", "orterun", "mpiexec.hydra", "hydra_pmi_proxy", "mpirun.openmpi", "mpirun.mpich")
)
"""Names of the processes of MPI's launchers, as the kernel cuts them to 15 characters."""


def open_terminal(environment: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> TextIO | None:
    """Return the terminal that shows stderr: stderr itself, or the terminal of the launcher if it is on this machine.

    Args:
        environment: the process's.
        proc: the folder of processes.

    Returns:
        None if there is no terminal, and on ranks other than 0. The caller closes a file that is not stderr.
    """
    launcher = find_launcher(environment)
    if sys.stderr is None or (launcher is not None and launcher.rank != 0):
        return None
    if sys.stderr.isatty():
        return sys.stderr
    if launcher is None:
        return None
    path = _told(environment.get(TERMINAL, "")) or _of_launcher(proc)
    return None if path is None else _open(path)


def _told(text: str) -> str | None:
    host, _, path = text.partition(":")
    return path if host == socket.gethostname() and _is_terminal(path) else None


def _of_launcher(proc: Path) -> str | None:
    """Return the terminal to which a launcher's process, an ancestor of this one, writes its stderr."""
    try:
        process = _parent(proc, "self")
        while (proc / process / "comm").read_text().strip() in _PROGRAMS:
            path = os.readlink(proc / process / "fd" / "2")
            if _is_terminal(path):
                return path
            process = _parent(proc, process)
    except OSError:  # of another user, or not Linux
        pass
    return None


def _parent(proc: Path, process: str) -> str:
    """Return the number of a process's parent; the name before it in `stat` may contain anything."""
    return (proc / process / "stat").read_text().rpartition(")")[2].split()[1]


def _is_terminal(path: str) -> bool:
    return path.startswith(("/dev/pts/", "/dev/tty"))


def _open(path: str) -> TextIO | None:
    """Open a terminal of this user for writing, without making it the process's controlling terminal."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(number)
    if not stat.S_ISCHR(status.st_mode) or status.st_uid != os.geteuid() or not os.isatty(number):
        os.close(number)
        return None
    os.set_blocking(number, True)
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1)

"""`caffepy net --survey`: the prototxt files below a folder, the stages that each reaches, and missing types."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from caffepy.cli.options import import_plugin
from caffepy.cli.output import print_table, showing
from caffepy.errors import CaffepyError, ConfigError, one_line
from caffepy.formats.proto.schemas import fork_schema, register_proto
from caffepy.utils.files import read_input

NET, SOLVER, OTHER = "nets", "solvers", "other"
LOADS, BUILDS, RUNS = "load", "build", "run"
ENDINGS = (".prototxt", ".pt", ".pbtxt")
MEMORY = 8 * 2**30
"""Bytes of a process that runs a net."""

_LAYERS = re.compile(r"\blayers?\s*\{")
_OF_SOLVER = re.compile(r"\b(base_lr|lr_policy|train_net|test_iter|net_param|max_iter)\s*[:{]")
_STRING = re.compile(r"""#[^\n]*|"[^"\n]*"|'[^'\n]*'""")
_PLACEHOLDER = re.compile(r"\$|\{\{|\{%|%\(")
"""Of a template, outside of strings and comments."""
_SPECIFIC = re.compile(r"'[^']*'|\d+")
"""Names and numbers, which differ among messages of one kind."""


@dataclass(frozen=True, order=True)
class Missing:
    """A type, field, value, module, template or an error's message, for which caffepy refuses a file."""

    kind: str
    name: str

    def text(self) -> str:
        """Return its name for the table."""
        return f"{self.kind} {self.name}" if self.kind != "error" else self.name

    def remedy(self) -> str:
        """Return the option or step that opens the files."""
        return {
            "type": f"caffepy layer-stub {self.name} --proto caffe.proto, or --alias {self.name}=TYPE",
            "field": f"--ignore-fields {self.name}, or --proto caffe.proto and a --plugin that reads it",
            "value": "--proto caffe.proto",
            "module": "add its folder to PYTHONPATH",
            "template": "a script fills it in; give the result",
        }.get(self.kind, "")


@dataclass
class Surveyed:
    """A file and the stages that it reached.

    Args:
        path: the file.
        kind: `NET`, `SOLVER` or `OTHER`.
        reached: of `LOADS`, `BUILDS` and `RUNS`.
        missing: types, fields and the like that it needs; empty if it loads.
        error: why a net that loads is not run, or does not build or run.
        structure: the layer types with the fields that are set; nets of equal structure run once.
    """

    path: Path
    kind: str = OTHER
    reached: set[str] = field(default_factory=set)
    missing: list[Missing] = field(default_factory=list)
    error: str = ""
    structure: frozenset[str] = frozenset()


# -- reading ---------------------------------------------------------------------------------------------


def kind_of(text: str) -> str:
    """Return the kind of a prototxt's text: `NET`, also without layers, `SOLVER`, or `OTHER` such as a label map."""
    text = _STRING.sub("", text)
    solver = _OF_SOLVER.search(text) is not None
    if _LAYERS.search(text) and not (solver and "net_param" in text):
        return NET
    return SOLVER if solver else OTHER


def examine(path: Path, proto: Path | None = None) -> Surveyed:
    """Read a net or a solver, and list the types and fields that caffepy lacks.

    Args:
        path: the file.
        proto: a fork's schema, which this process has from now on.
    """
    result, text = Surveyed(path), ""
    try:
        if proto is not None:
            register_proto(proto)
        from caffepy.formats.load import MAX_TEXT_BYTES
        from caffepy.formats.prototxt import decode_text

        text = decode_text(read_input(path, "prototxt", ConfigError, MAX_TEXT_BYTES, "it is no prototxt"), str(path))
        result.kind = kind_of(text)
        if result.kind == NET:
            _examine_net(result, text)
        elif result.kind == SOLVER:
            _examine_solver(path)
    except CaffepyError as error:
        found = _missing_of(error, path, text)
        certain = result.missing if found.kind in ("field", "value") else []  # the text may not parse
        result.missing = [*certain, found]
    except Exception as error:
        result.missing.append(Missing("error", _bug(error)))
    if not result.missing and result.kind != OTHER:
        result.reached.add(LOADS)
    return result


def _examine_net(result: Surveyed, text: str) -> None:
    from caffepy.formats.fields import refuse_fork_fields
    from caffepy.formats.ignore import unknown_fields
    from caffepy.formats.load import read_net
    from caffepy.formats.messages import walk_fields
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers.layer import is_registered

    fields: Mapping[str, list[str]] = {}
    try:
        param = read_net(result.path)
    except ConfigError:
        fields = unknown_fields(text, caffe_pb2.NetParameter.DESCRIPTOR)
        result.missing = [Missing("field", name) for name in fields]
        param = read_net(result.path, ("all",))
    types = {layer.type for layer in param.layer if not _is_known(layer.type)}
    for layer in param.layer:
        if layer.type not in types and not is_registered(layer.type):
            refuse_fork_fields(layer, "", "")
    of_layer = {layer.name: layer.type for layer in param.layer}
    result.missing = [Missing("type", name) for name in sorted(types)]
    for name, layers in fields.items():
        if any(of_layer.get(layer) not in types for layer in layers):  # else the field comes with the type
            result.missing.append(Missing("field", name))
    modules = {layer.python_param.module for layer in param.layer if layer.type == "Python"} - {""}
    result.error = next((f"needs the Python module {name}" for name in sorted(modules) if not _can_import(name)), "")
    result.structure = frozenset(
        f"{layer.type} {' '.join(sorted({value.path for value in walk_fields(layer)}))}" for layer in param.layer
    )


def _examine_solver(path: Path) -> None:
    from caffepy.formats.load import read_solver
    from caffepy.training.rules import RULES
    from caffepy.training.solver_check import check_values

    solver = read_solver(path)
    check_values(solver, str(path))
    RULES.get(solver.type, "solver")


def _is_known(type_name: str) -> bool:
    from caffepy.layers.layer import layer_class

    try:
        layer_class(type_name)
    except ConfigError:
        return False
    return True


def _can_import(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _missing_of(error: CaffepyError, path: Path, text: str) -> Missing:
    """Return the subject of an error of reading."""
    if _PLACEHOLDER.search(_STRING.sub("", text)):
        return Missing("template", "with placeholders")
    for kind in ("value", "field"):
        if found := re.search(rf"unknown {kind} '([^']*)' of ([\w.]+); ", str(error)):
            return Missing(kind, f"{found[2]}.{found[1]}")
    if found := re.search(r"(\w+) of ([\w.]+) is a field of", str(error)):
        return Missing("field", f"{found[2]}.{found[1]}")
    return Missing("error", _message(error, path).partition("; ")[0])


def _message(error: CaffepyError, path: Path) -> str:
    """Return an error's message without the file that it begins with."""
    return one_line(re.sub(rf"^{re.escape(str(path))}(:\d+)*: ", "", str(error)))


def _bug(error: Exception) -> str:
    return f"a bug in caffepy: {type(error).__name__}: {one_line(str(error))}"


def _start(plugins: Sequence[str]) -> None:
    """Prepare a process that reads nets."""
    logging.getLogger("caffepy").setLevel(logging.CRITICAL)
    for plugin in plugins:
        import_plugin(plugin)


def examine_all(
    paths: Sequence[Path],
    jobs: int,
    plugins: Sequence[str] = (),
    proto: Path | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[Surveyed]:
    """Read files in processes of their own, with the schema of `proto` if it is given.

    Raises:
        ConfigError: a process ends.
    """
    spawn = multiprocessing.get_context("spawn")
    found = list[Surveyed]()
    with ProcessPoolExecutor(min(jobs, len(paths) or 1), spawn, _start, (list(plugins),)) as pool:
        try:
            for one in pool.map(partial(examine, proto=proto), paths, chunksize=4):
                found.append(one)
                done()
        except BrokenProcessPool as error:
            raise ConfigError(f"the files below {os.path.commonpath(paths)} cannot be read: {error}") from None
    return found


# -- running ---------------------------------------------------------------------------------------------


def _run_in_child(path: Path, record: tuple[int, ...] | None, seconds: float, connection: Connection) -> None:
    """Send the stages that a net reaches, and at the end the message of its error or ''."""
    from caffepy.formats.load import read_net
    from caffepy.net.trial import try_net

    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.getLogger("caffepy").setLevel(logging.CRITICAL)
    try:
        for stage in try_net(read_net(path), path, record):
            connection.send((stage, ""))
    except MemoryError:
        connection.send(("", f"needs more than {MEMORY >> 30} GiB"))
    except CaffepyError as error:
        connection.send(("", _message(error, path)))
    except Exception as error:
        connection.send(("", _bug(error)))


def run_all(
    nets: Sequence[Surveyed],
    record: tuple[int, ...] | None,
    jobs: int,
    seconds: float,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Run each net in a process of its own, `jobs` at a time; it has `seconds` and `MEMORY`.

    Fill `reached` and `error`.
    """
    importlib.import_module("caffepy.net.trial")  # once, before the forks
    waiting = list(reversed(nets))
    running: dict[Connection, tuple[Surveyed, ForkProcess]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            net = waiting.pop()
            ours, theirs = multiprocessing.Pipe(duplex=False)
            process = ForkProcess(target=_run_in_child, args=(net.path, record, seconds, theirs))
            process.start()
            theirs.close()
            running[ours] = net, process
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            net, process = running[ready]
            try:
                stage, net.error = ready.recv()
                net.reached |= {stage} - {""}
            except EOFError:
                process.join()
                late = process.exitcode == -signal.SIGALRM
                if process.exitcode:
                    net.error = f"takes longer than {seconds:g} s" if late else f"ended with {process.exitcode}"
                del running[ready]
                done()


# -- the report ------------------------------------------------------------------------------------------


def survey(folder: Path, record: tuple[int, ...] | None, jobs: int, seconds: float, plugins: Sequence[str]) -> None:
    """Read the prototxt files below a folder, run their nets, and print the report.

    Files that are refused are read with the schemas below the folder too, if this process has caffepy's schema.

    Args:
        folder: with files of any depth. Links to folders are not followed.
        record: shape of a record, for data layers whose fields do not tell it.
        jobs: processes at a time.
        seconds: longest run of a net.
        plugins: modules of layer types.

    Raises:
        ConfigError: there is no such folder, or it has no prototxt.
    """
    paths, schemas = _find_files(folder)
    with showing("files") as progress:
        progress.total = len(paths)

        def count() -> None:
            progress.done += 1

        files = examine_all(paths, jobs, plugins, done=count)
    refused = [one for one in files if one.missing]
    _print_missing(folder, refused)
    if fork_schema() is None:
        _try_schemas(folder, refused, schemas, jobs, plugins)
    sys.stdout.flush()  # running takes longer
    chosen: dict[frozenset[str], Surveyed] = {}
    for one in files:
        if one.kind == NET and LOADS in one.reached and one.structure and not one.error:
            chosen.setdefault(one.structure, one)
    with showing("nets") as progress:
        progress.total = len(chosen)
        run_all(list(chosen.values()), record, jobs, seconds, count)
    _print_refusals(folder, [one for one in files if one.error])
    _print_counts(folder, files, list(chosen.values()))


def _find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the prototxt files below a folder, and those named caffe.proto."""
    if not folder.is_dir():
        raise ConfigError(f"--survey {folder}: no such folder; give a folder that has prototxt files")
    paths, schemas = list[Path](), list[Path]()
    for place, folders, names in os.walk(folder):
        folders.sort()
        found = [Path(place, name) for name in sorted(names)]
        paths += [path for path in found if path.suffix in ENDINGS and path.is_file()]
        schemas += [path for path in found if path.name == "caffe.proto" and path.is_file()]
    if not paths:
        raise ConfigError(f"--survey {folder}: no file below it ends with {', '.join(ENDINGS)}")
    return paths, schemas


def _part(path: Path, folder: Path) -> str:
    """Return the first folder on the way from a folder to a file; '.' if the file is in the folder itself."""
    parts = path.relative_to(folder).parts
    return parts[0] if len(parts) > 1 else "."


def _print_counts(folder: Path, files: Sequence[Surveyed], chosen: Sequence[Surveyed]) -> None:
    rows: dict[str, Counter[str]] = {}
    for one in files:
        counts = rows.setdefault(_part(one.path, folder), Counter())
        counts.update(["files", one.kind, *(one.reached if one.kind == NET else ())])
        counts["accepted"] += one.kind == SOLVER and LOADS in one.reached
    for one in chosen:
        rows[_part(one.path, folder)]["distinct"] += 1
    if len(rows) > 1:
        rows["all"] = sum(rows.values(), Counter())
    head = ("files", OTHER, SOLVER, "accepted", NET, LOADS, "distinct", BUILDS, RUNS)
    print_table(
        [("folder", *head), *((name, *(str(counts[key]) for key in head)) for name, counts in rows.items())],
        range(1, 10),
    )


def _print_missing(folder: Path, refused: Sequence[Surveyed]) -> None:
    """Print missing types and fields of refused files, by the number of files that need them."""
    if not refused:
        return
    needed: dict[Missing, list[Surveyed]] = {}
    for one in refused:
        for missing in one.missing:
            needed.setdefault(missing, []).append(one)
    print(f"{len(refused)} files are refused. 'alone' counts the files that need nothing else.\n")
    rows = [("files", "alone", "needed", "what opens them", "for example")]
    for missing, files in sorted(needed.items(), key=lambda item: (-len(item[1]), item[0])):
        alone = sum(len(one.missing) == 1 for one in files)
        example = str(files[0].path.relative_to(folder))
        rows.append((str(len(files)), str(alone), missing.text(), missing.remedy(), example))
    print_table(rows, (0, 1), (2, 3, 4))
    print()


def _print_refusals(folder: Path, failed: Sequence[Surveyed]) -> None:
    """Print why nets that load were not run, were not built or did not run, each kind of message once."""
    if not failed:
        return
    kinds: dict[str, list[Surveyed]] = {}
    for one in failed:
        kinds.setdefault(_SPECIFIC.sub("", one.error), []).append(one)
    print(f"{len(failed)} nets load and do not run.\n")
    rows = [("nets", "message", "for example")]
    for nets in sorted(kinds.values(), key=len, reverse=True):
        rows.append((str(len(nets)), nets[0].error, str(nets[0].path.relative_to(folder))))
    print_table(rows, (0,), (1, 2))
    print()


def _try_schemas(
    folder: Path, refused: Sequence[Surveyed], schemas: Iterable[Path], jobs: int, plugins: Sequence[str]
) -> None:
    """Print how many files that lack fields or values load with the caffe.proto of their own repository."""
    lacking = [one for one in refused if all(missing.kind in ("field", "value") for missing in one.missing)]
    for schema in schemas:
        part = _part(schema, folder)
        own = schema.relative_to(folder).parts[0] in ("src", "proto", "caffe.proto")  # the folder is the repository
        paths = [one.path for one in lacking if own or _part(one.path, folder) == part]
        if not paths:
            continue
        try:
            found = examine_all(paths, jobs, plugins, schema)
        except ConfigError as error:
            print(f"{error}\n")
            continue
        opened = [one for one in found if LOADS in one.reached]
        print(f"With --proto {schema} {len(opened)} of {len(paths)} files that lack fields or values load.\n")

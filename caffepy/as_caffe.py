"""Makes `import caffe` import `caffepy.pycaffe`, and runs unchanged scripts so.

In a notebook `import caffepy.as_caffe` before `import caffe`; on the command line
`python -m caffepy.as_caffe script.py arguments`, `python -m caffepy.as_caffe -m module arguments` or
`python -m caffepy.as_caffe -c code arguments`.

A Caffe that is installed comes first all the same, unless `--force` stands before the script or `install(force=True)`
was called; a folder `caffe` that lacks the compiled `_caffe`, such as Caffe's sources, does not count as one.

Modules that caffepy lacks come from the folders `caffe` on sys.path. `caffe.model_libs` comes from there even though
caffepy has it, because forks of SSD's Caffe change it together with their scripts. Python 2's
`xrange` becomes a builtin, because these modules and scripts use it.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from caffepy.utils.options import whole

logger = logging.getLogger(__name__)

_SAME = {
    "caffe": "caffepy.pycaffe",
    "caffe._caffe": "caffepy.pycaffe",
    "caffe.pycaffe": "caffepy.pycaffe",
    "caffe.proto": "caffepy.formats.proto",
    "caffe.proto.caffe_pb2": "caffepy.formats.proto.caffe_pb2",
}
"""Modules of pycaffe that are not named alike in `caffepy.pycaffe`."""
_FORKS_OWN = frozenset(("caffe.model_libs",))
"""Modules of which a fork's version precedes caffepy's."""

_BESIDE_SCRIPTS = "model_libs"
"""NVIDIA Caffe's copy of `caffe.model_libs`, in the folder of its SSD scripts."""

_USAGE = """\
usage: python -m caffepy.as_caffe [--force] (script.py | -m module) [argument ...]
   or: python -m caffepy.as_caffe [--force] -c code [argument ...]"""


class _Loader(importlib.abc.Loader):
    """Gives an imported module a second name.

    Args:
        name: the module's own.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has just put the second name's there


class _ForkLoader(importlib.machinery.SourceFileLoader):
    """Runs a fork's module, which may be written for Python 2."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        names = vars(module)
        if "UnpackVariable" in names:  # SSD's begins with `assert len > 0`, which Python 3 refuses
            own = importlib.import_module("caffepy.pycaffe.model_libs")
            names["UnpackVariable"] = own.UnpackVariable


class CaffeFinder(importlib.abc.MetaPathFinder):
    """Finds `caffe` and its modules in `caffepy.pycaffe`.

    Args:
        force: also where a Caffe is installed.
    """

    def __init__(self, force: bool) -> None:
        self.force = force

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module of caffepy that has this name of Caffe's, or the file of a folder `caffe` on sys.path.

        None if there is neither, or if a real Caffe is installed.
        """
        if fullname == _BESIDE_SCRIPTS:
            return _for_python3(importlib.machinery.PathFinder.find_spec(fullname, path))
        if fullname.partition(".")[0] != "caffe":
            return None
        if fullname == "caffe" and not self.force and (other := installed_caffe()) is not None:
            _warn(other)
            return None
        if fullname != "caffe" and not _is_ours(sys.modules.get("caffe")):
            return None
        if fullname in _FORKS_OWN and (forks := _find_in_folders(fullname)) is not None:
            return forks
        own = _SAME.get(fullname, fullname.replace("caffe", "caffepy.pycaffe", 1))
        try:
            found = importlib.util.find_spec(own)
        except ModuleNotFoundError:  # its package comes from a folder on sys.path
            found = None
        if found is None:
            return _find_in_folders(fullname)
        is_package = found.submodule_search_locations is not None
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(own), is_package=is_package)
        spec.origin = found.origin
        return spec


def _find_in_folders(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module such as `caffe.a.b` as the file ``caffe/a/b.py`` of a folder on sys.path."""
    package = name.split(".")[:-1]
    return _for_python3(
        importlib.machinery.PathFinder.find_spec(name, [str(Path(entry, *package)) for entry in sys.path])
    )


def _for_python3(spec: importlib.machinery.ModuleSpec | None) -> importlib.machinery.ModuleSpec | None:
    """Give a module's file the loader of forks' modules."""
    if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        spec.loader = _ForkLoader(spec.name, spec.loader.path)
    return spec


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__name__ == "caffepy.pycaffe"


def installed_caffe() -> str | None:
    """The file or folder of another Caffe that `import caffe` would find; None: there is none that could be imported.

    A folder without the compiled `_caffe` is no installed Caffe.
    """
    try:
        spec = importlib.machinery.PathFinder.find_spec("caffe")
    except (ImportError, OSError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    if not folders:
        return spec.origin
    endings = importlib.machinery.all_suffixes()
    whole = [folder for folder in folders for ending in endings if (Path(folder) / f"_caffe{ending}").is_file()]
    return whole[0] if whole else None


def install(force: bool = False) -> None:
    """Let `import caffe` give caffepy; callable several times.

    Args:
        force: also where another Caffe is installed or already imported; else `import caffe` gives that one, and a
            warning says so.
    """
    vars(builtins).setdefault("xrange", range)
    finder = next((found for found in sys.meta_path if isinstance(found, CaffeFinder)), None)
    if finder is None:
        finder = CaffeFinder(force)
        sys.meta_path.insert(0, finder)
    finder.force = finder.force or force
    loaded = sys.modules.get("caffe")
    if loaded is None or _is_ours(loaded):
        return
    if not finder.force:
        _warn(getattr(loaded, "__file__", None) or "this program")
        return
    for name in [name for name in sys.modules if name == "caffe" or name.startswith("caffe.")]:
        del sys.modules[name]


def _warn(other: str) -> None:
    logger.warning(
        "'import caffe' gives the Caffe in %s, not caffepy's; for that one call caffepy.as_caffe.install(force=True) "
        "before it, or run python -m caffepy.as_caffe --force",
        other,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script or module whose `import caffe` gives caffepy, with Caffe's log on stderr.

    Args:
        argv: [--force], then a script, or `-m` and a module, or `-c` and code, then its arguments; by default the
            process's own.
    """
    importlib.import_module("caffepy.utils.files").open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    force = arguments[:1] == ["--force"]
    arguments = arguments[force:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments in (["-m"], ["-c"]):
        sys.stderr.write(f"{_USAGE}\n")
        return 0 if arguments[:1] and arguments[0] not in ("-m", "-c") else 2
    if arguments[0] not in ("-m", "-c") and not Path(arguments[0]).is_file():
        sys.stderr.write(f"python -m caffepy.as_caffe: there is no script '{arguments[0]}'; {_USAGE}\n")
        return 2
    install(force)
    _show_log()
    _fork_processes()
    _run(arguments)
    return 0


def _fork_processes() -> None:
    """Let `multiprocessing` fork by default, as on Linux before Python 3.14: Caffe's scripts expect it."""
    # The server that forks since then imports the script where `import caffe` does not give caffepy.
    import multiprocessing  # takes milliseconds of each start of caffepy

    if multiprocessing.get_all_start_methods()[0] == "forkserver":
        multiprocessing.set_start_method("fork", force=True)


def _run(arguments: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, or `-c` and code, with the arguments behind it."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        sys.modules["__main__"] = main_module = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main_module))
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _show_log() -> None:
    """Show the log as Caffe does, on stderr; GLOG_minloglevel says from which level on (0: all)."""
    level = os.environ.get("GLOG_minloglevel", "0")  # noqa: SIM112
    importlib.import_module("caffepy.pycaffe.device").init_log(whole(level) or 0)


if __name__ == "__main__":
    sys.exit(importlib.import_module("caffepy.as_caffe").main())  # not a second copy of this module
install()

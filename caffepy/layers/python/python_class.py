"""Finding and making a user's class for a Python layer; errors that name the user's file and line."""

from __future__ import annotations

import importlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from caffepy.errors import CaffepyError, ConfigError, RunError

METHODS = ("setup", "reshape", "forward", "backward")

_importing = threading.RLock()


class UserCodeError(CaffepyError):
    """A user's own Python code raised; what it raised is the cause."""


class _SetupError(UserCodeError, ConfigError):
    """`setup` or `reshape` raised."""


class _PassError(UserCodeError, RunError):
    """`forward` or `backward` raised."""


class PythonObject:
    """A user's object and the lock by which the devices that share it take turns."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.lock = threading.RLock()


_shared: WeakValueDictionary[tuple[Any, ...], PythonObject] = WeakValueDictionary()


def find_class(module_name: str, class_name: str, resolve: Callable[[str], Path], where: str) -> Any:
    """The class of that name; the module is looked for in sys.path, then beside the prototxt.

    Args:
        module_name: as Python imports it.
        class_name: in that module.
        resolve: turns a relative path into one that exists.
        where: the layer, for messages.

    Raises:
        ConfigError: there is no such module or class, it cannot be imported, or it lacks methods.
    """
    with _importing:
        module = _import(module_name, resolve, where)
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"{where}: module '{module_name}' ({module.__file__}) has no class '{class_name}'")
    missing = [name for name in METHODS[:-1] if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(f"{where}: class '{class_name}' of {module.__file__} lacks {', '.join(missing)}")
    return found


def _import(name: str, resolve: Callable[[str], Path], where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        beside = resolve(name.replace(".", "/") + ".py")
        if error.name not in (name, name.split(".")[0]):
            raise _not_importable(name, error, where) from error
        if not beside.is_file():
            raise ConfigError(
                f"{where}: no module '{name}' on PYTHONPATH, in the working directory or beside the prototxt; add its "
                "folder to PYTHONPATH"
            ) from None
    except Exception as error:
        raise _not_importable(name, error, where) from error
    sys.path.append(str(beside.resolve().parents[name.count(".")]))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _not_importable(name, error, where) from error


def _not_importable(name: str, error: Exception, where: str) -> ConfigError:
    if isinstance(error, ModuleNotFoundError) and error.name == "caffe":
        return ConfigError(
            f"{where}: module '{name}' imports caffe, which is not installed; import caffepy.as_caffe before it, which "
            "makes 'import caffe' give caffepy's"
        )
    return ConfigError(f"{where}: cannot import module '{name}': {describe(error)}")


def describe(error: BaseException, file: str = "") -> str:
    """An error in one line: the user's file and line, then what was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file] or frames
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return f"{own[-1].filename}:{own[-1].lineno}: {type(error).__name__}: {error}"


@contextmanager
def user_errors(method: str, instance: Any, where: str) -> Iterator[None]:
    """Give errors of a user's method one line with the layer, the file and the line.

    Raises:
        ConfigError: `setup` or `reshape` raised.
        RunError: another method did.
    """
    try:
        yield
    except CaffepyError:
        raise
    except Exception as error:
        module = sys.modules.get(type(instance).__module__)
        message = f"{where}: {method}: {describe(error, getattr(module, '__file__', '') or '')}"
        raise (_SetupError if method in ("setup", "reshape") else _PassError)(message) from error


def make_object(made_of: Any, key: tuple[Any, ...] | None, where: str) -> PythonObject:
    """An object of a user's class: a new one, or with a `key` the one that all layers of that key share.

    Raises:
        ConfigError: it cannot be made without arguments.
    """

    def make() -> PythonObject:
        with user_errors("setup", made_of, where):
            return PythonObject(made_of())

    if key is None:
        return make()
    with _importing:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = make()
        return found

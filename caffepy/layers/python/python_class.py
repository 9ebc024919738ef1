"""Loading of a user's class for a Python layer, and errors that name the user's file and line."""

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

REQUIRED_METHODS = ("setup", "reshape", "forward")

_lock = threading.RLock()
"""Guards imports and `_shared`: the devices of a process build their nets at the same time."""


class UserCodeError(CaffepyError):
    """An exception in a user's Python code. The original exception is the cause."""


class _SetupError(UserCodeError, ConfigError):
    """`setup` or `reshape` raised."""


class _PassError(UserCodeError, RunError):
    """`forward` or `backward` raised."""


class PythonObject:
    """A user's object, and the lock that serialises the devices that share it."""

    def __init__(self, instance: Any) -> None:
        self.instance = instance
        self.lock = threading.RLock()


_shared: WeakValueDictionary[tuple[Any, ...], PythonObject] = WeakValueDictionary()


def find_class(module_name: str, class_name: str, resolve: Callable[[str], Path], where: str) -> Any:
    """Import the module from sys.path or from the prototxt's folder, and return the class.

    Args:
        module_name: dotted name of the module.
        class_name: in that module.
        resolve: turns a relative path into an existing one.
        where: the layer, for messages.

    Raises:
        ConfigError: the module or the class does not exist, the import fails, or the class lacks methods.
    """
    with _lock:
        module = _import(module_name, resolve, where)
    cls, file = getattr(module, class_name, None), getattr(module, "__file__", "without a file")
    if cls is None:
        raise ConfigError(f"{where}: module '{module_name}' ({file}) has no class '{class_name}'")
    check_methods(cls, f"{where}: class {describe_class(cls)}")
    return cls


def describe_class(cls: Any) -> str:
    """Return a user's class and the file of its module, for messages."""
    return f"'{cls.__name__}' of {getattr(sys.modules.get(cls.__module__), '__file__', 'without a file')}"


def check_methods(cls: Any, what: str) -> None:
    """Check that a class has the methods of a Python layer; `what` it is called in the message.

    Raises:
        ConfigError: a method is missing.
    """
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(cls, name, None))]
    if missing:
        raise ConfigError(f"{what} lacks {', '.join(missing)}")


def _import(name: str, resolve: Callable[[str], Path], where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        beside = resolve(name.replace(".", "/") + ".py")
        if error.name not in (name, name.split(".")[0]):
            raise _import_error(name, error, where) from error
        if not beside.is_file():
            raise ConfigError(
                f"{where}: no module '{name}' on PYTHONPATH, in the working directory or beside the prototxt; add its "
                "folder to PYTHONPATH"
            ) from None
    except Exception as error:
        raise _import_error(name, error, where) from error
    sys.path.append(str(beside.resolve().parents[name.count(".")]))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _import_error(name, error, where) from error


def _import_error(name: str, error: Exception, where: str) -> ConfigError:
    if isinstance(error, ModuleNotFoundError) and error.name == "caffe":
        return ConfigError(
            f"{where}: module '{name}' imports caffe, which is not installed; import caffepy.as_caffe before it: it "
            "registers caffepy.pycaffe as 'caffe'"
        )
    return ConfigError(f"{where}: cannot import module '{name}': {describe(error)}")


def describe(error: BaseException, file: str = "") -> str:
    """Return an exception as one line: file, line, type and message. Prefer the last frame in `file`."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename == file] or frames
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}: {type(error).__name__}: {error}"


@contextmanager
def user_errors(method: str, instance: Any, where: str) -> Iterator[None]:
    """Turn an exception in a user's method into one line with the layer, the file and the line.

    Raises:
        ConfigError: `setup` or `reshape` raised an exception.
        RunError: another method raised an exception.
    """
    try:
        yield
    except CaffepyError:
        raise
    except Exception as error:
        module = sys.modules.get(type(instance).__module__)
        message = f"{where}: {method}: {describe(error, getattr(module, '__file__', '') or '')}"
        raise (_SetupError if method in ("setup", "reshape") else _PassError)(message) from error


def make_object(cls: Any, key: tuple[Any, ...] | None, where: str) -> PythonObject:
    """Return a new object of a user's class, or with a `key` the object that all layers of that key share.

    Raises:
        ConfigError: the constructor raised an exception.
    """

    def make() -> PythonObject:
        with user_errors("setup", cls, where):
            return PythonObject(cls())

    if key is None:
        return make()
    with _lock:
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = make()
        return shared

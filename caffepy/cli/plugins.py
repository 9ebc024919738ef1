"""`--plugin`: modules of the user that register layer types."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from caffepy.errors import CaffepyError, ConfigError


def import_plugin(name: str) -> None:
    """Import a module by its name, from sys.path or the working directory, or a file by its path.

    The module calls `caffepy.register_layer`.

    Raises:
        ConfigError: the module does not exist, or raises an exception.
    """
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            _import_module(name)
    except CaffepyError:
        raise
    except Exception as error:
        from caffepy.layers.python.python_class import describe

        raise ConfigError(f"--plugin {name}: {describe(error, name)}") from error


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"--plugin {path}: no such file; give a Python file or the name of a module")
    path = path.resolve()
    _add_folder(path.parent)  # of modules that the file imports
    name = path.stem
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(path):
            return
        raise ConfigError(f"--plugin {path}: a module named '{name}' is imported already; rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _import_module(name: str) -> None:
    _add_folder(Path(os.curdir).resolve())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"--plugin {name}: no module '{name}' on PYTHONPATH or in the working directory; to give a file, write its "
            "path with .py"
        ) from None


def _add_folder(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

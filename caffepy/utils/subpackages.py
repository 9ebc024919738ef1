"""Modules of one name in several subpackages, which a program finds by looking for them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from types import ModuleType


def import_from_subpackages(package: str, name: str, among: Iterable[str] | None = None) -> list[ModuleType]:
    """Import the module `name` of the subpackages that have one; return them in the order of the subpackages' names.

    Args:
        package: the package, as ``caffepy.forks``.
        name: the modules' name.
        among: the subpackages to look in; None: all.
    """
    if among is None:
        among = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    names = [f"{package}.{subpackage}.{name}" for subpackage in sorted(among)]
    return [importlib.import_module(each) for each in names if importlib.util.find_spec(each) is not None]

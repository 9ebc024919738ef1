"""Plain Python values as bytes that travel through the store, read without unpickling anything."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from caffepy.parallel.store.wire import Value, WireError


def _read_record(content: Any) -> Any:
    module, name, values = content
    kind = getattr(sys.modules[module], name) if module.startswith("caffepy.") else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise WireError(f"{module}.{name} is no record of caffepy's")
    return kind(**{field: _read(value) for field, value in values.items()})


_READERS: dict[str, Callable[[Any], Any]] = {
    "bytes": base64.b64decode,
    "path": Path,
    "tuple": lambda parts: tuple(map(_read, parts)),
    "record": _read_record,
    "dict": lambda pairs: {_read(key): _read(value) for key, value in pairs},
}
"""What JSON does not know is an object with one of these names."""


def pack(value: Any) -> bytes:
    """None, numbers, text, bytes, paths, and lists, tuples, dictionaries and caffepy's dataclasses of these.

    Raises:
        TypeError: it is something else.
    """
    return json.dumps(_plain(value)).encode()


def unpack(packed: Value) -> Any:
    """The inverse of `pack`.

    Raises:
        WireError: these bytes do not come from there.
    """
    try:
        return _read(json.loads(packed))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise WireError(f"not a packed value: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, tuple):
        return {"tuple": list(map(_plain, value))}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type):
        kind, values = type(value), {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"record": [kind.__module__, kind.__qualname__, values]}
    raise TypeError(f"a {type(value).__name__} does not travel from rank to rank: make plain values of it")


def _read(found: Any) -> Any:
    if isinstance(found, list):
        return list(map(_read, found))
    if isinstance(found, dict):
        ((name, content),) = found.items()
        return _READERS[name](content)
    return found

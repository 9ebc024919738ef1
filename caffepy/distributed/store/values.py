"""Values that ranks send each other as JSON; nothing is unpickled.

Imported by the world without MPI and by `caffepy.distributed`.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.distributed.store.wire import Value, WireError


def _read_record(content: Any) -> Any:
    module, name, values = content
    kind = getattr(sys.modules[module], name) if module.startswith("caffepy.") else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise WireError(f"{module}.{name} is no record of caffepy's")
    return kind(**{field: _read(value) for field, value in values.items()})


def _read_array(content: Any) -> np.ndarray:
    name, shape, values = content
    dtype = np.dtype(str(name))
    if dtype.kind not in _ARRAY_KINDS:
        raise WireError(f"an array of {dtype} does not travel from rank to rank")
    array: np.ndarray = np.frombuffer(base64.b64decode(values), dtype).reshape(tuple(map(int, shape))).copy()
    return array


_ARRAY_KINDS = "biufc"
"""Of dtypes: booleans and numbers."""
_READERS: dict[str, Callable[[Any], Any]] = {
    "array": _read_array,
    "scalar": lambda content: _read_array(content)[()],
    "bytes": base64.b64decode,
    "path": Path,
    "tuple": lambda parts: tuple(map(_read, parts)),
    "record": _read_record,
    "dict": lambda pairs: {_read(key): _read(value) for key, value in pairs},
}
"""What JSON does not know is an object with one of these names."""


def pack(value: Any) -> bytes:
    """Return JSON of None, numbers, text, bytes, paths, NumPy numbers and arrays of them, and lists, tuples,
    dictionaries and caffepy's dataclasses of these.

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
    if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
        return {"scalar": [value.dtype.str, [], base64.b64encode(value.tobytes()).decode()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, tuple):
        return {"tuple": list(map(_plain, value))}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("caffepy."):
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

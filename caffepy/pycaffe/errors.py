"""Errors of pycaffe that scripts may expect as exceptions of Python's, as BVLC's pycaffe raises them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caffepy.errors import CaffepyError, ConfigError
from caffepy.layers.python import UserCodeError


class MissingFileError(ConfigError, RuntimeError):
    """A file cannot be opened."""


class ArgumentError(ConfigError, RuntimeError):
    """An argument has a type, shape or value that is not possible."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has a type that is not possible; Boost.Python's ArgumentError is a TypeError too."""


class UnknownLayerError(ConfigError, ValueError):
    """A net has no layer of that name."""


class UnknownBlobError(ConfigError, KeyError):
    """A net has no blob of that name."""

    __str__ = Exception.__str__  # KeyError's puts the message in quotes


def check_type(function: str, argument: object, expected: type) -> None:
    """Refuse an argument of another class.

    Raises:
        ArgumentTypeError: it is no `expected`.
    """
    if not isinstance(argument, expected):
        raise ArgumentTypeError(f"{function}({argument!r}): give a {expected.__name__}")


def whole_number(function: str, value: float, least: float = -math.inf) -> int:
    """The argument of a function, which `/` may have made a float: 2.0 is 2.

    Raises:
        ArgumentError: it is less, or no whole number.
    """
    if not math.isfinite(value) or int(value) != value:
        raise ArgumentError(f"{function}({value}): give a whole number")
    if value < least:
        raise ArgumentError(f"{function}({value}): give a number of {least} or more")
    return int(value)


def check_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file that can be opened.

    Raises:
        MissingFileError: it cannot.
        ArgumentTypeError: it is no path. `open` would take a number for an open file.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise ArgumentTypeError(f"{path!r} is no file name; give a str or a Path")
    try:
        with open(path, "rb"):
            return Path(os.fsdecode(path))
    except (OSError, ValueError) as error:
        raise MissingFileError(f"Could not open file {path}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def as_users_raise() -> Iterator[None]:
    """Let what a user's own layer or callback raised come out as it was raised, as pycaffe does.

    The message that names the layer is kept as a note of the exception.
    """
    try:
        yield
    except CaffepyError as error:
        cause = error.__cause__
        if not isinstance(error, UserCodeError) or cause is None:
            raise
        cause.add_note(str(error))
        raise cause from None

"""Types of option values: the text of a command line to the value.

A function raises argparse.ArgumentTypeError where the text does not fit; the message becomes the command's.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

LARGEST = 2**31 - 1
"""Largest whole number of an option."""
LONGEST_SECONDS = 1e8
"""Three years; threads cannot wait much longer."""


def file_list(text: str) -> list[Path]:
    """Files divided by commas, as Caffe's --weights takes them; at least one."""
    return [Path(part.strip()) for part in given(text, "a file").split(",") if part.strip()]


def given(text: str, what: str) -> str:
    """An argument in which there is something else than blanks and commas: a script's variable may be empty."""
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError(f"'{text}' names nothing: give {what}, or leave the option out")
    return text


def file_name(text: str) -> Path:
    """A file, which is named; an empty name would mean the working directory."""
    return Path(given(text, "a file"))


def snapshot_name(text: str) -> str:
    """A .solverstate's name, or ``auto``."""
    return given(text, "a .solverstate or 'auto'")


def plugin_name(text: str) -> str:
    """A Python module's name, or the path of its file."""
    return given(text, "a Python file or module")


def assignment(text: str) -> str:
    """``FIELD=VALUE``."""
    if not re.match(r"[^=]*\w[^=]*=", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no field with its value, such as base_lr=0.01")
    return text


def name_list(text: str) -> list[str]:
    """Names divided by commas."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"'{text}' is not UTF-8") from None
    return [part.strip() for part in text.split(",") if part.strip()]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = _whole(text)
    if not 1 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1 and at most {LARGEST}")
    return number


def natural(text: str) -> int:
    """An option's whole number of 0 or more."""
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        if text.strip() == "0":
            return 0
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of 0 or more") from None


def level(text: str) -> int:
    """A whole number, of either sign, as the schema's int32 holds it."""
    number = _whole(text, LARGEST + 1)
    if not -LARGEST <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {-LARGEST} to {LARGEST}")
    return number


def gpu_number(text: str) -> int:
    """The number of one GPU."""
    number = _whole(text, -1)
    if not 0 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is no GPU's number such as 0")
    return number


def _whole(text: str, otherwise: int = 0) -> int:
    """The number that `text` is; `otherwise` where it is none, or has more digits than Python reads."""
    try:
        return int(text)
    except ValueError:
        return otherwise


def positive_seconds(text: str) -> float:
    """A number of seconds above 0."""
    seconds = positive_number(text, "a number of seconds")
    if seconds > LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {LONGEST_SECONDS:g} seconds")
    return seconds


def positive_number(text: str, what: str = "a number") -> float:
    """A number above 0; `what` it is, for the message."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not {what} above 0")
    return number


def decay(text: str) -> float:
    """A number above 0 and below 1."""
    number = positive_number(text)
    if number >= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0 and below 1")
    return number


def score_and_patience(text: str) -> str:
    """``SCORE:PATIENCE``, the name of a score and a number of tests."""
    name, _, patience = text.rpartition(":")
    if not name or not patience.isdecimal() or not 1 <= int(patience) <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is no score and number of tests such as accuracy:5")
    return text


def iteration_range(text: str) -> range:
    """``20:40``, the iterations from 20 on that come before 40."""
    match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of iterations such as 20:40")
    return range(int(match[1]), int(match[2]))


def record_shape(text: str) -> tuple[int, ...]:
    """The dimensions of one record, divided by commas."""
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = (0,)
    if min(shape) < 1 or math.prod(shape) > LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is no shape such as 3,224,224")
    return shape


def gpu_list(text: str) -> list[int] | str:
    """GPU numbers divided by commas, or `all`."""
    if text.strip().lower() == "all":
        return "all"
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0 or max(numbers) > LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is neither 'all' nor GPU numbers such as 0 or 0,1")
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"'{text}' names a GPU twice")
    return numbers


NUMBERS = (positive, natural, level, positive_seconds, positive_number, decay)
"""Types whose values Python programs give as numbers."""

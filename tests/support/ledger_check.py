"""Does the proof of a ledger's field fail where caffepy does not see the field? By hand; `make test` does not run it.

    python tests/support/ledger_check.py [--again FILE] [REGEX]

For each field of `caffepy/config/fields.txt` that is proven by a test and whose name matches, the test runs in a
process of its own in which the field is cleared from every message that enters caffepy. A test that passes all the
same says nothing about the field: it is printed as SURVIVES. A field that is only read from files, or whose test
compares what was parsed, may be printed wrongly; read the test.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from google.protobuf.message import Message

from caffepy.config.fields import Status, ledger, path_of
from caffepy.config.messages import walk_fields
from caffepy.config.text import parse_text

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = str(TESTS.parent / "caffepy") + os.sep
SECONDS = 120


def cleaner(message_name: str, field: str) -> Callable[[Message], None]:
    """What clears a field in a message and in all those within it."""

    def clear(message: Message) -> None:
        owners = [message, *(owner for owner, _, _, _ in walk_fields(message))]
        for owner in owners:
            if path_of(owner.DESCRIPTOR) == message_name:
                owner.ClearField(field)

    return clear


def hide(name: str) -> None:
    """From now on caffepy's functions see no message with this field, in this thread."""
    message_name, _, field = name.rpartition(".")
    clear = cleaner(message_name, field)
    parse = parse_text.__code__

    def watch(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "return" and code is parse and result is not None:
            clear(result)
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        outside = frame.f_back is None or not frame.f_back.f_code.co_filename.startswith(PACKAGE)
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(argument)
            if isinstance(value, Message) and (outside or path_of(value.DESCRIPTOR) == message_name):
                clear(value)

    sys.setprofile(watch)


def survives(name: str, proof: str) -> bool:
    """Whether the proof passes without the field. The caller has started no thread."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        hide(name)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", str(TESTS / proof)])
        os._exit(int(code))
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--again", type=Path, help="append to this file, and leave out the fields that it has")
    parser.add_argument("regex", nargs="?", default="", help="which fields")
    given = parser.parse_args()
    done = given.again.read_text() if given.again and given.again.exists() else ""
    for name, entry in ledger().items():
        if entry.status is not Status.ACTS or not entry.text or not re.search(given.regex, name):
            continue
        if f"{name} " in done:
            continue
        line = f"{name} {'SURVIVES' if survives(name, entry.text) else 'seen'} {entry.text}"
        print(line, flush=True)
        if given.again:
            with given.again.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()

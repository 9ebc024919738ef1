"""Does the test that proves a field fail if caffepy does not see the field? By hand; `make test` does not run it.

    python tests/support/field_proof_check.py [--again FILE] [REGEX]

For each field of `tests/unit/formats/field_proofs.txt` whose name matches, its test runs in a process of its own in
which the field is cleared from every message that enters caffepy or is serialised. A test that still passes says
nothing about the field: it is printed as SURVIVES. A test that runs for more than five minutes is printed as TIMED
OUT. A field whose test compares parsed messages may be printed wrongly; read the test.
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
from types import CodeType, FrameType
from typing import Any

import pytest
from google.protobuf.message import Message

from caffepy.formats.fields import schema_name
from caffepy.formats.messages import walk_fields
from caffepy.formats.prototxt import parse_text

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = str(TESTS.parent / "caffepy") + os.sep
SECONDS = 300
VERDICTS = {
    int(pytest.ExitCode.OK): "SURVIVES",
    int(pytest.ExitCode.TESTS_FAILED): "seen",
    int(pytest.ExitCode.INTERRUPTED): "seen",  # the module could not even be imported
}
READ_WITHIN = ("SolverState",)
"""Messages that caffepy reads from files, and the messages in them."""
BORING = 100
"""Calls without a message after which a function is not looked at again: looking takes most of the time."""


def cleaner(message_name: str, field: str) -> Callable[[Message], None]:
    """What clears a field in a message and in all those within it."""

    def clear(message: Message) -> None:
        owners = [message, *(owner for owner, _, _, _ in walk_fields(message))]
        for owner in owners:
            if schema_name(owner.DESCRIPTOR) == message_name:
                owner.ClearField(field)

    return clear


def hide(name: str) -> None:
    """From now on caffepy's functions see no message with this field, in this thread."""
    message_name, _, field = name.rpartition(".")
    clear = cleaner(message_name, field)
    parse = parse_text.__code__

    calls: dict[CodeType, int] = {}

    def watch(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            if result.__name__ == "SerializeToString":
                clear(result.__self__)  # so that no file has the field
            return
        if event == "return" and isinstance(result, Message) and code.co_filename.startswith(PACKAGE):
            kind = schema_name(result.DESCRIPTOR)
            if code is parse or kind == message_name or kind in READ_WITHIN:
                clear(result)
        if event != "call" or calls.get(code, 0) > BORING:
            return
        calls[code] = calls.get(code, 0) + 1 if code.co_filename.startswith(PACKAGE) else BORING + 1
        if calls[code] > BORING:
            return
        outside = frame.f_back is None or not frame.f_back.f_code.co_filename.startswith(PACKAGE)
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(argument)
            if isinstance(value, Message):
                calls[code] = 0
                if outside or schema_name(value.DESCRIPTOR) in (message_name, *READ_WITHIN):
                    clear(value)

    sys.setprofile(watch)


class FirstFailure:
    """A pytest plugin: hypothesis looks for no smaller example of a failure, which would say no more."""

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings  # pytest rewrites its asserts first

        settings.register_profile("first failure", phases=(Phase.explicit, Phase.generate))
        settings.load_profile("first failure")


def run_proof(name: str, proof: str) -> int:
    """Pytest's exit status of a proof without the field, silently."""
    hide(name)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        arguments = ["-q", "-x", "-p", "no:cacheprovider", str(TESTS / proof)]
        return int(pytest.main(arguments, [FirstFailure()]))


def verdict(name: str, proof: str) -> str:
    """What the proof makes of the missing field. The caller has started no thread."""
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        code = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            code = run_proof(name, proof)
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "TIMED OUT"
    return VERDICTS.get(os.waitstatus_to_exitcode(status), "BROKEN")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--again", type=Path, help="append to this file, and leave out the fields that it has")
    parser.add_argument("regex", nargs="?", default="", help="which fields")
    given = parser.parse_args()
    done = given.again.read_text() if given.again and given.again.exists() else ""
    proofs = (TESTS / "unit" / "formats" / "field_proofs.txt").read_text()
    for name, proof in re.findall(r"(?m)^([\w.]+): (.+)$", proofs):
        if not re.search(given.regex, name) or f"{name} " in done:
            continue
        line = f"{name} {verdict(name, proof)} {proof}"
        print(line, flush=True)
        if given.again:
            with given.again.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()

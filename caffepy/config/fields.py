"""The ledger of the schema's fields: whether each acts, is refused, or has no meaning in caffepy, from fields.txt.

Nothing is accepted without effect: a field acts, or the user is told that it is refused, or the ledger has the reason
why it has no meaning here. `docs/reference/fields.md` is the ledger for readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from caffepy.config.messages import walk_fields
from caffepy.errors import ConfigError

LEDGER = Path(__file__).with_name("fields.txt")
_PROVEN = "acts, proven by "


class Status(Enum):
    """What caffepy makes of a field."""

    ACTS = "acts"
    REFUSED = "refused"
    NO_MEANING = "no meaning"


@dataclass(frozen=True)
class Entry:
    """A field of the ledger.

    Args:
        status: what becomes of it.
        text: the sentence that refuses it, the reason why it has no meaning, or the tests that prove that it acts
            (empty: those of `tests/unit/config/test_fields.py`).
    """

    status: Status
    text: str = ""


@cache
def ledger() -> dict[str, Entry]:
    """Every field of the schema, as Message.field, with its entry."""
    entries = {}
    for line in LEDGER.read_text(encoding="utf-8").splitlines():
        name, divider, rest = line.partition(": ")
        if divider and not line.startswith("#"):
            assert name not in entries, f"{name} is twice in {LEDGER}"
            entries[name] = _parse(rest)
    return entries


def _parse(text: str) -> Entry:
    if text.startswith(_PROVEN):
        return Entry(Status.ACTS, text.removeprefix(_PROVEN))
    status, _, rest = text.partition(": ")
    return Entry(Status(status), rest)


def path_of(message: Any) -> str:
    """The name of a message's descriptor within the schema: ``ConvolutionParameter``, or ``Outer.Inner``."""
    return str(message.full_name).partition(".")[2]


@cache
def _refused() -> dict[str, dict[str, str]]:
    """By message the fields that are refused, with their sentences."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in ledger().items():
        if entry.status is Status.REFUSED:
            message, _, field = name.rpartition(".")
            found.setdefault(message, {})[field] = entry.text
    return found


def refuse_fields(param: Message, where: str) -> None:
    """Refuse what the ledger refuses, where a value is given that is not the field's default.

    Args:
        param: a net, layer or solver.
        where: begins the message.

    Raises:
        ConfigError: a field of `param` or within it is refused; it is named, with the ledger's sentence.
    """
    for owner, field, value, _ in walk_fields(param):
        message = path_of(owner.DESCRIPTOR)
        sentence = _refused().get(message, {}).get(field.name)
        if sentence is not None and (field.message_type is not None or value != field.default_value):
            raise ConfigError(f"{where}: {field.name} of {message} is refused: {sentence}")

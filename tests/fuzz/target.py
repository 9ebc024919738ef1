"""What a format's target is: how a damaged input is made, and what caffepy does with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.hostile import HOSTILE, LONGEST, content
from fuzz.mutate import Random, damage_bytes, damage_message, damage_text
from google.protobuf import text_format
from google.protobuf.message import Message


class Target(ABC):
    """A format.

    Args:
        folder: for files, this worker's own.
    """

    name = ""
    file = "input"
    share = 1
    """How many of the inputs, compared with the other targets."""
    seconds = 2.0
    """Of the processor, that the smallest input may take; each byte adds `worker.SECONDS_PER_BYTE`."""
    allowed: tuple[type[Exception], ...] = ()
    """Exceptions of its own that callers know about, beside CaffepyError."""
    seeds: Sequence[Any]
    """Whole inputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / self.file
        self.prepare()
        inputs = (content(given) for given, _ in HOSTILE.get(self.name, ()))
        self._hostile = [data for data in inputs if len(data) < LONGEST]

    def input(self, random: Random) -> bytes:
        """A damaged input; a tenth begin as hostile ones."""
        if self._hostile and random.random() < 0.1:
            return damage_bytes(random.choice(self._hostile), self._hostile, random)
        return self.make(random)

    @abstractmethod
    def prepare(self) -> None:
        """Make the seeds."""

    @abstractmethod
    def make(self, random: Random) -> bytes:
        """A damaged input."""

    def use(self, data: bytes) -> None:
        """Do with the input what caffepy does: write it to `self.path`, and `read` it."""
        self.path.write_bytes(data)
        self.read()

    def read(self) -> None:
        """Read `self.path`."""
        raise NotImplementedError


class TextTarget(Target):
    """A text; half of the damaged ones are damaged as messages and printed."""

    kind: type[Message] | None = None

    def make(self, random: Random) -> bytes:
        text = random.choice(self.seeds)
        if self.kind is None or random.random() < 0.5:
            return damage_text(text, self.seeds, random)
        message = copied(text, self.kind)
        damage_message(message, random)
        return text_format.MessageToString(message).encode()


def copied(text: str, kind: type[Message]) -> Message:
    """A new message of a seed's text."""
    message = kind()
    message.CopyFrom(_parsed(text, kind))
    return message


@cache
def _parsed(text: str, kind: type[Message]) -> Message:
    return text_format.Parse(text, kind())


class BinaryTarget(Target):
    """Bytes; those of a message are damaged as such in half of the cases."""

    kind: type[Message] | None = None

    def make(self, random: Random) -> bytes:
        data = random.choice(self.seeds)
        if self.kind is None or random.random() < 0.5:
            return damage_bytes(data, self.seeds, random)
        message = self.kind()
        message.ParseFromString(data)
        damage_message(message, random)
        return message.SerializePartialToString()


def reads(base: type[Target], name: str, seeds: Callable[[], Sequence[Any]], file: str = "", **more: Any) -> Any:
    """Makes a target of a function that reads a damaged file, or takes its content where no file is named.

    Args:
        base: how the inputs are damaged.
        name: of the format.
        seeds: makes whole inputs.
        file: its name.
        more: further attributes of the target.
    """

    def made(read: Callable[[Any], object]) -> type[Target]:
        def prepare(target: Target) -> None:
            target.seeds = seeds()

        use = {"read": lambda target: read(target.path), "file": file} if file else {"use": lambda _, data: read(data)}
        return type(name, (base,), {"name": name, "prepare": prepare, **use, **more})

    return made

"""The machines to train on, as people write them: hostfiles of Open MPI, MPICH and Intel MPI, and lists of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caffepy.errors import ConfigError
from caffepy.utils.files import read_regular

_NAME = r"(?P<name>[\w.@][\w.@-]*)"
_SLOTS = r"(?:\s*:\s*(?P<count>[0-9]+)|\s+slots\s*=\s*(?P<slots>[0-9]+))?"
_LINE = re.compile(rf"{_NAME}{_SLOTS}(?:\s+max[-_]slots\s*=\s*[0-9]+)?")
MAX_SLOTS = 2**20
"""Processes that a host may be said to have."""
MAX_BYTES = 2**24
"""Of a hostfile."""


@dataclass(frozen=True)
class Host:
    """A machine.

    Args:
        name: how it is reached.
        slots: how many processes may run there; None where it is not given.
    """

    name: str
    slots: int | None = None


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file: a line each, ``host``, ``host slots=4`` (Open MPI) or ``host:4`` (MPICH); ``#`` comments.

    A host that is named again has the slots of all its lines; a line without a number is one slot then, as in the
    files of PBS.

    Raises:
        ConfigError: it cannot be read, a line means nothing, or there is no host in it.
    """
    try:
        lines = read_regular(path, MAX_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"--hostfile {path}: cannot be read: {reason}") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if text:
            found.append(_parse(text, f"{path}:{number}"))
    if not found:
        raise ConfigError(f"--hostfile {path}: names no host; write one a line: host, 'host slots=4' or host:4")
    return _together(found)


def parse_hosts(names: Sequence[str]) -> list[Host]:
    """The hosts of a list such as ``["a", "b:4"]``.

    Raises:
        ConfigError: an entry means nothing.
    """
    return _together([_parse(name, "--hosts") for name in names])


def _parse(text: str, where: str) -> Host:
    match = _LINE.fullmatch(text)
    if text.startswith("-"):
        raise ConfigError(f"{where}: '{text}' begins with a dash, so a launcher would take it for an option of its own")
    if match is None:
        raise ConfigError(f"{where}: '{text}' is no host; write host, 'host slots=4' or host:4")
    slots = match["count"] or match["slots"]
    if slots is not None and (len(slots) > 9 or int(slots) > MAX_SLOTS):
        raise ConfigError(f"{where}: host '{match['name']}' has {slots} slots; at most {MAX_SLOTS} are possible")
    if slots is not None and int(slots) == 0:
        raise ConfigError(f"{where}: host '{match['name']}' has 0 slots; leave it out")
    return Host(match["name"], int(slots) if slots else None)


def _together(found: Sequence[Host]) -> list[Host]:
    """Each host once, in the order of their first lines."""
    hosts: dict[str, Host] = {}
    for host in found:
        if before := hosts.get(host.name):
            host = Host(host.name, (before.slots or 1) + (host.slots or 1))
        hosts[host.name] = host
    return list(hosts.values())

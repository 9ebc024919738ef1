"""The machines to train on, as people write them: hostfiles of Open MPI, MPICH and Intel MPI, and lists of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caffepy.errors import ConfigError

_NAME = r"(?P<name>[\w.@-]+)"
_LINE = re.compile(rf"{_NAME}(?:\s*:\s*(?P<count>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?")


@dataclass(frozen=True)
class Host:
    """A machine.

    Args:
        name: how it is reached.
        slots: how many processes may run there; None where nobody says.
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
        lines = path.read_text().splitlines()
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
    if match is None:
        raise ConfigError(f"{where}: '{text}' is no host; write host, 'host slots=4' or host:4")
    slots = match["count"] or match["slots"]
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

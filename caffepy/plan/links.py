"""Names and numbers of connections as people write them."""

from __future__ import annotations

import re

from caffepy.plan.model import Link
from caffepy.registry import suggest

LINKS = {
    "nvlink": Link(2.5e-6, 350e9),
    "pcie": Link(5e-6, 20e9),
    "shm": Link(5e-6, 4e9),
}
"""Inside a node. nvlink: NVLink 4, what NCCL's ring reaches on four H200 (450 GB/s nominal); pcie: version 4, through
the host; shm: ranks on CPUs, through shared memory. --calibrate is better than any of them."""
NETWORK_LATENCY = 10e-6
"""Seconds a message between nodes, InfiniBand or RoCE with NCCL."""

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"(?:(\d+) ?[xX*] ?)?(\d+\.?\d*|\.\d+) ?([kMGT]?)(b|B|bit|byte|Bytes?)(?:/s|ps|E)?")
_LATENCY = re.compile(r"(\d+\.?\d*|\.\d+) ?(ns|us|µs|ms|s)?")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str) -> float:
    """Bytes a second of ``400Gb`` (bits), ``50GB`` (bytes) or ``8x400Gb`` (eight adapters).

    Raises:
        ValueError: it is none of these.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or not float(match[2]) or match[1] == "0":
        raise ValueError(f"'{text}' is no bandwidth such as 400Gb (bits a second), 50GB (bytes) or 8x400Gb")
    bits = 8 if match[4] in ("b", "bit") else 1
    return int(match[1] or 1) * float(match[2]) * _PREFIXES[match[3]] / bits


def parse_latency(text: str) -> float:
    """Seconds of ``5us``, ``0.01ms`` or ``5``, which are microseconds.

    Raises:
        ValueError: it is none of these.
    """
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is no latency such as 5us, or 5, which means the same")
    return float(match[1]) * _SECONDS[match[2] or "us"]


def parse_link(text: str) -> Link:
    """A link inside nodes by its name, or by its bandwidth, plain numbers being GB/s; of unknown latency as pcie's.

    Raises:
        ValueError: neither.
    """
    if text in LINKS:
        return LINKS[text]
    plain = re.fullmatch(r"\d+\.?\d*|\.\d+", text.strip())
    try:
        return Link(LINKS["pcie"].latency, parse_bandwidth(f"{text}GB" if plain else text))
    except ValueError as error:
        raise ValueError(f"{error}, nor a link; {suggest(text, list(LINKS))}") from error

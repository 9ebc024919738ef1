"""SIGINT in tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_interrupts() -> Iterator[None]:
    """SIGINT does what Python makes of it, here and in processes that are started within the block.

    A shell without job control starts background commands with SIGINT ignored (`make test &` in a script), and
    what is ignored is inherited; tests send it to themselves and to what they start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

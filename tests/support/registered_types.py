"""Layer types that a test registers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from caffepy.layers import layer as base


@contextmanager
def forgotten_types(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget types that are registered within the block. Types of caffepy whose modules it imports stay."""
    entries = dict(base.LAYERS._entries)
    monkeypatch.setattr(base, "_REGISTERED", set(base._REGISTERED))
    monkeypatch.setattr(base, "_REPLACED", set(base._REPLACED))
    yield
    for name in [name for name in base.LAYERS if not base.LAYERS.get(name).__module__.startswith("caffepy.")]:
        del base.LAYERS._entries[name]
    base.LAYERS._entries.update(entries)

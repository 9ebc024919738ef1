"""Garbage collection is suspended until the last block ends that needs it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from caffepy.utils.garbage_collection import suspended_garbage_collection


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_blocks_may_end_in_any_order():
    first, second = suspended_garbage_collection(), suspended_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_program_that_suspends_it_keeps_it_so():
    gc.disable()
    with suspended_garbage_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()

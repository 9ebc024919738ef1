"""A source of records that lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Records:
    """A source of records in memory.

    Args:
        records: messages, or their bytes.
    """

    description = "list 'x'"
    index = None

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = [one if isinstance(one, bytes) else one.SerializeToString() for one in records]

    def __len__(self) -> int:
        return len(self.records)

    def read(self, number: int) -> memoryview:
        return memoryview(self.records[number])

    def record_name(self, number: int) -> str:
        return f"record {number} (key 'k{number}')"

    def allows_concurrent_reads(self, count: int) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to close."""

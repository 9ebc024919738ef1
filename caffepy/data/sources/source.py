"""The RecordSource protocol: numbered records on disk (LMDB, LevelDB, image lists)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from caffepy.data.sources.lmdb_index import LmdbIndex


def hash_of(*parts: bytes | memoryview) -> str:
    """Return a short hash of bytes, for fingerprints."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class RecordSource(Protocol):
    """Records numbered from 0. One thread at a time may read, unless `allows_concurrent_reads`.

    Sequential reading is cheap; random access costs at most one search.
    """

    description: str
    """Name of the source in messages: ``LMDB 'examples/mnist/mnist_train_lmdb'``."""

    @property
    def index(self) -> LmdbIndex | None:
        """Offsets of the records in one file; None if records must be read individually."""

    def __len__(self) -> int:
        """Return the number of records, at least 1."""

    def read(self, number: int) -> bytes | memoryview:
        """Return the bytes of record `number`, valid until `close`.

        Raises:
            DataError: the record cannot be read.
        """

    def allows_concurrent_reads(self, count: int) -> bool:
        """Return whether several threads may read the first `count` records; the index, if any, has located them."""

    def record_name(self, number: int) -> str:
        """Return the record's name for messages: ``record 12 (key '00000012')``."""

    def fingerprint(self) -> dict[str, str]:
        """Return values, by their name in messages, that differ between sources. Cheap; does not use paths.

        Raises:
            DataError: a record cannot be read.
        """

    def close(self) -> None:
        """Release resources. Idempotent."""

"""What a record source is: numbered records on disk, the common face of LMDB and lists of images."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from caffepy.data.sources.lmdb_index import LmdbIndex


def hash_of(*parts: bytes | memoryview) -> str:
    """A short hash of bytes, for fingerprints."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class RecordSource(Protocol):
    """Records numbered from 0, read by one thread at a time unless they say otherwise.

    Reading record n + 1 after record n is cheap; any other jump costs at most one search.
    """

    description: str
    """What messages call the source: ``LMDB 'examples/mnist/mnist_train_lmdb'``."""

    @property
    def index(self) -> LmdbIndex | None:
        """Where the records lie in one file, if they do; None if they have to be read one by one."""

    def __len__(self) -> int:
        """The number of records, at least 1."""

    def read(self, number: int) -> bytes | memoryview:
        """The bytes of record `number`, valid until `close`.

        Raises:
            DataError: the record cannot be read.
        """

    def concurrent(self, count: int) -> bool:
        """Whether several threads may read the first `count` records at once, and the index, if any, has them."""

    def record_name(self, number: int) -> str:
        """What messages call the record: ``record 12 (key '00000012')``."""

    def fingerprint(self) -> dict[str, str]:
        """What tells this source from another one of the same name, by what messages call it; cheap, without paths.

        Raises:
            DataError: it cannot be read.
        """

    def close(self) -> None:
        """Give back what is open. Callable twice."""

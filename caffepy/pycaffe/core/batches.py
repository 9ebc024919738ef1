"""`forward_all` and `forward_backward_all`: a net over more rows than one batch has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caffepy.pycaffe.core.errors import ArgumentError

if TYPE_CHECKING:
    from caffepy.pycaffe.blob import Blob

Arrays = dict[str, NDArray[np.float32]]


class AllBatches:
    """The part of `Net` that cuts arrays into batches; the last one is filled up with zeros."""

    if TYPE_CHECKING:

        @property
        def inputs(self) -> list[str]: ...

        @property
        def outputs(self) -> list[str]: ...

        @property
        def blobs(self) -> Mapping[str, Blob]: ...

        def forward(self, blobs: Sequence[str] | None = ..., **kwargs: Any) -> Arrays: ...

        def backward(self, diffs: Sequence[str] | None = ..., **kwargs: Any) -> Arrays: ...

    def forward_all(self, blobs: Sequence[str] | None = None, **kwargs: Any) -> Arrays:
        """Run the net forward on all rows of its inputs.

        Args:
            blobs: blobs to return besides the outputs.
            kwargs: the inputs' rows, any number of them, the same of each input.

        Returns:
            The rows of each output.

        Raises:
            ArgumentError: no input is given, or one without rows.
        """
        rows = _count(kwargs)
        collected = [_copied(self.forward(blobs=blobs, **batch)) for batch in self._batch(kwargs)]
        return _joined(collected, rows)

    def forward_backward_all(
        self, blobs: Sequence[str] | None = None, diffs: Sequence[str] | None = None, **kwargs: Any
    ) -> tuple[Arrays, Arrays]:
        """Run the net forward and backward on all rows.

        Args:
            blobs: blobs to return besides the outputs.
            diffs: blobs whose diffs are returned besides the inputs'.
            kwargs: the rows of the inputs, and of the outputs' diffs; without the latter the loss gives the diffs.

        Returns:
            The rows of each output, and of each diff.

        Raises:
            ArgumentError: neither inputs nor outputs' diffs are given, or some without rows.
        """
        rows = _count(kwargs)
        forward = self._batch({name: kwargs[name] for name in self.inputs if name in kwargs})
        backward = self._batch({name: kwargs[name] for name in self.outputs if name in kwargs})
        all_blobs, all_diffs = [], []
        nothing: Arrays = {}
        for inputs, tops in zip_longest(forward, backward, fillvalue=nothing):
            all_blobs.append(_copied(self.forward(blobs=blobs, **inputs)))
            all_diffs.append(_copied(self.backward(diffs=diffs, **tops)))
        return _joined(all_blobs, rows), _joined(all_diffs, rows)

    def _batch(self, blobs: Mapping[str, Any]) -> Iterator[Arrays]:
        """Cut arrays into the net's batches."""
        if not blobs:
            return
        size = next(iter(self.blobs.values())).shape[0]
        for begin in range(0, _count(blobs), size):
            yield {name: _padded(np.asarray(rows[begin : begin + size]), size) for name, rows in blobs.items()}


def _count(arrays: Mapping[str, Any]) -> int:
    if not arrays:
        raise ArgumentError("give the rows of the net's inputs as keywords: forward_all(data=rows)")
    name, rows = next(iter(arrays.items()))
    if not len(rows):
        raise ArgumentError(f"'{name}' has no rows; give at least one")
    return len(rows)


def _padded(rows: NDArray[Any], size: int) -> NDArray[Any]:
    missing = size - len(rows)
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows


def _copied(arrays: Arrays) -> Arrays:
    return {name: np.atleast_1d(array).copy() for name, array in arrays.items()}


def _joined(batches: list[Arrays], rows: int) -> Arrays:
    """The rows of all batches, without those that only filled up the last batch; numbers of whole batches stay."""
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    filled = max(map(len, joined.values()))
    return {name: array[:rows] if len(array) == filled else array for name, array in joined.items()}

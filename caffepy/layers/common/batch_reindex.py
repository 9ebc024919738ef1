"""BatchReindex and Filter: selection of samples of a batch."""

from __future__ import annotations

import numpy as np

from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.index_check import IndexCheck
from caffepy.layers.core.layout_adapter import LayoutAdapter


@register_layer("BatchReindex")
class BatchReindexLayer(Layer):
    """y[i] = x[index[i]] (Caffe's `batch_reindex_layer.cpp`).

    Shapes: x (N, …), index (M,), y (M, …). dx[n] = sum of dy[i] over all i with index[i] = n, in ascending order of i.

    Raises:
        ShapeError: the index does not have one axis, or x has none.
        DataError: an index is outside 0 to N - 1.
    """

    bottoms = (2, 2)
    no_gradient_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._check = IndexCheck(
            self,
            f"entry {{}} of '{bottom[1].name}' is not the index of a sample of '{bottom[0].name}', from 0",
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[1].shape) != 1:
            raise self.shape_error("the second bottom must have one axis, an index for each sample", bottom[1])
        if not bottom[0].shape:
            raise self.shape_error("the first bottom needs a first axis, N", bottom[0])
        top[0].reshape((bottom[1].shape[0], *bottom[0].shape[1:]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.gather_rows(bottom[0].data, bottom[1].data, top[0].data, self._check.bad_index)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.fill(bottom[0].diff, 0)
            self.backend.scatter_add_rows(top[0].diff, bottom[1].data, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()


@register_layer("Filter")
class FilterLayer(Layer):
    """The samples of each bottom whose entry in the last bottom, the selector, is not 0 (Caffe's `filter_layer.cpp`).

    Shapes: bottoms (N, …), selector (N, 1, …), tops (M, …), where M changes from pass to pass. The gradient of a sample
    that is not selected is 0.

    Raises:
        ConfigError: the number of tops is not the number of bottoms less one.
        ShapeError: a bottom has another number of samples than the selector.
    """

    bottoms = (2, None)
    tops = (1, None)
    changes_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        if len(top) != len(bottom) - 1:
            raise self.error(f"needs a top for each bottom but the last, the selector: {len(bottom) - 1}")
        self._check = IndexCheck(self, "sample {} does not exist")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        selector = bottom[-1]
        if not selector.shape or selector.count != selector.shape[0]:
            raise self.shape_error("the last bottom, the selector, must have one number for each sample", selector)
        for blob, target in zip(bottom[:-1], top, strict=True):
            if not blob.shape or blob.shape[0] != selector.shape[0]:
                raise self.shape_error("every bottom must have as many samples as the selector", blob, selector)
            target.reshape(blob.shape)
        self._row = LayoutAdapter(self.backend, selector.shape, (selector.count,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        selector = self.backend.to_host(self._row.load(bottom[-1].data))
        # The meta backend has no values: selecting all samples gives the upper bound of the memory.
        selected = np.flatnonzero(selector.astype(np.int64)) if self.backend.holds_values else np.arange(selector.size)
        self._index = self.backend.zeros((len(selected),))
        self.backend.from_host(selected, self._index)
        for blob, target in zip(bottom[:-1], top, strict=True):
            target.reshape((len(selected), *blob.shape[1:]))
            self.backend.gather_rows(blob.data, self._index, target.data, self._check.bad_index)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)
        for blob, source, wanted in zip(bottom[:-1], top, propagate_down[:-1], strict=True):
            if wanted:
                self.backend.scatter_add_rows(source.diff, self._index, blob.diff)

    def capture_blocker(self) -> str | None:
        return "only the host knows the number of samples that it selects"

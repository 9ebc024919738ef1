"""BatchReindex and Filter: selection of samples of a batch, or of elements of an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.index_check import IndexCheck
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.proto import caffe_pb2


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
            f"entry {{}} of '{bottom[1].title}' is not the index of a sample of '{bottom[0].title}', from 0",
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

    With `filter_param` it is the layer of channel-pruning's Caffe (its `filter_layer.cpp`; He, Zhang and Sun 2017): the
    selector is parameter 0, one number for each element of `axis`, initially 1. Each top has the first `num_output`
    elements whose number is not 0.

    Raises:
        ConfigError: the number of tops does not fit, or num_output is not from 1 to the size of the axis.
        ShapeError: a bottom has another number of samples than the selector.
        DataError: the parameter selects fewer than num_output elements.
    """

    bottoms = (1, None)
    tops = (1, None)
    changes_shapes = True
    may_keep_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._own = self.param.HasField("filter_param")
        if self._own:
            self._add_selector(bottom, top)
            return
        if len(top) != len(bottom) - 1 or len(bottom) == 1:
            raise self.error(f"needs a top for each bottom but the last, the selector: {len(bottom) - 1}")
        self._check = IndexCheck(self, "sample {} does not exist")

    def _add_selector(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.filter_param
        if len(top) != len(bottom):
            raise self.error(f"needs a top for each bottom: {len(bottom)}")
        size = bottom[0].shape[bottom[0].axis(param.axis, self.where)]
        if not 1 <= param.num_output <= size:
            raise self.error(f"filter_param's num_output is {param.num_output}; it must be from 1 to {size}")
        self.add_parameter((size,), caffe_pb2.FillerParameter(type="constant", value=1))
        while len(self.param.param) < 1:
            self.param.param.add()
        self.param.param[0].lr_mult = self.param.param[0].decay_mult = 0

    def _reshape_axis(self, bottom: Blobs, top: Blobs) -> None:
        param, size = self.param.filter_param, self.blobs[0].shape[0]
        for blob, target in zip(bottom, top, strict=True):
            axis = blob.axis(param.axis, self.where)
            if blob.shape[axis] != size:
                raise self.shape_error(f"axis {axis} of every bottom must have {size} elements", blob)
            target.reshape((*blob.shape[:axis], param.num_output, *blob.shape[axis + 1 :]))

    def _parts(self, blob: Blob) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Return the selected slices of a bottom, and where its top has them."""
        param = self.param.filter_param
        selected = np.flatnonzero(self._selector)[: param.num_output]
        return consecutive_parts(selected, blob.axis(param.axis, self.where))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self._own:
            self._reshape_axis(bottom, top)
            return
        selector = bottom[-1]
        if not selector.shape or selector.count != selector.shape[0]:
            raise self.shape_error("the last bottom, the selector, must have one number for each sample", selector)
        for blob, target in zip(bottom[:-1], top, strict=True):
            if not blob.shape or blob.shape[0] != selector.shape[0]:
                raise self.shape_error("every bottom must have as many samples as the selector", blob, selector)
            target.reshape(blob.shape)
        self._row = LayoutAdapter(self.backend, selector.shape, (selector.count,))

    def _forward_own(self, bottom: Blobs, top: Blobs) -> None:
        selector, wanted = self.backend.to_host(self.blobs[0].data), self.param.filter_param.num_output
        self._selector = selector if self.backend.holds_values else np.ones(selector.shape)
        found = np.count_nonzero(self._selector)
        if found < wanted:
            raise self.data_error(f"its parameter selects {found} elements, and num_output is {wanted}; correct either")
        for blob, target in zip(bottom, top, strict=True):
            for source, destination in self._parts(blob):
                self.backend.copy(blob.data[source], target.data[destination])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._own:
            self._forward_own(bottom, top)
            return
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
        if self._own:
            for blob, target, wanted in zip(bottom, top, propagate_down, strict=True):
                for part, place in self._parts(blob) if wanted else ():
                    self.backend.copy(target.diff[place], blob.diff[part])
            return
        for blob, source, wanted in zip(bottom[:-1], top, propagate_down[:-1], strict=True):
            if wanted:
                self.backend.scatter_add_rows(source.diff, self._index, blob.diff)

    def capture_blocker(self) -> str | None:
        return "only the host knows the number of samples that it selects"

    def raise_device_errors(self) -> None:
        if not self._own:
            self._check.raise_device_errors()


def consecutive_parts(
    indices: Sequence[int] | np.ndarray, axis: int
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return slices of a source and of a destination that hold elements of an axis in the order of `indices`.

    Runs of consecutive indices share a slice.
    """
    parts, begin, before = [], 0, (slice(None),) * axis
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            first = int(indices[begin])
            source = slice(first, first + end - begin)
            parts.append(((*before, source), (*before, slice(begin, end))))
            begin = end
    return parts

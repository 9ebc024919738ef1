"""HDF5Data and HDF5Output: rows of datasets in HDF5 files, read and written."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.prefetch import Batch
from caffepy.data.random import permutation
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import hash_of
from caffepy.errors import DataError, RunError
from caffepy.formats.blobs import MAX_ELEMENTS, check_shape, format_shape
from caffepy.formats.messages import HDF5_MAGIC
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.layer import Blobs, Layer, LayerContext, register_layer
from caffepy.utils.files import open_regular, read_list, working_folder

if TYPE_CHECKING:
    from caffepy.formats.hdf5 import Dataset, Group

log = logging.getLogger(__name__)


@register_layer("HDF5Data")
class HDF5DataLayer(PrefetchingLayer):
    """Rows of the HDF5 datasets named like the tops (Caffe's `hdf5_data_layer.cpp`). Tops: (N, …) each.

    Raises:
        ConfigError: `source` is missing, or transform_param is set.
        DataError: the list or a file cannot be read, or a dataset does not fit.
    """

    tops = (1, None)
    supports_half = False

    def batch_size(self) -> int:
        return self.param.hdf5_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.hdf5_data_param
        if self.param.HasField("transform_param"):
            raise self.error("HDF5 data are not transformed; remove transform_param")
        if not param.source:
            raise self.error("hdf5_data_param.source must name a list of HDF5 files")
        self._rows = Hdf5Source(self.context.resolve(param.source), self.param.top, self.context.resolve)
        return self._rows, self._rows.row_shapes

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return Hdf5Loader(self._rows, self.param.hdf5_data_param.shuffle, stream.seed, stream.stream)


# -- files and batches ---------------------------------------------------------------------------------


_MAX_LIST_BYTES = 1 << 26
_MAX_NAMES = 20
"""Number of dataset names in a message."""


class Hdf5Source:
    """The rows of a list of HDF5 files. One file at a time is held in memory, as float32.

    Args:
        path: the list: file names, separated by white space.
        datasets: the name of a dataset for each top.
        resolve: turns a path of the list into an existing one.

    Raises:
        DataError: the list or a file cannot be read; a dataset is missing, empty, not numeric or larger than a blob;
            the datasets of a file differ in their number of rows; or rows differ in shape from the first file's.
    """

    def __init__(self, path: Path, datasets: Sequence[str], resolve: Callable[[str], Path] = Path) -> None:
        self.description = f"HDF5 list '{path}'"
        self._datasets = list(datasets)
        self._loaded = -1
        self._arrays: list[NDArray[np.float32]] = []
        try:
            with open_regular(path) as file:
                if file.read(len(HDF5_MAGIC)) == HDF5_MAGIC:
                    raise DataError(
                        f"'{path}' is an HDF5 file; hdf5_data_param.source must name a text file that lists HDF5 "
                        "files, one a line"
                    )
        except OSError as error:
            raise DataError(f"{self.description} cannot be read: {error.strerror}") from error
        lines = read_list(path, _MAX_LIST_BYTES, self.description).split("\n")
        names = [name for line in lines for name in line.split()]
        divided = any(len(line.split()) > 1 for line in lines)
        self._advice = f"; white space divides the names in '{path}', so a path cannot contain any" if divided else ""
        if not names:
            raise DataError(f"{self.description} names no files; write one HDF5 file a line")
        self.files = [_beside(path, name, resolve) for name in names]
        self.row_shapes: list[tuple[int, ...]] = []
        """The shape of one row of each top."""
        self.rows = [self._scan(file) for file in self.files]
        """Rows of each file."""
        self.ends: NDArray[np.int64] = np.cumsum(self.rows)

    def _scan(self, path: Path) -> int:
        """Check the datasets of a file and return its number of rows."""
        if not os.path.lexists(path):
            raise DataError(f"HDF5 file '{path}' does not exist (looked from {working_folder()}){self._advice}")
        with _open(path) as file:
            shapes = [shape for _, shape in self._find_datasets(file, path)]
        rows = {name: shape[0] for name, shape in zip(self._datasets, shapes, strict=True)}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"'{name}' has {count}" for name, count in rows.items())
            raise DataError(f"HDF5 file '{path}': datasets of different numbers of rows: {counts}")
        row_shapes = [shape[1:] for shape in shapes]
        if self.row_shapes and row_shapes != self.row_shapes:
            raise DataError(
                f"HDF5 file '{path}': rows of shape {row_shapes}, but those of '{self.files[0]}' are {self.row_shapes}"
            )
        self.row_shapes = row_shapes
        return int(next(iter(rows.values())))

    def arrays(self, number: int) -> list[NDArray[np.float32]]:
        """Return the whole dataset of each top in file `number`.

        Raises:
            DataError: the file cannot be read or does not fit in memory.
        """
        if number != self._loaded:
            self._arrays, self._loaded = [], -1  # free the last file first: two files may not fit in memory
            self._arrays = self._read(self.files[number])
            self._loaded = number
        return self._arrays

    def _read(self, path: Path) -> list[NDArray[np.float32]]:
        with _open(path) as file:
            arrays = [dataset.read(np.float32) for dataset, _ in self._find_datasets(file, path)]
        shapes = [(self.rows[self.files.index(path)], *shape) for shape in self.row_shapes]
        if [array.shape for array in arrays] != shapes:
            raise DataError(f"HDF5 file '{path}' was changed while it was read; start again, and write to a copy of it")
        return arrays

    def _find_datasets(self, file: Group, path: Path) -> list[tuple[Dataset, tuple[int, ...]]]:
        """Return the datasets of the tops and their shapes, after a check of their sizes against the file's."""
        from caffepy.formats.hdf5 import check_dataset

        datasets, size = [], 0
        for dataset in [_dataset(file, name, path) for name in self._datasets]:
            size = check_dataset(dataset, size)
            datasets.append((dataset, _check_values(dataset, path)))
        return datasets

    def record_name(self, record: int) -> str:
        """Return the name of a record for messages."""
        file = int(np.searchsorted(self.ends, record, "right"))
        return f"row {record - self.ends[file] + self.rows[file]} of HDF5 file '{self.files[file]}'"

    def fingerprint(self) -> dict[str, str]:
        """Return the number of rows of each file and the hash of the first row (see `RecordSource.fingerprint`)."""
        with _open(self.files[0]) as file:
            rows = [dataset.read(np.float32, rows=1)[0] for dataset, _ in self._find_datasets(file, self.files[0])]
        return {
            "the number of rows of each file": ", ".join(map(str, self.rows)),
            "the hash of the first row": hash_of(*(np.asarray(row).tobytes() for row in rows)),
        }

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return sum(self.rows)

    def close(self) -> None:
        """Free the arrays. Idempotent."""
        self._arrays, self._loaded = [], -1


class RowOrder(Sampler):
    """The order of the rows of files. With `shuffle` the files, and the rows of each file, have a random order.

    Args:
        rows: of each file.
        shuffle: whether to shuffle.
        seed: of the solver.
        stream: random stream of the layer.
    """

    def __init__(self, rows: Sequence[int], shuffle: bool, seed: int, stream: int) -> None:
        super().__init__(sum(rows), 0, shuffle, seed, stream)
        self._rows = rows

    def order_of(self, epoch: int) -> NDArray[np.int64]:
        ends, parts = np.cumsum(self._rows), []
        for file in permutation(self._seed, self._stream, epoch, len(self._rows)).tolist():
            rows = self._rows[file]
            parts.append(ends[file] - rows + permutation(self._seed, self._stream ^ (file + 1), epoch, rows))
        return np.concatenate(parts)


class Hdf5Loader:
    """Fills batches with rows; a `Loader`.

    Args:
        source: the rows.
        shuffle: whether to shuffle.
        seed: of the solver.
        stream: random stream of the layer.
    """

    def __init__(self, source: Hdf5Source, shuffle: bool = False, seed: int = 0, stream: int = 0) -> None:
        self._source, self._order = source, RowOrder(source.rows, shuffle, seed, stream)
        self._record = 0

    @property
    def reading(self) -> str:
        return self._source.record_name(self._record)

    def describe(self, sample: int) -> str:
        """Return the name of the row of a global sample, for messages. Thread-safe."""
        return self._source.record_name(int(self._order.copy().records(sample, 1)[0]))

    def close(self) -> None:
        self._order.close()

    def load_bytes(self, *_: object) -> int:
        """Return 0: batches are float32."""
        return 0

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the rows of the global samples [first, first + count)."""
        outs = [batch.array(i, (count, *shape)) for i, shape in enumerate(self._source.row_shapes)]
        records = self._order.records(first, count)
        self._order.prepare_next_epoch()
        files = np.searchsorted(self._source.ends, records, "right")
        rows = records - self._source.ends[files] + np.array(self._source.rows)[files]
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), count]):
            self._record = int(records[begin])
            for out, array in zip(outs, self._source.arrays(int(files[begin])), strict=True):
                array.take(rows[begin:end], 0, out[begin:end], "clip")  # "raise" would copy twice


def _beside(list_path: Path, name: str, resolve: Callable[[str], Path]) -> Path:
    """Return the path of a file in the list: as the prototxt's paths, or else relative to the list's folder."""
    resolved = resolve(name)
    beside = list_path.parent / name
    return beside if not os.path.exists(resolved) and os.path.exists(beside) else resolved


def _open(path: Path) -> AbstractContextManager[Group]:
    """Open an HDF5 file. pyfive, whose import takes 60 ms, is not needed by nets without this layer."""
    from caffepy.formats.hdf5 import open_hdf5

    return open_hdf5(path, DataError)


def _dataset(file: Group, name: str, path: Path) -> Dataset:
    """Return the dataset of a top."""
    from caffepy.formats.hdf5 import Dataset, find_object

    dataset = find_object(file, name)
    if not isinstance(dataset, Dataset):
        names = sorted(file.links)
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        known = ", ".join(names[:_MAX_NAMES]) or "none"
        raise DataError(f"HDF5 file '{path}' has no dataset '{name}'; it has: {known}{more}")
    return dataset


def _check_values(dataset: Dataset, path: Path) -> tuple[int, ...]:
    """Return the shape of a dataset."""
    name = dataset.name.removeprefix("/")
    if dataset.dtype is None or dataset.dtype.kind not in "fiu":
        raise DataError(f"HDF5 file '{path}': dataset '{name}' holds {dataset.kind}; a top takes numbers")
    if not dataset.shape or dataset.size == 0:
        raise DataError(f"HDF5 file '{path}': dataset '{name}' is empty or has no axis of rows")
    if dataset.size > MAX_ELEMENTS:
        raise DataError(
            f"HDF5 file '{path}': dataset '{name}' of shape {format_shape(dataset.shape)} is larger than a blob "
            "may be; divide it over several files"
        )
    check_shape(dataset.shape, f"HDF5 file '{path}': dataset '{name}'")
    return dataset.shape


@register_layer("HDF5Output")
class HDF5OutputLayer(Layer):
    """Writes its bottoms to `file_name` as the datasets "data" and "label" (Caffe's `hdf5_output_layer.cpp`).

    Rank 0 writes the file in every pass and replaces the last one (Caffe fails at the second pass). The file is
    complete when the pass returns. As in Caffe, datasets have the bottoms' shapes with at least four axes.

    Raises:
        ConfigError: `file_name` is missing.
        ShapeError: the bottoms differ in N.
        RunError: the file cannot be written.
    """

    bottoms = (2, 2)
    tops = (0, 0)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if not self.param.hdf5_output_param.file_name:
            raise self.error("hdf5_output_param.file_name must name the file to write")
        self._path = Path(self.param.hdf5_output_param.file_name)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if not bottom[0].shape or not bottom[1].shape or bottom[0].shape[0] != bottom[1].shape[0]:
            raise self.shape_error("both bottoms must have the same first axis, N", *bottom)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.context.shard.rank != 0 or not self.backend.holds_values:
            return
        self._write({name: blob.host_data() for name, blob in zip(("data", "label"), bottom, strict=True)})

    def _write(self, arrays: dict[str, Any]) -> None:
        import h5py

        from caffepy.utils.files import atomic_write

        try:
            with atomic_write(self._path) as path, h5py.File(path, "w") as file:
                for name, values in arrays.items():
                    file[name] = values.reshape(values.shape + (1,) * (4 - values.ndim))
        except OSError as error:
            raise RunError(f"{self.where}: '{self._path}' cannot be written: {error}") from error
        log.debug("layer '%s' wrote %d rows to %s", self.name, len(arrays["data"]), self._path)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, needs_gradient in zip(bottom, propagate_down, strict=True):
            if needs_gradient:
                self.backend.fill(blob.diff, 0)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST: each pass replaces the file of the last one."""
        return context.phase == caffe_pb2.TEST

    def has_side_effects(self) -> bool:
        return True

    def capture_blocker(self) -> str | None:
        return "it writes a file"

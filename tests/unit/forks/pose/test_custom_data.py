"""CustomData: slices, encodings, means, and the order of records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, backend_named

from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto.caffe_pb2 import TRAIN, Datum, LayerParameter
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext, layer_class

COUNT, HEIGHT, WIDTH = 12, 5, 7
SLICES = (
    "slice_point: 3 slice_point: 6 slice_point: 8 encoding: UINT8 encoding: UINT8 encoding: UINT16FLOW encoding: BOOL1"
)


class Values:
    """What the records hold."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (COUNT, 6, HEIGHT, WIDTH)).astype(np.uint8)
        self.flows = rng.integers(-3000, 3000, (COUNT, 2, HEIGHT, WIDTH)).astype("<i2")
        self.flows[:, 1, 2, 3] = 32767
        self.masks = rng.integers(0, 2, (COUNT, HEIGHT, WIDTH)).astype(np.uint8)

    def datum(self, n: int) -> Datum:
        mask = np.packbits(self.masks[n].ravel(), bitorder="little")
        content = self.images[n].tobytes() + self.flows[n].tobytes() + mask.tobytes()
        return Datum(channels=9, height=HEIGHT, width=WIDTH, data=content, label=n)


VALUES = Values()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("custom")
    write_datums(path / "db", ((record_key(n), VALUES.datum(n)) for n in range(COUNT)))
    floats = [Datum(channels=2, height=1, width=1, float_data=[n, -n]) for n in range(3)]
    write_datums(path / "floats", ((record_key(n), datum) for n, datum in enumerate(floats)))
    (path / "labels.txt").write_text(" ".join("12"[n % 3 == 0] for n in range(COUNT)))
    return path


def batches(
    folder: Path,
    fields: str,
    count: int = 1,
    tops: int = 5,
    source: str = "db",
    seed: int = 1,
    backend: str = "cpu",
) -> list[Any]:
    """The tops of `count` passes."""
    format_ = "" if "backend" in fields else "backend: LMDB"
    text = f"type: 'CustomData' data_param {{ source: '{folder}/{source}' {format_} {fields} }}"
    param = text_format.Parse(text, LayerParameter(name="d", phase=TRAIN, top=[f"t{i}" for i in range(tops)]))
    context = LayerContext(backend_named(backend), TRAIN, seed=seed)
    layer = layer_class("CustomData")(param, context)
    blobs = [Blob(context.backend, name=name) for name in param.top]
    try:
        with context.backend.activate():
            layer.setup([], blobs)
            layer.reshape([], blobs)
            results = []
            for number in range(count):
                context.passes.number = number
                layer.forward([], blobs)
                results.append([blob.host_data() for blob in blobs])
        return results
    finally:
        layer.close()


def order(folder: Path, fields: str, count: int = COUNT, **settings: Any) -> list[int]:
    """The records of `count` passes of one sample, by their labels."""
    return [int(tops[4].item()) for tops in batches(folder, f"{SLICES} {fields}", count, **settings)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices(folder: Path, backend: str) -> None:
    first, second, flow, mask, label = batches(folder, f"{SLICES} batch_size: 3", backend=backend)[0]
    assert np.array_equal(first, VALUES.images[:3, :3]) and np.array_equal(second, VALUES.images[:3, 3:])
    wanted = VALUES.flows[:3] / np.float32(32)
    wanted[:, 1, 2, 3] = np.nan
    assert np.array_equal(flow, wanted, equal_nan=True)
    assert np.array_equal(mask[:, 0], VALUES.masks[:3])
    assert label.shape == (3, 1, 1, 1) and list(label.ravel()) == [0, 1, 2]
    assert [top.shape[0] for top in batches(folder, SLICES, tops=4)[0]] == [1] * 4


def test_floats(folder: Path) -> None:
    found = batches(folder, "batch_size: 3", tops=1, source="floats")[0][0]
    assert np.array_equal(found[:, :, 0, 0], [[0, 0], [1, -1], [2, -2]])
    two = batches(folder, "slice_point: 1", 2, tops=2, source="floats")[1]
    assert two[0].item() == 1 and two[1].item() == -1


def test_mean_and_scale(folder: Path) -> None:
    fields = f"{SLICES} scale: 0.5 subtract: 10 subtract: 20 subtract: 30 subtract: 40"
    first, second, *_ = batches(folder, fields)[0]
    mean = np.reshape([10, 20, 30, 40, 0, 0], (6, 1, 1))
    wanted = (VALUES.images[0] - mean.astype(np.float32)) / 2
    assert np.array_equal(np.concatenate([first[0], second[0]]), wanted)


def test_mean_file(folder: Path) -> None:
    from caffepy.formats.proto.caffe_pb2 import BlobProto

    mean = np.random.default_rng(1).integers(0, 9, (9, HEIGHT, WIDTH)).astype(np.float32)
    blob = BlobProto(num=1, channels=9, height=HEIGHT, width=WIDTH, data=mean.ravel())
    (folder / "mean.binaryproto").write_bytes(blob.SerializeToString())
    first = batches(folder, f"{SLICES} mean_file: '{folder}/mean.binaryproto'")[0][0]
    assert np.array_equal(first[0], VALUES.images[0, :3] - mean[:3])


def test_range_and_preselection(folder: Path) -> None:
    assert order(folder, "", 14) == [*range(COUNT), 0, 1]
    assert order(folder, "range_start: 4 range_end: 6", 5) == [4, 5, 6, 4, 5]
    labels = f"preselection_file: '{folder}/labels.txt' preselection_label:"
    assert order(folder, f"{labels} 2", 6) == [0, 3, 6, 9, 0, 3]
    assert order(folder, f"{labels} 1 range_start: 1 range_end: 3", 4) == [2, 4, 5, 2]


@pytest.mark.parametrize("word", ["--5", "+-3", "9" * 5000, "²", "x"])
def test_a_preselection_ends_at_the_first_word_that_is_no_number(folder: Path, word: str) -> None:
    (folder / "few.txt").write_text(f"+2 -1 2 {word} 2")
    with pytest.raises(DataError, match="few.txt' has 3 labels, but .* 12 records"):
        order(folder, f"preselection_file: '{folder}/few.txt' preselection_label: 2", 4)


def test_permutation(folder: Path) -> None:
    """One order for all epochs, by its seed, in blocks, before or after the range, or a new one after some batches."""
    once = order(folder, "rand_permute: true", 2 * COUNT)
    assert sorted(once[:COUNT]) == list(range(COUNT)) != once[:COUNT] == once[COUNT:]
    assert order(folder, "rand_permute: true", seed=2) != once[:COUNT]
    fixed = [order(folder, "rand_permute: true rand_permute_seed: 77", seed=seed) for seed in (1, 2)]
    assert fixed[0] == fixed[1] != once[:COUNT]
    blocks = order(folder, "rand_permute: true block_size: 4")
    assert [sorted(blocks[i : i + 4]) for i in (0, 4, 8)] == [list(range(i, i + 4)) for i in (0, 4, 8)]
    part = "rand_permute: true range_end: 3 rand_permute_order:"
    assert order(folder, f"{part} FIRST_PERMUTE_THEN_RANGE", 4) == once[:4]
    assert sorted(order(folder, f"{part} FIRST_RANGE_THEN_PERMUTE", 4)) == [0, 1, 2, 3]
    renewed = order(folder, "rand_permute: true permute_every_iter: 12", 2 * COUNT)
    assert sorted(renewed[:COUNT]) == sorted(renewed[COUNT:]) == list(range(COUNT))
    assert renewed[:COUNT] == once[:COUNT] != renewed[COUNT:]


def test_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        batches(folder, f"{SLICES} verbose: true range_end: 4")
    assert "5 of 12 records are used" in caplog.text


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ("slice_point: 3 slice_point: 3", ConfigError, "must rise"),
        ("encoding: UINT8 encoding: UINT8", ConfigError, "2 encodings for 1 slices"),
        ("crop_size: 3", ConfigError, "no crop_size"),
        ("backend: LEVELDB", ConfigError, "LMDBs only"),
        ("preselection_file: 'x'", ConfigError, "without preselection_label"),
        ("preselection_file: '/nowhere/x' preselection_label: 1", DataError, "cannot be read"),
        ("range_start: 5 range_end: 2", DataError, "before range_start"),
        ("slice_point: 9", DataError, "slice_point is 9"),
        ("", DataError, "fewer than"),
        ("encoding: BOOL1", DataError, "one channel"),
        (f"{SLICES} subtract: {' subtract: '.join('0' * 10)}", DataError, "shape of the mean"),
    ],
)
def test_refusals(folder: Path, fields: str, error: type[Exception], words: str) -> None:
    source = "short" if not fields else "db"
    if source == "short" and not (folder / "short").exists():
        datum = VALUES.datum(0)
        datum.data = datum.data[:100]
        write_datums(folder / "short", [(record_key(0), datum)])
    with pytest.raises(error, match=words):
        batches(folder, fields, source=source, tops=4 if "subtract" in fields else 1)

import logging
import threading

import cv2
import h5py
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import create_backend
from caffepy.backend.meta import MetaBackend
from caffepy.data.sharding import Shard
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import AbortedError, ConfigError, DataError, ShapeError
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, Datum, LayerParameter
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext, layer_class
from caffepy.utils.clocks import suspend_aware_seconds

RECORDS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An LMDB and an HDF5 list of 50 records; the first pixel and the label of record n are n."""
    path = tmp_path_factory.mktemp("data")
    pixels = np.random.default_rng(0).integers(0, 256, (RECORDS, 3, 6, 8), dtype=np.uint8)
    pixels[:, 0, 0, 0] = np.arange(RECORDS)
    datums = [Datum(channels=3, height=6, width=8, data=image.tobytes(), label=n) for n, image in enumerate(pixels)]
    write_datums(path / "db", ((record_key(n), datum) for n, datum in enumerate(datums)))
    with h5py.File(path / "a.h5", "w") as file:
        file["data"], file["label"] = pixels.astype(np.float32), np.arange(RECORDS)
    (path / "list.txt").write_text(f"{path}/a.h5\n")
    for n, image in enumerate(pixels[:10]):
        cv2.imwrite(str(path / f"{n}.png"), np.ascontiguousarray(image.transpose(1, 2, 0)))
    (path / "images.txt").write_text("".join(f"{path}/{n}.png {n}\n" for n in range(10)))
    return path


class Runner:
    """One layer and its blobs, run as a net would."""

    def __init__(self, text, phase=TRAIN, tops=2, **context):
        param = text_format.Parse(text, LayerParameter(name="d", phase=phase))
        if not param.top:
            param.top.extend(["data", "label"][:tops])
        self.context = LayerContext(create_backend(), phase, **context)
        self.layer = layer_class(param.type)(param, self.context)
        self.tops = [Blob(self.context.backend, name=name) for name in param.top]
        self.layer.setup([], self.tops)
        self.layer.reshape([], self.tops)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.layer.close()
        self.layer.close()

    def forward(self):
        self.layer.forward([], self.tops)
        self.context.passes.number += 1
        return [blob.host_data() for blob in self.tops]

    def labels(self, passes):
        return [self.forward()[1].astype(int).tolist() for _ in range(passes)]


def data_layer(folder, more="", transform=""):
    return f"type: 'Data' data_param {{ source: '{folder}/db' backend: LMDB {more} }} transform_param {{ {transform} }}"


def hdf5_layer(folder, more=""):
    return f"type: 'HDF5Data' hdf5_data_param {{ source: '{folder}/list.txt' {more} }}"


def image_layer(folder, more=""):
    return f"type: 'ImageData' image_data_param {{ source: '{folder}/images.txt' {more} }}"


KINDS = {"Data": data_layer, "HDF5Data": hdf5_layer, "ImageData": image_layer}


def test_hdf5_files_and_their_rows_are_shuffled_anew_in_each_epoch(tmp_path):
    """Three files of 20 rows: an epoch has each row once, file by file, neither files nor rows in their order."""
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["label"] = np.arange(20 * number, 20 * number + 20)
            file["data"] = np.arange(20 * number, 20 * number + 20).reshape(-1, 1) * [1, 2]
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{number}.h5\n" for number in range(3)))
    epochs = {}
    for shuffle in ("false", "true"):
        with Runner(hdf5_layer(tmp_path, f"batch_size: 60 shuffle: {shuffle}"), seed=1) as one:
            tops = [one.forward() for _ in range(6)]
        for data, label in tops:
            np.testing.assert_array_equal(data, label.reshape(-1, 1) * [1, 2])
        epochs[shuffle] = [label.astype(int).tolist() for _, label in tops]
    assert epochs["false"] == [list(range(60))] * 6
    shuffled = epochs["true"]
    assert len({tuple(rows) for rows in shuffled}) == 6
    assert all(sorted(rows) == list(range(60)) for rows in shuffled)
    files = [[row // 20 for row in rows] for rows in shuffled]
    assert all(len({*own[:20]}) == len({*own[20:40]}) == 1 for own in files)
    assert len({own[0] for own in files}) > 1
    assert all(rows[start : start + 20] != sorted(rows[start : start + 20]) for rows in shuffled for start in (0, 20))


# -- sharding and positions ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(
    world=st.sampled_from([1, 2, 3]), batch=st.sampled_from([1, 4, 7]), shuffle=st.booleans(), seed=st.integers(0, 9)
)
def test_devices_share_the_global_batch(folder, kind, world, batch, shuffle, seed):
    """Any number of ranks with the same global batch see the same samples in the same order."""
    text = "batch_size: {} shuffle: " + str(shuffle).lower()
    with Runner(KINDS[kind](folder, text.format(batch * world)), seed=seed) as alone:
        expected = alone.labels(6)
    parts = []
    for rank in range(world):
        with Runner(KINDS[kind](folder, text.format(batch)), seed=seed, shard=Shard(rank, world)) as one:
            parts.append(one.labels(6))
    assert [sum(step, []) for step in zip(*parts, strict=True)] == expected
    if not shuffle:
        count = 10 if kind == "ImageData" else RECORDS
        assert sum(expected, []) == [n % count for n in range(6 * batch * world)]


def test_batch_size_is_divided_among_a_ranks_devices(folder, caplog):
    shard = Shard(rank=0, world_size=6, devices_per_rank=3)
    with caplog.at_level(logging.INFO, "caffepy"), Runner(data_layer(folder, "batch_size: 10"), shard=shard) as runner:
        assert runner.forward()[0].shape == (4, 3, 6, 8)
        assert runner.layer.position() == 24
    assert (
        "layer 'd': batch_size 10 cannot be divided among 3 devices; rounded up to 4 a device, 12 in all" in caplog.text
    )
    assert "output data size: 4,3,6,8" in caplog.text


def test_batch_size_may_be_per_device(folder):
    shard = Shard(rank=1, world_size=2, devices_per_rank=2, per_device_batch=True)
    with Runner(data_layer(folder, "batch_size: 5"), shard=shard) as runner:
        assert runner.labels(2) == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]


def test_test_batches_are_dealt_out_whole(folder):
    """Two devices, three batches a test: device 0 takes batches 0 and 2, device 1 batch 1; then the next test."""
    for rank, expected in [(0, [[0, 1], [4, 5], [6, 7], [10, 11]]), (1, [[2, 3], [8, 9]])]:
        shard = Shard(rank, 2, devices_per_rank=2)
        with Runner(data_layer(folder, "batch_size: 2"), TEST, shard=shard, test_iter=3) as runner:
            assert runner.labels(len(expected)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_from_a_position(folder, kind):
    text = KINDS[kind](
        folder, "batch_size: 7 rand_skip: 5 shuffle: true" if kind != "HDF5Data" else "batch_size: 7 shuffle: true"
    )
    with Runner(text, seed=3) as runner:
        runner.labels(4)
        position = runner.layer.position()
        expected = runner.labels(5)
    with Runner(text, seed=3) as other:
        other.labels(2)  # what was read ahead must be dropped
        other.layer.seek(position)
        other.context.passes.number = 4  # the snapshot may set it after the seek
        assert other.layer.position() == position
        assert other.labels(5) == expected


def test_a_resumed_run_may_divide_the_batch_otherwise(folder):
    with Runner(data_layer(folder, "batch_size: 6")) as runner:
        runner.labels(3)
        position = runner.layer.position()
    with Runner(data_layer(folder, "batch_size: 3"), shard=Shard(1, 2)) as other:
        other.layer.seek(position)
        assert other.labels(2) == [[21, 22, 23], [27, 28, 29]]


def test_rand_skip_is_the_same_on_every_device_and_settled_by_the_seed(folder):
    starts = set()
    for seed in range(12):
        found = []
        for rank in (0, 1):
            text = data_layer(folder, "batch_size: 1 rand_skip: 20")
            with Runner(text, seed=seed, shard=Shard(rank, 2)) as runner:
                found.append(runner.labels(1)[0][0])
        assert found[1] == found[0] + 1
        starts.add(found[0])
    assert len(starts) > 4
    assert max(starts) < 20


def test_random_transformations_do_not_depend_on_the_devices(folder):
    text, transform = "batch_size: {}", "crop_size: 4 mirror: true"
    with Runner(data_layer(folder, text.format(6), transform), seed=2) as alone:
        expected = [alone.forward()[0] for _ in range(12)]
    parts = []
    for rank in (0, 1):
        with Runner(data_layer(folder, text.format(3), transform), seed=2, shard=Shard(rank, 2)) as one:
            parts.append([one.forward()[0] for _ in range(12)])
    for step, whole in enumerate(expected):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in parts]), whole)


def test_the_first_data_layer_numbers_and_names_the_samples(folder):
    shard = Shard(1, 2)
    with Runner(data_layer(folder, "batch_size: 4"), shard=shard) as runner:
        assert [runner.context.first_sample(n) for n in range(3)] == [4, 12, 20]
        runner.labels(2)
        assert runner.context.describe_sample(1, 2) == f"record 14 (key '00000014') of LMDB '{folder}/db'"
    with Runner(hdf5_layer(folder, "batch_size: 4"), shard=shard) as runner:
        assert runner.context.describe_sample(6, 3) == f"row 5 of HDF5 file '{folder}/a.h5'"


def test_one_top_and_what_is_in_it(folder):
    with Runner(data_layer(folder, "batch_size: 3", "scale: 0.5 mean_value: 2"), tops=1) as runner:
        (images,) = runner.forward()
    assert images[:, 0, 0, 0].tolist() == [(n - 2) * 0.5 for n in range(3)]


def test_no_threads_are_left(folder):
    suspend_aware_seconds()  # may start the process's clock
    before = threading.active_count()
    with Runner(data_layer(folder, "batch_size: 3")) as runner:
        runner.labels(2)
        assert threading.active_count() == before + 1
        runner.layer.close()
        assert threading.active_count() == before
        with pytest.raises(AbortedError, match=r"layer 'd' \(Data\): closed"):
            runner.forward()


# -- what is wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "type: 'Data' data_param { source: 'x' }",
            ConfigError,
            r"layer 'd' \(Data\): batch_size must be given and positive",
        ),
        ("type: 'Data' data_param { batch_size: 1 }", ConfigError, r"data_param\.source must name an LMDB"),
        (
            "type: 'Data' data_param { source: 'x' batch_size: 1 }",
            DataError,
            r"layer 'd' \(Data\): database 'x' does not exist \(looked from .*\); `caffepy data mnist` and",
        ),
        (
            "type: 'Data' data_param { source: 'x' batch_size: 1 backend: LMDB }",
            DataError,
            r"layer 'd' \(Data\): LMDB 'x' does not exist",
        ),
        ("type: 'HDF5Data' hdf5_data_param { source: 'x' }", ConfigError, "batch_size must be given and positive"),
        ("type: 'HDF5Data' hdf5_data_param { batch_size: 1 }", ConfigError, "must name a list of HDF5 files"),
        (
            "type: 'HDF5Data' hdf5_data_param { source: 'x' batch_size: 1 } transform_param { scale: 2 }",
            ConfigError,
            "HDF5 data are not transformed; remove transform_param",
        ),
        ("type: 'ImageData' image_data_param { new_height: 1 }", ConfigError, "must be set together"),
    ],
)
def test_settings_that_are_refused(text, error, message):
    with pytest.raises(error, match=message):
        Runner(text)


def test_an_lmdb_is_taken_as_one_whatever_the_backend(folder):
    with Runner(f"type: 'Data' data_param {{ source: '{folder}/db' batch_size: 2 }}") as runner:
        assert runner.labels(1) == [[0, 1]]


def test_a_bad_record_surfaces_in_the_pass_that_needs_it(tmp_path):
    good = Datum(channels=1, height=2, width=2, data=b"abcd", label=1)
    write_datums(tmp_path / "db", [(record_key(n), good if n < 5 else Datum(data=b"x")) for n in range(6)])
    with Runner(data_layer(tmp_path, "batch_size: 2")) as runner:
        assert runner.labels(2) == [[1, 1], [1, 1]]
        with pytest.raises(
            DataError, match=r"layer 'd' \(Data\): LMDB '.*db': record 5 \(key '00000005'\) is a Datum of 1 byt"
        ):
            runner.forward()


def test_a_first_record_that_cannot_be_transformed(folder):
    with pytest.raises(DataError, match=r"layer 'd' \(Data\): .*record 0 .* is 6 x 8, smaller than crop_size 7"):
        Runner(data_layer(folder, "batch_size: 2", "crop_size: 7"))


# -- Input and DummyData ---------------------------------------------------------------------------------


def test_input_takes_one_shape_for_all_or_one_each():
    shapes = "shape { dim: 2 dim: 3 } shape { dim: 4 }"
    assert [b.shape for b in Runner(f"type: 'Input' input_param {{ {shapes} }}").tops] == [(2, 3), (4,)]
    assert [b.shape for b in Runner("type: 'Input' input_param { shape { dim: 5 } }").tops] == [(5,), (5,)]
    with pytest.raises(ConfigError, match="once for each of the 3 tops, or not at all; it is given 2 times"):
        Runner(f"type: 'Input' top: 'a' top: 'b' top: 'c' input_param {{ {shapes} }}")


def dummy(param, **context):
    return Runner(f"type: 'DummyData' dummy_data_param {{ {param} }}", **context)


def test_constant_tops_are_filled_once():
    runner = dummy("shape { dim: 2 dim: 3 } shape { dim: 2 } data_filler { value: 7 } data_filler { type: 'constant' }")
    data, label = runner.forward()
    assert (data == 7).all()
    assert (label == 0).all()
    runner.tops[0].data[...] = 1
    assert (runner.forward()[0] == 1).all()


def test_legacy_dimensions():
    runner = dummy("num: 2 num: 3 channels: 1 height: 4 width: 5 width: 6")
    assert [blob.shape for blob in runner.tops] == [(2, 1, 4, 5), (3, 1, 4, 6)]
    assert not runner.forward()[1].any()


def test_random_tops_change_with_the_pass_and_not_with_the_devices():
    text = "shape {{ dim: {} dim: 3 dim: 2 dim: 2 }} data_filler {{ type: 'gaussian' }}"
    alone = dummy(text.format(4), seed=5)
    whole = [alone.forward() for _ in range(3)]
    assert (whole[0][0] != whole[1][0]).all()
    assert (whole[0][0] != whole[0][1]).all()
    for rank in (0, 1):
        one = dummy(text.format(2), seed=5, shard=Shard(rank, 2))
        for step in range(3):
            for top, found in enumerate(one.forward()):
                np.testing.assert_array_equal(found, whole[step][top][2 * rank : 2 * rank + 2])


def test_random_tops_of_whole_tests_are_those_of_one_device():
    """Of three batches of a test the first device takes two."""
    param = "shape { dim: 2 dim: 3 } data_filler { type: 'gaussian' }"
    alone = dummy(param, seed=5, phase=TEST, test_iter=3)
    whole = [alone.forward()[0].copy() for _ in range(6)]
    for rank, batches in ((0, (0, 2, 3, 5)), (1, (1, 4))):
        one = dummy(param, seed=5, phase=TEST, test_iter=3, shard=Shard(rank, 2))
        for batch in batches:
            np.testing.assert_array_equal(one.forward()[0], whole[batch])


@pytest.mark.parametrize(
    ("param", "error", "message"),
    [
        (
            "shape { dim: 1 } " + "data_filler { } " * 3,
            ConfigError,
            "data_filler must be given once or once for each of the 2",
        ),
        ("", ConfigError, r"dummy_data_param\.shape must be given once .* it is given 0 times"),
        ("num: 1 channels: 1 height: 1", ConfigError, r"dummy_data_param\.width must be given once .* given 0 times"),
        ("num: 1 shape { dim: 1 }", ConfigError, "has both shape and num, channels, height, width; keep shape"),
        (
            "shape { dim: 99999 dim: 99999 }",
            ShapeError,
            r"layer 'd' \(DummyData\): shape 99999 99999 .* is not possible",
        ),
    ],
)
def test_dummy_settings_that_are_refused(param, error, message):
    with pytest.raises(error, match=message):
        dummy(param)


def test_another_number_of_tops_than_the_source_has_is_refused(folder):
    param = LayerParameter(name="d", type="Data", top=["x", "y", "z"])
    param.data_param.source, param.data_param.batch_size = f"{folder}/db", 2
    layer = layer_class("Data")(param, LayerContext(MetaBackend()))
    with pytest.raises(ConfigError, match=r"layer 'd' \(Data\): has 3 tops, but .* 2 parts"):
        layer.setup([], [Blob(layer.backend) for _ in param.top])


@pytest.mark.parametrize(
    ("kind", "tool"), [("Data", "caffepy convert_imageset"), ("AnnotatedData", "caffepy convert_annoset")]
)
@pytest.mark.parametrize("backend", ["", " backend: LMDB", " backend: LEVELDB"])
def test_a_database_that_is_not_there_names_what_makes_one(kind, tool, backend):
    """`resolve` may hand a path on that leads nowhere."""
    with pytest.raises(DataError, match=rf"layer 'd' \({kind}\): .*'nowhere' does not exist .*`{tool}`"):
        Runner(f"type: '{kind}' data_param {{ source: 'nowhere' batch_size: 2{backend} }}")

"""How data layers are fed: ahead of their passes, as bytes or as floats, from one ring."""

import threading
import time

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import create_backend
from caffepy.backend.types import ImageSlot
from caffepy.data.prefetch import Prefetcher
from caffepy.data.sharding import Shard
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import AbortedError, RunError
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, BlobProto, BlobShape, Datum, LayerParameter
from caffepy.layers.blob import Blob
from caffepy.layers.input.prefetching import blocks_needed, passes_per_block
from caffepy.layers.layer import LayerContext, layer_class

SHAPES = [(1, 6, 8), (2, 5, 5), (3, 6, 8), (7, 4, 9)]
RECORDS = 11


def datum(image, label, kind):
    shape = dict(zip(("channels", "height", "width"), image.shape, strict=True))
    values = {"float_data": image.ravel().tolist()} if kind == "floats" else {"data": image.tobytes()}
    return Datum(**shape, **values, label=label)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For each shape an LMDB of bytes, one of floats and a mean image; and one with a float record among bytes."""
    path = tmp_path_factory.mktemp("feeding")
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        images = rng.integers(0, 256, (RECORDS, *shape), dtype=np.uint8)
        for kind in ("bytes", "floats"):
            write_datums(path / f"{kind}{shape[0]}", pairs(images, [kind] * RECORDS))
        mean = BlobProto(shape=BlobShape(dim=shape), data=rng.random(shape).ravel() * 255)
        (path / f"mean{shape[0]}").write_bytes(mean.SerializeToString())
    write_datums(path / "mixed", pairs(images, ["bytes"] * 7 + ["floats"] + ["bytes"] * 3))
    sizes = [(3, 4 + n % 3, 5) for n in range(RECORDS)]
    write_datums(path / "sizes", pairs([np.full(s, n, np.uint8) for n, s in enumerate(sizes)], ["bytes"] * RECORDS))
    return path


def pairs(images, kinds):
    return [(record_key(n), datum(image, n, kind)) for n, (image, kind) in enumerate(zip(images, kinds, strict=True))]


def make(source, batch, transform="", phase=TRAIN, tops=2, **context):
    text = f"type: 'Data' data_param {{ source: '{source}' backend: LMDB batch_size: {batch} prefetch: 2 }}"
    param = text_format.Parse(f"name: 'd' {text} transform_param {{ {transform} }}", LayerParameter())
    param.top.extend(["data", "label"][:tops])
    backend = create_backend(threads=1)
    layer = layer_class("Data")(param, LayerContext(backend, phase, **context))
    blobs = [Blob(backend, name=name) for name in param.top]
    layer.setup([], blobs)
    return layer, blobs


def run(layer, blobs, passes):
    """What the tops hold after each pass, as a net runs them."""
    found = []
    for _ in range(passes):
        number = layer.context.passes.number
        layer.prefetch_to_device(number)
        layer.forward([], blobs)
        layer.release_batch(number)
        layer.context.passes.number += 1
        found.append([blob.host_data() for blob in blobs])
    return found


def alone(source, batch, passes, **context):
    """What a layer of its own gives."""
    layer, blobs = make(source, batch, **context)
    found = run(layer, blobs, passes)
    layer.close()
    return found


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@settings(max_examples=60)
@given(
    shape=st.sampled_from(SHAPES),
    crop=st.sampled_from([0, 1, 3, 4]),
    mirror=st.booleans(),
    scale=st.sampled_from([1, 0.00390625, 0.1]),
    mean=st.sampled_from(["", "one", "each", "file"]),
    phase=st.sampled_from([TRAIN, TEST]),
    batch=st.sampled_from([1, 4]),
    tops=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**63),
)
def test_bytes_and_floats_give_the_same_bits(folder, shape, crop, mirror, scale, mean, phase, batch, tops, seed):
    text = f"crop_size: {crop} mirror: {str(mirror).lower()} scale: {scale} "
    if mean == "file":
        text += f"mean_file: '{folder}/mean{shape[0]}'"
    elif mean:
        text += " ".join(f"mean_value: {10.3 * n}" for n in range(1, 2 if mean == "one" else shape[0] + 1))
    results = []
    for kind in ("bytes", "floats"):
        layer, blobs = make(folder / f"{kind}{shape[0]}", batch, text, phase, tops, seed=seed, test_iter=3)
        results.append(run(layer, blobs, 5))
        layer.close()
    assert_equal(*results)


def test_feeding_ahead_changes_nothing(folder):
    layer, blobs = make(folder / "bytes3", 2, "crop_size: 3 mirror: true")
    expected = run(layer, blobs, 12)
    layer.close()
    layer, blobs = make(folder / "bytes3", 2, "crop_size: 3 mirror: true", iter_size=3)
    found = []
    for first in range(0, 12, 3):
        for number in range(first, first + 3):
            layer.prefetch_to_device(number)
            layer.prefetch_to_device(number)
        for number in range(first, first + 3):
            layer.context.passes.number = number
            layer.forward([], blobs)
            found.append([blob.host_data() for blob in blobs])
            layer.release_batch(number)
    assert_equal(found, expected)
    layer.close()


def test_a_batch_that_is_filled_again_at_once_is_not_taken_for_the_last_one(folder, monkeypatch):
    """The reading thread may give it the very number that comes next."""
    expected = alone(folder / "floats3", 2, 2)
    monkeypatch.setattr(Prefetcher, "release", lambda self, batch: setattr(batch, "number", 1))
    assert_equal(alone(folder / "floats3", 2, 2), expected)


def test_a_layer_without_a_net_feeds_itself(folder):
    layer, blobs = make(folder / "bytes3", 2)
    expected = run(layer, blobs, 4)
    layer.close()
    layer, blobs = make(folder / "bytes3", 2)
    for step in expected:
        layer.forward([], blobs)
        layer.context.passes.number += 1
        assert_equal([[blob.host_data() for blob in blobs]], [step])
    layer.close()


def test_where_bytes_end_floats_go_on_and_captured_work_is_outdated(folder):
    expected = alone(folder / "floats7", 3, 8)
    layer, blobs = make(folder / "mixed", 3)
    found, outdated = [], []
    for number in range(8):
        layer.prefetch_to_device(number)
        outdated.append(layer.transfer_changed())
        layer.forward([], blobs)
        assert not layer.transfer_changed()
        layer.release_batch(number)
        layer.context.passes.number += 1
        found.append([blob.host_data() for blob in blobs])
    assert_equal(found, expected)
    assert [number for number, is_so in enumerate(outdated) if is_so] == [2]
    layer.close()


def test_passes_fed_before_a_change_are_taken_as_they_came(folder):
    expected = alone(folder / "floats7", 3, 4)
    layer, blobs = make(folder / "mixed", 3, iter_size=4)
    for number in range(4):
        layer.prefetch_to_device(number)
    for number in range(4):
        layer.context.passes.number = number
        layer.forward([], blobs)
        layer.release_batch(number)
        assert_equal([[blob.host_data() for blob in blobs]], expected[number : number + 1])
    layer.close()


def test_batches_of_other_shapes_reshape_the_tops_before_the_pass(folder):
    layer, blobs = make(folder / "sizes", 1)
    shapes = []
    for number in range(9):
        layer.prefetch_to_device(number)
        shapes.append(blobs[0].shape)
        layer.forward([], blobs)
        assert (blobs[0].host_data() == number).all()
        layer.release_batch(number)
        layer.context.passes.number += 1
    assert shapes == [(1, 3, 4 + n % 3, 5) for n in range(9)]
    layer.close()


@pytest.mark.parametrize("passes", [1, 5, 64, 70])
def test_training_goes_on_anywhere_within_a_block(folder, passes):
    text = "crop_size: 3 mirror: true"
    layer, blobs = make(folder / "bytes3", 2, text)
    run(layer, blobs, passes)
    position = layer.position()
    expected = run(layer, blobs, 3)
    layer.seek(position)
    layer.context.passes.number = passes
    assert_equal(run(layer, blobs, 3), expected)
    layer.close()
    layer, blobs = make(folder / "bytes3", 2, text)
    layer.seek(position)
    layer.context.passes.number = passes
    assert_equal(run(layer, blobs, 3), expected)
    layer.close()


def test_passes_of_several_devices_come_in_one_block(folder):
    expected = [labels.tolist() for _, labels in alone(folder / "bytes1", 4, 6)]
    parts = [[labels.tolist() for _, labels in alone(folder / "bytes1", 2, 6, shard=Shard(r, 2))] for r in (0, 1)]
    assert [one + other for one, other in zip(*parts, strict=True)] == expected


def feed_all(layer, fed=None):
    """Feed passes none of which runs, until the device takes no more."""
    for number in range(10**6):
        layer.prefetch_to_device(number)
        if fed is not None:
            fed.append(number)


def test_waits_for_a_device_end_when_the_layer_is_closed(folder):
    layer, _ = make(folder / "bytes3", 2)
    layer.prefetch_to_device(0)
    raised, fed, before = [], [], -1

    def feed():
        try:
            feed_all(layer, fed)
        except AbortedError as error:
            raised.append(str(error))

    feeder = threading.Thread(target=feed)
    feeder.start()
    while len(fed) > before:  # it waits where none was fed for a while
        before = len(fed)
        time.sleep(0.5)
    layer.close()
    feeder.join(300)
    assert len(raised) == 1 and raised[0].startswith("layer 'd' (Data): closed")


def test_a_device_that_takes_nothing_is_given_up(folder):
    layer, _ = make(folder / "bytes3", 2)
    layer.prefetch_to_device(0)
    layer.context.timeout = 0.05
    with pytest.raises(RunError, match=r"layer 'd' \(Data\): cpu has taken no input for \d+ s"):
        feed_all(layer)
    layer.close()


def test_a_layer_waits_for_its_data_as_long_as_it_is_told(folder):
    layer, _ = make(folder / "bytes3", 2, timeout=12.5)
    layer.prefetch_to_device(0)
    assert layer._prefetcher._timeout == 12.5
    layer.close()


def test_waiting_for_data_is_measured(folder):
    layer, blobs = make(folder / "bytes3", 2)
    assert sum(layer.waited().values()) == 0
    run(layer, blobs, 1)
    before = layer.waited()
    assert before["reading"] > 0
    assert before["decoding"] == 0, "the images are not encoded"
    layer.seek(0)
    assert layer.waited() == before
    layer.close()


@pytest.mark.parametrize(
    ("shape", "passes"),
    [((64, 1, 28, 28), 32), ((256, 3, 227, 227), 1), ((1, 1, 1, 1), 64), ((100, 3, 32, 32), 4)],
)
def test_small_batches_come_together(shape, passes):
    assert passes_per_block(ImageSlot(*shape)) == passes


@pytest.mark.parametrize(("ahead", "block", "blocks"), [(1, 1, 4), (2, 1, 4), (3, 1, 8), (8, 1, 16), (8, 32, 4)])
def test_a_ring_holds_two_iterations(ahead, block, blocks):
    assert blocks_needed(ahead, block) == blocks
    assert blocks * block >= 2 * ahead


def test_the_prototxt_says_how_many_threads_read(folder):
    layer, _ = make(folder / "bytes3", 2)
    assert [layer.threads(0), layer.threads(5)] == [1, 5]
    layer.close()

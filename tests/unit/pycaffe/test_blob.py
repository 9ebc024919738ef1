"""`caffe.Blob` and the host arrays behind it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from caffepy.backend import create_backend
from caffepy.errors import ShapeError
from caffepy.layers import blob as core
from caffepy.pycaffe.blob import Blob, BlobVec
from caffepy.pycaffe.device import Device
from caffepy.pycaffe.errors import ArgumentError


@pytest.fixture
def device() -> Device:
    return Device(create_backend(threads=1))


def make(device: Device, *shape: int) -> Blob:
    return Blob(core.Blob(device.backend, shape, "b"), device)


def logical(blob: Blob) -> np.ndarray:
    return np.asarray(blob.blob.data)


def test_sizes(device: Device) -> None:
    blob = make(device, 2, 3, 4)
    assert (blob.num, blob.channels, blob.height, blob.width, blob.count, blob.shape) == (2, 3, 4, 1, 24, (2, 3, 4))
    assert repr(blob) == "<caffe.Blob 'b' of shape (2, 3, 4)>"
    with pytest.raises(AttributeError, match="a blob with 5 axes has no num"):
        _ = make(device, 1, 1, 1, 1, 1).num


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4, 5), (2, 3, 1, 1), (2, 2, 2, 2, 2), (0, 2, 2, 2)])
def test_arrays_are_contiguous_and_written_through(device: Device, shape: tuple[int, ...]) -> None:
    blob = make(device, *shape)
    for part in ("data", "diff"):
        array = getattr(blob, part)
        assert array.shape == shape and array.dtype == np.float32 and array.flags.c_contiguous
        array.reshape(-1)[...] = np.arange(array.size)
        with device.computing():
            numbers = getattr(blob.blob, part)
            np.testing.assert_array_equal(numbers, np.arange(array.size).reshape(shape))
            numbers += 1
        np.testing.assert_array_equal(array, np.arange(array.size).reshape(shape) + 1)


def test_what_is_written_without_keeping_the_array_arrives(device: Device) -> None:
    blob = make(device, 2, 3, 4, 5)
    blob.data[...] = 3
    blob.data[1, 2] += 1
    with device.computing():
        assert (logical(blob)[1, 2] == 4).all() and (logical(blob)[0] == 3).all()


def test_a_kept_view_is_written_through_at_any_time(device: Device) -> None:
    blob = make(device, 2, 3, 4, 5)
    row = blob.data[1]
    for number in (1, 2):
        row[...] = number
        with device.computing():
            assert (logical(blob)[1] == number).all() and not logical(blob)[0].any()


def test_arrays_that_nobody_holds_are_let_go(device: Device) -> None:
    blob = make(device, 2, 3, 4, 5)
    kept = blob.data
    host = weakref.ref(kept.base)
    with device.computing():
        assert host() is not None
    del kept
    assert host() is None
    with device.computing():
        assert not device.arrays._copies


def test_blobs_of_one_memory_are_one(device: Device) -> None:
    one, two = make(device, 2, 3, 4, 5), make(device, 2, 3, 4, 5)
    two.blob.bind(data=one.blob.data)
    read = two.data
    one.data[...] = 5
    assert (read == 5).all()
    with device.computing():
        assert (logical(two) == 5).all()


def test_the_later_of_two_writes_to_one_memory_holds(device: Device) -> None:
    flat, image, other = make(device, 2, 60), make(device, 2, 3, 4, 5), make(device, 2, 3, 2, 10)
    for blob in (image, other):
        blob.blob.bind(data=device.backend.view(device.backend.flat(flat.blob.data), blob.blob.shape))
    kept = image.data  # both are copies, since images are channels last
    other.data[...] = 1
    image.data[...] = 2
    with device.computing():
        assert (logical(flat) == 2).all()
    assert (kept == 2).all() and (other.data == 2).all()


def test_an_array_that_was_only_read_overwrites_nothing(device: Device) -> None:
    """Two shapes over one memory are two host arrays, and what was not changed is not copied back."""
    flat = make(device, 2, 60)
    image = make(device, 2, 3, 4, 5)
    image.blob.bind(data=device.backend.view(device.backend.flat(flat.blob.data), (2, 3, 4, 5)))
    seen = image.data
    flat.data[...] = 2
    with device.computing():
        assert (logical(image) == 2).all()
    assert (seen == 2).all()


def test_nan_is_a_number_like_others(device: Device) -> None:
    blob = make(device, 1, 2, 2, 2)
    held = blob.data
    held[...] = np.nan
    with device.computing():
        assert np.isnan(logical(blob)).all()
        blob.blob.data[...] = 1
    assert (held == 1).all()
    with device.computing():
        blob.blob.data[...] = 2
    assert (held == 2).all()


def test_reshape_keeps_the_numbers(device: Device) -> None:
    blob = make(device, 2, 3)
    blob.data[...] = np.arange(6).reshape(2, 3)
    blob.reshape(1, 2, 3, 1)
    np.testing.assert_array_equal(blob.data.reshape(-1), np.arange(6))
    blob.reshape(2, 2)
    np.testing.assert_array_equal(blob.data, [[0, 1], [2, 3]])
    blob.reshape(5)
    np.testing.assert_array_equal(blob.data, [0, 1, 2, 3, 0])
    blob.reshape()
    assert blob.shape == () and blob.count == 1
    with pytest.raises(ShapeError, match="shape -1 .* is not possible"):
        blob.reshape(-1)
    blob.reshape(4 / 2, 3)
    assert blob.shape == (2, 3)
    with pytest.raises(ArgumentError, match=r"reshape\(1\.5\): give a whole number"):
        blob.reshape(1.5, 3)
    assert blob.shape == (2, 3)


def test_a_function_of_the_programs_sees_and_writes_within_a_pass(device: Device) -> None:
    blob = make(device, 1, 2, 2, 2)
    held = blob.data
    with device.computing():
        blob.blob.data[...] = 4

        def function(factor: float) -> float:
            held[...] *= factor
            return float(held.sum())

        assert device.call(function, 2.0) == 64
        assert (logical(blob) == 8).all()


def test_a_vector_makes_blobs() -> None:
    blobs = BlobVec()
    blobs.add_blob(2, 3)
    blobs.add_blob()
    assert [blob.shape for blob in blobs] == [(2, 3), ()] and not blobs[0].data.any()
    assert repr(blobs) == "<caffe.BlobVec [<caffe.Blob '' of shape (2, 3)>, <caffe.Blob '' of shape ()>]>"


def test_numbers_go_to_the_device_directly_where_no_host_array_is_held(device: Device) -> None:
    blob = make(device, 2, 3, 4, 5)
    numbers = np.arange(120.0).reshape(blob.shape)
    with device.active():
        assert device.arrays.write(blob.blob.data, numbers)
        np.testing.assert_array_equal(logical(blob), numbers)
        held = blob.data
        assert held.flags.c_contiguous != logical(blob).flags.c_contiguous  # so there is a copy
        assert not device.arrays.write(blob.blob.data, -numbers)
        del held
        device.arrays.upload()
        assert device.arrays.write(blob.blob.data, -numbers)
        assert not device.arrays.write(blob.blob.data, numbers.astype(str))
    np.testing.assert_array_equal(blob.data, -numbers)

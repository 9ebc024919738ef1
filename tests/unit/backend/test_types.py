import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_slots import random_slot

from caffepy.backend import create_backend
from caffepy.backend.cpu.memory import image_rows
from caffepy.backend.interface import InputPrimitives
from caffepy.backend.types import SLOT_ALIGNMENT, HostRing, ImageSlot


@given(count=st.integers(1, 300), channels=st.integers(1, 7), height=st.integers(1, 40), width=st.integers(1, 40))
def test_parts_of_a_slot_do_not_overlap(count, channels, height, width):
    slot = ImageSlot(count, channels, height, width)
    memory = np.zeros(slot.size, np.uint8)
    labels, places, pixels = slot.parts(memory)
    labels[...], places[...], pixels[...] = 1.5, 7, 9
    assert (labels == 1.5).all()
    assert (places == 7).all()
    assert pixels.shape == (count, channels, height, width)
    assert int((memory == 9).sum()) == pixels.size
    assert [at % SLOT_ALIGNMENT for at in (slot.crops_at, slot.pixels_at, slot.size)] == [0, 0, 0]


@pytest.fixture(scope="module")
def compiled():
    """The kernel makes the images, however few they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_rows, "should_compile", lambda items, compiling: True)
        yield


@pytest.mark.usefixtures("compiled")
@settings(max_examples=80)
@given(
    shape=st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 7]), st.integers(1, 9), st.integers(1, 33)),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    whole_mean=st.booleans(),
    mirror=st.booleans(),
    scale=st.sampled_from([1.0, 1 / 256, 0.1]),
    labelled=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_images_are_those_of_the_plain_formula(shape, more, whole_mean, mirror, scale, labelled, threads):
    backend = create_backend(threads=threads)
    slot = ImageSlot(*shape)
    whole = (slot.height + more[0], slot.width + more[1])
    mean = np.random.default_rng(1).random((slot.channels, *(whole if whole_mean else (1, 1))), np.float32) * 200
    ring = backend.input_ring(slot.size, 1, 4)
    ring.put(5, 1, [(0, random_slot(slot, whole, mirror))], lambda: None)
    results = []
    for take in (type(backend).take_images, InputPrimitives.take_images):
        images, labels = backend.zeros(shape), backend.zeros((slot.count,)) if labelled else None
        take(backend, ring, (5, 0), slot, mean, scale, images, labels)
        results.append((images, labels))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    if labelled:
        np.testing.assert_array_equal(results[0][1], results[1][1])
        assert results[0][1].any()


def test_a_ring_gives_memory_back_when_its_last_pass_is_consumed():
    ring, back = HostRing(256, 4, 2), []
    ring.put(2, 2, [(0, np.arange(512, dtype=np.uint8))], lambda: back.append(2))
    ring.put(4, 4, [(0, np.zeros(1024, np.uint8))], lambda: back.append(4))
    assert not ring.ready()
    assert ring.bytes_of(3, 1, 2).tolist() == [1, 2]
    assert ring.bytes_of(2, 0, 2).tolist() == [0, 1]
    for number, expected in [(2, []), (3, [2]), (4, [2]), (6, [2]), (7, [2, 4])]:
        ring.consumed(number)
        assert back == expected
    assert ring.ready()


def test_a_ring_that_starts_again_gives_everything_back():
    ring, back = HostRing(256, 1, 4), []
    for number in range(3):
        ring.put(number, 1, [(0, np.zeros(256, np.uint8))], lambda number=number: back.append(number))
    ring.restart()
    assert back == [0, 1, 2]
    ring.close()
    ring.close()
    assert back == [0, 1, 2]

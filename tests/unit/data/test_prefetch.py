import logging
import re
import threading
import time
from unittest.mock import ANY

import numpy as np
import pytest

from caffepy.backend.types import ImageSlot, memory_order
from caffepy.data.prefetch import Batch, Prefetcher, awaited_data
from caffepy.errors import AbortedError, DataError, RunError

SLOT = ImageSlot(4, 1, 2, 3)


class Numbers:
    """A loader of sample numbers; `gate` can hold it up, `fail_at` makes it fail, bytes end at `floats_at`."""

    def __init__(self, fail_at=None, error=None, gate=None, floats_at=None):
        self.reading = "record 0 of nothing"
        self.loaded = 0
        self.closed = False
        self.floats_at = floats_at
        self.fail_at, self.error, self.gate = fail_at, error, gate

    def load(self, first, count, batch):
        self.reading = f"record {first} of the numbers"
        if self.gate is not None:
            self.gate.wait(300)
        if first == self.fail_at:
            raise self.error
        batch.array(0, (count,))[...] = np.arange(first, first + count)
        self.loaded += 1

    def load_bytes(self, firsts, count, slot, block):
        for number, first in enumerate(firsts):
            if self.floats_at is not None and first >= self.floats_at:
                return number
            labels, _, pixels = slot.parts(block[number * slot.size : (number + 1) * slot.size])
            labels[:] = np.arange(first, first + count)
            pixels[...] = first
        return len(firsts)

    def close(self):
        self.closed = True


def prefetcher(loader, **settings):
    return Prefetcher([loader], lambda number: 10 * number, 4, 1, where="layer 'd'", **settings)


def test_batches_come_in_order_from_the_pass_asked_for():
    subject = prefetcher(Numbers())
    for number in range(3, 30):
        batch = subject.get(number)
        assert batch.arrays[0].tolist() == [10 * number + i for i in range(4)]
        subject.release(batch)
    assert subject.close()


def test_no_thread_starts_before_the_first_batch_and_none_is_left():
    before = threading.active_count()
    subject = prefetcher(Numbers())
    assert threading.active_count() == before
    subject.get(0)
    assert threading.active_count() == before + 1
    assert subject.close()
    assert subject.close()
    assert threading.active_count() == before


def test_it_reads_ahead_as_far_as_the_depth():
    loader = Numbers()
    subject = prefetcher(loader, depth=3)
    subject.get(0)
    deadline = time.monotonic() + 300
    while loader.loaded < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert loader.loaded == 4
    subject.close()


def test_released_arrays_are_used_again():
    subject = prefetcher(Numbers(), depth=1)
    seen = set()
    for number in range(20):
        batch = subject.get(number)
        seen.add(id(batch))
        subject.release(batch)
    assert len(seen) <= 4
    subject.close()


def test_a_user_error_arrives_as_it_is_after_the_batches_before_it():
    error = DataError("record 20 is bad")
    subject = prefetcher(Numbers(20, error))
    subject.get(0)
    subject.get(1)
    with pytest.raises(DataError, match="^record 20 is bad$"):
        subject.get(2)
    with pytest.raises(DataError, match="^record 20 is bad$"):
        subject.get(2)
    subject.close()


def test_any_other_error_names_what_was_read():
    subject = prefetcher(Numbers(0, ZeroDivisionError("why")))
    with pytest.raises(RunError, match=r"^layer 'd': reading record 0 of the numbers failed: ZeroDivisionError: why$"):
        subject.get(0)
    subject.close()


def test_a_stall_is_reported_and_then_ends_the_wait(caplog):
    gate = threading.Event()
    subject = prefetcher(Numbers(gate=gate), warn_after=0.05, timeout=0.3)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            RunError, match=r"layer 'd': no data for \d+ s while reading record 20 of the numbers; is the disk"
        ),
    ):
        subject.get(2)
    assert re.search(r"layer 'd': waiting for data for \d+ s, reading record 20 of the numbers", caplog.text)
    assert not subject.close(timeout=0.05)
    assert "it is reading record 20 of the numbers" in caplog.text
    gate.set()
    assert subject.close()


def test_others_see_what_a_thread_waits_for():
    gate = threading.Event()
    subject = prefetcher(Numbers(gate=gate))
    waiter = threading.Thread(target=subject.get, args=(2,))
    waiter.start()
    end = time.monotonic() + 300
    while awaited_data(waiter.ident) != ("record 20 of the numbers", ANY) and time.monotonic() < end:
        time.sleep(0.01)
    text, since = awaited_data(waiter.ident)
    assert text == "record 20 of the numbers" and since <= time.monotonic()
    gate.set()
    waiter.join(300)
    assert awaited_data(waiter.ident) is None
    assert subject.close()


def test_closing_releases_who_waits():
    gate = threading.Event()
    subject = prefetcher(Numbers(gate=gate))
    raised = []

    def wait():
        try:
            subject.get(0)
        except AbortedError as error:
            raised.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    subject.close(timeout=0.01)
    waiter.join(300)
    assert raised == ["layer 'd': closed while waiting for data"]
    gate.set()
    assert subject.close()


def test_bytes_come_in_blocks_that_end_at_multiples():
    """The first ones are short, so that the first pass does not wait for a whole block."""
    subject = prefetcher(Numbers(), slot=SLOT, block=16)
    number = 3
    for passes in (1, 8, 4):
        batch = subject.get(number)
        assert batch.passes == passes
        for i in range(passes):
            labels, _, pixels = SLOT.parts(batch.bytes[i * SLOT.size : (i + 1) * SLOT.size])
            assert labels.tolist() == [10 * (number + i) + k for k in range(4)]
            assert (pixels == 10 * (number + i)).all()
        number += passes
        subject.release(batch)
    assert subject.close()


def test_where_bytes_end_floats_go_on():
    loader = Numbers(floats_at=60)
    subject = prefetcher(loader, slot=SLOT, block=4)
    assert [subject.get(number).passes for number in (0, 1, 4)] == [1, 3, 2]
    for number in (6, 7):
        batch = subject.get(number)
        assert (batch.slot, batch.passes) == (None, 1)
        assert batch.arrays[0].tolist() == [10 * number + i for i in range(4)]
    assert subject.close()
    assert loader.closed


def test_several_loaders_fill_batches_at_the_same_time_and_in_order():
    barrier = threading.Barrier(3)

    class Together(Numbers):
        """Fills a batch only while two others do."""

        def load(self, first, count, batch):
            super().load(first, count, batch)
            barrier.wait(300)
            time.sleep(0.01 * (first // 10 % 3))

    loaders = [Together() for _ in range(3)]
    subject = Prefetcher(loaders, lambda number: 10 * number, 4, 1, depth=2)
    for number in range(2, 14):
        batch = subject.get(number)
        assert batch.number == number
        assert batch.arrays[0].tolist() == [10 * number + i for i in range(4)]
        subject.release(batch)
    barrier.abort()
    assert subject.close()
    assert all(loader.closed for loader in loaders)


def test_a_loader_goes_on_while_the_batches_of_others_are_ready():
    """Loaders that finish together do not wait together until most of their batches are taken."""
    loaded = threading.Semaphore(0)

    class Counted(Numbers):
        def load(self, first, count, batch):
            super().load(first, count, batch)
            loaded.release()

    subject = Prefetcher([Counted() for _ in range(4)], lambda number: 10 * number, 4, 1, depth=2)
    subject.get(0)
    for _ in range(6):  # the batch that was taken, and five that are ready
        assert loaded.acquire(timeout=300)
    assert not loaded.acquire(timeout=0.05)
    subject.get(1)
    assert loaded.acquire(timeout=300)
    assert not loaded.acquire(timeout=0.05)
    assert subject.close()


def test_an_error_waits_for_the_batches_before_it():
    gate = threading.Event()

    class SlowThenBad(Numbers):
        """Waits before the first batch and fails at the second; each loader may get either."""

        def load(self, first, count, batch):
            if first == 0:
                gate.wait(300)
            super().load(first, count, batch)

    loaders = [SlowThenBad(10, DataError("record 10 is bad")) for _ in range(2)]
    subject = Prefetcher(loaders, lambda number: 10 * number, 4, 1)
    threading.Timer(0.2, gate.set).start()
    assert subject.get(0).number == 0
    with pytest.raises(DataError, match="^record 10 is bad$"):
        subject.get(1)
    assert subject.close()


def test_later_batches_have_the_rows_of_earlier_ones():
    class Rows(Numbers):
        """A loader of arrays with 1, 20, 1 … rows."""

        def load(self, first, count, batch):
            batch.array(0, (batch.padded_rows(20 if first == 10 else 1),))[...] = first

    for least, expected in ((0, [1, 20, 1, 1]), (16, [16, 32, 32, 32])):
        subject = prefetcher(Rows(), least_rows=least)
        assert [subject.get(number).arrays[0].size for number in range(4)] == expected
        assert subject.close()


def test_waiting_is_measured():
    gate = threading.Event()
    subject = prefetcher(Numbers(gate=gate))
    threading.Timer(0.1, gate.set).start()
    subject.get(0)
    assert 0.05 < subject.waited < 20
    assert subject.close()


def test_memory_comes_from_where_it_is_said():
    asked = []

    def memory(size):
        asked.append(size)
        return np.empty(size, np.uint8)

    batch = Batch(2, memory)
    batch.array(0, (2, 3, 4, 5))
    batch.array(1, (2,))
    block = batch.reserve(SLOT, 3)
    assert batch.reserve(SLOT, 3) is block
    assert asked == [480, 8, 3 * SLOT.size]


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_arrays_keep_their_memory_until_the_shape_changes(shape):
    batch = Batch(1)
    array = batch.array(0, shape)
    assert array.shape == shape
    assert memory_order(array).flags.c_contiguous and array.flags.c_contiguous is (len(shape) < 4)
    assert batch.array(0, shape) is array
    assert batch.array(0, (3, *shape[1:])).shape == (3, *shape[1:])

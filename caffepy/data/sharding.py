"""Data sharding: the global samples that a device takes in each forward pass.

Maps (rank, pass) to global sample numbers, for data layers, dropout and snapshots.

Training: pass p takes the samples [pG, (p+1)G) over all devices, where G is the global batch. Each device takes a
contiguous part, in rank order. Therefore the same G trains on the same samples for any number of devices.

Testing: batches are not divided. Batch j of 0 .. test_iter-1 goes to device j mod D, so each sample is scored once and
the mean over batches does not depend on D.

A net with a layer that depends on earlier passes is `undivided`: all devices train on the same samples, and the root
scores all batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shard:
    """A device's rank among all devices that train together.

    Args:
        rank: this device's global rank, from 0 (NVIDIA Caffe's universal rank).
        world_size: number of devices over all MPI ranks.
        devices_per_rank: devices of each MPI rank.
        per_device_batch: `batch_size` in a prototxt is per device (BVLC's meaning) instead of per MPI rank.
        overfit_batches: training takes the first so many batches over and over; 0: all samples.
        training: identifies the training run within this process, equal for all of its devices; 0: this process has no
            other devices in the run.
        undivided: the net has a layer that depends on earlier passes. Each device trains on all samples; the root alone
            scores a test.
    """

    rank: int = 0
    world_size: int = 1
    devices_per_rank: int = 1
    per_device_batch: bool = False
    overfit_batches: int = 0
    training: int = field(default=0, compare=False)
    undivided: bool = False

    @property
    def parts(self) -> int:
        """Number of parts into which the devices divide the training samples."""
        return 1 if self.undivided else self.world_size

    @property
    def part(self) -> int:
        """The part that this device takes."""
        return 0 if self.undivided else self.rank

    def device_batch(self, batch_size: int) -> int:
        """Return the size of one device's training batch.

        ceil(batch_size / devices_per_rank), or `batch_size` if it is per device or the samples are not divided.
        """
        whole = self.per_device_batch or self.undivided
        return batch_size if whole else -(-batch_size // self.devices_per_rank)

    def global_batch(self, batch_size: int) -> int:
        """Return the samples that all devices take in one pass."""
        return self.device_batch(batch_size) * self.parts

    def test_batches(self, test_iter: int) -> range:
        """Return the batches of a test that this device scores."""
        if self.undivided:
            return range(test_iter if self.rank == 0 else 0)
        return range(self.rank, test_iter, self.world_size)


class TrainSchedule:
    """Maps the passes of one device to its training samples.

    Args:
        shard: the device's shard.
        batch_size: the prototxt's `batch_size`.
        start: the global sample number at which pass `first_pass` begins (from a snapshot).
        first_pass: the pass that `start` belongs to.
    """

    def __init__(self, shard: Shard, batch_size: int, start: int = 0, first_pass: int = 0) -> None:
        self.count = shard.device_batch(batch_size)
        self._global = shard.global_batch(batch_size)
        self._offset = shard.part * self.count
        self._batches = shard.overfit_batches
        self._start = start
        self._first_pass = first_pass

    def first_sample(self, number: int) -> int:
        """Return the global number of this device's first sample in pass `number`."""
        first = self.position(number)
        if self._batches:
            first = first // self._global % self._batches * self._global
        return first + self._offset

    def position(self, number: int) -> int:
        """Return the global sample number at which pass `number` begins; snapshots store it."""
        return self._start + (number - self._first_pass) * self._global


class TestSchedule:
    """Maps the passes of one device to its test samples.

    Args:
        shard: the device's shard.
        batch_size: the prototxt's `batch_size`; test batches are not divided.
        test_iter: batches per test.
        start: the global sample number at which the device's pass `first_pass` begins a test.
        first_pass: the pass that `start` belongs to.
    """

    __test__ = False  # keeps pytest from collecting this class

    def __init__(self, shard: Shard, batch_size: int, test_iter: int, start: int = 0, first_pass: int = 0) -> None:
        self.count = batch_size
        self._batches = shard.test_batches(test_iter)
        self._test_iter = test_iter
        self._start = start
        self._first_pass = first_pass

    @property
    def passes_per_test(self) -> int:
        """Batches of one test that this device scores; 0 if it gets none."""
        return len(self._batches)

    def first_sample(self, number: int) -> int:
        """Return the global number of this device's first sample in its pass `number`."""
        test, batch = divmod(number - self._first_pass, self.passes_per_test)
        return self._start + (test * self._test_iter + self._batches[batch]) * self.count

    def position(self, number: int) -> int:
        """Return the global sample number at which the test of pass `number` begins."""
        tests = (number - self._first_pass) // max(self.passes_per_test, 1)
        return self._start + tests * self._test_iter * self.count

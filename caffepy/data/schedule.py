"""Which samples a device takes in each forward pass: the whole arithmetic of data sharding.

Owns the map from (rank, pass) to global sample numbers; data layers, dropout and the snapshot use it.

Training: pass p of all devices together takes the samples [pG, (p+1)G), where G is the global
batch; each device takes a contiguous part in the order of the ranks. The same G therefore sees the same
samples on one device or on eight.

Testing: the batches 0 .. test_iter-1 of one test are dealt out whole, batch j to device j mod D, so
each sample is scored once and the mean over batches does not depend on D.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shard:
    """A device's rank among all devices that train together.

    Args:
        rank: this device's number among all, from 0 (NVIDIA Caffe's universal rank).
        world_size: how many devices there are in all.
        devices_per_rank: how many of them belong to one MPI rank.
        per_device_batch: `batch_size` in a prototxt is per device (BVLC's meaning) instead of per MPI rank.
        training: number of the training within this process, the same for all of its devices; 0: one that has no
            other devices in this process.
    """

    rank: int = 0
    world_size: int = 1
    devices_per_rank: int = 1
    per_device_batch: bool = False
    training: int = field(default=0, compare=False)

    def device_batch(self, batch_size: int) -> int:
        """The samples of one device's training batch, given the prototxt's `batch_size`.

        ceil(batch_size / devices_per_rank), or batch_size itself when it is per device.
        """
        return batch_size if self.per_device_batch else -(-batch_size // self.devices_per_rank)

    def global_batch(self, batch_size: int) -> int:
        """The samples that all devices together take in one pass."""
        return self.device_batch(batch_size) * self.world_size


class TrainSchedule:
    """Training samples of one device.

    Args:
        shard: the device's.
        batch_size: as in the prototxt.
        start: the global sample number at which pass `first_pass` begins (from a snapshot).
        first_pass: the pass that `start` belongs to.
    """

    def __init__(self, shard: Shard, batch_size: int, start: int = 0, first_pass: int = 0) -> None:
        self.count = shard.device_batch(batch_size)
        self._global = shard.global_batch(batch_size)
        self._offset = shard.rank * self.count
        self._start = start
        self._first_pass = first_pass

    def first_sample(self, number: int) -> int:
        """The global number of the first sample that this device takes in pass `number`."""
        return self.position(number) + self._offset

    def position(self, number: int) -> int:
        """The global sample number at which pass `number` begins on all devices: what a snapshot keeps."""
        return self._start + (number - self._first_pass) * self._global


class TestSchedule:
    """Test samples of one device.

    Args:
        shard: the device's.
        batch_size: as in the prototxt; a test batch is never divided.
        test_iter: batches in one whole test.
        start: the global sample number at which the device's pass `first_pass` begins a test.
        first_pass: the pass that `start` belongs to.
    """

    __test__ = False  # not a test class, whatever pytest makes of the name

    def __init__(self, shard: Shard, batch_size: int, test_iter: int, start: int = 0, first_pass: int = 0) -> None:
        self.count = batch_size
        self._shard = shard
        self._test_iter = test_iter
        self._start = start
        self._first_pass = first_pass

    @property
    def passes_per_test(self) -> int:
        """How many batches of one test this device scores; 0 where there are more devices than batches."""
        return len(range(self._shard.rank, self._test_iter, self._shard.world_size))

    def first_sample(self, number: int) -> int:
        """The global number of the first sample that this device scores in its pass `number`."""
        test, batch = divmod(number - self._first_pass, self.passes_per_test)
        j = self._shard.rank + batch * self._shard.world_size
        return self._start + (test * self._test_iter + j) * self.count

    def position(self, number: int) -> int:
        """The global sample number at which the test that pass `number` belongs to begins."""
        tests = (number - self._first_pass) // max(self.passes_per_test, 1)
        return self._start + tests * self._test_iter * self.count

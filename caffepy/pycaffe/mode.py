"""Process-wide settings such as `caffe.set_mode_gpu()`, for nets and solvers created afterwards."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caffepy.data.sharding import Shard
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.python import ask_place
from caffepy.pycaffe.core.device import Device, cpu_device, device_of
from caffepy.pycaffe.core.errors import ArgumentError, whole_number
from caffepy.utils.glog import LEVELS, GlogFormatter, StderrHandler
from caffepy.utils.options import MATH_MODES

logger = logging.getLogger("caffepy.pycaffe")

VARIABLE = "CAFFEPY_LAYER_BY_LAYER"
"""Environment variable: 1 acts like `set_layer_by_layer()`, for unmodified scripts."""

MATH_VARIABLE = "CAFFEPY_MATH"
"""Environment variable: the argument of `set_math`, for unmodified scripts."""


@dataclass
class Mode:
    """The settings; `mode` is the only instance.

    Args:
        gpu: whether nets are created on a GPU.
        device: index of the GPU.
        seed: set by `set_random_seed`; None: each net draws its own seed.
        drawn: the number of seeds derived from `seed`.
        solver_count: the number of processes in the training.
        solver_rank: the rank of this process.
        multiprocess: whether solvers are processes that read different records.
        layer_by_layer: whether nets compute each layer separately in every pass.
        math: precision of float32 products on a GPU, one of MATH_MODES.
    """

    gpu: bool = False
    device: int = 0
    seed: int | None = None
    drawn: int = 0
    solver_count: int = 1
    solver_rank: int = 0
    multiprocess: bool = False
    layer_by_layer: bool = os.environ.get(VARIABLE, "0") not in ("", "0")
    math: str = os.environ.get(MATH_VARIABLE, "tf32")

    def present_device(self) -> Device:
        """Return the device of new nets; the same object for a GPU each time.

        Raises:
            DeviceError: the device does not exist.
            MissingExtraError: CuPy or cuDNN is not installed.
            ConfigError: CAFFEPY_MATH is none of MATH_MODES.
        """
        return device_of(self.device, self.math) if self.gpu else cpu_device()

    def next_seed(self) -> int:
        """Return the seed of the next net: the given seed first after `set_random_seed`, then seeds derived from it."""
        if self.seed is None:
            return secrets.randbits(31)
        self.drawn += 1
        if self.drawn == 1:
            return self.seed
        return int(np.random.SeedSequence([self.seed, self.drawn]).generate_state(1)[0] >> 1)

    def shard(self, phase: int = caffe_pb2.TRAIN) -> Shard:
        """Return the shard of the records that data layers read."""
        if self.multiprocess and phase == caffe_pb2.TRAIN:
            return Shard(self.solver_rank, self.solver_count)
        return Shard()


mode = Mode()


def set_mode_cpu() -> None:
    """Create nets on the CPU from now on (the default)."""
    mode.gpu = False


def set_mode_gpu() -> None:
    """Create nets on the GPU of `set_device` from now on. If it does not exist, creating a net raises DeviceError."""
    mode.gpu = True


def set_device(device_id: int) -> None:
    """Choose the GPU of nets created from now on; `set_mode_gpu` is also needed, as in BVLC's Caffe.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.device = whole_number("set_device", device_id, 0)


def set_devices(device_ids: Sequence[int]) -> None:
    """Create nets on the first of these GPUs from now on (NVIDIA's Caffe); one net runs on one GPU.

    Raises:
        ArgumentError: the list is empty or has a negative number.
    """
    if not device_ids:
        raise ArgumentError("set_devices([]): give the number of at least one GPU")
    set_device(device_ids[0])
    set_mode_gpu()


def set_layer_by_layer(wanted: bool = True) -> None:
    """Make nets created from now on compute each layer separately in every pass. Not in Caffe.

    Otherwise a TEST net whose hidden blobs are not read is folded; its outputs then differ in rounding.
    """
    mode.layer_by_layer = bool(wanted)


def set_math(math: str) -> None:
    """Choose the precision of float32 products on GPUs for nets created from now on. Not in Caffe.

    Args:
        math: "tf32" (default, as in `caffepy train`): tensor cores with 10-bit mantissas; "fp32": full precision.

    Raises:
        ArgumentError: `math` is neither.
    """
    if math not in MATH_MODES:
        raise ArgumentError(f"set_math({math!r}): give one of {', '.join(MATH_MODES)}")
    mode.math = math


def set_random_seed(seed: int) -> None:
    """Seed fillers and random layers of nets created from now on; a solver's random_seed takes precedence.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.seed, mode.drawn = whole_number("set_random_seed", seed, 0), 0


def solver_count() -> int:
    """Return the number of solvers in the training: the devices of `caffepy train`, or the number that was set.

    In a net whose passes run on one device it is 1: a test net with a Python layer.
    """
    place = ask_place()
    return mode.solver_count if place is None else place[1]


def set_solver_count(count: int) -> None:
    """Set the number of processes in the training.

    Raises:
        ArgumentError: the number is less than 1.
    """
    mode.solver_count = whole_number("set_solver_count", count, 1)


def solver_rank() -> int:
    """Return the rank of the calling solver thread in `caffepy train`, or the rank that was set; see `solver_count`."""
    place = ask_place()
    return mode.solver_rank if place is None else place[0]


def set_solver_rank(rank: int) -> None:
    """Set the rank of this process; rank 0 writes the log and the snapshots.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.solver_rank = whole_number("set_solver_rank", rank, 0)


def set_multiprocess(multiprocess: bool) -> None:
    """Set whether solvers are processes; data layers of training nets then read different records."""
    mode.multiprocess = bool(multiprocess)


# -- the log -------------------------------------------------------------------------------------------

_handler = StderrHandler()
_handler.setFormatter(GlogFormatter())


def init_log(level: int = 0, stderr: bool = True) -> None:
    """Show the log on stderr in glog's format. Without this call, Python's logging shows only warnings.

    Args:
        level: the lowest severity shown: 0 all, 1 warnings, 2 errors, 3 fatal errors.
        stderr: False shows nothing; Caffe then writes to files.
    """
    package = logging.getLogger("caffepy")
    package.removeHandler(_handler)
    if stderr:
        package.addHandler(_handler)
    package.setLevel(LEVELS[min(max(level, 0), len(LEVELS) - 1)])
    package.propagate = False


def log(message: str) -> None:
    """Log a line, or each line of a text."""
    for line in message.split("\n"):
        logger.info("%s", line, stacklevel=2)

"""What `caffe.set_mode_gpu()` and its like set: process-wide, for the nets and solvers that are made from then on."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caffepy.data.schedule import Shard
from caffepy.glog import GlogFormatter, StderrHandler
from caffepy.options.solver import MATH_MODES
from caffepy.proto import caffe_pb2
from caffepy.pycaffe.core.device import Device, cpu_device, device_of
from caffepy.pycaffe.core.errors import ArgumentError, whole_number

logger = logging.getLogger("caffepy.pycaffe")

_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""By glog's numbers."""

VARIABLE = "CAFFEPY_LAYER_BY_LAYER"
"""With 1 in it `set_layer_by_layer` has been called for scripts that stay as they are."""

MATH_VARIABLE = "CAFFEPY_MATH"
"""Holds the argument of `set_math` for scripts that stay as they are."""


@dataclass
class Mode:
    """The settings; `mode` is the only object of this class.

    Args:
        gpu: whether nets are made on a GPU.
        device: which.
        seed: of `set_random_seed`; None: each net draws its own.
        drawn: how many seeds were taken from it.
        solver_count: how many processes train together.
        solver_rank: this one's number among them.
        multiprocess: whether they are processes, which read different records.
        layer_by_layer: whether nets compute every layer by itself in every pass.
        math: products of float32 numbers on a GPU, one of MATH_MODES.
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
        """The device on which nets are made, a GPU's the same each time.

        Raises:
            DeviceError: it is not there.
            MissingExtraError: CuPy or cuDNN is not installed.
            ConfigError: CAFFEPY_MATH is none of MATH_MODES.
        """
        return device_of(self.device, self.math) if self.gpu else cpu_device()

    def next_seed(self) -> int:
        """The seed of the next net: of the first after `set_random_seed` the very number, of others made of it."""
        if self.seed is None:
            return secrets.randbits(31)
        self.drawn += 1
        if self.drawn == 1:
            return self.seed
        return int(np.random.SeedSequence([self.seed, self.drawn]).generate_state(1)[0] >> 1)

    def shard(self, phase: int = caffe_pb2.TRAIN) -> Shard:
        """Which records data layers read: those of this process's turn where processes train together."""
        if self.multiprocess and phase == caffe_pb2.TRAIN:
            return Shard(self.solver_rank, self.solver_count)
        return Shard()


mode = Mode()


def set_mode_cpu() -> None:
    """Make nets on the CPU from now on; it is so at first."""
    mode.gpu = False


def set_mode_gpu() -> None:
    """Make nets on the GPU of `set_device` from now on; where there is none, the next net says so."""
    mode.gpu = True


def set_device(device_id: int) -> None:
    """Choose the GPU of the nets made from now on; `set_mode_gpu` is needed besides, as in BVLC's Caffe.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.device = whole_number("set_device", device_id, 0)


def set_devices(device_ids: Sequence[int]) -> None:
    """Make nets on the first of these GPUs from now on (NVIDIA's Caffe); one net runs on one GPU.

    Raises:
        ArgumentError: none is given, or a negative number.
    """
    if not device_ids:
        raise ArgumentError("set_devices([]): give the number of at least one GPU")
    set_device(device_ids[0])
    set_mode_gpu()


def set_layer_by_layer(wanted: bool = True) -> None:
    """Let the nets made from now on compute every layer by itself in every pass; caffepy's own, Caffe has no such name.

    Otherwise a TEST net whose hidden blobs nobody looks at is folded, and its outputs differ in rounding.
    """
    mode.layer_by_layer = bool(wanted)


def set_math(math: str) -> None:
    """Choose how GPUs multiply float32 numbers in the nets made from now on; caffepy's own, Caffe has no such name.

    Args:
        math: "tf32", at first and as in `caffepy train`: on tensor cores, factors rounded to 10 bits; "fp32": in full.

    Raises:
        ArgumentError: it is neither.
    """
    if math not in MATH_MODES:
        raise ArgumentError(f"set_math({math!r}): give one of {', '.join(MATH_MODES)}")
    mode.math = math


def set_random_seed(seed: int) -> None:
    """Seed the fillers and random layers of the nets made from now on; a solver's own random_seed comes first.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.seed, mode.drawn = whole_number("set_random_seed", seed, 0), 0


def solver_count() -> int:
    """How many processes train together."""
    return mode.solver_count


def set_solver_count(count: int) -> None:
    """Say how many processes train together.

    Raises:
        ArgumentError: fewer than one.
    """
    mode.solver_count = whole_number("set_solver_count", count, 1)


def solver_rank() -> int:
    """This process's number among those that train together."""
    return mode.solver_rank


def set_solver_rank(rank: int) -> None:
    """Say which of the processes this one is; rank 0 writes the log and the snapshots.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.solver_rank = whole_number("set_solver_rank", rank, 0)


def set_multiprocess(multiprocess: bool) -> None:
    """Say that solvers are processes: data layers of training nets then take turns in reading the records."""
    mode.multiprocess = bool(multiprocess)


# -- the log -------------------------------------------------------------------------------------------

_handler = StderrHandler()
_handler.setFormatter(GlogFormatter())


def init_log(level: int = 0, stderr: bool = True) -> None:
    """Show caffepy's log on stderr, in glog's format; without this call only warnings are shown, by Python's logging.

    Args:
        level: the least that is shown: 0 all, 1 warnings, 2 errors, 3 fatal errors.
        stderr: False shows nothing; Caffe writes to files instead.
    """
    package = logging.getLogger("caffepy")
    package.removeHandler(_handler)
    if stderr:
        package.addHandler(_handler)
    package.setLevel(_LEVELS[min(max(level, 0), len(_LEVELS) - 1)])
    package.propagate = False


def log(message: str) -> None:
    """Write a line to caffepy's log."""
    logger.info("%s", message, stacklevel=2)

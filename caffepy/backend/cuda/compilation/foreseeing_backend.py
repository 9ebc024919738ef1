"""A CUDA backend on which a net is run for the kernels that it will ask for; see `foreseen_array.py`.

Owns what of tuning can be foreseen: our own candidates, and what is around cuDNN's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from caffepy.backend.composite import Composite
from caffepy.backend.cuda.backend import CudaBackend
from caffepy.backend.cuda.batch_norm import BatchNormKernels
from caffepy.backend.cuda.compilation.cubins import is_known, remember
from caffepy.backend.cuda.compilation.foreseen_array import foreseeing
from caffepy.backend.cuda.compilation.target import find_target
from caffepy.backend.cuda.compiler import c_type, library_kernel
from caffepy.backend.cuda.convolution.algorithm import (
    UNFUSED,
    AlgorithmFamily,
    Candidate,
    Operands,
    Resources,
    Tuner,
    identity,
    write_result,
)
from caffepy.backend.cuda.convolution.cudnn import rounds_bias
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.convolution.space_to_depth_cudnn import NoConvolution, foreseen_rearrangements
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.elementwise.launch import apply
from caffepy.backend.cuda.gemm.cublas import Blas
from caffepy.backend.cuda.memory import Scratch, allocate
from caffepy.backend.cuda.softmax import SoftmaxKernels
from caffepy.backend.device_scalars import Synchronous
from caffepy.backend.handles import DeviceScalars
from caffepy.backend.types import Array

logger = logging.getLogger(__name__)

OWN_FAMILIES = (
    "depthwise", "depthwise line", "small", "short sums", "large windows", "lines", "split-K", "products", UNFUSED,
)  # fmt: skip
"""Families of candidates without cuDNN."""


class ForeseenBlas(Blas):
    """cuBLAS that computes nothing; small and divided products still ask for their kernels.

    Args:
        tf32: as `Blas` takes it.
        scratch: likewise.
    """

    def __init__(self, tf32: bool, scratch: Scratch) -> None:
        self._tf32 = tf32
        self._scratch = scratch

    def library_gemm(self, *_: Any, **__: Any) -> None:
        """Computes nothing."""

    gemm_of_parts = library_gemm


class ForeseenScalars:
    """A `DeviceScalars` without memory.

    Args:
        values: how many numbers there are.
        counters: how many counters.
    """

    def __init__(self, values: int, counters: int) -> None:
        self.array = allocate((values,))
        self.values = [self.array[i : i + 1].reshape(()) for i in range(values)]
        self.counters = [allocate((2,), "uint64") for _ in range(counters)]

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        """Sends nothing."""


class ForeseeingTuner:
    """Runs every candidate of ours that another tuner would run.

    Args:
        tuner: the other one.
    """

    def __init__(self, tuner: Tuner) -> None:
        self.enabled = tuner.enabled
        self._tuner = tuner

    def choose(
        self, task: Task, families: Sequence[AlgorithmFamily], operands: Operands | None, resources: Resources
    ) -> Candidate | None:
        """A candidate that computes nothing; `operands` None: there are no arrays for the task yet."""
        given, dtype = operands or _operands(task), task.problem.array_dtype
        likely = self.likely(task, families, resources)
        if len(likely) > 1:
            library_kernel("tuning", "idle")
            for array in (given.first, given.out):
                library_kernel("tuning", "largest", f"#define Element {c_type(array)}\n")
        for candidate in _own(task, likely, resources):
            if candidate.prepare():
                candidate.run(given)
        if rounds_bias(task):
            apply(identity, (given.bias,), (allocate((task.problem.weights[0],), dtype),), axis=0)
        if task.direction is Direction.WEIGHTS and dtype != "float32":
            write_result(allocate(task.problem.weights, dtype), given)
        return NoConvolution()

    def likely(
        self, task: Task, families: Sequence[AlgorithmFamily], resources: Resources
    ) -> Sequence[AlgorithmFamily]:
        return self._tuner.likely(task, families, resources)


def _own(task: Task, families: Sequence[AlgorithmFamily], resources: Resources) -> Iterator[Candidate]:
    for family in families:
        if family.name in OWN_FAMILIES and not (family.last_resort and len(families) > 1):
            yield from family.candidates()
    yield from foreseen_rearrangements(task, [family.name for family in families], resources)


def _operands(task: Task) -> Operands:
    problem, outputs = task.problem, task.problem.weights[0]
    first, second, out = problem.arrays(task.direction)
    dtype = problem.array_dtype
    return Operands(
        allocate(first, dtype), allocate(second, dtype),
        allocate(out, "float32" if task.direction is Direction.WEIGHTS else dtype),
        allocate((outputs,)) if task.bias else None, allocate((2, outputs)) if task.sums else None,
        residual=allocate(out, dtype) if task.residual else None,
    )  # fmt: skip


class ForeseeingBackend(Synchronous, CudaBackend):
    """A backend that computes nothing and asks for the kernels that another one would.

    Args:
        like: the other one.
    """

    holds_values = False
    captures = False

    def __init__(self, like: CudaBackend) -> None:
        Composite.__init__(self)
        self.name, self.math, self.device = like.name, like.math, like.device
        self.stream, self._device = like.stream, like._device
        self._scratch = Scratch()
        self._batch_norm = BatchNormKernels(self._scratch)
        self._softmax = SoftmaxKernels(self._scratch)
        others, tf32 = like._resources, like.math == "tf32"
        blas = self._blas = ForeseenBlas(tf32, self._scratch)
        tuner = ForeseeingTuner(others.tuner)
        self._resources = Resources(None, None, blas, self._scratch, tf32, tuner, others.deterministic)
        self._convolutions = {}

    def close(self) -> None:
        """There is nothing to give back."""

    def device_scalars(self, values: int, counters: int) -> DeviceScalars:
        return ForeseenScalars(values, counters)

    def arena(self, size: int) -> Array:
        return allocate((size,), "uint8")

    def to_host(self, array: Array) -> Any:
        return np.zeros(array.shape, np.float32)


@contextmanager
def foreseeing_backend(like: CudaBackend, net: str) -> Iterator[CudaBackend | None]:
    """Within a `with` block, a backend that foresees what `like` will need for a net.

    None where NVRTC is left to CuPy, or the same net was foreseen before. What goes wrong is logged, no more: then
    kernels are compiled when they are needed.
    """
    target = find_target()
    key = _description(like, net)
    if target is None or is_known(key, target):
        yield None
        return
    try:
        with foreseeing(target):
            yield ForeseeingBackend(like)
        remember(key, target)
    except Exception as error:  # whatever is wrong with the net itself shows where it is built
        logger.debug("not all kernels of a net are foreseen: %s: %s", type(error).__name__, error)


def _description(like: CudaBackend, net: str) -> str:
    resources, attributes = like._resources, cupy.cuda.Device().attributes
    settings = (attributes["MultiProcessorCount"], like.math, resources.deterministic, resources.tuner.enabled)
    return f"{settings} {net}"

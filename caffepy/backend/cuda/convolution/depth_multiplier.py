"""Convolutions with a channel multiplier as depthwise convolutions of repeated channels.

If each channel is repeated once per output, every output has its own channel and the depthwise kernels apply. They take
a fraction of the time of cuDNN's grouped engines. The data gradient is the sum over the repeated channels' gradients;
before the sum only float32 results are allowed, to round once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from caffepy.backend.cuda.compiler import c_type, defines, divider, launch, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Candidate, Operands, Resources
from caffepy.backend.cuda.convolution.gradients import Choose
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import view
from caffepy.backend.types import Array, convolution_workspace


def suits_depth_multiplier(task: Task) -> bool:
    """Return whether a task has a channel multiplier and memory for the repeated arrays."""
    problem, channels = task.problem, task.problem.x[1]
    if len(problem.x) != 4 or not problem.geometry.group == channels < problem.weights[0]:
        return False
    if task.direction is Direction.DATA and problem.dtype != "float32":
        return False
    item = 4 if problem.dtype == "float32" else 2
    arrays = sum(math.prod(shape) for shape in problem.arrays(task.direction))
    size = math.prod(repeated(problem).x)
    return size <= MAX_INDEX and size * item <= convolution_workspace(arrays * item) // 2


def repeated(problem: Problem) -> Problem:
    """Return the depthwise problem."""
    outputs = problem.weights[0]
    x = (problem.x[0], outputs, *problem.x[2:])
    return Problem(x, problem.weights, replace(problem.geometry, group=outputs), problem.dtype)


class DepthMultiplier:
    """The candidate: the fastest candidate of the depthwise problem.

    Args:
        task: a plain task that `suits_depth_multiplier`.
        choose: returns the candidate of another task.
        resources: scratch memory.
    """

    name = "depth multiplier"

    def __init__(self, task: Task, choose: Choose, resources: Resources) -> None:
        self._task = Task(repeated(task.problem), task.direction)
        self._times = task.problem.weights[0] // task.problem.x[1]
        self._choose = choose
        self._resources = resources
        self._inner: Candidate | None = None

    def prepare(self) -> bool:
        """Choose the depthwise candidate, which may require tuning."""
        self._inner = self._choose(self._task, None)
        return self._inner is not None

    def run(self, operands: Operands) -> None:
        """Launch the repeat (or sum) kernel and the depthwise candidate."""
        assert self._inner is not None
        if self._task.direction is not Direction.DATA:
            self._inner.run(replace(operands, first=self._repeated(operands.first)))
            return
        x = self._task.problem.x
        result = view(self._resources.scratch.get("repeated channels", math.prod(x)), x)
        self._inner.run(replace(operands, out=result))
        kernel = library_kernel("repeat_channels", "add_channels", defines(Element="float", PACK=1))
        launch(kernel, operands.out.size, (raw(result), raw(operands.out), self._times, operands.out.size))

    def _repeated(self, x: Array) -> Array:
        shape = self._task.problem.x
        result = view(self._resources.scratch.get("repeated channels", math.prod(shape), x.dtype.name), shape)
        pack = math.gcd(result.size, 4)
        kernel = library_kernel("repeat_channels", "repeat_channels", defines(Element=c_type(x), PACK=pack))
        count = result.size // pack
        launch(kernel, count, (raw(x), raw(result), divider(self._times), count))
        return result

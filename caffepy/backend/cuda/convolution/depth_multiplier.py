"""Convolutions with several outputs for each channel (a channel multiplier) as depthwise ones, of repeated channels.

The image in which each channel stands as often as it has outputs makes every output a channel of its own: the kernels
for depthwise convolutions take it, and take a fraction of the time of cuDNN's engines for groups. The gradient to data
is that of the repeated image, its neighbours added up; only float32 results may be rounded before that.
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
    """Whether a task has a channel multiplier, and memory for what is repeated."""
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
    """The depthwise problem."""
    outputs = problem.weights[0]
    x = (problem.x[0], outputs, *problem.x[2:])
    return Problem(x, problem.weights, replace(problem.geometry, group=outputs), problem.dtype)


class DepthMultiplier:
    """The candidate: the fastest of the depthwise problem.

    Args:
        task: a plain one that `suits_depth_multiplier`.
        choose: gives the candidate of another task.
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
        """Choose the depthwise candidate, which may have to be tuned."""
        self._inner = self._choose(self._task, None)
        return self._inner is not None

    def run(self, operands: Operands) -> None:
        """One launch, and those of the depthwise candidate."""
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

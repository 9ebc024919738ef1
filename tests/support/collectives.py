"""Every operation of a process group against NumPy: each rank knows all ranks' inputs and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from caffepy.distributed import AVG, MAX, MIN, PRODUCT, SUM, ProcessGroup, ReduceOp
from caffepy.distributed.group import DTYPES

TOLERANCE = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-12}
COUNTS = (0, 1, 7, 1000)


def inputs(size: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """All ranks' arrays, (size, *shape); the same on every rank."""
    generator = np.random.default_rng([seed, size, len(dtype)])
    if dtype.startswith("float"):
        return generator.uniform(0.5, 1.5, (size, *shape)).astype(dtype)
    # Small enough for the product of four in uint8: what an overflow gives differs among backends.
    return generator.integers(0, 4, (size, *shape)).astype(dtype)


def reduced(arrays: np.ndarray, operator: ReduceOp) -> np.ndarray:
    """NumPy's reduction over the ranks; floating-point numbers in float64."""
    exact = arrays.astype(np.float64) if arrays.dtype.kind == "f" else arrays
    if operator is AVG:
        return exact.mean(0)
    function = {SUM: np.add, PRODUCT: np.multiply, MIN: np.minimum, MAX: np.maximum}[operator]
    return function.reduce(exact, axis=0, dtype=exact.dtype)


def operators(dtype: str) -> tuple[ReduceOp, ...]:
    """Those that can be applied to a dtype."""
    return tuple(ReduceOp) if dtype.startswith("float") else (SUM, PRODUCT, MIN, MAX)


class Checker:
    """Checks a group; called by all its ranks.

    Args:
        group: the group.
        to_device: makes the script's array of a NumPy array.
        to_host: the reverse.
    """

    def __init__(
        self,
        group: ProcessGroup,
        to_device: Callable[[np.ndarray], Any] = np.array,
        to_host: Callable[[Any], np.ndarray] = np.asarray,
    ) -> None:
        self.group = group
        self.to_device = to_device
        self.to_host = to_host
        self.checks = 0

    def everything(self) -> int:
        """All operations; returns how many results were compared."""
        for dtype in DTYPES:
            for count in COUNTS:
                for operator in operators(dtype):
                    self.reductions(dtype, count, operator)
                self.movements(dtype, count)
            self.lists(dtype)
        if self.group.size > 1:
            self.messages()
        self.asynchronous()
        self.group.barrier()
        return self.checks

    def reductions(self, dtype: str, count: int, operator: ReduceOp) -> None:
        group, size, rank = self.group, self.group.size, self.group.rank
        arrays = inputs(size, (count,), dtype)
        expected = reduced(arrays, operator)
        own = self.to_device(arrays[rank])
        group.all_reduce(own, operator)
        self.compare(own, expected, f"all_reduce {operator} {dtype}")
        for root in {0, size - 1}:
            own = self.to_device(arrays[rank])
            group.reduce(own, root, operator)
            self.compare(own, expected if rank == root else arrays[rank], f"reduce {operator} {dtype} to {root}")
        parts = inputs(size, (size, count), dtype)
        own = self.to_device(np.zeros(count, dtype))
        group.reduce_scatter(own, self.to_device(parts[rank]), operator)
        self.compare(own, reduced(parts[:, rank], operator), f"reduce_scatter {operator} {dtype}")

    def movements(self, dtype: str, count: int) -> None:
        group, size, rank = self.group, self.group.size, self.group.rank
        arrays = inputs(size, (count, 2), dtype)
        parts = inputs(size, (size, count, 2), dtype)
        for root in {0, size - 1}:
            own = self.to_device(arrays[rank])
            group.broadcast(own, root)
            self.compare(own, arrays[root], f"broadcast {dtype} from {root}")
            gathered = self.zeros((size, count, 2), dtype) if rank == root else None
            group.gather(self.to_device(arrays[rank]), gathered, root)
            if gathered is not None:
                self.compare(gathered, arrays, f"gather {dtype} to {root}")
            own = self.zeros((count, 2), dtype)
            group.scatter(own, self.to_device(parts[root]) if rank == root else None, root)
            self.compare(own, parts[root, rank], f"scatter {dtype} from {root}")
        gathered = self.zeros((size * count, 2), dtype)
        group.all_gather(gathered, self.to_device(arrays[rank]))
        self.compare(gathered, arrays.reshape(-1, 2), f"all_gather {dtype}")
        exchanged = self.zeros((size, count, 2), dtype)
        group.all_to_all(exchanged, self.to_device(parts[rank]))
        self.compare(exchanged, parts[:, rank], f"all_to_all {dtype}")

    def lists(self, dtype: str) -> None:
        """Lists of arrays instead of whole ones, and arrays without a dimension."""
        group, size, rank = self.group, self.group.size, self.group.rank
        for shape in ((2, 3), ()):
            arrays, parts = inputs(size, shape, dtype), inputs(size, (size, *shape), dtype)
            outputs = [self.zeros(shape, dtype) for _ in range(size)]
            group.all_gather(outputs, self.to_device(arrays[rank]))
            self.compare_all(outputs, arrays, "all_gather of a list")
            group.all_to_all(outputs, [self.to_device(part) for part in parts[rank]])
            self.compare_all(outputs, parts[:, rank], "all_to_all of lists")
            group.gather(self.to_device(arrays[rank]), outputs if rank == 0 else None)
            if rank == 0:
                self.compare_all(outputs, arrays, "gather of a list")
            own = self.zeros(shape, dtype)
            group.scatter(own, [self.to_device(part) for part in parts[0]] if rank == 0 else None)
            self.compare(own, parts[0, rank], "scatter of a list")
            group.reduce_scatter(own, [self.to_device(part) for part in parts[rank]], MAX)
            self.compare(own, reduced(parts[:, rank], MAX), "reduce_scatter of a list")

    def messages(self) -> None:
        """Around the ring, both ways at once; order within a tag, and tags out of order."""
        group, size, rank = self.group, self.group.size, self.group.rank
        after, before = (rank + 1) % size, (rank - 1) % size
        for dtype in DTYPES:
            arrays = inputs(size, (300, 100), dtype)
            received = self.zeros((300, 100), dtype)
            handle = group.irecv(received, before)
            group.send(self.to_device(arrays[rank]), after)
            handle.wait()
            self.compare(received, arrays[before], f"a message of {dtype}")
        tags = (0, 0, 0) if group.backend == "nccl" else (5, 7, 5)
        received = [self.zeros((2,), "int64") for _ in tags]
        handles = [group.irecv(array, before, tag) for array, tag in zip(received, tags, strict=True)]
        sent = [group.isend(self.to_device(np.full(2, 10 * rank + i)), after, tag) for i, tag in enumerate(tags)]
        for handle in [*reversed(handles), *sent]:
            handle.wait()
        self.compare_all(received, [np.full(2, 10 * before + i) for i in range(3)], "messages by tag")

    def asynchronous(self) -> None:
        """Several operations at once, waited for in another order."""
        group, size, rank = self.group, self.group.size, self.group.rank
        arrays = inputs(size, (50,), "float32")
        total, copy = self.to_device(arrays[rank]), self.to_device(arrays[rank])
        outputs = [self.zeros((50,), "float32") for _ in range(size)]
        handles = [
            group.all_reduce(total, async_op=True),
            group.all_gather(outputs, copy, async_op=True),
            group.barrier(async_op=True),
        ]
        for handle in reversed(handles):
            handle.wait()
            assert handle.is_completed()
        self.compare(total, reduced(arrays, SUM), "an asynchronous all_reduce")
        self.compare_all(outputs, arrays, "an asynchronous all_gather")

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.to_device(np.zeros(shape, dtype))

    def compare_all(self, actual: list[Any], expected: Any, what: str) -> None:
        for one, other in zip(actual, expected, strict=True):
            self.compare(one, other, what)

    def compare(self, actual: Any, expected: np.ndarray, what: str) -> None:
        found = self.to_host(actual)
        message = f"rank {self.group.rank}: {what}"
        tolerance = TOLERANCE.get(str(found.dtype), 0.0)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=0.0, err_msg=message)
        self.checks += 1

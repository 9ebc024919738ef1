"""Work shared by threads whose results come in the order of the items."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 4
"""Items of one task: handing a task over costs as much Python as a small image's own calls."""
_TASKS_AHEAD = 3
"""For each thread, finished ones included: what is decoded and waits to be written has to fit the memory."""


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """``map(function, items)``, computed by threads some items ahead of the one who reads the results.

    The first error that an item raises is raised in its turn. A reader that stops early, or is interrupted, waits only
    for the items that are being worked on.
    """
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, _CHUNK)), [])
    executor = ThreadPoolExecutor(threads, thread_name_prefix="convert")
    running: deque[Future[list[Result]]] = deque()
    try:
        for chunk in chunks:
            running.append(executor.submit(lambda chunk: [function(item) for item in chunk], chunk))
            if len(running) > _TASKS_AHEAD * threads:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)

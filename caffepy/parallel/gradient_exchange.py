"""Averages gradients over all devices: at once after the backward pass, or in buckets while it goes on.

Owns when each bucket's exchange begins and who waits for it. `P2PSync` has one for its solver.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

from caffepy.net import Net
from caffepy.net.wiring import Node
from caffepy.parallel.buckets import Bucket, cut_buckets
from caffepy.parallel.communicator import Communicator, Exchange, OverlappingCommunicator


class GradientExchange:
    """The exchange of one device's gradients.

    Args:
        net: whose gradients.
        communicator: connects the devices.
        buckets: into how many parts to cut; 1: exchange everything at once after the backward pass.
        completes: asked in a backward pass whether it is the one that completes the gradients.
        hidden: told the seconds for which an exchange went on beside the backward pass.
        waiting: marks a `with` block that waits for all devices, given what for.
        record: told for the trace when each bucket's exchange began and was known to have ended: a row, a name, and
            two times of `time.perf_counter`.
    """

    def __init__(
        self,
        net: Net,
        communicator: Communicator,
        buckets: int,
        completes: Callable[[], bool],
        hidden: Callable[[float], None],
        waiting: Callable[[str], AbstractContextManager[None]],
        record: Callable[[str, str, float, float], None],
    ) -> None:
        self._net = net
        self._communicator = communicator
        self._completes = completes
        self._hidden = hidden
        self._waiting = waiting
        self._record = record
        self._buckets: list[Bucket] = []
        self._going_on: deque[tuple[Exchange, str, float]] = deque()
        self._begun = 0
        self._since = 0.0
        if buckets > 1 and hasattr(communicator, "begin_average"):
            self._buckets = cut_buckets(net, buckets)
            self._places = {id(node): index for index, node in enumerate(net.schedule)}
            net.after_backward.append(self._after_backward)

    @property
    def overlaps(self) -> bool:
        """Whether exchanges begin during the backward pass."""
        return bool(self._buckets)

    def finish(self) -> None:
        """Wait until all gradients are averages; called when the backward pass is over.

        Raises:
            AbortedError: another device failed.
            PeerError: the connection failed.
        """
        if not self._buckets:
            with self._waiting("the gradients' all-reduce"):
                self._communicator.all_reduce(self._net.parameters.exchanged, average=True)
            return
        if self._begun:
            self._hidden(time.monotonic() - self._since)
        while self._begun < len(self._buckets):
            self._begin_next()
        for number in range(1, len(self._buckets) + 1):
            with self._waiting(f"part {number} of {len(self._buckets)} of the gradients' all-reduce"):
                exchange, name, begin = self._going_on.popleft()
                exchange.finish()
            self._record(f"bucket {number}", name, begin, time.perf_counter())
        self._begun = 0

    def _after_backward(self, node: Node) -> None:
        """Begin what this layer's gradients complete, and look after what is going on."""
        if not self._completes():
            return
        place = self._places[id(node)]
        for exchange, _, _ in self._going_on:
            exchange.progress()
        # The last layer's buckets wait for `finish`: there is nothing left to hide them behind.
        while place > 0 and self._begun < len(self._buckets) and self._buckets[self._begun].node >= place:
            self._begin_next()

    def _begin_next(self) -> None:
        if not self._begun:
            self._since = time.monotonic()
        bucket = self._buckets[self._begun]
        self._begun += 1
        part = self._net.parameters.diff[bucket.start : bucket.stop]
        begin = time.perf_counter()
        exchange = cast(OverlappingCommunicator, self._communicator).begin_average(part)
        self._going_on.append((exchange, f"{part.nbytes / 2**20:.3g} MiB", begin))

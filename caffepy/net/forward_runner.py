"""Forward passes of a net that is only tested: folded and captured once for the present shapes, then replayed.

Solvers' tests, `caffepy test` and `caffepy.load` run their nets by it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from caffepy.backend.handles import DeviceScalars
from caffepy.errors import RunError
from caffepy.net.capture import GraphSegments, Segment
from caffepy.net.net import Net
from caffepy.net.wiring import capture_blockers

log = logging.getLogger(__name__)


class ForwardRunner:
    """Runs a net forward.

    Call `parameters_changed` whenever parameters have got other values.

    Args:
        net: of the TEST phase.
        eager: never capture.
        lazily: capture in the second pass; else only `capture` does.
    """

    def __init__(self, net: Net, eager: bool = False, lazily: bool = True) -> None:
        self.net = net
        self._lazily = lazily
        self._stale = True
        self._wanted = net.backend.captures and not eager and not net.debug_info
        self._warm = False
        self._segments = GraphSegments(net.backend, [])
        self._random: DeviceScalars | None = None

    @property
    def wanted(self) -> bool:
        """Whether passes are to be graphs: they can be as far as is known, and are asked for."""
        return self._wanted

    @property
    def captured(self) -> bool:
        """Whether there are graphs of a pass."""
        return self._segments.captured

    def parameters_changed(self) -> None:
        """Let the next pass take the parameters' present values."""
        self._stale = True

    def forward(self) -> None:
        """One pass: eagerly the first time and after the data changed their shape, from then on as graphs."""
        self._refresh()
        observed = self.net.before_forward or self.net.after_forward  # by callbacks, which graphs do not call
        if self._lazily and not observed:
            self.capture()
        if self.captured and not observed and self._replay():
            return
        self.net.folds_parameters = False
        try:
            self.net.forward()
        finally:
            self.net.folds_parameters = True  # for whoever runs the net without this object
        self._warm = True

    def _refresh(self) -> None:
        if self._stale:
            self.net.prepare()
            self._stale = False

    def capture(self) -> bool:
        """Make graphs of a pass like the last one; whether there are any now.

        Memory is allocated, which can wait for the work of other devices of the process: where these run at the same
        time, let all of them capture before one of them launches a collective.
        """
        if self.captured or not (self._wanted and self._warm):
            return self.captured
        net = self.net
        net.backend.trim()  # what tuning and compiling the first pass took
        segments = [
            Segment(node.layer.name, partial(net.forward_node, node), blocker)
            for node, blocker in zip(net.schedule, capture_blockers(net.schedule), strict=True)
        ]
        self._segments = GraphSegments(net.backend, segments)
        try:
            with self._counting_on_device():
                self._segments.capture()
        except RunError as error:
            log.info("Passes of net '%s' are not captured into graphs: %s", net.name, error)
            self.stop_capturing()
        except BaseException:
            self.drop()  # the graphs of some segments only
            raise
        return self.captured

    @contextmanager
    def _counting_on_device(self) -> Iterator[None]:
        """Let layers read the number of the pass from the device's memory, where it is another in each replay."""
        passes = self.net.context.passes
        if passes.draws:
            self._random = self.net.backend.device_scalars(1, 1)
            self._send_counter(self._random)
            passes.on_device = self._random.counters[0]
        try:
            yield
        finally:
            passes.on_device = None

    def stop_capturing(self) -> None:
        """Run eagerly from now on."""
        self._wanted = False
        self.drop()

    def _replay(self) -> bool:
        """Launch the graphs; False where the data have another shape, and there are no graphs any more."""
        net = self.net
        number = net.context.passes.number
        net.prefetch_to_device(number)
        if net.shapes_changed():
            self.drop()
            return False
        if self._random is not None:
            self._send_counter(self._random)
        self._segments.run()
        net.release_batch(number)
        net.context.passes.number += 1
        return True

    def _send_counter(self, scalars: DeviceScalars) -> None:
        context = self.net.context
        number = context.passes.number
        scalars.send([0.0], [(number, context.first_sample(number) if context.first_sample else 0)])

    def drop(self) -> None:
        """Free the graphs."""
        self._segments.drop()
        self._warm = False
        self._random = None

    def close(self) -> None:
        """Free the graphs and close the net. Callable twice."""
        self.drop()
        self.net.close()

"""caffepy's command line with one more layer type, Fault, which fails on request; started by the tests, also by mpirun.

FAULT="kind rank iteration" in the environment makes that rank (or `thread 1` of a process: "kind 0.1 iteration") fail in its
forward pass of that iteration: raise, kill, sleep.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from caffepy.blob import Blob
from caffepy.cli.main import main
from caffepy.layers.base import Layer, register_layer


@register_layer("Fault")
class FaultLayer(Layer):
    """Hands its blob on, in place."""

    def reshape(self, bottom: list[Blob], top: list[Blob]) -> None:
        assert bottom[0] is top[0]

    def forward(self, bottom: list[Blob], top: list[Blob]) -> None:
        if delay := float(os.environ.get("DELAY", "0")):
            time.sleep(delay)
        kind, device, iteration = os.environ.get("FAULT", "none -1 -1").split()
        if self.context.shard.rank != int(device) or self.context.passes.number != int(iteration):
            return
        if self.context.phase != 0:
            return
        if kind == "raise":
            raise ValueError("injected")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "sleep":
            time.sleep(60)
        if kind in ("SIGINT", "SIGTERM", "SIGHUP"):
            os.kill(os.getpid(), getattr(signal, kind))

    def backward(self, top: list[Blob], propagate_down: list[bool], bottom: list[Blob]) -> None:
        """In place: the gradient is there already."""


if __name__ == "__main__":
    sys.exit(main())

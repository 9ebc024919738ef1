"""caffepy's command line with one more layer type, Fault, which fails on request; the tests start it, also with mpirun.

FAULT="kind device iteration" in the environment makes that device (counted through all ranks) fail in its forward
pass of that iteration: raise, kill, sleep, or the name of a signal that its process sends itself. DELAY is the seconds
that each forward pass takes longer, FORBID a package that must not be imported.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time

from caffepy.blob import Blob
from caffepy.cli.main import main
from caffepy.layers.base import Layer, register_layer
from caffepy.parallel.world import find_launcher
from caffepy.proto.caffe_pb2 import TRAIN


@register_layer("Fault")
class FaultLayer(Layer):
    """Hands its blob on, in place."""

    def not_captured(self) -> str:
        return "it fails on the host"

    def reshape(self, bottom: list[Blob], top: list[Blob]) -> None:
        assert bottom[0] is top[0]

    def forward(self, bottom: list[Blob], top: list[Blob]) -> None:
        if delay := float(os.environ.get("DELAY", "0")):
            time.sleep(delay)
        kind, device, iteration = os.environ.get("FAULT", "none -1 -1").split()
        if self.context.shard.rank != int(device) or self.context.passes.number != int(iteration):
            return
        if self.context.phase != TRAIN:
            return
        os.write(2, f"fault at {time.time()}\n".encode())  # one piece, or another thread's line gets into it
        if kind == "raise":
            raise ValueError("injected")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "sleep":
            time.sleep(120)
        if kind in ("SIGINT", "SIGTERM", "SIGHUP"):
            os.kill(os.getpid(), getattr(signal, kind))

    def backward(self, top: list[Blob], propagate_down: list[bool], bottom: list[Blob]) -> None:
        """In place: the gradient is there already."""


def arguments() -> list[str]:
    """The command line; ``{rank}`` and sums and products with it stand for this process's number."""
    launcher = find_launcher()
    rank = launcher.rank if launcher else 0
    values = {"rank": rank, "rank+1": rank + 1, "2*rank": 2 * rank, "2*rank+1": 2 * rank + 1}
    return [re.sub(r"\{([^}]+)\}", lambda found: str(values[found[1]]), argument) for argument in sys.argv[1:]]


if __name__ == "__main__":
    if forbidden := os.environ.get("FORBID"):
        sys.modules[forbidden] = None  # type: ignore[assignment]
    sys.exit(main(arguments()))

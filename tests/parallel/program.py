"""caffepy's command line with one more layer type, Fault, which fails on request; the tests start it, also with mpirun.

FAULT="kind device iteration [later]" in the environment makes that device (counted through all ranks) fail in its
forward pass of that iteration, or so many seconds later, wherever it is then: raise, kill, sleep, stall (its reading
thread gets no more data), mark (nothing at all), or the name of a signal that its process sends itself. The iteration
``start`` is when the net is built. With the kind ``change`` a weight of layer ip1 is changed after that iteration.
FOLDER is the working directory, in which ``{rank}`` stands for the process's number. DELAY is the seconds that each
forward pass takes longer (with commas: of each device, the last for the rest), FORBID a package that must not be
imported, PATIENCE the seconds by which the waits of a process's threads outlast the watchdog, DESCRIPTORS how many
files and connections a process may have open. With CAPTURED the layer is part of captured graphs, in whose replays it
does nothing more.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from caffepy.cli.main import main
from caffepy.distributed.communicators import local
from caffepy.distributed.processes.launcher import find_launcher
from caffepy.formats.proto.caffe_pb2 import TRAIN
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Layer, register_layer
from caffepy.training.solver import Solver

_SLEEP = 120.0
"""Seconds that nobody waits for."""
FAULT = os.environ.get("FAULT", "") if os.environ.get("CAFFEPY_RESTARTS", "0") == "0" else ""
_LONGEST = 300
"""Seconds after which a run ends whose tests were killed and did not end it."""


def say_fault() -> None:
    """Tell the test when it happened."""
    os.write(2, f"fault at {time.time()}\n".encode())  # one piece, or another thread's line gets into it


@register_layer("Fault")
class FaultLayer(Layer):
    """Hands its blob on, in place."""

    def capture_blocker(self) -> str | None:
        return None if os.environ.get("CAPTURED") else "it fails on the host"

    def setup(self, bottom: list[Blob], top: list[Blob]) -> None:
        self._stalled = False
        self._fail_at("start")

    def reshape(self, bottom: list[Blob], top: list[Blob]) -> None:
        assert bottom[0] is top[0]

    def forward(self, bottom: list[Blob], top: list[Blob]) -> None:
        delays = [float(delay) for delay in os.environ.get("DELAY", "0").split(",")]
        if delay := delays[min(self.context.shard.rank, len(delays) - 1)]:
            time.sleep(delay)
        if self._stalled:  # what was read before still comes
            say_fault()
        self._fail_at(str(self.context.passes.number))

    def backward(self, top: list[Blob], propagate_down: list[bool], bottom: list[Blob]) -> None:
        """In place: the gradient is there already."""

    def _fail_at(self, moment: str) -> None:
        kind, device, iteration, *later = (FAULT or "none -1 -1").split()
        if self.context.phase != TRAIN or self.context.shard.rank != int(device) or moment != iteration:
            return
        if later and float(later[0]) > 0:
            threading.Timer(float(later[0]), self._fail, (kind,)).start()
        else:
            self._fail(kind)

    def _fail(self, kind: str) -> None:
        if kind == "stall":
            self._stall_reader()
            return
        say_fault()
        if kind == "raise":
            raise ValueError("injected")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "sleep":
            time.sleep(_SLEEP)
        if kind in ("SIGINT", "SIGTERM", "SIGHUP"):
            os.kill(os.getpid(), getattr(signal, kind))

    def _stall_reader(self) -> None:
        """Let the next read of this device's training data last for ever."""
        assert self.context.describe_sample is not None
        loader = self.context.describe_sample.__self__._loader  # type: ignore[attr-defined]

        def stall(*arguments: Any) -> None:
            self._stalled = True
            say_fault()
            time.sleep(_SLEEP)

        loader.load = loader.load_bytes = stall


def change_a_weight(device: int, iteration: int) -> None:
    """Let a device's weights differ from the others' after an iteration."""
    iterate = Solver._iterate

    def changing(solver: Solver) -> None:
        if solver.shard.rank == device and solver.iteration == iteration:
            changed = next(p for p in solver.net.parameters.parameters if p.layer.name == "ip1")
            solver.backend.fill(changed.blob.data[:1], 0.125)
        iterate(solver)

    Solver._iterate = changing  # type: ignore[method-assign]


def arguments() -> list[str]:
    """The command line; ``{rank}`` and sums and products with it stand for this process's number, ``{a|b}`` for a on
    rank 0 and b on rank 1."""
    launcher = find_launcher()
    rank = launcher.rank if launcher else 0
    values = {"rank": rank, "rank+1": rank + 1, "2*rank": 2 * rank, "2*rank+1": 2 * rank + 1}

    def own(found: re.Match[str]) -> str:
        return found[1].split("|")[rank] if "|" in found[1] else str(values[found[1]])

    words = [re.sub(r"\{([^}]+)\}", own, argument) for argument in sys.argv[1:]]
    if folder := os.environ.get("FOLDER"):
        for place in (place for place, word in enumerate(words[:-1], 1) if word == "--solver"):
            words[place] = str(Path(words[place]).absolute())
        os.chdir(folder.replace("{rank}", str(rank)))
    return words


if __name__ == "__main__":
    signal.alarm(_LONGEST)
    if FAULT.startswith("change "):
        change_a_weight(*map(int, FAULT.split()[1:]))
    if descriptors := os.environ.get("DESCRIPTORS"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))
    if forbidden := os.environ.get("FORBID"):
        sys.modules[forbidden] = None  # type: ignore[assignment]
    if patience := os.environ.get("PATIENCE"):
        local.PATIENCE = float(patience)
    sys.exit(main(arguments()))

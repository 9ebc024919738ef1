"""The options of a training run, from the command line or a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.defaults import COMPRESSIONS, MAX_SKIPPED, SIGNAL_EFFECTS, TIMEOUT
from caffepy.errors import ConfigError
from caffepy.solvers.execution_options import ExecutionOptions

if TYPE_CHECKING:
    from caffepy.config.paths import PathResolver
    from caffepy.proto.caffe_pb2 import SolverParameter


@dataclass
class TrainOptions:
    """One training run, as `P2PManager` takes it.

    Args:
        solver: the solver's prototxt.
        resolve: finds the files that prototxts name.
        devices: numbers of this rank's GPUs, which ranks of one host with the same GPUs divide; None trains on the CPU.
        share_gpus: `devices` are all GPUs that this process sees; some may stay idle where ranks divide them.
        cpu_solvers: solver threads of this rank, on the CPU.
        snapshot: the .solverstate to resume from; rank 0 reads it.
        resume_newest: resume from the newest whole snapshot with the solver's prefix, if rank 0 finds one.
        weights: .caffemodel files to start from; rank 0 reads them.
        per_device_batch: `batch_size` is each device's (BVLC) and not each rank's (NVIDIA).
        keep_going: do not stop at a loss that is not finite.
        timeout: longest wait for another device or rank, in seconds.
        verbose: errors with their traceback.
        sigint_effect: what SIGINT does: stop, snapshot or none.
        sighup_effect: what SIGHUP does.
        sigterm_effect: what SIGTERM does; here stop means: write a snapshot, then stop.
        threads: CPU threads of each solver; None divides the cores among all solvers of the host.
        math: how GPUs multiply, one of backend.MATH_MODES.
        engine: how iterations are run.
        trace: file for a timeline of what every device does; None: none.
        trace_iterations: iterations that it shows; None: a few after the first ones.
        single_rate: images a second of one device that trains alone, to which the report compares; None: not known.
        sync_bn: BatchNorm's statistics are those of all devices' batches together.
        compression: how gradients travel, one of `defaults.COMPRESSIONS`.
        max_skipped: updates left out in a row, because gradients are not finite, after which training ends.
        keep_last: how many of the newest snapshots stay when one is written; 0: all.
        keep_best: an output of a test net: the snapshot with the best value of it stays too; empty: none, see
            `RetentionPolicy`.
        resume_since: the job was started first at this time, in seconds since 1970, and is started again: resume from
            the newest whole snapshot that was written since, or where there is none begin as at first; None: it is not.
        overwrite: replace snapshots of another net that have the solver's prefix, and do not warn of earlier ones.
        callbacks: for the first device's solver of rank 0, see `Solver.add_callback`.
        keeps_trained: leave the trained solver's state in `P2PManager.trained`.
        check_replicas: compare the parameters of all devices every so many iterations; 0: at snapshots alone.
    """

    solver: SolverParameter
    resolve: PathResolver | None = None
    devices: list[int] | None = None
    cpu_solvers: int = 1
    snapshot: Path | None = None
    weights: list[Path] = field(default_factory=list)
    per_device_batch: bool = False
    keep_going: bool = False
    timeout: float = TIMEOUT
    verbose: bool = False
    sigint_effect: str = "stop"
    sighup_effect: str = "snapshot"
    sigterm_effect: str = "stop"
    threads: int | None = None
    math: str = "tf32"
    engine: ExecutionOptions = field(default_factory=ExecutionOptions)
    sync_bn: bool = False
    compression: str = "none"
    max_skipped: int = MAX_SKIPPED
    share_gpus: bool = False
    trace: Path | None = None
    trace_iterations: range | None = None
    single_rate: float | None = None
    resume_newest: bool = False
    resume_since: float | None = None
    check_replicas: int = 0
    keep_last: int = 0
    keep_best: str = ""
    overwrite: bool = False
    callbacks: Sequence[Any] = ()
    keeps_trained: bool = False

    @property
    def local_devices(self) -> list[int | None]:
        """One entry for each solver thread of this rank: a GPU's number, or None for the CPU."""
        return [None] * self.cpu_solvers if self.devices is None else list(self.devices)

    def check(self) -> None:
        """Refuse options that are invalid.

        Raises:
            ConfigError: no devices, a GPU named twice, an effect that is not known, a timeout that is not positive,
                a compression that is not known, max_skipped below 1, a negative interval or number of snapshots.
        """
        if not self.local_devices:
            raise ConfigError("there is nothing to train on: name at least one GPU, or one CPU solver")
        named = self.devices or []
        for device in named:
            if named.count(device) > 1:
                raise ConfigError(f"GPU {device} is named twice in {named}: each solver needs a GPU of its own")
        if not self.timeout > 0:
            raise ConfigError(f"timeout is {self.timeout}; it must be a positive number of seconds")
        if self.max_skipped < 1:
            raise ConfigError(f"max_skipped is {self.max_skipped}; it must be at least 1")
        if self.check_replicas < 0:
            raise ConfigError(f"check_replicas is {self.check_replicas}; it must be a number of iterations, or 0")
        if self.keep_last < 0:
            raise ConfigError(f"keep_last is {self.keep_last}; it must be a number of snapshots, or 0 for all")
        if self.compression not in COMPRESSIONS:
            raise ConfigError(f"unknown compression '{self.compression}'; known: {', '.join(COMPRESSIONS)}")
        for effect in (self.sigint_effect, self.sighup_effect, self.sigterm_effect):
            if effect not in SIGNAL_EFFECTS:
                raise ConfigError(f"a signal cannot have the effect '{effect}'; known: {', '.join(SIGNAL_EFFECTS)}")


OptionsSource = Callable[[], TrainOptions]
"""Makes the options; called on every rank after they have joined, so that an error they all find is reported once."""

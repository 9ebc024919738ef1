"""The options of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caffepy.errors import ConfigError
from caffepy.training.callbacks.loggers import logger_list
from caffepy.utils.options import (
    KEEP_GROUP,
    MATH,
    MATH_MODES,
    MAX_SKIPPED,
    TIMEOUT,
    ExecutionOptions,
    RetentionPolicy,
    assignment,
    check_values,
    decay,
    file_list,
    file_name,
    gpus_option,
    iteration_range,
    level,
    name_list,
    natural,
    option,
    positive,
    positive_number,
    positive_seconds,
    score_and_patience,
    snapshot_name,
    switch,
)

if TYPE_CHECKING:
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto.caffe_pb2 import SolverParameter

DTYPES = ("FLOAT", "FLOAT16", "BFLOAT16")
"""Values of --dtype, as the schema names them."""
_SIGNAL_EFFECTS = ("stop", "snapshot", "none")
_CONFIGURE = "fields of solver and net"
_START = "where to start"
DEVICES = "devices"
_TRIALS = "trials and when to stop"
_TRACE = "seeing what it does"
_SIGNALS = "signals"
_LIMITS = "checks and limits"


@dataclass(kw_only=True)
class TrainSettings:
    """What a command line or a program may choose about a training, except for its devices."""

    set: list[str] = option(
        "set a field of the solver or, with net. before it, of the net, as its prototxt would: base_lr=0.01, "
        "net.layer[conv1].convolution_param.num_output=64; may be given several times",
        assignment,
        "FIELD=VALUE",
        default=[],
        group=_CONFIGURE,
        per_rank=True,
        repeatable=True,
    )
    max_iter: int | None = option("max_iter instead of the solver's", natural, group=_CONFIGURE, per_rank=True)
    seed: int | None = option("random_seed instead of the solver's", natural, group=_CONFIGURE, per_rank=True)
    dtype: str | None = option(
        "precision of layers that do not give their own: the net's default_forward_type and default_backward_type",
        choices=DTYPES,
        group=_CONFIGURE,
        per_rank=True,
    )
    snapshot: Path | None = option(
        ".solverstate to resume from, or 'auto' for the newest whole one; rank 0 reads it",
        snapshot_name,
        group=_START,
        per_rank=True,
    )
    weights: list[Path] = option(
        ".caffemodel files to start from, with commas, later ones over earlier ones; rank 0 reads them",
        file_list,
        default=[],
        group=_START,
        per_rank=True,
    )
    threads: int | None = option(
        "CPU threads a solver may use (default: all it can get)", positive, group=DEVICES, per_rank=True
    )
    math: str = option(
        "how GPUs multiply in FLOAT: on tensor cores, factors rounded to 10 bits (tf32), or fully (fp32)",
        default=MATH,
        choices=MATH_MODES,
        group=DEVICES,
    )
    cpu_solvers: int = option("solver threads of a CPU process", positive, default=1, group=DEVICES)
    batch: str = option(
        "batch_size is divided among a rank's devices, as in NVIDIA Caffe (per-rank), or is each device's, as in BVLC "
        "Caffe (per-device)",
        default="per-rank",
        choices=("per-rank", "per-device"),
        group=DEVICES,
    )
    sync_bn: bool = switch("BatchNorm takes its statistics from all devices' batches together", group=DEVICES)
    compression: str = option(
        "send gradients as float16 or bfloat16: half the bytes, for networks that are slow",
        default="none",
        choices=("none", "fp16", "bf16"),
        group=DEVICES,
    )
    engine: ExecutionOptions = field(default_factory=ExecutionOptions)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    overwrite: bool = switch(
        "replace earlier snapshots with this prefix, also of another net, and files with the names of the saved "
        "solver, --trace and --lr-find",
        group=KEEP_GROUP,
    )
    check_only: bool = switch(
        "build the nets, read the first batch, make one iteration and a short test, check memory and the snapshots' "
        "folder, and stop without writing anything",
        flags=("--check",),
        group=_TRIALS,
    )
    lr_find: Path | None = option(
        "instead of training: raise the learning rate from 1e-6 to 10 in 200 or --max-iter iterations and draw the "
        "loss over it to FILE.png, .svg or .pdf",
        file_name,
        group=_TRIALS,
        per_rank=True,
    )
    ema: float = option(
        "average the parameters over iterations with this decay, such as 0.9999; tests score the average, and each "
        "snapshot has it as PREFIX_iter_N.ema.caffemodel",
        decay,
        "DECAY",
        default=0.0,
        group=_TRIALS,
    )
    early_stop: str | None = option(
        "stop when SCORE, an output of a test net or 'loss', has not become better in PATIENCE tests in a row",
        score_and_patience,
        "SCORE:PATIENCE",
        group=_TRIALS,
    )
    overfit_batches: int = option(
        "train on the first N batches over and over: a net that can learn reaches a loss near 0",
        positive,
        default=0,
        group=_TRIALS,
    )
    loggers: list[Any] = option(
        "write losses, scores, rates and speed at each display and test: csv:FILE, jsonl:FILE, tensorboard:DIR, "
        "wandb:PROJECT, mlflow:URI, divided by commas; in Python also objects",
        logger_list,
        "LIST",
        default=[],
        flags=("--log",),
        group=_TRACE,
        per_rank=True,
    )
    log_histograms: int = option(
        "with --log: histograms of parameters and gradients every N iterations", positive, default=0, group=_TRACE
    )
    trace: Path | None = option(
        "write a timeline of all devices, for https://ui.perfetto.dev", file_name, group=_TRACE, per_rank=True
    )
    trace_iterations: range | None = option(
        "iterations of the timeline, the last not included (default: ten, after the first five)",
        iteration_range,
        "A:B",
        group=_TRACE,
    )
    single_rate: float | None = option(
        "images a second of one device alone, for the report's scaling (default: estimated without the waits)",
        positive_number,
        "IMG_S",
        group=_TRACE,
        per_rank=True,
    )
    level: int | None = option("the net's level, for include and exclude rules", level)
    stage: list[str] = option("the net's stages, divided by commas", name_list, default=[])
    sigint_effect: str = option(
        "what SIGINT does", default="stop", choices=_SIGNAL_EFFECTS, group=_SIGNALS, per_rank=True
    )
    sighup_effect: str = option(
        "what SIGHUP does", default="snapshot", choices=_SIGNAL_EFFECTS, group=_SIGNALS, per_rank=True
    )
    sigterm_effect: str = option(
        "what SIGTERM does", default="stop", choices=_SIGNAL_EFFECTS, group=_SIGNALS, per_rank=True
    )
    check_replicas: int = option(
        "compare the parameters of all devices every N iterations, not only at each snapshot",
        positive,
        default=0,
        group=_LIMITS,
    )
    keep_going: bool = switch("go on when the loss is not finite", group=_LIMITS)
    max_skipped: int = option(
        "updates skipped in a row, because gradients are not finite, that end training",
        positive,
        default=MAX_SKIPPED,
        group=_LIMITS,
    )
    timeout: float = option("longest wait for another device or rank", positive_seconds, default=TIMEOUT, group=_LIMITS)

    @property
    def assignments(self) -> list[str]:
        """What `set`, `max_iter`, `seed` and `dtype` set, as `caffepy.formats.assign` takes it."""
        given = [("max_iter", self.max_iter), ("random_seed", self.seed)]
        types = [(f"net.default_{way}_type", self.dtype) for way in ("forward", "backward")]
        return [*self.set, *(f"{name}={value}" for name, value in (*given, *types) if value is not None)]


@dataclass
class TrainOptions(TrainSettings):
    """One training run, as `P2PManager` takes it.

    Args:
        solver: the solver's prototxt.
        resolve: finds the files that prototxts name.
        share_gpus: `devices` are all GPUs that this process sees; some may stay idle where ranks divide them.
        resume_newest: resume from the newest whole snapshot with the solver's prefix, if rank 0 finds one.
        resume_since: `caffepy launch` has started the job again, and first at this time, in seconds since 1970: resume
            from the newest whole snapshot written since then, or begin as at first; None: it has not.
        callbacks: for the first device's solver of rank 0, see `Solver.add_callback`.
        keeps_trained: leave the trained solver's state in `P2PManager.trained`.

    All other fields are options.
    """

    solver: SolverParameter
    devices: list[int] | None = gpus_option(
        "GPUs to use: 0 or 0,1,2,3 or 'all', which ranks of one host divide (default: what the solver's "
        "solver_mode says)",
        group=DEVICES,
        per_rank=True,
    )
    verbose: bool = switch("log of every rank, and more of it; tracebacks", flags=(), per_rank=True)
    resolve: PathResolver | None = None
    share_gpus: bool = False
    resume_newest: bool = False
    resume_since: float | None = None
    callbacks: Sequence[Any] = ()
    keeps_trained: bool = False

    @property
    def local_devices(self) -> list[int | None]:
        """One entry for each solver thread of this rank: a GPU's number, or None for the CPU."""
        return [None] * self.cpu_solvers if self.devices is None else list(self.devices)

    def check(self) -> None:
        """Refuse options that are invalid.

        Raises:
            ConfigError: no devices, a GPU named twice, iterations of a trace that is not written, histograms without
                a logger, a learning-rate test with a snapshot or a picture that cannot be drawn, a number or a choice
                that the command line would refuse.
        """
        if not self.local_devices:
            raise ConfigError("there is nothing to train on: name at least one GPU, or one CPU solver")
        named = self.devices or []
        for device in named:
            if named.count(device) > 1:
                raise ConfigError(f"GPU {device} is named twice in {named}: each solver needs a GPU of its own")
        if self.trace_iterations is not None and self.trace is None:
            raise ConfigError("--trace-iterations says what --trace FILE shows; name the file too")
        if self.log_histograms and not self.loggers:
            raise ConfigError("--log-histograms says what --log writes; give --log too, such as --log tensorboard:DIR")
        if self.lr_find is not None:
            if self.snapshot is not None or self.resume_newest:
                raise ConfigError("--lr-find begins with untrained or given weights; give --weights, not --snapshot")
            from caffepy.logs.plot import check_drawing

            check_drawing(self.lr_find)
        if not isinstance(self.trace_iterations, range | None):
            raise ConfigError(f"trace_iterations is {self.trace_iterations!r}; give a range such as range(20, 40)")
        check_values(self)

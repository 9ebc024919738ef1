"""`caffepy train`: train a solver's net, from scratch, from weights or from a snapshot."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy import version
from caffepy.cli.log import raise_once
from caffepy.cli.options import (
    Parser,
    add_convolution_options,
    add_device_options,
    add_dialect_option,
    add_engine_options,
    add_state_options,
    file_list,
    file_name,
    iteration_range,
    positive,
    positive_number,
    positive_seconds,
    snapshot_name,
)
from caffepy.defaults import COMPRESSIONS, MAX_SKIPPED, SIGNAL_EFFECTS, TIMEOUT
from caffepy.errors import ConfigError

if TYPE_CHECKING:
    from caffepy.parallel.options import TrainOptions
    from caffepy.proto.caffe_pb2 import SolverParameter

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Train the net that a solver prototxt names.

  caffepy train --solver models/lenet/solver.prototxt --cpu
  caffepy train --solver solver.prototxt --gpus 0,1
  mpirun -np 2 caffepy train --solver solver.prototxt --gpus 0,1,2,3   # ranks of one host divide the list
  caffepy train --solver solver.prototxt --snapshot auto"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("train", help="train or finetune a model", description=_DESCRIPTION)
    parser.add_argument("--solver", type=file_name, metavar="FILE", help="the solver's prototxt (needed)")
    parser.add_argument(
        "--from-log", type=file_name, metavar="FILE", help="instead: the log of a training, with its solver and net"
    )
    _add_start_options(parser)
    _add_device_options(parser)
    _add_engine_options(parser)
    _add_keep_options(parser)
    _add_trace_options(parser)
    add_state_options(parser)
    add_dialect_option(parser)
    _add_run_options(parser)


def _add_start_options(parser: Parser) -> None:
    start = parser.add_argument_group("where to start")
    start.add_argument(
        "--snapshot",
        type=snapshot_name,
        metavar="FILE",
        help=".solverstate to resume from, or 'auto' for the newest whole one",
    )
    start.add_argument(
        "--weights", type=file_list, default=[], metavar="LIST", help=".caffemodel files to start from, with commas"
    )


def _add_device_options(parser: Parser) -> None:
    devices = parser.add_argument_group("devices")
    add_device_options(devices, "which ranks of one host divide; default: what the solver's solver_mode says")
    devices.add_argument(
        "--cpu-solvers", type=positive, default=1, metavar="N", help="solver threads of a CPU process (1)"
    )
    devices.add_argument(
        "--batch",
        choices=("per-rank", "per-device"),
        default="per-rank",
        help="batch_size is divided among a rank's devices, as in NVIDIA Caffe (default), or is each device's (BVLC)",
    )
    devices.add_argument(
        "--sync-bn", action="store_true", help="BatchNorm takes its statistics from all devices' batches together"
    )
    devices.add_argument(
        "--compression",
        choices=COMPRESSIONS,
        default="none",
        help="send gradients as float16 or bfloat16: half the bytes, for networks that are slow (default: none)",
    )


def _add_engine_options(parser: Parser) -> None:
    engine = parser.add_argument_group("GPU engine")
    add_engine_options(engine)
    add_convolution_options(engine)


def _add_keep_options(parser: Parser) -> None:
    keeping = parser.add_argument_group("which snapshots stay")
    keeping.add_argument(
        "--keep-last", type=positive, default=0, metavar="K", help="the K newest with this prefix (default: all)"
    )
    keeping.add_argument(
        "--keep-best",
        default="",
        metavar="SCORE",
        help="besides these (K is 1 where not given) the one with the best SCORE, an output of a test net or 'loss'",
    )
    keeping.add_argument(
        "--overwrite", action="store_true", help="replace earlier snapshots with this prefix, also of another net"
    )


def _add_trace_options(parser: Parser) -> None:
    seeing = parser.add_argument_group("seeing what it does")
    seeing.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a timeline of all devices, for https://ui.perfetto.dev"
    )
    seeing.add_argument(
        "--trace-iterations",
        type=iteration_range,
        metavar="A:B",
        help="iterations of the timeline, the last not included (default: ten, after the first five)",
    )
    seeing.add_argument(
        "--single-rate",
        type=positive_number,
        metavar="IMG_S",
        help="images a second of one device alone, for the report's scaling (default: as if nobody waited for others)",
    )


def _add_run_options(parser: Parser) -> None:
    """Options without a group: signals, checks and limits."""
    for name, effect in (("sigint", "stop"), ("sighup", "snapshot"), ("sigterm", "stop")):
        parser.add_argument(
            f"--{name}-effect",
            choices=SIGNAL_EFFECTS,
            default=effect,
            help=f"what {name.upper()} does (default: {effect})",
        )
    parser.add_argument(
        "--check-replicas",
        type=positive,
        default=0,
        metavar="N",
        help="compare the parameters of all devices every N iterations (default: at each snapshot)",
    )
    parser.add_argument("--keep-going", action="store_true", help="go on when the loss is not finite")
    parser.add_argument(
        "--max-skipped",
        type=positive,
        default=MAX_SKIPPED,
        metavar="N",
        help="updates skipped in a row, because gradients are not finite, that end training (%(default)d)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=TIMEOUT,
        metavar="SECONDS",
        help="longest wait for another rank (%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Train to the end, or until a signal stops it.

    Raises:
        ConfigError: options that do not go together.
        CaffepyError: whatever is wrong with the files, the data or the devices.
    """
    try:
        _check_options(args)
    except ConfigError as error:
        raise_once(error)
    if args.gpus is not None:
        _preload_cuda(args.gpus)
    from caffepy.parallel.p2p_manager import P2PManager
    from caffepy.progress import progress_bar

    made: list[TrainOptions] = []

    def options() -> TrainOptions:
        made.append(_options(args))
        return made[0]

    command = shlex.join(["caffepy", *args.arguments])
    logger.info("caffepy %s, Python %s: %s", version.__version__, platform.python_version(), command)
    manager = P2PManager(options)
    with progress_bar(lambda: manager.iteration, lambda: made[0].solver.max_iter):
        manager.run()
    _say_how_to_resume(args, made[0].solver, manager.iteration)
    return 0


def _preload_cuda(gpus: list[int] | str) -> None:
    """Start CUDA beside the imports; its driver alone where it is not known yet which GPUs this process takes."""
    from caffepy.parallel.processes.launcher import find_launcher
    from caffepy.training.devices import preload_cuda

    preload_cuda([] if isinstance(gpus, str) or find_launcher() is not None else gpus)


def _options(args: argparse.Namespace) -> TrainOptions:
    from caffepy.cli.devices import shares_gpus, train_devices
    from caffepy.config.paths import PathResolver
    from caffepy.parallel.options import TrainOptions
    from caffepy.proto import caffe_pb2
    from caffepy.solvers.execution_options import ExecutionOptions
    from caffepy.training.prepare import first_launch_time, prepare_solver

    param = _read_solver(args)
    prepare_solver(param, str(args.solver), bool(args.weights or args.snapshot), args.level, args.stage)
    gpu_mode = param.solver_mode == caffe_pb2.SolverParameter.GPU
    if gpu_mode and args.gpus is None and not args.cpu:
        _preload_cuda([param.device_id])
    resolve = PathResolver(args.solver)
    return TrainOptions(
        solver=param,
        resolve=resolve,
        devices=train_devices(args, gpu_mode, param.device_id, str(args.solver)),
        share_gpus=shares_gpus(args, gpu_mode),
        cpu_solvers=args.cpu_solvers,
        snapshot=Path(args.snapshot) if args.snapshot and args.snapshot != "auto" else None,
        resume_newest=args.snapshot == "auto",
        resume_since=first_launch_time(),
        weights=args.weights,
        per_device_batch=args.batch == "per-device",
        keep_going=args.keep_going,
        check_replicas=args.check_replicas,
        keep_last=args.keep_last,
        keep_best=args.keep_best,
        overwrite=args.overwrite,
        timeout=args.timeout,
        verbose=args.verbose,
        sigint_effect=args.sigint_effect,
        sighup_effect=args.sighup_effect,
        sigterm_effect=args.sigterm_effect,
        threads=args.threads,
        math=args.math,
        sync_bn=args.sync_bn,
        compression=args.compression,
        max_skipped=args.max_skipped,
        trace=args.trace,
        trace_iterations=args.trace_iterations,
        single_rate=args.single_rate,
        engine=ExecutionOptions(
            args.eager,
            fuse=not args.no_fuse,
            share=not args.no_share,
            autotune=args.autotune,
            deterministic=args.deterministic,
        ),
    )


def _read_solver(args: argparse.Namespace) -> SolverParameter:
    """The solver of --solver, or of --from-log; then `args.solver` becomes the file that it came from."""
    from caffepy.config.load import read_solver
    from caffepy.config.run_log import read_logged_solver

    if args.from_log is None:
        return read_solver(args.solver)
    param, folder = read_logged_solver(args.from_log)
    args.solver = folder / "solver.prototxt"
    return param


def _check_options(args: argparse.Namespace) -> None:
    if args.solver is not None and args.from_log is not None:
        raise ConfigError(
            "--solver and --from-log exclude each other: a log has its solver in it; leave one of them out"
        )
    if args.solver is None and args.from_log is None:
        raise ConfigError("train needs a solver: caffepy train --solver solver.prototxt")
    if args.snapshot and args.weights:
        raise ConfigError(
            "--snapshot and --weights exclude each other: a snapshot brings its own weights; leave one of them out"
        )
    if args.trace_iterations is not None and args.trace is None:
        raise ConfigError("--trace-iterations says what --trace FILE shows; name the file too")
    if args.gpus is not None and args.cpu_solvers > 1:
        raise ConfigError("--cpu-solvers is for training on the CPU; with --gpu there is one solver a GPU")


def _say_how_to_resume(args: argparse.Namespace, param: SolverParameter, iteration: int) -> None:
    from caffepy.config.paths import PathResolver
    from caffepy.parallel.launch.run import LINE
    from caffepy.parallel.processes.launcher import find_launcher
    from caffepy.proto import caffe_pb2
    from caffepy.snapshot.files import snapshot_names

    hdf5 = param.snapshot_format == caffe_pb2.SolverParameter.HDF5
    output = PathResolver(args.solver).output
    weights, state = map(output, snapshot_names(param.snapshot_prefix, iteration, hdf5))
    if iteration >= param.max_iter:
        where = f"; its weights: {weights}" if weights.exists() else ""
        logger.info("Training is finished: iteration %d is max_iter%s", iteration, where)
        return
    if not state.exists():
        return
    command = shlex.join(resuming(args.arguments, state))
    launcher = find_launcher()
    start = f"{launcher.again} caffepy" if launcher and launcher.again else "caffepy"
    logger.info("To go on from here: %s %s", os.environ.get(LINE) or start, command)


def resuming(arguments: Sequence[str], state: Path) -> list[str]:
    """The arguments that go on from a snapshot: those that were given, in `normalise`'s spelling, with `--snapshot`.

    `--weights` is left out, because a snapshot brings its own.
    """
    result: list[str] = []
    given = iter(arguments)
    for argument in given:
        name, equals, _ = argument.partition("=")
        if name not in ("--snapshot", "--weights"):
            result.append(argument)
        elif not equals:
            next(given, None)
    return [*result, "--snapshot", str(state)]

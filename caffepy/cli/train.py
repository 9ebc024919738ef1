"""`caffepy train`: train a solver's net, from scratch, from weights or from a snapshot."""

from __future__ import annotations

import logging
import os
import platform
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy import version
from caffepy.cli.options import DialectOption, GpuOptions, ReadsNets
from caffepy.cli.output import raise_once
from caffepy.errors import ConfigError
from caffepy.training.options import DEVICES, TrainOptions, TrainSettings
from caffepy.utils.options import file_name, option, same_option

if TYPE_CHECKING:
    from caffepy.cli.screen import TrainingScreen
    from caffepy.formats.proto.caffe_pb2 import SolverParameter

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainCommand(TrainSettings, GpuOptions, DialectOption, ReadsNets):
    """Train or finetune a model.

    Train the net that a solver prototxt names.

      caffepy train --solver models/lenet/solver.prototxt --cpu
      caffepy train --solver solver.prototxt --gpus 0,1
      mpirun -np 2 caffepy train --solver solver.prototxt --gpus 0,1,2,3   # ranks of one host divide the list
      caffepy train --solver solver.prototxt --snapshot auto
    """

    solver: Path | None = option("the solver's prototxt (needed)", file_name)
    from_log: Path | None = option("instead of --solver: a training log, which contains solver and net", file_name)
    gpus: list[int] | str | None = same_option(TrainOptions, "devices", group=DEVICES)
    cpu: bool = same_option(GpuOptions, "cpu", group=DEVICES)

    def run(self) -> int:
        """Train to the end, or until a signal stops it.

        Raises:
            ConfigError: the options conflict.
            CaffepyError: files, data or devices cannot be used.
        """
        try:
            _check_options(self)
        except ConfigError as error:
            raise_once(error)
        if self.gpus is not None:
            _preload_cuda(self.gpus)
        from caffepy.cli.screen import open_terminal

        terminal = None if self.verbose else open_terminal()
        if terminal is None:
            _train(self, None)
            return 0
        from caffepy.cli.screen import TrainingScreen

        file = self.solver or self.from_log
        assert file is not None
        with TrainingScreen(terminal, file) as screen:
            _train(self, screen)
        return 0


def _train(args: TrainCommand, screen: TrainingScreen | None) -> None:
    from caffepy.training.p2p_manager import P2PManager
    from caffepy.utils.progress import progress_bar

    made: list[TrainOptions] = []

    def options() -> TrainOptions:
        made.append(make_options(args))
        if screen is not None:
            screen.read(made[0])
        return made[0]

    command = shlex.join(["caffepy", *args.arguments])
    logger.info("caffepy %s, Python %s: %s", version.__version__, platform.python_version(), command)
    manager = P2PManager(options, None if screen is None else screen.begin)
    bar = progress_bar(lambda: manager.iteration, lambda: made[0].solver.max_iter) if screen is None else nullcontext()
    with bar:
        manager.run()
    if screen is not None:
        screen.end()
    if not made[0].check_only and made[0].lr_find is None:
        _say_how_to_resume(args, made[0].solver, manager.iteration)


def _preload_cuda(gpus: list[int] | str) -> None:
    """Start CUDA during the imports; only the driver if this process's GPUs are not known yet."""
    from caffepy.distributed.processes.launcher import find_launcher
    from caffepy.training.devices import preload_cuda

    preload_cuda([] if isinstance(gpus, str) or find_launcher() is not None else gpus)


def make_options(args: TrainCommand) -> TrainOptions:
    """Return the options of the training that the command line describes.

    Raises:
        CaffepyError: the solver or the devices are invalid.
    """
    from caffepy.cli.nets import shares_gpus, train_devices
    from caffepy.formats.proto import caffe_pb2
    from caffepy.training.prepare import configure, train_options

    param, values = _read_solver(args), args.given_values(TrainOptions)
    configure(param, args.solver, values)
    gpu_mode = param.solver_mode == caffe_pb2.SolverParameter.GPU
    if gpu_mode and args.gpus is None and not args.cpu:
        _preload_cuda(list(param.device_ids) or [param.device_id])
    values["devices"] = train_devices(args, gpu_mode, param, str(args.solver))
    return train_options(param, args.solver, values, share_gpus=shares_gpus(args, gpu_mode))


def _read_solver(args: TrainCommand) -> SolverParameter:
    """Return the solver of --solver or --from-log. With --from-log, set `args.solver` to the original file."""
    from caffepy.formats.load import read_solver
    from caffepy.formats.logged_solver import read_logged_solver

    if args.from_log is not None:
        param, folder = read_logged_solver(args.from_log)
        args.solver = folder / "solver.prototxt"
        return param
    assert args.solver is not None
    return read_solver(args.solver)


def _check_options(args: TrainCommand) -> None:
    if args.solver is not None and args.from_log is not None:
        raise ConfigError(
            "--solver and --from-log exclude each other: a log contains its solver; leave one of them out"
        )
    if args.solver is None and args.from_log is None:
        raise ConfigError("train needs a solver: caffepy train --solver solver.prototxt")
    if args.snapshot and args.weights:
        raise ConfigError(
            "--snapshot and --weights exclude each other: a snapshot brings its own weights; leave one of them out"
        )
    if args.gpus is not None and args.cpu_solvers > 1:
        raise ConfigError("--cpu-solvers is for training on the CPU; with --gpu there is one solver per GPU")


def _say_how_to_resume(args: TrainCommand, param: SolverParameter, iteration: int) -> None:
    from caffepy.distributed.launch.run import LINE
    from caffepy.distributed.processes.launcher import find_launcher
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto import caffe_pb2
    from caffepy.formats.snapshot_files import snapshot_names

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
    logger.info("To resume training: %s %s", os.environ.get(LINE) or start, command)


def resuming(arguments: Sequence[str], state: Path) -> list[str]:
    """Return the arguments that resume from a snapshot: the original ones in `normalise`'s spelling and `--snapshot`.

    `--weights` is removed, because a snapshot contains weights.
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

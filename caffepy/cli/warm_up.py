"""`caffepy warm-up`: run a net once without its data, to fill the caches of compiled kernels and tuned layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import NetDeviceOptions, ReadsNets, devices_option
from caffepy.errors import ConfigError
from caffepy.training.options import TrainOptions, TrainSettings
from caffepy.utils.options import file_name, option, record_shape, same_option

if TYPE_CHECKING:
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto.caffe_pb2 import SolverParameter

logger = logging.getLogger(__name__)

PASSES = 16
"""Forward passes of a model: the first passes run eagerly, later ones as graphs."""


@dataclass(kw_only=True)
class WarmUpCommand(NetDeviceOptions, ReadsNets):
    """Compile and tune before the first run.

    Fill the caches of compiled kernels and tuned convolutions, for container images and shared machines: run one
    iteration of a solver's training with its tests, or forward passes of a model, on synthetic data.

      caffepy warm-up --solver solver.prototxt --gpus 0
      caffepy warm-up --model deploy.prototxt --cpu

    Use the same devices, shapes and precision options as later commands.
    """

    solver: Path | None = option("a solver's prototxt: train one iteration", file_name)
    model: Path | None = option("or a net's prototxt: run it forward", file_name)
    shape: tuple[int, ...] | None = option("shape of one record, if the data are missing", record_shape)
    gpus: list[int] | str | None = devices_option("default: the solver's solver_mode; for a model the CPU")
    batch: str = same_option(TrainSettings, "batch")
    autotune: bool = same_option(TrainSettings, "autotune")
    deterministic: bool = same_option(TrainSettings, "deterministic")

    def run(self) -> int:
        """Run the solver or the model once.

        Raises:
            ConfigError: neither or both of --solver and --model.
            CaffepyError: files or devices cannot be used.
        """
        if (self.solver is None) == (self.model is None):
            raise ConfigError("warm-up needs either --solver or --model: caffepy warm-up --solver solver.prototxt")
        if self.solver is not None:
            _train(self, self.solver)
        elif self.model is not None:
            _predict(self, self.model)
        from caffepy.utils.caches import cache_folder

        logger.info("Later starts of this version on this machine use the caches in %s", cache_folder() or "no folder")
        return 0


def _train(args: WarmUpCommand, solver: Path) -> None:
    from caffepy.training.p2p_manager import P2PManager

    P2PManager(lambda: _train_options(args, solver)).run()


def _train_options(args: WarmUpCommand, solver: Path) -> TrainOptions:
    from caffepy.cli.nets import shares_gpus, train_devices
    from caffepy.formats.load import read_solver
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto.caffe_pb2 import SolverParameter
    from caffepy.training.prepare import train_options

    param = read_solver(solver)
    gpu_mode = param.solver_mode == SolverParameter.GPU
    values = args.given_values(TrainOptions)
    values["devices"] = train_devices(args, gpu_mode, param, str(solver))
    options = train_options(param, solver, values, share_gpus=shares_gpus(args, gpu_mode), keep_going=True)
    del param.weights[:]
    _leave_out_data(
        param, args.shape, PathResolver(solver), 1 if options.batch == "per-device" else len(options.devices or [None])
    )
    return replace(options, resume_since=None)


def _leave_out_data(param: SolverParameter, shape: tuple[int, ...] | None, resolve: PathResolver, devices: int) -> None:
    """Limit a solver to one iteration and one pass of each test net on synthetic data, without snapshots."""
    from caffepy.backend.meta import MetaBackend
    from caffepy.cli.nets import record_shapes
    from caffepy.layers import LayerContext
    from caffepy.net.record_shape import without_data
    from caffepy.training.net_factory import NetFactory

    factory = NetFactory(param, LayerContext(MetaBackend(), resolve=resolve))
    train, *tests = [
        without_data(net, record_shapes(net, context, state, shape, logger.info), count, filler="gaussian")
        for count, (net, context, state) in [
            (devices, factory.train_setup()),
            *((1, setup) for setup in factory.test_setups()),
        ]
    ]
    for field in (
        "net",
        "net_param",
        "train_net",
        "train_net_param",
        "test_net",
        "test_net_param",
        "test_iter",
        "snapshot",
        "display",
        "test_and_snapshot_last_epochs",
    ):
        param.ClearField(field)
    param.train_net_param.CopyFrom(train)
    param.test_net_param.extend(tests)
    param.test_iter.extend(1 for _ in tests)
    param.test_interval, param.test_initialization = (1 if tests else 0), False
    param.max_iter, param.snapshot_after_train = 1, False


def _predict(args: WarmUpCommand, path: Path) -> None:
    import numpy as np

    from caffepy.backend import create_backend
    from caffepy.backend.meta import MetaBackend
    from caffepy.cli.nets import net_and_state, record_shapes, refuse_net_without_layers
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto import caffe_pb2
    from caffepy.infer.model import Model
    from caffepy.layers import LayerContext
    from caffepy.net.record_shape import without_data
    from caffepy.training.devices import check_gpus

    param, state = net_and_state(path, args, caffe_pb2.TEST)
    refuse_net_without_layers(path, param, state)
    context = LayerContext(MetaBackend(), phase=caffe_pb2.TEST, resolve=PathResolver(path))
    shapes = record_shapes(param, context, state, args.shape, logger.info)
    param = without_data(param, shapes, as_inputs=True)
    param.state.CopyFrom(state)
    for device in check_gpus(args.gpus) if args.gpus is not None else [None]:
        backend = create_backend(device, args.threads, args.math, args.autotune, args.deterministic)
        try:
            model = Model(param, LayerContext(backend, phase=caffe_pb2.TEST, resolve=PathResolver(path)), [])
            for _ in range(PASSES):
                model(**{name: np.zeros(shape, np.float32) for name, shape in model.inputs.items()})
            model.close()
        finally:
            backend.close()

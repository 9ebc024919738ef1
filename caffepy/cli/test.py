"""Commands that measure a net: `caffepy test` and `caffepy test_detection` its scores, `caffepy time` its speed.

The scores are those of a trained model over a number of batches. `time` shows the average forward and backward
milliseconds of each layer, or the speed of the data layers alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from caffepy.cli.options import NetDeviceOptions, ReadsNets, devices_option, engine_option
from caffepy.errors import ConfigError
from caffepy.logs.performance_report import format_stages
from caffepy.training.options import TrainSettings
from caffepy.utils.options import ExecutionOptions, file_list, file_name, option, positive, same_option, switch

if TYPE_CHECKING:
    from caffepy.backend import Backend
    from caffepy.data.sharding import Shard
    from caffepy.distributed.processes.world import World
    from caffepy.formats.proto.caffe_pb2 import NetParameter, NetState
    from caffepy.infer.onnx_engine import RuntimeExecutor
    from caffepy.net import Net
    from caffepy.net.executor import ForwardExecutor
    from caffepy.net.timing import DataTimes, Times
    from caffepy.training.evaluate_model import ScoringOptions


logger = logging.getLogger(__name__)


# -- `caffepy test` and `caffepy test_detection` -------------------------------------------------------


@dataclass(kw_only=True)
class TestCommand(NetDeviceOptions, ReadsNets):
    """Score a model.

    Run a net's TEST phase and print each batch's scores and their mean.
    """

    model: Path | None = option("the net's prototxt (needed)", file_name)
    weights: list[Path] = option(".caffemodel files, separated by commas (needed)", file_list, default=[])
    iterations: int = option("batches to score", positive, default=50)
    ap_version: str = option(
        "average precision of detections", default="11point", choices=("11point", "101point", "MaxIntegral", "Integral")
    )
    show_per_class_result: bool = switch("print the average precision of each class", default=True, gflags=True)
    gpus: list[int] | str | None = devices_option("each batch is scored by one of them; default: the CPU")
    cpu_solvers: int = same_option(TrainSettings, "cpu_solvers")
    timeout: float = same_option(TrainSettings, "timeout")
    eager: bool = same_option(ExecutionOptions, "eager")
    fuse: bool = same_option(ExecutionOptions, "fuse")
    share: bool = same_option(ExecutionOptions, "share")
    engine: str = engine_option()

    detection: ClassVar[bool] = False

    def run(self) -> int:
        """Score the model, by its DetectionEvaluate layers if `detection` is set.

        Raises:
            ConfigError: no --model or no --weights; an engine that cannot compute the net.
            MissingExtraError: the engine is not installed.
            CaffepyError: files, data or device cannot be used.
        """
        from caffepy.distributed.processes.launcher import refuse_foreign_launcher
        from caffepy.distributed.processes.world import create_world
        from caffepy.training.evaluate_model import score_on_all_devices

        with create_world() as world:
            world.run_on_all(lambda: refuse_foreign_launcher(world.rank, world.size))
            score_on_all_devices(world, _options(self, world))
        return 0


class TestDetectionCommand(TestCommand):
    """Score a model by mean average precision.

    Run a net's TEST phase and print the mean average precision of its DetectionEvaluate layers.
    """

    detection = True


def _options(args: TestCommand, world: World) -> ScoringOptions:
    from caffepy.cli.nets import net_and_state, refuse_net_without_layers
    from caffepy.distributed.placement import assign_gpus
    from caffepy.formats.proto import caffe_pb2
    from caffepy.infer.onnx_engine import wants_runtime
    from caffepy.training.devices import check_gpus
    from caffepy.training.evaluate_model import ScoringOptions

    name = "test_detection" if args.detection else "test"

    def prepare() -> tuple[NetParameter, NetState, bool, list[int] | None]:
        if args.model is None:
            raise ConfigError(f"{name} needs a net: --model train_val.prototxt --weights net.caffemodel")
        if not args.weights:
            raise ConfigError(f"{name} needs trained weights: --weights net.caffemodel")
        by_runtime = wants_runtime(args.engine, not args.gpus)
        param, state = net_and_state(args.model, args, caffe_pb2.TEST)
        refuse_net_without_layers(args.model, param, state)
        return param, state, by_runtime, None if args.gpus is None else check_gpus(args.gpus)

    param, state, by_runtime, found = world.run_on_all(prepare)
    gpus = assign_gpus(world, found, named=True)
    if gpus is None:
        logger.info("Use CPU.")
    else:
        logger.info("Use GPU with device ID %s", ", ".join(map(str, gpus)))
    return ScoringOptions(
        partial(_make_executor, args, by_runtime, param, state),
        batches=args.iterations,
        devices=[None] * args.cpu_solvers if gpus is None else gpus,
        threads=args.threads,
        math=args.math,
        ap_version=args.ap_version,
        show_classes=args.show_per_class_result,
        detection=args.detection,
        timeout=args.timeout,
    )


def _make_executor(
    args: TestCommand, by_runtime: bool, param: NetParameter, state: NetState, backend: Backend, shard: Shard
) -> ForwardExecutor | RuntimeExecutor:
    from caffepy.cli.nets import read_weights
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext

    resolve = PathResolver(args.model)
    context = LayerContext(
        backend, phase=caffe_pb2.TEST, shard=shard, test_iter=args.iterations, resolve=resolve, timeout=args.timeout
    )
    weights = read_weights(args.weights)
    if by_runtime:
        from caffepy.infer.onnx_engine import RuntimeExecutor
        from caffepy.net import Net

        net = Net(param, context, state)
        try:
            for layers, origin in weights:
                net.copy_trained_layers_from(layers, origin)
            return RuntimeExecutor(net, param, state)
        except BaseException:
            net.close()
            raise
    from caffepy.net.executor import prepare_inference

    fuse, share = args.fuse and not param.debug_info, args.share and not param.debug_info
    return prepare_inference(param, context, state, weights=weights, fuse=fuse, share=share, eager=args.eager)


# -- `caffepy time` ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class TimeCommand(NetDeviceOptions, ReadsNets):
    """Time a model layer by layer.

    Print average forward and backward times of each layer, or with --data how many images a second each data layer
    reads, and the share of each stage.
    """

    model: Path | None = option("the net's prototxt (needed)", file_name)
    phase: str = option("the net's phase", default="TRAIN", choices=("TRAIN", "TEST"))
    iterations: int = option("iterations to average over", positive, default=50)
    weights: list[Path] = option(".caffemodel files to load first", file_list, default=[])
    data: bool = switch("time only the reading of the data layers")

    def run(self) -> int:
        """Time the net.

        Raises:
            ConfigError: no --model, or --data and no layer reads ahead.
            CaffepyError: files, data or device cannot be used.
        """
        if self.model is None:
            raise ConfigError("time needs a net: caffepy time --model train_val.prototxt")
        from caffepy.cli.nets import open_net
        from caffepy.formats.proto import caffe_pb2
        from caffepy.net.timing import measure, measure_data

        with open_net(self.model, self, caffe_pb2.Phase.Value(self.phase), self.iterations, self.weights) as net:
            if self.data:
                _log_data_times(measure_data(net, self.iterations))
                return 0
            _warm_up(net)
            logger.info("*** Benchmark begins ***")
            logger.info("Testing for %d iterations.", self.iterations)
            _log_times(net, measure(net, self.iterations, _log_iteration))
            logger.info("*** Benchmark ends ***")
        return 0


def _log_data_times(times: list[DataTimes]) -> None:
    for layer in times:
        logger.info(
            "%10s\t%.0f images/s (%d batches of %d in %.3g s), %.1f cores used",
            layer.name,
            layer.images_per_second,
            layer.batches,
            layer.batch_size,
            layer.seconds,
            layer.cores,
        )
        if shares := format_stages(layer.stages, sum(layer.stages.values())):
            logger.info("%10s\t%s of the threads' time", layer.name, shares)


def _warm_up(net: Net) -> None:
    """Run one forward and backward pass, so that allocation, tuning and compilation are not timed."""
    logger.info("Performing Forward")
    net.forward()
    logger.info("Initial loss: %.6g", net.loss())
    net.raise_device_errors()
    logger.info("Performing Backward")
    net.clear_param_diffs()
    net.backward()


def _log_iteration(number: int, milliseconds: float) -> None:
    logger.info("Iteration: %d forward-backward time: %.6g ms.", number, milliseconds)


def _log_times(net: Net, times: Times) -> None:
    logger.info("Average time per layer: ")
    for node, (forward, backward) in zip(net.schedule, times.means(), strict=True):
        logger.info("%10s\tforward: %.6g ms.", node.layer.name, forward)
        logger.info("%10s\tbackward: %.6g ms.", node.layer.name, backward)
    logger.info("Average Forward pass: %.6g ms.", fmean(times.forward))
    logger.info("Average Backward pass: %.6g ms.", fmean(times.backward))
    logger.info("Average Forward-Backward: %.6g ms.", times.total / len(times.forward))
    logger.info("Total Time: %.6g ms.", times.total)

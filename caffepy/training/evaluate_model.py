"""Scores a net with all devices of all ranks for `caffepy test`: each batch is scored by one device.

Owns the device threads of a scoring run and the sum of their scores. Imported by `caffepy.cli.test`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from caffepy.backend import Backend, create_backend
from caffepy.data.sharding import Shard
from caffepy.distributed.connect import Connector, DeviceCommunicators
from caffepy.distributed.device_threads import DeviceSpec, DeviceThread, DeviceThreads, bind_rank, device_specs
from caffepy.distributed.failures import Failures
from caffepy.distributed.liveness import Heartbeat, Watchdog
from caffepy.distributed.processes.world import World
from caffepy.distributed.rendezvous import connect_training
from caffepy.errors import AbortedError
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor
from caffepy.training.evaluate import (
    DetectionScores,
    Rows,
    check_detection_outputs,
    detection_outputs,
    gather_rows,
    refuse_changing_outputs,
)
from caffepy.utils.options import MATH, TIMEOUT

if TYPE_CHECKING:
    from caffepy.infer.onnx_engine import RuntimeExecutor

logger = logging.getLogger(__name__)

MakeExecutor = Callable[[Backend, Shard], "ForwardExecutor | RuntimeExecutor"]


@dataclass(frozen=True)
class ScoringOptions:
    """One run of `caffepy test`.

    Args:
        make_executor: builds the net on a device, for its share of the batches.
        batches: batches of the whole test.
        devices: this rank's GPUs; [None]: the CPU.
        threads: CPU threads of a device; None: all that it can get.
        math: how GPUs multiply, see `create_backend`.
        ap_version: how average precision is computed.
        show_classes: log the average precision of each class.
        detection: the outputs must be detections (`caffe test_detection`).
        timeout: longest wait for another device or rank, in seconds.
    """

    make_executor: MakeExecutor
    batches: int
    devices: list[int] | list[None]
    threads: int | None = None
    math: str = MATH
    ap_version: str = "11point"
    show_classes: bool = True
    detection: bool = False
    timeout: float = TIMEOUT


def score_on_all_devices(world: World, options: ScoringOptions) -> None:
    """Score a net and log each batch's scores and their means on the root. Called by all ranks.

    The scores are added in the order of the batches, so the printed numbers do not depend on the number of devices.

    Raises:
        ConfigError: an output has no mean.
        PeerError: another rank has failed.
        CaffepyError: a device of this, the only process, has failed.
    """
    threads: DeviceThreads[_ScoringThread] = DeviceThreads()
    failures = Failures(world, threads)
    world.watch(failures.raise_first)
    on_gpus = options.devices[0] is not None
    specs = device_specs(world, options.devices, bind_rank(world, gpus=on_gpus), options.threads)
    # Scores travel through host memory, also between GPUs.
    communicators = DeviceCommunicators(world, len(specs), on_gpus=False, timeout=options.timeout)

    def on_change(index: int) -> None:
        error = threads[index].error
        if error is not None:
            failures.device_failed(error, f"device {specs[index].label}" if len(specs) > 1 else "")
        threads.changed()

    for spec in specs:
        connect = Connector(partial(communicators.connect, spec.index))
        threads.append(_ScoringThread(spec, options, connect, partial(on_change, spec.index)))
    heartbeats = [thread.heartbeat for thread in threads]
    channel = world.channel or connect_training(world)
    failures.watch(Watchdog(world, channel, heartbeats, options.timeout, failures.peer_failed))
    try:
        threads.start()
        threads.wait(lambda thread: thread.finished.is_set(), world, failures.raise_first)
        failures.raise_first()
    except BaseException as error:
        failures.end(error)
        raise
    finally:
        failures.close()


class _ScoringThread(DeviceThread):
    """Scores one device's share of the batches.

    Args:
        spec: the device.
        options: the run.
        connect, on_change: as in `DeviceThread`.
    """

    def __init__(
        self, spec: DeviceSpec, options: ScoringOptions, connect: Connector, on_change: Callable[[], None]
    ) -> None:
        super().__init__(f"score {spec.shard.rank}", spec.device, spec.label, connect, on_change)
        self.heartbeat = Heartbeat(spec.label)
        self._spec = spec
        self._options = options
        self._aborted = False

    def abort(self) -> None:
        """End the thread after the batch that it computes. Callable from any thread."""
        self._aborted = True
        super().abort()

    def _create_backend(self) -> Backend:
        return create_backend(self._spec.device, self._spec.threads, self._options.math)

    def _work(self, backend: Backend) -> None:
        self._communicator = self._connect()
        executor = self._options.make_executor(backend, self._spec.shard)
        try:
            self._score(executor)
        finally:
            executor.close()

    def _score(self, executor: ForwardExecutor | RuntimeExecutor) -> None:
        net, options, shard = executor.net, self._options, self._spec.shard
        is_root = shard.rank == 0
        if options.detection:
            check_detection_outputs(net, "test_detection scores detections")
        if is_root:
            if net.inputs:
                names = ", ".join(net.inputs)
                logger.warning("The inputs of this net (%s) are not filled: the scores are for zero inputs.", names)
            logger.info("Running for %d iterations.", options.batches)
        scores = _Scores(net, options.batches)
        detections = DetectionScores(net, options.ap_version, options.show_classes)
        own_rows: list[Rows] = []
        undivided = net.context.shard.undivided
        own = net.context.shard.test_batches(options.batches)
        for batch in range(options.batches) if undivided else own:
            if self._aborted:
                raise AbortedError("the test was stopped")
            if batch in own:
                executor.forward()
                scores.take(batch)
                net.raise_device_errors()
                own_rows.append(detections.rows(batch))
                if len(own) == options.batches:
                    scores.log_batch(batch)
            if undivided:  # a wait for the whole test could exceed the timeout
                self._sum_over_devices(np.zeros(1))
        scores.values = self._sum_over_devices(scores.values)
        rows = gather_rows(own_rows, shard.rank, shard.world_size, self._sum_over_devices)
        if is_root:
            for batch in range(options.batches if len(own) < options.batches else 0):
                scores.log_batch(batch)
            detections.means(rows)
            scores.log_means()

    def _sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        assert self._communicator is not None
        with self.heartbeat.collective("the sum of the scores"):
            summed: np.ndarray = self._communicator.sum(values)
        return summed


class _Scores:
    """The loss and the outputs of each batch, of which this device fills its own.

    Args:
        net: the test net.
        batches: batches of the whole test.

    Raises:
        ConfigError: an output has another size in each batch, so that it has no mean.
    """

    def __init__(self, net: Net, batches: int) -> None:
        self._net = net
        self._names = [name for name in net.outputs if name not in detection_outputs(net)]
        refuse_changing_outputs(net, self._names)
        self._labels = [name for name in self._names for _ in range(net.outputs[name].count)]
        self.values = np.zeros((batches, 1 + len(self._labels)))
        """The loss and all elements of the outputs, a row for each batch."""

    def take(self, batch: int) -> None:
        """Take the scores of a batch from the net."""
        outputs = [self._net.outputs[name].host_data().astype(np.float64).ravel() for name in self._names]
        self.values[batch] = np.concatenate([[self._net.loss()], *outputs])

    def log_batch(self, batch: int) -> None:
        """``Batch 3, accuracy = 0.97`` for each element."""
        for name, value in zip(self._labels, self.values[batch, 1:], strict=True):
            logger.info("Batch %d, %s = %.6g", batch, name, value)

    def log_means(self) -> None:
        """``Loss: 0.1`` and ``accuracy = 0.97`` for each element, over all batches."""
        loss, *means = np.add.accumulate(self.values)[-1] / len(self.values)
        logger.info("Loss: %.6g", loss)
        for name, mean in zip(self._labels, means, strict=True):
            weight = self._net.loss_weight(self._net.outputs[name])
            share = f" (* {weight:.6g} = {weight * mean:.6g} loss)" if weight else ""
            logger.info("%s = %.6g%s", name, mean, share)

"""A deploy net with its weights, run on batches of images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import create_backend
from caffepy.config.load import read_net
from caffepy.config.paths import PathResolver
from caffepy.errors import ConfigError
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.onnx.engine import RuntimeNet, wants_runtime
from caffepy.proto import caffe_pb2
from caffepy.snapshot.files import read_weights

Floats = NDArray[np.float32]


class Model:
    """A net that takes images (N, C, H, W) as its first input; used in a `with` block, which frees the device.

    Args:
        net: the deploy net's prototxt.
        weights: .caffemodel files, the later ones over the earlier; none: as the fillers make them.
        device: number of a GPU, or None for the CPU.
        threads: CPU threads; None: all.
        engine: "own" (None) or "onnxruntime".

    Raises:
        ConfigError: the net takes no images, or something else besides; the engine is unknown.
        MissingExtraError: the engine is not installed.
        SnapshotError: weights do not fit.
    """

    def __init__(
        self, net: Path, weights: Sequence[Path] = (), device: int | None = None, threads: int | None = None,
        engine: str | None = None,
    ) -> None:  # fmt: skip
        self._by_runtime = wants_runtime(engine, device is None)
        self._runtime_net: RuntimeNet | None = None
        param = read_net(net)
        with ExitStack() as stack:
            self._backend = create_backend(device, threads)
            stack.callback(self._backend.close)
            stack.enter_context(self._backend.activate())
            context = LayerContext(self._backend, phase=caffe_pb2.TEST, resolve=PathResolver(net))
            self.net = Net(param, context)
            stack.callback(self.net.close)
            for path in weights:
                self.net.copy_trained_layers_from(read_weights(path), str(path))
            inputs = self.net.inputs
            if len(inputs) != 1 or len(self.net.blobs[inputs[0]].shape) != 4:
                raise ConfigError(
                    f"{net}: its inputs are {', '.join(inputs) or 'none'}; a net for images has one Input of the shape "
                    "N, C, H, W ('caffepy deploy' makes one of a training net)"
                )
            self._input = self.net.blobs[inputs[0]]
            self._stack = stack.pop_all()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """C, H and W of the input."""
        _, channels, height, width = self._input.shape
        return channels, height, width

    @property
    def layer_types(self) -> set[str]:
        """The types of the net's layers."""
        return {layer.type for layer in self.net.layers}

    def run(self, images: Floats) -> Floats:
        """The net's first output for a batch (N, C, H, W)."""
        if self._input.shape != images.shape:
            self._input.reshape(images.shape)
            self.net.reshape()
            self._runtime_net = None
        if self._by_runtime:
            return self._run_by_runtime(images)
        self._backend.from_host(np.ascontiguousarray(images, np.float32), self._input.data)
        self.net.forward()
        return np.asarray(self.net.blobs[next(iter(self.net.outputs))].host_data(), np.float32)

    def _run_by_runtime(self, images: Floats) -> Floats:
        if self._runtime_net is None:
            self._runtime_net = RuntimeNet(self.net, self._backend.threads)
        outputs = self._runtime_net.run({self.net.inputs[0]: images})
        return np.asarray(outputs[next(iter(self.net.outputs))], np.float32)

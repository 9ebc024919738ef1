"""`caffepy.load`: a trained net as a function of arrays."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Backend, create_backend
from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.caffemodel import TrainedLayers, read_caffemodel
from caffepy.formats.dialect import choose_dialect
from caffepy.formats.load import read_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.input_transform import ImagePreparation, has_preparation
from caffepy.infer.onnx_engine import RuntimeNet, wants_runtime
from caffepy.layers.layer import LayerContext, PassCounter
from caffepy.net import Net
from caffepy.net.describe import net_table
from caffepy.net.executor import ForwardExecutor, ShapeExecutors, shape_text
from caffepy.utils.options import MATH

logger = logging.getLogger(__name__)


class Model:
    """A TEST net that is called with arrays and returns a dict of arrays.

    `net` holds the parameters. For each of the most recent input shapes, a net with separate memory and graphs is
    cached. Calls are thread-safe; a lock serialises them.

    Args:
        param: the net as read.
        context: a context of the TEST phase.
        weights: sources of the parameters, applied in order: (message, origin).
        eager: never capture CUDA graphs.
        by_runtime: compute the net with onnxruntime on the CPU.

    Raises:
        ConfigError: the net has no Input layer.
        SnapshotError: weights do not fit.
    """

    def __init__(
        self,
        param: caffe_pb2.NetParameter,
        context: LayerContext,
        weights: list[tuple[TrainedLayers, str]],
        eager: bool = False,
        by_runtime: bool = False,
    ) -> None:
        self._by_runtime = by_runtime
        self._lock = threading.RLock()
        self._runtime_nets: WeakKeyDictionary[ForwardExecutor, RuntimeNet] = WeakKeyDictionary()
        self.backend: Backend = context.backend
        with self.backend.activate():
            self.net = Net(param, replace(context, passes=PassCounter()))
            """The unfused net with the parameters."""
            for layers, origin in weights:
                self.net.copy_trained_layers_from(layers, origin)
        self.inputs: dict[str, tuple[int, ...]] = {name: self.net.blobs[name].shape for name in self.net.inputs}
        """Names and shapes of the inputs. Calls may use other shapes that the layers accept."""
        if not self.inputs:
            raise ConfigError(
                f"net '{param.name}' has no Input layer to give arrays to; use its deploy net, which "
                "'caffepy deploy' makes of a training net, or 'caffepy test' for a net that reads its data itself"
            )
        self._nets = ShapeExecutors(self.net, param, eager=eager)
        self._executors = self._nets.kept
        self._image_input = next((layer for layer in param.layer if has_preparation(layer)), None)
        self._resolve = context.resolve
        self._preparation: ImagePreparation | None = None

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return list(self.net.outputs)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name} {shape_text(shape)}" for name, shape in self.inputs.items())
        device = self.backend.device_description()
        return f"<caffepy model '{self.net.name}': {inputs} -> {', '.join(self.outputs)}, on {device}>"

    def _repr_html_(self) -> str:
        return net_table(repr(self), self.net.nodes)

    def __call__(self, *arrays: Any, **named: Any) -> dict[str, Any]:
        """Compute the net's outputs.

        Args:
            arrays: the inputs in the net's order: NumPy or CuPy arrays, or objects with `__dlpack__` or `__array__`.
            named: inputs by name.

        Returns:
            Arrays by name, float32: CuPy arrays if an input is on a GPU, else NumPy arrays. The caller owns them.

        Raises:
            ShapeError: an input is missing, unknown or has another rank.
        """
        given = self._by_name(arrays, named)
        with self._lock, self.backend.activate():
            return self._outputs(given)

    def _outputs(self, given: dict[str, Any]) -> dict[str, Any]:
        adopted = {name: self.backend.adopt(array) for name, array in given.items()}
        here = {name: array for name, array in adopted.items() if array is not None}
        hosts = {name: as_numpy(array, name) for name, array in given.items() if name not in here}
        values = {**here, **hosts}
        shapes = tuple(self._shape(name, values[name]) for name in self.inputs)
        executor = self._nets.executor(shapes)
        if self._by_runtime:
            return self._runtime_net(executor).run(hosts)
        for name, array in here.items():
            self.backend.copy(array, executor.net.blobs[name].data)
        with self.backend.workspace_lease(executor.arena):
            for name, array in hosts.items():
                self.backend.upload(array, executor.net.blobs[name].data)
        executor.forward()
        with self.backend.workspace_lease(executor.arena):
            return self._results(executor.net, bool(here))

    @property
    def prepares_images(self) -> bool:
        """Whether an Input layer says how images become its values."""
        return self._image_input is not None

    def preparation(self) -> ImagePreparation | None:
        """Return the conversion of images that an Input layer's fields give; None: no Input layer has such fields.

        Raises:
            ConfigError: the fields contradict each other or the input.
            DataError: mean_file cannot be read.
        """
        with self._lock:
            layer = self._image_input
            if self._preparation is None and layer is not None:
                self._preparation = ImagePreparation(layer, self.inputs[layer.top[0]], self._resolve)
            return self._preparation

    def prepare(self, image: Any, *more: Any) -> NDArray[np.float32]:
        """Return images as values of the net's image input, prepared as in training: (N, C, H, W).

            net(net.prepare("cat.jpg", "dog.jpg"))["prob"]

        Args:
            image: a file; or an array (H, W) or (H, W, C), gray or red, green and blue: uint8, or numbers from 0 to 1.
            more: further images.

        Raises:
            ConfigError: no Input layer says how images become its values.
            DataError: an image cannot be read, or the images become values of different shapes.
        """
        preparation = self.preparation()
        if preparation is None:
            raise ConfigError(
                f"net '{self.net.name}': no Input layer says how images become its values; 'caffepy deploy --like "
                "train_val.prototxt' writes its transform_param"
            )
        values = [preparation(one if isinstance(one, (str, PathLike)) else np.asarray(one)) for one in (image, *more)]
        if len({array.shape for array in values}) > 1:
            shapes = ", ".join(sorted({shape_text(array.shape) for array in values}))
            raise DataError(f"the images become values of the shapes {shapes}; prepare images of one shape at a time")
        return np.stack(values)

    def parameters_changed(self) -> None:
        """Use values written into `net`'s parameters since the last call."""
        with self._lock:
            self._runtime_nets.clear()
            self._nets.parameters_changed()

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        with self._lock:
            self._nets.close()
            self._runtime_nets.clear()
            self.net.close()

    def _by_name(self, arrays: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        names = list(self.inputs)
        if len(arrays) > len(names):
            raise ShapeError(
                f"net '{self.net.name}' has {len(names)} inputs, {', '.join(names)}; {len(arrays)} are given"
            )
        given = dict(zip(names, arrays, strict=False))
        for name, array in named.items():
            if name not in self.inputs or name in given:
                problem = "is given twice" if name in given else "is not an input"
                raise ShapeError(f"net '{self.net.name}': '{name}' {problem}; its inputs are {', '.join(names)}")
            given[name] = array
        missing = [name for name in names if name not in given]
        if missing:
            raise ShapeError(f"net '{self.net.name}': no array is given for {', '.join(missing)}")
        return given

    def _shape(self, name: str, array: Any) -> tuple[int, ...]:
        shape, written = tuple(map(int, array.shape)), self.inputs[name]
        if len(shape) != len(written):
            found, axes = shape_text(shape) or "one number", len(written)
            raise ShapeError(
                f"net '{self.net.name}': input '{name}' is {found}; it must have {axes} axes, as {shape_text(written)}"
            )
        return shape

    def _runtime_net(self, executor: ForwardExecutor) -> RuntimeNet:
        if executor not in self._runtime_nets:
            executor.net.prepare()
            self._runtime_nets[executor] = RuntimeNet(executor.net, self.backend.threads)
        return self._runtime_nets[executor]

    def _results(self, net: Net, on_device: bool) -> dict[str, Any]:
        values = [blob.data for blob in net.outputs.values()]
        if not on_device:
            return dict(zip(net.outputs, self.backend.download(values), strict=True))
        results = [self.backend.zeros(tuple(array.shape)) for array in values]
        for array, result in zip(values, results, strict=True):
            self.backend.copy(array, result)
        self.backend.synchronize()
        return dict(zip(net.outputs, results, strict=True))


def as_numpy(array: Any, name: str) -> Any:
    """Return a numeric host array, without a copy where the library allows it.

    Raises:
        ShapeError: the array is not numeric.
    """
    try:
        only_dlpack = hasattr(array, "__dlpack__") and not hasattr(array, "__array__")
        found = np.from_dlpack(array) if only_dlpack else np.asarray(array)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ShapeError(f"input '{name}' is no array of numbers: {error}") from error
    if found.dtype.kind not in "biuf":
        raise ShapeError(f"input '{name}' is no array of numbers: its dtype is {found.dtype}")
    return found


StrPath = str | PathLike[str]

DTYPES = {"float32": caffe_pb2.FLOAT, "float16": caffe_pb2.FLOAT16, "bfloat16": caffe_pb2.BFLOAT16}
"""The dtypes of blobs, and their names in a prototxt."""


def load(
    model: StrPath,
    weights: StrPath | Sequence[StrPath] = (),
    device: int | None = None,
    *,
    dtype: str | None = None,
    threads: int | None = None,
    math: str = MATH,
    stages: Sequence[str] = (),
    engine: str | None = None,
) -> Model:
    """Load a net and its weights as a function of arrays.

        net = caffepy.load("deploy.prototxt", "net.caffemodel", device=0)
        probabilities = net(images)["prob"]

    Args:
        model: the net's prototxt, usually a deploy net with Input layers.
        weights: .caffemodel files, binary or HDF5; later files override earlier ones. Without files, fillers apply.
        device: GPU index; None: the CPU.
        dtype: dtype of blobs: "float32", "float16" or "bfloat16"; None: as in the prototxt.
        threads: CPU threads; None: all CPUs available to the process.
        math: precision of float32 products on a GPU: "tf32" or "fp32".
        engine: on the CPU: "own" (also None) for caffepy's kernels, or "onnxruntime" (extra onnx).
        stages: stages for include and exclude rules.

    Raises:
        ConfigError: the net cannot be read or has no Input layer; an unknown dtype or engine.
        MissingExtraError: the engine is not installed.
        SnapshotError: the weights cannot be read or do not fit.
        DeviceError: the device is not there.
    """
    by_runtime = wants_runtime(engine, device is None, dtype)
    param = read_net(Path(model))
    dialect = choose_dialect([param], logger.info)
    if dtype is not None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is '{dtype}'; it can be {', '.join(DTYPES)}")
        param.default_forward_type = param.default_backward_type = DTYPES[dtype]
    param.state.stage.extend(stages)
    files = [weights] if isinstance(weights, (str, PathLike)) else list(weights)
    backend = create_backend(device, threads, math)
    try:
        context = LayerContext(backend, phase=caffe_pb2.TEST, resolve=PathResolver(Path(model)), dialect=dialect)
        read = [(read_caffemodel(Path(file)), str(file)) for file in files]
        return Model(param, context, read, by_runtime=by_runtime)
    except BaseException:
        backend.close()
        raise

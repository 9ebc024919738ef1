"""`caffe.Net`: a net whose blobs are NumPy arrays (BVLC's `python/caffe/pycaffe.py` and `_caffe.cpp`).

`SharedMemory` has the blobs that share memory in Caffe: a program writes to one of them, and reads that from the other.
Reshape, and Concat and Slice of a single blob, share when Caffe shapes them, before any pass; Flatten, Split and others
when they run. Their `forward` shares here too, except where images, which are channels last in memory, forbid it: then
Reshape and Flatten copy. The program sees the original in place of such a copy, and passes refresh the copy.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array
from caffepy.backend.types import address
from caffepy.errors import ShapeError
from caffepy.formats.caffemodel import read_caffemodel, write_binary
from caffepy.formats.hdf5_snapshot import read_caffemodel_hdf5, write_caffemodel_hdf5
from caffepy.formats.load import net_state, read_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob as CoreBlob
from caffepy.layers.layer import Layer, LayerContext
from caffepy.net import Net as CoreNet
from caffepy.net.executor import ShapeExecutors
from caffepy.net.graph import Node
from caffepy.pycaffe.blob import Blob, BlobHooks, BlobVec
from caffepy.pycaffe.device import Device, HostArray, mode
from caffepy.pycaffe.errors import (
    ArgumentError,
    UnknownBlobError,
    UnknownLayerError,
    as_users_raise,
    check_file,
    check_type,
)
from caffepy.pycaffe.inference_path import InferencePath, can_be_folded
from caffepy.pycaffe.layer import visible_layer
from caffepy.utils.registry import suggest

logger = logging.getLogger("caffepy.pycaffe")


# -- shared memory -------------------------------------------------------------------------------------


class SharedMemory:
    """The blobs of a net that share memory in Caffe.

    Args:
        net: the net, which has not run yet.
    """

    def __init__(self, net: CoreNet) -> None:
        self._at_setup = [node for node in net.nodes if node.layer.shares_at_setup()]
        self._copying = [node for node in net.nodes if type(node.layer).copied is not Layer.copied]
        self._share(self._at_setup)

    def share_again(self) -> None:
        """Share what Caffe shares when it shapes the layers. Called after a reshape of the net."""
        self._share([node for node in self._at_setup if not node.layer.tops_overwritten])

    def _share(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            with node.named_errors():
                node.layer.forward(node.bottoms, node.tops)

    def refresh(self) -> None:
        """Bring copies up to date. Called where a pass begins behind the layers that make them."""
        for node, _, _ in self._copies():
            node.layer.forward(node.bottoms, node.tops)

    def original(self, array: Array) -> Array:
        """Return the array that `array` is a copy of; without one, `array`."""
        for _, source, target in self._copies():
            if address(target) == address(array) and target.size == array.size:
                return self.original(source)
        return array

    def _copies(self) -> Iterator[tuple[Node, Array, Array]]:
        """Yield the layers that copied and their arrays, in the net's order."""
        for node in self._copying:
            if (pair := node.layer.copied(node.bottoms, node.tops)) is not None:
                yield node, *pair


# -- the net -------------------------------------------------------------------------------------------


LayerCallback = Callable[[int], Any]
Arrays = dict[str, HostArray]


class Net:
    """A net of one phase on the device of `set_mode_gpu` and `set_device` at construction.

    All blobs can be read. If a program reads only inputs and outputs of a TEST net, passes from the second on run
    folded, as in `caffepy.load`.

    A net is thread-safe. Passes are serialised; each overwrites the blobs and the arrays that an earlier pass returned.
    During a pass other threads may read, write, save and load parameters.

    Args:
        network_file: the prototxt.
        phase: `caffe.TRAIN` or `caffe.TEST`; in the deprecated form `Net(network_file, weights, phase)` the weights.
        rest: level, stages and weights by position; in the deprecated form the phase.
        level: level for include and exclude rules.
        stages: stages for include and exclude rules.
        weights: a .caffemodel or HDF5 file to copy parameters from.

    Raises:
        MissingFileError: a file cannot be opened.
        ConfigError: the net is invalid.
        SnapshotError: the weights cannot be read or do not fit.
        Exception: an exception of a Python layer's `setup` or `reshape`, unchanged.
    """

    def __init__(
        self,
        network_file: str | os.PathLike[str],
        phase: Any = None,
        *rest: Any,
        level: int = 0,
        stages: Iterable[str] | None = None,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(phase, (str, os.PathLike)):
            weights, phase, rest = phase, (rest or (None,))[0], rest[1:]
            logger.warning("DEPRECATION WARNING - deprecated use of Python interface")
            logger.warning('Use this instead (with the named "weights" parameter):')
            logger.warning("Net('%s', %s, weights='%s')", network_file, phase, weights)
        given: dict[str, Any] = {"level": level, "stages": stages, "weights": weights}
        given |= dict(zip(("level", "stages", "weights"), rest, strict=False))
        weights = given["weights"]
        path = check_file(network_file)
        files = [check_file(weights)] if weights is not None else []
        device = mode.present_device()
        with device.computing(), as_users_raise():
            net, executors = _build(path, _state(phase, given["level"], given["stages"]), device)
            self._wrap(net, device, executors)
        for file in files:
            self.copy_from(file)

    @classmethod
    def of(cls, net: CoreNet, device: Device) -> Net:
        """Wrap a solver's net."""
        wrapped = cls.__new__(cls)
        wrapped._wrap(net, device)
        return wrapped

    def _wrap(self, net: CoreNet, device: Device, executors: ShapeExecutors | None = None) -> None:
        self._core = net
        self.device = device
        """Use `with net.device.computing():` around code that computes with caffepy's own arrays."""
        self._inference = InferencePath(net, device, executors)
        with device.computing():
            self._shared = SharedMemory(net)
            self._fill_loss_weights()
        self.has_callbacks = False
        """Whether layer callbacks are registered."""
        self._position = {id(node): index for index, node in enumerate(net.schedule)}
        for blob in self._parameter_blobs():
            blob.gradient_started = True  # `backward` adds to the parameters' diffs
        weakref.finalize(self, net.close)
        weakref.finalize(self, self._inference.close)

    def _fill_loss_weights(self) -> None:
        """Fill the diffs of tops that have a loss weight (`Layer::SetLossWeights`); the first tops of losses are."""
        for node in self._core.nodes:
            for index, (top, weight) in enumerate(zip(node.tops, node.layer.loss_weights, strict=True)):
                if weight and (index or not node.layer.is_loss):
                    self._core.backend.fill(top.diff, weight)

    # -- blobs, layers and parameters, by name and by index --------------------------------------------

    @property
    def net(self) -> CoreNet:
        """caffepy's net. From then on it runs layer by layer, so that all blobs can be read."""
        self._inference.stop()
        return self._core

    @cached_property
    def _nodes(self) -> list[Node]:
        """The prototxt's layers with Split layers, without Cast layers."""
        return [node for node in self._core.schedule if node.layer.type != "Cast"]

    def _parameter_blobs(self) -> Iterable[Any]:
        return (blob for layer in self._core.layers for blob in layer.blobs)

    @cached_property
    def blobs(self) -> OrderedDict[str, Blob]:
        """The blobs by name in the order of the layers, including those of Split layers."""
        path, hidden = self._inference, self._inference.hidden
        seen = BlobHooks(reshaped=self._reshape_before_forward, original=self._original, given_original=path.hold)
        unseen = replace(
            seen,
            before_data=path.look_at_values,
            before_shape=path.look_at_shape,
            before_all=path.stop,
            given=path.hold,
        )
        return OrderedDict(
            (name, Blob(top, self.device, replace(unseen if top in hidden else seen, before_diff=self._diff_use(top))))
            for name, top in self._tops.items()
        )

    def _original(self, array: Array) -> Array:
        """Return what the program sees of a blob's data; folded passes write outputs, not what they are copies of."""
        return array if self._inference.folds else self._shared.original(array)

    def _diff_use(self, top: CoreBlob) -> Callable[[], None]:
        """Return the hook called before the program uses a top's diff: it may write the diff of a loss, as in Caffe."""
        return partial(self._core.let_program_write_diff, top)

    @cached_property
    def _tops(self) -> OrderedDict[str, CoreBlob]:
        found: OrderedDict[str, CoreBlob] = OrderedDict()
        for node in self._nodes:
            for top in node.tops:
                if not any(top is bottom for bottom in node.bottoms):
                    found[top.name] = top
        return found

    @cached_property
    def layers(self) -> list[Any]:
        """The layers; of a Python layer the user's object."""
        stop = self._inference.stop
        return [visible_layer(node.layer, self.device, self._blobs_of(node), stop) for node in self._nodes]

    def _blobs_of(self, node: Node) -> BlobVec:
        path = self._inference
        hooks = BlobHooks(path.look_at_parameters, self._bind_diffs, before_all=path.stop, given=path.hold)
        return BlobVec(Blob(blob, self.device, hooks) for blob in node.layer.blobs)

    def _bind_diffs(self) -> None:
        _ = self._core.parameters.diff

    def _reshape_before_forward(self) -> None:
        for node in self._core.schedule:
            node.shapes = []

    @cached_property
    def params(self) -> OrderedDict[str, BlobVec]:
        """The parameters of each layer that has any, by layer name."""
        pairs = zip(self._layer_names, self.layers, strict=True)
        return OrderedDict((name, layer.blobs) for name, layer in pairs if len(layer.blobs))

    @cached_property
    def layer_dict(self) -> OrderedDict[str, Any]:
        """The layers by name."""
        return OrderedDict(zip(self._layer_names, self.layers, strict=True))

    @cached_property
    def blob_loss_weights(self) -> OrderedDict[str, float]:
        """Each blob's weight in the loss, by name."""
        return OrderedDict((name, self._core.loss_weight(top)) for name, top in self._tops.items())

    @cached_property
    def inputs(self) -> list[str]:
        """The names of the input blobs: tops of Input layers."""
        return list(self._core.inputs)

    @cached_property
    def outputs(self) -> list[str]:
        """The names of the blobs that no layer reads."""
        return list(self._core.outputs)

    @cached_property
    def top_names(self) -> OrderedDict[str, list[str]]:
        """The tops of each layer, by its name."""
        return OrderedDict((node.layer.name, [top.name for top in node.tops]) for node in self._nodes)

    @cached_property
    def bottom_names(self) -> OrderedDict[str, list[str]]:
        """The bottoms of each layer, by its name."""
        return OrderedDict(
            (node.layer.name, list(node.layer.param.bottom[: len(node.bottoms)])) for node in self._nodes
        )

    @property
    def name(self) -> str:
        return self._core.name

    # -- attributes of Caffe's compiled module, used by scripts ------------------------------------------

    @cached_property
    def _layer_names(self) -> list[str]:
        return [node.layer.name for node in self._nodes]

    @property
    def _blob_names(self) -> list[str]:
        return list(self.blobs)

    @property
    def _blobs(self) -> list[Blob]:
        return list(self.blobs.values())

    @property
    def _blob_loss_weights(self) -> list[float]:
        return list(self.blob_loss_weights.values())

    @property
    def _inputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.inputs]

    @property
    def _outputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.outputs]

    def _top_ids(self, layer: int) -> list[int]:
        return [self._blob_names.index(top.name) for top in self._nodes[layer].tops]

    def _bottom_ids(self, layer: int) -> list[int]:
        node = self._nodes[layer]
        return [self._blob_names.index(name) for name in node.layer.param.bottom[: len(node.bottoms)]]

    # -- running -------------------------------------------------------------------------------------

    def forward(
        self,
        blobs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **kwargs: Any,
    ) -> Arrays:
        """Run the layers from `start` through `end`.

        Args:
            blobs: blobs to return in addition to the outputs.
            start: the first layer; None: the net's.
            end: the last layer, whose tops are returned instead of the net's outputs; None: the net's.
            kwargs: input data by blob name, for all inputs or none.

        Returns:
            Arrays by blob name, overwritten by the next call.

        Raises:
            UnknownLayerError: the layer does not exist. A ValueError, as in pycaffe.
            UnknownBlobError: the blob does not exist. A KeyError, as in pycaffe.
            ArgumentError: the keywords are not the inputs, or the batch sizes differ.
            Exception: an exception of a Python layer, unchanged.
        """
        first = self._index(start) if start is not None else 0
        last = self._index(end) if end is not None else len(self._nodes) - 1
        wanted = [*(self.top_names[end] if end is not None else self.outputs), *(blobs or [])]
        with self.device.turn:
            self._fill(kwargs, "data", self.inputs)
            if start is not None or end is not None:
                self._inference.stop()
            if not self._inference.forward():
                self._run_forward(first, last)
            return {name: self._blob(name).data for name in wanted}

    def backward(
        self,
        diffs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **kwargs: Any,
    ) -> Arrays:
        """Run backward the layers from `start` down through `end`; parameter gradients accumulate.

        Args:
            diffs: blobs whose diffs are returned in addition to the inputs' diffs.
            start: the first layer of the backward pass; None: the net's last.
            end: the last layer of the backward pass, whose bottoms' diffs are returned; None: the net's first.
            kwargs: output diffs by blob name, for all outputs or none; None keeps the current diffs.

        Returns:
            Arrays by blob name, overwritten by the next call.

        Raises:
            UnknownLayerError, UnknownBlobError, ArgumentError, Exception: as in `forward`.
        """
        first = self._index(start) if start is not None else len(self._nodes) - 1
        last = self._index(end) if end is not None else 0
        wanted = [*(self.bottom_names[end] if end is not None else self.inputs), *(diffs or [])]
        with self.device.turn:
            self._fill(kwargs, "diff", self.outputs)
            self._backward(first, last)
            return {name: self._blob(name).diff for name in wanted}

    def forward_all(self, blobs: Sequence[str] | None = None, **kwargs: Any) -> Arrays:
        """Run the net forward on any number of rows, in batches.

        Args:
            blobs: blobs to return in addition to the outputs.
            kwargs: rows by input name, the same number for each input.

        Returns:
            The rows of each output.

        Raises:
            ArgumentError: an input is missing or has no rows.
        """
        rows = _count(kwargs)
        collected = [_copied(self.forward(blobs=blobs, **batch)) for batch in self._batch(kwargs)]
        return _joined(collected, rows)

    def forward_backward_all(
        self, blobs: Sequence[str] | None = None, diffs: Sequence[str] | None = None, **kwargs: Any
    ) -> tuple[Arrays, Arrays]:
        """Run the net forward and backward on any number of rows, in batches.

        Args:
            blobs: blobs to return in addition to the outputs.
            diffs: blobs whose diffs are returned in addition to the inputs' diffs.
            kwargs: rows of the inputs and of the output diffs; without output diffs the loss sets them.

        Returns:
            The rows of each output, and of each diff.

        Raises:
            ArgumentError: neither inputs nor output diffs are given, or some have no rows.
        """
        rows = _count(kwargs)
        forward = self._batch({name: kwargs[name] for name in self.inputs if name in kwargs})
        backward = self._batch({name: kwargs[name] for name in self.outputs if name in kwargs})
        all_blobs, all_diffs = [], []
        nothing: dict[str, Any] = {}
        for inputs, tops in zip_longest(forward, backward, fillvalue=nothing):
            all_blobs.append(_copied(self.forward(blobs=blobs, **inputs)))
            all_diffs.append(_copied(self.backward(diffs=diffs, **tops)))
        return _joined(all_blobs, rows), _joined(all_diffs, rows)

    def _batch(self, blobs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the arrays in batches of the net's size."""
        if not blobs:
            return
        size = next(iter(self.blobs.values())).shape[0]
        for begin in range(0, _count(blobs), size):
            yield {name: _padded(np.asarray(rows[begin : begin + size]), size) for name, rows in blobs.items()}

    def _forward(self, start: int, end: int) -> float:
        """Run layers by index; return their part of the loss."""
        self._inference.stop()
        self._run_forward(start, end)
        pairs = [
            (top, weight)
            for node in self._nodes[start : end + 1]
            for top, weight in zip(node.tops, node.layer.loss_weights, strict=True)
            if weight
        ]
        with self.device.active():
            return sum(
                weight * float(self._core.backend.to_host(top.data).sum(dtype="float64")) for top, weight in pairs
            )

    def _run_forward(self, start: int, end: int) -> None:
        with self.device.computing(), as_users_raise():
            if copies := self._core.parameters.copies:
                self._core.parameters.refresh(copies)
            if start:
                self._shared.refresh()
            self._core.forward_part(self._part(start, end))
            self._raise_device_errors()
        if (start, end) == (0, len(self._nodes) - 1):
            self._inference.ran()

    def _backward(self, start: int, end: int) -> None:
        """Run layers backward by index, from `start` down to `end`."""
        self._inference.stop()
        with self.device.computing(), as_users_raise():
            self._shared.refresh()
            self._core.backward(self._part(end, start))
            self._raise_device_errors()

    def _raise_device_errors(self) -> None:
        if self._core.backend.asynchronous:
            self._core.backend.synchronize()
            self._core.raise_device_errors()

    def _part(self, first: int, last: int) -> list[Node]:
        """Return the nodes of a range of layers, including their Cast layers."""
        if not 0 <= first <= last < len(self._nodes):
            raise ArgumentError(f"layers {first} to {last} of a net with {len(self._nodes)} layers: not in that order")
        begin = self._position[id(self._nodes[first - 1])] + 1 if first else 0
        return self._core.schedule[begin : self._position[id(self._nodes[last])] + 1]

    def _index(self, layer: str) -> int:
        if layer not in self._layer_names:
            raise UnknownLayerError(f"the net has no layer '{layer}'; {suggest(layer, self._layer_names)}")
        return self._layer_names.index(layer)

    def _blob(self, name: str) -> Blob:
        if name not in self.blobs:
            raise UnknownBlobError(f"the net has no blob '{name}'; {suggest(name, list(self.blobs))}")
        return self.blobs[name]

    def _fill(self, arrays: dict[str, Any], part: str, names: list[str]) -> None:
        """Copy keyword arguments into the inputs' data, or into the outputs' diffs."""
        if not arrays:
            return
        if set(arrays) != set(names):
            what = (
                "Input blob arguments do not match net inputs"
                if part == "data"
                else ("Top diff arguments do not match net outputs")
            )
            raise ArgumentError(f"{what}: {', '.join(sorted(arrays))} are given for {', '.join(names) or 'none'}")
        for name, array in arrays.items():
            numbers, blob = np.asarray(array), self.blobs[name]
            if numbers.ndim and numbers.shape[:1] != blob.shape[:1]:
                what = "Input" if part == "data" else "Diff"
                raise ArgumentError(
                    f"{what} is not batch sized: '{name}' is given in shape {numbers.shape} and is {blob.shape} in the "
                    "net; reshape the blob first"
                )
            if part == "diff" or numbers.shape != blob.shape or not self._write(name, numbers):
                getattr(blob, part)[...] = numbers

    def _write(self, name: str, numbers: HostArray) -> bool:
        with self.device.active():
            return self.device.arrays.write(self._core.blobs[name].data, numbers)

    def reshape(self) -> None:
        """Reshape all layers to the blobs' current shapes."""
        with self.device.computing(), as_users_raise():
            self._core.reshape()
            self._shared.share_again()
        self._inference.reshaped()

    def clear_param_diffs(self) -> None:
        """Set the parameters' diffs to 0."""
        with self.device.computing():
            self._bind_diffs()
            for blob in self._parameter_blobs():
                self._core.backend.fill(blob.diff, 0.0)
                blob.gradient_started = True

    def set_input_arrays(self, data: HostArray, labels: HostArray) -> None:
        """Set the arrays from which the first layer, a MemoryData layer, reads its batches. They are not copied.

        Args:
            data: float32 (n, channels, height, width), C-contiguous, n a multiple of the layer's batch_size.
            labels: float32, n elements.

        Raises:
            ArgumentError: the first layer is no MemoryData layer, or sizes or dtypes do not fit. A RuntimeError, as in
                `_caffe.cpp` (Net_SetInputArrays).
        """
        layer: Any = self._nodes[0].layer
        if layer.type != "MemoryData":
            raise ArgumentError("set_input_arrays may only be called if the first layer is a MemoryDataLayer")
        for name, array, axes in (("data", data, (4,)), ("labels", labels, (1, 4))):
            if not array.flags.c_contiguous or array.dtype != np.float32 or array.ndim not in axes:
                raise ArgumentError(
                    f"{name} array must be C contiguous, 4-d and float32; it is {array.dtype} of shape {array.shape}"
                )
        try:
            layer.reset_arrays(data, labels)
        except ShapeError as error:
            raise ArgumentError(str(error)) from error

    _set_input_arrays = set_input_arrays

    # -- callbacks -----------------------------------------------------------------------------------

    def before_forward(self, callback: LayerCallback) -> None:
        """Call `callback` with each layer's index before its forward pass.

        A solver whose net has layer callbacks does not use CUDA graphs.
        """
        self._core.before_forward.append(self._calling(callback))

    def after_forward(self, callback: LayerCallback) -> None:
        """Call `callback` with each layer's index after its forward pass."""
        self._core.after_forward.append(self._calling(callback))

    def before_backward(self, callback: LayerCallback) -> None:
        """Call `callback` with each layer's index before its backward pass, also if that is skipped."""
        self._core.before_backward.append(self._calling(callback))

    def after_backward(self, callback: Any) -> None:
        """Call `callback`, or the `run` of an NCCL object, with each layer's index after its backward pass."""
        if hasattr(callback, "on_gradients_ready") and self._core.backend.asynchronous:
            return  # NCCL on GPUs exchanges after the pass, and a callback would prevent CUDA graphs
        self._core.after_backward.append(self._calling(getattr(callback, "run", callback)))

    def _calling(self, callback: LayerCallback) -> Callable[[Node], None]:
        self.has_callbacks = True
        self._inference.stop()
        numbers = {id(node): number for number, node in enumerate(self._nodes)}
        device = self.device

        def call(node: Node) -> None:
            if id(node) in numbers:
                device.call(callback, numbers[id(node)])
                self._shared.refresh()

        return call

    # -- parameters ----------------------------------------------------------------------------------

    def copy_from(self, trained_file: str | os.PathLike[str]) -> None:
        """Copy parameters from a .caffemodel or HDF5 file to layers of the same names.

        Raises:
            SnapshotError: it cannot be read or does not fit.
        """
        self._inference.parameters_change()
        with self.device.computing():
            self._core.copy_trained_layers_from(read_caffemodel(Path(trained_file)), str(trained_file))

    def share_with(self, other: Net) -> None:
        """Make layers of the same name share the parameter data of `other` (Caffe's ShareTrainedLayersWith).

        Each net keeps its own diffs; an update by this net's solver changes the shared data. Arrays obtained earlier
        are no longer this net's parameters.

        Raises:
            ArgumentTypeError: `other` is no net.
            ConfigError: numbers or shapes of parameters differ.
        """
        check_type("share_with", other, Net)
        self._inference.stop()
        theirs = other.net
        with self.device.computing():
            self._core.share_data_with(theirs)

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Write the net with its parameters as a .caffemodel.

        Raises:
            RunError: the file cannot be written.
        """
        with self.device.computing():
            write_binary(Path(filename), self._core.name, self._core.layers)

    def save_hdf5(self, filename: str | os.PathLike[str]) -> None:
        """Write the parameters as an HDF5 file.

        Raises:
            RunError: the file cannot be written.
        """
        with self.device.computing():
            write_caffemodel_hdf5(Path(filename), self._core.layers)

    def load_hdf5(self, filename: str | os.PathLike[str]) -> None:
        """Copy parameters from an HDF5 file to layers of the same names.

        Raises:
            SnapshotError: it cannot be read or does not fit.
        """
        self._inference.parameters_change()
        with self.device.computing():
            self._core.copy_trained_layers_from(read_caffemodel_hdf5(Path(filename)), str(filename))

    def __repr__(self) -> str:
        phase = caffe_pb2.Phase.Name(self._core.phase)
        return f"<caffe.Net {self.name!r} ({phase}, {len(self._nodes)} layers, {self._core.backend.name})>"

    def _repr_html_(self) -> str:
        self._inference.look_at_shape()
        return self._core._repr_html_()


def _state(phase: Any, level: int, stages: Iterable[str] | None) -> caffe_pb2.NetState:
    if phase not in (caffe_pb2.TRAIN, caffe_pb2.TEST):
        raise ArgumentError(f"Net needs a phase, caffe.TRAIN or caffe.TEST, not {phase!r}")
    return caffe_pb2.NetState(phase=phase, level=level, stage=list(stages or []))


def _build(path: Path, state: caffe_pb2.NetState, device: Device) -> tuple[CoreNet, ShapeExecutors | None]:
    """Return the net, and the executors of its folded form if it has one."""
    param = read_net(path)
    context = LayerContext(
        device.backend,
        phase=state.phase,
        seed=mode.next_seed(),
        shard=mode.shard(state.phase),
        resolve=PathResolver(path),
    )
    state = net_state(state.phase, param.state, state)
    net = CoreNet(param, context, state)
    folded = net.inputs and can_be_folded(net) and not mode.layer_by_layer
    return net, ShapeExecutors(net, param, state) if folded else None


def _count(arrays: Mapping[str, Any]) -> int:
    if not arrays:
        raise ArgumentError("give the rows of the net's inputs as keywords: forward_all(data=rows)")
    name, rows = next(iter(arrays.items()))
    if not len(rows):
        raise ArgumentError(f"'{name}' has no rows; give at least one")
    return len(rows)


def _padded(rows: NDArray[Any], size: int) -> NDArray[Any]:
    missing = size - len(rows)
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows


def _copied(arrays: Arrays) -> Arrays:
    return {name: np.atleast_1d(array).copy() for name, array in arrays.items()}


def _joined(batches: list[Arrays], rows: int) -> Arrays:
    """Return the rows of all batches without padding rows; outputs without a batch axis stay."""
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    filled = max(map(len, joined.values()))
    return {name: array[:rows] if len(array) == filled else array for name, array in joined.items()}

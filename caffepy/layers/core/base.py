"""The base class of layers, the context that a net hands to its layers, and the registry of layer types.

A layer type is a class registered under the name that prototxts use. Layers see blobs and a backend's primitives, never
a device; the net calls them. Defined by Caffe's `layer.hpp`.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar, TypeAlias

from caffepy.backend.interface import Backend
from caffepy.backend.types import Array, Counter, RandomStream
from caffepy.blob import Blob, format_shape
from caffepy.config.dialect import Dialect
from caffepy.data.prefetch import never_cancel
from caffepy.data.schedule import Shard, TestSchedule
from caffepy.errors import ConfigError, DataError, OutOfMemoryError, ShapeError
from caffepy.layers.core.buffer import ScratchBuffer
from caffepy.layers.core.known_types import describe_missing, layer_modules
from caffepy.proto import caffe_pb2
from caffepy.registry import Registry

LAYERS: Registry[type[Layer]] = Registry("layer type")
register_layer = LAYERS.register

LARGE = 2**28
"""Bytes about which a backend is asked whether it has them, before they are allocated."""

Blobs: TypeAlias = "list[Blob]"


@cache
def import_layer_types() -> None:
    """Import all layer types, which register themselves: every module of the folders beside this one."""
    layers = importlib.import_module("caffepy.layers")
    for module in pkgutil.walk_packages(layers.__path__, "caffepy.layers."):
        if not module.ispkg:
            importlib.import_module(module.name)


def layer_class(type_name: str, where: str = "") -> type[Layer]:
    """The class of a layer type, whose module is imported now; all are, where the sources do not say which it is.

    Raises:
        ConfigError: there is no such type; the message says which Caffe has it, or offers the nearest name.
    """
    if type_name not in LAYERS:
        module = layer_modules().get(type_name)
        if module is None:
            import_layer_types()
        else:
            importlib.import_module(module)
    if type_name not in LAYERS and (missing := describe_missing(type_name)):
        raise ConfigError(f"{where}: {missing}" if where else missing)
    return LAYERS.get(type_name, where)


@dataclass
class PassCounter:
    """Counts the forward passes of one net, so that random numbers and data depend on it and on nothing else.

    In training it is iteration * iter_size + the pass within the iteration; snapshots restore it.
    """

    number: int = 0
    on_device: Counter | None = None
    """The pass number and the number of its first sample in device memory, for captured graphs."""
    draws: bool = False
    """Whether a layer has asked for the counter of its random numbers."""


@dataclass
class LayerContext:
    """What a net hands to all of its layers.

    Args:
        backend: the device.
        phase: caffe_pb2.TRAIN or TEST.
        seed: 64-bit seed of all random numbers, the same on every rank.
        shard: this device's rank among all that train together.
        passes: the net's pass counter.
        test_iter: batches in one whole test (TEST phase).
        iter_size: passes of one iteration; their batches are prefetched before the first of them runs.
        resolve: turns a path written in the prototxt into one that exists (see `caffepy.config.paths`).
        timeout: seconds without data from the disk, or without a free slot on the device, after which training fails.
        check_wait: called every 0.1 s while a layer waits for its data; ends the wait by raising.
        dialect: whose numbers the layers compute where the two Caffes differ; None: the net decides when it is built.
        fills: whether parameters get their fillers' values; those of a net that takes another's have no memory then.
    """

    backend: Backend
    phase: int = caffe_pb2.TRAIN
    seed: int = 0
    shard: Shard = field(default_factory=Shard)
    passes: PassCounter = field(default_factory=PassCounter)
    test_iter: int = 1
    iter_size: int = 1
    resolve: Callable[[str], Path] = Path
    timeout: float = 600.0
    check_wait: Callable[[], None] = never_cancel
    dialect: Dialect | None = None
    fills: bool = True
    net_number: int = 0
    """Which of its solver's nets this is; with `shard.training` the same for the nets of all devices of a process."""
    forward_only: bool = False
    """Whether no backward pass follows the present forward pass, so that layers keep nothing for one."""
    first_sample: Callable[[int], int] | None = None
    """Global number of the device's first sample in a pass, set by the net's first data layer."""
    describe_sample: Callable[[int, int], str] | None = None
    """Names a record for messages, given the pass and the index in the device's batch; set by the first data layer."""
    sample_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of one sample, by top; data layers whose tops are all there do not open their data (memory plans)."""
    all_reduce_mean: Callable[[Array], None] | None = None
    """All-reduce for sync-BN layers, in place; None: BatchNorm takes the statistics of each device alone."""
    all_reduce_sum: Callable[[Array], None] | None = None
    """All-reduce of a sum, in place, for losses that count labels; None in test nets and on one device."""
    all_reduce_capturable: bool = False
    """Whether `all_reduce_mean` and `all_reduce_sum` may be captured in a CUDA graph."""
    loss_scale: Array | None = None
    """Factor on every loss's gradient, one float32 on the device; None: 1. It keeps half-precision gradients from
    vanishing, and the update takes it out again."""

    @property
    def nvidia(self) -> bool:
        """Whether NVIDIA Caffe's numbers are wanted where the two Caffes differ."""
        return self.dialect is Dialect.NVIDIA

    @property
    def log_level(self) -> int:
        """What the net is logged at: INFO on rank 0, DEBUG elsewhere and for a net made beside one that was logged."""
        shown = self.shard.rank == 0 and self.backend.holds_values and self.fills
        return logging.INFO if shown else logging.DEBUG

    def number_samples(self, batch: int) -> None:
        """Set `first_sample` for a layer that makes so many samples itself, unless a data layer before it has done so.

        Each sample of a test has a number of its own, on however many devices it is run.
        """

        def first(number: int) -> int:  # asks for the shard, which changes where the solver joins others later
            if self.phase == caffe_pb2.TEST:
                return TestSchedule(self.shard, batch, self.test_iter).first_sample(number)
            return (number * self.shard.world_size + self.shard.rank) * batch

        if self.first_sample is None:
            self.first_sample = first


class Layer:
    """One layer of a net.

    The net calls, in this order: `setup` once, `reshape` before each forward pass whose bottoms changed shape,
    `forward`, `backward`. Subclasses set the class variables that say how many blobs they take.

    Args:
        param: the layer's prototxt.
        context: the net's.
    """

    bottoms: ClassVar[tuple[int, int | None]] = (1, 1)
    """Fewest and most bottom blobs; None: no limit."""
    tops: ClassVar[tuple[int, int | None]] = (1, 1)
    """Fewest and most top blobs."""
    equal_bottoms_and_tops: ClassVar[bool] = False
    """Whether there must be as many tops as bottoms."""
    is_loss: ClassVar[bool] = False
    """Whether the first top has loss weight 1 unless the prototxt says otherwise."""
    auto_tops: ClassVar[bool] = False
    """Whether to make unnamed tops up to the fewest allowed, as Caffe does for losses."""
    no_gradient_bottoms: ClassVar[frozenset[int]] = frozenset()
    """Bottoms that can never have a gradient (labels); the net refuses to backpropagate to them."""
    exact_bottoms: ClassVar[frozenset[int]] = frozenset()
    """Bottoms whose numbers must be exact, as labels' (masks, regions), and which may depend on parameters: the layer
    gives them a gradient of 0."""
    no_gradient_tops: ClassVar[frozenset[int]] = frozenset()
    """Tops whose gradient `backward` leaves out, as Caffe does; the net refuses a loss weight there."""
    supports_half: ClassVar[bool] = False
    """Whether bottoms and tops may be float16 or bfloat16; other layers are given float32."""
    inherits_dtype: ClassVar[bool] = False
    """Whether the tops have the first bottom's dtype, unless the prototxt says otherwise."""
    keeps_labels: ClassVar[bool] = False
    """Whether a top is a label blob if its bottom is one: the layer moves elements, or maps each by itself."""
    float32_tops_from: ClassVar[int | None] = None
    """Index of the first top that is always float32 (labels)."""
    prefetches: ClassVar[bool] = False
    """Whether the layer has `prefetch_to_device` and `release_batch`, which no graph captures."""
    changes_shapes: ClassVar[bool] = False
    """Whether each forward pass sets the tops' shapes by the bottoms' numbers; no later layer can be captured then."""
    may_keep_shapes: ClassVar[bool] = False
    """Of a layer that `changes_shapes`: whether the shapes may be the same in each pass, so that tops have means."""
    has_backward: ClassVar[bool] = True
    """Whether the layer has a backward pass (Accuracy and data layers have none)."""
    stored_by_count: ClassVar[bool] = False
    """Whether a file's parameters fit if they have as many elements, whatever their shapes."""
    reads_shapes_only: ClassVar[bool] = False
    """Whether the tops depend on the bottoms' shapes alone (PriorBox), so that no gradient is asked of the layer."""
    recordable: ClassVar[bool] = False
    """Whether `forward` does the same in each pass of the TEST phase, by primitives of the backend alone: a CPU then
    captures its calls of kernels (net/forward_runner.py). Subclasses have it from their base class; one that reads or
    draws numbers on the host says False."""

    def __init__(self, param: caffe_pb2.LayerParameter, context: LayerContext) -> None:
        self.param = param
        self.context = context
        self.backend = context.backend
        self.name = param.name
        self.random_name = param.name
        """What the layer's random numbers follow from; the net gives layers of the same name different ones."""
        self.type = param.type
        self.blobs: list[Blob] = []
        """The layer's parameters, made in `setup`."""
        self.propagate_to_params: list[bool] = []
        """Whether each parameter needs its gradient (lr_mult != 0), set by the net."""
        self.tops_overwritten = False
        """Whether a later layer overwrites a top in place, so that backward must read a copy; set by the net."""
        self.scratch_buffers: dict[str, ScratchBuffer] = {}
        """The buffers of `scratch`, by name."""
        self.dtype = "float32"
        """Of the layer's bottoms and tops; set by the net."""
        self.label_tops: frozenset[int] = frozenset()
        """Indices of tops that some layer reads as labels; set by the net before `dtype`."""
        self.loss_weights: list[float] = []
        """Weight of each top in the loss, set by the net; 0: no loss."""
        self.saved_loss: Array | None = None
        """The layer's part of the loss, shape (), where a later layer overwrites the top with it; set by the net."""
        self.reader_propagates = False
        """Whether a later layer gives the first top a gradient, set by the net where that top has a loss weight."""
        self.program_writes_diff = False
        """Whether a program may write the diff of a loss's first top, in place of the loss weight."""

    def top_dtype(self, index: int) -> str:
        """The dtype of a top; labels stay float32, since float16 has only even integers beyond 2,048."""
        fixed = self.float32_tops_from is not None and index >= self.float32_tops_from
        return "float32" if fixed or not self.supports_half or index in self.label_tops else self.dtype

    # -- to be written by layer types ----------------------------------------------------------------

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read the prototxt, check it and make parameters with `add_parameter`. Called once."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Set the tops' shapes and allocate buffers that depend on the bottoms' shapes.

        Raises:
            ShapeError: the bottoms' shapes do not fit.
        """
        raise NotImplementedError

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Compute the tops' data from the bottoms'."""
        raise NotImplementedError

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """Compute the diffs of the parameters and of those bottoms that `propagate_down` marks.

        Bottom diffs are overwritten. Parameter diffs are added to what earlier layers or passes left if `accumulate(i)`
        says so, and overwritten otherwise; they are computed only where `propagate_to_params` says so.
        """
        raise NotImplementedError

    def raise_device_errors(self) -> None:
        """Raise errors that kernels recorded on the device, such as labels out of range. The device must be idle."""

    def close(self) -> None:
        """Stop prefetch threads and close files. Idempotent."""

    def capture_blocker(self) -> str | None:
        """Why this layer cannot be captured in a CUDA graph; None if it can."""
        return None

    def epoch_size(self) -> int | None:
        """Records in one epoch of a data layer's source; None for layers that read no records."""
        return None

    def position(self) -> int | None:
        """Where in its records the layer is, for snapshots; None for layers that read no records."""
        return None

    def seek(self, position: int) -> None:
        """Let the next pass begin at a `position` that a snapshot holds; for layers whose `position` is not None."""
        raise NotImplementedError

    def has_side_effects(self) -> bool:
        """Whether a forward pass does more than compute the tops: it writes files, runs a user's code, or counts."""
        return False

    def communicates(self) -> bool:
        """Whether a pass contains a collective, so that every device has to run it."""
        return False

    def running_statistics(self) -> Sequence[int]:
        """Indices of the parameters that the forward pass updates (BatchNorm)."""
        return ()

    def local_statistics(self) -> Sequence[int]:
        """Those of `running_statistics` that each device computes from its own batches, so that values differ."""
        return ()

    def state(self) -> Sequence[Array]:
        """Arrays, no parameters, that a forward pass leaves to the next one (the hidden state of LSTM)."""
        return ()

    def stored_order(self, counts: Sequence[int]) -> Sequence[int]:
        """For each parameter where a file has it whose parameters have so many elements; older files differ."""
        return range(len(counts))

    def advice_on_stored(self, number: int) -> str:
        """What to do where a file holds another number of parameters for this layer than it has."""
        return "rename the layer in the net to learn it from scratch"

    def adopt(self, stored: int) -> None:
        """Take over parameters that were copied from a file, which holds `stored` of them for this layer."""

    def prefetch_to_device(self, number: int) -> None:
        """Copy the batch of pass `number` to the device. Called before `forward`, where `prefetches` is set."""
        raise NotImplementedError

    def transfer_changed(self) -> bool:
        """Whether the last prefetched batch has another layout than the last `forward`, captured or not, read."""
        return False

    def shapes_known_until(self, number: int) -> int:
        """The first pass, from `number` on, whose batch may have another shape or layout than those prefetched last.

        Called on layers without bottoms, after the batches of all passes before `number` were prefetched.
        """
        return number

    def release_batch(self, number: int) -> None:
        """Free the device memory of pass `number`: everything that reads its batch is on the device's stream."""
        raise NotImplementedError

    # -- tools for layer types -----------------------------------------------------------------------

    def add_parameter(self, shape: tuple[int, ...], filler: caffe_pb2.FillerParameter) -> Blob:
        """Make the next parameter, which is filled at its first use.

        The random numbers depend on the seed, `random_name` and the parameter's index alone.
        """
        from caffepy.fillers import filling

        blob = Blob(self.backend, shape, f"{self.name}[{len(self.blobs)}]")
        if self.backend.holds_values and self.context.fills:
            # Its values, what the filler makes of double precision, and its gradient.
            self.check_memory(16 * blob.count, f"its parameter {format_shape(shape)}")
            values = filling(filler, shape, self.random_stream(len(self.blobs)), where=f"layer '{self.name}'")
            blob.fill_with(values)
        self.blobs.append(blob)
        self.propagate_to_params.append(True)
        return blob

    def check_memory(self, size: int, purpose: str) -> None:
        """Refuse to allocate what there is no memory for; call it with what is large.

        Raises:
            OutOfMemoryError: the backend cannot have `size` bytes.
        """
        available = self.backend.available_memory() if size > LARGE else None
        if available is not None and size > available:
            problem = f"{size / 2**30:.1f} GiB are needed for {purpose}, and there are {available / 2**30:.1f} GiB"
            raise OutOfMemoryError(problem, "use a smaller batch_size, image or num_output", available)

    def accumulate(self, index: int) -> bool:
        """Whether to add the gradient of parameter `index` to its diff instead of overwriting it.

        False only at the first call after `Net.clear_param_diffs`, which spares filling the diffs with zeros.
        """
        blob = self.blobs[index]
        started = blob.gradient_started
        blob.gradient_started = True
        return started

    def random_stream(self, index: int = 0) -> RandomStream:
        """The key of random numbers of this layer, the same on every device; each `index` has its own."""
        return RandomStream(self.context.seed, zlib.crc32(f"{self.random_name}/{index}".encode()))

    def scratch(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> ScratchBuffer:
        """The buffer of this name; what it holds does not outlive the pass. Made anew when shape or dtype change."""
        buffer = self.scratch_buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tuple(shape), dtype):
            buffer = self.scratch_buffers[name] = ScratchBuffer(self.backend, tuple(shape), dtype)
        return buffer

    def refuse_in_place(self, bottom: Blobs, top: Blobs) -> None:
        """Check that no top is a bottom, for layers that cannot compute in place.

        Raises:
            ConfigError: a top is one of the bottoms.
        """
        for blob in top:
            if any(blob is other for other in bottom):
                raise self.error(f"cannot work in place; give the top another name than the bottom's '{blob.name}'")

    def save_top(self, top: Blobs) -> None:
        """Keep the first top's data for `backward`, if a later layer overwrites them. Call at the end of `forward`."""
        if not self.tops_overwritten:
            return
        self.backend.copy(top[0].data, self.scratch("top", top[0].shape, self.dtype).array)

    def saved_top(self, top: Blobs) -> Array:
        """The first top's data as `forward` computed them; see `save_top`."""
        return self.scratch("top", top[0].shape, self.dtype).array if self.tops_overwritten else top[0].data

    def first_sample(self) -> int:
        """Global number of the first sample in this pass, for random numbers that belong to samples."""
        number = self.context.passes.number
        return self.context.first_sample(number) if self.context.first_sample else 0

    def counter(self) -> Counter:
        """Counter of the random numbers that belong to samples: (pass, first sample), or both in device memory."""
        self.context.passes.draws = True
        on_device = self.context.passes.on_device
        return (self.context.passes.number, self.first_sample()) if on_device is None else on_device

    def weights(self, index: int = 0) -> Array:
        """A parameter's values in the dtype of the layer's blobs."""
        return self.blobs[index].values_as(self.dtype)

    def error(self, message: str) -> ConfigError:
        """A ConfigError that names the layer."""
        return ConfigError(f"layer '{self.name}' ({self.type}): {message}")

    def data_error(self, message: str) -> DataError:
        """A DataError that names the layer."""
        return DataError(f"layer '{self.name}' ({self.type}): {message}")

    def shape_error(self, message: str, *blobs: Blob) -> ShapeError:
        """A ShapeError that names the layer and the shapes of `blobs`."""
        shapes = "; ".join(f"'{b.name}' is {format_shape(b.shape)}" for b in blobs)
        return ShapeError(f"layer '{self.name}' ({self.type}): {message}" + (f" ({shapes})" if shapes else ""))

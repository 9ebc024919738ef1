"""The base class of layers, their context and registry, arrays under another shape, and helpers of host layers.

A layer type is a class registered under its name in prototxts (Caffe's `layer.hpp`, `layer_factory.hpp`). Layers call
the primitives of a backend and have no device branches. A memory plan may alias their scratch buffers.

`LayoutAdapter` presents arrays under another shape, in logical (N, C, H, W) order, independent of the memory layout.
Images are channels last in memory, which no other module of layers depends on. Flatten, Reshape, InnerProduct,
convolutions whose channels are not axis 1, and losses whose bottoms differ in shape use it.
"""

from __future__ import annotations

import importlib
import logging
import math
import pkgutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar, overload

import numpy as np

from caffepy.backend.cpu.jit.deferred import cpu_count
from caffepy.backend.interface import Backend
from caffepy.backend.types import Array, Counter, RandomStream, element_dtype, is_plain
from caffepy.data.prefetch import never_cancel
from caffepy.data.sharding import Shard, TestSchedule
from caffepy.errors import ConfigError, DataError, OutOfMemoryError, ShapeError
from caffepy.formats.alias import find_alias, replace_alias
from caffepy.formats.blobs import format_shape
from caffepy.formats.dialect import Dialect
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.known_types import describe_missing, layer_modules
from caffepy.utils.registry import Registry, nearest

logger = logging.getLogger(__name__)


class ScratchBuffer:
    """A layer's buffer that every pass overwrites before it reads it: masks, saved bottoms, hidden values.

    It is allocated on first use, unless a memory plan binds it to a slice of its arena.

    Args:
        backend: allocates the buffer.
        shape: of the array.
        dtype: of the elements, as `Backend.zeros` takes it.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.allocated: Array | None = None
        """None before the first use."""
        self._backend = backend

    @property
    def array(self) -> Array:
        """The buffer's array. Do not keep it beyond the pass: a plan may bind another one."""
        if self.allocated is None:
            self.allocated = self._backend.zeros(self.shape, self.dtype)
        return self.allocated

    def bind(self, array: Array) -> None:
        """Use `array`, memory of another owner, as the buffer."""
        assert tuple(array.shape) == self.shape, (array.shape, self.shape)
        self.allocated = array


LAYERS: Registry[type[Layer]] = Registry("layer type")
_REGISTERED: set[str] = set()
"""Types whose classes are not caffepy's own."""
_REPLACED: set[str] = set()
"""Types of `_REGISTERED` that caffepy has too."""

UserClass = TypeVar("UserClass", bound=type[Any])

LARGE_ALLOCATION = 2**28
"""Bytes from which `Layer.check_memory` asks the backend for its available memory."""

Blobs: TypeAlias = "list[Blob]"


@overload
def register_layer(name: str, *, replace: bool = False) -> Callable[[UserClass], UserClass]: ...


@overload
def register_layer(name: str, cls: UserClass, *, replace: bool = False) -> UserClass: ...


def register_layer(name: str, cls: Any = None, *, replace: bool = False) -> Any:
    """Register a class for a layer type of prototxts. Without `cls` it is a decorator: ``@register_layer("Mish")``.

    The class has one of three forms. Objects of the first two have the layer's prototxt as ``self.param``, with all
    fields.

    - ``forward(self, x)`` takes the bottoms' arrays and returns the top's; ``shape(self, x)`` takes their shapes and
      returns the top's, by default the first bottom's; ``backward(self, x, y, dy)`` returns the gradients of the
      bottoms. Without ``backward`` a net does not train through the layer. ``parameters(self, x)`` returns shapes and
      fillers; `caffepy.layers.python.ArrayLayer` has all details.
    - A class with ``setup`` and ``reshape`` has the methods of pycaffe's Python layers, also ``forward`` and, for
      training, ``backward``, and the other attributes of Python layers.
    - A subclass of `caffepy.layers.Layer` runs on the device.

    The class may declare variables of `Layer`: ``bottoms``, ``tops``, ``is_loss``, ``auto_tops``,
    ``no_gradient_bottoms``, ``has_backward``.

    A program may register a type of its own again; the later class holds for nets that are built afterwards.

    Args:
        name: the type, as prototxts write it.
        cls: the class.
        replace: let the class replace a layer type of caffepy.

    Returns:
        The class.

    Raises:
        ConfigError: caffepy has a layer type of this name and `replace` is False, or the class lacks methods.
    """
    if cls is None:
        return lambda decorated: register_layer(name, decorated, replace=replace)
    if cls.__module__.startswith("caffepy."):
        if name not in _REGISTERED:
            LAYERS.register(name)(cls)
        return cls
    built_in = name in layer_modules() or (name in LAYERS and name not in _REGISTERED) or find_alias(name) is not None
    if built_in and not replace:
        raise ConfigError(
            f"caffepy has the layer type '{name}'; give the class another name, or replace the type with "
            f'register_layer("{name}", {cls.__name__}, replace=True)'
        )
    if not issubclass(cls, Layer):
        python: Any = layer_class("Python")
        LAYERS.replace(name, python.calling(name, cls))
    else:
        LAYERS.replace(name, cls)
    _REGISTERED.add(name)
    if built_in:
        _REPLACED.add(name)
        replace_alias(name)
    return cls


def is_registered(type_name: str) -> bool:
    """Return whether a layer type's class is not caffepy's own."""
    return type_name in _REGISTERED


def is_user_defined(type_name: str) -> bool:
    """Return whether a program computes the layers of a type: Python layers and registered types."""
    return type_name == "Python" or is_registered(type_name)


def replaces_built_in(type_name: str) -> bool:
    """Return whether a program's class has replaced a layer type of caffepy."""
    return type_name in _REPLACED


@cache
def import_layer_types() -> None:
    """Import every module of layers and forks, so that all layer types are registered."""
    for folder in ("caffepy.layers", "caffepy.forks"):
        for module in pkgutil.walk_packages(importlib.import_module(folder).__path__, f"{folder}."):
            if not module.ispkg:
                importlib.import_module(module.name)


def is_known(type_name: str) -> bool:
    """Return whether there is a layer type; imports its module, or all modules if the sources do not name the type."""
    if type_name not in LAYERS:
        module = layer_modules().get(type_name)
        if module is None:
            import_layer_types()
        else:
            importlib.import_module(module)
    return type_name in LAYERS


def layer_class(type_name: str, where: str = "") -> type[Layer]:
    """Return the class of a layer type.

    Raises:
        ConfigError: the type is unknown; the message names the Caffe that has it, or the nearest known name.
    """
    if not is_known(type_name):
        prefix = f"{where}: " if where else ""
        if missing := describe_missing(type_name):
            raise ConfigError(f"{prefix}{missing}")
        raise ConfigError(f"{prefix}unknown layer type '{type_name}'; {unknown_type_advice(type_name)}")
    return LAYERS.get(type_name, where)


def unknown_type_advice(type_name: str) -> str:
    """Return what to do about an unknown layer type; all modules of layers are imported."""
    if similar := nearest(type_name, LAYERS):
        return f"did you mean '{similar}'?"
    return (
        f'if a Caffe fork or your program has it, register a class for it: caffepy.register_layer("{type_name}", cls), '
        f"or --plugin FILE; 'caffepy layer-stub {type_name} --proto FILE' begins one; if it is a type of caffepy under "
        f"another name, --alias {type_name}=TYPE (docs/tutorials/unknown-fork.md)"
    )


@dataclass
class PassCounter:
    """The number of forward passes of one net, from which random numbers and data positions follow.

    In training it is iteration * iter_size + the pass within the iteration. Snapshots restore it.
    """

    number: int = 0
    on_device: Counter | None = None
    """The pass number and the number of its first sample in device memory, for captured graphs."""
    uses_random: bool = False
    """Whether a layer draws random numbers (it has called `Layer.counter`)."""

    def following(self, count: int) -> range:
        """Return the numbers of the next passes."""
        return range(self.number, self.number + count)


@dataclass
class LayerContext:
    """Settings and services that all layers of a net share.

    Args:
        backend: runs the net.
        phase: caffe_pb2.TRAIN or TEST.
        seed: 64-bit seed of all random numbers, the same on every rank.
        shard: rank of this device and number of devices in training.
        passes: the net's pass counter.
        test_iter: batches in one test (TEST phase).
        iter_size: passes of one iteration; their batches are prefetched before the first pass.
        max_iter: iterations of the training; 0: unknown.
        resolve: turns a path of the prototxt into an existing one (see `caffepy.formats.paths`).
        timeout: seconds without data from the disk, or without a free slot on the device, after which training fails.
        check_wait: called every 0.1 s while a layer waits for data; it raises to end the wait.
        dialect: which Caffe's numbers layers compute where the two differ; None: the net decides when it is built.
        run_fillers: whether parameters are allocated and get their fillers' values; False for a net that shares the
            parameters of another.
    """

    backend: Backend
    phase: int = caffe_pb2.TRAIN
    seed: int = 0
    shard: Shard = field(default_factory=Shard)
    passes: PassCounter = field(default_factory=PassCounter)
    test_iter: int = 1
    iter_size: int = 1
    max_iter: int = 0
    resolve: Callable[[str], Path] = Path
    timeout: float = 600.0
    check_wait: Callable[[], None] = never_cancel
    dialect: Dialect | None = None
    run_fillers: bool = True
    net_number: int = 0
    """Index among the solver's nets. With `shard.training` it identifies the replicas of a net in this process."""
    forward_only: bool = False
    """Whether no backward pass follows the current forward pass, so that layers save nothing for it."""
    first_sample: Callable[[int], int] | None = None
    """Returns the global number of the device's first sample in a pass. Set by the net's first data layer."""
    describe_sample: Callable[[int, int], str] | None = None
    """Returns the name of a record for messages, given the pass and the index in the device's batch. Set by the first
    data layer."""
    sample_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of one sample by top. A data layer whose tops are all listed does not open its data (memory plans)."""
    all_reduce_mean: Callable[[Array], None] | None = None
    """In-place all-reduce for sync-BN layers; None: each device uses the statistics of its own batch."""
    all_reduce_sum: Callable[[Array], None] | None = None
    """In-place all-reduce of a sum, for losses that count labels; None in test nets and on one device."""
    all_reduce_capturable: bool = False
    """Whether `all_reduce_mean` and `all_reduce_sum` may be captured in a CUDA graph."""
    loss_scale: Array | None = None
    """Loss scale for half precision, one float32 on the device; None: 1. It multiplies the gradient of every loss, and
    the update divides by it."""

    @property
    def nvidia(self) -> bool:
        """Whether layers compute NVIDIA Caffe's numbers where the two Caffes differ."""
        return self.dialect is Dialect.NVIDIA

    @property
    def log_level(self) -> int:
        """The level for messages about the net: INFO on rank 0, DEBUG on other ranks and for replicas of a net."""
        shown = self.shard.rank == 0 and self.backend.holds_values and self.run_fillers
        return logging.INFO if shown else logging.DEBUG

    def number_samples(self, batch: int) -> None:
        """Set `first_sample` for a layer that makes `batch` samples a pass, unless an earlier data layer has set it.

        Each sample of a test has a unique number, independent of the number of devices.
        """

        def first(number: int) -> int:  # reads the shard at each call: the solver may join a group later
            if self.phase == caffe_pb2.TEST:
                return TestSchedule(self.shard, batch, self.test_iter).first_sample(number)
            return (number * self.shard.parts + self.shard.part) * batch

        if self.first_sample is None:
            self.first_sample = first


class Layer:
    """One layer of a net.

    The net calls `setup` once, `reshape` before each forward pass whose bottoms changed shape, `forward` and
    `backward`. Subclasses override these methods and the class variables below.

    Args:
        param: the layer's prototxt.
        context: of the net.
    """

    bottoms: ClassVar[tuple[int, int | None]] = (1, 1)
    """Minimum and maximum number of bottom blobs; None: no limit."""
    tops: ClassVar[tuple[int, int | None]] = (1, 1)
    """Minimum and maximum number of top blobs; None: no limit."""
    equal_bottoms_and_tops: ClassVar[bool] = False
    """Whether the numbers of tops and bottoms must be equal."""
    is_loss: ClassVar[bool] = False
    """Whether the first top's default loss weight is 1."""
    auto_tops: ClassVar[bool] = False
    """Whether the net adds unnamed tops up to the minimum, as Caffe does for losses."""
    no_gradient_bottoms: ClassVar[frozenset[int]] = frozenset()
    """Indices of bottoms without a gradient (labels). The net refuses to backpropagate to them."""
    exact_bottoms: ClassVar[frozenset[int]] = frozenset()
    """Indices of bottoms that stay float32 like labels (masks, regions) and may depend on parameters. Their gradient is
    0."""
    float32_bottoms: ClassVar[frozenset[int]] = frozenset()
    """Indices of bottoms that a layer for half precision reads, and gives a gradient, in float32."""
    no_gradient_tops: ClassVar[frozenset[int]] = frozenset()
    """Indices of tops whose gradient `backward` ignores, as Caffe does. A loss weight there acts on the loss."""
    supports_half: ClassVar[bool] = False
    """Whether bottoms and tops may be float16 or bfloat16. The net gives other layers float32."""
    inherits_dtype: ClassVar[bool] = False
    """Whether the tops default to the first bottom's dtype."""
    independent_pairs: ClassVar[bool] = False
    """Whether each top depends on the bottom of its index only, so that labels may be among the bottoms."""
    keeps_labels: ClassVar[bool] = False
    """Whether tops of label bottoms are labels: the layer moves elements, or maps each element by itself."""
    float32_tops_from: ClassVar[int | None] = None
    """Index of the first top that is always float32 (labels)."""
    prefetches: ClassVar[bool] = False
    """Whether the layer has `prefetch_to_device` and `release_batch`. No graph captures these."""
    changes_shapes: ClassVar[bool] = False
    """Whether `forward` sets the tops' shapes from the bottoms' data. Later layers cannot be captured then."""
    may_keep_shapes: ClassVar[bool] = False
    """Whether a layer that `changes_shapes` may keep the shapes over all passes, so that tests may average its tops."""
    has_backward: ClassVar[bool] = True
    """Whether the layer has a backward pass (Accuracy and data layers have none)."""
    stored_by_count: ClassVar[bool] = False
    """Whether parameters of a file fit if their counts agree, even if their shapes differ."""
    learns: ClassVar[bool] = False
    """Whether learned weights make the tops predictions. `net/deploy.py` takes blobs that depend on no such layer for
    data and targets. Scales and normalisations do not count."""
    reads_shapes_only: ClassVar[bool] = False
    """Whether the tops depend on the bottoms' shapes only (PriorBox), so that the layer has no gradient."""
    recordable: ClassVar[bool] = False
    """Whether `forward` in the TEST phase calls the same primitives of the backend in every pass and nothing else. The
    CPU backend captures its kernel calls once and replays them without Python (net/executor.py). Subclasses
    inherit it: a layer that reads data or draws random numbers on the host sets it to False."""

    def __init__(self, param: caffe_pb2.LayerParameter, context: LayerContext) -> None:
        self.param = param
        self.context = context
        self.backend = context.backend
        self.name = param.name
        self.bottom_names = list(param.bottom)
        """The bottoms' names for messages; see `Blob.title`. Set by the net."""
        self.random_name = param.name
        """Key of the layer's random numbers. The net makes it unique if two layers have the same name."""
        self.type = f"{param.type} (registered)" if replaces_built_in(param.type) else param.type
        """As in the prototxt. A class that replaces a type of caffepy has another name, so that nothing takes it for
        that type."""
        self.blobs: list[Blob] = []
        """The parameters, made in `setup`."""
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
        """Return the dtype of a top. Labels stay float32: float16 represents integers up to 2,048 only."""
        fixed = self.float32_tops_from is not None and index >= self.float32_tops_from
        return "float32" if fixed or not self.supports_half or index in self.label_tops else self.dtype

    # -- overridden by layer types -------------------------------------------------------------------

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read and check the prototxt, and make parameters with `add_parameter`. Called once."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Set the tops' shapes and allocate buffers that depend on the bottoms' shapes.

        Raises:
            ShapeError: the layer does not accept the bottoms' shapes.
        """
        raise NotImplementedError

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Compute the tops' data from the bottoms'."""
        raise NotImplementedError

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """Compute the diffs of the parameters marked in `propagate_to_params` and of the bottoms in `propagate_down`.

        Bottom diffs are overwritten. Parameter diffs are added to the present ones if `accumulate(i)` is true, and
        overwritten otherwise.
        """
        raise NotImplementedError

    def raise_device_errors(self) -> None:
        """Raise errors that kernels recorded on the device, such as labels out of range. The device must be idle."""

    def close(self) -> None:
        """Stop prefetch threads and close files. Idempotent."""

    def capture_blocker(self) -> str | None:
        """Return why this layer cannot be captured in a CUDA graph, or None."""
        return None

    def epoch_size(self) -> int | None:
        """Return the number of records in the source of a data layer; None if the layer reads no records."""
        return None

    def position(self) -> int | None:
        """Return the position in the source, for snapshots; None if the layer reads no records."""
        return None

    def seek(self, position: int) -> None:
        """Start the next pass at the `position` of a snapshot. Called if `position()` is not None."""
        raise NotImplementedError

    def has_side_effects(self) -> bool:
        """Whether a forward pass does more than compute the tops: it writes files, runs a user's code, or counts."""
        return False

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """Whether the passes of a net with this layer must run one after the other on one device.

        They must where a pass reads what earlier passes have left, counts the passes, replaces a file, or takes data
        that have no position. Statistics of a training, which the devices average, do not count. Known from the
        prototxt, because data layers divide the records in `setup`. By default the layers with `state` depend.

        Args:
            param: the layer's prototxt.
            context: of the net.
        """
        return cls.state is not Layer.state

    def communicates(self) -> bool:
        """Whether a pass contains a collective, so that every device has to run it."""
        return False

    def running_statistics(self) -> Sequence[int]:
        """Return the indices of the parameters that the forward pass updates (BatchNorm)."""
        return ()

    def shares_at_setup(self) -> bool:
        """Whether Caffe shares the bottom's memory with the top when it shapes the layer: its passes move nothing."""
        return False

    def copied(self, bottom: Blobs, top: Blobs) -> tuple[Array, Array] | None:
        """Return the bottom's and the top's array, if the top is a copy of what Caffe has in shared memory."""
        return None

    def local_statistics(self) -> Sequence[int]:
        """Return the indices of `running_statistics` whose values differ between devices."""
        return ()

    def state(self) -> Sequence[Array]:
        """Return the arrays other than parameters that a pass hands to the next pass (the hidden state of LSTM)."""
        return ()

    def file_blob_order(self, counts: Sequence[int]) -> Sequence[int]:
        """Return the index in a file of each parameter, given the counts of the file's blobs (older files differ)."""
        return range(len(counts))

    def blob_count_advice(self, number: int) -> str:
        """Return advice for the error that a file has `number` parameters for this layer, too few or too many."""
        return "rename the layer in the net to learn it from scratch"

    def convert_loaded(self, stored: int) -> None:
        """Convert the parameters after they were copied from a file that holds `stored` blobs for this layer."""

    def accepts_shape(self, index: int, shape: tuple[int, ...]) -> bool:
        """Whether a file's values for parameter `index` fit in another shape than the parameter's."""
        return False

    def convert_shape(self, index: int, values: Any) -> Any:
        """Return a file's values for parameter `index`, accepted by `accepts_shape`, in the parameter's shape."""
        raise NotImplementedError

    def waited(self) -> dict[str, float]:
        """Return the seconds that the solver waited for this layer's batches, by stage (`logs.performance_report`).

        Empty for a layer that does not read ahead.
        """
        return {}

    def prefetch_to_device(self, number: int) -> None:
        """Copy the batch of pass `number` to the device. Called before `forward` if `prefetches` is set."""
        raise NotImplementedError

    def transfer_changed(self) -> bool:
        """Whether the last prefetched batch differs in layout from the batch that the last `forward` read."""
        return False

    def shapes_known_until(self, number: int) -> int:
        """Return the first pass >= `number` whose batch may differ in shape or layout from the last prefetched batch.

        Called on layers without bottoms, after the batches of all passes before `number` were prefetched.
        """
        return number

    def release_batch(self, number: int) -> None:
        """Free the device memory of the batch of pass `number`. All readers are already queued on the stream."""
        raise NotImplementedError

    @property
    def fits_by_count(self) -> bool:
        """Whether parameters of a file fit if their counts agree: `stored_by_count`, or DeepLab's `strict_dim`."""
        return self.stored_by_count or not self.param.strict_dim

    # -- used by layer types -------------------------------------------------------------------------

    def add_parameter(self, shape: tuple[int, ...], filler: caffe_pb2.FillerParameter) -> Blob:
        """Make the next parameter. The filler runs at the first use.

        The random numbers depend on the seed, `random_name` and the parameter's index only.
        """
        from caffepy.layers.fillers import filling

        blob = Blob(self.backend, shape, f"{self.name}[{len(self.blobs)}]")
        if self.backend.holds_values and self.context.run_fillers:
            # Values and gradient in float32, and the filler's values in double precision.
            self.check_memory(16 * blob.count, f"its parameter {format_shape(shape)}")
            if filler.file:
                filler = type(filler).FromString(filler.SerializeToString())
                filler.file = str(self.context.resolve(filler.file))
            values = filling(filler, shape, self.random_stream(len(self.blobs)), where=f"layer '{self.name}'")
            blob.fill_with(values)
        self.blobs.append(blob)
        self.propagate_to_params.append(True)
        return blob

    def check_memory(self, size: int, purpose: str) -> None:
        """Check that `size` bytes are available before a large allocation.

        Raises:
            OutOfMemoryError: they are not.
        """
        available = self.backend.available_memory() if size > LARGE_ALLOCATION else None
        if available is not None and size > available:
            problem = f"{size / 2**30:.1f} GiB are needed for {purpose}, and there are {available / 2**30:.1f} GiB"
            raise OutOfMemoryError(problem, "use a smaller batch_size, image or num_output", available)

    def check_top_memory(self, tops: Blobs) -> None:
        """Check that tops fit into memory before anything is computed.

        Raises:
            OutOfMemoryError: they exceed the backend's memory.
        """
        size = sum(top.count * np.dtype(element_dtype(top.dtype)).itemsize for top in tops)
        self.check_memory(size, f"its tops, {', '.join(format_shape(top.shape) for top in tops)}")

    def accumulate(self, index: int) -> bool:
        """Whether to add the gradient of parameter `index` to its diff instead of overwriting it.

        The first call after `Net.clear_param_diffs` returns False, so that no diff has to be filled with zeros.
        """
        blob = self.blobs[index]
        started = blob.gradient_started
        blob.gradient_started = True
        return started

    def random_stream(self, index: int = 0) -> RandomStream:
        """Return the random stream number `index` of this layer, the same on every device."""
        return RandomStream(self.context.seed, zlib.crc32(f"{self.random_name}/{index}".encode()))

    def scratch(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> ScratchBuffer:
        """Return the scratch buffer `name`, a new one if shape or dtype changed. Its contents last for one pass."""
        buffer = self.scratch_buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tuple(shape), dtype):
            buffer = self.scratch_buffers[name] = ScratchBuffer(self.backend, tuple(shape), dtype)
        return buffer

    def refuse_in_place(self, bottom: Blobs, top: Blobs) -> None:
        """Check that no top is a bottom, for layers that do not support in-place computation.

        Raises:
            ConfigError: a top is one of the bottoms.
        """
        for blob in top:
            if any(blob is other for other in bottom):
                raise self.error(f"cannot work in place; give the top another name than the bottom's '{blob.title}'")

    def save_top(self, top: Blobs) -> None:
        """Save the first top's data for `backward` if a later layer overwrites them. Call at the end of `forward`."""
        if not self.tops_overwritten:
            return
        self.backend.copy(top[0].data, self.scratch("top", top[0].shape, self.dtype).array)

    def saved_top(self, top: Blobs) -> Array:
        """Return the first top's data of the last `forward`. Requires `save_top` there."""
        return self.scratch("top", top[0].shape, self.dtype).array if self.tops_overwritten else top[0].data

    def first_sample(self) -> int:
        """Return the global number of the first sample in this pass, for per-sample random numbers."""
        number = self.context.passes.number
        return self.context.first_sample(number) if self.context.first_sample else 0

    def counter(self) -> Counter:
        """Return the counter of per-sample random numbers: (pass, first sample), or the same in device memory."""
        self.context.passes.uses_random = True
        on_device = self.context.passes.on_device
        return (self.context.passes.number, self.first_sample()) if on_device is None else on_device

    def weights(self, index: int = 0) -> Array:
        """Return a parameter's values in the dtype of the layer's blobs."""
        return self.blobs[index].values_as(self.dtype)

    @property
    def where(self) -> str:
        """The layer's name and type, for messages."""
        return f"layer '{self.name}' ({self.type})"

    def error(self, message: str) -> ConfigError:
        """Return a ConfigError that names the layer."""
        return ConfigError(f"{self.where}: {message}")

    def data_error(self, message: str) -> DataError:
        """Return a DataError that names the layer."""
        return DataError(f"{self.where}: {message}")

    def shape_error(self, message: str, *blobs: Blob) -> ShapeError:
        """Return a ShapeError that names the layer and the shapes of `blobs`."""
        shapes = "; ".join(f"'{b.title}' is {format_shape(b.shape)}" for b in blobs)
        return ShapeError(f"{self.where}: {message}" + (f" ({shapes})" if shapes else ""))


class PassNumber:
    """A device number that each forward pass sets, captured ones included.

    Args:
        layer: of the net whose passes are counted.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._number = layer.backend.zeros((1,))

    def load(self) -> Array:
        """Return the number of the present pass, float32 of shape (), from 0. Snapshots restore it."""
        backend, counter = self._layer.backend, self._layer.counter()
        if isinstance(counter, tuple):
            backend.fill(self._number, counter[0])
        else:
            backend.copy(counter[:1], self._number)
        return backend.view(self._number, ())


def flatten_samples(backend: Backend, array: Array) -> Array:
    """Return a view of (N, …) as (N, elements), in memory order within a sample."""
    return backend.flat(array).reshape(array.shape[0], math.prod(array.shape[1:]))


def flatten_pixels(backend: Backend, array: Array) -> Array:
    """Return a view of (N, C, H, W) as (N * H * W, C)."""
    n, c, h, w = array.shape
    return backend.flat(array).reshape(n * h * w, c)


# -- arrays under another shape ------------------------------------------------------------------------


class LayoutAdapter:
    """Presents arrays of `shape` as arrays of `target_shape`: as views where the layout allows, else through a buffer.

    Args:
        backend: of the arrays.
        shape: of the arrays given to `load`, `target` and `store`.
        target_shape: of the result, with as many elements.
        dtype: of the elements.
    """

    def __init__(
        self, backend: Backend, shape: tuple[int, ...], target_shape: tuple[int, ...], dtype: str = "float32"
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._target_shape = target_shape
        self.is_view = shape == target_shape or (is_plain(shape) and is_plain(target_shape))

    def load(self, array: Array) -> Array:
        """Return the elements of `array` under `target_shape`. A later `load` overwrites the buffer."""
        if not self.is_view:
            self.transfer(array, self._buffer)
        return self.target(array)

    def target(self, array: Array) -> Array:
        """Return the array of `target_shape` to write to: a view of `array`, or the buffer. Call `store` afterwards."""
        if self.is_view:
            return self._backend.view(self._backend.flat(array), self._target_shape)
        return self._buffer

    def store(self, array: Array) -> None:
        """Copy the buffer to `array`. Does nothing if `target` returns a view."""
        if not self.is_view:
            self.transfer(self._buffer, array)

    def transfer(self, source: Array, destination: Array) -> None:
        """Copy between an array of `shape` and one of `target_shape`, in either direction."""
        backend = self._backend
        if is_plain(source.shape):
            backend.copy(backend.flat(source).reshape(destination.shape), destination)
        elif is_plain(destination.shape):
            backend.copy(source, backend.flat(destination).reshape(source.shape))
        else:
            backend.copy(source, self._row.reshape(source.shape))
            backend.copy(self._row.reshape(destination.shape), destination)

    @cached_property
    def _buffer(self) -> Array:
        return self._backend.zeros(self._target_shape, self._dtype)

    @cached_property
    def _row(self) -> Array:
        return self._backend.zeros((math.prod(self._target_shape),), self._dtype)


class ZeroPadded:
    """Presents arrays of `shape` as arrays of `padded_shape`, with zeros at the end of some axes.

    Args:
        backend: of the arrays.
        shape: of the arrays given to `load`, `target` and `store`.
        padded_shape: of the result, no shorter along any axis.
        dtype: of the elements.
    """

    def __init__(
        self, backend: Backend, shape: tuple[int, ...], padded_shape: tuple[int, ...], dtype: str = "float32"
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._shape, self._padded_shape = shape, padded_shape
        self._is_same = shape == padded_shape

    def load(self, array: Array) -> Array:
        """Return the elements of `array` with the zeros. A later `load` overwrites the buffer."""
        if not self._is_same:
            self._backend.copy(array, self._unpadded)
        return self.target(array)

    def target(self, array: Array) -> Array:
        """Return the padded array to write to. Call `store` afterwards, which drops the padding.

        Writing to the padding destroys its zeros: do not use `load` of the same object afterwards.
        """
        return array if self._is_same else self._buffer

    def store(self, array: Array) -> None:
        """Copy the elements of `target(array)` to `array`. Does nothing if the shapes are the same."""
        if not self._is_same:
            self._backend.copy(self._unpadded, array)

    @property
    def _unpadded(self) -> Array:
        """The buffer without the padding."""
        return self._buffer[tuple(slice(0, size) for size in self._shape)]

    @cached_property
    def _buffer(self) -> Array:
        return self._backend.zeros(self._padded_shape, self._dtype)


def host_threads(layer: Layer) -> int:
    """Return the number of CPU threads: the CPU backend's, or with a GPU the device's share of the process's cores."""
    return layer.backend.threads or max(cpu_count() // max(layer.context.shard.devices_per_rank, 1), 1)


def warn(layer: Layer, message: str) -> None:
    """Log a warning that names the layer, on rank 0 only."""
    if layer.context.shard.rank == 0 and layer.backend.holds_values:
        logger.warning("%s: %s", layer.where, message)

"""What a layer is: the base class, what a layer is told about its surroundings, and the registry of types.

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
from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError, ShapeError
from caffepy.layers.core.buffer import Temporary
from caffepy.proto import caffe_pb2
from caffepy.registry import Registry

LAYERS: Registry[type[Layer]] = Registry("layer type")
register_layer = LAYERS.register

Blobs: TypeAlias = "list[Blob]"


@cache
def _import_families() -> None:
    """Import all layer types, which register themselves: every module of the folders beside this one."""
    layers = importlib.import_module("caffepy.layers")
    for module in pkgutil.walk_packages(layers.__path__, "caffepy.layers."):
        if not module.ispkg:
            importlib.import_module(module.name)


def layer_class(type_name: str, where: str = "") -> type[Layer]:
    """The class of a layer type; the folders of `caffepy.layers` are searched on the first call.

    Raises:
        ConfigError: there is no such type; the message offers the nearest name.
    """
    _import_families()
    return LAYERS.get(type_name, where)


@dataclass
class PassCounter:
    """Counts the forward passes of one net, so that random numbers and data depend on it and on nothing else.

    In training it is iteration * iter_size + the pass within the iteration; snapshots restore it.
    """

    number: int = 0
    on_device: Counter | None = None
    """The same number, and that of the pass's first sample, where a captured graph finds them."""


@dataclass
class LayerContext:
    """What every layer of one net is told about its surroundings.

    Args:
        backend: the device.
        phase: caffe_pb2.TRAIN or TEST.
        seed: 64-bit seed of all random numbers, the same on every rank.
        shard: the device's place among all that train together.
        passes: the net's pass counter.
        test_iter: batches in one whole test (TEST phase).
        iter_size: passes that are fed before the first of them runs, those of one iteration.
        resolve: turns a path written in the prototxt into one that exists (see `caffepy.config.paths`).
        timeout: seconds without data from the disk, or without room for them on the device, after which training fails.
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
    first_sample: Callable[[int], int] | None = None
    """Global number of the device's first sample in a pass, set by the net's first data layer."""
    describe_sample: Callable[[int, int], str] | None = None
    """Names the record at a place (second) of the device's batch of a pass (first), set by the first data layer."""
    sample_shapes: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    """Shapes of one sample of each top, by layer, for data layers that are not to open their data: a planned net's."""
    average: Callable[[Array], None] | None = None
    """Averages an array over all devices, in place; set where BatchNorm's statistics are to be global."""
    total_over_devices: Callable[[Array], None] | None = None
    """Adds an array up over all devices that train together, in place; None in test nets and on one device."""
    average_captured: bool = False
    """Whether `average` and `total_over_devices` may be captured into a graph."""
    loss_scale: Array | None = None
    """Factor on every loss's gradient, one float32 on the device; None: 1. It keeps half-precision gradients from
    vanishing, and the update takes it out again."""

    @property
    def log_level(self) -> int:
        """What is logged about the net, which is alike on all devices: INFO on rank 0, DEBUG elsewhere."""
        return logging.INFO if self.shard.rank == 0 and self.backend.holds_values else logging.DEBUG


class Layer:
    """One layer of a net.

    The net calls, in this order: `setup` once, `reshape` before each forward pass whose bottoms changed shape,
    `forward`, `backward`. Subclasses set the class variables that say how many blobs they take.

    Args:
        param: the layer's prototxt.
        context: the surroundings.
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
    """Whether tops that the prototxt does not name are made, up to the fewest allowed (losses)."""
    no_gradient_bottoms: ClassVar[frozenset[int]] = frozenset()
    """Bottoms that can never have a gradient (labels); the net refuses to backpropagate to them."""
    no_gradient_tops: ClassVar[frozenset[int]] = frozenset()
    """Tops whose gradient `backward` leaves out, as Caffe does; the net refuses a loss weight there."""
    half: ClassVar[bool] = False
    """Whether bottoms and tops may be kept in half precision; other layers are given float32."""
    follows_bottom: ClassVar[bool] = False
    """Whether the tops are kept as the first bottom is, unless the prototxt says otherwise."""
    keeps_labels: ClassVar[bool] = False
    """Whether tops can be labels where bottoms are: the layer moves numbers, or maps each by itself."""
    exact_tops: ClassVar[int | None] = None
    """First top that is always float32 (labels)."""
    feeds: ClassVar[bool] = False
    """Whether the layer has `feed` and `consumed`, which bring its data to the device outside of any graph."""
    has_backward: ClassVar[bool] = True
    """Whether the layer can propagate at all (Accuracy and data layers cannot)."""

    def __init__(self, param: caffe_pb2.LayerParameter, context: LayerContext) -> None:
        self.param = param
        self.context = context
        self.backend = context.backend
        self.name = param.name
        self.type = param.type
        self.blobs: list[Blob] = []
        """The layer's parameters, made in `setup`."""
        self.propagate_to_params: list[bool] = []
        """Whether each parameter needs its gradient (lr_mult != 0), set by the net."""
        self.tops_overwritten = False
        """Whether a later layer works in place on a top, whose data backward cannot find then; set by the net."""
        self.temporaries: dict[str, Temporary] = {}
        """What `temporary` made, by name."""
        self.dtype = "float32"
        """What the layer's blobs are kept in, set by the net."""
        self.label_tops: frozenset[int] = frozenset()
        """Tops that some layer reads as labels, set by the net before `dtype`."""
        self.loss_weights: list[float] = []
        """Weight of each top in the loss, set by the net; 0: no loss."""
        self.kept_loss: Array | None = None
        """The layer's part of the loss, taken before a later layer overwrites a top of it; shape (). Set by the net."""
        self.reader_propagates = False
        """Whether a later layer gives the first top a gradient, set by the net where that top has a loss weight."""

    def top_dtype(self, index: int) -> str:
        """What a top is kept in."""
        exact = not self.half or (self.exact_tops is not None and index >= self.exact_tops) or index in self.label_tops
        return "float32" if exact else self.dtype

    # -- to be written by layer types ----------------------------------------------------------------

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read the prototxt, check it and make parameters with `add_parameter`. Called once."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Give the tops their shapes and allocate what depends on the bottoms' shapes.

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

    def check(self) -> None:
        """Raise what the device noticed while computing (labels outside the classes); called when it is idle."""

    def close(self) -> None:
        """End what the layer started (prefetch threads, files). Callable twice."""

    def capture_blocker(self) -> str:
        """Why the layer cannot be part of a captured graph; empty if it can."""
        return ""

    def meets_devices(self) -> bool:
        """Whether a pass exchanges something with the other devices, so that all have to make it."""
        return False

    def measured(self) -> Sequence[int]:
        """Which parameters the forward pass changes: running statistics."""
        return ()

    def differing(self) -> Sequence[int]:
        """Those of `measured` that differ between devices that train together, because their batches do."""
        return ()

    def feed(self, number: int) -> None:
        """Bring the data of pass `number` to the device; for layers that have `feeds`, before that pass's `forward`."""
        raise NotImplementedError

    def outdated(self) -> bool:
        """Whether the last `feed` brought its data in another form than the last `forward`, captured or not, took."""
        return False

    def known_until(self, number: int) -> int:
        """The first pass, from `number` on, whose data may have another form than those that were fed last.

        Asked of layers without bottoms when the data of the passes before `number` have been fed.
        """
        return number

    def consumed(self, number: int) -> None:
        """What reads the data of pass `number` has been put on the device's stream."""
        raise NotImplementedError

    # -- tools for layer types -----------------------------------------------------------------------

    def add_parameter(self, shape: tuple[int, ...], filler: caffe_pb2.FillerParameter) -> Blob:
        """Make the next parameter and fill it; the numbers depend on the seed, the layer's name and the index alone."""
        from caffepy.fillers import fill

        blob = Blob(self.backend, shape, f"{self.name}[{len(self.blobs)}]")
        if self.backend.holds_values:
            values = fill(filler, shape, self.random_stream(len(self.blobs)), where=f"layer '{self.name}'")
            self.backend.from_host(values, blob.data)
        self.blobs.append(blob)
        self.propagate_to_params.append(True)
        return blob

    def accumulate(self, index: int) -> bool:
        """Whether the gradient of parameter `index` must be added to its diff; from then on it must.

        False exactly once after each `Net.clear_param_diffs`, so that nobody has to write zeros first.
        """
        blob = self.blobs[index]
        started = blob.gradient_started
        blob.gradient_started = True
        return started

    def random_stream(self, index: int = 0) -> RandomStream:
        """A random sequence of this layer's own; `index` tells several of them apart."""
        return RandomStream(self.context.seed, zlib.crc32(f"{self.name}/{index}".encode()))

    def temporary(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Temporary:
        """An array of the layer's own for use within one pass; the same one each time, until its shape changes."""
        found = self.temporaries.get(name)
        if found is None or (found.shape, found.dtype) != (tuple(shape), dtype):
            found = self.temporaries[name] = Temporary(self.backend, tuple(shape), dtype)
        return found

    def refuse_in_place(self, bottom: Blobs, top: Blobs) -> None:
        """For layers that cannot write their tops over their bottoms.

        Raises:
            ConfigError: a top is one of the bottoms.
        """
        for blob in top:
            if any(blob is other for other in bottom):
                raise self.error(f"cannot work in place; give the top another name than the bottom's '{blob.name}'")

    def save_top(self, top: Blobs) -> None:
        """To be called at the end of `forward` by layers whose backward pass reads the first top's data."""
        if not self.tops_overwritten:
            return
        self.backend.copy(top[0].data, self.temporary("top", top[0].shape, self.dtype).array)

    def saved_top(self, top: Blobs) -> Array:
        """The first top's data as `forward` left them."""
        return self.temporary("top", top[0].shape, self.dtype).array if self.tops_overwritten else top[0].data

    def first_sample(self) -> int:
        """Global number of the first sample in this pass, for random numbers that belong to samples."""
        number = self.context.passes.number
        return self.context.first_sample(number) if self.context.first_sample else 0

    def counter(self) -> Counter:
        """The place of this pass in the random numbers that belong to samples."""
        on_device = self.context.passes.on_device
        return (self.context.passes.number, self.first_sample()) if on_device is None else on_device

    def weights(self, index: int = 0) -> Array:
        """A parameter's values in the dtype of the layer's blobs."""
        return self.blobs[index].values_as(self.dtype)

    def error(self, message: str) -> ConfigError:
        """A ConfigError that names the layer."""
        return ConfigError(f"layer '{self.name}' ({self.type}): {message}")

    def shape_error(self, message: str, *blobs: Blob) -> ShapeError:
        """A ShapeError that names the layer and the shapes of `blobs`."""
        shapes = "; ".join(f"'{b.name}' is {format_shape(b.shape)}" for b in blobs)
        return ShapeError(f"layer '{self.name}' ({self.type}): {message}" + (f" ({shapes})" if shapes else ""))

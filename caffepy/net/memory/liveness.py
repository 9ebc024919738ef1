"""A net that is built and run without a device, to see when each of its arrays is needed.

Owns the rules for which arrays may share memory. The layers' own code runs on `MetaBackend`: there is no second
description of what a layer reads, writes or allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from caffepy.backend.meta.array import SETUP, Memory, MetaArray
from caffepy.backend.meta.backend import MetaBackend
from caffepy.blob import Blob
from caffepy.layers.core.base import Layer, LayerContext, PassCounter
from caffepy.layers.core.buffer import Temporary
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.net.net import Net
from caffepy.proto import caffe_pb2

INPUTS, BLOBS, BUFFERS = "inputs", "blobs", "layers' buffers"
PARAMETERS, GRADIENTS, COPIES = "parameters", "gradients", "half copies"
KINDS = (PARAMETERS, GRADIENTS, COPIES, INPUTS, BLOBS, BUFFERS)
"""What memory is for, as `LivenessAnalysis.lasting` tells it apart."""


@dataclass(frozen=True)
class Place:
    """Where a net keeps an array that may share memory with others.

    Args:
        node: number of the layer in the net's schedule.
        part: ``data`` or ``diff`` of a top, or the name of a layer's temporary.
        index: which top; for a temporary which layer of a fused one, from 1 on, or 0 for the layer itself.
        is_blob: whether it is a top's.
    """

    node: int
    part: str
    index: int
    is_blob: bool

    def find(self, net: Net, shape: tuple[int, ...], dtype: str) -> Blob | Temporary:
        """What holds the array in a net; a layer's temporary need not be there before the first pass."""
        node = net.schedule[self.node]
        if self.is_blob:
            return node.tops[self.index]
        return _owners(node.layer)[self.index].temporary(self.part, shape, dtype)

    def bind(self, net: Net, array: Any, dtype: str) -> None:
        """Give the net this array to keep there."""
        holder = self.find(net, tuple(array.shape), dtype)
        if isinstance(holder, Blob):
            assert holder.dtype == dtype, f"{holder} is kept in {holder.dtype}, the plan is for {dtype}"
            holder.bind(**{self.part: array})
        else:
            holder.bind(array)

    def title(self, net: Net) -> str:
        """What tables call it."""
        node = net.schedule[self.node]
        return f"{node.tops[self.index].name} {self.part}" if self.is_blob else f"({self.part})"


class LivenessAnalysis:
    """A net on a `MetaBackend`, after one iteration.

    Args:
        param: the net as read.
        context: its surroundings on the device that it is planned for; they are left as they are.
        state: as `Net` takes it.
        fuse: as `Net` takes it.
        backward: whether the iteration has a backward pass.
    """

    def __init__(
        self,
        param: caffe_pb2.NetParameter,
        context: LayerContext,
        state: caffe_pb2.NetState | None,
        fuse: bool,
        backward: bool,
    ) -> None:
        self.backend = MetaBackend(context.backend)
        surroundings = replace(
            context, backend=self.backend, passes=PassCounter(), first_sample=None, describe_sample=None
        )
        self.net = Net(param, surroundings, state, fuse)
        try:
            self._run(backward)
        finally:
            self.net.close()
        self._backward = backward

    @property
    def steps(self) -> int:
        """How many there are: the layers forward, then backward."""
        return len(self.net.schedule) * (2 if self._backward else 1)

    def step_name(self, step: int) -> str:
        """A step in words."""
        count = len(self.net.schedule)
        node = self.net.schedule[step if step < count else 2 * count - 1 - step]
        return f"{'forward' if step < count else 'backward'} of layer '{node.layer.name}' ({node.layer.type})"

    # -- the run -------------------------------------------------------------------------------------

    def _run(self, backward: bool) -> None:
        net = self.net
        net.debug_info = False
        last = 2 * len(net.schedule) - 1
        for number, node in enumerate(net.schedule):
            layer = node.layer
            outside = not node.bottoms and not isinstance(layer, PrefetchingLayer)
            forward = partial(_allocate, node.tops) if outside else layer.forward
            self._replace(layer, "forward", number, forward)
            self._replace(layer, "backward", last - number, layer.backward)
        net.prepare()
        self.backend.step = 0
        net.forward()
        if backward:
            net.backward()
        for blob in self._read_afterwards():
            array = blob.allocated("data")
            if array is not None:
                array.memory.lasting = True

    def _replace(self, layer: Layer, name: str, step: int, method: Callable[..., None]) -> None:
        """Let a layer's method say first which step it is."""

        def stepping(*arguments: Any) -> None:
            self.backend.step = step
            method(*arguments)

        setattr(layer, name, stepping)

    def _read_afterwards(self) -> Iterator[Blob]:
        """Blobs whose values are looked at when an iteration is over: outputs, losses and labels, for messages."""
        yield from self.net.outputs.values()
        for node in self.net.schedule:
            yield from (top for top, weight in zip(node.tops, node.layer.loss_weights, strict=True) if weight)
            yield from (node.bottoms[j] for j in node.layer.no_gradient_bottoms if j < len(node.bottoms))

    # -- what was seen -------------------------------------------------------------------------------

    def shareable(self) -> dict[Place, Memory]:
        """Arrays that hold nothing from one iteration to the next, and where the net keeps each."""
        found: dict[Memory, Place] = {}
        for place, array in self._arrays():
            memory = array.memory
            usable = not memory.lasting and memory.made != SETUP and memory.first is not None
            if usable and array.part == memory.whole and array.shape == memory.shape:
                found.setdefault(memory, place)
        return {place: memory for memory, place in found.items()}

    def _arrays(self) -> Iterator[tuple[Place, MetaArray]]:
        """Blobs' and temporaries' arrays; of several blobs over one memory the one that allocated it comes first.

        Layers hand values down to their tops and gradients up to their bottoms.
        """
        schedule = list(enumerate(self.net.schedule))
        for part, order in (("data", schedule), ("diff", schedule[::-1])):
            for number, node in order:
                for index, top in enumerate(node.tops):
                    if (array := top.allocated(part)) is not None:
                        yield Place(number, part, index, True), array
        for number, node in schedule:
            for index, owner in enumerate(_owners(node.layer)):
                for name, temporary in owner.temporaries.items():
                    if temporary.allocated is not None:
                        yield Place(number, name, index, False), temporary.allocated

    def lasting(self) -> dict[str, int]:
        """Bytes, by KINDS, of everything that does not share memory; what nobody holds any more is not counted."""
        kinds = self._kinds()
        shared = set(self.shareable().values())
        sizes = dict.fromkeys(KINDS, 0)
        for memory in self.backend.memories:
            if memory not in shared:
                sizes[kinds.get(memory, BUFFERS)] += memory.nbytes
        readers = (layer for layer in self.net.layers if isinstance(layer, PrefetchingLayer))
        sizes[INPUTS] += sum(layer.ring_bytes() for layer in readers)
        return sizes

    def _kinds(self) -> dict[Memory, str]:
        net = self.net
        kinds: dict[Memory, str] = {}
        for place, array in self._arrays():
            if place.is_blob:
                source = place.part == "data" and not net.schedule[place.node].bottoms
                kinds.setdefault(array.memory, INPUTS if source else BLOBS)
        for blob in (blob for layer in net.layers for blob in layer.blobs):
            for part, kind in (("data", PARAMETERS), ("diff", GRADIENTS)):
                if (held := blob.allocated(part)) is not None:
                    kinds[held.memory] = kind
            kinds.update((copy.memory, COPIES) for copy in blob.copies.values())
        return kinds


def _owners(layer: Layer) -> list[Layer]:
    """A layer and those that it stands for."""
    return [layer, *getattr(layer, "members", [])]


def _allocate(tops: Sequence[Blob], *_: Any) -> None:
    """Stands for the forward pass of Input and DummyData: what their tops hold may be from an earlier pass."""
    for top in tops:
        assert top.data is not None

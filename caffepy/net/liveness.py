"""Liveness analysis: a net runs on the meta device, which records the steps that use each array.

Owns the rules for which arrays may share memory. The layers' own code runs on `MetaBackend`, so reads, writes and
allocations need no second description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from caffepy.backend.meta import SETUP, Memory, MetaArray, MetaBackend
from caffepy.blob import Blob
from caffepy.layers.core.base import Layer, LayerContext, PassCounter
from caffepy.layers.core.buffer import ScratchBuffer
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.net.fold import FoldedConvolution
from caffepy.net.net import Net
from caffepy.proto import caffe_pb2

INPUTS, BLOBS, BUFFERS = "inputs", "blobs", "layers' buffers"
PARAMETERS, GRADIENTS, COPIES, FOLDED = "parameters", "gradients", "half copies", "folded weights"
KINDS = (PARAMETERS, GRADIENTS, COPIES, FOLDED, INPUTS, BLOBS, BUFFERS)
"""Categories of memory, as in `LivenessAnalysis.lasting`."""


@dataclass(frozen=True)
class ArrayRef:
    """The identity of an array that may share memory, independent of a net object.

    Args:
        node: number of the layer in the net's schedule.
        part: ``data`` or ``diff`` of a top, or the name of a layer's scratch buffer.
        index: the top's index; for a scratch buffer the member of a fused layer, from 1, or 0 for the layer itself.
        is_blob: whether the array is a top's data or diff.
    """

    node: int
    part: str
    index: int
    is_blob: bool

    def find(self, net: Net, shape: tuple[int, ...], dtype: str) -> Blob | ScratchBuffer:
        """Return the blob or scratch buffer in a net; a scratch buffer is created if the layer has not yet run."""
        node = net.schedule[self.node]
        if self.is_blob:
            return node.tops[self.index]
        return _owners(node.layer)[self.index].scratch(self.part, shape, dtype)

    def bind(self, net: Net, array: Any, dtype: str) -> None:
        """Make the net's blob or scratch buffer use `array`."""
        holder = self.find(net, tuple(array.shape), dtype)
        if isinstance(holder, Blob):
            assert holder.dtype == dtype, f"{holder} has dtype {holder.dtype}, the plan is for {dtype}"
            holder.bind(**{self.part: array})
        else:
            holder.bind(array)

    def title(self, net: Net) -> str:
        """Return the array's name for tables."""
        node = net.schedule[self.node]
        return f"{node.tops[self.index].name} {self.part}" if self.is_blob else f"({self.part})"


class LivenessAnalysis:
    """One iteration of a net on a `MetaBackend`; a step is the forward or backward pass of one layer.

    Args:
        param: the net as read.
        context: the context on the device that the plan is for; it is not changed.
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
        meta_context = replace(
            context, backend=self.backend, passes=PassCounter(), first_sample=None, describe_sample=None
        )
        self.net = Net(param, meta_context, state, fuse)
        try:
            self._run(backward)
        finally:
            self.net.close()
        self._backward = backward

    @property
    def steps(self) -> int:
        """The number of steps: each layer forward, then each backward."""
        return len(self.net.schedule) * (2 if self._backward else 1)

    def step_name(self, step: int) -> str:
        """Return the name of a step for messages."""
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
            user_filled = not node.bottoms and not isinstance(layer, PrefetchingLayer)
            forward = partial(_allocate, node.tops) if user_filled else layer.forward
            self._count_step(layer, "forward", number, forward)
            self._count_step(layer, "backward", last - number, layer.backward)
        net.prepare()
        self.backend.step = 0
        net.forward()
        if backward:
            net.backward()
        for blob in self._read_afterwards():
            array = blob.allocated("data")
            if array is not None:
                array.memory.lasting = True

    def _count_step(self, layer: Layer, name: str, step: int, method: Callable[..., None]) -> None:
        """Wrap a layer's method so that it sets the backend's step first."""

        def wrapped(*arguments: Any) -> None:
            self.backend.step = step
            method(*arguments)

        setattr(layer, name, wrapped)

    def _read_afterwards(self) -> Iterator[Blob]:
        """Yield blobs that are read after the iteration: outputs, losses, and labels (for messages)."""
        yield from self.net.outputs.values()
        for node in self.net.schedule:
            yield from (top for top, weight in zip(node.tops, node.layer.loss_weights, strict=True) if weight)
            yield from (node.bottoms[j] for j in node.layer.no_gradient_bottoms if j < len(node.bottoms))

    # -- results ------------------------------------------------------------------------------------

    def shareable(self) -> dict[ArrayRef, Memory]:
        """Return the arrays that may share memory: their contents do not outlive an iteration."""
        refs: dict[Memory, ArrayRef] = {}
        for ref, array in self._arrays():
            memory = array.memory
            usable = not memory.lasting and memory.made != SETUP and memory.first is not None
            if usable and array.part == memory.whole and array.shape == memory.shape:
                refs.setdefault(memory, ref)
        return {ref: memory for memory, ref in refs.items()}

    def _arrays(self) -> Iterator[tuple[ArrayRef, MetaArray]]:
        """Yield all arrays of blobs and scratch buffers; among blobs that share memory the allocating blob comes first.

        Split and Reshape pass data on in schedule order and diffs in reverse order, hence the two orders.
        """
        schedule = list(enumerate(self.net.schedule))
        for part, order in (("data", schedule), ("diff", schedule[::-1])):
            for number, node in order:
                for index, top in enumerate(node.tops):
                    if (array := top.allocated(part)) is not None:
                        yield ArrayRef(number, part, index, True), array
        for number, node in schedule:
            for index, owner in enumerate(_owners(node.layer)):
                for name, buffer in owner.scratch_buffers.items():
                    if buffer.allocated is not None:
                        yield ArrayRef(number, name, index, False), buffer.allocated

    def lasting(self) -> dict[str, int]:
        """Return the bytes, by KINDS, of all live arrays that do not share memory."""
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
        for ref, array in self._arrays():
            if ref.is_blob:
                source = ref.part == "data" and not net.schedule[ref.node].bottoms
                kinds.setdefault(array.memory, INPUTS if source else BLOBS)
        for blob in (blob for layer in net.layers for blob in layer.blobs):
            for part, kind in (("data", PARAMETERS), ("diff", GRADIENTS)):
                parameter = blob.allocated(part)
                if parameter is not None:
                    kinds[parameter.memory] = kind
            kinds.update((copy.memory, COPIES) for copy in blob.copies.values())
        for layer in (node.layer for node in net.schedule):
            if isinstance(layer, FoldedConvolution):
                kinds.update((array.memory, FOLDED) for array in layer.folded)
        return kinds


def _owners(layer: Layer) -> list[Layer]:
    """Return a layer and, if it is fused, its members."""
    return [layer, *getattr(layer, "members", [])]


def _allocate(tops: Sequence[Blob], *_: Any) -> None:
    """Replaces the forward pass of Input and DummyData, whose tops may keep their data over several passes."""
    for top in tops:
        assert top.data is not None

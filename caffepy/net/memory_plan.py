"""Memory plans: the memory that a net needs, and offsets in one arena for arrays that are never live together.

A plan is made from the prototxt, without building the net, and bound to the net before its first pass. A blob that is
reshaped later leaves the arena and allocates its own memory, so that an outdated plan wastes memory but is never wrong.

Finding the smallest arena is as hard as bin packing; greedy placement, largest arrays first, comes close (Pisarchyk and
Lee 2020, "Efficient Memory Management for Deep Neural Net Inference"). Several orders are tried; for the nets in
models/ the best is within 0.5 % of the lower bound. Each order compares all pairs of arrays. Nets of thousands of
layers are placed in the order of their steps only, as by an allocator, in nearly linear time.

Liveness analysis: a net runs on the meta device, which records the steps that use each array.

Owns the rules for which arrays may share memory. The layers' own code runs on `MetaBackend`, so reads, writes and
allocations need no second description.
"""

from __future__ import annotations

from bisect import bisect, bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

from caffepy.backend.interface import Backend
from caffepy.backend.meta import SETUP, Memory, MetaArray, MetaBackend
from caffepy.backend.types import Array, aligned_bytes
from caffepy.errors import BlobSizeError, OutOfMemoryError
from caffepy.formats.load import filter_net, net_state
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.layers.layer import Layer, LayerContext, PassCounter, ScratchBuffer, layer_class
from caffepy.net.fold import FoldedConvolution
from caffepy.net.net import Net

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
        built = [(top, top.shape) for node in net.schedule for top in node.tops]
        net.forward()
        if backward:
            net.backward()
        # Layers that find boxes give their tops other shapes in a pass than in a net that is built.
        self._resized = {top for top, shape in built if top.shape != shape}
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
            resized = ref.is_blob and self.net.schedule[ref.node].tops[ref.index] in self._resized
            usable = not memory.lasting and memory.made != SETUP and memory.first is not None and not resized
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


@dataclass(frozen=True)
class Lifetime:
    """The steps in which an array is live.

    Args:
        size: bytes.
        first: the first step that uses it.
        last: the last step that uses it.
    """

    size: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """Return whether both arrays are live in some step."""
        return self.first <= other.last and other.first <= self.last


_COMPARED = 2000
"""The most arrays of which all pairs are compared; more than twice those of ResNet-152."""


def assign_offsets(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset for each array and the arena's bytes; arrays live at the same time do not overlap."""
    if len(lifetimes) > _COMPARED:
        return _place_in_order_of_steps(lifetimes)
    live = live_bytes(lifetimes)
    best: tuple[list[int], int] | None = None
    for order in _orders(lifetimes, live):
        placement = _place(lifetimes, order)
        if best is None or placement[1] < best[1]:
            best = placement
        if best[1] == max(live, default=0):
            break
    assert best is not None
    return best


def live_bytes(lifetimes: Sequence[Lifetime]) -> list[int]:
    """Return the live bytes of each step; their maximum is a lower bound of any arena."""
    changes = [0] * (max((life.last for life in lifetimes), default=-1) + 2)
    for life in lifetimes:
        changes[life.first] += aligned_bytes(life.size)
        changes[life.last + 1] -= aligned_bytes(life.size)
    return list(accumulate(changes[:-1]))


def widest_gaps(lifetimes: Sequence[Lifetime], offsets: Sequence[int], arena: int, steps: int) -> list[tuple[int, int]]:
    """Return for each step the widest range of the arena, (begin, end), without a live array."""
    made, ended = _by_step(lifetimes, steps)
    ranges, widest = _Ranges(arena), []
    for step in range(steps):
        for index in ended[step]:
            ranges.remove(offsets[index], offsets[index] + aligned_bytes(lifetimes[index].size))
        for index in made[step]:
            ranges.add(offsets[index], offsets[index] + aligned_bytes(lifetimes[index].size))
        widest.append(ranges.widest_gap())
    return widest


def _by_step(lifetimes: Sequence[Lifetime], steps: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return for each step the arrays that are live from it on, and the arrays that were live until the step before."""
    made: list[list[int]] = [[] for _ in range(steps)]
    ended: list[list[int]] = [[] for _ in range(steps + 1)]
    for index, life in enumerate(lifetimes):
        if life.size:
            made[life.first].append(index)
            ended[life.last + 1].append(index)
    return made, ended


class _Ranges:
    """Ranges of an arena that do not overlap, and the gaps between them.

    Args:
        arena: bytes.
    """

    def __init__(self, arena: int) -> None:
        self._ranges = [(0, 0), (arena, arena)]
        """Sorted, with an empty range at each end."""
        self._gaps = {(0, arena)} if arena else set()
        self._heap = [(-arena, 0, arena)]
        """The gaps by width, and gaps that no longer exist."""

    def add(self, begin: int, end: int) -> None:
        at = bisect(self._ranges, (begin, end))
        before, after = self._ranges[at - 1][1], self._ranges[at][0]
        self._ranges.insert(at, (begin, end))
        self._gaps.discard((before, after))
        self._add_gap(before, begin)
        self._add_gap(end, after)

    def remove(self, begin: int, end: int) -> None:
        at = bisect_left(self._ranges, (begin, end))
        before, after = self._ranges[at - 1][1], self._ranges[at + 1][0]
        del self._ranges[at]
        self._gaps -= {(before, begin), (end, after)}
        self._add_gap(before, after)

    def _add_gap(self, begin: int, end: int) -> None:
        if end > begin:
            self._gaps.add((begin, end))
            heappush(self._heap, (begin - end, begin, end))

    def widest_gap(self) -> tuple[int, int]:
        """Return the first of the widest gaps; (0, 0) if there is none."""
        while self._heap and self._heap[0][1:] not in self._gaps:
            heappop(self._heap)
        return self._heap[0][1:] if self._heap else (0, 0)


def _orders(lifetimes: Sequence[Lifetime], live: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield orders of placement to try."""
    fullest = sorted(range(len(live)), key=lambda step: (-live[step], step))
    rank = {step: i for i, step in enumerate(fullest)}
    keys: list[Callable[[Lifetime], tuple[int, int]]] = [
        lambda life: (-life.size, life.first),
        lambda life: (min(rank[step] for step in range(life.first, life.last + 1)), -life.size),
        lambda life: (-life.size * (life.last - life.first + 1), life.first),
        lambda life: (life.first - life.last, -life.size),
        lambda life: (life.first, -life.size),
    ]
    for key in keys:
        yield sorted(range(len(lifetimes)), key=lambda index: key(lifetimes[index]))


def _place(lifetimes: Sequence[Lifetime], order: Sequence[int]) -> tuple[list[int], int]:
    """Place each array into the smallest gap that holds it, else behind all arrays live at the same time."""
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, Lifetime]] = []
    for index in order:
        life = lifetimes[index]
        size = aligned_bytes(life.size)
        offsets[index] = _best_gap([(begin, end) for begin, end, other in placed if life.overlaps(other)], size)
        insort(placed, (offsets[index], offsets[index] + size, life), key=lambda entry: entry[0])
    return offsets, max((end for _, end, _ in placed), default=0)


def _place_in_order_of_steps(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Place each array, in the order of the steps, into the smallest free block that holds it, else at the end."""
    steps = max((life.last for life in lifetimes), default=-1) + 1
    made, ended = _by_step(lifetimes, steps)
    offsets, free, arena = [0] * len(lifetimes), _FreeBlocks(), 0
    for step in range(steps):
        for index in ended[step]:
            free.add(offsets[index], offsets[index] + aligned_bytes(lifetimes[index].size))
        for index in sorted(made[step], key=lambda index: -lifetimes[index].size):
            size = aligned_bytes(lifetimes[index].size)
            offsets[index] = free.take(size, arena)
            arena = max(arena, offsets[index] + size)
    return offsets, arena


class _FreeBlocks:
    """The free blocks of an arena that grows at its end; blocks that touch are one."""

    def __init__(self) -> None:
        self._by_begin: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        """Size and begin, sorted."""

    def add(self, begin: int, end: int) -> None:
        """Free a block."""
        if begin in self._by_end:
            begin, _ = self._remove(self._by_end[begin])
        if end in self._by_begin:
            _, end = self._remove(end)
        self._insert(begin, end)

    def take(self, size: int, arena: int) -> int:
        """Return the begin of the smallest block that holds `size` bytes, else of the arena's free end."""
        at = bisect_left(self._by_size, (size, 0))
        if at < len(self._by_size):
            begin, end = self._remove(self._by_size[at][1])
            if end - begin > size:
                self._insert(begin + size, end)
            return begin
        return self._remove(self._by_end[arena])[0] if arena in self._by_end else arena

    def _insert(self, begin: int, end: int) -> None:
        self._by_begin[begin], self._by_end[end] = end, begin
        insort(self._by_size, (end - begin, begin))

    def _remove(self, begin: int) -> tuple[int, int]:
        end = self._by_begin.pop(begin)
        del self._by_end[end]
        del self._by_size[bisect_left(self._by_size, (end - begin, begin))]
        return begin, end


def _best_gap(ranges: Sequence[tuple[int, int]], size: int) -> int:
    """Return the start of the smallest gap of at least `size` bytes between ranges sorted by start."""
    best, smallest, reached = -1, 0, 0
    for begin, end in ranges:
        gap = begin - reached
        if gap >= size and (best < 0 or gap < smallest):
            best, smallest = reached, gap
        reached = max(reached, end)
    return reached if best < 0 else best


MEBIBYTE, GIBIBYTE = 2**20, 2**30


@dataclass(frozen=True)
class ArenaSlot:
    """An array in the arena.

    Args:
        ref: the array in the net.
        title: name for tables.
        layer: the layer's name.
        shape: dimensions.
        dtype: dtype of the elements.
        life: its size and live steps.
        offset: offset in the arena in bytes.
    """

    ref: ArrayRef
    title: str
    layer: str
    shape: tuple[int, ...]
    dtype: str
    life: Lifetime
    offset: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a net: the arena's layout and the sizes of all other allocations.

    Args:
        net: the net's name.
        slots: the arrays that share the arena.
        arena: bytes of the arena.
        live: bytes of the live slots of each step.
        steps: names of the steps.
        lasting: bytes of all other arrays by category (`caffepy.net.memory_plan.KINDS`).
        gaps: widest range (begin, end) without live slots of each step.
        workspaces: for each step with a convolution the largest workspace that the backend allocates for it.
        least_workspace: bytes of workspace without any convolution.
    """

    net: str
    slots: Sequence[ArenaSlot]
    arena: int
    live: Sequence[int]
    steps: Sequence[str]
    lasting: dict[str, int]
    gaps: Sequence[tuple[int, int]]
    workspaces: dict[int, int]
    least_workspace: int

    @property
    def alone(self) -> int:
        """Bytes of the slots without sharing."""
        return sum(aligned_bytes(slot.life.size) for slot in self.slots)

    @property
    def bound(self) -> int:
        """The lower bound of the arena's bytes: the maximum of `live`."""
        return max(self.live, default=0)

    @property
    def peak(self) -> int:
        """The step with the most live bytes."""
        return list(self.live).index(self.bound) if self.live else 0

    def history(self, histories: int) -> int:
        """Return the bytes of a solver's history with `histories` values per parameter."""
        return self.lasting[PARAMETERS] * histories

    def workspace(self, share: bool = True) -> int:
        """Return the bytes of the largest workspace outside the arena; a workspace that fits into a gap costs
        nothing."""
        gaps = [end - begin if share else 0 for begin, end in self.gaps]
        outside = [size for step, size in self.workspaces.items() if size > gaps[step]]
        return max(outside, default=self.least_workspace)

    def total(self, histories: int = 0, share: bool = True) -> int:
        """Return the bytes of everything but the workspace."""
        return sum(self.lasting.values()) + (self.arena if share else self.alone) + self.history(histories)

    def at_peak(self) -> list[ArenaSlot]:
        """Return the slots that are live in the peak step, largest first."""
        live = [slot for slot in self.slots if slot.life.first <= self.peak <= slot.life.last]
        return sorted(live, key=lambda slot: -slot.life.size)

    def bind(self, net: Net, arena: Array) -> None:
        """Bind a net's arrays to their slots and its nodes' workspaces to the gaps. Call before the first pass.

        Args:
            net: a net built with the arguments of the plan.
            arena: at least `self.arena` bytes; nets that never run concurrently can share it.
        """
        assert arena.nbytes >= self.arena, (arena.nbytes, self.arena)
        for slot in self.slots:
            slot.ref.bind(net, net.backend.view_at(arena, slot.offset, slot.shape, slot.dtype), slot.dtype)
        workspaces = [arena[begin:end] for begin, end in self.gaps]
        for node, workspace in zip(net.schedule, workspaces, strict=False):
            node.forward_workspace = workspace
        for node, workspace in zip(reversed(net.schedule), workspaces[len(net.schedule) :], strict=False):
            node.backward_workspace = workspace

    def new_arena(self, backend: Backend) -> Array:
        """Allocate the memory for `bind`.

        Raises:
            OutOfMemoryError: not enough memory; the message names the layer of the peak step.
        """
        try:
            return backend.arena(self.arena)
        except OutOfMemoryError as error:
            raise error.within(f"net '{self.net}', which needs the most in {self.steps[self.peak]}") from error


def plan_memory(
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState | None = None,
    fuse: bool = False,
    backward: bool | None = None,
) -> MemoryPlan:
    """Plan the memory of a net without building it.

    Data layers open their data for its shape unless `context.sample_shapes` gives it (see `sample_shapes`).

    Args:
        param: the net as read.
        context: the net's context; the plan is for a backend like `context.backend`, which can be a `MetaBackend`.
        state: as `Net` takes it.
        fuse: as `Net` takes it.
        backward: whether backward passes run; None: in the TRAIN phase.
    """
    training = context.phase == caffe_pb2.TRAIN
    analysis = LivenessAnalysis(param, context, state, fuse, training if backward is None else backward)
    arrays = list(analysis.shareable().items())
    lives = []
    for _, memory in arrays:
        assert memory.first is not None
        assert memory.last is not None
        lives.append(Lifetime(memory.nbytes, memory.first, memory.last))
    offsets, arena = assign_offsets(lives)
    schedule = analysis.net.schedule
    slots = [
        ArenaSlot(ref, ref.title(analysis.net), schedule[ref.node].layer.name, memory.shape, memory.dtype, life, offset)
        for (ref, memory), life, offset in zip(arrays, lives, offsets, strict=True)
    ]
    steps = [analysis.step_name(step) for step in range(analysis.steps)]
    gaps = widest_gaps(lives, offsets, arena, analysis.steps)
    backend = analysis.backend
    workspaces = {step: backend.workspace(size) for step, size in backend.convolutions.items() if step != SETUP}
    lasting = analysis.lasting()
    return MemoryPlan(
        param.name, slots, arena, live_bytes(lives), steps, lasting, gaps, workspaces, backend.workspace(0)
    )


def sample_shapes(net: Net) -> dict[str, tuple[int, ...]]:
    """Return `LayerContext.sample_shapes` from a net with open data, for another net with the same layers."""
    return {
        top.name: top.shape[1:] for node in net.nodes if isinstance(node.layer, PrefetchingLayer) for top in node.tops
    }


def read_sample_shapes(
    param: caffe_pb2.NetParameter, context: LayerContext, state: caffe_pb2.NetState | None = None
) -> dict[str, tuple[int, ...]]:
    """Return `LayerContext.sample_shapes` without building the net; each data source is opened once.

    Raises:
        DataError: a source cannot be opened.
    """
    filtered = filter_net(param, state or net_state(context.phase, param.state, net_state(context.phase)))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer_param in filtered.layer:
        kind = layer_class(layer_param.type, f"layer '{layer_param.name}'")
        if issubclass(kind, PrefetchingLayer) and not set(layer_param.top) <= set(context.sample_shapes):
            source, found = kind(layer_param, context).open()
            source.close()
            shapes |= {top: tuple(shape) for top, shape in zip(layer_param.top, found, strict=False)}
    return shapes


def describe(plan: MemoryPlan, histories: int, device: str) -> str:
    """Return the log line on the memory of a training."""
    parts = [f"blobs {_amount(plan.arena)} (shared; {_amount(plan.alone)} without sharing)"]
    sizes = {
        "other blobs": plan.lasting[BLOBS],
        INPUTS: plan.lasting[INPUTS],
        BUFFERS: plan.lasting[BUFFERS],
        PARAMETERS: plan.lasting[PARAMETERS],
        GRADIENTS: plan.lasting[GRADIENTS],
        COPIES: plan.lasting[COPIES],
        FOLDED: plan.lasting[FOLDED],
        "history": plan.history(histories),
    }
    parts += [f"{what} {_amount(size)}" for what, size in sizes.items() if size]
    return f"Memory: {_amount(plan.total(histories))} on {device}: {', '.join(parts)}"


def _amount(size: int) -> str:
    """Format a number of bytes."""
    if size >= GIBIBYTE:
        return f"{size / GIBIBYTE:.1f} GiB"
    return f"{size / MEBIBYTE:.1f} MiB"


READERS = ("data_param", "image_data_param", "hdf5_data_param")
"""Fields of data layers that have a `batch_size`."""

LARGEST = 2**20
"""The upper limit of the search for a batch size."""


def with_batch(param: caffe_pb2.NetParameter, batch: int) -> caffe_pb2.NetParameter:
    """Return a copy of a net whose layers without bottoms have this batch size."""
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    for layer in result.layer:
        for field in READERS:
            if layer.HasField(field):
                getattr(layer, field).batch_size = batch
        for shape in (*layer.dummy_data_param.shape, *layer.input_param.shape):
            if shape.dim:
                shape.dim[0] = batch
        for index in range(len(layer.dummy_data_param.num)):
            layer.dummy_data_param.num[index] = batch
    return result


def written_batch(param: caffe_pb2.NetParameter) -> int:
    """Return the batch size that the prototxt gives for the first layer without bottoms; 0 if none.

    Args:
        param: the net, filtered.
    """
    for layer in param.layer:
        sizes: list[int] = [getattr(layer, field).batch_size for field in READERS if layer.HasField(field)]
        sizes += [shape.dim[0] for shape in (*layer.dummy_data_param.shape, *layer.input_param.shape) if shape.dim]
        sizes += layer.dummy_data_param.num
        if sizes:
            return sizes[0]
    return 0


def largest_batch(
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState | None,
    fuse: bool,
    share: bool,
    histories: int,
    available: int,
    below: int = LARGEST,
) -> int:
    """Return the largest batch_size below `below` with which training fits into `available` bytes; 0 if none.

    Caffe's limit on the elements of a blob applies too.

    Args:
        param: the net as read.
        context: the net's context.
        state: as `Net` takes it.
        fuse: as `Net` takes it.
        share: whether blobs share memory.
        histories: history values of the solver per parameter.
        available: bytes of available memory.
        below: a batch size known not to fit.

    Raises:
        CaffepyError: the net is not valid with another batch size.
    """

    def fits(batch: int) -> bool:
        try:
            plan = plan_memory(with_batch(param, batch), context, state, fuse)
        except BlobSizeError:
            return False
        return plan.total(histories, share) + plan.workspace(share) <= available

    return largest(fits, below)


def largest(fits: Callable[[int], bool], below: int) -> int:
    """Return the largest number in 1 .. below - 1 for which the monotonic `fits` holds; 0 if none."""
    good, bad = 0, 1
    while bad < below and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, below)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good

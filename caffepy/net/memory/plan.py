"""How much memory a net needs, and a plan by which blobs that are never needed at the same time share it.

Owns the plan: which arrays share an arena, and where each lies in it. The plan of a net is made without it, from its
prototxt; who builds the net binds it before the first pass. A blob that is reshaped afterwards drops its place and gets
memory of its own, so that a plan can become useless but not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caffepy.backend.interface import Backend
from caffepy.backend.layout import aligned_bytes
from caffepy.backend.meta.array import SETUP
from caffepy.backend.types import Array
from caffepy.config.filter import filter_net, net_state
from caffepy.errors import OutOfMemoryError
from caffepy.layers.core.base import LayerContext, layer_class
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.net.memory.arena import Lifetime, assign_offsets, live_bytes, widest_gaps
from caffepy.net.memory.liveness import BLOBS, BUFFERS, COPIES, GRADIENTS, INPUTS, PARAMETERS, LivenessAnalysis, Place
from caffepy.net.net import Net
from caffepy.proto import caffe_pb2

MEBIBYTE, GIBIBYTE = 2**20, 2**30


@dataclass(frozen=True)
class Slot:
    """An array in the arena.

    Args:
        place: where the net keeps it.
        title: what tables call it.
        layer: the layer's name.
        shape: its dimensions.
        dtype: what its elements are kept in.
        life: its bytes, and the steps that need it.
        offset: where it begins in the arena.
    """

    place: Place
    title: str
    layer: str
    shape: tuple[int, ...]
    dtype: str
    life: Lifetime
    offset: int


@dataclass(frozen=True)
class MemoryPlan:
    """What a net keeps in memory, and where.

    Args:
        net: the net's name.
        slots: the arrays that share the arena.
        arena: its bytes.
        live: for each step the bytes of those that are needed in it.
        steps: the steps in words.
        lasting: bytes of everything else, by what it is for (`caffepy.net.memory.liveness.KINDS`).
        gaps: for each step where the widest range of the arena that it does not need begins and ends.
        workspaces: for each step with a convolution the most bytes that a backend takes for that.
        least_workspace: bytes that it takes in any case.
    """

    net: str
    slots: Sequence[Slot]
    arena: int
    live: Sequence[int]
    steps: Sequence[str]
    lasting: dict[str, int]
    gaps: Sequence[tuple[int, int]]
    workspaces: dict[int, int]
    least_workspace: int

    @property
    def alone(self) -> int:
        """Bytes of the slots if each had memory of its own."""
        return sum(aligned_bytes(slot.life.size) for slot in self.slots)

    @property
    def bound(self) -> int:
        """Bytes that no arena can do with less than."""
        return max(self.live, default=0)

    @property
    def peak(self) -> int:
        """The step that needs the most."""
        return list(self.live).index(self.bound) if self.live else 0

    def history(self, histories: int) -> int:
        """Bytes of a solver's history that keeps so many values for each parameter."""
        return self.lasting[PARAMETERS] * histories

    def workspace(self, share: bool = True) -> int:
        """Most bytes that primitives take for themselves; what fits into a gap of the arena costs nothing."""
        rooms = [end - begin if share else 0 for begin, end in self.gaps]
        beside = [size for step, size in self.workspaces.items() if size > rooms[step]]
        return max(beside, default=self.least_workspace)

    def total(self, histories: int = 0, share: bool = True) -> int:
        """Bytes of everything but the workspace."""
        return sum(self.lasting.values()) + (self.arena if share else self.alone) + self.history(histories)

    def at_peak(self) -> list[Slot]:
        """The slots that the fullest step needs, largest first."""
        alive = [slot for slot in self.slots if slot.life.first <= self.peak <= slot.life.last]
        return sorted(alive, key=lambda slot: -slot.life.size)

    def bind(self, net: Net, arena: Array) -> None:
        """Put a net's blobs into an arena, and lend what is free in it; to be done before its first pass.

        Args:
            net: built as the plan was made.
            arena: at least `self.arena` bytes; nets whose passes do not mix can have the same.
        """
        assert arena.nbytes >= self.arena, (arena.nbytes, self.arena)
        for slot in self.slots:
            slot.place.bind(net, net.backend.view_at(arena, slot.offset, slot.shape, slot.dtype), slot.dtype)
        rooms = [arena[begin:end] for begin, end in self.gaps]
        for node, room in zip(net.schedule, rooms, strict=False):
            node.forward_workspace = room
        for node, room in zip(reversed(net.schedule), rooms[len(net.schedule) :], strict=False):
            node.backward_workspace = room

    def new_arena(self, backend: Backend) -> Array:
        """Memory for `bind`.

        Raises:
            OutOfMemoryError: there is not so much; says which layer needs the most.
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

    Data layers open their data to learn its shape, unless `context.sample_shapes` says it (see `sample_shapes`).

    Args:
        param: the net as read.
        context: its surroundings; the plan is for a backend like `context.backend`, which can be a `MetaBackend`.
        state: as `Net` takes it.
        fuse: as `Net` takes it.
        backward: whether there are backward passes; by default in the TRAIN phase.
    """
    training = context.phase == caffe_pb2.TRAIN
    shadow = LivenessAnalysis(param, context, state, fuse, training if backward is None else backward)
    found = list(shadow.shareable().items())
    lives = []
    for _, memory in found:
        assert memory.first is not None
        assert memory.last is not None
        lives.append(Lifetime(memory.nbytes, memory.first, memory.last))
    offsets, arena = assign_offsets(lives)
    schedule = shadow.net.schedule
    slots = [
        Slot(
            place, place.title(shadow.net), schedule[place.node].layer.name, memory.shape, memory.dtype, life, offset
        )
        for (place, memory), life, offset in zip(found, lives, offsets, strict=True)
    ]
    steps = [shadow.step_name(step) for step in range(shadow.steps)]
    gaps = widest_gaps(lives, offsets, arena, shadow.steps)
    backend = shadow.backend
    workspaces = {step: backend.workspace(own) for step, own in backend.convolutions.items() if step != SETUP}
    lasting = shadow.lasting()
    return MemoryPlan(
        param.name, slots, arena, live_bytes(lives), steps, lasting, gaps, workspaces, backend.workspace(0)
    )


def sample_shapes(net: Net) -> dict[str, list[tuple[int, ...]]]:
    """What a net's data layers have learnt of their data, for the context of another net with the same layers."""
    return {
        node.layer.name: [top.shape[1:] for top in node.tops]
        for node in net.nodes
        if isinstance(node.layer, PrefetchingLayer)
    }


def read_sample_shapes(
    param: caffe_pb2.NetParameter, context: LayerContext, state: caffe_pb2.NetState | None = None
) -> dict[str, list[tuple[int, ...]]]:
    """The same from the data themselves, for a net that is not built; opens each source once.

    Raises:
        DataError: data are not there.
    """
    filtered = filter_net(param, state or net_state(context.phase, param.state, net_state(context.phase)))
    shapes = {}
    for layer_param in filtered.layer:
        kind = layer_class(layer_param.type, f"layer '{layer_param.name}'")
        if issubclass(kind, PrefetchingLayer) and layer_param.name not in context.sample_shapes:
            source, shapes[layer_param.name] = kind(layer_param, context).open()
            source.close()
    return shapes


def describe(plan: MemoryPlan, histories: int, device: str) -> str:
    """One line for the log: what a training takes on a device."""
    parts = [f"blobs {_amount(plan.arena)} (shared; {_amount(plan.alone)} without sharing)"]
    sizes = {
        "other blobs": plan.lasting[BLOBS],
        INPUTS: plan.lasting[INPUTS],
        BUFFERS: plan.lasting[BUFFERS],
        PARAMETERS: plan.lasting[PARAMETERS],
        GRADIENTS: plan.lasting[GRADIENTS],
        COPIES: plan.lasting[COPIES],
        "history": plan.history(histories),
    }
    parts += [f"{what} {_amount(size)}" for what, size in sizes.items() if size]
    return f"Memory: {_amount(plan.total(histories))} on {device}: {', '.join(parts)}"


def _amount(size: int) -> str:
    """Bytes in words."""
    if size >= GIBIBYTE:
        return f"{size / GIBIBYTE:.1f} GiB"
    return f"{size / MEBIBYTE:.1f} MiB"

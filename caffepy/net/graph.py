"""Nets as graphs: which top each bottom reads, automatic Split layers, dtypes, and layers that run backward.

Owns the net's blobs by name during construction. Rules: Caffe's `net.cpp` (AppendTop, AppendBottom and the two passes
after them). Names of Split layers equal those of Caffe's `insert_splits.cpp`, because snapshots and scripts contain
them; a Split's backward pass sums the users' gradients. Dtypes follow `default_forward_type`, `forward_type` and their
backward counterparts. Sums are float32 regardless of the `*_math` fields, at no cost on current hardware. Labels are
float32 from their source on: float16 has only even integers above 2,048.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from caffepy.backend.interface import Backend
from caffepy.backend.types import Array
from caffepy.errors import (
    CaffepyError,
    ConfigError,
    DataError,
    InternalError,
    OutOfMemoryError,
    RunError,
    ShapeError,
    describe,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Layer, LayerContext, is_registered, layer_class
from caffepy.utils.registry import suggest

log = logging.getLogger(__name__)


Source = tuple[int, int]
"""A top: (index of the layer, index of the top)."""


def insert_splits(param: caffe_pb2.NetParameter) -> caffe_pb2.NetParameter:
    """Return a copy of `param` with a Split layer after each layer whose top is used more than once.

    A nonzero loss weight of a top counts as a use; it moves to the Split's first top. An explicit 0 remains at the
    layer. Caffe leaves nothing there: its loss layers then default to 1 and count their loss twice, and the weights of
    the layer's other tops are lost.

    Raises:
        ConfigError: no earlier layer produces a bottom; the message suggests the nearest name.
    """
    sources = find_sources(param)
    uses = Counter(sources.values())
    weights = _written_loss_weights(param)
    uses.update(weights.keys())
    result = caffe_pb2.NetParameter()
    result.CopyFrom(param)
    del result.layer[:]
    used = Counter(weights.keys())
    for i, original in enumerate(param.layer):
        layer = result.layer.add()
        layer.CopyFrom(original)
        for j in range(len(layer.bottom)):
            source = sources[i, j]
            if uses[source] > 1:
                producer = param.layer[source[0]]
                layer.bottom[j] = split_blob_name(producer, source[1], used[source])
                used[source] += 1
        for j in range(len(original.top)):
            if uses[i, j] > 1:
                _add_split(result, original, j, uses[i, j], weights.get((i, j), 0.0))
                if (i, j) in weights:
                    layer.loss_weight[j] = 0
    return result


def split_layer_name(layer: caffe_pb2.LayerParameter, top: int) -> str:
    """``<blob>_<layer>_<top's index>_split``."""
    return f"{layer.top[top]}_{layer.name}_{top}_split"


def split_blob_name(layer: caffe_pb2.LayerParameter, top: int, use: int) -> str:
    """``<blob>_<layer>_<top's index>_split_<use>``."""
    return f"{split_layer_name(layer, top)}_{use}"


def is_split_of(blob: str, original: str) -> bool:
    """Return whether a blob's name is that of a top of `original`'s Split."""
    return blob.startswith(f"{original}_") and re.search(r"_split_\d+$", blob) is not None


def find_sources(param: caffe_pb2.NetParameter) -> dict[tuple[int, int], Source]:
    """Return for each (layer, bottom) its source: the last earlier top of that name."""
    last: dict[str, Source] = {}
    sources = {}
    for i, layer in enumerate(param.layer):
        for j, name in enumerate(layer.bottom):
            if name not in last:
                raise unknown_bottom(layer, j, list(last), param.state)
            sources[i, j] = last[name]
        for j, name in enumerate(layer.top):
            last[name] = (i, j)
    return sources


def unknown_bottom(
    layer: caffe_pb2.LayerParameter, index: int, known: list[str], state: caffe_pb2.NetState | None = None
) -> ConfigError:
    """Return the error for an unknown bottom, with the nearest known name; `state` selected the layers."""
    offer = "no layer before it produces any"
    if known:
        offer = suggest(layer.bottom[index], known)
    elif state is not None and state.HasField("phase"):
        phase = caffe_pb2.Phase.Name(state.phase)
        offer += f" in phase {phase}; a layer with include {{ phase: {phase} }}, or without include rules, must"
    return ConfigError(
        f"layer '{layer.name}' ({layer.type}): unknown bottom blob '{layer.bottom[index]}' (bottom {index}); {offer}"
    )


def _written_loss_weights(param: caffe_pb2.NetParameter) -> dict[Source, float]:
    return {
        (i, j): weight
        for i, layer in enumerate(param.layer)
        for j, (weight, _) in enumerate(zip(layer.loss_weight, layer.top, strict=False))
        if weight
    }


def _add_split(
    net: caffe_pb2.NetParameter, layer: caffe_pb2.LayerParameter, top: int, count: int, loss_weight: float
) -> None:
    split = net.layer.add(name=split_layer_name(layer, top), type="Split")
    if layer.HasField("phase"):
        split.phase = layer.phase
    split.bottom.append(layer.top[top])
    split.top.extend(split_blob_name(layer, top, k) for k in range(count))
    if loss_weight:
        split.loss_weight.extend([loss_weight] + [0.0] * (count - 1))


_DTYPES = {caffe_pb2.FLOAT: "float32", caffe_pb2.FLOAT16: "float16", caffe_pb2.BFLOAT16: "bfloat16"}


def dtype_name(kind: caffe_pb2.Type, where: str) -> str:
    """Return the dtype of a value of the schema's Type.

    Raises:
        ConfigError: blobs do not support the type.
    """
    if kind not in _DTYPES:
        raise ConfigError(f"{where}: type {caffe_pb2.Type.Name(kind)} is not supported; use FLOAT, FLOAT16 or BFLOAT16")
    return _DTYPES[kind]


def find_label_tops(net: caffe_pb2.NetParameter) -> list[frozenset[int]]:
    """Return for each layer of a net (with Split layers) the tops that must be float32 because they carry labels.

    A top carries labels if two conditions hold. It reaches a label bottom through layers that move elements or map each
    one separately. It comes from data, from a layer that supports only float32, or from another such top.
    """
    classes = [layer_class(layer.type, f"layer '{layer.name}'") for layer in net.layer]
    sources = find_sources(net)
    wanted = _read_as_labels(net, classes, sources)
    exact: set[Source] = set()
    for i, (layer, kind) in enumerate(zip(net.layer, classes, strict=True)):
        handed_on = kind.keeps_labels and any(sources[i, j] in exact for j in range(len(layer.bottom)))
        if not layer.bottom or not kind.supports_half or handed_on:
            exact.update((i, j) for j in range(len(layer.top)) if (i, j) in wanted)
    return [frozenset(j for j in range(len(layer.top)) if (i, j) in exact) for i, layer in enumerate(net.layer)]


def _read_as_labels(
    net: caffe_pb2.NetParameter, classes: list[type[Layer]], sources: dict[tuple[int, int], Source]
) -> set[Source]:
    """Return the tops that reach a label bottom through layers that keep labels."""
    labels: set[Source] = set()
    for i in reversed(range(len(net.layer))):
        layer, kind = net.layer[i], classes[i]
        bottoms = range(len(layer.bottom))
        labels.update(sources[i, j] for j in bottoms if j in kind.no_gradient_bottoms | kind.exact_bottoms)
        if kind.keeps_labels and any((i, j) in labels for j in range(len(layer.top))):
            labels.update(sources[i, j] for j in bottoms)
    return labels


class Precision:
    """The dtypes of one net's layers.

    A layer has one dtype for values and gradients. It is float32 if forward and backward types differ or the device
        does not support the requested dtype.

    Args:
        net: gives the default types.
        backend: the device.
    """

    def __init__(self, net: caffe_pb2.NetParameter, backend: Backend) -> None:
        self._net = net
        self._backend = backend
        self._told: set[str] = set()

    def dtype(self, layer: Layer, bottoms: list[str], in_place: str | None) -> str:
        """Return the dtype of a layer's bottoms and tops.

        Args:
            layer: the layer.
            bottoms: its bottoms' dtypes.
            in_place: the dtype of a bottom that is also a top.
        """
        if not layer.supports_half:
            return "float32"
        if in_place is not None:
            return in_place
        if layer.keeps_labels and layer.label_tops:
            return "float32"
        if layer.inherits_dtype and bottoms and not layer.param.HasField("forward_type"):
            return bottoms[0]
        return self._asked(layer)

    def _asked(self, layer: Layer) -> str:
        where = f"layer '{layer.name}' ({layer.type})"
        param, net = layer.param, self._net
        kinds = [
            getattr(param, f"{way}_type") if param.HasField(f"{way}_type") else getattr(net, f"default_{way}_type")
            for way in ("forward", "backward")
        ]
        forward, backward = (dtype_name(kind, where) for kind in kinds)
        if forward != backward and "float32" in (forward, backward):
            # The opposite combination saves little memory traffic and would double the number of kernels.
            self._tell(f"{where}: forward_type and backward_type differ; its blobs are kept in float32")
            return "float32"
        if forward != backward:
            raise ConfigError(f"{where}: forward_type is {forward} and backward_type {backward}; make them the same")
        if forward not in self._backend.dtypes:
            self._tell(f"{self._backend.name} keeps all blobs in float32, although the net asks for {forward}")
            return "float32"
        return forward

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.info("%s", message)


_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Python exceptions that indicate a bug."""


@dataclass
class Node:
    """One layer of a net and its blobs.

    Args:
        layer: the layer.
        bottoms: the blobs read.
        tops: the blobs written; an in-place top is the same object as its bottom.
        propagate_down: for each bottom, whether its gradient is needed.
        need_backward: whether the layer's backward pass runs at all.
        shapes: the bottoms' shapes at the last reshape.
        forward_workspace: scratch memory for the forward pass, 1-D uint8, free of live blobs.
        backward_workspace: the same for its backward pass.
    """

    layer: Layer
    bottoms: list[Blob]
    tops: list[Blob]
    propagate_down: list[bool] = field(default_factory=list)
    need_backward: bool = False
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    forward_workspace: Array | None = None
    backward_workspace: Array | None = None
    _weighted: Array | None = None
    """The diff filled with the loss weight. It is not filled again: a program may overwrite it, as in Caffe."""

    def reshape(self) -> None:
        """Reshape the layer to its bottoms' current shapes; a loss writes its weight to a newly allocated top diff."""
        layer = self.layer
        shared = [(top, top.shape) for top in self.tops if any(top is bottom for bottom in self.bottoms)]
        with self.named_errors():
            try:
                layer.reshape(self.bottoms, self.tops)
            finally:
                if any(blob.shape != shape for blob, shape in shared):  # its bottom is lost
                    layer.refuse_in_place(self.bottoms, self.tops)
            layer.check_top_memory([top for top in self.tops if all(top is not bottom for bottom in self.bottoms)])
        self.shapes = [bottom.shape for bottom in self.bottoms]
        if layer.is_loss and layer.loss_weights[0] and self._weighted is not self.tops[0].diff:
            self._weighted = self.tops[0].diff
            layer.backend.fill(self._weighted, layer.loss_weights[0])

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Add the layer's name to errors.

        Raises:
            OutOfMemoryError: in place of a MemoryError.
            InternalError: in place of a Python exception that indicates a bug in caffepy.
            RunError: in place of any other exception that is not a CaffepyError.
        """
        layer = self.layer
        try:
            yield
        except OutOfMemoryError as error:
            raise error.within(f"layer '{layer.name}' ({layer.type})") from error
        except (ShapeError, DataError) as error:
            if f"layer '{layer.name}'" in str(error):
                raise
            raise type(error)(f"layer '{layer.name}' ({layer.type}): {error}") from error
        except CaffepyError:
            raise
        except MemoryError as error:
            problem = f"layer '{layer.name}' ({layer.type}): out of memory: {error or 'the host has no more'}"
            raise OutOfMemoryError(problem, "use a smaller batch_size") from error
        except Exception as error:
            found = f"layer '{layer.name}' ({layer.type}): {describe(error)}"
            if isinstance(error, _MISTAKES):
                found += "; this is a bug in caffepy, not in the net: please report it with the net's prototxt"
                raise InternalError(found) from error
            raise RunError(found) from error


class Wiring:
    """The blobs of a net during construction.

    Args:
        backend: allocates the blobs.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.blobs: dict[str, Blob] = {}
        self._unused: set[str] = set()

    def connect(self, layer: Layer, precision: Precision) -> Node:
        """Find a layer's bottoms, choose its dtype and make its tops.

        Raises:
            ConfigError: an unknown bottom, a top that another layer already produces, or a wrong number of blobs.
        """
        bottoms = [self._take_bottom(layer.param, j) for j in range(len(layer.param.bottom))]
        pairs = zip(bottoms, layer.param.bottom, strict=True)
        shared = [blob.dtype for blob, name in pairs if name in layer.param.top]
        if shared and not layer.supports_half and shared[0] != "float32":
            raise layer.error(
                f"computes in float32 and cannot work in place on a blob kept in {shared[0]}; give its top another name"
            )
        layer.bottom_names = [blob.title for blob in bottoms]
        layer.dtype = precision.dtype(layer, [b.dtype for b in bottoms], shared[0] if shared else None)
        tops = [self._make_top(layer, j) for j in range(len(layer.param.top))]
        if layer.auto_tops:
            tops += [Blob(self.backend, name="(automatic)") for _ in range(layer.tops[0] - len(tops))]
        _check_number(layer, "bottom", len(bottoms), layer.bottoms)
        _check_number(layer, "top", len(tops), layer.tops)
        if layer.equal_bottoms_and_tops and len(bottoms) != len(tops):
            raise layer.error(f"needs as many top as bottom blobs, has {len(bottoms)} bottoms and {len(tops)} tops")
        layer.loss_weights = _loss_weights(layer, len(tops))
        return Node(layer, bottoms, tops)

    def outputs(self) -> dict[str, Blob]:
        """Return the blobs that no layer reads, sorted by name as Caffe prints them."""
        return {name: self.blobs[name] for name in sorted(self._unused, key=str.encode)}

    def _take_bottom(self, param: caffe_pb2.LayerParameter, index: int) -> Blob:
        name = param.bottom[index]
        if name not in self._unused:
            raise unknown_bottom(param, index, list(self._unused))
        self._unused.remove(name)
        return self.blobs[name]

    def _make_top(self, layer: Layer, index: int) -> Blob:
        param = layer.param
        name = param.top[index]
        in_place = index < len(param.bottom) and param.bottom[index] == name
        if not in_place:
            if name in self.blobs:
                raise _produced_twice(param, index)
            self.blobs[name] = Blob(self.backend, name=name, dtype=layer.top_dtype(index))
            if layer.type == "Split" and param.bottom and is_split_of(name, param.bottom[0]):
                self.blobs[name].title = self.blobs[param.bottom[0]].title
        self._unused.add(name)
        return self.blobs[name]


def _produced_twice(param: caffe_pb2.LayerParameter, index: int) -> ConfigError:
    """Return the error for a duplicate top, or for an in-place layer on a blob that other layers read."""
    name = param.top[index]
    where = f"layer '{param.name}' ({param.type})"
    if index < len(param.bottom) and is_split_of(param.bottom[index], name):
        return ConfigError(
            f"{where}: works in place on '{name}', which another layer before it reads, or a loss_weight counts; give "
            "its top another name, and the layers that should read it"
        )
    return ConfigError(
        f"{where}: top blob '{name}' is already produced by another layer; give it another name, or name it as the "
        "bottom in the same place to work in place"
    )


def insert_casts(node: Node, context: LayerContext) -> list[Node]:
    """Return Cast layers for bottoms whose dtype differs from the layer's; `node` then reads their tops.

    Labels are always cast to float32.
    """
    layer = node.layer
    casts = []
    for j, blob in enumerate(node.bottoms):
        exact = layer.no_gradient_bottoms | layer.float32_bottoms
        wanted = layer.dtype if layer.supports_half and j not in exact else "float32"
        if blob.dtype == wanted:
            continue
        name = f"{blob.name}_as_{wanted}"
        cast = layer_class("Cast")(caffe_pb2.LayerParameter(name=name, type="Cast"), context)
        cast.dtype = wanted
        cast.loss_weights = [0.0]
        node.bottoms[j] = Blob(context.backend, name=name, dtype=wanted)
        node.bottoms[j].title = blob.title
        casts.append(Node(cast, [blob], [node.bottoms[j]]))
    return casts


def overwritten_tops(layers: Sequence[caffe_pb2.LayerParameter]) -> list[bool]:
    """Return for each layer whether a later layer works in place on one of its tops."""
    names: set[str] = set()
    overwritten = []
    for layer in reversed(layers):
        overwritten.append(any(top in names for top in layer.top))
        for top in layer.top:
            (names.add if top in layer.bottom else names.discard)(top)
    return overwritten[::-1]


def _check_number(layer: Layer, what: str, count: int, limits: tuple[int, int | None]) -> None:
    fewest, most = limits
    if count >= fewest and (most is None or count <= most):
        return
    wanted = f"at least {fewest}" if most is None else f"{fewest} to {most}"
    if fewest == most:
        wanted = str(fewest)
    raise layer.error(f"takes {wanted} {what} blob{'s' * (wanted != '1')}, has {count}")


def _loss_weights(layer: Layer, tops: int) -> list[float]:
    """Return the weight of each top: the written one, else 1 for a loss layer's first top, else 0."""
    written = list(layer.param.loss_weight)
    if written and len(written) != tops:
        raise layer.error(
            f"loss_weight must be given for none or for each of the {tops} tops, is given {len(written)} times"
        )
    return written or [1.0 if layer.is_loss and j == 0 else 0.0 for j in range(tops)]


def warn_of_loss_weights(param: caffe_pb2.NetParameter, level: int) -> None:
    """Log each loss weight that counts in the loss and in no gradient. Call before Split layers are inserted.

    Args:
        param: the filtered net.
        level: of the net's log lines; where it is INFO, these are warnings.
    """
    level = logging.WARNING if level >= logging.INFO else level
    for layer in param.layer:
        where = f"layer '{layer.name}' ({layer.type})"
        for index in sorted(layer_class(layer.type, f"layer '{layer.name}'").no_gradient_tops):
            if index < min(len(layer.loss_weight), len(layer.top)) and layer.loss_weight[index]:
                log.log(
                    level,
                    "%s: loss_weight %g at its top '%s' (top %d) counts in the loss, as in Caffe, and in no gradient",
                    *(where, layer.loss_weight[index], layer.top[index], index),
                )


class GradientTracker:
    """Tracks, layer by layer, which blobs depend on a learnable parameter."""

    def __init__(self) -> None:
        self._learnable: set[Blob] = set()

    def add(self, node: Node) -> None:
        """Set `propagate_down` and `need_backward` from the earlier layers. Call after the layer's `setup`."""
        param = node.layer.param
        if param.propagate_down and len(param.propagate_down) != len(node.bottoms):
            raise node.layer.error(
                f"propagate_down must be given for none or for each of the {len(node.bottoms)} bottoms, "
                f"is given {len(param.propagate_down)} times"
            )
        depends = [blob in self._learnable and not node.layer.reads_shapes_only for blob in node.bottoms]
        node.propagate_down = list(param.propagate_down) or depends
        node.need_backward = any(depends) or any(node.layer.propagate_to_params)
        if node.need_backward:
            pairs = node.layer.independent_pairs
            self._learnable.update(top for i, top in enumerate(node.tops) if not pairs or depends[i])


def prune_backward(nodes: list[Node]) -> None:
    """Disable the backward pass of layers that receive no gradient.

    A layer receives none if no loss depends on it, or if its readers pass none down, by `propagate_down` or for want of
    a backward pass.
    """
    under_loss: set[Blob] = set()
    skipped: set[Blob] = set()
    for node in reversed(nodes):
        if not (node.layer.has_backward or any(node.propagate_down)):
            node.need_backward = False
        contributes = any(node.layer.loss_weights) or any(top in under_loss for top in node.tops)
        if node.need_backward and all(top in skipped for top in node.tops):
            node.need_backward = False
            node.propagate_down = [False] * len(node.bottoms)
        if contributes:
            under_loss.update(node.bottoms)
        else:
            node.need_backward = False
            node.propagate_down = [False] * len(node.bottoms)
        skipped.update(blob for blob, down in zip(node.bottoms, node.propagate_down, strict=True) if not down)


def capture_blockers(schedule: list[Node]) -> list[str | None]:
    """Return for each node why it cannot be captured in a CUDA graph, or None."""
    found, changing = [], ""
    for node in schedule:
        behind = f"the shapes change from pass to pass behind layer '{changing}'" if changing else None
        found.append(node.layer.capture_blocker() or behind)
        changing = changing or (node.layer.name if node.layer.changes_shapes else "")
    return found


def find_loss_readers(nodes: list[Node]) -> None:
    """Set `reader_propagates` of losses: whether a later layer writes the gradient of the first top.

    If the top has readers, a written weight has moved to its Split's first top, whose backward pass sums the gradients.
    """
    for index, node in enumerate(nodes):
        if node.layer.is_loss and node.layer.loss_weights[0]:
            readers = [later for later in nodes[index + 1 :] if node.tops[0] in later.bottoms]
            node.layer.reader_propagates = any(
                later.need_backward and later.propagate_down[later.bottoms.index(node.tops[0])] for later in readers
            )


def force_backward(nodes: list[Node]) -> None:
    """Enable gradients for every blob that supports one (`force_backward: true`)."""
    for node in nodes:
        layer = node.layer
        node.need_backward = layer.has_backward
        node.propagate_down = [
            down or (layer.has_backward and j not in layer.no_gradient_bottoms)
            for j, down in enumerate(node.propagate_down)
        ]
        layer.propagate_to_params = [True] * len(layer.blobs)


def check_gradients(nodes: list[Node]) -> None:
    """Reject nets that need a gradient that a layer cannot compute.

    Raises:
        ConfigError: a label, or a bottom of a layer without backward pass, depends on learnable parameters.
    """
    for node in nodes:
        if not node.need_backward:
            continue
        for j, down in enumerate(node.propagate_down):
            if down and (j in node.layer.no_gradient_bottoms or not node.layer.has_backward):
                own = is_registered(node.layer.param.type) and not node.layer.has_backward
                advice = "give its class a method backward, or " if own else ""
                raise node.layer.error(
                    f"cannot backpropagate to its bottom '{node.layer.bottom_names[j]}', which depends on learnable "
                    f"parameters; {advice}write propagate_down: false for that bottom, or lr_mult: 0 at those "
                    "parameters"
                )

"""The net: layers over blobs, built from a NetParameter (Caffe's `net.cpp`).

Owns the order of things: filter, splits, wiring, set-up, sharing, flat buffers, then forward and backward. How each is
done stands in the modules beside this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

from caffepy.backend import Array
from caffepy.blob import Blob, format_shape
from caffepy.config.filter import filter_net, net_state
from caffepy.errors import CaffepyError, OutOfMemoryError, RunError, SnapshotError
from caffepy.layers.core.base import Layer, LayerContext, layer_class
from caffepy.layers.core.formulas import scaled
from caffepy.net import debug
from caffepy.net.fusion.fuse import fuse_nodes
from caffepy.net.parameters import ParameterBuffer, ParameterTable
from caffepy.net.precision import Precision, find_label_tops
from caffepy.net.splits import insert_splits
from caffepy.net.weights import is_stored, load_blob, proto_shape, same_shape, to_blob_proto
from caffepy.net.wiring import (
    GradientPlan,
    Node,
    Wiring,
    check_gradients,
    check_loss_weights,
    find_loss_readers,
    force_backward,
    insert_casts,
    overwritten_tops,
    prune_backward,
)
from caffepy.proto import caffe_pb2
from caffepy.trace import NO_TRACE

log = logging.getLogger(__name__)


class Net:
    """A net of one phase on one device.

    Args:
        param: the net as read (upgraded, unfiltered).
        context: backend, phase, seed and place among the devices, handed to every layer.
        state: phase, level and stages that include and exclude rules are compared with; by default `param.state`
            with the context's phase.
        fuse: compute groups of layers as one (`caffepy.net.fusion.fuse`); blobs within a group are then not filled.

    Raises:
        ConfigError: layers, blobs or parameters do not fit together.
        ShapeError: shapes do not fit.
    """

    def __init__(
        self,
        param: caffe_pb2.NetParameter,
        context: LayerContext,
        state: caffe_pb2.NetState | None = None,
        fuse: bool = False,
    ) -> None:
        self.name = param.name
        self.context = context
        self.backend = context.backend
        self.phase = context.phase
        self.debug_info = param.debug_info
        self.after_backward: list[Callable[[Node], None]] = []
        """Called with a node of the schedule when the gradients of the parameters that it owns are final."""
        self.trace = NO_TRACE
        """Takes the times of the layers."""
        self.keeps_copies = True
        """Whether `forward` brings the half-precision copies of the parameters up to date; a solver does it itself."""
        self.nodes: list[Node] = []
        """The layers as they were written, with Split and Cast layers."""
        self._table = ParameterTable()
        self._buffer: ParameterBuffer | None = None
        self._log_level = logging.INFO if context.shard.rank == 0 and self.backend.holds_values else logging.DEBUG
        filtered = filter_net(param, state or net_state(context.phase, param.state, net_state(context.phase)))
        check_loss_weights(filtered)
        self.param = insert_splits(filtered)
        wiring = Wiring(self.backend)
        self._build_layers(wiring)
        self._plan_backward()
        self.blobs = wiring.blobs
        self.outputs = wiring.outputs()
        self.schedule = fuse_nodes(self.nodes) if fuse else self.nodes
        """What `forward` runs in this order and `backward` in the reverse one."""
        if fuse:
            self.reshape()
        self._log_outputs()

    # -- construction --------------------------------------------------------------------------------

    def _build_layers(self, wiring: Wiring) -> None:
        plan = GradientPlan()
        precision = Precision(self.param, self.backend)
        layers = self.param.layer
        for layer_param, overwritten, labels in zip(
            layers, overwritten_tops(layers), find_label_tops(self.param), strict=True
        ):
            where = f"layer '{layer_param.name}'"
            layer = layer_class(layer_param.type, where)(layer_param, self.context)
            layer.tops_overwritten, layer.label_tops = overwritten, labels
            node = wiring.connect(layer, precision)
            for one in (*insert_casts(node, self.context), node):
                self._add_node(one)
                self._table.add(one.layer)
                plan.add(one)
                self._log_layer(one)

    def _add_node(self, node: Node) -> None:
        self.nodes.append(node)
        with _named(node.layer):
            node.layer.setup(node.bottoms, node.tops)
        self._reshape(node)

    def _plan_backward(self) -> None:
        prune_backward(self.nodes)
        find_loss_readers(self.nodes)
        for node in self.nodes:
            if node.layer.tops_overwritten and any(node.layer.loss_weights):
                node.layer.kept_loss = self.backend.zeros(())
        if self.param.force_backward:
            force_backward(self.nodes)
        if self.phase == caffe_pb2.TRAIN:
            check_gradients(self.nodes)

    def _log_layer(self, node: Node) -> None:
        layer = node.layer
        log.log(self._log_level, "Creating Layer %s (%s)", layer.name, layer.type)
        for bottom in node.bottoms:
            log.log(self._log_level, "%s <- %s", layer.name, bottom.name)
        for top, weight in zip(node.tops, layer.loss_weights, strict=True):
            in_place = " (in-place)" if top in node.bottoms else ""
            log.log(self._log_level, "%s -> %s%s", layer.name, top.name, in_place)
            log.log(self._log_level, "Top shape: %s", format_shape(top.shape))
            if weight:
                log.log(self._log_level, "    with loss weight %g", weight)

    def _log_outputs(self) -> None:
        for node in self.nodes:
            need = "needs" if node.need_backward else "does not need"
            log.log(self._log_level, "%s %s backward computation.", node.layer.name, need)
        for name in self.outputs:
            log.log(self._log_level, "This network produces output %s", name)
        log.log(self._log_level, "Network initialization done.")

    # -- what the net is made of ---------------------------------------------------------------------

    @property
    def layers(self) -> list[Layer]:
        """The layers in order, Split layers included."""
        return [node.layer for node in self.nodes]

    @property
    def layer_names(self) -> list[str]:
        """Their names."""
        return [node.layer.name for node in self.nodes]

    @property
    def bottoms(self) -> list[list[Blob]]:
        """The blobs that each layer reads."""
        return [node.bottoms for node in self.nodes]

    @property
    def tops(self) -> list[list[Blob]]:
        """The blobs that each layer writes."""
        return [node.tops for node in self.nodes]

    @property
    def inputs(self) -> list[str]:
        """The tops of Input layers."""
        return [top.name for node in self.nodes if node.layer.type == "Input" for top in node.tops]

    @property
    def parameters(self) -> ParameterBuffer:
        """The flat buffers, made on first use: a test net that shares a train net's parameters uses the train net's."""
        if self._buffer is None:
            self._buffer = ParameterBuffer(self.backend, self._table.parameters)
        return self._buffer

    def loss_weight(self, blob: Blob) -> float:
        """The weight of a top in the loss, 0 if it has none."""
        return max(
            (
                weight
                for node in self.nodes
                for top, weight in zip(node.tops, node.layer.loss_weights, strict=True)
                if top is blob
            ),
            key=abs,
            default=0.0,
        )

    def batch_size(self) -> int:
        """Samples of this device in one pass: the first axis of the first layer's first top that takes no bottom."""
        for node in self.nodes:
            if not node.bottoms and node.tops and node.tops[0].shape:
                return node.tops[0].shape[0]
        return 0

    # -- running -------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run every layer forward; layers whose bottoms changed shape are reshaped first.

        Raises:
            RunError: a layer failed in a way that it has no message for; the layer is named.
        """
        for _ in self._forward_nodes():
            continue

    def _forward_nodes(self) -> Iterator[Node]:
        """Run every layer forward; gives each when it has run."""
        self.prepare()
        number = self.context.passes.number
        self.feed(number)
        for node in self.schedule:
            self.forward_node(node)
            yield node
        self.consumed(number)
        self.context.passes.number += 1

    def prepare(self) -> None:
        """Make the flat buffers, and the copies of the parameters in other dtypes, before a pass needs them."""
        if self._buffer is None and (self.phase == caffe_pb2.TRAIN or self._dtypes):
            self._buffer = self.parameters
        if self._dtypes and self.keeps_copies:
            self.parameters.refresh(self._dtypes)

    @property
    def _dtypes(self) -> set[str]:
        """Dtypes other than float32 in which layers want their parameters."""
        return {layer.dtype for layer in self.layers if layer.blobs and layer.dtype != "float32"}

    def feed(self, number: int) -> None:
        """Let the data layers bring the data of pass `number` to the device."""
        for node in self._fed:
            with self.trace.span("feed", node.layer.name), _named(node.layer):
                node.layer.feed(number)

    def consumed(self, number: int) -> None:
        """Tell the data layers that all work on the data of pass `number` is on the device's stream."""
        for node in self._fed:
            node.layer.consumed(number)

    @cached_property
    def _fed(self) -> list[Node]:
        """The data layers that bring their data to the device."""
        return [node for node in self.schedule if node.layer.feeds]

    @cached_property
    def _first_readers(self) -> list[Node]:
        """Those that read what comes from outside: data or inputs."""
        outside = {top for node in self.schedule if not node.bottoms for top in node.tops}
        return [node for node in self.schedule if any(bottom in outside for bottom in node.bottoms)]

    def forward_node(self, node: Node) -> None:
        """Run one layer of the schedule forward."""
        if [bottom.shape for bottom in node.bottoms] != node.shapes:
            self._reshape(node)
        lease = self.backend.workspace_lease(node.forward_workspace)
        with self.trace.span("forward", node.layer.name), _named(node.layer), lease:
            node.layer.forward(node.bottoms, node.tops)
            if not self.backend.asynchronous:
                node.layer.check()
        if node.layer.kept_loss is not None:
            self._keep_loss(node, node.layer.kept_loss)
        if self.debug_info:
            debug.log_forward(node)

    def _keep_loss(self, node: Node, total: Array) -> None:
        """Add up the loss of tops that a later layer works on in place."""
        accumulate = False
        for top, weight in zip(node.tops, node.layer.loss_weights, strict=True):
            if weight:
                self.backend.reduce(scaled, (top.data, weight), (total,), accumulate=accumulate)
                accumulate = True

    def backward(self) -> None:
        """Run backward every layer that lies between a learnable parameter and the loss."""
        _ = self.parameters.diff  # binds the gradients to the flat buffer before any layer writes them
        for node in reversed(self.schedule):
            self.backward_node(node)
        if self.debug_info:
            debug.log_norms(self.parameters)

    def backward_node(self, node: Node) -> None:
        """Run one layer of the schedule backward, if it has to."""
        if node.need_backward:
            self._put_loss_weights(node)
            lease = self.backend.workspace_lease(node.backward_workspace)
            with self.trace.span("backward", node.layer.name), _named(node.layer), lease:
                node.layer.backward(node.tops, node.propagate_down, node.bottoms)
            if self.debug_info:
                debug.log_backward(node)
        for callback in self.after_backward:
            callback(node)

    def _put_loss_weights(self, node: Node) -> None:
        """Fill the diffs of tops with a loss weight, in every pass: layers in place overwrite them.

        Losses know their weight, and that the loss scale comes in.
        """
        if node.layer.is_loss:
            return
        for top, weight in zip(node.tops, node.layer.loss_weights, strict=True):
            if weight:
                self.backend.fill(top.diff, weight)
                if self.context.loss_scale is not None:
                    self.backend.apply(scaled, (top.diff, self.context.loss_scale), (top.diff,))

    def changed_shapes(self) -> bool:
        """Whether a data layer's new batch has another shape or form than those that its readers were made for."""
        if any(node.layer.outdated() for node in self._fed):
            return True
        return any([bottom.shape for bottom in node.bottoms] != node.shapes for node in self._first_readers)

    def known_until(self, number: int) -> int:
        """The first pass, from `number` on, whose data may have another shape or form; all before it have been fed."""
        return min((node.layer.known_until(number) for node in self.schedule if not node.bottoms), default=number)

    def add_loss(self, total: Array, accumulate: bool) -> None:
        """total (+)= the loss of this pass, on the device; `total` has shape ()."""
        for values, weight in self._losses():
            self.backend.reduce(scaled, (values, weight), (total,), accumulate=accumulate)
            accumulate = True

    def loss(self) -> float:
        """The sum over all tops of loss weight times the sum of the top's elements; waits for the device."""
        return sum(
            weight * float(self.backend.to_host(values).sum(dtype="float64")) for values, weight in self._losses()
        )

    def _losses(self) -> Iterator[tuple[Array, float]]:
        """What is added up to the loss after a forward pass, and its weights."""
        for node in self.nodes:
            if node.layer.kept_loss is not None:
                yield node.layer.kept_loss, 1.0
                continue
            for top, weight in zip(node.tops, node.layer.loss_weights, strict=True):
                if weight:
                    yield top.data, weight

    def clear_param_diffs(self) -> None:
        """Forget the parameter gradients; the next backward pass overwrites them."""
        for parameter in self._table.parameters:
            parameter.blob.gradient_started = False

    def reshape(self) -> None:
        """Reshape every layer to its bottoms' present shapes."""
        for node in self.schedule:
            self._reshape(node)

    def _reshape(self, node: Node) -> None:
        with _named(node.layer):
            node.layer.reshape(node.bottoms, node.tops)
        node.shapes = [bottom.shape for bottom in node.bottoms]
        if node.layer.is_loss and node.layer.loss_weights[0]:
            self.backend.fill(node.tops[0].diff, node.layer.loss_weights[0])

    def statistics(self, differing: bool = False) -> list[Array]:
        """Flat views of the parameters that forward passes change: BatchNorm's running statistics.

        Args:
            differing: only those that differ between devices that train together.
        """
        chosen = ((layer, layer.differing() if differing else layer.measured()) for layer in self.layers)
        blobs = [layer.blobs[index] for layer, indices in chosen for index in indices]
        return [self.parameters.data[run] for run in self.parameters.runs(blobs)]

    def check(self) -> None:
        """Raise what layers noticed on the device; call when it is idle."""
        for layer in self.layers:
            layer.check()

    def first_non_finite(self, anew: bool = False) -> Node | None:
        """The first layer in forward order with a top that is not finite, None if all are.

        `anew` looks while another forward pass is made: blobs that share memory do not keep what they held.
        """
        found = None
        for node in self._forward_nodes() if anew else self.schedule:
            if found is None and not all(self.backend.all_finite(top.data) for top in node.tops):
                found = node
        return found

    def close(self) -> None:
        """End what the layers started. Callable twice."""
        for layer in self.layers:
            layer.close()

    # -- parameters ----------------------------------------------------------------------------------

    def copy_trained_layers_from(self, weights: caffe_pb2.NetParameter, origin: str) -> list[str]:
        """Copy the parameters of layers that have the same name; returns the names of those copied.

        Raises:
            SnapshotError: a layer has another number of parameters or other shapes.
        """
        copied = []
        targets = {node.layer.name: node.layer for node in reversed(self.nodes)}
        for source in weights.layer:
            target = targets.get(source.name)
            if target is None:
                log.log(self._log_level, "Ignoring source layer %s", source.name)
                continue
            self._copy_layer(source, target, origin)
            if target.blobs:
                copied.append(source.name)
        return copied

    def _copy_layer(self, source: caffe_pb2.LayerParameter, target: Layer, origin: str) -> None:
        stored = {index: blob for index, blob in enumerate(source.blobs) if is_stored(blob)}
        missing = [index for index in range(len(target.blobs)) if index not in stored and self.owns(target, index)]
        if len(source.blobs) > len(target.blobs) or missing:
            lacking = f" (not there: {', '.join(map(str, missing))})" if len(stored) < len(source.blobs) else ""
            raise SnapshotError(
                f"{origin}: layer '{target.name}' has {len(stored)} parameters there and {len(target.blobs)} "
                f"in the net{lacking}; rename the layer in the net to learn it from scratch"
            )
        for index, blob in stored.items():
            mine, where = target.blobs[index], f"{origin}: layer '{target.name}', parameter {index}"
            if not same_shape(blob, mine.shape):
                raise SnapshotError(
                    f"{where}: shape is {format_shape(proto_shape(blob))} there and {format_shape(mine.shape)} in the "
                    "net; rename the layer in the net to learn it from scratch"
                )
            load_blob(blob, mine, where)

    def share_trained_layers_with(self, other: Net) -> None:
        """Let layers of the same name use the very parameters of `other`, as test nets do.

        Raises:
            ConfigError: numbers or shapes of parameters differ.
        """
        targets = {node.layer.name: node.layer for node in reversed(self.nodes)}
        self._buffer = other.parameters
        for source in other.layers:
            target = targets.get(source.name)
            if target is None:
                continue
            if [b.shape for b in source.blobs] != [b.shape for b in target.blobs]:
                raise target.error(
                    "cannot share its parameters with the train net's layer of the same name; shapes are "
                    f"{', '.join(format_shape(b.shape) for b in target.blobs) or 'none'} here and "
                    f"{', '.join(format_shape(b.shape) for b in source.blobs) or 'none'} there"
                )
            for mine, theirs in zip(target.blobs, source.blobs, strict=True):
                mine.bind(data=theirs.data)
                mine.copies = theirs.copies

    def to_proto(self, write_diff: bool = False) -> caffe_pb2.NetParameter:
        """The net with its parameters (and gradients), as Caffe's snapshots hold it: every layer saves all it uses."""
        return caffe_pb2.NetParameter(name=self.name, layer=self.layer_protos(write_diff))

    def layer_protos(self, write_diff: bool = False) -> Iterator[caffe_pb2.LayerParameter]:
        """The layers of `to_proto`, one at a time."""
        for layer in self.layers:
            if layer.type == "Cast":
                continue
            saved = caffe_pb2.LayerParameter()
            saved.CopyFrom(layer.param)
            del saved.blobs[:]
            if not saved.loss_weight and any(layer.loss_weights):
                saved.loss_weight.extend(layer.loss_weights)
            saved.blobs.extend(
                to_blob_proto(blob.host_data(), blob.host_diff() if write_diff else None) for blob in layer.blobs
            )
            yield saved

    def owns(self, layer: Layer, index: int) -> bool:
        """Whether a parameter is the layer's own, not one shared from an earlier layer."""
        return (layer.name, index) not in self._table.shared


@contextmanager
def _named(layer: Layer) -> Iterator[None]:
    """Name the layer in errors that have no message of their own."""
    try:
        yield
    except OutOfMemoryError as error:
        raise error.within(f"layer '{layer.name}' ({layer.type})") from error
    except CaffepyError:
        raise
    except Exception as error:
        raise RunError(f"layer '{layer.name}' ({layer.type}): {type(error).__name__}: {error}") from error

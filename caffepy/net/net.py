"""Nets: layers and blobs built from a prototxt, run forward and backward (Caffe's `net.cpp`).

`caffepy.formats.caffemodel` copies parameters between nets and files. Nets are built in the order of `Net::Init`.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from caffepy.backend import Array
from caffepy.backend.formulas import scaled
from caffepy.data.sharding import Shard
from caffepy.errors import CaffepyError, DeviceError, UserError
from caffepy.formats.blobs import format_shape
from caffepy.formats.caffemodel import TrainedLayers, layer_protos
from caffepy.formats.dialect import choose_dialect
from caffepy.formats.fields import refuse_fields, refuse_fork_fields
from caffepy.formats.load import MAX_TEXT_BYTES, filter_net, is_included, net_state
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import decode_text, layer_blocks, parse_text
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Layer, LayerContext, is_user_defined, layer_class
from caffepy.logs.performance_report import STAGES
from caffepy.logs.trace import NO_TRACE, Tracer
from caffepy.net import describe as debug
from caffepy.net.auto_crop import resolve_auto_crops
from caffepy.net.describe import describe_net, net_table
from caffepy.net.divide import divide_passes, number_made_samples
from caffepy.net.fold import FoldedConvolution, fold_nodes
from caffepy.net.fuse import fuse_nodes
from caffepy.net.graph import (
    GradientTracker,
    Node,
    Precision,
    Wiring,
    check_gradients,
    find_label_tops,
    find_loss_readers,
    force_backward,
    insert_casts,
    insert_splits,
    overwritten_tops,
    prune_backward,
    warn_of_loss_weights,
)
from caffepy.net.parameters import ParameterBuffer, ParameterTable
from caffepy.net.trained_layers import copy_trained_layers, share_trained_layers
from caffepy.utils.files import read_regular

log = logging.getLogger(__name__)


class Net:
    """A net of one phase on one device.

    Args:
        param: the net as read (upgraded, unfiltered).
        context: backend, phase, seed and shard, passed to every layer.
        state: phase, level and stages for include and exclude rules; by default `param.state` with the context's phase.
        fuse: fuse layers (`net/fuse.py`, `net/fold.py`). Blobs inside a group are then not filled, and a TEST net can
            only run forward.
        trace: records the times of the layers.

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
        trace: Tracer = NO_TRACE,
    ) -> None:
        self.name = param.name
        self.context = context
        self.backend = context.backend
        self.phase = context.phase
        self.debug_info = param.debug_info
        self.after_backward: list[Callable[[Node], None]] = []
        """Called with each node of the schedule when the gradients of its own parameters are complete."""
        self.before_forward: list[Callable[[Node], None]] = []
        """Called with each node before it runs forward. Not called in captured passes; nor are the three below."""
        self.after_forward: list[Callable[[Node], None]] = []
        self.before_backward: list[Callable[[Node], None]] = []
        """Called with each node at its turn in the backward pass, also if its backward pass is skipped."""
        self.graphs_outdated: list[Callable[[], None]] = []
        """Called when captured graphs become invalid: parameters have new memory, or a loss reads a written diff."""
        self._trace = trace
        self.keeps_copies = True
        """Whether `forward` refreshes the half-precision copies of parameters; solvers do so after an update."""
        with self.backend.activate():  # passes read the constants on the backend's stream
            built = build_net(param, context, state)
            self.param = built.param
            self.nodes = built.nodes
            """The prototxt's layers, unfused, with Split and Cast layers."""
            self.blobs = built.blobs
            self.outputs = built.outputs
            self._table = built.table
            unflattened = self.phase == caffe_pb2.TEST
            self.parameters = ParameterBuffer(self.backend, built.table.parameters, unflattened)
            """The other net's parameters after `share_trained_layers_with`."""
            self._filled = False
            rewrite = fold_nodes if self.phase == caffe_pb2.TEST else fuse_nodes
            self.schedule = rewrite(self.nodes) if fuse else self.nodes
            """The nodes, fused on request, in the order of `forward`; `backward` reverses it."""
            self.folds_parameters = True
            """Whether `forward` folds the parameters. If False, the caller must call `fold_parameters`."""
            if fuse:
                self.reshape()

    def __repr__(self) -> str:
        return describe_net(self.name, self.phase, self.nodes, self.backend.device_description())

    def _repr_html_(self) -> str:
        return net_table(repr(self), self.nodes)

    # -- contents of the net -------------------------------------------------------------------------

    @property
    def layers(self) -> list[Layer]:
        """All layers in the prototxt's order, unfused, with the inserted Split and Cast layers."""
        return [node.layer for node in self.nodes]

    @property
    def layer_names(self) -> list[str]:
        """Names in the order of `layers`; `bottoms` and `tops` have the same order."""
        return [node.layer.name for node in self.nodes]

    @property
    def bottoms(self) -> list[list[Blob]]:
        return [node.bottoms for node in self.nodes]

    @property
    def tops(self) -> list[list[Blob]]:
        return [node.tops for node in self.nodes]

    @property
    def inputs(self) -> list[str]:
        """The tops of Input layers."""
        return [top.name for node in self.nodes if node.layer.type == "Input" for top in node.tops]

    def loss_weight(self, blob: Blob) -> float:
        """Return the weight of a top in the loss, 0 if it has none."""
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
        """This device's samples per pass: the first axis of the first top of the first layer without bottoms."""
        for node in self.nodes:
            if not node.bottoms and node.tops and node.tops[0].shape:
                return node.tops[0].shape[0]
        return 0

    def connect_devices(
        self, total: Callable[[Array], None], mean: Callable[[Array], None] | None, capturable: bool
    ) -> None:
        """Give layers the all-reduces over all devices. Called after the devices are connected.

        None is given where all devices have the same samples: counts and statistics are those of the whole batch.

        Args:
            total: in-place sum over all devices, for losses that count labels.
            mean: in-place mean over all devices, for BatchNorm; None: each device uses its own statistics.
            capturable: whether both can be captured in a CUDA graph.
        """
        if self.context.shard.undivided:
            return
        self.context.all_reduce_sum = total
        self.context.all_reduce_mean = mean
        self.context.all_reduce_capturable = capturable

    def join(self, shard: Shard, seed: int) -> None:
        """Belong to a device that trains with others from now on, with the seed of all.

        Data layers continue at their position.
        """
        positions = [(layer, layer.position()) for layer in self.layers]
        self.context.shard, self.context.seed = shard, seed
        divide_passes(self.param, self.context)
        for layer, position in positions:
            if position is not None:
                layer.seek(position)

    # -- running -------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run every layer forward; layers whose bottoms changed shape are reshaped first.

        Raises:
            RunError: a layer raised an unexpected exception; the message names the layer.
        """
        for _ in self._forward_nodes():
            continue

    def forward_part(self, nodes: Sequence[Node]) -> None:
        """Run some nodes of the schedule forward; a data layer among them advances all data layers by one batch.

        Raises:
            RunError: see `forward`.
        """
        if any(node.layer.prefetches for node in nodes) or not self._prefetching_nodes:
            for _ in self._forward_nodes(nodes):
                continue
            return
        self.prepare()
        for node in nodes:
            self.forward_node(node)

    def _forward_nodes(self, nodes: Sequence[Node] | None = None) -> Iterator[Node]:
        """Run the given nodes, by default all, forward; yield each node after its pass."""
        self.prepare()
        number = self.context.passes.number
        self.prefetch_to_device(number)
        for node in self.schedule if nodes is None else nodes:
            self.forward_node(node)
            yield node
        self.release_batch(number)
        self.context.passes.number += 1

    def prepare(self) -> None:
        """Fill parameters, refresh their half-precision copies. Called before a pass."""
        if not self._filled:
            self._fill_parameters()
        if self._dtypes and self.keeps_copies:
            self._refresh_copies()
        if self.folds_parameters:
            self.fold_parameters()

    def _refresh_copies(self) -> None:
        """Refresh the half-precision copies; in a folded net only those of unfolded parameters."""
        own = self.unfolded_layers()
        if len(own) == len(self.layers) and not self.parameters.unflattened:
            self.parameters.refresh(self._dtypes)
            return
        self.parameters.refresh_single((b, one.dtype) for one in own if one.dtype != "float32" for b in one.blobs)

    def _fill_parameters(self) -> None:
        """Fill the parameters not used yet, because a captured pass cannot."""
        for node in self.nodes:
            with node.named_errors():
                for blob in node.layer.blobs:
                    blob.fill()
        self._filled = True

    def fold_parameters(self) -> None:
        """Compute the weights of folded layers from the current parameters."""
        largest_first = sorted(self._folded, key=lambda layer: -layer.blobs[0].count)
        for layer in largest_first:  # later layers reuse the memory that earlier ones free
            layer.fold()

    def unfolded_layers(self) -> list[Layer]:
        """The layers whose own parameters passes read, directly or in another dtype."""
        folded = {id(layer) for convolution in self._folded for layer in convolution.folded_layers}
        return [layer for layer in self.layers if id(layer) not in folded]

    @property
    def _folded(self) -> list[FoldedConvolution]:
        return [node.layer for node in self.schedule if isinstance(node.layer, FoldedConvolution)]

    @property
    def _dtypes(self) -> set[str]:
        """The dtypes, other than float32, that layers read their parameters in."""
        return {layer.dtype for layer in self.layers if layer.blobs and layer.dtype != "float32"}

    def waited(self) -> dict[str, float]:
        """Return the seconds that the solver waited for data, by stage; empty if no layer reads ahead."""
        waits = [seconds for layer in self.layers if (seconds := layer.waited())]
        return {stage: sum(seconds[stage] for seconds in waits) for stage in STAGES} if waits else {}

    def prefetch_to_device(self, number: int) -> None:
        """Copy the batches of pass `number` to the device. Called before `forward`."""
        for node in self._prefetching_nodes:
            with self._trace.span("feed", node.layer.name), node.named_errors():
                node.layer.prefetch_to_device(number)

    def release_batch(self, number: int) -> None:
        """Free the batches of pass `number`. All work that reads them must be on the device's stream."""
        for node in self._prefetching_nodes:
            node.layer.release_batch(number)

    @cached_property
    def _prefetching_nodes(self) -> list[Node]:
        return [node for node in self.schedule if node.layer.prefetches]

    @cached_property
    def _first_readers(self) -> list[Node]:
        """The nodes that read a top of a data or Input layer."""
        sources = {top for node in self.schedule if not node.bottoms for top in node.tops}
        return [node for node in self.schedule if any(bottom in sources for bottom in node.bottoms)]

    def forward_node(self, node: Node) -> None:
        """Run one node of the schedule forward, with the callbacks."""
        for callback in self.before_forward:
            callback(node)
        if [bottom.shape for bottom in node.bottoms] != node.shapes:
            node.reshape()
        workspace = self.backend.workspace_lease(node.forward_workspace)
        with self._trace.span("forward", node.layer.name), node.named_errors(), workspace:
            node.layer.forward(node.bottoms, node.tops)
            if not (self.backend.asynchronous or self.backend.capturing):
                node.layer.raise_device_errors()
        if node.layer.saved_loss is not None:
            self._save_loss(node, node.layer.saved_loss)
        if self.debug_info:
            debug.log_forward(node)
        for callback in self.after_forward:
            callback(node)

    def _save_loss(self, node: Node, total: Array) -> None:
        """Sum the loss of a node now, because a later layer overwrites its tops in place."""
        accumulate = False
        for top, weight in zip(node.tops, node.layer.loss_weights, strict=True):
            if weight:
                self.backend.reduce(scaled, (top.data, weight), (total,), accumulate=accumulate)
                accumulate = True

    def backward(self, nodes: Sequence[Node] | None = None) -> None:
        """Run backward every layer between a learnable parameter and the loss.

        Args:
            nodes: only these nodes of the schedule, in the order of `forward`.
        """
        assert not self._folded, "a folded net runs forward"
        _ = self.parameters.diff  # binds the gradients to the flat buffer before any layer writes them
        for node in reversed(self.schedule if nodes is None else nodes):
            self.backward_node(node)
        if self.debug_info:
            debug.log_norms(self.parameters)

    def backward_node(self, node: Node) -> None:
        """Run one node of the schedule backward if needed, and the callbacks in any case."""
        for callback in self.before_backward:
            callback(node)
        if node.need_backward:
            self._fill_loss_weights(node)
            workspace = self.backend.workspace_lease(node.backward_workspace)
            with self._trace.span("backward", node.layer.name), node.named_errors(), workspace:
                node.layer.backward(node.tops, node.propagate_down, node.bottoms)
            if self.debug_info:
                debug.log_backward(node)
        for callback in self.after_backward:
            callback(node)

    def reversed_passes(self) -> Iterator[Callable[[], None]]:
        """Yield the layers' backward and forward passes from the last to the first, for the backend's `compile_helper`.

        User-defined layers and layers that write files are left out: they do more than compute.
        """
        nodes = [n for n in self.schedule if n.bottoms and n.tops and not is_user_defined(n.layer.param.type)]
        for node in nodes:
            if node.need_backward:
                yield partial(node.layer.backward, node.tops, node.propagate_down, node.bottoms)
        for node in reversed(nodes):
            yield partial(node.layer.forward, node.bottoms, node.tops)

    def _fill_loss_weights(self, node: Node) -> None:
        """Fill the diffs of tops that have a loss weight. Needed in every pass, because in-place layers overwrite them.

        Loss layers apply their weight and the loss scale themselves.
        """
        if node.layer.is_loss:
            return
        for top, weight in zip(node.tops, node.layer.loss_weights, strict=True):
            if weight:
                self.backend.fill(top.diff, weight)
                if self.context.loss_scale is not None:
                    self.backend.apply(scaled, (top.diff, self.context.loss_scale), (top.diff,))

    def shapes_changed(self) -> bool:
        """Return whether a prefetched batch differs in shape or layout from the last reshape of the net."""
        if any(node.layer.transfer_changed() for node in self._prefetching_nodes):
            return True
        return any([bottom.shape for bottom in node.bottoms] != node.shapes for node in self._first_readers)

    def shapes_known_until(self, number: int) -> int:
        """Return the first pass from `number` on whose batch shapes are not known from prefetching."""
        sources = (node.layer for node in self.schedule if not node.bottoms)
        return min((layer.shapes_known_until(number) for layer in sources), default=number)

    def add_loss(self, total: Array, accumulate: bool) -> None:
        """total (+)= the loss of this pass, on the device; `total` has shape ()."""
        for values, weight in self._losses():
            self.backend.reduce(scaled, (values, weight), (total,), accumulate=accumulate)
            accumulate = True

    def loss(self) -> float:
        """Return sum over tops of loss_weight * sum(top). Waits for the device."""
        return sum(
            weight * float(self.backend.to_host(values).sum(dtype="float64")) for values, weight in self._losses()
        )

    def _losses(self) -> Iterator[tuple[Array, float]]:
        """Yield the terms of the loss after a forward pass: (values, weight)."""
        for node in self.nodes:
            if node.layer.saved_loss is not None:
                yield node.layer.saved_loss, 1.0
                continue
            for top, weight in zip(node.tops, node.layer.loss_weights, strict=True):
                if weight:
                    yield top.data, weight

    def clear_param_diffs(self) -> None:
        """Make the next backward pass overwrite the parameter gradients instead of adding to them."""
        for parameter in self._table.parameters:
            parameter.blob.gradient_started = False

    def reshape(self) -> None:
        """Reshape every layer to its bottoms' current shapes."""
        for node in self.schedule:
            node.reshape()

    def statistics(self, local_only: bool = False) -> list[Array]:
        """Return flat views of the parameters that forward passes change: BatchNorm's running statistics.

        Args:
            local_only: only statistics that each device computes from its own batches.
        """
        blobs = [
            layer.blobs[index]
            for layer in self.layers
            for index in (layer.local_statistics() if local_only else layer.running_statistics())
        ]
        if self.parameters.unflattened or self.parameters.borrows:
            return [self.backend.flat(blob.data) for blob in blobs]
        return [self.parameters.data[part] for part in self.parameters.slices(blobs)]

    def state(self) -> list[Array]:
        """Return the state arrays, other than parameters, that a forward pass passes on to the next."""
        return [array for layer in self.layers for array in layer.state()]

    def raise_device_errors(self) -> None:
        """Raise errors that kernels recorded on the device, such as labels out of range. The device must be idle."""
        for layer in self._error_layers:
            layer.raise_device_errors()

    @cached_property
    def _error_layers(self) -> list[Layer]:
        """The layers whose kernels record errors."""
        return [one for one in self.layers if type(one).raise_device_errors is not Layer.raise_device_errors]

    def first_non_finite(self, anew: bool = False) -> Node | None:
        """Return the first layer in forward order with a non-finite top, or None.

        `anew` runs another forward pass and checks after each layer, because blobs that share memory lose their values.
        """
        first = None
        for node in self._forward_nodes() if anew else self.schedule:
            if first is None and not all(self.backend.all_finite(top.data) for top in node.tops):
                first = node
        return first

    def close(self) -> None:
        """Stop prefetch threads and close files. Idempotent."""
        for layer in self.layers:
            layer.close()

    # -- parameters ----------------------------------------------------------------------------------

    def copy_trained_layers_from(self, weights: caffe_pb2.NetParameter | TrainedLayers, origin: str) -> list[str]:
        """Copy the parameters of layers of the same name; return the names of the copied layers.

        Raises:
            SnapshotError: the number or shapes of a layer's parameters differ.
        """
        return copy_trained_layers(self.layers, weights, origin, self.context.log_level)

    def share_trained_layers_with(self, other: Net, follow: bool = False) -> None:
        """Make layers of the same name use the parameters of `other` and their copies in other dtypes.

        For forward-only nets, such as test nets: `parameters` becomes that of `other`. The parameters stay on the
            device, unless `follow` allows offloading them.

        Raises:
            ConfigError: numbers or shapes of parameters differ.
        """
        self.parameters = other.parameters
        share_trained_layers(self.layers, other.layers, Blob.follow if follow else Blob.share_data_and_copies)

    def share_data_with(self, other: Net) -> None:
        """Make layers of the same name use the current memory of the parameters of `other`.

        Caffe's `Net::ShareTrainedLayersWith`: this net keeps its own gradients, and its updates change the shared
        values.

        Raises:
            ConfigError: numbers or shapes of parameters differ.
        """
        owns = self.parameters.parameters is self._table.parameters
        if self._dtypes and not owns:  # this net has used the other net's copies in other dtypes
            for blob in (blob for layer in self.layers for blob in layer.blobs):
                blob.copies = {}
            self.parameters, owns = ParameterBuffer(self.backend, self._table.parameters, unflattened=True), True
        share_trained_layers(self.layers, other.layers, Blob.share_data)
        if owns:
            self.parameters.note_borrowed()
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        for callback in self.graphs_outdated:
            callback()

    def let_program_write_diff(self, top: Blob) -> None:
        """Make the losses that compute `top` read its diff, written by the program, instead of the loss weight."""
        losses = [node.layer for node in self.nodes if node.layer.is_loss and node.tops[0] is top]
        if not all(layer.program_writes_diff for layer in losses):
            for layer in losses:
                layer.program_writes_diff = True
            self._drop_graphs()

    def unreached_parameters(self) -> list[Blob]:
        """Return the parameters whose gradients no backward pass computes."""
        reached = {
            blob.gradient_owner
            for node in self.nodes
            if node.need_backward
            for blob, learned in zip(node.layer.blobs, node.layer.propagate_to_params, strict=True)
            if learned
        }
        return [parameter.blob for parameter in self._table.parameters if parameter.blob not in reached]

    def to_proto(self, write_diff: bool = False) -> caffe_pb2.NetParameter:
        """Return the net with its parameters (and gradients) as in Caffe's snapshots: each layer saves all its
        blobs."""
        return caffe_pb2.NetParameter(name=self.name, layer=layer_protos(self.layers, write_diff))


_OF_LAYER = re.compile(r"layer '(.*?)'[ :]", re.DOTALL)
"""The layer's name in an error message."""


@dataclass(frozen=True)
class BuiltNet:
    """The result of `build_net`.

    Args:
        param: the filtered net with Split layers.
        nodes: the layers in order, with Split and Cast layers.
        blobs: the blobs by name.
        outputs: the blobs that no layer reads.
        table: the parameters.
    """

    param: caffe_pb2.NetParameter
    nodes: list[Node]
    blobs: dict[str, Blob]
    outputs: dict[str, Blob]
    table: ParameterTable


def build_net(
    param: caffe_pb2.NetParameter, context: LayerContext, state: caffe_pb2.NetState | None = None
) -> BuiltNet:
    """Build a net's layers and blobs and reshape every layer once. Arguments and errors as in `Net`."""
    if context.dialect is None:
        context.dialect = choose_dialect([param], lambda *line: log.log(context.log_level, *line))
    state = state or net_state(context.phase, param.state, net_state(context.phase))
    with _placed_errors(context, state):
        return _build(param, context, state)


def _build(param: caffe_pb2.NetParameter, context: LayerContext, state: caffe_pb2.NetState) -> BuiltNet:
    refuse_fork_fields(param, f"net '{param.name}'", "leave it out", skipped=("layer", "layers"))
    filtered = filter_net(param, state)
    warn_of_loss_weights(filtered, context.log_level)
    resolve_auto_crops(filtered)
    param = insert_splits(filtered)
    divide_passes(param, context)
    wiring, table = Wiring(context.backend), ParameterTable()
    nodes: list[Node] = []
    plan = GradientTracker()
    for node in _connect_layers(param, context, wiring):
        _setup(node)
        table.add(node.layer)
        plan.add(node)
        _log_layer(context.log_level, node)
        nodes.append(node)
    number_made_samples(nodes, context)
    _plan_backward(nodes, context, param.force_backward)
    built = BuiltNet(param, nodes, wiring.blobs, wiring.outputs(), table)
    _log_outputs(context.log_level, built)
    return built


@contextmanager
def _placed_errors(context: LayerContext, state: caffe_pb2.NetState) -> Iterator[None]:
    """Prefix errors about a layer with the layer's file and line, if the net was read from a prototxt."""
    try:
        yield
    except UserError as error:
        found, resolve = _OF_LAYER.match(str(error)), context.resolve
        if found and not isinstance(error, DeviceError) and isinstance(resolve, PathResolver) and resolve.prototxt:
            lines = _lines_of_layer(resolve.prototxt, found[1], state)
            if lines:
                error.args = (f"{resolve.prototxt}:{' or '.join(map(str, lines))}: {error}",)
        raise


def _lines_of_layer(prototxt: Path, name: str, state: caffe_pb2.NetState) -> list[int]:
    """Return the lines of the net's layers of this name in a prototxt; empty if unknown."""
    # protobuf's parser discards line numbers, so the text is parsed again.
    lines = []
    with suppress(CaffepyError, OSError, RecursionError):
        for line, block in layer_blocks(decode_text(read_regular(prototxt, MAX_TEXT_BYTES), str(prototxt))):
            net = parse_text(block, caffe_pb2.NetParameter(), str(prototxt))
            layer = net.layer[0] if net.layer else net.layers[0]
            own = layer.layer if isinstance(layer, caffe_pb2.V1LayerParameter) and layer.HasField("layer") else layer
            if own.name == name and ((layer.include and layer.exclude) or is_included(layer, state)):
                lines.append(line)
    return lines


def _connect_layers(param: caffe_pb2.NetParameter, context: LayerContext, wiring: Wiring) -> Iterator[Node]:
    """Yield the nodes in order, Cast layers before their readers."""
    # A generator, because connecting a layer needs the shapes that earlier layers' setup has computed.
    precision, earlier = Precision(param, context.backend), Counter[str]()
    for layer_param, overwritten, labels in zip(
        param.layer, overwritten_tops(param.layer), find_label_tops(param), strict=True
    ):
        cls = layer_class(layer_param.type, f"layer '{layer_param.name}'")
        where = f"layer '{layer_param.name}' ({layer_param.type})"
        refuse_fields(layer_param, where)
        if not is_user_defined(layer_param.type):
            refuse_fork_fields(layer_param, where, _register_advice(layer_param.type))
        layer = cls(layer_param, context)
        layer.tops_overwritten, layer.label_tops = overwritten, labels
        if count := earlier[layer.name]:
            layer.random_name = f"{layer.name}, after {count} of the same name"
        earlier[layer.name] += 1
        node = wiring.connect(layer, precision)
        yield from insert_casts(node, context)
        yield node


def _register_advice(type_name: str) -> str:
    return (
        "register a class that reads it: "
        f'caffepy.register_layer("{type_name}", cls, replace=True) (docs/tutorials/unknown-fork.md)'
    )


def _setup(node: Node) -> None:
    with node.named_errors():
        node.layer.setup(node.bottoms, node.tops)
    node.reshape()


def _plan_backward(nodes: list[Node], context: LayerContext, forced: bool) -> None:
    prune_backward(nodes)
    find_loss_readers(nodes)
    for node in nodes:
        if node.layer.tops_overwritten and any(node.layer.loss_weights):
            node.layer.saved_loss = context.backend.zeros(())
    if forced:
        force_backward(nodes)
    if context.phase == caffe_pb2.TRAIN:
        check_gradients(nodes)


def _log_layer(level: int, node: Node) -> None:
    layer = node.layer
    log.log(level, "Creating Layer %s (%s)", layer.name, layer.type)
    for bottom in node.bottoms:
        log.log(level, "%s <- %s", layer.name, bottom.name)
    for top, weight in zip(node.tops, layer.loss_weights, strict=True):
        in_place = " (in-place)" if top in node.bottoms else ""
        log.log(level, "%s -> %s%s", layer.name, top.name, in_place)
        log.log(level, "Top shape: %s", format_shape(top.shape))
        if weight:
            log.log(level, "    with loss weight %g", weight)


def _log_outputs(level: int, built: BuiltNet) -> None:
    for node in built.nodes:
        need = "needs" if node.need_backward else "does not need"
        log.log(level, "%s %s backward computation.", node.layer.name, need)
    for name in built.outputs:
        log.log(level, "This network produces output %s", name)
    log.log(level, "Network initialization done.")

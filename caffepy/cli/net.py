"""`caffepy net`: the layers of a net in execution order, and its memory; needs neither data nor GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.nets import record_shapes
from caffepy.cli.options import ReadsNets, StateOptions
from caffepy.cli.output import print_table
from caffepy.errors import ConfigError, printable
from caffepy.utils.options import gpu_number, option, positive, positive_number, record_shape, switch

if TYPE_CHECKING:
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext
    from caffepy.layers.blob import Blob
    from caffepy.net.graph import Node
    from caffepy.net.memory_plan import MemoryPlan


LARGEST_BLOBS = 12
"""Rows in the table of blobs."""
_REMARKS = {
    "blobs": "outputs, and blobs whose values outlive a pass",
    "half copies": "half-precision copies of the parameters",
    "folded weights": "weights of folded convolutions",
}
"""Remarks on the categories of memory in the table."""
MEBIBYTE, GIBIBYTE = 2**20, 2**30


@dataclass(kw_only=True)
class NetCommand(StateOptions, ReadsNets):
    """Show a model's layers and memory.

    Print a net's layers, predict its GPU memory, or list the types and fields that nets below a folder lack.

      caffepy net --model models/resnet50/train_val.prototxt --fused
      caffepy net --solver models/resnet50/solver.prototxt --memory --batch 256 --limit 24
      caffepy net --survey ~/models
    """

    model: Path | None = option("the net's prototxt (this or --solver is needed)", Path)
    solver: Path | None = option("the solver's prototxt, whose net is shown", Path)
    survey: Path | None = option(
        "read every prototxt below a folder, run the nets without data, list missing types and fields",
        Path,
        "FOLDER",
    )
    phase: str = option("TRAIN or TEST", str.upper, default="TRAIN", choices=("TRAIN", "TEST"))
    batch: int | None = option("batch_size instead of the prototxt's", positive)
    shape: tuple[int, ...] | None = option("shape of one record, if the data are missing", record_shape)
    fused: bool = switch("show the fused layers that a GPU runs")
    memory: bool = switch("predict the memory needed on a GPU")
    no_fuse: bool = switch("with --memory: predict for runs with --no-fuse")
    no_share: bool = switch("with --memory: predict for runs with --no-share")
    gpu: int | None = option("with --memory: the largest batch that fits on this GPU", gpu_number, excludes="gpu")
    limit: float | None = option(
        "with --memory: the largest batch that fits into GIB", positive_number, "GIB", excludes="gpu"
    )
    jobs: int | None = option("with --survey: processes at a time (default: one for each core)", positive)
    seconds: float = option("with --survey: the longest run of a net", positive_number, default=60.0)

    def run(self) -> int:
        """Print the tables to stdout.

        Raises:
            ConfigError: not exactly one of --model, --solver and --survey, or the net has no layers in the phase.
            CaffepyError: the files cannot be used.
        """
        path = self.model or self.solver or self.survey
        if path is None or sum(map(bool, (self.model, self.solver, self.survey))) > 1:
            raise ConfigError(
                "net needs either --model train_val.prototxt, --solver solver.prototxt or --survey FOLDER"
            )
        if self.survey is not None:
            from caffepy.cli.survey import survey

            jobs = self.jobs or len(os.sched_getaffinity(0))
            survey(self.survey, self.shape, jobs, self.seconds, self.plugins)
            return 0
        from caffepy.cli.nets import refuse_net_without_layers

        described = _read(self, path)
        refuse_net_without_layers(path, described.param, described.state)
        shapes = record_shapes(
            described.param, described.context, described.state, self.shape, lambda text: print(f"{text}\n")
        )
        described.context = replace(described.context, sample_shapes=shapes)
        if self.memory:
            _print_memory(described, self)
        else:
            _print_layers(described, self.fused)
        return 0


@dataclass
class DescribedNet:
    """The net that the command describes.

    Args:
        param: the net as read, with --batch.
        context: its context on the meta device.
        state: its phase, level and stages.
        histories: history values of the solver per parameter.
    """

    param: caffe_pb2.NetParameter
    context: LayerContext
    state: caffe_pb2.NetState
    histories: int = 1


# -- reading the net --------------------------------------------------------------------------------------


def _read(args: NetCommand, path: Path) -> DescribedNet:
    from caffepy.formats.proto import caffe_pb2
    from caffepy.net.memory_plan import with_batch

    own = caffe_pb2.NetState(level=args.level, stage=args.stage)
    phase = caffe_pb2.Phase.Value(args.phase)
    described = (_read_model if args.model else _read_solver)(path, phase, own)
    if args.batch is not None:
        described.param = with_batch(described.param, args.batch)
    return described


def _read_model(path: Path, phase: int, own: caffe_pb2.NetState) -> DescribedNet:
    from caffepy.backend.meta import MetaBackend
    from caffepy.formats.load import net_state, read_net
    from caffepy.formats.paths import PathResolver
    from caffepy.layers import LayerContext

    param = read_net(path)
    context = LayerContext(MetaBackend(), phase=phase, resolve=PathResolver(path))
    return DescribedNet(param, context, net_state(phase, param.state, own))


def _read_solver(path: Path, phase: int, own: caffe_pb2.NetState) -> DescribedNet:
    from caffepy.backend.meta import MetaBackend
    from caffepy.formats.load import net_state, read_solver
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers import LayerContext
    from caffepy.training.net_factory import NetFactory
    from caffepy.training.rules import RULES

    solver = read_solver(path)
    factory = NetFactory(solver, LayerContext(MetaBackend(), resolve=PathResolver(path)))
    param, context, state = factory.train_setup()
    if phase == caffe_pb2.TEST:
        context = replace(context, phase=phase)
        state = net_state(phase, param.state, *solver.test_state[:1])
    state.MergeFrom(own)
    return DescribedNet(param, context, state, RULES.get(solver.type, "solver").histories())


# -- layers -----------------------------------------------------------------------------------------------


def _print_layers(described: DescribedNet, fused: bool) -> None:
    from caffepy.net import Net

    net = Net(described.param, described.context, described.state, fused)
    head = ("layer", "type", "bottoms -> tops", "shape", "parameters", "dtype")
    sources = _split_sources(net.schedule)
    shown = [node for node in net.schedule if node.layer.type != "Split"]
    print_table([head, *(_row(node, sources) for node in shown)], right=(4,), shrinking=(0, 1, 2, 3))
    learned = sum(parameter.blob.count for parameter in net.parameters.parameters if parameter.lr_mult)
    print(f"\n{len(shown)} layers, {learned:,} learned parameters")
    net.close()


def _split_sources(nodes: Iterable[Node]) -> dict[Blob, str]:
    """Return the name that the prototxt gives each top of an automatic Split layer."""
    sources: dict[Blob, str] = {}
    for node in nodes:
        if node.layer.type == "Split":
            bottom = node.bottoms[0]
            sources.update(dict.fromkeys(node.tops, sources.get(bottom, bottom.name)))
    return sources


def _row(node: Node, sources: Mapping[Blob, str]) -> tuple[str, ...]:
    layer = node.layer
    wires = f"{' '.join(sources.get(b, b.name) for b in node.bottoms)} -> {' '.join(t.name for t in node.tops)}".strip()
    shapes = list(dict.fromkeys("x".join(map(str, top.shape)) or "()" for top in node.tops))
    dtypes = dict.fromkeys(top.dtype for top in node.tops)
    count = sum(blob.count for blob in layer.blobs)
    parameters = f"{count:,}" if count else ""
    return (_short(layer.name), layer.type, wires, ", ".join(shapes), parameters, ", ".join(dtypes))


def _short(name: str) -> str:
    """Return a fused layer's short name, from its first member."""
    first, *more = name.split(" + ")
    return f"{first} +{len(more)}" if more else name


# -- memory -----------------------------------------------------------------------------------------------


def _print_memory(described: DescribedNet, args: NetCommand) -> None:
    from caffepy.formats.load import filter_net
    from caffepy.net.memory_plan import plan_memory, written_batch

    training = args.phase == "TRAIN"
    histories = described.histories if training else 0
    plan = plan_memory(described.param, described.context, described.state, not args.no_fuse)
    batch = written_batch(filter_net(described.param, described.state))
    print(f"{printable(described.param.name) or 'net'}, {args.phase}, batch {batch}: memory on a GPU\n")
    print_table(_summary(plan, histories, not args.no_share), right=(1,))
    print(f"\nPeak: {printable(_short_step(plan.steps[plan.peak]))}. The largest blobs live there:\n")
    print_table(_largest(plan), right=(0,), shrinking=(1, 2, 5, 6))
    if available := _available(args):
        _print_largest_batch(described, args, histories, available)


def _summary(plan: MemoryPlan, histories: int, share: bool) -> Iterable[tuple[str, ...]]:
    from caffepy.net.memory_plan import BLOBS

    shared = f"sharing memory; {_mebibytes(plan.alone)} without, {_mebibytes(plan.bound)} are needed at once"
    yield ("", "MiB", "")
    yield ("blobs", _mebibytes(plan.arena if share else plan.alone), shared if share else "without sharing")
    for kind, size in plan.lasting.items():
        if size >= MEBIBYTE / 20:
            yield ("other blobs" if kind == BLOBS else kind, _mebibytes(size), _REMARKS.get(kind, ""))
    if histories:
        yield ("history", _mebibytes(plan.history(histories)), f"{histories} for each parameter")
    yield ("in all", _mebibytes(plan.total(histories, share)), "")
    workspace = _mebibytes(plan.workspace(share))
    yield ("workspace", workspace, "at most; scratch memory of single primitives")


def _largest(plan: MemoryPlan) -> Iterable[tuple[str, ...]]:
    yield ("MiB", "blob", "layer", "shape", "dtype", "from", "to")
    for slot in plan.at_peak()[:LARGEST_BLOBS]:
        shape = "x".join(map(str, slot.shape))
        steps = [_short_step(plan.steps[step]) for step in (slot.life.first, slot.life.last)]
        yield (_mebibytes(slot.life.size), slot.title, _short(slot.layer), shape, slot.dtype, *steps)


def _short_step(step: str) -> str:
    """Return a step's name without the layer's type."""
    way, _, name = step.rpartition(" (")[0].partition(" of layer ")
    short = _short(name.strip("'"))
    return f"{way} {short}"


def _available(args: NetCommand) -> int:
    """Return the bytes available by --gpu or --limit; 0 if neither is given."""
    if args.limit is not None:
        return int(args.limit * GIBIBYTE)
    if args.gpu is None:
        return 0
    from caffepy.backend.cuda.device import free_memory

    return free_memory(args.gpu)


def _print_largest_batch(described: DescribedNet, args: NetCommand, histories: int, available: int) -> None:
    from caffepy.net.memory_plan import largest_batch

    batch = largest_batch(
        described.param, described.context, described.state, not args.no_fuse, not args.no_share, histories, available
    )
    device = "" if args.gpu is None else f" that are free on GPU {args.gpu}"
    print(f"\nThe largest batch_size for the {available / GIBIBYTE:.1f} GiB{device}: {batch or 'none'}")


def _mebibytes(size: int) -> str:
    return f"{size / MEBIBYTE:,.1f}"

"""Solvers and nets, and the files beside them that are texts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from fuzz import seeds
from fuzz.mutate import LONG, Random, damage_message
from fuzz.target import TextTarget, copied, reads
from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import UserError
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.logged_solver import describe_solver, read_logged_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.schemas import unite
from caffepy.layers import LayerContext, layer_class
from caffepy.layers.detection.boxes import read_image_sizes
from caffepy.layers.detection.output import read_label_map
from caffepy.net import Net
from caffepy.net.memory_plan import plan_memory
from caffepy.training import policies
from caffepy.training.net_factory import NetFactory
from caffepy.training.rules import RULES
from caffepy.training.solver_check import check_solver, log_ignored

LENET_SHAPES: dict[str, tuple[int, ...]] = {"data": (1, 28, 28), "label": ()}

LARGEST_BLOB = 1 << 20
"""Elements of a blob of nets that are run."""


@reads(TextTarget, "solver prototxt", seeds.solvers, "solver.prototxt", share=8, kind=caffe_pb2.SolverParameter)
def solver_text(path: Path) -> None:
    param = read_solver(path)
    check_solver(param, str(path))
    log_ignored(param)
    RULES.get(param.type, "solver")
    for iteration in (0, 1, 5, 1000, param.max_iter):
        rate, _ = policies.learning_rate(param, iteration, 0)
        policies.momentum(param, iteration, rate)
        policies.weight_decay(param, iteration)
    resolve = PathResolver(path)
    resolve.output(param.snapshot_prefix)
    net, context, state = NetFactory(param, LayerContext(MetaBackend(), resolve=resolve)).train_setup()
    Net(net, replace(context, sample_shapes=LENET_SHAPES), state).close()


def plan(path: Path) -> None:
    """Plan a net's memory in both phases."""
    param = read_net(path)
    for phase in (caffe_pb2.TRAIN, caffe_pb2.TEST):
        context = LayerContext(MetaBackend(), phase=phase, resolve=PathResolver(path), sample_shapes=LENET_SHAPES)
        plan_memory(param, context, fuse=phase == caffe_pb2.TRAIN)


NET = {"file": "net.prototxt", "kind": caffe_pb2.NetParameter}
net_text = reads(TextTarget, "net prototxt", seeds.nets, share=8, **NET)(plan)
v1_text = reads(TextTarget, "V1 prototxt", lambda: [seeds.V1], share=3, **NET)(plan)
v0_text = reads(TextTarget, "V0 prototxt", lambda: [seeds.V0], share=3, **NET)(plan)


class GeneratedText(TextTarget):
    """Valid fields with long words, texts and comments, and tokens in any order, with an error behind them."""

    name = "generated prototxt"
    file = "made.prototxt"
    share = 4

    def prepare(self) -> None:
        self.seeds = seeds.nets()[:3]

    def make(self, random: Random) -> bytes:
        parts = [random.choice(self.seeds)] if random.random() < 0.3 else []
        for _ in range(random.choice((1, 1, 2, 4))):
            piece = random.choice(LONG) if random.random() < 0.1 else random.choice(_PIECES)
            piece *= int(10 ** random.uniform(0, 5) / len(piece) + 1)
            quoted = piece.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            parts.append(random.choice((piece, *(f.format(quoted) for f in _FIELDS))))
        text = random.choice(("", " ", "\n")).join(parts) + random.choice(_ENDS)
        return text.encode()[:300_000]

    def read(self) -> None:
        for read in (read_net, read_solver):
            with contextlib.suppress(UserError):
                read(self.path)


_FIELDS = (
    'input: "{}" ',
    "# {}\n",
    'layer {{ top: "{}" }} ',
    'layer {{ type: "X" name: "{}" param {{ }} }} ',
    'layer {{ top: "{}" name {{ }} }} ',
)
_ENDS = ("", "}", "} }", '"', " x: 1", " top { }", " name { }", 'layer { type: "X" zzz_param { } ')
_LINES = "# a\n|stepvalue: 1\n|}\n{|layer { name: 'a' type: 'ReLU' bottom: 'a' top: 'a' }\n"
_OLD = "layers { name: 'a' type: RELU bottom: 'a' top: 'a' blobs_lr: 1 }\n"
_TOKENS = (
    'a|_9| |\n|#|\\|"|\'|\\"|"a" |"\\x41"|{|}|[|]|<|>|:|,|;|.|-|+|1|9|1 |1,|0x|1.|1e9 |ä|layer {|layer { |'
    'layers { layer {|name: |name: "|name: \'|top: "a" |include { } |param { } |zzz_param { |type: "ReLU" |'
    "type: RELU |input_dim: [|input_dim: 1 |loss_weight: |state { phase: |shape { dim: 1 } |[a.b] { |any: |x { x |"
    "Message type \"caffepy.|has no value named |Couldn't parse integer: |Expected string but found: '"
)
_PIECES = (*f"{_LINES}|{_OLD}".replace("'", '"').split("|"), *_TOKENS.split("|"))
"""Tokens, beginnings of fields, and parts of protobuf's messages, in which its errors are searched for."""


class NetRun(TextTarget):
    """A net that is built on the CPU and runs one iteration."""

    name = "net, run on the CPU"
    seconds = 60.0  # kernels may be compiled
    file = "run.prototxt"
    kind = caffe_pb2.NetParameter

    def prepare(self) -> None:
        self.seeds = seeds.nets()[: len(seeds.BODIES)]
        self.backend = CpuBackend(1)

    def make(self, random: Random) -> bytes:
        message = copied(random.choice(self.seeds), caffe_pb2.NetParameter)
        damage_message(message, random)
        return text_format.MessageToString(message).encode()

    def read(self) -> None:
        param = read_net(self.path)
        planned = Net(param, LayerContext(MetaBackend(), resolve=PathResolver(self.path)))
        blobs = [*planned.blobs.values(), *(blob for layer in planned.layers for blob in layer.blobs)]
        if max((blob.count for blob in blobs), default=0) > LARGEST_BLOB:
            return  # as slow as it is large
        with self.backend.activate():
            net = Net(param, LayerContext(self.backend, resolve=PathResolver(self.path)))
            try:
                net.clear_param_diffs()
                net.forward()
                net.backward()
            finally:
                net.close()


class RunLog(TextTarget):
    """The log of a training, from which it can be made again."""

    name = "log of a run"
    file = "train.log"
    share = 2

    def prepare(self) -> None:
        prefix = "I1121 11:29:00.123456 12345 run_log.py:40] "
        path = self.folder / "solver.prototxt"
        self.seeds = []
        for text in seeds.SOLVERS[:2]:
            path.write_text(text)
            lines = [prefix + line for line in describe_solver(read_solver(path), PathResolver(path))]
            self.seeds.append("\n".join([f"{prefix}caffepy train", *lines, f"{prefix}Solving"]) + "\n")

    def read(self) -> None:
        param, folder = read_logged_solver(self.path)
        check_solver(param, str(self.path))
        PathResolver(folder / "solver.prototxt").output(param.snapshot_prefix)


DETECTION = [
    'item { name: "cat" label: 1 display_name: "a cat" }\nitem { name: "dog" label: 2 }\n',
    "a 300 400\nb 10 20\n",
]


@reads(TextTarget, "detection lists", lambda: DETECTION, "detection.txt")
def detection_lists(path: Path) -> None:
    """The names of classes, and names and sizes of images."""
    param = caffe_pb2.LayerParameter(name="out", type="DetectionOutput")
    layer = layer_class(param.type)(param, LayerContext(MetaBackend()))
    for reader in (read_label_map, read_image_sizes):
        with contextlib.suppress(UserError):
            reader(layer, str(path))


@reads(TextTarget, "schema of a fork", seeds.schemas, "caffe.proto", share=2)
def schema_of_fork(path: Path) -> None:
    """A fork's caffe.proto, united with caffepy's schema; the union is not used."""
    unite(path.read_bytes(), str(path), caffe_pb2)


TARGETS = (
    *(solver_text, net_text, GeneratedText, v1_text, v0_text),
    *(NetRun, RunLog, detection_lists, schema_of_fork),
)

"""Solvers and nets, and the files beside them that are texts."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from fuzz import seeds
from fuzz.mutate import LONG, Random, damage_message
from fuzz.target import TextTarget, copied
from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import UserError
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.schemas import unite
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net
from caffepy.net.memory_plan import plan_memory
from caffepy.training.net_factory import NetFactory
from caffepy.training.solver_check import check_solver, log_ignored

LENET_SHAPES: dict[str, tuple[int, ...]] = {"data": (1, 28, 28), "label": ()}

LARGEST_BLOB = 1 << 20
"""Elements of a blob of nets that are run."""


class SolverText(TextTarget):
    name = "solver prototxt"
    file = "solver.prototxt"
    share = 8
    kind = caffe_pb2.SolverParameter

    def prepare(self) -> None:
        self.texts = seeds.solvers()

    def read(self) -> None:
        from caffepy.training import policies
        from caffepy.training.rules import RULES

        param = read_solver(self.path)
        check_solver(param, str(self.path))
        log_ignored(param)
        RULES.get(param.type, "solver")
        for iteration in (0, 1, 5, 1000, param.max_iter):
            rate, _ = policies.learning_rate(param, iteration, 0)
            policies.momentum(param, iteration, rate)
            policies.weight_decay(param, iteration)
        resolve = PathResolver(self.path)
        resolve.output(param.snapshot_prefix)
        net, context, state = NetFactory(param, LayerContext(MetaBackend(), resolve=resolve)).train_setup()
        Net(net, replace(context, sample_shapes=LENET_SHAPES), state).close()


class NetText(TextTarget):
    name = "net prototxt"
    file = "net.prototxt"
    share = 8
    kind = caffe_pb2.NetParameter

    def prepare(self) -> None:
        self.texts = seeds.nets()

    def read(self) -> None:
        param = read_net(self.path)
        for phase in (caffe_pb2.TRAIN, caffe_pb2.TEST):
            context = LayerContext(
                MetaBackend(), phase=phase, resolve=PathResolver(self.path), sample_shapes=LENET_SHAPES
            )
            plan_memory(param, context, fuse=phase == caffe_pb2.TRAIN)


class GeneratedText(TextTarget):
    """Valid fields with long words, texts and comments, and tokens in any order, with an error behind them."""

    name = "generated prototxt"
    file = "made.prototxt"
    share = 4

    def prepare(self) -> None:
        self.texts = seeds.nets()[:3]

    def make(self, random: Random) -> bytes:
        parts = [random.choice(self.texts)] if random.random() < 0.3 else []
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
_PIECES = (
    "a",
    "_9",
    " ",
    "\n",
    "#",
    "# a\n",
    '"',
    "'",
    "\\",
    '\\"',
    '"a" ',
    '"\\x41"',
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    ":",
    ",",
    ";",
    ".",
    "-",
    "+",
    "1",
    "9",
    "1 ",
    "1,",
    "0x",
    "1.",
    "1e9 ",
    "ä",
    "layer {",
    "layer { ",
    "layers { layer {",
    "}\n{",
    "name: ",
    'name: "',
    "name: '",
    'top: "a" ',
    "include { } ",
    "param { } ",
    "zzz_param { ",
    'type: "ReLU" ',
    "type: RELU ",
    "input_dim: [",
    "input_dim: 1 ",
    "stepvalue: 1\n",
    "loss_weight: ",
    "state { phase: ",
    'layer { name: "a" type: "ReLU" bottom: "a" top: "a" }\n',
    "shape { dim: 1 } ",
    "[a.b] { ",
    "any: ",
    "x { x ",
    'layers { name: "a" type: RELU bottom: "a" top: "a" blobs_lr: 1 }\n',
    'Message type "caffepy.',
    "has no value named ",
    "Couldn't parse integer: ",
    "Expected string but found: '",
)
"""Tokens, beginnings of fields, and parts of protobuf's messages, in which its errors are searched for."""


class V1Text(NetText):
    name = "V1 prototxt"
    share = 3

    def prepare(self) -> None:
        self.texts = [seeds.V1]


class V0Text(NetText):
    name = "V0 prototxt"
    share = 3

    def prepare(self) -> None:
        self.texts = [seeds.V0]


class NetRun(TextTarget):
    """A net that is built on the CPU and runs one iteration."""

    name = "net, run on the CPU"
    seconds = 60.0  # kernels may be compiled
    file = "run.prototxt"
    share = 1
    kind = caffe_pb2.NetParameter

    def prepare(self) -> None:
        self.texts = seeds.nets()[: len(seeds.BODIES)]
        self.backend = CpuBackend(1)

    def make(self, random: Random) -> bytes:
        message = copied(random.choice(self.texts), caffe_pb2.NetParameter)
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
    kind = None
    share = 2

    def prepare(self) -> None:
        from caffepy.formats.logged_solver import describe_solver

        prefix = "I1121 11:29:00.123456 12345 run_log.py:40] "
        path = self.folder / "solver.prototxt"
        self.texts = []
        for text in seeds.SOLVERS[:2]:
            path.write_text(text)
            lines = [prefix + line for line in describe_solver(read_solver(path), PathResolver(path))]
            self.texts.append("\n".join([f"{prefix}caffepy train", *lines, f"{prefix}Solving"]) + "\n")

    def read(self) -> None:
        from caffepy.formats.logged_solver import read_logged_solver

        param, folder = read_logged_solver(self.path)
        check_solver(param, str(self.path))
        PathResolver(folder / "solver.prototxt").output(param.snapshot_prefix)


class DetectionFiles(TextTarget):
    """The names of classes, and names and sizes of images."""

    name = "detection lists"
    file = "detection.txt"

    def prepare(self) -> None:
        self.texts = [
            'item { name: "cat" label: 1 display_name: "a cat" }\nitem { name: "dog" label: 2 }\n',
            "a 300 400\nb 10 20\n",
        ]
        param = caffe_pb2.LayerParameter(name="out", type="DetectionOutput")
        self.layer = layer_class(param.type)(param, LayerContext(MetaBackend()))

    def read(self) -> None:
        from caffepy.layers.detection.boxes import read_image_sizes
        from caffepy.layers.detection.output import read_label_map

        for reader in (read_label_map, read_image_sizes):
            with contextlib.suppress(UserError):
                reader(self.layer, str(self.path))


class SchemaOfFork(TextTarget):
    """A fork's caffe.proto, united with caffepy's schema; the union is not used."""

    name = "schema of a fork"
    file = "caffe.proto"
    share = 2

    def prepare(self) -> None:
        self.texts = seeds.schemas()

    def read(self) -> None:
        unite(self.path.read_bytes(), str(self.path), caffe_pb2)


TARGETS = (SolverText, NetText, GeneratedText, V1Text, V0Text, NetRun, RunLog, DetectionFiles, SchemaOfFork)

"""What reads each format: how a damaged input is made, and what caffepy does with it."""

from __future__ import annotations

import contextlib
import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuzz import seeds
from fuzz.mutate import TEXTS, WORDS, Random, damage_bytes, damage_message, damage_text
from google.protobuf import text_format
from google.protobuf.message import Message

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.meta.backend import MetaBackend
from caffepy.cli.main import build_parser
from caffepy.cli.options import normalise
from caffepy.config.load import read_net, read_solver
from caffepy.config.paths import PathResolver
from caffepy.config.solver_check import check_solver, refuse_unsupported
from caffepy.data.schedule import Shard
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.memory.plan import plan_memory
from caffepy.proto import caffe_pb2
from caffepy.solvers.nets import NetFactory

LENET_SHAPES: dict[str, Sequence[tuple[int, ...]]] = {"mnist": [(1, 28, 28), ()]}

LARGEST_BLOB = 1 << 20
"""Elements of a blob of nets that are run."""


class Target(ABC):
    """A format.

    Args:
        folder: for files, this worker's own.
    """

    name = ""
    file = "input"
    share = 1
    """How many of the inputs, compared with the other targets."""
    owner = ""
    allowed: tuple[type[Exception], ...] = ()
    """Exceptions of its own that callers know about, beside CaffepyError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / self.file
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Make the seeds."""

    @abstractmethod
    def make(self, random: Random) -> bytes:
        """A damaged input."""

    @abstractmethod
    def use(self, data: bytes) -> None:
        """Do with the input what caffepy does."""


class FileTarget(Target):
    """A format of files: `read` is called with the damaged file's path."""

    def use(self, data: bytes) -> None:
        self.path.write_bytes(data)
        self.read()

    def read(self) -> None:
        """Read `self.path`."""
        raise NotImplementedError


class TextTarget(FileTarget):
    """A text; half of the damaged ones are damaged as messages and printed."""

    texts: Sequence[str]
    kind: type[Message] | None = None

    def make(self, random: Random) -> bytes:
        text = random.choice(self.texts)
        if self.kind is None or random.random() < 0.5:
            return damage_text(text, self.texts, random)
        message = text_format.Parse(text, self.kind())
        damage_message(message, random)
        return text_format.MessageToString(message).encode()


class BinaryTarget(FileTarget):
    """Bytes; those of a message are damaged as such in half of the cases."""

    blobs: Sequence[bytes]
    kind: type[Message] | None = None

    def make(self, random: Random) -> bytes:
        data = random.choice(self.blobs)
        if self.kind is None or random.random() < 0.5:
            return damage_bytes(data, self.blobs, random)
        message = self.kind()
        message.ParseFromString(data)
        damage_message(message, random)
        return message.SerializePartialToString()


# -- configuration ---------------------------------------------------------------------------------------


class SolverText(TextTarget):
    name = "solver prototxt"
    file = "solver.prototxt"
    share = 8
    kind = caffe_pb2.SolverParameter

    def prepare(self) -> None:
        self.texts = seeds.solvers()

    def read(self) -> None:
        from caffepy.solvers import solver_class
        from caffepy.solvers.rules import policies

        param = read_solver(self.path)
        check_solver(param, str(self.path))
        refuse_unsupported(param)
        solver_class(param.type)
        for iteration in (0, 1, 5, 1000, param.max_iter):
            rate, _ = policies.learning_rate(param, iteration, 0)
            policies.momentum(param, iteration, rate)
            policies.weight_decay(param, iteration)
        resolve = PathResolver(self.path)
        resolve.output(param.snapshot_prefix)
        net, context, state = NetFactory(param, MetaBackend(), Shard(), resolve).train_setup()
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
    file = "run.prototxt"
    share = 1
    kind = caffe_pb2.NetParameter

    def prepare(self) -> None:
        self.texts = seeds.nets()[: len(seeds.BODIES)]
        self.backend = CpuBackend(1)

    def make(self, random: Random) -> bytes:
        message = text_format.Parse(random.choice(self.texts), caffe_pb2.NetParameter())
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


# -- snapshots -------------------------------------------------------------------------------------------


class Weights(BinaryTarget):
    name = ".caffemodel"
    file = "x.caffemodel"
    share = 4
    kind = caffe_pb2.NetParameter

    def prepare(self) -> None:
        self.blobs = [*seeds.golden("init.caffemodel", "binary_iter_4.caffemodel"), *seeds.old_weights()]
        self.net = seeds.small_net()

    def read(self) -> None:
        from caffepy.snapshot.files import read_weights

        self.net.copy_trained_layers_from(read_weights(self.path), str(self.path))


class WeightsHdf5(Weights):
    name = ".caffemodel.h5"
    file = "x.caffemodel.h5"
    share = 2
    kind = None
    owner = "snapshot"

    def prepare(self) -> None:
        self.blobs = seeds.golden("hdf5_iter_4.caffemodel.h5")
        self.net = seeds.small_net()


class State(BinaryTarget):
    name = ".solverstate"
    file = "x.solverstate"
    share = 4
    kind = caffe_pb2.SolverState
    owner = "snapshot"

    def prepare(self) -> None:
        self.blobs = seeds.golden("binary_iter_4.solverstate")

    def read(self) -> None:
        from caffepy.snapshot.files import find_learned_net, read_state

        find_learned_net(read_state(self.path), self.path)


class StateHdf5(State):
    name = ".solverstate.h5"
    file = "x.solverstate.h5"
    share = 2
    kind = None

    def prepare(self) -> None:
        self.blobs = seeds.golden("hdf5_iter_4.solverstate.h5")


# -- data ------------------------------------------------------------------------------------------------


class Lmdb(BinaryTarget):
    name = "data.mdb"
    file = "db/data.mdb"
    owner = "data"
    share = 2

    def prepare(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.blobs = seeds.lmdbs(self.folder)

    def read(self) -> None:
        from caffepy.data.images.datum import parse_datum
        from caffepy.data.sources.lmdb import LmdbSource

        (self.path.parent / "lock.mdb").unlink(missing_ok=True)
        source = LmdbSource(self.path.parent)
        try:
            for number in range(min(len(source), 400)):
                with contextlib.suppress(_data_error()):
                    parse_datum(source.read(number))
        finally:
            source.close()


def _data_error() -> type[Exception]:
    from caffepy.errors import DataError

    return DataError


class Hdf5Data(BinaryTarget):
    name = "HDF5 data"
    file = "data.h5"
    owner = "data"
    share = 2

    def prepare(self) -> None:
        self.blobs = seeds.golden("data.h5")
        self.list = self.folder / "list.txt"
        self.list.write_text(str(self.path))

    def read(self) -> None:
        from caffepy.data.sources.hdf5 import Hdf5Source

        source = Hdf5Source(self.list, ["data", "label"])
        try:
            source.arrays(0)
        finally:
            source.close()


class ImageList(TextTarget):
    name = "image list"
    file = "images.txt"
    owner = "data"

    def prepare(self) -> None:
        (self.folder / "a.png").write_bytes(seeds.images()[0])
        self.texts = ["a.png 1\nb.jpg 2\nsome dir/c.png 3\n", "a.png 1\n"]

    def read(self) -> None:
        from caffepy.data.sources.image_list import ImageListSource

        source = ImageListSource(self.path, f"{self.folder}/")
        for number in range(min(len(source), 20)):
            with contextlib.suppress(_data_error()):
                source.read(number)


class Image(BinaryTarget):
    name = "PNG and JPEG"
    owner = "data"
    share = 2

    def prepare(self) -> None:
        self.blobs = seeds.images()

    def use(self, data: bytes) -> None:
        from caffepy.data.images.datum import decode_image

        decode_image(data)


class Datum(BinaryTarget):
    name = "Datum"
    owner = "data"
    kind = caffe_pb2.Datum

    def prepare(self) -> None:
        self.blobs = [record.SerializeToString() for record in seeds.datum()]

    def use(self, data: bytes) -> None:
        from caffepy.data.images.datum import datum_shape, decode_image, parse_datum

        record, values = parse_datum(data)
        if record.encoded:
            decode_image(values)
        else:
            datum_shape(record, len(values) or len(record.float_data), "bytes")


class Mean(BinaryTarget):
    name = "mean binaryproto"
    file = "mean.binaryproto"
    owner = "data"
    kind = caffe_pb2.BlobProto

    def prepare(self) -> None:
        blob = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=2, data=[1, 2, 3, 4])
        raw = caffe_pb2.BlobProto(raw_data_type=caffe_pb2.FLOAT, raw_data=bytes(16))
        raw.shape.dim.extend([1, 2, 2])
        self.blobs = [blob.SerializeToString(), raw.SerializeToString()]

    def read(self) -> None:
        from caffepy.data.images.mean import read_mean

        read_mean(self.path)


class Idx(BinaryTarget):
    name = "idx"
    file = "train-images-idx3-ubyte"
    owner = "data"

    def prepare(self) -> None:
        self.blobs = seeds.idx()

    def use(self, data: bytes) -> None:
        from caffepy.data.sources.mnist import parse_images, parse_labels

        for parse in (parse_images, parse_labels):
            with contextlib.suppress(_data_error()):
                parse(data, "file")


# -- jobs ------------------------------------------------------------------------------------------------


class Hostfile(TextTarget):
    name = "hostfile"
    file = "hosts"

    def prepare(self) -> None:
        self.texts = ["a slots=4\nb slots=4 max_slots=8\n", "a:4\nb:4\n# comment\na\n", "node-1.site\nuser@b\n"]

    def read(self) -> None:
        from caffepy.parallel.launch.hostfile import read_hostfile

        for host in read_hostfile(self.path):
            assert not host.name.startswith("-"), host


class Profile(TextTarget):
    name = "plan profile"
    file = "profile.json"

    def prepare(self) -> None:
        self.texts = [seeds.profile()]

    def read(self) -> None:
        from caffepy.plan.links import parse_link
        from caffepy.plan.model import Cluster
        from caffepy.plan.predict import Exchange, predict
        from caffepy.plan.profile import read_profile

        profile = read_profile(self.path).fitted()
        predict(profile, Cluster(2, 2, parse_link("shm"), parse_link("pcie")), Exchange())


class Measurements(TextTarget):
    name = "measurements"
    file = "allreduce.txt"

    def prepare(self) -> None:
        self.texts = [
            "# all-reduce among 4 devices\nsize  time (us)  GB/s\n4 KiB  10  1\n1 MiB  200.5  5\n8 MiB  1500  5\n"
        ]

    def read(self) -> None:
        from caffepy.plan.calibrate import fit_link, read_measurements

        fit_link(read_measurements(self.path), "auto")


class Slurm(Target):
    name = "Slurm variables"

    def prepare(self) -> None:
        srun = self.folder / "srun"
        srun.write_text("#!/bin/sh\n")
        srun.chmod(0o755)
        self.seed = {
            "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)",
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4", "SLURM_CPUS_PER_TASK": "2",
        }  # fmt: skip

    def make(self, random: Random) -> bytes:
        values = dict(self.seed)
        for name in random.sample(sorted(values), random.choice((1, 1, 2, 3))):
            text = damage_text(values[name], tuple(self.seed.values()), random).decode(errors="surrogateescape")
            values[name] = text.replace("\0", "")
        return json.dumps(values).encode()

    def use(self, data: bytes) -> None:
        from caffepy.parallel.launch.mpirun import Job
        from caffepy.parallel.launch.slurm import find_allocation, srun_line

        allocation = find_allocation({**json.loads(data), "PATH": str(self.folder)})
        if allocation is not None:
            job = Job(program=["true"], per_node=allocation.tasks_per_node(), nodes=allocation.nodes, hosts=[])
            allocation.check(job)
            srun_line("srun", job, None, allocation)


class Frames(BinaryTarget):
    """Frames of the store, as sockets give them."""

    name = "store frames"
    allowed = (OSError,)
    share = 2

    def prepare(self) -> None:
        from caffepy.parallel.store.wire import Frame, Kind, send_frame

        frames = [Frame(Kind.PUT, b"value", "key", 1.0, 2), Frame(Kind.TAKE, key="key", seconds=5), Frame(Kind.LEAVE)]
        self.blobs = []
        for frame in frames:
            near, far = socket.socketpair()
            with near, far:
                send_frame(near, frame)
                self.blobs.append(far.recv(4096))

    def use(self, data: bytes) -> None:
        from caffepy.parallel.store.wire import VALUE_LIMIT, receive_frame

        near, far = socket.socketpair()
        with near, far:
            near.sendall(data[:100_000])
            near.close()
            receive_frame(far, VALUE_LIMIT)


class Records(TextTarget):
    """Records of the control channel."""

    name = "control records"
    allowed = (OSError,)
    share = 2

    def prepare(self) -> None:
        from caffepy.parallel.store.records import DeviceStatus, Failure
        from caffepy.parallel.store.wire import encode

        status = DeviceStatus(1, "host", 7, "0", 5, 3, "a wait", 1.5)
        self.texts = [encode([status, status]).decode(), encode(Failure("it broke", 1)).decode()]

    def use(self, data: bytes) -> None:
        from caffepy.parallel.store.records import DeviceStatus, Failure
        from caffepy.parallel.store.wire import WireError, decode, decode_list

        with contextlib.suppress(WireError):
            for status in decode_list(DeviceStatus, data):
                assert str(status)
                assert status.doing
        decode(Failure, data).as_told()


class Handshake(BinaryTarget):
    """What a stranger sends to the store's port."""

    name = "handshake"
    allowed = (OSError,)

    def prepare(self) -> None:
        self.blobs = [b"\0\x20" + bytes(32) + b'{"host": "h", "machine": "m", "process": 1}', b"GET / HTTP/1.1\r\n\r\n"]

    def use(self, data: bytes) -> None:
        from caffepy.parallel.store.handshake import challenge

        near, far = socket.socketpair()
        with near, far:
            near.sendall(data[:4096])
            near.shutdown(socket.SHUT_WR)
            challenge(far, "secret")


COMMANDS: tuple[Sequence[str], ...] = (
    ("train", "--solver", "s.prototxt", "--gpus", "0,1", "--timeout", "5", "--batch", "per-rank", "--threads", "2"),
    ("train", "--solver=s", "--cpu", "--cpu-solvers", "2", "--trace", "t", "--trace-iterations", "5:9", "--level", "1"),
    ("net", "--model", "n", "--shape", "3,224,224", "--memory", "--limit", "24", "--batch", "8", "--stage", "a,b"),
    ("plan", "--solver", "s", "--nodes", "1,8", "--network", "8x400Gb", "--latency", "10us", "--links", "nvlink"),
    ("plan", "--profile", "p", "--contention", "0.5", "--bucket-mb", "4", "--backward-ms", "3"),
    (
        "launch",
        "--nproc-per-node",
        "2",
        "--hosts",
        "a,b:4",
        "--mpirun-options",
        "--x 'y z'",
        "--dry-run",
        "--",
        "train",
    ),
    ("test", "--model", "n", "--weights", "w", "--iterations", "5", "--gpu", "0"),
    ("time", "--model", "n", "--iterations", "5", "--cpu"),
    ("bench", "allreduce", "--sizes", "4,8"),
    ("data", "mnist", "--to", "folder"),
)


class CommandLine(Target):
    name = "command line"
    share = 4

    def prepare(self) -> None:
        self.hostile = (*TEXTS, *WORDS, "9" * 5000, "0," * 3000 + "0", ",", ":", "=", "--", "1" * 400, "\udcff")

    def make(self, random: Random) -> bytes:
        words = list(random.choice(COMMANDS))
        for _ in range(random.choice((1, 1, 2))):
            at = random.randrange(1, len(words))
            words[at] = random.choice((random.choice(self.hostile), _changed(words[at], random)))
        return json.dumps(words).encode()

    def use(self, data: bytes) -> None:
        arguments = normalise(json.loads(data))
        with contextlib.suppress(SystemExit):
            args = build_parser(arguments).parse_strictly(arguments)
            if args.command == "launch":
                from caffepy.cli.launch import make_job

                make_job(args, None)


def _changed(word: str, random: Random) -> str:
    return damage_text(word, [part for words in COMMANDS for part in words], random).decode(errors="surrogateescape")


TARGETS: tuple[Callable[[Path], Any], ...] = (
    SolverText, NetText, V1Text, V0Text, NetRun, Weights, WeightsHdf5, State, StateHdf5, Lmdb, Hdf5Data, ImageList,
    Image, Datum, Mean, Idx, Hostfile, Profile, Measurements, Slurm, Frames, Records, Handshake, CommandLine,
)  # fmt: skip

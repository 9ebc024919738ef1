"""Jobs: hosts, plans, what comes over sockets, command lines."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
from collections.abc import Callable, Sequence
from typing import cast

from fuzz import seeds
from fuzz.mutate import TEXTS, WORDS, Random, damage_text
from fuzz.target import BinaryTarget, Target, TextTarget

from caffepy.cli.launch import LaunchCommand, make_job
from caffepy.cli.main import parse
from caffepy.cli.options import normalise


class Hostfile(TextTarget):
    name = "hostfile"
    file = "hosts"

    def prepare(self) -> None:
        self.texts = ["a slots=4\nb slots=4 max_slots=8\n", "a:4\nb:4\n# comment\na\n", "node-1.site\nuser@b\n"]

    def read(self) -> None:
        from caffepy.distributed.launch.launchers import read_hostfile

        for host in read_hostfile(self.path):
            assert not host.name.startswith("-"), host


class Profile(TextTarget):
    name = "plan profile"
    file = "profile.json"

    def prepare(self) -> None:
        self.texts = [seeds.profile()]

    def read(self) -> None:
        from caffepy.scaling.model import Cluster, parse_link
        from caffepy.scaling.predict import Exchange, predict
        from caffepy.scaling.profile import read_profile

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
        from caffepy.scaling.model import fit_link, read_measurements

        fit_link(read_measurements(self.path), "auto")


class Slurm(Target):
    name = "Slurm variables"

    def prepare(self) -> None:
        srun = self.folder / "srun"
        srun.write_text("#!/bin/sh\n")
        srun.chmod(0o755)
        self.seed = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_NTASKS": "6",
            "SLURM_TASKS_PER_NODE": "2(x3)",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
            "SLURM_CPUS_PER_TASK": "2",
        }

    def make(self, random: Random) -> bytes:
        values = dict(self.seed)
        for name in random.sample(sorted(values), random.choice((1, 1, 2, 3))):
            text = damage_text(values[name], tuple(self.seed.values()), random).decode(errors="surrogateescape")
            values[name] = text.replace("\0", "")
        return json.dumps(values).encode()

    def use(self, data: bytes) -> None:
        from caffepy.distributed.launch.launchers import Job, find_allocation, srun_line

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
        from caffepy.distributed.store.wire import Frame, Kind, send_frame

        frames = [Frame(Kind.PUT, b"value", "key", 1.0, 2), Frame(Kind.TAKE, key="key", seconds=5), Frame(Kind.LEAVE)]
        self.blobs = []
        for frame in frames:
            near, far = socket.socketpair()
            with near, far:
                send_frame(near, frame)
                self.blobs.append(far.recv(4096))

    def use(self, data: bytes) -> None:
        from caffepy.distributed.store.wire import VALUE_LIMIT, receive_frame

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
        from caffepy.distributed.store.wire import DeviceStatus, Failure, encode

        status = DeviceStatus(1, "host", 7, "0", 5, 3, "a wait", 1.5)
        self.texts = [encode([status, status]).decode(), encode(Failure("it broke", 1)).decode()]

    def use(self, data: bytes) -> None:
        from caffepy.distributed.store.wire import DeviceStatus, Failure, WireError, decode, decode_list

        with contextlib.suppress(WireError):
            for status in decode_list(DeviceStatus, data):
                assert str(status)
                assert status.doing
        decode(Failure, data).as_sent()


class Handshake(BinaryTarget):
    """What a stranger sends to the store's port."""

    name = "handshake"
    allowed = (OSError,)

    def prepare(self) -> None:
        self.blobs = [b"\0\x20" + bytes(32) + b'{"host": "h", "machine": "m", "process": 1}', b"GET / HTTP/1.1\r\n\r\n"]

    def use(self, data: bytes) -> None:
        from caffepy.distributed.store.wire import challenge

        near, far = socket.socketpair()
        with near, far:
            near.sendall(data[:4096])
            near.shutdown(socket.SHUT_WR)
            challenge(far, "secret")


class Line:
    """A socket whose other end has the job's secret, or is rank 0, and sends what it likes.

    Args:
        reply: makes what the other end sends, of all that it has received.
    """

    def __init__(self, reply: Callable[[bytes], bytes]) -> None:
        self._reply = reply
        self._received = b""
        self._waiting: bytes | None = None

    def sendall(self, data: bytes, _: int = 0) -> None:
        self._received += bytes(data)

    def recv_into(self, buffer: memoryview) -> int:
        if self._waiting is None:
            self._waiting = self._reply(self._received)
        part, self._waiting = self._waiting[: len(buffer)], self._waiting[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


class Member(TextTarget):
    """Who a client is that knows the secret: the proof is valid."""

    name = "handshake, proven"
    allowed = (OSError,)

    def prepare(self) -> None:
        self.texts = [
            '{"host": "h", "machine": "m", "process": 1, "rank": 1, "size": 2, "role": "control", "nonce": "00ff"}'
        ]

    def use(self, data: bytes) -> None:
        from caffepy.distributed.store.wire import Kind, challenge

        def reply(received: bytes) -> bytes:
            proof = hmac.digest(b"caffepy secret", b"client" + received[8:40] + data, "sha256")
            return len(data).to_bytes(2, "big") + proof + data if len(data) < 1 << 16 else data

        hello, answer = challenge(cast(socket.socket, Line(reply)), "secret")
        assert hello.name(hello.rank)
        answer(Kind.DONE, "rank 0")


class Server(BinaryTarget):
    """What a stranger's server sends to a rank that believes it to be rank 0."""

    name = "handshake, client"
    allowed = (OSError,)

    def prepare(self) -> None:
        self.blobs = [b"caffepy1" + bytes(32) + b"\7\0\0" + (40).to_bytes(8, "big") + bytes(12) + bytes(40)]

    def use(self, data: bytes) -> None:
        from caffepy.distributed.store.wire import Handshake, introduce

        introduce(cast(socket.socket, Line(lambda _: data)), "secret", Handshake("h", "m", 1, 1, 2))


class Environment(Target):
    """Variables that launchers, training operators and caffepy launch set."""

    name = "environment"

    def prepare(self) -> None:
        self.seed = {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
            "PMIX_RANK": "1",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_MPI_TYPE": "pmix",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }
        self.hostile = ("²", "٣", "9" * 5000, "-1", " 1", "1e3", "0x1", "", "[::1]", "a b", "65536", "²:1")

    def make(self, random: Random) -> bytes:
        names = random.sample(sorted(self.seed), random.randrange(1, len(self.seed)))
        values = {name: self.seed[name] for name in names}
        for name in random.sample(names, min(len(names), random.choice((1, 1, 2)))):
            text = damage_text(values[name], tuple(self.seed.values()), random).decode(errors="surrogateescape")
            values[name] = random.choice((random.choice(self.hostile), text.replace("\0", "")))
        return json.dumps(values).encode()

    def use(self, data: bytes) -> None:
        from caffepy.distributed.processes.launcher import find_launcher, refuse_foreign_launcher
        from caffepy.distributed.rendezvous import join

        values = json.loads(data)
        launcher = find_launcher(values)
        if launcher is not None:
            assert launcher.name
        with contextlib.suppress(_user_error()):
            refuse_foreign_launcher(0, 1, values)
        if values.get("WORLD_SIZE", "") in ("", "1") or not values["WORLD_SIZE"].isascii():
            join("env://", timeout=0.01, environment=values).channel.close()


def _user_error() -> type[Exception]:
    from caffepy.errors import UserError

    return UserError


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
    ("snapshot", "verify", "x_iter_1.solverstate", "y.caffemodel"),
    (
        "train",
        "--from-log",
        "log",
        "--snapshot",
        "auto",
        "--keep-last",
        "3",
        "--keep-best",
        "loss",
        "--compression=bf16",
    ),
    ("launch", "--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "29500", "--restarts", "2"),
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
            command = parse(arguments)
            if isinstance(command, LaunchCommand):
                make_job(command, None)


def _changed(word: str, random: Random) -> str:
    return damage_text(word, [part for words in COMMANDS for part in words], random).decode(errors="surrogateescape")


TARGETS = (
    Hostfile,
    Profile,
    Measurements,
    Slurm,
    Environment,
    Frames,
    Records,
    Handshake,
    Member,
    Server,
    CommandLine,
)

"""Jobs: hosts, plans, what comes over sockets, command lines."""

from __future__ import annotations

import contextlib
import hmac
import json
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from fuzz import seeds
from fuzz.mutate import TEXTS, WORDS, Random, damage_text
from fuzz.target import BinaryTarget, Target, TextTarget, reads

from caffepy.cli.launch import LaunchCommand, make_job
from caffepy.cli.main import parse
from caffepy.cli.options import normalise
from caffepy.distributed.launch.launchers import Job, find_allocation, read_hostfile, srun_line
from caffepy.distributed.processes.launcher import find_launcher, refuse_foreign_launcher
from caffepy.distributed.rendezvous import join
from caffepy.distributed.store import wire
from caffepy.errors import UserError
from caffepy.scaling.model import Cluster, fit_link, parse_link, read_measurements
from caffepy.scaling.predict import Exchange, predict
from caffepy.scaling.profile import read_profile

HOSTS = ["a slots=4\nb slots=4 max_slots=8\n", "a:4\nb:4\n# comment\na\n", "node-1.site\nuser@b\n"]
TIMES = "# all-reduce among 4 devices\nsize  time (us)  GB/s\n4 KiB  10  1\n1 MiB  200.5  5\n8 MiB  1500  5\n"


@reads(TextTarget, "hostfile", lambda: HOSTS, "hosts")
def hostfile(path: Path) -> None:
    for host in read_hostfile(path):
        assert not host.name.startswith("-"), host


@reads(TextTarget, "plan profile", lambda: [seeds.profile()], "profile.json")
def profile(path: Path) -> None:
    predict(read_profile(path).fitted(), Cluster(2, 2, parse_link("shm"), parse_link("pcie")), Exchange())


@reads(TextTarget, "measurements", lambda: [TIMES], "allreduce.txt")
def measurements(path: Path) -> None:
    fit_link(read_measurements(path), "auto")


class Slurm(Target):
    name = "Slurm variables"

    def prepare(self) -> None:
        srun = self.folder / "srun"
        srun.write_text("#!/bin/sh\n")
        srun.chmod(0o755)
        self.seed = {"JOB_ID": "7", "JOB_NUM_NODES": "3", "NTASKS": "6", "TASKS_PER_NODE": "2(x3)"}
        self.seed |= {"NTASKS_PER_NODE": "2", "JOB_CPUS_PER_NODE": "8(x2),4", "CPUS_PER_TASK": "2"}

    def input(self, random: Random) -> bytes:
        return self.make(random)  # bytes of JSON are not damaged

    def make(self, random: Random) -> bytes:
        values = dict(self.seed)
        for name in random.sample(sorted(values), random.choice((1, 1, 2, 3))):
            text = damage_text(values[name], tuple(self.seed.values()), random).decode(errors="surrogateescape")
            values[name] = text.replace("\0", "")
        return json.dumps({f"SLURM_{name}": value for name, value in values.items()}).encode()

    def use(self, data: bytes) -> None:
        allocation = find_allocation({**json.loads(data), "PATH": str(self.folder)})
        if allocation is not None:
            job = Job(program=["true"], per_node=allocation.tasks_per_node(), nodes=allocation.nodes, hosts=[])
            allocation.check(job)
            srun_line("srun", job, None, allocation)


def frames() -> list[bytes]:
    """Frames of the store."""
    found = []
    for frame in (
        wire.Frame(wire.Kind.PUT, b"value", "key", 1.0, 2),
        wire.Frame(wire.Kind.TAKE, key="key", seconds=5),
        wire.Frame(wire.Kind.LEAVE),
    ):
        near, far = socket.socketpair()
        with near, far:
            wire.send_frame(near, frame)
            found.append(far.recv(4096))
    return found


@reads(BinaryTarget, "store frames", frames, allowed=(OSError,), share=2)
def store_frames(data: bytes) -> None:
    """Frames of the store, as sockets give them."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data[:100_000])
        near.close()
        wire.receive_frame(far, wire.VALUE_LIMIT)


def records() -> list[str]:
    """Records of the control channel."""
    status = wire.DeviceStatus(1, "host", 7, "0", 5, 3, "a wait", 1.5)
    return [wire.encode([status, status]).decode(), wire.encode(wire.Failure("it broke", 1)).decode()]


@reads(TextTarget, "control records", records, allowed=(OSError,), share=2)
def control_records(data: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        for status in wire.decode_list(wire.DeviceStatus, data):
            assert str(status)
            assert status.doing
    wire.decode(wire.Failure, data).as_sent()


STRANGERS = [b"\0\x20" + bytes(32) + b'{"host": "h", "machine": "m", "process": 1}', b"GET / HTTP/1.1\r\n\r\n"]


@reads(BinaryTarget, "handshake", lambda: STRANGERS, allowed=(OSError,))
def handshake(data: bytes) -> None:
    """What a stranger sends to the store's port."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data[:4096])
        near.shutdown(socket.SHUT_WR)
        wire.challenge(far, "secret")


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


MEMBER = '{"host": "h", "machine": "m", "process": 1, "rank": 1, "size": 2, "role": "control", "nonce": "00ff"}'
SERVER = b"caffepy1" + bytes(32) + b"\7\0\0" + (40).to_bytes(8, "big") + bytes(12) + bytes(40)


@reads(TextTarget, "handshake, proven", lambda: [MEMBER], allowed=(OSError,))
def member(data: bytes) -> None:
    """Who a client is that knows the secret: the proof is valid."""

    def reply(received: bytes) -> bytes:
        proof = hmac.digest(b"caffepy secret", b"client" + received[8:40] + data, "sha256")
        return len(data).to_bytes(2, "big") + proof + data if len(data) < 1 << 16 else data

    hello, answer = wire.challenge(cast(socket.socket, Line(reply)), "secret")
    assert hello.name(hello.rank)
    answer(wire.Kind.DONE, "rank 0")


@reads(BinaryTarget, "handshake, client", lambda: [SERVER], allowed=(OSError,))
def server(data: bytes) -> None:
    """What a stranger's server sends to a rank that believes it to be rank 0."""
    wire.introduce(cast(socket.socket, Line(lambda _: data)), "secret", wire.Handshake("h", "m", 1, 1, 2))


VARIABLES = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=2 PMIX_RANK=1 SLURM_PROCID=1 "
VARIABLES += "SLURM_STEP_NUM_TASKS=2 SLURM_MPI_TYPE=pmix RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500"


class Environment(Target):
    """Variables that launchers, training operators and caffepy launch set."""

    name = "environment"

    def prepare(self) -> None:
        self.seed = dict(pair.split("=") for pair in VARIABLES.split())
        self.hostile = ("²", "٣", "9" * 5000, "-1", " 1", "1e3", "0x1", "", "[::1]", "a b", "65536", "²:1")

    def make(self, random: Random) -> bytes:
        names = random.sample(sorted(self.seed), random.randrange(1, len(self.seed)))
        values = {name: self.seed[name] for name in names}
        for name in random.sample(names, min(len(names), random.choice((1, 1, 2)))):
            text = damage_text(values[name], tuple(self.seed.values()), random).decode(errors="surrogateescape")
            values[name] = random.choice((random.choice(self.hostile), text.replace("\0", "")))
        return json.dumps(values).encode()

    def use(self, data: bytes) -> None:
        values = json.loads(data)
        launcher = find_launcher(values)
        if launcher is not None:
            assert launcher.name
        with contextlib.suppress(UserError):
            refuse_foreign_launcher(0, 1, values)
        if values.get("WORLD_SIZE", "") in ("", "1") or not values["WORLD_SIZE"].isascii():
            join("env://", timeout=0.01, environment=values).channel.close()


COMMANDS = tuple(
    shlex.split(line)
    for line in """\
train --solver s.prototxt --gpus 0,1 --timeout 5 --batch per-rank --threads 2
train --solver=s --cpu --cpu-solvers 2 --trace t --trace-iterations 5:9 --level 1
net --model n --shape 3,224,224 --memory --limit 24 --batch 8 --stage a,b
plan --solver s --nodes 1,8 --network 8x400Gb --latency 10us --links nvlink
plan --profile p --contention 0.5 --bucket-mb 4 --backward-ms 3
launch --nproc-per-node 2 --hosts a,b:4 --mpirun-options "--x 'y z'" --dry-run -- train
test --model n --weights w --iterations 5 --gpu 0
time --model n --iterations 5 --cpu
bench allreduce --sizes 4,8
data mnist --to folder
snapshot verify x_iter_1.solverstate y.caffemodel
train --from-log log --snapshot auto --keep-last 3 --keep-best loss --compression=bf16
launch --nnodes 2 --node-rank 0 --master-addr a --master-port 29500 --restarts 2""".splitlines()
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
    *(hostfile, profile, measurements, Slurm, Environment),
    *(store_frames, control_records, handshake, member, server, CommandLine),
)

"""Snapshots of caffepy's, whose checksums are kept valid in half of the cases, and of both Caffes'."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np
from fuzz import seeds
from fuzz.mutate import Random, damage_message, damage_text
from fuzz.mutate_hdf5 import damage_hdf5, damage_structure
from fuzz.target import BinaryTarget, Target

from caffepy.formats.binary import iter_blobs, with_checksum
from caffepy.formats.proto import caffe_pb2


def resealed(message: caffe_pb2.NetParameter | caffe_pb2.SolverState) -> bytes:
    """A message with the number of blobs and the checksum of what it is now."""
    message.ClearField("crc32c")
    message.ClearField("blob_count")
    return b"".join(with_checksum(type(message), len(list(iter_blobs(message))), [message.SerializePartialToString()]))


def reseal_hdf5(file: h5py.File, buffer: io.BytesIO) -> None:
    """Bring the attributes up to date; the group that holds the blobs is `data` or `history`.

    Args:
        file: a file that is open for writing.
        buffer: its bytes.

    Raises:
        TypeError, ValueError: it cannot be read as a snapshot.
    """
    from caffepy.formats.hdf5 import read_hdf5
    from caffepy.formats.hdf5_snapshot import content_checksum

    file.flush()
    checksum, paths = content_checksum(read_hdf5(buffer))
    file.attrs["caffepy_crc32c"] = np.uint32(checksum)
    file.attrs["caffepy_blobs"] = np.uint32(sum(path[0] in ("data", "history") for path in paths))


class SnapshotTarget(BinaryTarget):
    """A binary snapshot; a third of the damaged ones have a valid checksum."""

    kind: type[caffe_pb2.NetParameter | caffe_pb2.SolverState]

    def make(self, random: Random) -> bytes:
        if random.random() < 0.67:
            return super().make(random)
        message = self.kind()
        message.ParseFromString(random.choice(self.seeds))
        damage_message(message, random)
        return resealed(message)


class Hdf5Target(BinaryTarget):
    """An HDF5 snapshot: bytes, structure, or other objects, of which most have a valid checksum."""

    def make(self, random: Random) -> bytes:
        chance = random.random()
        if chance < 0.25:
            return super().make(random)
        if chance < 0.5:
            return damage_structure(random.choice(self.seeds), random)
        seal = reseal_hdf5 if random.random() < 0.7 else None
        return damage_hdf5(random.choice(self.seeds), random, seal)


class Weights(SnapshotTarget):
    name = ".caffemodel"
    file = "x.caffemodel"
    share = 4
    kind = caffe_pb2.NetParameter

    def prepare(self) -> None:
        own = seeds.snapshots(self.folder)["caffemodel"]
        self.seeds = [*seeds.golden("init.caffemodel", "binary_iter_4.caffemodel"), *seeds.old_weights(), own]
        self.net = seeds.small_net()

    def read(self) -> None:
        from caffepy.errors import SnapshotError
        from caffepy.formats import binary
        from caffepy.formats.caffemodel import read_caffemodel, read_layer_shapes
        from caffepy.net.trained_layers import first_difference

        with patch.object(binary, "MIN_BYTES", 64):  # arrays of such small nets stay in the file's bytes as well
            with suppress(SnapshotError):
                first_difference(self.net.layers, read_layer_shapes(self.path).layer)
            self.net.copy_trained_layers_from(read_caffemodel(self.path), str(self.path))


class WeightsHdf5(Hdf5Target):
    name = ".caffemodel.h5"
    file = "x.caffemodel.h5"
    share = 3

    def prepare(self) -> None:
        self.seeds = [*seeds.golden("hdf5_iter_4.caffemodel.h5"), seeds.snapshots(self.folder)["caffemodel.h5"]]
        self.net = seeds.small_net()

    read = Weights.read


class WeightsSafetensors(BinaryTarget):
    """Half of the damaged files have a changed header and its right length."""

    name = ".safetensors"
    file = "x.safetensors"
    share = 3

    def prepare(self) -> None:
        from caffepy.formats.caffemodel import write_caffemodel

        self.net = seeds.small_net()
        write_caffemodel(self.path, "net", self.net.layers)
        self.seeds = [self.path.read_bytes()]

    def make(self, random: Random) -> bytes:
        if random.random() < 0.5:
            return super().make(random)
        data = self.seeds[0]
        end = 8 + int.from_bytes(data[:8], "little")
        text = data[8:end].decode()
        header = damage_text(text, [text], random)
        return len(header).to_bytes(8, "little") + header + data[end:]

    read = Weights.read


class State(SnapshotTarget):
    name = ".solverstate"
    file = "x.solverstate"
    share = 4
    kind = caffe_pb2.SolverState

    def prepare(self) -> None:
        self.seeds = [*seeds.golden("binary_iter_4.solverstate"), seeds.snapshots(self.folder)["solverstate"]]

    def read(self) -> None:
        from caffepy.formats.solverstate import find_learned_net, read_solverstate

        find_learned_net(read_solverstate(self.path).message, self.path)


class StateHdf5(Hdf5Target):
    name = ".solverstate.h5"
    file = "x.solverstate.h5"
    share = 3

    def prepare(self) -> None:
        self.seeds = [*seeds.golden("hdf5_iter_4.solverstate.h5"), seeds.snapshots(self.folder)["solverstate.h5"]]

    read = State.read


class Verify(Target):
    """Snapshots under the names of other kinds, as `caffepy snapshot verify` takes them."""

    name = "snapshot verify"

    def prepare(self) -> None:
        self._kinds: list[BinaryTarget] = [kind(self.folder) for kind in (Weights, WeightsHdf5, State, StateHdf5)]
        self._blobs = [blob for kind in self._kinds for blob in kind.seeds]

    def make(self, random: Random) -> bytes:
        name = random.choice(self._kinds).file
        data = random.choice(self._blobs) if random.random() < 0.2 else random.choice(self._kinds).make(random)
        return name.encode() + b"\n" + data

    def use(self, data: bytes) -> None:
        from caffepy.cli.files import SnapshotCommand

        name, _, content = data.partition(b"\n")
        self.path = self.folder / name.decode()
        self.path.write_bytes(content)
        SnapshotCommand(action="verify", files=[self.path]).run()


class Restore(SnapshotTarget):
    """What a solver takes over from a snapshot of its own net whose state is damaged and sealed again."""

    name = "restoring"
    file = "x_iter_2.solverstate"
    share = 2
    kind = caffe_pb2.SolverState

    def prepare(self) -> None:
        from caffepy.backend.cpu.backend import CpuBackend
        from caffepy.training.solver import create_solver

        self.seeds = [seeds.snapshots(self.folder)["solverstate"]]
        self.solver = create_solver(seeds.snapshot_solver(self.folder), CpuBackend(1))

    def make(self, random: Random) -> bytes:
        message = caffe_pb2.SolverState()
        message.ParseFromString(self.seeds[0])
        damage_message(message, random)
        if random.random() < 0.8:
            message.learned_net = "x_iter_2.caffemodel"
        return resealed(message)

    def read(self) -> None:
        from caffepy.formats.snapshot_files import newest_snapshot, restore_first, snapshots

        prefix = Path(self.solver.param.snapshot_prefix)
        with self.solver.backend.activate():
            newest = newest_snapshot(prefix)
            if newest is not None:
                restore_first([path for path in snapshots(prefix) if path == newest], self.solver.restore)
                self.solver.step(1)


TARGETS = (Weights, WeightsHdf5, WeightsSafetensors, State, StateHdf5, Verify, Restore)

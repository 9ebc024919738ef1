"""The process group's operations: they check what a script calls and hand it to the communicator."""

from __future__ import annotations

from typing import Any

from caffepy.backend.types import Array
from caffepy.distributed.arrays import Arguments, Buffer, Parts, check_operator, whole_number
from caffepy.distributed.base import BaseGroup, Handle
from caffepy.distributed.membership import Membership
from caffepy.errors import UserError
from caffepy.parallel.communicators.collectives import Collective, Op, Operator
from caffepy.parallel.communicators.communicator import Communicator

TAG_LIMIT = 32767
"""The largest tag that every MPI allows."""


class ProcessGroup(BaseGroup):
    """Processes that exchange arrays.

    All ranks call the same collectives in the same order. `all_gather` and its kin take a list with an array for each
    rank, or one array that holds them one after the other. With ``async_op=True`` an operation is only started, and the
    arrays must be left alone until the handle's `wait`; else it has ended when the call returns.

    Every operation raises a UserError for arguments that cannot be, and a PeerError where another rank failed, left or
    kept this one waiting for longer than the timeout.
    """

    def __init__(self, backend: str, membership: Membership, communicator: Communicator, timeout: float) -> None:
        super().__init__(backend, membership, communicator, timeout)
        self._arguments = Arguments(communicator.memory, communicator.empty, self.size)

    # -- from one rank to another -------------------------------------------------------------------

    def send(self, array: Array, destination: int, tag: int = 0) -> None:
        """Send an array to a rank that receives one of the same dtype and size with the same tag."""
        self.isend(array, destination, tag).wait()

    def recv(self, array: Array, source: int, tag: int = 0) -> None:
        """array = what rank `source` sends; messages of a tag arrive in the order in which they were sent."""
        self.irecv(array, source, tag).wait()

    def isend(self, array: Array, destination: int, tag: int = 0) -> Handle:
        """Start to send; the array must be left alone until the handle's `wait`."""
        with self.calling("send"):
            destination, tag = self._check_message(destination, tag)
            buffer = self._arguments.array(array, "array")
        return self.start(Collective(Op.SEND, sent=buffer.data, peer=destination, tag=tag), [], True)

    def irecv(self, array: Array, source: int, tag: int = 0) -> Handle:
        """Start to receive; the array holds the message after the handle's `wait`."""
        with self.calling("receive"):
            source, tag = self._check_message(source, tag)
            buffer = self._arguments.array(array, "array", written=True)
        return self.start(Collective(Op.RECEIVE, received=buffer.data, peer=source, tag=tag), [buffer], True)

    # -- collectives --------------------------------------------------------------------------------

    def broadcast(self, array: Array, root: int = 0, async_op: bool = False) -> Handle:
        """array = the root's array."""
        with self.calling("broadcast"):
            root = self._check_rank(root, "root")
            sends = root == self.rank
            buffer = self._arguments.array(array, "array", written=not sends)
        sent, received = (buffer.data, None) if sends else (None, buffer.data)
        collective = Collective(Op.BROADCAST, sent, received, peer=root)
        return self.start(collective, [] if sends else [buffer], async_op)

    def all_reduce(self, array: Array, operator: Operator = Operator.SUM, async_op: bool = False) -> Handle:
        """array = operator(all ranks' arrays), element by element, on every rank."""
        with self.calling("all_reduce"):
            buffer = self._arguments.array(array, "array", written=True)
            operator = check_operator(operator, array)
        return self.start(Collective(Op.ALL_REDUCE, buffer.data, buffer.data, operator), [buffer], async_op)

    def reduce(self, array: Array, root: int = 0, operator: Operator = Operator.SUM, async_op: bool = False) -> Handle:
        """On the root: array = operator(all ranks' arrays); the others' arrays stay as they are."""
        with self.calling("reduce"):
            root = self._check_rank(root, "root")
            receives = root == self.rank
            buffer = self._arguments.array(array, "array", written=receives)
            operator = check_operator(operator, array)
        collective = Collective(Op.REDUCE, buffer.data, buffer.data if receives else None, operator, root)
        return self.start(collective, [buffer] if receives else [], async_op)

    def all_gather(self, outputs: Parts, array: Array, async_op: bool = False) -> Handle:
        """outputs[i] = the array of rank i, on every rank."""
        with self.calling("all_gather"):
            own = self._arguments.array(array, "array")
            all_of_them = self._arguments.parts(outputs, "outputs", array, written=True)
        return self.start(Collective(Op.ALL_GATHER, own.data, all_of_them.data), [all_of_them], async_op)

    def gather(self, array: Array, outputs: Parts | None = None, root: int = 0, async_op: bool = False) -> Handle:
        """On the root: outputs[i] = the array of rank i; the others give no outputs."""
        with self.calling("gather"):
            root = self._check_rank(root, "root")
            own = self._arguments.array(array, "array")
            gathered = self._at_root(outputs, "outputs", array, root, written=True)
        collective = Collective(Op.GATHER, own.data, gathered[0].data if gathered else None, peer=root)
        return self.start(collective, gathered, async_op)

    def scatter(self, array: Array, inputs: Parts | None = None, root: int = 0, async_op: bool = False) -> Handle:
        """array = the root's inputs[rank]; the others give no inputs."""
        with self.calling("scatter"):
            root = self._check_rank(root, "root")
            own = self._arguments.array(array, "array", written=True)
            scattered = self._at_root(inputs, "inputs", array, root)
        collective = Collective(Op.SCATTER, scattered[0].data if scattered else None, own.data, peer=root)
        return self.start(collective, [own], async_op)

    def reduce_scatter(
        self, array: Array, inputs: Parts, operator: Operator = Operator.SUM, async_op: bool = False
    ) -> Handle:
        """array = operator(all ranks' inputs[rank])."""
        with self.calling("reduce_scatter"):
            own = self._arguments.array(array, "array", written=True)
            given = self._arguments.parts(inputs, "inputs", array)
            operator = check_operator(operator, array)
        return self.start(Collective(Op.REDUCE_SCATTER, given.data, own.data, operator), [own], async_op)

    def all_to_all(self, outputs: Parts, inputs: Parts, async_op: bool = False) -> Handle:
        """outputs[i] = inputs[rank] of rank i; all parts have one shape."""
        with self.calling("all_to_all"):
            like = self._arguments.first(inputs, "inputs")
            given = self._arguments.parts(inputs, "inputs", like)
            taken = self._arguments.parts(outputs, "outputs", like, written=True)
        return self.start(Collective(Op.ALL_TO_ALL, given.data, taken.data), [taken], async_op)

    def barrier(self, async_op: bool = False) -> Handle:
        """Wait until all ranks are here; on GPUs, until the operations before it on the current stream are done."""
        return self.start(Collective(Op.BARRIER), [], async_op)

    # -- arguments ----------------------------------------------------------------------------------

    def _at_root(self, parts: Parts | None, name: str, like: Array, root: int, written: bool = False) -> list[Buffer]:
        """Arrays that only the root passes."""
        if (root == self.rank) != (parts is not None):
            raise UserError(f"{name} are {'missing on' if parts is None else 'only for'} the root, rank {root}")
        return [] if parts is None else [self._arguments.parts(parts, name, like, written)]

    def _check_rank(self, rank: Any, name: str) -> int:
        number = whole_number(rank)
        if number is None or not 0 <= number < self.size:
            raise UserError(f"{name} {rank!r} is not a rank of this group: they are 0 to {self.size - 1}")
        return number

    def _check_message(self, peer: int, tag: int) -> tuple[int, int]:
        """Peer and tag as Python integers: transports may take no others."""
        other, number = self._check_rank(peer, "rank"), whole_number(tag)
        if other == self.rank:
            raise UserError("a rank cannot send to itself")
        if number is None or not 0 <= number <= TAG_LIMIT:
            raise UserError(f"tag {tag!r} is not an integer from 0 to {TAG_LIMIT}")
        if number and self.backend == "nccl":
            raise UserError("NCCL knows no tags: leave it out")
        return other, number

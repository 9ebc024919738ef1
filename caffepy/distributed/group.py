"""The process group: operations and their arguments, lifetime, errors, and handles of pending operations.

Arguments are checked, and copied between a script's arrays and the communicator's.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

from caffepy.backend.types import Array
from caffepy.distributed.communicators.communicator import (
    Collective,
    Communicator,
    Op,
    PendingCollective,
    ReduceOp,
    rows,
)
from caffepy.distributed.liveness import Heartbeat, Monitor, describe_error
from caffepy.distributed.rendezvous import Membership
from caffepy.distributed.store.wire import DeviceStatus, Failure, pack, unpack
from caffepy.errors import PeerError, RunError, UserError

# -- arguments -----------------------------------------------------------------------------------------

DTYPES = ("float16", "float32", "float64", "int32", "int64", "uint8")
"""The dtypes that every communicator can reduce."""

Parts = Array | Sequence[Array]
"""One array per rank: a list, or one array that contains them in rank order."""

Empty = Callable[[tuple[int, ...], Any], Array]
"""Allocates a contiguous array in the communicator's memory."""


def whole_number(value: Any) -> int | None:
    """Return an integer, NumPy's included, as an int; None for any other value."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def on_gpu(array: Any) -> bool:
    """Return whether an array is on a GPU, without importing CuPy."""
    return hasattr(array, "__cuda_array_interface__")


def check_array(array: Any, name: str, memory: str, written: bool) -> None:
    """Reject an array that cannot be sent or received without a copy.

    Raises:
        UserError: not an array, an unsupported dtype, not contiguous, read-only, or host memory for NCCL.
    """
    if not (isinstance(array, np.ndarray) or on_gpu(array)):
        raise UserError(f"{name} is a {type(array).__name__}: pass a NumPy or CuPy array")
    if str(array.dtype) not in DTYPES:
        raise UserError(f"{name} has dtype {array.dtype}; known: {', '.join(DTYPES)}")
    if not array.flags.c_contiguous:
        raise UserError(f"{name} is not contiguous: pass a copy made by ascontiguousarray")
    if written and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise UserError(f"{name} is read-only; pass a writable array")
    if memory == "gpu" and not on_gpu(array):
        raise UserError(f"{name} is in host memory: backend 'nccl' takes CuPy arrays, 'mpi' and 'tcp' take both")


def check_operator(op: Any, array: Array) -> ReduceOp:
    """Return the operator, checked against the array's dtype.

    Raises:
        UserError: not an operator, or AVG of integers.
    """
    if not isinstance(op, ReduceOp):
        known = ", ".join(known.name for known in ReduceOp)
        raise UserError(f"op is {op!r}; known: {known}, as in caffepy.distributed.ReduceOp.SUM")
    if op is ReduceOp.AVG and array.dtype.kind != "f":
        raise UserError(f"AVG of {array.dtype} would have to be rounded: use SUM and divide")
    return op


class Buffer:
    """An argument for a communicator: one contiguous array in its memory.

    Args:
        data: the communicator's array.
        arrays: the script's arrays, concatenated in `data`; empty if the argument is `data` itself.
    """

    def __init__(self, data: Array, arrays: Sequence[Array] = ()) -> None:
        self.data = data
        self._arrays = arrays

    def unpack(self) -> None:
        """Copy received data to the script's arrays."""
        if not self._arrays:
            return
        for array, piece in zip(self._arrays, rows(self.data, len(self._arrays)), strict=True):
            if on_gpu(array) and not on_gpu(piece):
                array.set(piece.reshape(array.shape))
            else:
                array[...] = piece.reshape(array.shape)


class Arguments:
    """Converts a script's arrays to communicator buffers.

    All methods raise UserError as `check_array` does, and for a wrong number, shape or dtype.

    Args:
        memory: the communicator's memory, ``host`` or ``gpu``; GPU arrays are copied to the host if needed.
        empty: allocates an array in that memory.
        size: the number of ranks.
    """

    def __init__(self, memory: str, empty: Empty, size: int) -> None:
        self._memory = memory
        self._empty = empty
        self._size = size

    def array(self, array: Any, name: str, written: bool = False) -> Buffer:
        """Return the buffer of one array."""
        check_array(array, name, self._memory, written)
        # MPI and TCP move host memory only; the copy is brought back by `unpack`.
        if self._memory == "host" and on_gpu(array):
            return Buffer(np.ascontiguousarray(array.get()), [array])
        return Buffer(array)

    def parts(self, parts: Parts, name: str, like: Array, written: bool = False) -> Buffer:
        """Return the buffer of one array per rank, each with the shape and dtype of `like`.

        Args:
            parts: arrays in a list, or one array (size, *shape) or (size * shape[0], *shape[1:]).
            name: the argument's name in messages.
            like: an array of the required shape and dtype.
            written: whether the arrays receive data; else they are sent.
        """
        if not isinstance(parts, (list, tuple)):
            buffer = self.array(parts, name, written)
            _check_whole(parts, name, like, self._size)
            return buffer
        self._check_count(parts, name)
        for i, part in enumerate(parts):
            check_array(part, f"{name}[{i}]", self._memory, written)
            if part.shape != like.shape or part.dtype != like.dtype:
                raise UserError(f"{name}[{i}] is {_form(part)}; it should be {_form(like)}")
        data = self._empty((self._size, *like.shape), like.dtype)
        if written:
            return Buffer(data, parts)
        for row, part in zip(rows(data, self._size), parts, strict=True):
            row[:] = (part.get() if self._memory == "host" and on_gpu(part) else part).reshape(-1)
        return Buffer(data)

    def first(self, parts: Parts, name: str) -> Array:
        """Return an array with the shape and dtype of each of `parts`."""
        if isinstance(parts, (list, tuple)):
            self._check_count(parts, name)
            check_array(parts[0], f"{name}[0]", self._memory, written=False)
            return parts[0]
        whole: Array = parts
        check_array(whole, name, self._memory, written=False)
        if not whole.ndim or whole.shape[0] % self._size:
            raise UserError(f"{name} of shape {whole.shape} cannot be cut into {self._size} equal parts")
        return whole[: whole.shape[0] // self._size]

    def _check_count(self, parts: Sequence[Array], name: str) -> None:
        if len(parts) != self._size:
            raise UserError(f"{name} has {len(parts)} arrays; give one for each of {self._size} ranks")


def _check_whole(array: Array, name: str, like: Array, count: int) -> None:
    fitting = [(count, *like.shape)]
    if like.ndim:
        fitting.append((count * like.shape[0], *like.shape[1:]))
    if array.shape not in fitting or array.dtype != like.dtype:
        wanted = " or ".join(map(str, dict.fromkeys(fitting)))
        raise UserError(f"{name} is {_form(array)}; it should be {like.dtype} {wanted}, or a list of {count} arrays")


def _form(array: Array) -> str:
    return f"{array.dtype} {array.shape}"


# -- the group -----------------------------------------------------------------------------------------

T = TypeVar("T")

WORLD = None
"""The default group, as torch.distributed's ``dist.group.WORLD``: `group` None means it everywhere."""
TAG_LIMIT = 32767
"""The largest tag that every MPI allows."""
_FAILURE_SECONDS = 1.0
"""Seconds to wait for the monitor to receive the reason of a failed connection."""
_PRINT_SECONDS = 1.0
"""Seconds that a rank leaves the one that failed to print its error and to end all."""
_CAUSE_SECONDS = 0.2
"""Seconds to wait for an earlier failure of another rank, which is the cause of the job's end."""
_POLL_SECONDS = 2.0
"""Seconds between checks for ranks that have left."""


class _StragglerError(PeerError):
    """The message names the straggler already."""


class ProcessGroup:
    """A group of processes that exchange arrays.

    The methods are `caffepy.distributed`'s functions with ranks of this group (``group_src``, ``group_dst``). All ranks
    must call the same collectives in the same order. `all_gather` and similar operations take a list with one array per
    rank, or one array that contains them in rank order. With ``async_op=True`` an operation is only started,
    and its arrays must not be used until the handle's `wait`; otherwise the call blocks until completion.

    Every operation raises UserError for invalid arguments, and PeerError if another rank failed, left, or did not
    respond within the timeout.

    A ``with`` statement destroys the group at its end; an exception is reported to the other ranks and ends their
    waits.

    Args:
        backend: the communicator's name.
        membership: the group's members.
        communicator: carries the arrays.
        timeout: longest wait in seconds.
    """

    def __init__(self, backend: str, membership: Membership, communicator: Communicator, timeout: float) -> None:
        self.backend = backend
        self.timeout = timeout
        self.rank, self.size = membership.rank, membership.size
        self.default_ranks = membership.world_ranks or range(self.size)
        """The members' ranks in the default group."""
        self.local_rank = membership.local_rank
        """This process's rank on its host."""
        self.name = membership.name(self.rank)
        """This process's name in messages."""
        self.failure: str | None = None
        """The error of a failed rank; every later operation raises it."""
        self.communicator = communicator
        self.membership = membership
        self.subgroups = itertools.count()
        """Numbers of the groups made by `new_group`, the same on all ranks."""
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._heartbeat = Heartbeat("")
        self.destroyed = False
        """Whether the group has been left."""
        self._arguments = Arguments(communicator.memory, communicator.empty, self.size)
        self.releases: list[Callable[[], None]] = []
        """Called before the communicator is closed, for objects that use it directly."""
        self._monitor = Monitor(membership.channel, self._statuses, self._on_failure)
        if self.size > 1:
            self._monitor.start()

    # -- point to point -----------------------------------------------------------------------------

    def send(self, tensor: Array, group_dst: int, tag: int = 0) -> None:
        """Send an array to a rank that receives one of the same dtype and size with the same tag."""
        self.isend(tensor, group_dst, tag).wait()

    def recv(self, tensor: Array, group_src: int, tag: int = 0) -> int:
        """Receive an array from a rank; messages with the same tag arrive in sending order. Returns the sender."""
        self.irecv(tensor, group_src, tag).wait()
        return int(group_src)

    def isend(self, tensor: Array, group_dst: int, tag: int = 0) -> Handle:
        """Start to send. The array must not be modified until the handle's `wait`."""
        with self.reporting("send"):
            peer, tag = self._check_message(group_dst, tag)
            buffer = self._arguments.array(tensor, "tensor")
        return self._start(Collective(Op.SEND, buffer.data, peer=peer, tag=tag), None, True)

    def irecv(self, tensor: Array, group_src: int, tag: int = 0) -> Handle:
        """Start to receive. The array contains the message after the handle's `wait`."""
        with self.reporting("receive"):
            peer, tag = self._check_message(group_src, tag)
            buffer = self._arguments.array(tensor, "tensor", written=True)
        return self._start(Collective(Op.RECEIVE, None, buffer.data, peer=peer, tag=tag), buffer, True)

    # -- collectives --------------------------------------------------------------------------------

    def broadcast(self, tensor: Array, group_src: int = 0, async_op: bool = False) -> Handle:
        """tensor = the source's tensor."""
        with self.reporting("broadcast"):
            root = self._check_rank(group_src, "group_src")
            buffer = self._arguments.array(tensor, "tensor", written=root != self.rank)
        if root == self.rank:
            return self._start(Collective(Op.BROADCAST, buffer.data, None, peer=root), None, async_op)
        return self._start(Collective(Op.BROADCAST, None, buffer.data, peer=root), buffer, async_op)

    def all_reduce(self, tensor: Array, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Handle:
        """tensor = op(all ranks' tensors), element by element, on every rank."""
        with self.reporting("all_reduce"):
            buffer = self._arguments.array(tensor, "tensor", written=True)
            op = check_operator(op, tensor)
        return self._start(Collective(Op.ALL_REDUCE, buffer.data, buffer.data, op), buffer, async_op)

    def reduce(self, tensor: Array, group_dst: int = 0, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Handle:
        """On the destination: tensor = op(all ranks' tensors); other ranks' tensors are unchanged."""
        with self.reporting("reduce"):
            root = self._check_rank(group_dst, "group_dst")
            own = self._arguments.array(tensor, "tensor", written=root == self.rank)
            op = check_operator(op, tensor)
        result = own if root == self.rank else None
        return self._start(Collective(Op.REDUCE, own.data, _data(result), op, root), result, async_op)

    def all_gather(self, tensor_list: Parts, tensor: Array, async_op: bool = False) -> Handle:
        """tensor_list[i] = the tensor of rank i, on every rank."""
        with self.reporting("all_gather"):
            own = self._arguments.array(tensor, "tensor")
            gathered = self._arguments.parts(tensor_list, "tensor_list", tensor, written=True)
        return self._start(Collective(Op.ALL_GATHER, own.data, gathered.data), gathered, async_op)

    def gather(
        self, tensor: Array, gather_list: Parts | None = None, group_dst: int = 0, async_op: bool = False
    ) -> Handle:
        """On the destination: gather_list[i] = the tensor of rank i; other ranks pass no list."""
        with self.reporting("gather"):
            root = self._check_rank(group_dst, "group_dst")
            own = self._arguments.array(tensor, "tensor")
            gathered = self._at_root(gather_list, "gather_list", tensor, root, written=True)
        return self._start(Collective(Op.GATHER, own.data, _data(gathered), peer=root), gathered, async_op)

    def scatter(
        self, tensor: Array, scatter_list: Parts | None = None, group_src: int = 0, async_op: bool = False
    ) -> Handle:
        """tensor = the source's scatter_list[rank]; other ranks pass no list."""
        with self.reporting("scatter"):
            root = self._check_rank(group_src, "group_src")
            own = self._arguments.array(tensor, "tensor", written=True)
            given = self._at_root(scatter_list, "scatter_list", tensor, root)
        return self._start(Collective(Op.SCATTER, _data(given), own.data, peer=root), own, async_op)

    def reduce_scatter(
        self, output: Array, input_list: Parts, op: ReduceOp = ReduceOp.SUM, async_op: bool = False
    ) -> Handle:
        """output = op(all ranks' input_list[rank])."""
        with self.reporting("reduce_scatter"):
            own = self._arguments.array(output, "output", written=True)
            given = self._arguments.parts(input_list, "input_list", output)
            op = check_operator(op, output)
        return self._start(Collective(Op.REDUCE_SCATTER, given.data, own.data, op), own, async_op)

    def all_to_all(self, output_tensor_list: Parts, input_tensor_list: Parts, async_op: bool = False) -> Handle:
        """output_tensor_list[i] = input_tensor_list[rank] of rank i; all parts have one shape."""
        with self.reporting("all_to_all"):
            like = self._arguments.first(input_tensor_list, "input_tensor_list")
            given = self._arguments.parts(input_tensor_list, "input_tensor_list", like)
            taken = self._arguments.parts(output_tensor_list, "output_tensor_list", like, written=True)
        return self._start(Collective(Op.ALL_TO_ALL, given.data, taken.data), taken, async_op)

    def barrier(self, async_op: bool = False) -> Handle:
        """Wait for all ranks; on GPUs, also for the preceding operations on the current stream."""
        return self._start(Collective(Op.BARRIER), None, async_op)

    # -- objects ------------------------------------------------------------------------------------

    def broadcast_object_list(self, object_list: list[Any], group_src: int = 0) -> None:
        """object_list[:] = the source's objects; the lists are of one length.

        An object consists of None, booleans, numbers, text, bytes, paths and NumPy arrays of numbers, in lists, tuples
        and dictionaries. It travels as JSON through rank 0, and nothing is unpickled; for large arrays, `broadcast` is
        faster.
        """
        with self.reporting("broadcast_object_list"):
            root = self._check_rank(group_src, "group_src")
            _check_objects(object_list, "object_list")
        (found,) = self._exchange_objects("broadcast_object_list", object_list, [root], range(self.size))
        with self.reporting("broadcast_object_list"):
            _check_objects(object_list, "object_list", len(found))
        object_list[:] = found

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        """object_list[i] = the object of rank i, on every rank; objects as in `broadcast_object_list`."""
        with self.reporting("all_gather_object"):
            _check_objects(object_list, "object_list", self.size)
        object_list[:] = self._exchange_objects("all_gather_object", obj, range(self.size), range(self.size))

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None = None, group_dst: int = 0) -> None:
        """On the destination: object_gather_list[i] = the object of rank i; other ranks pass no list.

        Objects are those of `broadcast_object_list`.
        """
        with self.reporting("gather_object"):
            root = self._check_rank(group_dst, "group_dst")
            taken = self._only_at_root(object_gather_list, "object_gather_list", root)
            if taken is not None:
                _check_objects(taken, "object_gather_list", self.size)
        found = self._exchange_objects("gather_object", obj, range(self.size), [root])
        if taken is not None:
            taken[:] = found

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        group_src: int = 0,
    ) -> None:
        """scatter_object_output_list[0] = the source's scatter_object_input_list[rank].

        Objects are those of `broadcast_object_list`. The lists of other ranks than the source are not read.
        """
        with self.reporting("scatter_object_list"):
            root = self._check_rank(group_src, "group_src")
            _check_objects(scatter_object_output_list, "scatter_object_output_list")
            if not scatter_object_output_list:
                raise UserError("scatter_object_output_list is empty; give a list of one element")
            if self.rank == root:
                _check_objects(scatter_object_input_list, "scatter_object_input_list", self.size)
        given = scatter_object_input_list
        (found,) = self._exchange_objects("scatter_object_list", given, [root], range(self.size))
        scatter_object_output_list[0] = found[self.rank]

    def _exchange_objects(self, what: str, value: Any, senders: Sequence[int], receivers: Sequence[int]) -> list[Any]:
        """Put this rank's value into the store if it sends, and return all senders' if it receives."""
        channel = self.membership.channel
        with self.bounded(what):
            if self.destroyed:
                raise UserError("the process group was destroyed")
            # All ranks have begun the same number of collectives, so the count names the exchange.
            key = f"object/{self._heartbeat.collectives}"
            if self.rank in senders:
                try:
                    packed = pack(value)
                except (TypeError, ValueError, RecursionError) as error:
                    raise UserError(str(error)) from error
                channel.put(f"{key}/{self.rank}", packed, len(receivers))
            if self.rank not in receivers:
                return []
            return [self._take_object(f"{key}/{sender}", what, sender) for sender in senders]

    def _take_object(self, key: str, what: str, sender: int) -> Any:
        packed = self.membership.channel.take(key, self.timeout, sender)
        if packed is None:
            self.give_up(what, (sender,), self.timeout)
        return unpack(packed)

    # -- arguments ----------------------------------------------------------------------------------

    def _at_root(self, parts: Parts | None, name: str, like: Array, root: int, written: bool = False) -> Buffer | None:
        """Return the buffer of an argument that only the root passes."""
        given = self._only_at_root(parts, name, root)
        return None if given is None else self._arguments.parts(given, name, like, written)

    def _only_at_root(self, given: T | None, name: str, root: int) -> T | None:
        """Return an argument that only the root passes; an empty list of another rank counts as None."""
        if root != self.rank and isinstance(given, (list, tuple)) and not given:
            return None
        if (root == self.rank) != (given is not None):
            raise UserError(f"{name} is {'missing on' if given is None else 'only for'} the root, rank {root}")
        return given

    def _check_rank(self, rank: Any, name: str) -> int:
        number = whole_number(rank)
        if number is None or not 0 <= number < self.size:
            raise UserError(f"{name} {rank!r} is not a rank of this group: ranks are 0 to {self.size - 1}")
        return number

    def _check_message(self, peer: int, tag: int) -> tuple[int, int]:
        """Return peer and tag as int, which transports require."""
        other, number = self._check_rank(peer, "rank"), whole_number(tag)
        if other == self.rank:
            raise UserError("a rank cannot send to itself")
        if number is None or not 0 <= number <= TAG_LIMIT:
            raise UserError(f"tag {tag!r} is not an integer from 0 to {TAG_LIMIT}")
        if number and self.backend == "nccl":
            raise UserError("NCCL does not support tags: leave it out")
        return other, number

    # -- the end ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Leave the group. Rank 0, which hosts the store, waits for all others. Idempotent.

        Raises:
            PeerError: the others do not leave within the timeout.
        """
        with self._lock:
            if self.destroyed:
                return
            self.destroyed = True
        channel = self.membership.channel
        for release in self.releases:
            release()
        self._monitor.stop()
        late: list[int] = []
        if self.failure is None:
            # Rank 0 has the store, and waits for the others. After a failure no rank waits: some may never come.
            late = channel.wait_alone(self.timeout)
            self.communicator.close()
        channel.close()
        if late:
            names = ", ".join(map(self.membership.name, late))
            raise PeerError(f"{self.name}: destroy_process_group: has waited {self.timeout:g} s for {names} to leave")

    def abort(self, message: str) -> None:
        """Abort all ranks' waits with a message, and leave the group."""
        self.membership.channel.fail(message)
        if self.size > 1:
            # This rank's error may be the consequence of another rank's failure, which is then on its way.
            self._failed.wait(_CAUSE_SECONDS)
        self._fail(message)
        self.destroy()

    def describe_failure(self, error: BaseException) -> str:
        """Return the description of this process's error for the other ranks."""
        text = describe_error(error)
        return text if text.startswith(self.name) else f"{self.name}: {text}"

    def end_world(self) -> None:
        """Abort MPI's processes after a failure, at the end of a script; no effect without MPI."""
        if self.membership.world is not None and self.size > 1:
            if self.failure is not None and not self.failure.startswith(self.name):
                # MPI_Abort ends all ranks: the one that failed prints its error first.
                time.sleep(_PRINT_SECONDS)
            self.membership.world.end(RunError.exit_status)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.destroy()
        else:
            self.abort(self.failure or self.describe_failure(error))

    # -- for handles --------------------------------------------------------------------------------

    def rank_of(self, rank: Any, name: str) -> int:
        """Return the rank in this group of a rank of the default group.

        Raises:
            UserError: it is not a member.
        """
        number = whole_number(rank)
        if number is None or number not in self.default_ranks:
            ranks = ", ".join(map(str, self.default_ranks))
            raise UserError(f"{name} {rank!r} is not a rank of this group: ranks are {ranks}")
        return self.default_ranks.index(number)

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Prefix error messages with rank and operation."""
        where = f"{self.name}: {what}"
        try:
            yield
        except UserError as error:
            raise UserError(f"{where}: {error}") from error.__cause__
        except PeerError as error:
            if not isinstance(error, _StragglerError):
                self._failed.wait(_FAILURE_SECONDS)
            raise PeerError(f"{where}: {self.failure or error}") from error.__cause__

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Like `reporting`, and publish the operation that this rank waits for."""
        with self._heartbeat.waiting(what), self.reporting(what):
            yield

    @property
    def heartbeat(self) -> Heartbeat:
        """Return this rank's heartbeat."""
        return self._heartbeat

    def name_of(self, rank: int) -> str:
        """Return a rank's name for messages."""
        return self.membership.name(rank)

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """Like `waiting`, with the group's timeout, for direct use of the communicator.

        Raises:
            PeerError: the other ranks did not respond in time, or one failed.
        """
        if self.failure is not None:
            raise PeerError(f"{self.name}: {what}: {self.failure}")
        # The communicator's call has no timeout; the timer ends it by aborting the communicator.
        timer = threading.Timer(self.timeout, self._expire, (what,))
        timer.daemon = True
        timer.start()
        self._heartbeat.collectives += 1
        try:
            with self.waiting(what):
                yield
        finally:
            timer.cancel()

    def _expire(self, what: str) -> None:
        """Abort a timed-out wait on all ranks."""
        try:
            self.give_up(what, (), self.timeout)
        except PeerError as error:
            self.membership.channel.fail(f"{self.name}: {what}: {error}")
            self._fail(str(error))

    def raise_if_departed(self, waits_for: Sequence[int]) -> None:
        """Raise PeerError if a rank that an operation waits for has left the group."""
        departed = self.membership.find_departed(self._heartbeat.collectives, waits_for)
        if departed:
            raise _StragglerError(f"waits for {departed}")

    def give_up(self, what: str, waits_for: Sequence[int], seconds: float) -> NoReturn:
        """Raise the PeerError of a wait that timed out, with the stragglers."""
        stragglers = self.membership.find_stragglers(self._heartbeat.collectives, what, waits_for)
        unknown = f"an operation that all ranks have started: {self.backend} or the network is stuck"
        raise _StragglerError(f"has waited {seconds:g} s for {stragglers or unknown}")

    def _start(self, collective: Collective, written: Buffer | None, async_op: bool) -> Handle:
        """Start an operation; unless `async_op`, wait for it and unpack its results."""
        what = self._describe(collective)
        with self.reporting(what):
            if self.destroyed:
                raise UserError("the process group was destroyed")
            if self.failure is not None:
                raise PeerError(self.failure)
            with self._lock:  # count in the communicator's order
                self._heartbeat.collectives += collective.pattern is not None
                work = self.communicator.start(collective)
        handle = Handle(self, what, work, written)
        if not async_op:
            handle.wait()
        return handle

    def _describe(self, collective: Collective) -> str:
        if collective.pattern is not None:
            return collective.describe(self.size)
        return f"{collective.op.value} {'to' if collective.op is Op.SEND else 'from'} rank {collective.peer}"

    def _statuses(self) -> list[DeviceStatus]:
        return [self._heartbeat.status(self.rank, self.membership.members[self.rank].host)]

    def _on_failure(self, failure: Failure) -> None:
        """Handle the failure of another rank or of this rank's control plane. Called by the monitor's thread."""
        # This rank's own monitor has found the failure: the others hear of it from here.
        if not failure.reported:
            self.membership.channel.fail(failure.message)
        self._fail(failure.message)

    def _fail(self, message: str) -> None:
        """Wake all waiters of this process."""
        if self.failure is None:
            # The first message stays; what follows is mostly its consequence.
            self.failure = message
            self._failed.set()
            self.communicator.abort()


class Handle:
    """A pending operation. Its arrays must not be used until it completes.

    Args:
        group: the operation's group.
        what: the operation's name in messages.
        work: the communicator's pending work.
        written: the buffer to unpack on completion.
    """

    def __init__(self, group: ProcessGroup, what: str, work: PendingCollective, written: Buffer | None) -> None:
        self._group = group
        self._what = what
        self._work = work
        self._written = written
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until the operation completes and its results are in their arrays; then return True.

        Args:
            timeout: seconds; None: the group's. A timed-out wait does not cancel the operation.

        Raises:
            PeerError: timeout (the message names the missing ranks), or another rank failed.
            UserError: another rank called a different operation.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = self._group.timeout if seconds is None else seconds
        deadline = time.monotonic() + seconds
        with self._lock:
            if self._done:
                return True
            with self._group.waiting(self._what):
                while not self._finish(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        self._group.give_up(self._what, self._work.waits_for, seconds)
                    self._group.raise_if_departed(self._work.waits_for)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is complete, without blocking. Errors as in `wait`."""
        with self._lock:
            if not self._done:
                with self._group.reporting(self._what):
                    self._finish(0.0)
            return self._done

    def _finish(self, seconds: float) -> bool:
        if self._work.wait(seconds):
            if self._written is not None:
                self._written.unpack()
            self._written = None
            self._done = True
        return self._done


def _check_objects(objects: Any, name: str, count: int | None = None) -> None:
    """Refuse a value that is not a list, or a list whose length is not `count`."""
    if not isinstance(objects, list):
        raise UserError(f"{name} is a {type(objects).__name__}: pass a list")
    if count is not None and len(objects) != count:
        raise UserError(f"{name} has {len(objects)} elements; it should have {count}")


def _data(buffer: Buffer | None) -> Array | None:
    return None if buffer is None else buffer.data

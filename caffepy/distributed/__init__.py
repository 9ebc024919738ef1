"""Point-to-point and collective communication for scripts, over NCCL, MPI or TCP.

Modules: `default.py` the default group and its functions, `group.py` the process group and its operations,
`data_parallel.py` training of a solver in a group, `spawn.py` starting processes, `arrays.py` checks of arguments,
`rendezvous.py` joining and membership, `backends.py` choice of the communicator. Communicators and control channel come
from `caffepy.parallel`. Imported by scripts and pycaffe.
"""

from __future__ import annotations

from caffepy.distributed.data_parallel import DataParallel
from caffepy.distributed.default import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    destroy_process_group,
    gather,
    gather_object,
    get_backend,
    get_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    irecv,
    is_initialized,
    isend,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from caffepy.distributed.group import Handle, ProcessGroup
from caffepy.distributed.spawn import spawn
from caffepy.parallel.communicators.collectives import ReduceOp

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "DataParallel",
    "Handle",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_group",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "spawn",
]

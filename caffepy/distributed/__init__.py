"""Arrays between the processes of a job, for scripts: point to point and collectives, over NCCL, MPI or TCP.

`default.py` owns the default group and its operations as functions, `group.py` what they are, a group's life and its
errors, `data_parallel.py` a solver that trains in a group, `spawn.py` the start of processes, `arrays.py` the check of
arguments, `rendezvous.py` how processes find each other, who they are and for whom a rank waits, `backends.py` the
choice of a communicator. The communicators and the control channel are those of `caffepy.parallel`.

Scripts import it, and pycaffe.
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
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    destroy_process_group,
    gather,
    get_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    irecv,
    is_initialized,
    isend,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from caffepy.distributed.group import Handle, ProcessGroup
from caffepy.distributed.spawn import spawn
from caffepy.parallel.communicators.collectives import Operator

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "DataParallel",
    "Handle",
    "Operator",
    "ProcessGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "gather",
    "get_group",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_initialized",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "spawn",
]

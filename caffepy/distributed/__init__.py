"""Point-to-point and collective communication for scripts, over NCCL, MPI or TCP.

Names, order and meaning of arguments are those of `torch.distributed`.

Modules: `functions.py` the operations, `default.py` the default group and its subgroups, `group.py` the process group,
`data_parallel.py` training of a solver in a group, `spawn.py` starting processes, `arrays.py` checks of arguments,
`rendezvous.py` joining and membership, `backends.py` choice of the communicator. Communicators and control channel come
from `caffepy.parallel`. Imported by scripts and pycaffe.
"""

from __future__ import annotations

from caffepy.distributed.data_parallel import (
    DistributedDataParallel,
)
from caffepy.distributed.default import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    GroupMember,
    destroy_process_group,
    get_backend,
    get_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
    new_group,
)
from caffepy.distributed.functions import (
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    irecv,
    isend,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    scatter_object_list,
    send,
)
from caffepy.distributed.group import (
    Handle,
    ProcessGroup,
)
from caffepy.distributed.spawn import (
    ProcessContext,
    spawn,
)
from caffepy.parallel.communicators.collectives import (
    ReduceOp,
)

__all__ = [
    "AVG",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "DistributedDataParallel",
    "GroupMember",
    "Handle",
    "ProcessContext",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
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
    "is_available",
    "is_initialized",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "spawn",
]

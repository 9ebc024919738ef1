"""Point-to-point and collective communication for scripts, over NCCL, MPI or TCP.

Names, order and meaning of arguments are those of `torch.distributed`.

Modules: `functions.py` the operations, `default.py` the default group and its subgroups, `group.py` the process group,
`data_parallel.py` training of a solver in a group, `process_spawn.py` starting processes, `rendezvous.py` joining and
membership. `communicators/`, `store/`, `processes/` and `launch/` are what the engine and scripts share.

The names below are imported on first use: a command that asks for its launcher loads no communicator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caffepy.distributed.communicators.communicator import ReduceOp
    from caffepy.distributed.data_parallel import DistributedDataParallel
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
    from caffepy.distributed.group import Handle, ProcessGroup
    from caffepy.distributed.process_spawn import ProcessContext, spawn

_NAMES = {
    "communicators.communicator": ("ReduceOp",),
    "data_parallel": ("DistributedDataParallel",),
    "default": (
        "AVG",
        "MAX",
        "MIN",
        "PRODUCT",
        "SUM",
        "GroupMember",
        "destroy_process_group",
        "get_backend",
        "get_group",
        "get_local_rank",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "is_available",
        "is_initialized",
        "new_group",
    ),
    "functions": (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
    ),
    "group": ("Handle", "ProcessGroup"),
    "process_spawn": ("ProcessContext", "spawn"),
}
"""Names by module of this package."""
_LAZY = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

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

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'caffepy.distributed' has no attribute '{name}'")
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})

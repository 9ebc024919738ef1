"""Gradients that a kernel averages over NVLink, on simulated CuPy: what goes there, and where the kernel finds it."""

from __future__ import annotations

import pytest
from simulated_nccl import run_simulated

BEGIN = """
from contextlib import nullcontext
import ctypes, os
import numpy as np, simulated_nccl
simulated_nccl.install(2)
from process_groups import run_threads
from caffepy.distributed.communicators import nccl as ours, nvlink
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
group, unique_id = ThreadGroup(2), ours.new_unique_id()
linked = []
def p2p_attribute(value, attribute, first, second):
    assert attribute == 3
    linked.append((first, second))
    value._obj.value = 1
    return 0
class Driver:
    cuDeviceGetP2PAttribute = staticmethod(p2p_attribute)
nvlink.ctypes.CDLL = lambda name: Driver
def kernel(grid, block, arguments):
    tables, (offset, packs, rank, stop) = arguments[:2], map(int, arguments[2:])
    memory, flags = (np.asarray(table) for table in tables)
    stream = simulated_nccl.current_stream().ptr
    simulated_nccl.log().append(f"{grid[0]} blocks: {packs} packs from {offset} on stream {stream}")
    assert ctypes.c_int.from_address(stop).value == 0 and len(set(memory) | set(flags)) == 4
    if packs:
        arrays = [simulated_nccl.at(int(base) + 16 * offset, 4 * packs, 7) for base in memory]
        group.wait()
        mean = np.add.reduce(arrays, axis=0) / 2
        group.wait()
        arrays[rank][:] = mean
nvlink.library_kernel = lambda file, name, defines: {"#define SIZE 2\\n": kernel}[defines]
def communicator(rank, compress="none"):
    simulated_nccl.Device(rank).use()
    return ours.NcclCommunicator(2, unique_id, rank, LocalCommunicator(group, rank), compress)
"""


def test_parts_of_the_gradients_are_averaged_by_the_kernel_and_all_else_by_nccl() -> None:
    code = """
def work(rank):
    nccl = communicator(rank)
    memory = nccl.allocate_gradients(10240)
    assert memory.shape == (10240,) and memory.dtype == np.float32 and not memory.any()
    memory += rank
    log = simulated_nccl.log()
    log.clear()
    nccl.all_reduce_async(memory[2048:], nullcontext()).synchronize()
    nccl.all_reduce(memory[:1024])
    assert (memory[:1024] == 0.5).all() and (memory[2048:] == 0.5).all() and (memory[1024:2048] == rank).all()
    nccl.all_reduce(memory[:4], average=False)
    nccl.all_reduce(simulated_nccl.array(np.full(3, rank, np.float32)))
    nccl.abort()
    assert nccl._nvlink._stopped[0] == 1
    return log
for lines in run_threads(2, work):
    print(*lines, sep="\\n")
assert sorted(linked) == [(0, 1), (0, 1), (1, 0), (1, 0)]
"""
    assert run_simulated(BEGIN + code) == 2 * [
        "stream 78 waits for stream 77",
        "1 blocks: 2048 packs from 512 on stream 78",
        "stream 77 waits for stream 78",
        "1 blocks: 256 packs from 0 on stream 77",
        "all-reduce of 4 float32 on stream 77",
        "all-reduce of 3 float32 on stream 77",
    ]


@pytest.mark.parametrize(
    "without",
    [
        "p2p_attribute = Driver.cuDeviceGetP2PAttribute = lambda value, attribute, first, second: 0",
        "p2p_attribute = Driver.cuDeviceGetP2PAttribute = lambda value, attribute, first, second: 101",
        "del Driver.cuDeviceGetP2PAttribute",
        "os.environ['NCCL_P2P_DISABLE'] = '1'",
        "compress = 'fp16'",
    ],
)
def test_without_nvlink_any_memory_will_do(without: str) -> None:
    code = f"""
compress = "none"
{without}
print(run_threads(2, lambda rank: communicator(rank, compress).allocate_gradients(128)))
"""
    assert run_simulated(BEGIN + code) == ["[None, None]"]

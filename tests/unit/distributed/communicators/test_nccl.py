"""The NCCL communicator's streams, on simulated CuPy in a process of its own."""

from __future__ import annotations

import pytest
from simulated_nccl import run_simulated

BEGIN = """
from contextlib import contextmanager, nullcontext
import numpy as np, simulated_nccl
simulated_nccl.install(2)
from process_groups import run_threads
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.communicators.nccl import NcclCommunicator, new_unique_id
group, unique_id = ThreadGroup(2), new_unique_id()
def communicator(rank, compress="none"):
    return NcclCommunicator(2, unique_id, rank, LocalCommunicator(group, rank), compress)
"""
BUCKET = ["stream 78 waits for stream 77", "all-reduce of 3 %s on stream 78"]
JOIN = ["stream 77 waits for stream 78"]


@pytest.mark.parametrize(("compress", "dtype"), [("none", "float32"), ("fp16", "float16"), ("bf16", "uint16")])
def test_buckets_go_beside_the_threads_stream_which_waits_for_them(compress: str, dtype: str) -> None:
    code = f"""
def work(rank):
    nccl = communicator(rank, {compress!r})
    arrays = [simulated_nccl.array(np.full(3, i + rank, np.float32)) for i in range(2)]
    for _ in range(2):
        works = []
        for number, array in enumerate(arrays, 1):
            works.append(nccl.all_reduce_async(array, nullcontext()))
            assert nccl.completed == number
        for work in works:
            work.poll()
            work.synchronize()
    nccl.close()
    return [*simulated_nccl.log(), [array.tolist() for array in arrays]]
for lines in run_threads(2, work):
    print(*lines, sep="\\n")
"""
    lines = run_simulated(BEGIN + code)
    iteration = [line % dtype if "%" in line else line for line in BUCKET + BUCKET] + JOIN + JOIN
    assert lines == (iteration + iteration + ["[[0.5, 0.5, 0.5], [1.5, 1.5, 1.5]]"]) * 2


@pytest.mark.parametrize(("number", "refused"), [(2804, "2.8.4"), (20906, "2.9.6"), (21000, None), (22803, None)])
def test_an_nccl_that_cannot_average_is_refused(number: int, refused: str | None) -> None:
    code = f"""
from caffepy.errors import DeviceError
from caffepy.distributed.communicators import nccl as ours
ours.nccl.get_version = lambda: {number}
try:
    ours.check_nccl()
    print(None)
except DeviceError as error:
    print(error)
"""
    (said,) = run_simulated(BEGIN + code)
    wanted = f"NCCL {refused} is too old: averages of gradients (ncclAvg) need 2.10 or later"
    assert said.startswith(wanted if refused else "None")


def test_times_of_a_bucket_are_taken_on_its_stream() -> None:
    code = """
def work(rank):
    nccl = communicator(rank)
    stamps = []
    @contextmanager
    def timed():
        for _ in range(2):
            stamps.append((simulated_nccl.current_stream().ptr, len(simulated_nccl.log())))
            if len(stamps) == 1:
                yield
    nccl.all_reduce_async(simulated_nccl.array(np.zeros(3, np.float32)), timed()).synchronize()
    return stamps
print(run_threads(2, work))
"""
    # Behind the wait for the other stream, and behind the all-reduce.
    assert run_simulated(BEGIN + code) == [str([[(78, 1), (78, 2)]] * 2)]


def test_the_host_can_wait_for_a_bucket_and_not_for_what_blocks() -> None:
    """Blocking collectives are done for what follows on their stream: no event is recorded, nothing waits."""
    code = """
def work(rank):
    nccl = communicator(rank)
    array = simulated_nccl.array(np.full(3, rank, np.float32))
    nccl.all_reduce(array)
    nccl.broadcast(array, root=1)
    blocking = list(simulated_nccl.log())
    work = nccl.all_reduce_async(array, nullcontext())
    assert work.wait(300.0)
    assert nccl.all_reduce_async(array, nullcontext()).synchronize() and nccl.completed == 1
    assert nccl.capturable and nccl.overlaps and nccl.asynchronous and not nccl.compresses
    nccl.wait_on_device()
    nccl.abort()
    try:
        nccl.all_reduce(array)
    except Exception as error:
        return blocking, array.tolist(), simulated_nccl.log()[-1], type(error).__name__
print(*run_threads(2, work), sep="\\n")
"""
    expected = (["all-reduce of 3 float32 on stream 77"], [0.5] * 3, "host waits for stream 77", "AbortedError")
    assert run_simulated(BEGIN + code) == [str(expected)] * 2

"""PyTorch's side of `allreduce.py` and `scaling.py`: all-reduces, and ResNet-50 under DistributedDataParallel.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/torch_parallel.py allreduce --sizes 4096
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/torch_parallel.py train --batch 256

A process for each GPU, or on machines without one each a CPU process over gloo. Rank 0 prints a line of JSON for each
figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
TOGETHER = 20
"""All-reduces between two looks at the clock, as in `caffepy bench allreduce`."""
WARM_UP, SAMPLES = 5, 20
GROUPS = 5


def synchronize() -> None:
    """Wait for the GPU."""
    if CUDA:
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], Any], samples: int) -> float:
    """The median of `work` on the slowest rank."""
    times = []
    for index in range(WARM_UP + samples):
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        work()
        synchronize()
        if index >= WARM_UP:
            times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device="cuda" if CUDA else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def say(**values: Any) -> None:
    """Print a figure on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)


def time_all_reduces(sizes: list[int]) -> None:
    """Eagerly, and on GPUs replayed from a CUDA graph as well."""
    for size in sizes:
        array = torch.ones(size // 4, device="cuda" if CUDA else "cpu")

        def several(array: torch.Tensor = array) -> None:
            for _ in range(TOGETHER):
                dist.all_reduce(array, dist.ReduceOp.AVG if CUDA else dist.ReduceOp.SUM)

        say(size=size, mode="eager", seconds=median_seconds(several, SAMPLES) / TOGETHER)
        if CUDA:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                several()
            say(size=size, mode="graph", seconds=median_seconds(graph.replay, SAMPLES) / TOGETHER)
            del graph


def train(batch: int, iterations: int, half: bool) -> None:
    """ResNet-50, channels last, synthetic images on the device, SGD with momentum and weight decay."""
    import torchvision
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device("cuda" if CUDA else "cpu")
    torch.backends.cudnn.benchmark = True
    net: Any = torchvision.models.resnet50().to(device).to(memory_format=torch.channels_last)
    if dist.get_world_size() > 1:
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimiser = torch.optim.SGD(net.parameters(), 1e-3, 0.9, weight_decay=1e-4)
    images = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)

    def group() -> None:
        for _ in range(iterations):
            with torch.autocast(device.type, torch.float16 if CUDA else torch.bfloat16, enabled=half):
                loss = cross_entropy(net(images), labels)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=False)

    seconds = median_seconds(group, GROUPS) / iterations
    say(mode="ddp", milliseconds=seconds * 1e3, images_per_second=batch * dist.get_world_size() / seconds)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("allreduce", "train"))
    parser.add_argument("--sizes", default="4096,4194304", help="of the arrays, in bytes")
    parser.add_argument("--batch", type=int, default=256, help="images of a device")
    parser.add_argument("--iterations", type=int, default=10, help="in each of five groups, after as many to warm up")
    parser.add_argument("--type", choices=("FLOAT", "FLOAT16"), default="FLOAT16")
    arguments = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    if arguments.what == "allreduce":
        time_all_reduces([int(size) for size in arguments.sizes.split(",")])
    else:
        train(arguments.batch, arguments.iterations, arguments.type == "FLOAT16")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

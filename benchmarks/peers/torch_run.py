"""PyTorch's side: a process that reads a job as JSON, measures or compares a described net, and prints JSON.

A job is one line: the description, a device (cpu, gpu), a dtype (FLOAT, FLOAT16, BFLOAT16), a mode, `quick`, and the
number of `turns` that a `Side` asks for. Modes are words:
"plain" (layout N, C, H, W) or else channels last; "graph" for one CUDA graph; "compile" for `torch.compile`, for
inference on a GPU with `reduce-overhead`; neither of the two runs eagerly. Training is forward, loss, backward and SGD
with momentum and weight decay, in halves with autocast. On a GPU products are TF32 and `cudnn.benchmark` is on.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from processes import alone, measure_job, repeated

from peers.torch_net import Home, build

GIB = 2**30
HALVES = {"FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}


def made(shape: list[int], kind: str) -> Any:
    """Numbers of an input."""
    if kind.startswith("ints:"):
        return torch.randint(int(kind[5:]), shape)
    if kind == "begins":
        return torch.ones(shape)
    if kind.startswith("regions:"):
        return regions(shape, [int(number) for number in kind.split(":")[1:]])
    if kind != "boxes":
        return torch.rand(shape) if kind == "unit" else torch.randn(shape)
    low = torch.rand(*shape[:3], 2) * 0.6
    high = low + 0.1 + 0.3 * torch.rand(*shape[:3], 2)
    return torch.cat(
        (
            torch.zeros(*shape[:3], 1),
            torch.randint(1, 21, (*shape[:3], 1)),
            low[..., :1] * 0,
            low,
            high,
            low[..., :1] * 0,
        ),
        3,
    )


def regions(shape: list[int], sizes: list[int]) -> Any:
    """Rows of image, left, top, right, bottom in pixels."""
    images, height, width = sizes
    low = torch.rand(shape[0], 2) * 0.6
    corners = torch.cat((low, low + 0.05 + 0.3 * torch.rand(shape[0], 2)), 1) * torch.tensor([width, height] * 2)
    return torch.cat((torch.randint(0, images, (shape[0], 1)), corners.round()), 1)


def placed(tensor: Any, device: str, last: bool, half: Any) -> Any:
    """A tensor on the device, in its layout and dtype."""
    tensor = tensor.to(device)
    if half is not None and tensor.is_floating_point():
        tensor = tensor.to(half)
    return tensor.to(memory_format=torch.channels_last) if last and tensor.dim() == 4 else tensor


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], Any] = graph.replay
    return replay


def training(net: Any, values: list[Any], mode: str, half: Any, device: str) -> Callable[[], Any]:
    """A call that makes one iteration."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    rule = torch.optim.SGD(parameters, lr=1e-9, momentum=0.9, weight_decay=5e-4, fused=True)
    compute = torch.compile(net) if "compile" in mode else net

    def iteration() -> None:
        with torch.autocast(device, half) if half is not None else contextlib.nullcontext():
            loss = compute(*values)
        loss.backward()
        rule.step()
        rule.zero_grad()

    return captured(iteration) if "graph" in mode else iteration


def inference(net: Any, values: list[Any], mode: str, device: str) -> Callable[[], Any]:
    """A call that makes one pass."""
    if "graph" in mode:
        return captured(lambda: net(*values))
    if "compile" in mode:
        net = torch.compile(net, mode="reduce-overhead" if device == "cuda" else "default")
    return lambda: net(*values)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds and memory of what the job says."""
    description, mode, device = job["description"], job["mode"], "cuda" if job["device"] == "gpu" else "cpu"
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = True
    if job.get("threads"):
        torch.set_num_threads(job["threads"])
    net, _ = build(description)
    half, train, last = HALVES.get(job["dtype"]), description["train"], "plain" not in mode
    with alone(job.get("lock", ""), job.get("limit", 280)):
        begin = time.perf_counter()
        net = net.train(train).to(device)
        net = net.to(memory_format=torch.channels_last) if last else net
        net = net if train or half is None else net.to(half)
        kept = None if train else half
        values = [placed(made(*each), device, last, kept) for each in description["inputs"].values()]
        wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        with contextlib.nullcontext() if train else torch.inference_mode():
            run = training(net, values, mode, half, device) if train else inference(net, values, mode, device)
            run()
            wait()
            first = time.perf_counter() - begin
            for _ in range(1 if device == "cpu" else 4):
                run()
            wait()
            ready = time.perf_counter() - begin
            milliseconds = measure_job(repeated(run, wait), job)
    if device == "cpu":
        gib = held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    else:
        gib, held = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    return {"ms": milliseconds, "gib": gib, "held": held, "first": first, "ready": ready}


# -- the same numbers -------------------------------------------------------------------------------------


class Store:
    """Arrays of a file of float32 numbers, by name."""

    def __init__(self, folder: str) -> None:
        self.index = json.loads((Path(folder) / "index.json").read_text())
        self.numbers = torch.frombuffer(bytearray((Path(folder) / "numbers").read_bytes()), dtype=torch.float32)

    def __call__(self, name: str) -> Any:
        offset, shape = self.index[name]
        count = 1
        for length in shape:
            count *= length
        return self.numbers[offset : offset + count].view(shape)


def error(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-20))


def distance(found: Any, wanted: Any) -> float:
    """The norm of the difference over the norm."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """Errors of PyTorch's outputs, loss and gradients, with our weights and inputs."""
    description, store = job["description"], Store(job["folder"])
    net, homes = build(description)
    with torch.no_grad():
        for key, home in homes.items():
            home.tensor[home.part].copy_(home.order(store(f"parameter {key}")))
    net.train(description["train"])
    values = []
    for name, (_, kind) in description["inputs"].items():
        values.append(store(f"input {name}").long() if kind.startswith("ints") else store(f"input {name}"))
    if not description["train"]:
        with torch.inference_mode():
            outputs = dict(zip(description["outputs"], net(*values), strict=True))
        return {"output": max(error(value, store(f"output {name}")) for name, value in outputs.items())}
    loss = net(*values)
    loss.backward()
    gradients = {key: distance_of(home, store(f"gradient {key}")) for key, home in homes.items() if not home.frozen}
    worst = max(gradients, key=lambda key: gradients[key])
    return {
        "loss": error(loss.detach(), store("loss").view(())),
        "gradients": statistics.median(gradients.values()),
        "worst gradient": gradients[worst],
        "of": worst,
    }


def distance_of(home: Home, wanted: Any) -> float:
    """Of a parameter's gradient; biases before a batch normalisation have none but rounding."""
    if home.tensor.grad is None:  # nothing reads what it computes
        return float(wanted.norm())
    wanted, found = home.order(wanted), home.tensor.grad[home.part]
    return distance(found, wanted) if float(wanted.abs().max()) > 1e-7 else 0.0


def main() -> None:
    """Do the job on the standard input."""
    job = json.loads(sys.stdin.readline())
    print(json.dumps(compare(job) if "folder" in job else run_job(job)))


if __name__ == "__main__":
    main()

"""Training on the CPU: caffepy's time and memory beside PyTorch's, taken in the same run.

    python benchmarks/cpu_train.py [--torch /path/to/python] [--threads 2] [--rounds 3] [lenet mobilenet ...]

A whole iteration each: forward, loss, backward, SGD with momentum and weight decay, on synthetic data held in memory.
caffepy runs the nets in models/, its data layers exchanged for Input layers; PyTorch (2.x, oneDNN) runs the same nets
in both of its layouts, of which the faster counts. Every side has a process of its own, in turn, several rounds; the
figure is the median over all groups of iterations, the memory the process's largest resident set. CPU time is given
too, as it suffers less from whatever else the machine does; both sides' idle threads spin for a while and count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """A net to train.

    Args:
        prototxt: the net, below models/.
        shape: a batch of images.
        classes: number of labels.
        group: iterations timed at a time.
        target: the ratio of times to reach.
    """

    prototxt: str
    shape: tuple[int, int, int, int]
    classes: int
    group: int
    target: float


CASES = {
    "lenet": Case("lenet/train_test.prototxt", (64, 1, 28, 28), 10, 40, 1.0),
    "cifar10_quick": Case("cifar10/quick_train_test.prototxt", (100, 3, 32, 32), 10, 8, 1.5),
    "caffenet": Case("caffenet/train_val.prototxt", (10, 3, 227, 227), 1000, 2, 0.75),
    "mobilenet": Case("mobilenet/train_val.prototxt", (16, 3, 224, 224), 1000, 1, 0.9),
    "resnet18": Case("resnet18/train_val.prototxt", (8, 3, 224, 224), 1000, 1, 0.9),
    "resnet50": Case("resnet50/train_val.prototxt", (8, 3, 224, 224), 1000, 1, 0.9),
}
SIDES = ("caffepy", "torch", "torch_last")
RATE, MOMENTUM, DECAY = 0.001, 0.9, 0.0005


# -- caffepy --------------------------------------------------------------------------------------------------


def caffepy_step(case: Case, threads: int) -> Callable[[], Any]:
    """One iteration of caffepy's solver on data that is there already."""
    import numpy as np

    from caffepy.backend import create_backend
    from caffepy.formats.load import read_net
    from caffepy.formats.proto import caffe_pb2
    from caffepy.training.solver import create_solver

    net = read_net(ROOT / "models" / case.prototxt)
    layers = [layer for layer in net.layer if layer.type != "Data"]
    del net.layer[:]
    source = net.layer.add(name="data", type="Input", top=["data", "label"])
    source.input_param.shape.add(dim=case.shape)
    source.input_param.shape.add(dim=case.shape[:1])
    net.layer.extend(layers)
    param = caffe_pb2.SolverParameter(
        net_param=net,
        base_lr=RATE,
        lr_policy="fixed",
        momentum=MOMENTUM,
        weight_decay=DECAY,
        max_iter=10**6,
        random_seed=1,
        type="SGD",
    )
    backend = create_backend(None, threads)
    backend.activate().__enter__()
    solver = create_solver(param, backend)
    random = np.random.default_rng(0)
    backend.from_host(random.standard_normal(case.shape, dtype=np.float32), solver.net.blobs["data"].data)
    backend.from_host(random.integers(0, case.classes, case.shape[0]), solver.net.blobs["label"].data)
    return lambda: solver.step(1)


# -- PyTorch --------------------------------------------------------------------------------------------------


def torch_normalised(inputs: int, outputs: int, kernel: int, stride: int = 1, group: int = 1) -> list[Any]:
    """A convolution that keeps the image's size but for the stride, and batch normalisation."""
    from torch import nn

    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=group, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def torch_mobilenet() -> Any:
    """MobileNet v1."""
    from torch import nn

    layers, channels = [*torch_normalised(3, 32, 3, 2), nn.ReLU(inplace=True)], 32
    blocks = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
    for outputs, stride in blocks:
        layers += [*torch_normalised(channels, channels, 3, stride, channels), nn.ReLU(inplace=True)]
        layers += [*torch_normalised(channels, outputs, 1), nn.ReLU(inplace=True)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


def torch_residual(inputs: int, outputs: int, stride: int, deep: bool) -> Any:
    """A block of ResNet-50 (`deep`) or of ResNet-18."""
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            width = outputs // 4
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
            shapes = shapes if deep else [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
            parts = [[*torch_normalised(*shape), nn.ReLU(inplace=True)] for shape in shapes]
            self.branch = nn.Sequential(*[layer for part in parts for layer in part][:-1])
            same = inputs == outputs and stride == 1
            self.shortcut = nn.Identity() if same else nn.Sequential(*torch_normalised(inputs, outputs, 1, stride))

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.branch(x) + self.shortcut(x), inplace=True)

    return Block()


def torch_resnet(blocks: tuple[int, ...], deep: bool) -> Any:
    """ResNet-50 (`deep`) or ResNet-18."""
    from torch import nn

    layers = [*torch_normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate(blocks):
        outputs = (256 if deep else 64) * 2**stage
        for index in range(count):
            layers.append(torch_residual(channels, outputs, 2 if stage and not index else 1, deep))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def torch_net(name: str) -> Any:
    """The net in PyTorch."""
    from torch import nn

    if name == "mobilenet":
        return torch_mobilenet()
    if name.startswith("resnet"):
        return torch_resnet((3, 4, 6, 3) if name == "resnet50" else (2, 2, 2, 2), name == "resnet50")

    def pool(kind: Any) -> Any:
        return kind(3, 2, ceil_mode=True)

    if name == "lenet":
        layers = [
            nn.Conv2d(1, 20, 5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(inplace=True),
            nn.Linear(500, 10),
        ]
    elif name == "cifar10_quick":
        layers = [
            nn.Conv2d(3, 32, 5, padding=2),
            pool(nn.MaxPool2d),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 5, padding=2),
            nn.ReLU(inplace=True),
            pool(nn.AvgPool2d),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(inplace=True),
            pool(nn.AvgPool2d),
            nn.Flatten(),
            nn.Linear(1024, 64),
            nn.Linear(64, 10),
        ]
    else:
        layers = [
            nn.Conv2d(3, 96, 11, 4),
            nn.ReLU(inplace=True),
            pool(nn.MaxPool2d),
            nn.LocalResponseNorm(5),
            nn.Conv2d(96, 256, 5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            pool(nn.MaxPool2d),
            nn.LocalResponseNorm(5),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            pool(nn.MaxPool2d),
            nn.Flatten(),
            nn.Linear(9216, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        ]
    return nn.Sequential(*layers)


def torch_step(name: str, threads: int, last: bool) -> Callable[[], Any]:
    """One iteration of PyTorch, channels last or not."""
    import torch
    from torch.nn.functional import cross_entropy

    case = CASES[name]
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    net, images = torch_net(name), torch.randn(*case.shape)
    labels = torch.randint(case.classes, case.shape[:1])
    if last:
        net, images = net.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)

    def step() -> float:
        optimiser.zero_grad()
        loss = cross_entropy(net(images), labels)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


# -- measuring ------------------------------------------------------------------------------------------------


def measure(name: str, side: str, threads: int, groups: int) -> dict[str, Any]:
    """Times of groups of iterations in milliseconds, and this process's largest memory in MiB."""
    case = CASES[name]
    step = caffepy_step(case, threads) if side == "caffepy" else torch_step(name, threads, side == "torch_last")
    for _ in range(3 if case.group > 1 else 1):
        step()
    wall, cpu = [], []
    for _ in range(groups):
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(case.group):
            step()
        wall.append((time.perf_counter() - start) / case.group * 1e3)
        cpu.append((time.process_time() - start_cpu) / case.group * 1e3)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"wall": wall, "cpu": cpu, "memory": memory}


def child(name: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    interpreter = sys.executable if side == "caffepy" else options.torch
    command = [interpreter, __file__, "--threads", str(options.threads), "--groups", str(options.groups)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if interpreter != sys.executable:
        environment.pop("PYTHONPATH")
    result = subprocess.run(
        [*command, "--side", side, name], env=environment, capture_output=True, text=True, timeout=600
    )
    if result.returncode:
        raise SystemExit(f"{side} failed on {name}:\n{result.stderr}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def compare(name: str, options: argparse.Namespace) -> None:
    """Print a line of the table for each side of one net."""
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    memory: dict[str, float] = dict.fromkeys(SIDES, 0.0)
    for _ in range(options.rounds):
        for side in SIDES:
            result = child(name, side, options)
            times[side] += result["wall"]
            cpu[side] += result["cpu"]
            memory[side] = max(memory[side], result["memory"])
    medians = {side: statistics.median(values) for side, values in times.items()}
    best = min(medians["torch"], medians["torch_last"])
    least = min(memory["torch"], memory["torch_last"])
    least_cpu = min(min(cpu["torch"]), min(cpu["torch_last"]))
    for side in SIDES:
        print(
            f"{name:14} {side:11} {medians[side]:9.2f} {min(times[side]):9.2f} {min(cpu[side]):9.2f} "
            f"{memory[side]:9.0f}"
        )
    print(
        f"{name:14} {'ratio':11} {medians['caffepy'] / best:9.2f} "
        f"{min(times['caffepy']) / min(times['torch'] + times['torch_last']):9.2f} "
        f"{min(cpu['caffepy']) / least_cpu:9.2f} {memory['caffepy'] / least:9.2f}   target {CASES[name].target}"
    )


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--torch", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--side", choices=SIDES, help="measure one side in this process and print JSON")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.nets[0], options.side, options.threads, options.groups)))
        return
    print(f"{'net':14} {'side':11} {'median ms':>9} {'least ms':>9} {'CPU ms':>9} {'MiB':>9}")
    for name in options.nets:
        compare(name, options)


if __name__ == "__main__":
    main()

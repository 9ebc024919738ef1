"""`caffepy plan` against training that was measured: one rank, and two with and without overlap, one CPU thread each.

    python benchmarks/plan.py [--nets lenet,cifar10_quick,caffenet] [--rounds 3] [--all-reduce FILE]

For each net, in turn and several rounds: training by one rank and by `mpirun -np 2`; a profile of one rank alone, and
profiles of two that run side by side without talking to each other. The link is calibrated by `caffepy bench
allreduce` (or by the table in --all-reduce). Each figure is the median of the rounds. Two predictions are made: from
the rank alone, as for a machine that is known by one device only, and from the rank beside another one, which knows
what cores do to each other that share caches, memory and clock. The difference between the two is not communication.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import text_format
from scaling import LIMIT, ROOT, images_per_second, mpirun, synthetic_net

from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.scaling.model import AUTO, Cluster, Link, fit_link, read_measurements
from caffepy.scaling.predict import Exchange, Prediction, predict
from caffepy.scaling.profile import Profile, read_profile

RANKS = 2
ITERATIONS = {"lenet": 150, "cifar10_quick": 50, "caffenet": 12}
"""Iterations of a training and of a profile; the last ones of a training are those that count."""
BATCHES = {"lenet": 64, "cifar10_quick": 100, "caffenet": 8}
"""Images of a rank."""
SIZES = "4K,16K,64K,256K,512K,1M,2M,4M,8M,16M,64M,128M,256M"
"""Of the arrays that are reduced to calibrate the link."""
PROGRAM = (sys.executable, "-m", "caffepy")
KINDS = ("1 rank", "2 ranks, no overlap", "2 ranks, overlap")


@dataclass
class Findings:
    """What the rounds found for one net.

    Args:
        rates: images/s of each kind of training.
        alone: profiles of one rank alone.
        beside: profiles of one rank beside another.
    """

    rates: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    alone: list[Profile] = field(default_factory=list)
    beside: list[Profile] = field(default_factory=list)


def environment() -> dict[str, str]:
    """Open MPI may run as root, and caffepy is that of this checkout."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": path}


def write_solver(folder: Path, name: str, overlap: bool) -> Path:
    """A solver whose ranks take a batch each; returns its path."""
    net = synthetic_net(folder, name, BATCHES[name], "FLOAT")
    param = SolverParameter(
        net_param=net,
        base_lr=0.001,
        lr_policy="fixed",
        momentum=0.9,
        weight_decay=0.0005,
        max_iter=ITERATIONS[name],
        random_seed=1,
        snapshot_after_train=False,
        type="SGD",
        layer_wise_reduce=overlap,
    )
    path = folder / f"{name}_{overlap}.prototxt"
    path.write_text(text_format.MessageToString(param))
    return path


def profiles(solver: Path, name: str, count: int) -> list[Profile]:
    """Profiles of `count` ranks that run side by side, each on a core of its own, and exchange nothing."""
    files = [solver.with_name(f"profile{index}.json") for index in range(count)]
    running = []
    for file, core in zip(files, sorted(os.sched_getaffinity(0)), strict=False):
        command = [*PROGRAM, "plan", "--solver", str(solver), "--cpu", "--threads", "1"]
        command += ["--measure", str(ITERATIONS[name]), "--save-profile", str(file)]
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        os.sched_setaffinity(process.pid, {core})
        running.append(process)
    for process in running:
        _, log = process.communicate(timeout=LIMIT)
        if process.returncode:
            raise SystemExit(f"caffepy plan failed:\n{log[-3000:]}")
    return [read_profile(file) for file in files[: len(running)]]


def measure(name: str, rounds: int, folder: Path) -> Findings:
    """Train and profile one net."""
    found = Findings()
    apart, overlapped = (write_solver(folder, name, overlap) for overlap in (False, True))
    train = [*PROGRAM, "train", "--cpu", "--threads", "1", "--solver"]
    several = [*mpirun(), "-np", str(RANKS), *train]
    commands = ([*train, str(apart)], [*several, str(apart)], [*several, str(overlapped)])
    for _ in range(rounds):
        for kind, command in zip(KINDS, commands, strict=True):
            found.rates[kind].append(images_per_second(command, folder))
        found.alone += profiles(overlapped, name, 1)
        found.beside += profiles(overlapped, name, RANKS)
    return found


def calibrate(folder: Path, table: Path | None) -> Link:
    """The link between the ranks, from a table or measured now."""
    if table is None:
        command = [*mpirun(), "-np", str(RANKS), *PROGRAM, "bench", "allreduce", "--cpu", "--sizes", SIZES]
        result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
        print(result.stdout)
        table = folder / "allreduce.txt"
        table.write_text(result.stdout)
    fit = fit_link(read_measurements(table), AUTO)
    print(f"the fitted line is off by {fit.error:.0%} at most")
    return fit.link


def median_prediction(found: Sequence[Profile], ranks: int, link: Link, overlap: bool) -> Prediction:
    """The prediction of the median rate that is made from several profiles."""
    cluster, exchange = Cluster(1, ranks, link, link), Exchange(overlap=overlap, contention=1.0)
    predictions = [predict(profile, cluster, exchange) for profile in found]
    return sorted(predictions, key=lambda prediction: prediction.images_per_second)[len(predictions) // 2]


def show(name: str, found: Findings, link: Link) -> list[tuple[str, float, float]]:
    """Print one net's lines; returns for each kind the two relative errors."""
    errors = []
    for kind, ranks, overlap in zip(KINDS, (1, RANKS, RANKS), (False, False, True), strict=True):
        rate = statistics.median(found.rates[kind])
        spread = (max(found.rates[kind]) - min(found.rates[kind])) / rate
        alone = median_prediction(found.alone, ranks, link, overlap)
        beside = median_prediction(found.beside, ranks, link, overlap) if ranks > 1 else alone
        pair = [prediction.images_per_second / rate - 1 for prediction in (alone, beside)]
        print(
            f"{name:14} {kind:20} {rate:9.1f} (spread {spread:4.0%})  {alone.images_per_second:9.1f} {pair[0]:+6.1%}"
            f"  {beside.images_per_second:9.1f} {pair[1]:+6.1%}  {beside.communication_ms:8.2f} ms",
            flush=True,
        )
        errors.append((kind, *pair))
    return errors


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nets", default=",".join(ITERATIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--all-reduce", type=Path, help="what 'caffepy bench allreduce' printed; else it is run")
    arguments = parser.parse_args()
    errors: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link = calibrate(folder, arguments.all_reduce)
        print(f"{'net':14} {'':20} measured, images/s        from one alone    from one beside    communication")
        for net in arguments.nets.split(","):
            errors += show(net, measure(net, arguments.rounds, folder), link)
    for kind in KINDS:
        alone, beside = ([abs(e[column]) for e in errors if e[0] == kind] for column in (1, 2))
        print(f"{kind}: largest error {max(alone):.1%} from one alone, {max(beside):.1%} from one beside another")


if __name__ == "__main__":
    main()

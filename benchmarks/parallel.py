"""Ranks against threads on the CPU: images/s of CaffeNet at one global batch, overlap of the exchange on and off.

    python benchmarks/parallel.py [--net caffenet] [--batch 64] [--iterations 12] [--rounds 3]

One process with two threads of one solver, against `mpirun -np 2` with one thread each. Figures are the medians of the
rounds, whose kinds alternate; each is that of a performance report, which leaves out the first two iterations.

Two cores of an AMD EPYC, Open MPI 5: at 32 images ranks reached 0.74 to 0.84 of the threads' rate when they summed by
MPI's non-blocking calls, 350 ms for 233 MiB where a blocking one takes 134, all of it the cores' own work. In memory
that both see they reach 0.96 with overlap and 0.97 without; what is left is that each rank updates all parameters by
itself. At 128 images it is 1.00 with overlap and 0.98 without, at 256 1.03 either way (medians of three rounds, which
spread by 6 to 8 %).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from google.protobuf import text_format
from scaling import NETS, images_per_second, mpirun, synthetic_net

from caffepy.formats.proto.caffe_pb2 import SolverParameter

RANKS = 2


def write_solver(folder: Path, name: str, batch: int, iterations: int, overlap: bool) -> Path:
    """A solver whose ranks take `batch` images each; returns its path."""
    param = SolverParameter(
        net_param=synthetic_net(folder, name, batch, "FLOAT"),
        base_lr=0.001,
        lr_policy="fixed",
        momentum=0.9,
        weight_decay=0.0005,
        max_iter=iterations,
        random_seed=1,
        snapshot_after_train=False,
        type="SGD",
        layer_wise_reduce=overlap,
    )
    path = folder / f"{name}_{batch}_{overlap}.prototxt"
    path.write_text(text_format.MessageToString(param))
    return path


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--net", default="caffenet", choices=NETS)
    parser.add_argument("--batch", type=int, default=64, help="images in an iteration of all ranks")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    program = [sys.executable, "-m", "caffepy", "train", "--cpu", "--threads"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def solver(ranks: int, overlap: bool) -> list[str]:
            batch = arguments.batch // ranks
            return ["--solver", str(write_solver(folder, arguments.net, batch, arguments.iterations, overlap))]

        commands = {
            "1 process, 2 threads": [*program, "2", *solver(1, True)],
            "2 ranks, overlap": [*mpirun(), "-np", "2", *program, "1", *solver(RANKS, True)],
            "2 ranks, no overlap": [*mpirun(), "-np", "2", *program, "1", *solver(RANKS, False)],
        }
        rates: dict[str, list[float]] = {kind: [] for kind in commands}
        for _ in range(arguments.rounds):
            for kind, command in commands.items():
                rates[kind].append(images_per_second(command, folder))
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    base = medians["1 process, 2 threads"]
    for kind, rate in medians.items():
        low, high = min(rates[kind]), max(rates[kind])
        print(f"{kind:22} {rate:9.1f} images/s  {rate / base:.3f}  ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()

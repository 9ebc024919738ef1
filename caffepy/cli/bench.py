"""`caffepy bench`: all-reduce benchmark with output as in nccl-tests."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caffepy.cli.options import Command
from caffepy.errors import RunError
from caffepy.utils.options import argument, gpus_option, option, positive, positive_seconds, switch

if TYPE_CHECKING:
    from caffepy.distributed.processes.world import World
    from caffepy.scaling.benchmark import BenchmarkOptions, Timing

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZES = "4K,64K,1M,16M,64M"


def size_list(text: str) -> tuple[int, ...]:
    """Parse sizes such as ``4K,1M`` to bytes."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", part.strip(), re.IGNORECASE)
        if match is None or int(match[1]) == 0:
            raise argparse.ArgumentTypeError(f"'{part}' is not a size such as 4K, 64KiB or 1M")
        sizes.append(int(match[1]) * _UNITS[match[2].upper()])
    return tuple(sizes)


@dataclass(kw_only=True)
class BenchCommand(Command):
    """Time all-reduces between devices.

    Time all-reduces with the communicators that training uses, and check their results.

      caffepy bench allreduce --gpus 0,1,2,3
      caffepy bench allreduce --cpu --cpu-solvers 2
      caffepy launch --nproc-per-node 2 -- bench allreduce --cpu

    Time is the median on the slowest device; algorithm bandwidth is size / time, bus bandwidth that times
    2 (n - 1) / n.
    """

    operation: str = argument("what to time", choices=("allreduce",))
    gpus: list[int] | str | None = gpus_option("GPUs; ranks of one host divide them (all)")
    cpu: bool = switch("arrays in host memory", excludes="device")
    cpu_solvers: int = option("threads of a CPU process", positive, default=1, flags=("--cpu-solvers", "--threads"))
    communicator: str | None = option(
        "communicator (default: nccl between GPUs, else mpi or without MPI tcp between ranks, local between threads)",
        choices=("nccl", "mpi", "tcp", "local"),
    )
    sizes: tuple[int, ...] = option(
        f"bytes of an array (default: {_SIZES})", size_list, "LIST", default=size_list(_SIZES)
    )
    iterations: int = option("measurements of each size", positive, default=20)
    dtype: str = option("type of the elements", default="float32", choices=("float32", "float64", "float16"))
    timeout: float = option("longest wait for one size", positive_seconds, default=300.0)

    def run(self) -> int:
        """Run the benchmark and print the table.

        Raises:
            ConfigError, DeviceError: devices and communicator do not match, or do not exist.
            RunError: a result is wrong.
            CaffepyError: another device failed.
        """
        from caffepy.distributed.processes.launcher import refuse_foreign_launcher
        from caffepy.distributed.processes.world import create_world
        from caffepy.scaling.benchmark import AllReduceBenchmark

        timings: list[Timing] = []
        with create_world() as world:
            world.run_on_all(lambda: refuse_foreign_launcher(world.rank, world.size))
            options = _options(self, world)

            def tell(timing: Timing) -> None:
                timings.append(timing)
                if world.rank == 0:
                    print(_row(timing, options.dtype), flush=True)

            bench = AllReduceBenchmark(world, options, tell)
            if world.rank == 0:
                print(_head(options, world.size), flush=True)
            bench.run()
        wrong = sum(timing.wrong for timing in timings)
        if wrong:
            if world.rank != 0:
                raise SystemExit(RunError.exit_status)
            raise RunError(f"{wrong} elements were wrong: the connection between the devices, or a device, is broken")
        return 0


def _options(args: BenchCommand, world: World) -> BenchmarkOptions:
    from caffepy.scaling.benchmark import BenchmarkOptions

    devices = None if args.cpu else _gpus(args.gpus, world)
    options = BenchmarkOptions(
        devices=devices,
        solvers=args.cpu_solvers,
        communicator=args.communicator or ("nccl" if devices is not None else world.transport),
        sizes=args.sizes,
        iterations=args.iterations,
        dtype=args.dtype,
        timeout=args.timeout,
    )
    world.run_on_all(lambda: options.check(world.size, world.transport))
    return options


def _gpus(requested: list[int] | str | None, world: World) -> list[int]:
    """Return this rank's share of the named GPUs, or of all."""
    from caffepy.distributed.placement import assign_gpus
    from caffepy.training.devices import check_gpus

    available = world.run_on_all(lambda: check_gpus(requested or "all"))
    devices = assign_gpus(world, available, named=requested is not None)
    assert devices is not None
    return devices


def _head(options: BenchmarkOptions, ranks: int) -> str:
    threads = len(options.local_devices)
    kind = "GPU" if options.devices is not None else "thread"
    shape = f"{ranks} rank{'s' * (ranks > 1)} of {threads} {kind}{'s' * (threads > 1)}"
    over = f"# all-reduce over {ranks * threads} devices"
    title = f"{over}: {options.communicator}, {shape}, median of {options.iterations}"
    names = ("size (B)", "elements", "dtype", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "wrong")
    return f"{title}\n#" + "  ".join(f"{name:>12}" for name in names)


def _row(timing: Timing, dtype: str) -> str:
    algorithm, bus = timing.algorithm_bandwidth / 1e9, timing.bus_bandwidth / 1e9
    cells = (timing.size, timing.count, dtype, f"{timing.seconds * 1e6:.2f}", f"{algorithm:.3f}", f"{bus:.3f}")
    return " " + "  ".join(f"{cell:>12}" for cell in (*cells, timing.wrong))

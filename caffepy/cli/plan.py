"""`caffepy plan`: predict the training speed on more devices."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from caffepy.cli.options import DeviceOptions, ReadsNets, devices_option, overwrite_option
from caffepy.errors import ConfigError, DataError, printable
from caffepy.utils.options import fraction, option, positive, positive_number, record_shape, same_option, switch

if TYPE_CHECKING:
    from caffepy.scaling.model import Cluster, Link
    from caffepy.scaling.predict import Exchange
    from caffepy.scaling.profile import Profile

T = TypeVar("T")


_SOURCE = "source of the times"
_CLUSTER = "the cluster"
_EXCHANGE = "the exchange of gradients"
_OUTPUT = "output"
ITERATIONS = 20
"""Default number of measured iterations."""
ALGORITHMS = ("auto", "ring", "tree", "hierarchical", "recursive-doubling", "recursive-halving")
WIRE_BYTES = {"none": 4, "fp16": 2, "bf16": 2}
"""Bytes per transferred gradient element, by `caffepy train --compression`."""


def _parsed_by(name: str) -> Callable[[str], object]:
    """Return a function of caffepy.scaling.model as an argparse type; the module is imported on first use."""

    def parse(text: str) -> object:
        from caffepy.scaling import model

        try:
            return getattr(model, name)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _numbers(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


@dataclass(kw_only=True)
class PlanCommand(DeviceOptions, ReadsNets):
    """Predict training on more devices.

    Predict step time, exposed communication and efficiency of data-parallel training at a fixed batch per device. The
    net is timed here, all-reduces follow an alpha-beta model, and their overlap with the backward pass is simulated.

      caffepy plan --solver solver.prototxt --nodes 1,8,64,512 --gpus-per-node 8 --network 400Gb --links nvlink
      caffepy plan --solver solver.prototxt --gpu 0 --save-profile h200.json
      caffepy plan --profile h200.json --nodes 1,2,4 --gpus-per-node 8 --network 8x400Gb --plot scaling.png
      caffepy plan --solver solver.prototxt --cpu --threads 1 --gpus-per-node 2 --calibrate allreduce.txt
    """

    solver: Path | None = option("the solver's prototxt (or else --profile)", Path)
    measure: int | None = option(
        f"time N training iterations here (default, with N = {ITERATIONS})", positive, group=_SOURCE, excludes="measure"
    )
    profile: Path | None = option(
        "a file of --save-profile, from this or another machine", Path, group=_SOURCE, excludes="measure"
    )
    backward_ms: float | None = option(
        "a known backward pass, divided among the layers", positive_number, "MS", group=_SOURCE, excludes="measure"
    )
    forward_ms: float | None = option(
        "with --backward-ms: the forward pass (half of it)", positive_number, "MS", group=_SOURCE
    )
    batch: int | None = option("batch_size per device instead of the net's", positive, group=_SOURCE)
    shape: tuple[int, ...] | None = option(
        "train on synthetic records of this shape; needs no data", record_shape, group=_SOURCE
    )
    gpus: list[int] | str | None = devices_option("default: the solver's solver_mode", group=_SOURCE)
    cpu: bool = same_option(DeviceOptions, "cpu", group=_SOURCE)
    threads: int | None = same_option(DeviceOptions, "threads", group=_SOURCE)
    math: str = same_option(DeviceOptions, "math", group=_SOURCE)
    nodes: list[int] = option(
        "numbers of nodes, separated by commas (1)", _numbers, "LIST", default=[1], group=_CLUSTER
    )
    devices: int = option(
        "devices per node: GPUs, or CPU solvers",
        positive,
        "G",
        default=1,
        flags=("--gpus-per-node", "--ranks-per-node"),
        group=_CLUSTER,
    )
    network: float | None = option(
        "bandwidth per node: 400Gb, 50GB, 8x400Gb", _parsed_by("parse_bandwidth"), "B", group=_CLUSTER
    )
    latency: float | None = option("latency of the network (10us)", _parsed_by("parse_latency"), "T", group=_CLUSTER)
    links: Link | None = option(
        "links inside a node: nvlink, pcie, shm, or GB/s", _parsed_by("parse_link"), "L", group=_CLUSTER
    )
    link_latency: float | None = option("latency inside a node", _parsed_by("parse_latency"), "T", group=_CLUSTER)
    calibrate: Path | None = option("output of 'caffepy bench allreduce' in one node", Path, group=_CLUSTER)
    calibrate_network: Path | None = option("the same for several nodes with one device each", Path, group=_CLUSTER)
    no_overlap: bool = switch("one all-reduce, after the backward pass", group=_EXCHANGE)
    bucket_mb: float | None = option(
        "bucket size in MiB instead of reduce_buckets", positive_number, "MB", group=_EXCHANGE
    )
    compression: str = option(
        "compression of gradients, as in train", default="none", choices=tuple(WIRE_BYTES), group=_EXCHANGE
    )
    algorithm: str = option(
        "all-reduce algorithm; auto is the fastest", default="auto", choices=ALGORITHMS, group=_EXCHANGE
    )
    contention: float | None = option(
        "share of a device that communication takes from computation (0 on GPUs, 1 on the CPU)",
        fraction,
        "F",
        group=_EXCHANGE,
    )
    save_profile: Path | None = option("write the times as JSON for --profile", Path, group=_OUTPUT)
    csv: Path | None = option("write the table as CSV too", Path, group=_OUTPUT)
    plot: Path | None = option("draw it too (needs matplotlib)", Path, "FILE.png", group=_OUTPUT)
    overwrite: bool = overwrite_option(group=_OUTPUT)

    def run(self) -> int:
        """Print the table to stdout.

        Raises:
            ConfigError: the options conflict, or a file to write exists.
            MissingExtraError: --plot without matplotlib.
            CaffepyError: files, data or device cannot be used.
        """
        _check_options(self)
        from caffepy.scaling.predict import describe, format_table, load_figure, sweep, write_csv, write_plot
        from caffepy.scaling.profile import write_profile
        from caffepy.utils.files import check_output

        if self.plot:
            load_figure()  # fail before minutes of measurement
        read = [
            path for path in (self.solver, self.profile, self.calibrate, self.calibrate_network) if path is not None
        ]
        for path in filter(None, (self.save_profile, self.csv, self.plot)):
            check_output(path, self.overwrite, read)
        profile = _profile(self).fitted()
        if self.save_profile:
            write_profile(self.save_profile, profile)
        cluster, exchange = _cluster(self, profile.on_cpu), _exchange(self, profile.on_cpu)
        predictions = sweep(profile, self.nodes, cluster, exchange)
        for line in (*describe(profile, cluster, exchange), "", *format_table(predictions)):
            print(printable(line))
        if self.csv:
            write_csv(self.csv, predictions)
        if self.plot:
            write_plot(self.plot, predictions, next(describe(profile, cluster, exchange)))
        return 0


def _check_options(args: PlanCommand) -> None:
    if args.solver is None and args.profile is None:
        raise ConfigError("plan needs --solver or --profile: caffepy plan --solver solver.prototxt")
    if args.forward_ms is not None and args.backward_ms is None:
        raise ConfigError("--forward-ms needs --backward-ms; give both")
    if args.no_overlap and args.bucket_mb is not None:
        raise ConfigError("--no-overlap reduces all gradients at once; leave --bucket-mb out")
    if max(args.nodes) > 1 and args.network is None and args.calibrate_network is None:
        raise ConfigError("several --nodes need the network's bandwidth, e.g. --network 400Gb, or --calibrate-network")
    for calibrated, flag, others in (
        (args.calibrate, "--calibrate", ("links", "link_latency")),
        (args.calibrate_network, "--calibrate-network", ("network", "latency")),
    ):
        if calibrated is not None and any(getattr(args, other) is not None for other in others):
            names = " and ".join(f"--{other.replace('_', '-')}" for other in others)
            raise ConfigError(f"{flag} measures {names}; leave them out")
    for flag, value in (("--batch", args.batch), ("--shape", args.shape)):
        if args.profile is not None and value is not None:
            raise ConfigError(f"{flag} is for measuring; a profile has its batch already")


def _profile(args: PlanCommand) -> Profile:
    from caffepy.scaling.profile import read_profile

    if args.profile is None:
        return _make_profile(args)
    profile = read_profile(args.profile)
    if args.solver is None:
        return profile
    from caffepy.scaling.profile import with_settings_of

    return with_settings_of(args.solver, profile, str(args.profile))


def _make_profile(args: PlanCommand) -> Profile:
    from caffepy.backend import create_backend
    from caffepy.cli.nets import train_devices
    from caffepy.formats.proto.caffe_pb2 import SolverParameter
    from caffepy.scaling.profile import estimate_profile, measure_profile, read_subject

    assert args.solver is not None  # without a profile
    subject = read_subject(args.solver, args.batch, args.shape)
    gpu_mode = subject.solver.solver_mode == SolverParameter.GPU
    try:
        if args.backward_ms is not None:
            on_cpu = args.cpu or (args.gpus is None and not gpu_mode)
            return estimate_profile(subject, args.forward_ms or args.backward_ms / 2, args.backward_ms, on_cpu)
        devices = train_devices(args, gpu_mode, subject.solver, str(args.solver))
        backend = create_backend(devices[0] if devices else None, args.threads, args.math)
        try:
            with backend.activate():
                return measure_profile(subject, backend, args.measure or ITERATIONS)
        finally:
            backend.close()
    except DataError as error:
        if args.shape is not None:
            raise
        raise DataError(f"{error}; or give the shape of one record, e.g. --shape 3,224,224") from error


def _cluster(args: PlanCommand, on_cpu: bool) -> Cluster:
    from caffepy.scaling.model import LINKS, NETWORK_LATENCY, Cluster, Link

    inside = _calibrated(args, args.calibrate, between=False) or args.links or LINKS["shm" if on_cpu else "nvlink"]
    between = _calibrated(args, args.calibrate_network, between=True)
    between = between or Link(NETWORK_LATENCY, args.network or math.inf)
    inside = replace(inside, latency=_given(args.link_latency, inside.latency))
    between = replace(between, latency=_given(args.latency, between.latency))
    return Cluster(1, args.devices, inside, between)


def _calibrated(args: PlanCommand, path: Path | None, between: bool) -> Link | None:
    """Return the link fitted to measured all-reduces."""
    if path is None:
        return None
    from caffepy.scaling.model import fit_link, read_measurements

    fit = fit_link(read_measurements(path), args.algorithm, between)
    print(f"{path}: the error of the fit is at most {fit.error:.0%}")
    return fit.link


def _given(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _exchange(args: PlanCommand, on_cpu: bool) -> Exchange:
    from caffepy.scaling.predict import Exchange

    return Exchange(
        overlap=False if args.no_overlap else None,
        bucket_bytes=None if args.bucket_mb is None else args.bucket_mb * 2**20,
        wire_bytes=WIRE_BYTES[args.compression],
        algorithm=args.algorithm,
        contention=_given(args.contention, 1.0 if on_cpu else 0.0),
    )

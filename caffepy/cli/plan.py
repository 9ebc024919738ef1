"""`caffepy plan`: predict the training speed on more devices."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from caffepy.cli.options import Parser, add_device_options, add_overwrite_flag
from caffepy.errors import ConfigError, DataError, printable
from caffepy.utils.options import positive, positive_number, record_shape

if TYPE_CHECKING:
    from caffepy.scaling.model import Cluster, Link
    from caffepy.scaling.predict import Exchange
    from caffepy.scaling.profile import Profile

T = TypeVar("T")

_DESCRIPTION = """\
Predict step time, exposed communication and efficiency of data-parallel training at a fixed batch per device.
The net is timed here, all-reduces follow an alpha-beta model, and their overlap with the backward pass is simulated.

  caffepy plan --solver solver.prototxt --nodes 1,8,64,512 --gpus-per-node 8 --network 400Gb --links nvlink
  caffepy plan --solver solver.prototxt --gpu 0 --save-profile h200.json
  caffepy plan --profile h200.json --nodes 1,2,4 --gpus-per-node 8 --network 8x400Gb --plot scaling.png
  caffepy plan --solver solver.prototxt --cpu --threads 1 --gpus-per-node 2 --calibrate allreduce.txt"""

ITERATIONS = 20
"""Default number of measured iterations."""
ALGORITHMS = ("auto", "ring", "tree", "hierarchical", "recursive-doubling", "recursive-halving")
WIRE_BYTES = {"none": 4, "fp16": 2, "bf16": 2}
"""Bytes per transferred gradient element, by `caffepy train --compression`."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("plan", help="predict training on more devices", description=_DESCRIPTION)
    parser.add_argument("--solver", type=Path, metavar="FILE", help="the solver's prototxt (or else --profile)")
    _add_source(parser.add_argument_group("source of the times"))
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_exchange(parser.add_argument_group("the exchange of gradients"))
    output = parser.add_argument_group("output")
    output.add_argument("--save-profile", type=Path, metavar="FILE", help="write the times as JSON for --profile")
    output.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV too")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it too (needs matplotlib)")
    add_overwrite_flag(output)


def _add_source(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--measure",
        type=positive,
        metavar="N",
        help=f"time N training iterations here (default, with N = {ITERATIONS})",
    )
    source.add_argument(
        "--profile", type=Path, metavar="FILE", help="a file of --save-profile, from this or another machine"
    )
    source.add_argument(
        "--backward-ms", type=positive_number, metavar="MS", help="a known backward pass, divided among the layers"
    )
    group.add_argument(
        "--forward-ms", type=positive_number, metavar="MS", help="with --backward-ms: the forward pass (half of it)"
    )
    group.add_argument("--batch", type=positive, metavar="N", help="batch_size per device instead of the net's")
    group.add_argument(
        "--shape", type=record_shape, metavar="C,H,W", help="train on synthetic records of this shape; needs no data"
    )
    add_device_options(group, "default: the solver's solver_mode")


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--nodes", type=_numbers, default=[1], metavar="LIST", help="numbers of nodes, separated by commas (1)"
    )
    group.add_argument(
        "--gpus-per-node",
        "--ranks-per-node",
        dest="devices",
        type=positive,
        default=1,
        metavar="G",
        help="devices per node: GPUs, or CPU solvers (1)",
    )
    group.add_argument(
        "--network", type=_parsed_by("parse_bandwidth"), metavar="B", help="bandwidth per node: 400Gb, 50GB, 8x400Gb"
    )
    group.add_argument("--latency", type=_parsed_by("parse_latency"), metavar="T", help="latency of the network (10us)")
    group.add_argument(
        "--links", type=_parsed_by("parse_link"), metavar="L", help="links inside a node: nvlink, pcie, shm, or GB/s"
    )
    group.add_argument("--link-latency", type=_parsed_by("parse_latency"), metavar="T", help="latency inside a node")
    group.add_argument("--calibrate", type=Path, metavar="FILE", help="output of 'caffepy bench allreduce' in one node")
    group.add_argument(
        "--calibrate-network", type=Path, metavar="FILE", help="the same for several nodes with one device each"
    )


def _add_exchange(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-overlap", action="store_true", help="one all-reduce, after the backward pass")
    group.add_argument(
        "--bucket-mb", type=positive_number, metavar="MB", help="bucket size in MiB instead of reduce_buckets"
    )
    group.add_argument(
        "--compression", choices=tuple(WIRE_BYTES), default="none", help="compression of gradients, as in train (none)"
    )
    group.add_argument(
        "--algorithm", choices=ALGORITHMS, default="auto", help="all-reduce algorithm (auto: the fastest)"
    )
    group.add_argument(
        "--contention",
        type=_fraction,
        metavar="F",
        help="share of a device that communication takes from computation (0 on GPUs, 1 on the CPU)",
    )


# -- values -----------------------------------------------------------------------------------------------


def _parsed_by(name: str) -> Callable[[str], object]:
    """Return a function of caffepy.scaling.model as an argparse type; the module is imported on first use."""

    def parse(text: str) -> object:
        from caffepy.scaling import model

        try:
            return getattr(model, name)(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 1")
    return value


def _numbers(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


# -- the command ------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Print the table to stdout.

    Raises:
        ConfigError: the options conflict, or a file to write exists.
        MissingExtraError: --plot without matplotlib.
        CaffepyError: files, data or device cannot be used.
    """
    _check_options(args)
    from caffepy.scaling.predict import describe, format_table, load_figure, sweep, write_csv, write_plot
    from caffepy.scaling.profile import write_profile
    from caffepy.utils.files import check_output

    if args.plot:
        load_figure()  # fail before minutes of measurement
    read = [path for path in (args.solver, args.profile, args.calibrate, args.calibrate_network) if path is not None]
    for path in filter(None, (args.save_profile, args.csv, args.plot)):
        check_output(path, args.overwrite, read)
    profile = _profile(args).fitted()
    if args.save_profile:
        write_profile(args.save_profile, profile)
    cluster, exchange = _cluster(args, profile.on_cpu), _exchange(args, profile.on_cpu)
    predictions = sweep(profile, args.nodes, cluster, exchange)
    for line in (*describe(profile, cluster, exchange), "", *format_table(predictions)):
        print(printable(line))
    if args.csv:
        write_csv(args.csv, predictions)
    if args.plot:
        write_plot(args.plot, predictions, next(describe(profile, cluster, exchange)))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if args.solver is None and args.profile is None:
        raise ConfigError("plan needs --solver or --profile: caffepy plan --solver solver.prototxt")
    if args.forward_ms is not None and args.backward_ms is None:
        raise ConfigError("--forward-ms needs --backward-ms; give both")
    if args.no_overlap and args.bucket_mb is not None:
        raise ConfigError("--no-overlap reduces all gradients at once; leave --bucket-mb out")
    if max(args.nodes) > 1 and args.network is None and args.calibrate_network is None:
        raise ConfigError("several --nodes need the network's bandwidth, e.g. --network 400Gb, or --calibrate-network")
    for calibrated, option, others in (
        (args.calibrate, "--calibrate", ("links", "link_latency")),
        (args.calibrate_network, "--calibrate-network", ("network", "latency")),
    ):
        if calibrated is not None and any(getattr(args, other) is not None for other in others):
            names = " and ".join(f"--{other.replace('_', '-')}" for other in others)
            raise ConfigError(f"{option} measures {names}; leave them out")
    for option, value in (("--batch", args.batch), ("--shape", args.shape)):
        if args.profile is not None and value is not None:
            raise ConfigError(f"{option} is for measuring; a profile has its batch already")


def _profile(args: argparse.Namespace) -> Profile:
    from caffepy.scaling.profile import read_profile

    if args.profile is None:
        return _make_profile(args)
    profile = read_profile(args.profile)
    if args.solver is None:
        return profile
    from caffepy.scaling.profile import with_settings_of

    return with_settings_of(args.solver, profile, str(args.profile))


def _make_profile(args: argparse.Namespace) -> Profile:
    from caffepy.backend import create_backend
    from caffepy.cli.nets import train_devices
    from caffepy.formats.proto.caffe_pb2 import SolverParameter
    from caffepy.scaling.profile import estimate_profile, measure_profile, read_subject

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


def _cluster(args: argparse.Namespace, on_cpu: bool) -> Cluster:
    from caffepy.scaling.model import LINKS, NETWORK_LATENCY, Cluster, Link

    inside = _calibrated(args, args.calibrate, between=False) or args.links or LINKS["shm" if on_cpu else "nvlink"]
    between = _calibrated(args, args.calibrate_network, between=True)
    between = between or Link(NETWORK_LATENCY, args.network or math.inf)
    inside = replace(inside, latency=_given(args.link_latency, inside.latency))
    between = replace(between, latency=_given(args.latency, between.latency))
    return Cluster(1, args.devices, inside, between)


def _calibrated(args: argparse.Namespace, path: Path | None, between: bool) -> Link | None:
    """Return the link fitted to measured all-reduces."""
    if path is None:
        return None
    from caffepy.scaling.model import fit_link, read_measurements

    fit = fit_link(read_measurements(path), args.algorithm, between)
    print(f"{path}: the error of the fit is at most {fit.error:.0%}")
    return fit.link


def _given(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def _exchange(args: argparse.Namespace, on_cpu: bool) -> Exchange:
    from caffepy.scaling.predict import Exchange

    return Exchange(
        overlap=False if args.no_overlap else None,
        bucket_bytes=None if args.bucket_mb is None else args.bucket_mb * 2**20,
        wire_bytes=WIRE_BYTES[args.compression],
        algorithm=args.algorithm,
        contention=_given(args.contention, 1.0 if on_cpu else 0.0),
    )

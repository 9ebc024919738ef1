"""Device selection from --gpu, --cpu and the solver's mode."""

from __future__ import annotations

import argparse
import logging

from caffepy.errors import DeviceError, MissingExtraError
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.training.devices import check_gpus

logger = logging.getLogger(__name__)


def shares_gpus(args: argparse.Namespace, gpu_mode: bool) -> bool:
    """Return whether the ranks of a host divide all visible GPUs, because none are named.

    Args:
        args: the command line: `gpus` and `cpu`.
        gpu_mode: whether the solver's `solver_mode` is GPU.
    """
    launcher = find_launcher()
    return launcher is not None and launcher.size != 1 and gpu_mode and args.gpus is None and not args.cpu


def train_devices(args: argparse.Namespace, gpu_mode: bool, solver: SolverParameter, origin: str) -> list[int] | None:
    """Return the GPUs for training, which the ranks of a host divide, or None for the CPU.

    Args:
        args: the command line: `gpus` and `cpu`.
        gpu_mode: whether the solver's `solver_mode` is GPU; used if the command line names no device.
        solver: whose `device_id` or list of them counts if the command line names no device.
        origin: the solver's file, for messages.

    Raises:
        DeviceError, MissingExtraError: a requested GPU is unavailable. There is no silent fallback to the CPU.
    """
    if args.cpu or (args.gpus is None and not gpu_mode):
        return None
    if args.gpus is not None:
        return check_gpus(args.gpus)
    try:
        named = list(solver.device_ids) or [solver.device_id]
        return check_gpus("all" if shares_gpus(args, gpu_mode) else named)
    except (DeviceError, MissingExtraError) as error:
        raise DeviceError(
            f"{origin} is for a GPU (solver_mode: GPU, also the default; --cpu trains on the CPU instead): {error}"
        ) from error


def single_device(args: argparse.Namespace) -> int | None:
    """Return the device of `test` and `time`: the first GPU named, else None for the CPU, as in Caffe.

    Raises:
        DeviceError, MissingExtraError: the GPU is unavailable.
    """
    if args.gpus is None:
        logger.info("Use CPU.")
        return None
    devices = check_gpus(args.gpus)
    if len(devices) > 1:
        logger.warning("this command runs on one device; of GPUs %s it takes %d", devices, devices[0])
    logger.info("Use GPU with device ID %d", devices[0])
    return devices[0]

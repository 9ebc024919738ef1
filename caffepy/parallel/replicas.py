"""Checks that all devices hold the same parameters: hashes of each device's are compared with the root's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import RunError
from caffepy.layers.normalization.batch_norm import STATISTICS
from caffepy.net import Net
from caffepy.net.parameters import Parameter

_HASH_BYTES = 6
"""Hashes travel as float64 numbers, which hold whole numbers of 53 bits."""
_MAX_NAMES = 4

Gather = Callable[[Sequence[int]], NDArray[np.float64]]
"""Makes a row for each device of the numbers that it is called with by all of them."""


def check_replicas(net: Net, names: Sequence[str], gather: Gather) -> None:
    """Compare the parameters of all devices; called by all of them, with no work pending on the device.

    BatchNorm's running statistics are not compared: they differ from device to device until they are averaged.

    Args:
        net: this device's.
        names: what messages call each device.
        gather: collects the devices' hashes.

    Raises:
        RunError: on all devices, if a device's parameters differ from the root's; names the first layer that differs.
    """
    parameters = _replicated(net)
    flat = net.backend.to_host(net.parameters.data)
    own = [_hash(flat[parameter.start : parameter.stop]) for parameter in parameters]
    whole = gather([_hash(np.array(own, np.uint64))])
    if (whole == whole[0]).all():
        return
    raise RunError(_describe(parameters, gather(own), names))


def _replicated(net: Net) -> list[Parameter]:
    """Parameters that are equal on all devices."""
    return [p for p in net.parameters.parameters if p.layer.type != "BatchNorm" or p.index >= STATISTICS]


def _hash(values: NDArray[Any]) -> int:
    if values.dtype.kind == "f" and np.isnan(values).any():  # NaNs have many bit patterns
        values = np.where(np.isnan(values), np.float32(np.nan), values)
    content = np.ascontiguousarray(values).data.cast("B")
    return int.from_bytes(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest(), "little")


def _describe(parameters: Sequence[Parameter], hashes: NDArray[np.float64], names: Sequence[str]) -> str:
    """The sentence about hashes that differ.

    Args:
        parameters: the net's that were compared.
        hashes: (devices, parameters).
        names: of the devices.
    """
    differs = hashes != hashes[0]
    others = [names[int(device)] for device in np.flatnonzero(differs.any(axis=1))]
    first = parameters[int(np.flatnonzero(differs.any(axis=0))[0])]
    listed = ", ".join(others[:_MAX_NAMES]) + (f" and {len(others) - _MAX_NAMES} more" * (len(others) > _MAX_NAMES))
    return (
        f"{listed} no longer {'has' if len(others) == 1 else 'have'} the parameters of {names[0]}: parameter "
        f"{first.index} of layer '{first.layer.name}' is the first of {int(differs.any(axis=0).sum())} that differ; go "
        "on from a snapshot before this iteration, and look at the memory of these machines if it happens again"
    )

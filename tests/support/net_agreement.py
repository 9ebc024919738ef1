"""How far the values of two nets are apart, and the parameters that both are given before."""

from __future__ import annotations

from typing import Any

import numpy as np
from wide_nets import Values

from caffepy.net import Net

Differences = dict[str, float]
"""How far one way is from another, by what and where, in proportion to the largest value."""

TOLERANCE = 2e-5


def give_parameters(net: Net, seed: int = 1) -> None:
    """Values such as training leaves: statistics that are not 0, variances that are not small."""
    generator = np.random.default_rng(seed)
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            values = blob.host_data()
            if layer.type == "BatchNorm" and index < 3:
                values = (
                    generator.normal(0, 0.3, blob.shape)
                    if index == 0
                    else generator.uniform(0.5, 2, blob.shape)
                    if index == 1
                    else np.ones(blob.shape)
                )
            elif blob.gradient_owner is blob:
                values = values + generator.normal(0, 0.05, blob.shape)
            net.backend.from_host(values.astype(np.float32), blob.data)


def distance(found: Any, wanted: Any) -> float:
    """The largest difference in proportion to the largest value; infinite where shapes or NaNs differ."""
    if np.shape(found) != np.shape(wanted) or not np.array_equal(np.isfinite(found), np.isfinite(wanted)):
        return np.inf
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.asarray(found, np.float64) - wanted)[np.isfinite(wanted)]
    return float(apart.max(initial=0) / max(np.abs(wanted[np.isfinite(wanted)]).max(initial=0), 1e-2))


def differences(found: Values, wanted: Values, where: str, limit: float | None = None) -> Differences:
    """Those beyond the limit, `TOLERANCE` by default; 0 wants the same bits."""
    limit = TOLERANCE if limit is None else limit
    apart = dict.fromkeys((f"{where}: {name}" for name in found.keys() ^ wanted.keys()), np.inf)
    for name in found.keys() & wanted.keys():
        same = np.array_equal(found[name], wanted[name], equal_nan=True)
        error = 0.0 if same else distance(np.asarray(found[name]), np.asarray(wanted[name]))
        if error > limit or (limit == 0 and not same):
            apart[f"{where}: {name}"] = error
    return apart

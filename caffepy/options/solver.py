"""How a solver runs its iterations and which snapshots it keeps; limits that other options start from."""

from __future__ import annotations

from dataclasses import dataclass

from caffepy.options.declaration import option
from caffepy.options.types import positive

MATH_MODES = ("fp32", "tf32")
"""How a GPU multiplies: in full float32, or on tensor cores, which round factors to ten bits of mantissa."""
TIMEOUT = 300.0
"""Longest wait for another device or rank, in seconds."""
MAX_SKIPPED = 50
"""Updates skipped in a row, because gradients are not finite, after which training ends."""

"""What decodes images."""
_ENGINE = "GPU engine"
KEEP_GROUP = "which snapshots stay"


@dataclass(frozen=True)
class ExecutionOptions:
    """How a solver's iterations are run on the device; results are the same to rounding with each."""

    eager: bool = option(False, "run layer by layer instead of replaying captured graphs", group=_ENGINE)
    fuse: bool = option(True, "compute groups of layers as one", group=_ENGINE)
    share: bool = option(True, "let blobs that are never needed at the same time share memory", group=_ENGINE)
    autotune: bool = option(
        True, "time the algorithms for each convolution on the GPU once and remember the fastest", group=_ENGINE
    )
    deterministic: bool = option(
        True,
        "the same bits in every run; without it BatchNorm in half precision takes its sums from convolutions that "
        "round differently each time, which is faster",
        group=_ENGINE,
    )


@dataclass(frozen=True)
class RetentionPolicy:
    """Which snapshots stay.

    Smaller scores are better for the tops of loss layers and for `loss`, larger for all others.
    """

    keep_last: int = option(
        0,
        "keep the K newest snapshots with this prefix, not all",
        parse=positive,
        metavar="K",
        group=KEEP_GROUP,
    )
    keep_best: str = option(
        "",
        "keep also the snapshot with the best SCORE, an output of a test net or 'loss'; implies --keep-last 1",
        parse=str,
        metavar="SCORE",
        group=KEEP_GROUP,
    )

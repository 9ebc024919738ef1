"""How a solver's iterations are run on the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExecutionOptions:
    """Switches of what makes training fast and small; results are the same to rounding with each.

    Args:
        eager: put every primitive on the stream by itself, instead of replaying captured graphs.
        fuse: compute groups of layers as one.
        share: let blobs that are never needed at the same time have the same memory.
        autotune: try ways of computing each convolution and keep the fastest.
        deterministic: the same bits in every run; without it BatchNorm's statistics are added up within convolutions.
    """

    eager: bool = False
    fuse: bool = True
    share: bool = True
    autotune: bool = True
    deterministic: bool = True


@dataclass(frozen=True)
class RetentionPolicy:
    """Which snapshots stay.

    Args:
        last: how many of the newest; 0: all, or where `best` is given, one.
        best: the output of a test net by which the best one stays too; empty: none does. Smaller is better for the
            tops of loss layers and for `loss`, larger for all others.
    """

    last: int = 0
    best: str = ""

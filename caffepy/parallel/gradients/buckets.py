"""Gradient buckets: slices of the flat gradients that are reduced together, and when each of them is complete.

Gradients lie in the order in which the backward pass finishes them, so a bucket is a
slice, and the last layers' bucket is complete while the first layers' gradients are still being computed (Li et al.,
VLDB 2020; NVIDIA Caffe's `reduce_buckets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caffepy.layers.core.base import Layer
from caffepy.net import Net
from caffepy.net.fusion.fused import FusedLayer
from caffepy.net.parameters import Parameter, ParameterBuffer
from caffepy.net.wiring import Node


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat gradients.

    Args:
        start: its first element.
        stop: one past its last.
        node: index in the net's schedule of the layer whose backward pass completes it.
    """

    start: int
    stop: int
    node: int


def cut_buckets(net: Net, count: int) -> list[Bucket]:
    """About `count` buckets of about equal size (0: one for each parameter), in the order in which they are completed.

    A bucket ends at the end of a parameter; the last one also holds the flags. A parameter that several layers share is
    complete with the one that comes first in the net.
    """
    buffer = net.parameters
    learned = sorted((p for p in buffer.parameters if p.lr_mult != 0), key=lambda p: p.start)
    indices = _schedule_indices(net.schedule)
    groups: list[list[Parameter]] = [[]]
    for parameter in learned:
        if groups[-1] and (not count or (parameter.start - groups[-1][0].start) * count >= buffer.learned):
            groups.append([])
        groups[-1].append(parameter)
    if not learned:
        return [Bucket(buffer.learned, buffer.learned + ParameterBuffer.FLAGS, 0)]
    starts = [group[0].start for group in groups]
    stops = [*starts[1:], buffer.learned + ParameterBuffer.FLAGS]
    # All ranks start collectives in one order, so no bucket may be complete before those in front of it.
    buckets: list[Bucket] = []
    for start, stop, group in zip(starts, stops, groups, strict=True):
        node = min(indices[parameter.layer] for parameter in group)
        buckets.append(Bucket(start, stop, min(node, buckets[-1].node) if buckets else node))
    return buckets


def _schedule_indices(schedule: Sequence[Node]) -> dict[Layer, int]:
    """The index in the schedule of each layer, by itself or as a member of a group."""
    indices = {}
    for index, node in enumerate(schedule):
        for layer in node.layer.members if isinstance(node.layer, FusedLayer) else [node.layer]:
            indices[layer] = index
    return indices

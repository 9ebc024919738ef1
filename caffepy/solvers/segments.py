"""Which slices of the flat buffers one update kernel may treat alike."""

from __future__ import annotations

from dataclasses import dataclass

from caffepy.net.parameters import Parameter


@dataclass
class Segment:
    """Neighbouring parameters with the same multipliers.

    Args:
        start: first element in the flat buffers.
        stop: one past the last.
        lr_mult: factor of the learning rate, not 0.
        decay_mult: factor of the weight decay.
    """

    start: int
    stop: int
    lr_mult: float
    decay_mult: float


def merge_segments(parameters: list[Parameter]) -> list[Segment]:
    """The fewest slices that cover all parameters that are learned.

    Padding between merged parameters is updated as well; it holds zeros and stays zero.
    """
    segments: list[Segment] = []
    for parameter in sorted(parameters, key=lambda p: p.start):
        multipliers = (parameter.lr_mult, parameter.decay_mult)
        if segments and (segments[-1].lr_mult, segments[-1].decay_mult) == multipliers:
            segments[-1].stop = parameter.stop
        else:
            segments.append(Segment(parameter.start, parameter.stop, *multipliers))
    return [segment for segment in segments if segment.lr_mult != 0]

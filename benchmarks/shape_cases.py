"""The layers of cpu_shapes.py and gpu_shapes.py: shapes of public Caffe nets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Size = int | tuple[int, ...]
"""The same along every spatial axis, or one for each."""


@dataclass(frozen=True)
class Case:
    """One layer.

    Args:
        name: of the row.
        x: the bottom's shape.
        outputs: num_output of a convolution.
        kernel: along every axis, as stride, pad and dilation are.
        group: of a convolution.
        kind: convolution, deconvolution, max, average, across or within.
        ceil: whether pooling has a window for what is left at the end.
    """

    name: str
    x: tuple[int, ...]
    outputs: int = 0
    kernel: Size = 3
    stride: Size = 1
    pad: Size = 0
    dilation: int = 1
    group: int = 1
    kind: str = "convolution"
    ceil: bool = False

    def along(self, size: Size) -> tuple[int, ...]:
        """One for each spatial axis."""
        return size if isinstance(size, tuple) else (size,) * (len(self.x) - 2)


def _convolutions() -> Iterator[Case]:
    yield Case("first 7x7/2, batch 8", (8, 3, 224, 224), 64, 7, 2, 3)
    yield Case("first 3x3/2, batch 1", (1, 3, 224, 224), 32, 3, 2, 1)
    yield Case("3x3 64, 56, batch 8", (8, 64, 56, 56), 64, 3, 1, 1)
    yield Case("3x3 256, 14, batch 8", (8, 256, 14, 14), 256, 3, 1, 1)
    yield Case("3x3 512, 7, batch 1", (1, 512, 7, 7), 512, 3, 1, 1)
    yield Case("3x3 128/2, 56, batch 8", (8, 128, 56, 56), 128, 3, 2, 1)
    yield Case("3x3 64, 56, batch 1", (1, 64, 56, 56), 64, 3, 1, 1)
    yield Case("1x1 256, 14, batch 1", (1, 256, 14, 14), 1024, 1)
    yield Case("1x1 1024, 7, batch 1", (1, 1024, 7, 7), 1024, 1)
    yield Case("1x1 512, 14, batch 16", (16, 512, 14, 14), 512, 1)
    yield Case("1x1 64, 56, batch 8", (8, 64, 56, 56), 256, 1)
    yield Case("1x1/2 256, 56, batch 8", (8, 256, 56, 56), 512, 1, 2)
    yield Case("1x1 2048, 1, batch 8", (8, 2048, 1, 1), 1000, 1)
    yield Case("one channel 5x5", (64, 1, 28, 28), 20, 5)
    yield Case("11x11/4", (8, 3, 227, 227), 96, 11, 4)
    yield Case("whole image 7x7", (8, 512, 7, 7), 256, 7)
    yield Case("1x7", (8, 128, 17, 17), 128, (1, 7), 1, 0)
    yield Case("7x1", (8, 128, 17, 17), 128, (7, 1), 1, 0)
    yield Case("1x7, padded", (8, 128, 17, 17), 128, (1, 7), 1, (0, 3))
    yield Case("7x1, padded", (8, 128, 17, 17), 128, (7, 1), 1, (3, 0))
    yield Case("1x3, padded", (8, 384, 8, 8), 384, (1, 3), 1, (0, 1))
    yield Case("3x1 64, 56, padded", (8, 64, 56, 56), 64, (3, 1), 1, (1, 0))
    yield Case("3x3/2 32 to 64, 112", (8, 32, 112, 112), 64, 3, 2, 1)
    yield Case("1x1/2 64, 56", (8, 64, 56, 56), 128, 1, 2)
    yield Case("5x5 16 to 32, 28", (8, 16, 28, 28), 32, 5, 1, 2)
    yield Case("3x3 3 to 64, 512, batch 1", (1, 3, 512, 512), 64, 3, 1, 1)
    yield Case("3x3 64 to 3, 128", (1, 64, 128, 128), 3, 3, 1, 1)
    yield Case("9x9 64 to 3", (1, 64, 96, 96), 3, 9, 1, 4)
    yield Case("1x1 64 to 21, 128", (1, 64, 128, 128), 21, 1)
    yield Case("1x1 64 to 2", (16, 64, 28, 28), 2, 1)
    yield Case("1x1 2048 to 512, 7, batch 64", (64, 2048, 7, 7), 512, 1)
    yield Case("dilated 3x3 by 2", (8, 64, 28, 28), 64, 3, 1, 2, 2)
    yield Case("dilated 3x3 by 6", (2, 256, 28, 28), 256, 3, 1, 6, 6)


def _groups() -> Iterator[Case]:
    yield Case("group 2 of 48 5x5", (8, 96, 27, 27), 256, 5, 1, 2, 1, 2)
    yield Case("group 32 of 4 3x3", (8, 128, 56, 56), 128, 3, 1, 1, 1, 32)
    yield Case("group 32 of 8 3x3/2", (8, 256, 56, 56), 256, 3, 2, 1, 1, 32)
    yield Case("group 32 of 32 3x3", (8, 1024, 7, 7), 1024, 3, 1, 1, 1, 32)
    yield Case("group 3 of 80 1x1", (8, 240, 28, 28), 240, 1, 1, 0, 1, 3)
    yield Case("depthwise 32, 112", (8, 32, 112, 112), 32, 3, 1, 1, 1, 32)
    yield Case("depthwise 64/2, 112", (8, 64, 112, 112), 64, 3, 2, 1, 1, 64)
    yield Case("depthwise 512, 14", (8, 512, 14, 14), 512, 3, 1, 1, 1, 512)
    yield Case("depthwise 1024, 7, batch 1", (1, 1024, 7, 7), 1024, 3, 1, 1, 1, 1024)
    yield Case("depthwise dilated", (8, 128, 28, 28), 128, 3, 1, 2, 2, 128)
    yield Case("depthwise multiplier 2", (8, 64, 56, 56), 128, 3, 1, 1, 1, 64)
    yield Case("depthwise 5x5/2 240", (8, 240, 28, 28), 240, 5, 2, 2, 1, 240)
    yield Case("depthwise whole image 7x7", (8, 512, 7, 7), 512, 7, 1, 0, 1, 512)
    yield Case("depthwise 960, 7, batch 64", (64, 960, 7, 7), 960, 3, 1, 1, 1, 960)
    yield Case("group 32 of 16 3x3, 14", (8, 512, 14, 14), 512, 3, 1, 1, 1, 32)
    yield Case("group 32 of 16 3x3/2, 28", (8, 512, 28, 28), 512, 3, 2, 1, 1, 32)
    yield Case("group 8 of 30 1x1", (8, 240, 28, 28), 240, 1, 1, 0, 1, 8)


def _other_axes() -> Iterator[Case]:
    yield Case("3-d 3 to 32", (2, 3, 16, 56, 56), 32, 3, 1, 1)
    yield Case("3-d 32", (2, 32, 8, 28, 28), 32, 3, 1, 1)
    yield Case("3-d 64/2", (2, 64, 8, 28, 28), 64, 3, 2, 1)
    yield Case("3-d 1x1x1 64", (2, 64, 8, 28, 28), 128, 1)
    yield Case("3-d first 3x7x7/2", (1, 3, 16, 112, 112), 64, (3, 7, 7), (1, 2, 2), (1, 3, 3))
    yield Case("3-d 512, 1, 4", (2, 256, 1, 4, 4), 256, 3, 1, 1)
    kind = "deconvolution"
    yield Case("transposed 4x4/2 64", (8, 64, 28, 28), 64, 4, 2, 1, kind=kind)
    yield Case("transposed 2x2/2 128 to 64", (4, 128, 28, 28), 64, 2, 2, kind=kind)
    yield Case("transposed 16x16/8 21", (2, 21, 28, 28), 21, 16, 8, 4, kind=kind)
    yield Case("transposed 64x64/32 21", (1, 21, 10, 10), 21, 64, 32, kind=kind)
    yield Case("transposed depthwise 4x4/2", (4, 64, 28, 28), 64, 4, 2, 1, 1, 64, kind)
    yield Case("transposed depthwise 16x16/8", (2, 21, 28, 28), 21, 16, 8, 4, 1, 21, kind)
    yield Case("transposed depthwise 64x64/32 21", (1, 21, 16, 16), 21, 64, 32, 16, 1, 21, kind)
    yield Case("transposed 4x4 100 to 512, 1", (16, 100, 1, 1), 512, 4, kind=kind)
    yield Case("transposed 3-d 2/2", (2, 32, 4, 14, 14), 32, 2, 2, kind=kind)


def _others() -> Iterator[Case]:
    for kind in ("max", "average"):
        yield Case(f"{kind} 2x2/2", (8, 64, 56, 56), 0, 2, 2, kind=kind)
        yield Case(f"{kind} 3x3/2", (8, 64, 113, 113), 0, 3, 2, kind=kind)
        yield Case(f"{kind} 3x3/1 pad 1", (8, 192, 28, 28), 0, 3, 1, 1, kind=kind)
        yield Case(f"{kind} 5x5/3", (8, 75, 56, 56), 0, 5, 3, 1, kind=kind)
        yield Case(f"{kind} 13x13/1", (1, 256, 20, 20), 0, 13, 1, 6, kind=kind)
        yield Case(f"{kind} global", (8, 1024, 7, 7), 0, 7, 1, kind=kind)
        yield Case(f"{kind} global, batch 1", (1, 512, 28, 28), 0, 28, 1, kind=kind)
        yield Case(f"{kind} batch 1", (1, 64, 112, 112), 0, 3, 2, kind=kind)
        yield Case(f"{kind} 2x2/2, ceil", (8, 33, 57, 57), 0, 2, 2, kind=kind, ceil=True)
        yield Case(f"{kind} 3x3/2, ceil", (8, 96, 56, 56), 0, 3, 2, kind=kind, ceil=True)
        yield Case(f"{kind} 2x2/1", (8, 128, 14, 14), 0, 2, 1, kind=kind)
        yield Case(f"{kind} global, 2048, batch 64", (64, 2048, 7, 7), 0, 7, 1, kind=kind)
    yield Case("LRN across 5", (8, 96, 55, 55), kernel=5, kind="across")
    yield Case("LRN across 3, batch 1", (1, 64, 112, 112), kernel=3, kind="across")
    yield Case("LRN within 3", (8, 32, 28, 28), kernel=3, kind="within")
    yield Case("LRN within 5", (8, 96, 27, 27), kernel=5, kind="within")


CASES = [*_convolutions(), *_groups(), *_other_axes(), *_others()]
ALPHA, BETA = 1e-4, 0.75


def layer_text(case: Case) -> str:
    """The layer as prototxt."""
    if case.kind in ("across", "within"):
        region = "ACROSS_CHANNELS" if case.kind == "across" else "WITHIN_CHANNEL"
        fields = f"norm_region: {region} local_size: {case.kernel} alpha: {ALPHA} beta: {BETA}"
        return f'type: "LRN" lrn_param {{ {fields} }}'
    if case.kind in ("max", "average"):
        mode = "CEIL" if case.ceil else "FLOOR"
        fields = f"kernel_size: {case.kernel} stride: {case.stride} pad: {case.pad} round_mode: {mode}"
        return f'type: "Pooling" pooling_param {{ pool: {"MAX" if case.kind == "max" else "AVE"} {fields} }}'
    moves = {"kernel_size": case.kernel, "stride": case.stride, "pad": case.pad, "dilation": case.dilation}
    fields = " ".join(f"{name}: {size}" for name, sizes in moves.items() for size in case.along(sizes))
    filler = 'weight_filler { type: "gaussian" std: 0.1 } bias_term: false'
    convolution = f"num_output: {case.outputs} {fields} group: {case.group} {filler}"
    return f'type: "{case.kind.capitalize()}" convolution_param {{ {convolution} }}'

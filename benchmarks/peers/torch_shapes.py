"""The passes of PyTorch's layers of the grid of shapes, for cpu_shapes.py and gpu_shapes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shape_cases import ALPHA, BETA, Case

Passes = dict[str, Callable[[], Any]]
"""What runs a pass, by its name: forward, data, weights."""


def _torch_layer(case: Case) -> Callable[[Any], Any]:
    import torch.nn.functional as F

    size = case.along(case.kernel)[0]
    half = (size - 1) // 2
    if case.kind == "max":
        return lambda x: F.max_pool2d(x, size, case.stride, case.pad, ceil_mode=case.ceil)
    if case.kind == "average":
        return lambda x: F.avg_pool2d(x, size, case.stride, case.pad, case.ceil)
    if case.kind == "across":
        return lambda x: F.local_response_norm(x, size, ALPHA, BETA)
    return lambda x: x * (1 + ALPHA * F.avg_pool2d(x * x, size, 1, half)) ** -BETA


def _torch_convolution(case: Case, x: Any, layout: Any) -> Passes:
    import torch

    transposed = case.kind == "deconvolution"
    first, second = (case.x[1], case.outputs) if transposed else (case.outputs, case.x[1])
    weights = (0.1 * torch.randn(first, second // case.group, *case.along(case.kernel))).contiguous(
        memory_format=layout
    )
    stride, pad, dilation, more = (case.along(size) for size in (case.stride, case.pad, case.dilation, 0))
    moves = (stride, pad, dilation, transposed, more, case.group)

    def forward() -> Any:
        return torch.ops.aten.convolution(x, weights, None, *moves)

    def backward(data: bool) -> Any:
        return torch.ops.aten.convolution_backward(dy, x, weights, None, *moves, [data, not data, False])

    dy = torch.randn_like(forward()).contiguous(memory_format=layout)
    return {"forward": forward, "data": lambda: backward(True), "weights": lambda: backward(False)}


def torch_passes(case: Case, last: bool) -> Passes:
    """The passes of PyTorch's layer, channels last if `last`."""
    import torch

    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(len(case.x), torch.contiguous_format) if last else torch.contiguous_format
    x = torch.randn(case.x).contiguous(memory_format=layout)
    if case.outputs:
        return _torch_convolution(case, x, layout)
    layer = _torch_layer(case)
    x.requires_grad_(True)
    y = layer(x)
    dy = torch.randn_like(y)

    def forward() -> Any:
        with torch.no_grad():
            return layer(x)

    return {"forward": forward, "data": lambda: torch.autograd.grad(y, x, dy, retain_graph=True)}

"""Exports nets to PyTorch for tests, and runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from caffepy.export.check import compare, random_inputs, run_net
from caffepy.export.torch.write import Varying, run_exported, to_torch
from caffepy.formats.safetensors import write_tensors
from caffepy.net import Net

Arrays = dict[str, np.ndarray]
HAS_TORCH = importlib.util.find_spec("torch") is not None


def write_module(net: Net, folder: Path, varying: Varying | None = None) -> Path:
    """Write net.py and net.safetensors; return the path of the former."""
    text, parameters = to_torch(net, varying)
    path = folder / "net.py"
    path.write_text(text)
    write_tensors(path.with_suffix(".safetensors"), parameters)
    return path


def assert_module(net: Net, folder: Path, inputs: Arrays | None = None, tolerance: float = 1e-5) -> str:
    """Whether PyTorch gives the exported net's numbers; returns the module's text."""
    path = write_module(net, folder)
    inputs = random_inputs(net) if inputs is None else inputs
    read = {bottom.name for node in net.nodes for bottom in node.bottoms}
    given = {name: values for name, values in inputs.items() if name in read}
    for one in compare(run_exported(path, given, list(net.outputs)), run_net(net, inputs)):
        assert one.relative <= tolerance, one
    return path.read_text()

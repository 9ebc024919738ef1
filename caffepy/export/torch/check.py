"""Runs an exported module by PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import RunError, one_line
from caffepy.utils.installation import MissingExtraError

EXTRA = "torch"
"""The extra that installs torch."""
LIMIT = 1e-5
"""Tolerance relative to the output's largest absolute value."""


def require_torch(purpose: str) -> None:
    """Check that torch can be imported.

    Raises:
        MissingExtraError: it is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", EXTRA, purpose)


def run_exported(path: Path, inputs: Mapping[str, NDArray[Any]], outputs: list[str]) -> dict[str, NDArray[Any]]:
    """Return the outputs of a module that `to_torch` wrote.

    Args:
        path: the .py file, with the .safetensors file beside it.
        inputs: by name, in the order of the module's arguments.
        outputs: names in the net's order.

    Raises:
        RunError: PyTorch refuses the module or fails.
    """
    torch = importlib.import_module("torch")
    spec = importlib.util.spec_from_file_location(f"caffepy_exported_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        net = module.load()
        values = [torch.from_numpy(np.ascontiguousarray(array, np.float32)) for array in inputs.values()]
        with torch.inference_mode():
            found = net(*values)
    except Exception as error:  # its exceptions have no common base class
        raise RunError(f"PyTorch cannot run the module: {one_line(str(error))}") from error
    results = found if isinstance(found, dict) else {outputs[0]: found}
    return {name: value.detach().float().numpy() for name, value in results.items()}

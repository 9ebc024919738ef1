"""The optional libraries `onnx`, for models, and `onnxruntime`, which runs them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import RunError, one_line
from caffepy.utils.installation import MissingExtraError

EXTRA = "onnx"
"""The extra that installs both."""


def require_onnx(purpose: str) -> None:
    """Check that `onnx` can be imported. Call before importing other modules of this package.

    Raises:
        MissingExtraError: onnx is not installed.
    """
    try:
        importlib.import_module("onnx")
    except ImportError as error:
        raise MissingExtraError("onnx", EXTRA, purpose) from error


def has_runtime() -> bool:
    """Return whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def run_model(model: bytes | str, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the outputs of a model, computed by onnxruntime on the CPU.

    Args:
        model: the serialised model, or the path of a file, which may use external tensor files.
        feeds: inputs by name.

    Raises:
        RunError: onnxruntime rejects the model or fails.
    """
    return Session(model).run(feeds)


class Session:
    """An onnxruntime session on the CPU.

    Args:
        model: the serialised model or its path.
        threads: number of threads; 0: one per core.

    Raises:
        RunError: onnxruntime rejects the model.
    """

    def __init__(self, model: bytes | str, threads: int = 0) -> None:
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        try:
            self._session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no common base class
            raise _refused(error) from error
        self._names: Sequence[str] = [output.name for output in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the outputs for inputs by name.

        Raises:
            RunError: onnxruntime fails.
        """
        try:
            values = self._session.run(self._names, dict(feeds))
        except Exception as error:
            raise _refused(error) from error
        return {name: np.asarray(value) for name, value in zip(self._names, values, strict=True)}


def _refused(error: Exception) -> RunError:
    return RunError(f"onnxruntime cannot run the model: {one_line(str(error))}")

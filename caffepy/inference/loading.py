"""`caffepy.load`: a model from its files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from caffepy.backend import create_backend
from caffepy.config.dialect import choose_dialect
from caffepy.config.load import read_net
from caffepy.config.paths import PathResolver
from caffepy.errors import ConfigError
from caffepy.inference.model import Model
from caffepy.layers.core.base import LayerContext
from caffepy.onnx.engine import wants_runtime
from caffepy.proto import caffe_pb2
from caffepy.snapshot.caffemodel import read_caffemodel

logger = logging.getLogger(__name__)

StrPath = str | PathLike[str]

DTYPES = {"float32": caffe_pb2.FLOAT, "float16": caffe_pb2.FLOAT16, "bfloat16": caffe_pb2.BFLOAT16}
"""What blobs can be computed in, and the prototxt's name for it."""


def load(  # noqa: PLR0913 -- what a user may choose
    model: StrPath, weights: StrPath | Sequence[StrPath] = (), device: int | None = None, *, dtype: str | None = None,
    threads: int | None = None, math: str = "tf32", stages: Sequence[str] = (), engine: str | None = None,
) -> Model:  # fmt: skip
    """A net with its weights, called with arrays.

        net = caffepy.load("deploy.prototxt", "net.caffemodel", device=0)
        probabilities = net(images)["prob"]

    Args:
        model: the net's prototxt, as a rule a deploy net with Input layers.
        weights: .caffemodel files, binary or HDF5, the later ones over the earlier; none leaves what the fillers make.
        device: number of a GPU; None computes on the CPU.
        dtype: what blobs are kept in: "float32", "float16" or "bfloat16"; None leaves it to the prototxt.
        threads: of the CPU; None takes all that the process may use.
        math: products of float32 numbers on a GPU: "tf32", or "fp32" in full.
        engine: on the CPU: "own" (None) computes by caffepy's kernels, "onnxruntime" by the library of the extra onnx.
        stages: for include and exclude rules.

    Raises:
        ConfigError: the net cannot be read or has no Input layer; an unknown dtype or engine.
        MissingExtraError: the engine is not installed.
        SnapshotError: the weights cannot be read or do not fit.
        DeviceError: the device is not there.
    """
    by_runtime = wants_runtime(engine, device is None, dtype)
    param = read_net(Path(model))
    dialect = choose_dialect([param], logger.info)
    if dtype is not None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is '{dtype}'; it can be {', '.join(DTYPES)}")
        param.default_forward_type = param.default_backward_type = DTYPES[dtype]
    param.state.stage.extend(stages)
    files = [weights] if isinstance(weights, (str, PathLike)) else list(weights)
    backend = create_backend(device, threads, math)
    try:
        context = LayerContext(backend, phase=caffe_pb2.TEST, resolve=PathResolver(Path(model)), dialect=dialect)
        read = [(read_caffemodel(Path(file)), str(file)) for file in files]
        return Model(param, context, read, by_runtime=by_runtime)
    except BaseException:
        backend.close()
        raise

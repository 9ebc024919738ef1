"""Tests that train: builds nets and solvers of small prototxts on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.backend import Backend, create_backend
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.training.solver import Solver, create_solver

CPU = create_backend(None, 1)
"""One backend for all; the CPU's holds no state that one test could leave to another."""

TINY = """
name: "tiny"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } data_filler { type: "gaussian" }
    data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
CLASSIFIER = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
PLAIN = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 4 snapshot_after_train: false '
TESTED = PLAIN + "test_iter: 3 test_interval: 2 "


def build_net(text: str, phase: int = caffe_pb2.TRAIN, **context: Any) -> Net:
    """A net of a prototxt's text."""
    param = parse_text(text, caffe_pb2.NetParameter(), "net.prototxt")
    return Net(param, LayerContext(CPU, phase=phase, **context))


def solver_param(text: str, net: str = "") -> caffe_pb2.SolverParameter:
    """A solver of a prototxt's text, with a net's text as its net_param."""
    param = parse_text(text, caffe_pb2.SolverParameter(), "solver.prototxt")
    if net:
        parse_text(net, param.net_param, "net.prototxt")
    if not param.HasField("random_seed"):
        param.random_seed = 1
    return param


@contextmanager
def build_solver(text: str, net: str = "", backend: Backend = CPU, **keywords: Any) -> Iterator[Solver]:
    """A solver of a prototxt's text; closed afterwards."""
    with backend.activate():
        solver = create_solver(solver_param(text, net), backend, **keywords)
        try:
            yield solver
        finally:
            solver.close()


@contextmanager
def open_solver(path: Path, backend: Backend = CPU, **fields: Any) -> Iterator[Solver]:
    """A solver of a prototxt file, with some fields set otherwise; closed afterwards."""
    param = read_solver(path)
    for name, value in fields.items():
        setattr(param, name, value)
    with backend.activate():
        solver = create_solver(param, backend, resolve=PathResolver(path))
        try:
            yield solver
        finally:
            solver.close()


def weights_of(net: Net) -> dict[str, np.ndarray]:
    """Copies of all parameters, by ``layer_index``."""
    return {f"{layer.name}_{i}": blob.host_data() for layer in net.layers for i, blob in enumerate(layer.blobs)}


def compare_weights(solver: Solver, golden: np.lib.npyio.NpzFile, prefix: str, allowed: float = 1e-5) -> int:
    """Assert that the parameters are those recorded after this iteration; returns how many of them were recorded.

    Args:
        solver: after some iterations.
        golden: arrays called ``<prefix><iteration>_<layer>_<index>``.
        prefix: what the names of the recorded run begin with.
        allowed: the relative error; what is zero in the record must be so small itself.
    """
    compared = 0
    for name, values in weights_of(solver.net).items():
        key = f"{prefix}{solver.iteration:02d}_{name}"
        if key in golden:
            error = relative_error(values, golden[key]) if golden[key].any() else float(np.abs(values).max())
            assert error < allowed, f"{name} after iteration {solver.iteration}: {error:.2g}"
            compared += 1
    return compared


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest wanted value."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())

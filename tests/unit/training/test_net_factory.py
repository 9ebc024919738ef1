"""Nets of a solver that share memory, and what a training that runs out of memory advises."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import numpy as np
import pytest
from training import CPU, solver_param

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.errors import OutOfMemoryError
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net.memory_plan import largest, largest_batch, plan_memory, with_batch, written_batch
from caffepy.training.net_factory import NetFactory
from caffepy.training.solver import create_solver
from caffepy.utils.options import ExecutionOptions

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 64 dim: 3 dim: 16 dim: 16 } shape { dim: 64 }
    data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "relu" }
layer { name: "ip" type: "InnerProduct" bottom: "relu" top: "ip"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = """base_lr: 0.01 lr_policy: "fixed" max_iter: 3 test_iter: 2 test_interval: 100 test_initialization: false
snapshot_after_train: false"""


class SmallBackend(CpuBackend):
    """A CPU with little memory."""

    def __init__(self, limit: int) -> None:
        super().__init__(1)
        self.limit = limit
        self.used = 0

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32"):
        array = super().zeros(shape, dtype)
        self.used += array.nbytes
        if self.used > self.limit:
            raise OutOfMemoryError(f"{array.nbytes} bytes are too many", "buy some", self.limit)
        return array


class CountingBackend(CpuBackend):
    """A CPU that counts what was asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.arrays: list[int] = []

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32"):
        array = super().zeros(shape, dtype)
        self.arrays.append(array.nbytes)
        return array


def test_blobs_share_memory_on_the_cpu_too():
    """With the same bits, in training and in the tests in between."""
    images = 64 * 8 * 14 * 14 * 4
    pool = (
        'layer { name: "pool" type: "Pooling" bottom: "relu" top: "pool" pooling_param { pool: AVE kernel_size: 14 } }'
    )
    net = NET.replace('layer { name: "ip"', pool + '\nlayer { name: "ip"').replace(
        '"InnerProduct" bottom: "relu"', '"InnerProduct" bottom: "pool"'
    )
    param = solver_param(SOLVER.replace("test_interval: 100 test_initialization: false", "test_interval: 2"), net)
    found, large = [], []
    for share in (False, True):
        backend = CountingBackend()
        solver = create_solver(param, backend, engine=ExecutionOptions(share=share))
        solver.step(3)
        found.append((solver.net.loss(), solver.net.parameters.data.copy(), solver.test_all()))
        large.append([size for size in backend.arrays if size >= images])
        solver.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_equal(one, other)
    # The convolution's top and diff in the train net, its top in the test net; sharing, one arena for all.
    assert (len(large[0]), len(large[1])) == (3, 1)
    assert sum(large[1]) < 0.7 * sum(large[0])


class Passing:
    """A user's layer that counts its objects."""

    made = 0

    def setup(self, bottom, top):
        Passing.made += 1

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff


def test_users_layers_are_made_once_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """They may open data or start processes; a plan for sharing memory would make them a second time."""
    module = ModuleType("passing")
    module.__dict__["Passing"] = Passing
    monkeypatch.setitem(sys.modules, "passing", module)
    layer = """layer { name: "passing" type: "Python" bottom: "relu" top: "passed"
      python_param { module: "passing" layer: "Passing" } }"""
    net = NET.replace('layer { name: "ip"', layer + '\nlayer { name: "ip"').replace(
        '"InnerProduct" bottom: "relu"', '"InnerProduct" bottom: "passed"'
    )
    param = solver_param(SOLVER.replace("test_iter: 2 test_interval: 100 test_initialization: false", ""), net)
    Passing.made = 0
    solver = create_solver(param, CPU)
    solver.step(1)
    solver.close()
    assert Passing.made == 1


def factory(backend: CpuBackend) -> NetFactory:
    return NetFactory(solver_param(SOLVER, NET), LayerContext(backend, resolve=PathResolver(None)))


def test_a_training_that_runs_out_says_where_and_what_would_fit():
    param = solver_param(SOLVER, NET)
    setup = factory(CPU).train_setup()
    backend = SmallBackend(plan_memory(*setup, fuse=True).total(1, share=False) // 2)
    found = largest_batch(*setup, True, False, 1, backend.limit)
    assert 1 < found < 64
    with CPU.activate():
        solver = create_solver(param, backend, engine=ExecutionOptions(share=False))
        with pytest.raises(OutOfMemoryError) as caught:
            solver.step(1)
    where = r"layer '(conv|relu|ip)' \(\w+\): \d+ bytes are too many: "
    advice = f"the largest batch_size that fits is {found} instead of 64; iter_size makes up for smaller batches"
    assert re.fullmatch(where + advice, str(caught.value))
    assert plan_memory(with_batch(setup[0], found), *setup[1:], fuse=True).total(1, share=False) <= backend.limit
    assert plan_memory(with_batch(setup[0], found + 1), *setup[1:], fuse=True).total(1, share=False) > backend.limit


def test_where_not_even_one_sample_fits():
    message = r"layer '(conv|ip)'.* not even batch_size 1 fits; use another"
    with CPU.activate(), pytest.raises(OutOfMemoryError, match=message):
        create_solver(solver_param(SOLVER, NET), SmallBackend(20_000))


@pytest.mark.parametrize(
    "available, net",
    [
        (None, NET),  # nobody knows what there is
        (
            10**6,
            NET.replace('bottom: "ip" bottom', 'bottom: "fixed" bottom').replace(
                'layer { name: "loss"',
                'layer { name: "fixed" type: "Reshape" bottom: "ip" top: "fixed" '
                'reshape_param { shape { dim: 64 dim: 4 } } } layer { name: "loss"',
            ),
        ),  # no other batch is possible
        (10**6, NET.replace("dim: 64", "dim: 0")),
    ],
)
def test_where_nothing_better_can_be_said(available: int | None, net: str, monkeypatch: pytest.MonkeyPatch):
    def fail(self: SmallBackend, shape: tuple[int, ...], dtype: str = "float32"):
        raise OutOfMemoryError("none", "buy some", available)

    monkeypatch.setattr(SmallBackend, "zeros", fail)
    with pytest.raises(OutOfMemoryError, match=r"none: buy some$"):
        create_solver(solver_param(SOLVER, net), SmallBackend(0))


def test_train_and_test_nets_share_one_arena():
    nets = []
    with CPU.activate():
        for share in (False, True):
            made = factory(CPU)
            train = made.train_net()
            test = made.test_executors(train)[0].net
            if share:
                plan = made.share_memory()
                assert plan.arena < plan.alone
                conv = [net.blobs["conv"].data for net in (train, test)]
                assert np.shares_memory(train.blobs["relu"].data, test.blobs["relu"].data) or np.shares_memory(*conv)
            nets.append((train, test))
        for train, test in nets:
            train.forward()
            train.backward()
            test.forward()
        (alone, tested), (sharing, tested_sharing) = nets
        np.testing.assert_array_equal(sharing.parameters.diff, alone.parameters.diff)
        assert tested_sharing.loss() == tested.loss()


def test_the_batch_of_every_kind_of_source():
    param = caffe_pb2.NetParameter()
    for kind in ("data_param", "image_data_param", "hdf5_data_param"):
        getattr(param.layer.add(), kind).batch_size = 5
    param.layer.add().dummy_data_param.num.append(5)
    for kind in ("dummy_data_param", "input_param"):
        shapes = getattr(param.layer.add(), kind).shape
        shapes.add(dim=[5, 3])
        shapes.add()
    changed = with_batch(param, 9)
    for layer in changed.layer:
        assert written_batch(caffe_pb2.NetParameter(layer=[layer])) == 9
    assert list(changed.layer[4].dummy_data_param.shape[0].dim) == [9, 3]
    assert written_batch(param) == 5
    assert written_batch(caffe_pb2.NetParameter(layer=[caffe_pb2.LayerParameter(type="ReLU")])) == 0


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 31, 32, 33, 63, 64, 1000])
def test_bisection(limit: int):
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert largest(fits, 64) == min(limit, 63)
    assert max(asked) < 64
    assert len(asked) == len(set(asked)) <= 13

"""Memory plans on a GPU: what was predicted is what is taken, and blobs that share memory compute the same."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.backend import Backend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import OutOfMemoryError
from caffepy.formats.load import read_net
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.memory_plan import plan_memory
from caffepy.training.solver import create_solver
from caffepy.utils.options import ExecutionOptions

MODELS = Path(__file__).parents[2] / "models"

NETS = [
    ("lenet/train_test.prototxt", (1, 28, 28), "FLOAT"),
    ("cifar10/quick_train_test.prototxt", (3, 32, 32), "FLOAT"),
    ("resnet18/train_val.prototxt", (3, 64, 64), "FLOAT16"),
    ("cifar10/full_train_test.prototxt", (3, 32, 32), "BFLOAT16"),
]


def model(path: str, shape: tuple[int, ...], kind: str, batch: int) -> caffe_pb2.NetParameter:
    """A net of models/, with the same image everywhere."""
    param = read_net(MODELS / path)
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    for data in param.layer:
        if data.type == "Data":
            data.type = "DummyData"
            for dims, value in (((batch, *shape), 0.5), ((batch,), 3)):
                data.dummy_data_param.shape.add(dim=dims)
                data.dummy_data_param.data_filler.add(type="constant", value=value)
    return param


def solver_of(net: caffe_pb2.NetParameter, backend: Backend, share: bool) -> Any:
    param = caffe_pb2.SolverParameter(
        net_param=net,
        base_lr=1e-3,
        lr_policy="fixed",
        max_iter=9,
        random_seed=1,
        snapshot_after_train=False,
        type="SGD",
    )
    return create_solver(param, backend, engine=ExecutionOptions(share=share))


def test_a_dry_backend_asks_for_what_a_gpu_does(backend: Backend):
    for dry in (MetaBackend(), MetaBackend(backend)):
        for trait in ("asynchronous", "dtypes", "mask_dtype", "keeps_lrn_scale"):
            assert getattr(dry, trait) == getattr(backend, trait)
        assert dry.workspace(10**7) == backend.workspace(10**7)


@pytest.mark.parametrize("path, shape, kind", NETS)
def test_sharing_changes_nothing(path: str, shape: tuple[int, ...], kind: str, backend: Backend):
    found = []
    for share in (False, True):
        solver = solver_of(model(path, shape, kind, 4), backend, share)
        solver.step(3)
        assert solver.graph_executor.captured
        found.append(backend.to_host(solver.net.parameters.data))
        solver.close()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("path, shape, kind", NETS[2:])
def test_a_net_takes_what_was_predicted(path: str, shape: tuple[int, ...], kind: str, backend: Backend):
    import cupy

    pool = cupy.get_default_memory_pool()
    param = model(path, shape, kind, 32)
    plan = plan_memory(param, LayerContext(backend), fuse=True)
    with_scratch = solver_of(param, backend, True)
    with_scratch.step(2)  # plans of convolutions and their workspace are there from now on
    with_scratch.close()
    del with_scratch
    gc.collect()
    before = pool.used_bytes()
    solver = solver_of(param, backend, True)
    solver.step(2)
    assert pool.used_bytes() - before == pytest.approx(plan.total(1), rel=0.03)
    solver.close()


def test_an_arena_that_is_too_large(backend: Backend):
    net = Net(model(*NETS[0], 4), LayerContext(backend))
    plan = plan_memory(net.param, LayerContext(backend))
    object.__setattr__(plan, "arena", 2**50)
    with pytest.raises(
        OutOfMemoryError, match=r"which needs the most in \w+ of layer .* GPU 0 is out of memory"
    ) as caught:
        plan.new_arena(backend)
    assert 0 < (caught.value.available or 0) < 2**42


def test_large_workspaces_are_taken_from_the_lease(backend: Backend):
    from caffepy.backend.cuda.memory import LARGE, Scratch

    scratch, lease = Scratch(), backend.zeros((5 * LARGE,), "uint8")
    begin, end = lease.data.ptr, lease.data.ptr + lease.nbytes

    def address(count: int, purpose: str = "a", dtype: str = "float32") -> int:
        array = scratch.get(purpose, count, dtype)
        assert (array.size, array.dtype) == (count, dtype)
        return int(array.data.ptr)

    with backend.activate():
        own = address(LARGE)
        assert not begin <= own < end
        scratch.lease(lease)
        assert address(LARGE // 4 + 1) == begin
        assert address(LARGE // 4) == begin  # a purpose keeps its address
        assert address(LARGE // 2, "b", "float16") == begin + LARGE + 512
        assert address(LARGE) == own  # too large for what is left
        assert not begin <= address(LARGE - 1, "c", "uint8") < end  # too small to be worth it
        assert not begin <= scratch.tickets(LARGE).data.ptr < end  # kept from call to call
        assert address(LARGE // 2) == begin + 2 * LARGE + 512  # what grows moves behind the others
        scratch.lease(None)
        assert address(LARGE // 4 + 1) == own

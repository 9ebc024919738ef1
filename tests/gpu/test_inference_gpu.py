"""TEST nets on a GPU: folded, planned, captured and replayed they give what layers by themselves give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from compare_nets import errors, root_mean_square
from google.protobuf import text_format
from other_arrays import OnlyDlpack
from subprocess_training import NORMALISED_NET, SubprocessTraining
from training import solver_param, weights_of
from wide_nets import fusible_net

import caffepy
from caffepy.backend import Backend, create_backend
from caffepy.errors import DeviceError
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.model import Model
from caffepy.layers.layer import LayerContext, PassCounter
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor
from caffepy.net.fold import FoldedConvolution
from caffepy.net.memory_plan import plan_memory
from caffepy.training.solver import create_solver
from caffepy.utils.options import ExecutionOptions

MODELS = Path(__file__).parents[2] / "models"
ALLOWED = {"FLOAT": 2e-3, "FLOAT16": 0.02, "BFLOAT16": 0.1}
"""Allowed distance from plain layers in float32, root mean square."""
WORSE = 4
"""So many times the distance of plain layers in the same dtype is allowed as well."""


def data(*shape: int, name: str = "data") -> str:
    dims = " ".join(f"dim: {d}" for d in shape)
    return f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}\n'


def unit(name: str, bottom: str, outputs: int, setting: str, *followers: str) -> str:
    """A convolution without a bias, BatchNorm, Scale, and layers in place."""
    text = f"""layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{
      num_output: {outputs} {setting} bias_term: false weight_filler {{ type: "msra" }} }} }}
    layer {{ name: "{name}n" type: "BatchNorm" bottom: "{name}" top: "{name}" }}
    layer {{ name: "{name}s" type: "Scale" bottom: "{name}" top: "{name}" scale_param {{ bias_term: true
      filler {{ type: "uniform" min: 0.5 max: 2 }} bias_filler {{ type: "uniform" min: -1 max: 1 }} }} }}\n"""
    for kind in followers:
        text += f'layer {{ name: "{name}{kind}" type: "{kind}" bottom: "{name}" top: "{name}" }}\n'
    return text


def residual(name: str, first: str, second: str) -> str:
    return f"""layer {{ name: "{name}" type: "Eltwise" bottom: "{first}" bottom: "{second}" top: "{name}" }}
    layer {{ name: "{name}r" type: "ReLU" bottom: "{name}" top: "{name}" }}\n"""


THREE = "kernel_size: 3 pad: 1"
NETS = {
    "residual blocks": data(2, 16, 14, 14)
    + unit("p", "data", 32, "kernel_size: 1")
    + unit("a", "data", 16, THREE, "ReLU")
    + unit("b", "a", 32, THREE)
    + residual("s", "p", "b")
    + unit("c", "s", 32, THREE)
    + residual("t", "s", "c"),
    "odd sizes": data(3, 7, 9, 11)
    + unit("a", "data", 33, THREE, "ReLU")
    + unit("b", "a", 33, THREE)
    + residual("s", "a", "b")
    + unit("c", "s", 5, "kernel_size: 3 stride: 4", "ReLU"),
    "depthwise": data(2, 24, 15, 13)
    + unit("a", "data", 24, THREE + " group: 24", "ReLU")
    + unit("b", "a", 40, "kernel_size: 1")
    + unit("c", "b", 40, THREE + " group: 40")
    + residual("s", "b", "c"),
    "groups and dilation": data(2, 32, 12, 12)
    + unit("a", "data", 64, THREE + " group: 2", "ReLU")
    + unit("b", "a", 64, "kernel_size: 3 pad: 2 dilation: 2 group: 4")
    + residual("s", "a", "b"),
    "one axis": data(2, 8, 40)
    + unit("a", "data", 16, THREE, "ReLU")
    + unit("b", "a", 16, THREE)
    + residual("s", "a", "b"),
    "three axes": data(2, 4, 5, 6, 7)
    + unit("a", "data", 8, THREE)
    + unit("b", "a", 8, THREE)
    + residual("s", "a", "b"),
    "channels alone": data(4, 30)
    + unit("a", "data", 16, "", "ReLU")
    + unit("b", "a", 16, "")
    + residual("s", "a", "b"),
    "past the image": data(2, 8, 5, 4) + unit("a", "data", 16, "kernel_size: 6 stride: 4", "ReLU"),
}


@pytest.fixture(scope="module")
def untuned() -> Iterator[Backend]:
    """A GPU that tries no ways of computing convolutions, of which each net has others."""
    made = create_backend(0, math="fp32", autotune=False)  # tests make it active: the others here use another stream
    yield made
    made.close()


def build(text: str, backend: Backend, fuse: bool, kind: str = "FLOAT", phase: int = caffe_pb2.TEST) -> Net:
    """A net with statistics of its own; fused ones share memory."""
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    context = LayerContext(backend, phase=phase, seed=7)
    net = Net(param, context, fuse=fuse)
    if fuse:
        plan = plan_memory(param, replace(context, passes=PassCounter()), fuse=True)
        arena = plan.new_arena(backend)
        backend.fill(arena.view("float32"), float("nan"))
        plan.bind(net, arena)
    fill(net, 1)
    return net


def fill(net: Net, seed: int) -> None:
    """Statistics and inputs."""
    generator = np.random.default_rng(seed)
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs if layer.type == "BatchNorm" else ()):
            values = generator.standard_normal(blob.shape) if index == 0 else generator.uniform(0.5, 2, blob.shape)
            net.backend.from_host(values.astype(np.float32), blob.data)
    for name in net.inputs:
        give(net, name, generator)


def give(net: Net, name: str, generator: np.random.Generator) -> None:
    blob = net.blobs[name]
    net.backend.from_host(generator.standard_normal(blob.shape).astype(np.float32), blob.data)


def outputs(net: Net) -> dict[str, Any]:
    return {name: blob.host_data() for name, blob in net.outputs.items()}


def passes(runner: ForwardExecutor, count: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(count):
        runner.forward()
        found.append(outputs(runner.net))
    return found


def check_same_bits(found: list[dict[str, Any]], wanted: dict[str, Any], where: str) -> None:
    for each in found:
        assert each.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_array_equal(each[name], values, err_msg=f"{where}, {name}")


@pytest.mark.parametrize("kind", ALLOWED)
@pytest.mark.parametrize("name", NETS)
def test_replayed_passes_give_what_eager_and_unfused_ones_give(backend: Backend, name: str, kind: str) -> None:
    text = NETS[name]
    exact, plain = (build(text, backend, False, dtype) for dtype in ("FLOAT", kind))
    for net in (exact, plain):
        net.forward()
    runner, eager = ForwardExecutor(build(text, backend, True, kind)), build(text, backend, True, kind)
    eager.forward()
    assert any(isinstance(node.layer, FoldedConvolution) for node in runner.net.schedule)
    found, wanted = passes(runner, 3), outputs(exact)
    assert runner.captured
    check_same_bits(found, outputs(eager), name)
    limits = errors(outputs(plain), wanted, root_mean_square)
    for output, error in errors(found[-1], wanted, root_mean_square).items():
        assert error <= max(ALLOWED[kind], WORSE * limits[output]), (output, error, limits[output])


NETS_TRIED, PARTS = 40, 4


@pytest.mark.parametrize("kind", ALLOWED)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_nets(untuned: Backend, part: int, kind: str) -> None:
    with untuned.activate():
        folded = 0
        for seed in range(part, NETS_TRIED, PARTS):
            wide = fusible_net(seed)
            text, inputs = text_format.MessageToString(wide.param()), wide.values(seed)
            nets = [
                build(text, untuned, fuse, dtype) for fuse, dtype in ((False, "FLOAT"), (False, kind), (True, kind))
            ]
            found = []
            for net in nets:
                for name, values in inputs.items():
                    untuned.from_host(values, net.blobs[name].data)
                if net is nets[-1]:
                    break
                net.forward()
                found.append(outputs(net))
            results = passes(ForwardExecutor(nets[-1]), 3)
            check_same_bits(results[1:], results[0], f"net {seed}")
            limits = errors(found[1], found[0], root_mean_square)
            for name, error in errors(results[-1], found[0], root_mean_square).items():
                assert error <= max(ALLOWED[kind], WORSE * limits[name]), f"net {seed}, {name}: {error}"
            folded += sum(isinstance(node.layer, FoldedConvolution) for node in nets[-1].schedule)
        assert folded >= NETS_TRIED // PARTS // 2


def test_inputs_change_between_replays(backend: Backend) -> None:
    runner, plain = (build(NETS["residual blocks"], backend, fuse) for fuse in (True, False))
    replayed = ForwardExecutor(runner)
    for seed in range(4):
        for net in (runner, plain):
            give(net, "data", np.random.default_rng(seed))
        plain.forward()
        (found,) = passes(replayed, 1)
        assert max(errors(found, outputs(plain), root_mean_square).values()) <= ALLOWED["FLOAT"]


def test_another_shape_is_captured_anew(backend: Backend) -> None:
    net, plain = (build(NETS["residual blocks"], backend, fuse) for fuse in (True, False))
    runner = ForwardExecutor(net)
    for count in (2, 2, 2, 1, 1, 1, 2, 2):
        for each in (net, plain):
            each.blobs["data"].reshape((count, 16, 14, 14))
            give(each, "data", np.random.default_rng(count))
        plain.forward()
        (found,) = passes(runner, 1)
        assert max(errors(found, outputs(plain), root_mean_square).values()) <= ALLOWED["FLOAT"]
    assert runner.captured


def test_changed_parameters_are_taken_over(backend: Backend) -> None:
    net, plain = (build(NETS["residual blocks"], backend, fuse, "FLOAT16") for fuse in (True, False))
    runner = ForwardExecutor(net)
    passes(runner, 3)
    for each in (net, plain):
        fill(each, 5)
        give(each, "data", np.random.default_rng(6))
    runner.parameters_changed()
    plain.forward()
    (found,) = passes(runner, 1)
    assert runner.captured
    assert max(errors(found, outputs(plain), root_mean_square).values()) <= 0.02


def test_each_replay_draws_the_numbers_of_an_eager_pass(backend: Backend) -> None:
    text = data(2, 16, 14, 14) + unit("a", "data", 16, THREE, "ReLU", "Dropout")
    nets = [build(text, backend, False, phase=caffe_pb2.TRAIN) for _ in range(2)]
    found = passes(ForwardExecutor(nets[0]), 5)
    eager = passes(ForwardExecutor(nets[1], eager=True), 5)
    for ours, theirs in zip(found, eager, strict=True):
        np.testing.assert_array_equal(ours["a"], theirs["a"])
    assert len({each["a"].tobytes() for each in found}) == 5


# -- models -----------------------------------------------------------------------------------------------


def model_of(text: str, backend: Backend, kind: str = "FLOAT") -> Model:
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    model = Model(param, LayerContext(backend, phase=caffe_pb2.TEST, seed=7), [])
    with backend.activate():
        fill(model.net, 1)
    return model


def images(count: int = 2) -> Any:
    return np.random.default_rng(count).standard_normal((count, 16, 14, 14)).astype(np.float32)


@pytest.mark.parametrize("kind", ALLOWED)
def test_arrays_in_and_out(backend: Backend, kind: str) -> None:
    import cupy

    model = model_of(NETS["residual blocks"], backend, kind)
    for _ in range(3):
        for count in (1, 2, 5):
            host = images(count)
            (wanted,) = model(host).values()
            assert isinstance(wanted, np.ndarray)
            assert (wanted.dtype, wanted.shape, wanted.flags.c_contiguous) == (np.float32, (count, 32, 14, 14), True)
            there = cupy.asarray(host)
            turned = cupy.ascontiguousarray(there.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
            for given in (there, OnlyDlpack(there), turned, there[::-1].copy()[::-1]):
                (found,) = model(given).values()
                assert isinstance(found, cupy.ndarray)
                assert found.dtype == np.float32
                np.testing.assert_array_equal(found.get(), wanted)
    assert len(model._executors) == 3
    assert all(runner.captured for runner in model._executors.values())
    model.close()


def test_results_are_the_callers(backend: Backend) -> None:
    import cupy

    model = model_of(NETS["residual blocks"], backend)
    for convert in (np.asarray, cupy.asarray):
        (first,) = model(convert(images())).values()
        kept = first.copy()
        for _ in range(4):
            model(convert(-images()))
        assert (first == kept).all()
    model.close()


def test_calls_in_a_row_do_not_mix_their_inputs(backend: Backend) -> None:
    model = model_of(NETS["residual blocks"], backend)
    hosts = [images() * factor for factor in range(8)]
    (wanted,) = zip(*(model(host).values() for host in hosts), strict=True)
    for host, expected in zip(hosts, wanted, strict=True):
        buffer = host.copy()
        (found,) = model(buffer).values()
        buffer[...] = 0
        np.testing.assert_array_equal(found, expected)
    model.close()


def test_results_on_the_device_can_be_used_at_once_on_another_stream(backend: Backend) -> None:
    import cupy

    model = model_of(NETS["residual blocks"], backend)
    (wanted,) = model(images()).values()
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(20):
            given = cupy.zeros((2, 16, 14, 14), np.float32)
            given += cupy.asarray(images())
            (found,) = model(given).values()
            assert float(abs(found - cupy.asarray(wanted)).max()) == 0
    model.close()


def test_an_array_on_another_gpu_is_refused(backend: Backend) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs 2 GPUs")
    model = model_of(NETS["residual blocks"], backend)
    with cupy.cuda.Device(1):
        there = cupy.zeros((2, 16, 14, 14), np.float32)
    with pytest.raises(DeviceError, match="the array is on GPU 1, the net on GPU 0; move one of them"):
        model(there)
    model.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 3, 224, 224), (3, 3, 500, 333), (5, 1000), (2, 3, 4, 5, 6)])
def test_pinned_memory_brings_what_pageable_memory_brings(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    host = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    slow, *fast = (backend.zeros(shape, dtype) for _ in range(5))
    backend.from_host(host, slow)
    for array in fast:
        backend.upload(host, array)
    found = backend.download(fast)
    for values in found:
        np.testing.assert_array_equal(values, backend.to_host(slow))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["mobilenet", "resnet18", "squeezenet", "googlenet"])
def test_whole_nets(name: str, dtype: str) -> None:
    """Deploy nets against the CPU's."""
    generator = np.random.default_rng(2)
    models = [
        caffepy.load(MODELS / name / "deploy.prototxt", device=0, dtype=dtype, math="fp32"),
        caffepy.load(MODELS / name / "deploy.prototxt"),
    ]
    for ours, theirs in zip(models[0].net.layers, models[1].net.layers, strict=False):
        for index, blob in enumerate(theirs.blobs):
            spread = (2 / max(1, np.prod(blob.shape[1:]))) ** 0.5
            values = generator.standard_normal(blob.shape) * (spread if len(blob.shape) > 1 else 0.1)
            if theirs.type == "BatchNorm" or (theirs.type == "Scale" and index == 0):
                values = abs(values) + (index > 0 or theirs.type == "Scale")
            for model, layer in ((models[0], ours), (models[1], theirs)):
                assert layer.name == theirs.name
                with model.backend.activate():
                    model.backend.from_host(values.astype(np.float32), layer.blobs[index].data)
    shape = (2, *next(iter(models[0].inputs.values()))[1:])
    given = generator.standard_normal(shape).astype(np.float32)
    (wanted,) = models[1](given).values()
    for _ in range(3):
        (found,) = models[0](given).values()
        assert root_mean_square(found - wanted) <= (1e-3 if dtype == "float32" else 0.05) * root_mean_square(wanted)
    for model in models:
        model.close()
        model.backend.close()


# -- tests during training ---------------------------------------------------------------------------------

SOLVER = 'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 random_seed: 3 test_iter: 4 test_interval: 100 '


def training_net(folder: Path) -> str:
    """A net whose data come from a file, in turn."""
    generator = np.random.default_rng(4)
    with h5py.File(folder / "data.h5", "w") as file:
        file["data"] = generator.standard_normal((40, 16, 14, 14)).astype(np.float32)
        file["label"] = generator.integers(0, 5, 40).astype(np.float32)
    (folder / "list.txt").write_text(f"{folder}/data.h5\n")
    body = NETS["residual blocks"].split("\n", 1)[1]
    return f"""layer {{ name: "input" type: "HDF5Data" top: "data" top: "label"
      hdf5_data_param {{ source: "{folder}/list.txt" batch_size: 8 }} }}
    {body} layer {{ name: "ip" type: "InnerProduct" bottom: "t" top: "ip"
      inner_product_param {{ num_output: 5 weight_filler {{ type: "xavier" }} }} }}
    layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
    layer {{ name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" }}"""


def trained(folder: Path, backend: Backend, **engine: bool) -> tuple[list[dict[str, float]], dict[str, Any], bool]:
    """Scores of three tests, the weights, and whether tests were replayed."""
    solver = create_solver(solver_param(SOLVER, training_net(folder)), backend, engine=ExecutionOptions(**engine))
    scores = []
    for _ in range(3):
        scores.append({name: float(values.mean()) for name, values in solver.test_all()[0].items()})
        solver.step(3)
    captured = solver.tests[0].captured
    weights = weights_of(solver.net)
    solver.close()
    return scores, weights, captured


def test_tests_during_training_are_replayed_and_score_the_same(backend: Backend, tmp_path: Path) -> None:
    scores, weights, captured = trained(tmp_path, backend)
    eager, weights_eager, captured_eager = trained(tmp_path, backend, eager=True)
    plain, _, _ = trained(tmp_path, backend, eager=True, fuse=False, share=False)
    assert (captured, captured_eager) == (True, False)
    assert scores == eager
    for name, values in weights.items():
        np.testing.assert_array_equal(values, weights_eager[name])
    for ours, theirs in zip(scores, plain, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)
    assert len({score["loss"] for score in scores}) == 3


def test_two_gpus_of_a_process_capture_their_tests_together(tmp_path: Path) -> None:
    from caffepy.backend.cuda.device import device_count

    if device_count() < 2:
        pytest.skip("needs 2 GPUs")
    training = SubprocessTraining(tmp_path)
    one, two = (
        training.train(
            "--no-autotune", devices=("--gpus", gpus, "--math", "fp32"), iterations=100, net_text=NORMALISED_NET
        )
        for gpus in ("0", "0,1")
    )
    assert two.status == 0, two.log
    assert not two.logged("are not captured into graphs")
    values = [[float(line.split(" = ")[1].split()[0]) for line in each.scores()] for each in (one, two)]
    assert len(values[0]) == len(values[1]) >= 5
    np.testing.assert_allclose(values[0][:2], values[1][:2], rtol=0.05, atol=0.05)

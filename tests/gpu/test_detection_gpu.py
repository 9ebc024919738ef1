"""SSD's layers on a GPU: its loss against the host's, training in graphs, and half precision."""

from __future__ import annotations

import detection_net
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training import build_solver, solver_param, weights_of

from caffepy.backend import Backend, create_backend
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net
from caffepy.training.solver import create_solver
from caffepy.utils.options import ExecutionOptions


def _train(backend: Backend, text: str = "", eager: bool = False) -> tuple[float, dict[str, np.ndarray]]:
    param = solver_param(detection_net.SOLVER, text + detection_net.NET)
    solver = create_solver(param, backend, engine=ExecutionOptions(eager=eager))
    try:
        detection_net.fill(solver)
        solver.step(12)
        backend.synchronize()
        return solver.net.loss(), weights_of(solver.net)
    finally:
        solver.close()


def test_captured_and_eager_iterations_give_the_same(backend: Backend) -> None:
    _, captured = _train(backend)
    _, eager = _train(backend, eager=True)
    for name, values in eager.items():
        np.testing.assert_allclose(captured[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_gpu_trains_as_the_cpu(backend: Backend) -> None:
    with build_solver(detection_net.SOLVER, detection_net.NET) as solver:
        detection_net.fill(solver)
        solver.step(12)
        wanted = solver.net.loss()
    found, _ = _train(backend, eager=True)
    assert found == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize("kind", ["FLOAT16", "BFLOAT16"])
def test_half_precision_trains(backend: Backend, kind: str) -> None:
    text = f"default_forward_type: {kind} default_backward_type: {kind} "
    first, _ = _train(backend)
    found, _ = _train(backend, text)
    assert found == pytest.approx(first, rel=0.2)


def _boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    corners = rng.uniform(-0.1, 0.7, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(0.15, 0.5, (count, 2))], axis=1)


def _loss_net(backend: Backend, text: str, values: dict[str, np.ndarray]) -> Net:
    """A MultiBoxLoss whose predictions and scores pass through a layer each, so that they have gradients."""
    param = "force_backward: true "
    for name, value in values.items():
        dims = " ".join(f"dim: {size}" for size in value.shape)
        param += f'layer {{ name: "in_{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }} '
    for name in ("loc", "conf"):
        param += f'layer {{ name: "{name}" type: "Power" bottom: "{name}" top: "{name}s" }} '
    param += 'layer { name: "loss" type: "MultiBoxLoss" bottom: "locs" bottom: "confs" bottom: "prior" bottom: "gt" '
    param += f'top: "loss" multibox_loss_param {{ {text} }} }}'
    net = Net(text_format.Parse(param, caffe_pb2.NetParameter()), LayerContext(backend, caffe_pb2.TRAIN))
    for name, value in values.items():
        backend.from_host(value.astype(np.float32), net.blobs[name].data)
    return net


def _loss_and_gradients(net: Net) -> tuple[float, np.ndarray, np.ndarray]:
    net.forward()
    net.backward()
    net.raise_device_errors()
    return float(net.blobs["loss"].host_data()), net.blobs["locs"].host_diff(), net.blobs["confs"].host_diff()


def _values(seed: int, images: int, priors: int, classes: int, rows: int) -> dict[str, np.ndarray]:
    """Predictions, scores, priors and objects, some of them with the same box, some in images that there are not."""
    rng = np.random.default_rng(seed)
    boxes = _boxes(rng, priors)
    boxes[::5] = boxes[0]
    objects = np.full((rows, 8), -1.0)
    filled = rng.integers(0, rows + 1)
    objects[:filled, 0], objects[:filled, 1] = (
        rng.integers(low, high, filled) for low, high in ((-1, images + 1), (0, classes))
    )
    objects[:filled, 3:7] = np.clip(_boxes(rng, filled), 0, 1)
    objects[1:filled:4, 3:7] = objects[0, 3:7]
    objects[:filled, 7] = rng.integers(0, 2, filled)
    return {
        "loc": rng.normal(0, 0.7, (images, priors * 4)),
        "conf": rng.normal(0, 2, (images, priors * classes)),
        "prior": np.stack([boxes, rng.uniform(0.1, 0.3, (priors, 4))]).reshape(1, 2, -1),
        "gt": objects[None, None],
    }


SETTINGS = st.fixed_dictionaries(
    {
        "code_type": st.sampled_from(["CORNER", "CENTER_SIZE", "CORNER_SIZE"]),
        "match_type": st.sampled_from(["BIPARTITE", "PER_PREDICTION"]),
        "mining_type": st.sampled_from(["NONE", "MAX_NEGATIVE"]),
        "conf_loss_type": st.sampled_from(["SOFTMAX", "LOGISTIC"]),
        "loc_loss_type": st.sampled_from(["L2", "SMOOTH_L1"]),
        "use_difficult_gt": st.sampled_from(["true", "false"]),
        "bp_inside": st.sampled_from(["true", "false"]),
        "encode_variance_in_target": st.sampled_from(["true", "false"]),
        "ignore_cross_boundary_bbox": st.sampled_from(["true", "false"]),
        "neg_pos_ratio": st.sampled_from([0, 1, 2.5, 100]),
        "overlap_threshold": st.sampled_from([0.2, 0.5]),
    }
)


SIZES = st.tuples(*map(st.sampled_from, ([1, 3], [5, 600, 3000], [2, 40], [1, 9, 70])))
"""Images, priors, classes, rows of objects."""


@given(SETTINGS, st.integers(0, 10_000), SIZES)
@settings(
    max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_the_devices_loss_is_the_hosts(
    backend: Backend, chosen: dict[str, object], seed: int, sizes: tuple[int, int, int, int]
) -> None:
    images, priors, classes, rows = sizes
    text = f"num_classes: {classes} " + " ".join(f"{name}: {value}" for name, value in chosen.items())
    values = _values(seed, images, priors, classes, rows)
    net = _loss_net(backend, text, values)
    assert net.nodes[-1].layer.capture_blocker() is None
    found, wanted = _loss_and_gradients(net), _loss_and_gradients(_loss_net(create_backend(), text, values))
    assert found[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-6)
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * max(1.0, float(np.abs(theirs).max())))


def test_equal_losses_are_mined_from_the_first_prior_on(backend: Backend) -> None:
    """One object, one match, two of four others that all have the same scores."""
    values = _values(0, 1, 5, 3, 1)
    values["prior"][0, 0] = np.concatenate([[0, 0, 0.2, 0.2] * 2, [0.5, 0.5, 0.9, 0.9], [0, 0, 0.2, 0.2] * 2])
    values["gt"][...] = [0, 1, 0, 0.5, 0.5, 0.9, 0.9, 0]
    values["conf"][...] = np.tile([1, 2, 3], 5)
    gradient = _loss_and_gradients(_loss_net(backend, "num_classes: 3 neg_pos_ratio: 2", values))[2].reshape(5, 3)
    assert np.abs(gradient).max(1).astype(bool).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("blob", "place", "value", "message"),
    [
        ("gt", 1, np.nan, "row 0 of 'gt' has the image 0 and the label nan"),
        ("gt", 1, 7.0, "'gt' has an object of class 7 in image 0 of the batch, but there are 3 classes, 0 to 2"),
        ("prior", 23, 0.0, "prior 0 of 'prior' is .* with variances .*: it needs variances above 0 and a width"),
        ("prior", 6, -0.5, "prior 1 of 'prior' is"),
    ],
)
def test_what_cannot_be_computed_with_is_named(
    backend: Backend, blob: str, place: int, value: float, message: str
) -> None:
    values = _values(3, 1, 5, 3, 1)
    values["gt"][...] = [0, 1, 0, 0.5, 0.5, 0.9, 0.9, 0]
    values[blob].reshape(-1)[place] = value
    net = _loss_net(backend, "num_classes: 3 code_type: CENTER_SIZE", values)
    with pytest.raises(DataError, match=message):
        _loss_and_gradients(net)
    net.raise_device_errors()  # reported once

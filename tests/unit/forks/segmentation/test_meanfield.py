"""MultiStageMeanfield: against its formula with all pairs of pixels."""

from __future__ import annotations

import time

import numpy as np
import pytest
from google.protobuf import text_format
from lattice import dense, pixels
from layer_harness import TEST, Floats, Runner, check_layer, gaussian
from training import CPU

from caffepy import create_solver
from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.forks.segmentation.permutohedral import make_lattice
from caffepy.formats.proto import caffe_pb2

SHAPE = (2, 3, 4, 5)
SETTINGS = "theta_alpha: 4 theta_beta: 2 theta_gamma: 1.5"


def layer(iterations: int = 2, more: str = "") -> str:
    """A layer's prototxt."""
    settings = f"num_iterations: {iterations} {SETTINGS} {more}"
    return f"type: 'MultiStageMeanfield' multi_stage_meanfield_param {{ {settings} }}"


def image(seed: int = 5, shape: tuple[int, ...] = (2, 3, 4, 5)) -> Floats:
    """Colors some deviations apart."""
    return 2 * gaussian(shape, seed)


def normalised(features: Floats) -> Floats:
    """Weights of all pairs whose rows add up to 1."""
    weights = dense(make_lattice(features))
    return weights / weights.sum(axis=1, keepdims=True)


def reference(colors: Floats, iterations: int) -> object:
    """The formula in float64 for images of these colors."""
    images, _, height, width = colors.shape
    places = pixels(height, width, 1.0)
    spatial = normalised(places / 1.5)
    each = np.asarray(colors, np.float64).reshape(images, 3, -1).transpose(0, 2, 1)
    bilateral = [normalised(np.concatenate([places / 4, color / 2], axis=1)) for color in each]

    def formula(unary: Floats, scores: Floats, _: Floats, *weights: Floats) -> Floats:
        first, second, compatibility = (blob.reshape(blob.shape[2:]) for blob in weights)
        for _ in range(iterations):
            power = np.exp(scores - scores.max(axis=1, keepdims=True))
            flat = (power / power.sum(axis=1, keepdims=True)).reshape(images, unary.shape[1], -1)
            mixed = [first @ p @ spatial.T + second @ p @ own.T for p, own in zip(flat, bilateral, strict=True)]
            scores = unary - np.reshape([compatibility @ one for one in mixed], unary.shape)
        return scores

    return formula


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_formula_and_gradients(iterations: int) -> None:
    weights = [0.5 * gaussian((1, 1, 3, 3), seed) for seed in (7, 8, 9)]
    inputs = [gaussian(SHAPE, 1), gaussian(SHAPE, 2), image()]
    check_layer(layer(iterations), inputs, reference(image(), iterations), params=weights)


def test_initial_matrices_are_diagonal() -> None:
    runner = Runner(
        layer(more="spatial_filter_weight: 3 bilateral_filter_weight: 5"), [gaussian(SHAPE)] * 2 + [image()]
    )
    assert [blob.shape for blob in runner.layer.blobs] == [(1, 1, 3, 3)] * 3
    for blob, value in zip(runner.layer.blobs, (3, 5, -1), strict=True):
        np.testing.assert_array_equal(blob.host_data()[0, 0], value * np.eye(3, dtype=np.float32))


def test_other_shapes_and_images_follow() -> None:
    """The lattices are those of the present bottoms."""
    runner = Runner(layer(), [gaussian(SHAPE, 1), gaussian(SHAPE, 1), image()], phase=TEST)
    weights = [blob.host_data() for blob in runner.layer.blobs]
    other = image(6)
    found = runner.forward([gaussian(SHAPE, 1), gaussian(SHAPE, 1), other])[0]
    wanted = reference(other, 2)(gaussian(SHAPE, 1), gaussian(SHAPE, 1), other, *weights)  # type: ignore[operator]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    for blob, shape in zip(runner.bottom, ((1, 3, 6, 2), (1, 3, 6, 2), (1, 3, 6, 2)), strict=True):
        blob.reshape(shape)
    runner.layer.reshape(runner.bottom, runner.top)
    values = [gaussian(shape := (1, 3, 6, 2), 1), gaussian(shape, 1), image(7, shape)]
    wanted = reference(values[2], 2)(*values, *weights)  # type: ignore[operator]
    np.testing.assert_allclose(runner.forward(values)[0], wanted, rtol=1e-4, atol=1e-4)


def test_smooths_noise_within_the_colors_of_an_image() -> None:
    """An image of two halves, and scores of which a fifth is wrong."""
    side = np.tile(np.arange(24) < 12, (24, 1))
    wrong = np.random.default_rng(0).random((24, 24)) < 0.2
    scores = np.where(side ^ wrong, 1.0, -1.0)
    unary = np.stack([scores, -scores])[None].astype(np.float32)
    colors = np.tile(np.where(side, 0, 200), (1, 3, 1, 1)).astype(np.float32)
    settings = "num_iterations: 5 theta_alpha: 20 theta_beta: 3 theta_gamma: 3 bilateral_filter_weight: 5"
    text = f"type: 'MultiStageMeanfield' multi_stage_meanfield_param {{ {settings} }}"
    found = Runner(text, [unary, unary, colors], phase=TEST).forward()[0]
    assert np.array_equal(found[0, 0] > found[0, 1], side)


def test_an_image_of_21_classes_takes_seconds() -> None:
    shape = (1, 21, 100, 100)
    colors = np.random.default_rng(0).integers(0, 255, (1, 3, 100, 100)).astype(np.float32)
    settings = "num_iterations: 10 theta_alpha: 160 theta_beta: 3 theta_gamma: 3"
    text = f"type: 'MultiStageMeanfield' multi_stage_meanfield_param {{ {settings} }}"
    runner = Runner(text, [gaussian(shape), gaussian(shape), colors], phase=TEST)
    start = time.perf_counter()
    assert np.isfinite(runner.forward()[0]).all()
    assert time.perf_counter() - start < 30


def test_learns_the_weights_of_its_filters() -> None:
    """Noisy scores of an image of two halves, with filters that are switched off at first."""
    net = caffe_pb2.NetParameter()
    text_format.Parse(
        """
        layer { name: "in" type: "Input" top: "unary" top: "image" top: "label" input_param {
          shape { dim: 1 dim: 2 dim: 12 dim: 12 } shape { dim: 1 dim: 3 dim: 12 dim: 12 }
          shape { dim: 1 dim: 1 dim: 12 dim: 12 } } }
        layer { name: "crf" type: "MultiStageMeanfield" bottom: "unary" bottom: "unary" bottom: "image" top: "score"
          multi_stage_meanfield_param { num_iterations: 2 theta_alpha: 10 theta_beta: 3 theta_gamma: 1
            spatial_filter_weight: 0.1 bilateral_filter_weight: 0.1 } }
        layer { name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" }
        """,
        net,
    )
    solver = create_solver(caffe_pb2.SolverParameter(net_param=net, base_lr=1, lr_policy="fixed", momentum=0.9), CPU)
    side = np.tile(np.arange(12) < 6, (12, 1))
    scores = np.where(side ^ (np.random.default_rng(0).random((12, 12)) < 0.2), 1.0, -1.0)
    values = {
        "unary": np.stack([-scores, scores])[None],
        "image": np.tile(np.where(side, 0, 200), (1, 3, 1, 1)),
        "label": side[None, None],
    }
    for name, value in values.items():
        CPU.from_host(value.astype(np.float32), solver.net.blobs[name].data)
    solver.net.forward()
    first = float(solver.net.blobs["loss"].host_data())
    solver.step(20)
    assert float(solver.net.blobs["loss"].host_data()) < 0.5 * first


def test_refusals() -> None:
    inputs = [gaussian(SHAPE), gaussian(SHAPE), image()]
    with pytest.raises(ConfigError, match="num_iterations is 0"):
        Runner(layer(0), inputs)
    with pytest.raises(ConfigError, match="theta_gamma is 0; it must be more than 0"):
        Runner(layer().replace("theta_gamma: 1.5", "theta_gamma: 0"), inputs)
    with pytest.raises(ShapeError, match="images"):
        Runner(layer(), [*inputs[:2], gaussian((2, 1, 4, 5))])
    broken = image()
    broken[0, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match="not all finite"):
        Runner(layer(), [*inputs[:2], broken]).forward()
    with pytest.raises(DataError, match="too far apart"):
        Runner(layer(), [*inputs[:2], 1e12 * image()]).forward()

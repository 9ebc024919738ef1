"""DataAugmentation, FlowAugmentation, GenerateAugmentationParameters and Mean."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, TRAIN, Runner, check_layer, gaussian
from training import build_net, build_solver, weights_of

from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.forks.flow import augmentation as coefficients
from caffepy.forks.flow.augmentation import DEFAULTS, NAMES, from_array, to_array
from caffepy.formats.proto import caffe_pb2
from caffepy.net.trained_layers import copy_trained_layers

CROP = "crop_width: 6 crop_height: 4"
PIXELS = np.random.default_rng(5).uniform(0.1, 0.9, (2, 3, 9, 10)).astype(np.float32)


def data(fields: str, more: str = "") -> str:
    return f"type: 'DataAugmentation' augmentation_param {{ {fields} }} {more}"


def outputs(text: str, inputs: list[Any], **settings: Any) -> list[Any]:
    """The tops on the CPU, after a comparison with those on other devices."""
    results = [Runner(text, inputs, backend, **settings).forward() for backend in BACKENDS]
    for other in results[1:]:
        for found, wanted in zip(other, results[0], strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-5)
    return results[0]


def some(**values: float) -> Any:
    """The array of coefficients of two samples, the first with default values."""
    return np.stack([to_array(DEFAULTS), to_array({**DEFAULTS, **values})]).reshape(2, len(NAMES), 1, 1)


def warped(image: Any, values: dict[str, float], height: int, width: int) -> Any:
    """Each pixel's way back into the image, and the value there."""
    y = np.zeros((image.shape[0], height, width))
    for i in range(height):
        for j in range(width):
            a, b = j - width / 2, i - height / 2
            if values["mirror"]:
                a = -a
            angle = values["angle"]
            a, b = math.cos(angle) * a - math.sin(angle) * b, math.sin(angle) * a + math.cos(angle) * b
            a, b = a + values["dx"] * width, b + values["dy"] * height
            a, b = a / values["zoom_x"] + image.shape[2] / 2, b / values["zoom_y"] + image.shape[1] / 2
            a, b = max(0, min(a, image.shape[2] - 1.05)), max(0, min(b, image.shape[1] - 1.05))
            h, w = int(b), int(a)
            part, rows, columns = image[:, h : h + 2, w : w + 2], [1 - (b - h), b - h], [1 - (a - w), a - w]
            y[:, i, j] = (part * np.outer(rows, columns)).sum(axis=(1, 2))
    return y


def test_order_of_the_coefficients() -> None:
    """The 42 of FlowNet 2, in its order; factors as logarithms."""
    assert len(NAMES) == 42 and NAMES[6:8] == ("gamma", "brightness")
    assert NAMES[12] == "pow_nomean0" and NAMES[21] == "pow_withmean0" and NAMES[33] == "col_angle"
    assert NAMES[-1] == "noise" and not to_array(DEFAULTS).any()
    values = {**DEFAULTS, "zoom_x": 2.0, "dx": 0.25}
    assert from_array(to_array(values)) == pytest.approx(values)
    assert to_array(values)[NAMES.index("zoom_x")] == np.float32(math.log(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_crop_in_a_test(backend: str) -> None:
    runner = Runner(data(CROP + " mirror { rand_type: 'bernoulli' }"), [PIXELS], backend, tops=2, phase=TEST)
    y, values = runner.forward()
    for n in range(2):
        np.testing.assert_allclose(y[n], warped(PIXELS[n], DEFAULTS, 4, 6), atol=1e-5)
    assert not values.any() and values.shape == (2, 42, 1, 1)
    assert np.array_equal(Runner(data(""), [PIXELS], backend).forward()[0], PIXELS)


@pytest.mark.parametrize(
    "values",
    [
        {"mirror": 1.0},
        {"dx": 0.2, "dy": -0.3},
        {"angle": 0.4, "zoom_x": 1.3, "zoom_y": 0.8, "dx": 0.1, "mirror": 1.0},
        {"zoom_x": 0.4, "zoom_y": 0.4},
    ],
)
def test_spatial(values: dict[str, float]) -> None:
    y, passed = outputs(data(CROP), [PIXELS, some(**values)], tops=2)
    np.testing.assert_allclose(y[0], warped(PIXELS[0], DEFAULTS, 4, 6), atol=1e-5)
    np.testing.assert_allclose(y[1], warped(PIXELS[1], {**DEFAULTS, **values}, 4, 6), atol=1e-5)
    assert np.array_equal(passed, some(**values))


def test_colour_gamma_brightness_contrast() -> None:
    values = {"gamma": 1.4, "brightness": 0.1, "contrast": 0.7, "color1": 1.2, "color2": 0.9, "color3": 0.6}
    y = outputs(data(CROP + " max_multiplier: 0.8"), [PIXELS, some(**values)])[0]
    for n, gamma, brightness, contrast, factors in ((0, 1, 0, 1, (1, 1, 1)), (1, 1.4, 0.1, 0.7, (1.2, 0.9, 0.6))):
        x = warped(PIXELS[n], DEFAULTS, 4, 6)
        coloured = x * np.reshape(factors, (3, 1, 1))
        wanted = np.clip(coloured * x.sum(axis=0) / (coloured.sum(axis=0) + 0.01), 0, 1) ** gamma + brightness
        wanted = np.clip(0.5 + (wanted - 0.5) * contrast, 0, 0.8)
        np.testing.assert_allclose(y[n], wanted, atol=1e-5)


VECTORS = np.array([[0.51, 0.56, 0.65], [0.79, 0.01, -0.62], [0.35, -0.83, 0.44]])
EIGEN = CROP + " max_multiplier: 1 " + " ".join(f"chromatic_eigvec: {v}" for v in VECTORS.ravel())


def test_colours_in_the_space_of_eigenvectors() -> None:
    """FlowNet 2's steps, for one pixel at a time."""
    values = {
        "pow_nomean0": 1.1,
        "add_nomean0": 0.05,
        "mult_nomean0": 1.2,
        "pow_nomean1": 0.9,
        "add_nomean2": -0.04,
        "mult_nomean2": 0.8,
        "pow_withmean0": 0.95,
        "add_withmean0": 0.02,
        "mult_withmean0": 1.1,
        "pow_withmean1": 1.05,
        "add_withmean1": 0.03,
        "mult_withmean1": 0.9,
        "lmult_pow": 1.1,
        "lmult_add": 0.02,
        "lmult_mult": 0.9,
        "col_angle": 0.3,
    }
    y = outputs(data(EIGEN), [PIXELS, some(**values)])[0][1]
    colours = PIXELS.transpose(0, 2, 3, 1).reshape(-1, 3).astype(float)
    mean, largest = colours.mean(axis=0), np.abs(colours @ VECTORS.T).max(axis=0)
    v = {**DEFAULTS, **values}
    length = math.sqrt((largest**2).sum())
    crop = warped(PIXELS[1], DEFAULTS, 4, 6)
    for i in range(4):
        for j in range(6):
            e = VECTORS @ (crop[:, i, j] - mean)
            for c in range(3):
                e[c] = math.copysign(abs(e[c] / largest[c]) ** v[f"pow_nomean{c}"], e[c])
                e[c] = (e[c] + v[f"add_nomean{c}"]) * v[f"mult_nomean{c}"]
            e += VECTORS @ mean / largest
            e[0] = math.copysign(abs(e[0]) ** v["pow_withmean0"], e[0])
            e[0] = (e[0] + v["add_withmean0"]) * v["mult_withmean0"]
            s = math.hypot(e[1], e[2])
            wanted = max(s ** v["pow_withmean1"] + v["add_withmean1"], 0) * v["mult_withmean1"]
            angle = v["col_angle"]
            e[1:] = [math.cos(angle) * e[1] - math.sin(angle) * e[2], math.sin(angle) * e[1] + math.cos(angle) * e[2]]
            e *= largest
            before = math.sqrt((e**2).sum()) / length
            if s > 0.01:
                e[1:] *= wanted / s
            target = max(before ** v["lmult_pow"] + v["lmult_add"], 0) * v["lmult_mult"] * length
            e = np.minimum(e / math.sqrt((e**2).sum()) * target, largest)
            np.testing.assert_allclose(y[:, i, j], np.clip(VECTORS.T @ e, 0, 1), atol=2e-4)


def test_shadow_and_noise() -> None:
    values = {"shadow_angle": 0.3, "shadow_distance": 0.5, "shadow_strength": 0.2}
    y = outputs(data(CROP + " max_multiplier: 1"), [PIXELS, some(**values)])[0][1]
    rows, columns = np.meshgrid(np.arange(4) - 2, np.arange(6) - 3, indexing="ij")
    dark = columns * math.cos(0.3) + rows * math.sin(0.3) > 0.5
    wanted = np.clip(warped(PIXELS[1], DEFAULTS, 4, 6) - 0.2 * dark, 0, 1)
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    images = np.full((2, 3, 60, 60), 0.5, np.float32)
    text = data("crop_width: 50 crop_height: 50 max_multiplier: 1")
    noisy = outputs(text, [images, some(noise=0.1)])[0]
    assert np.array_equal(noisy[0], images[0, :, :50, :50])
    assert abs(noisy[1].std() - 0.1) < 0.003 and abs(noisy[1].mean() - 0.5) < 0.004


def test_draws_belong_to_samples() -> None:
    """A sample is augmented alike in every batch and on every device, and differently in the next pass."""
    text = data(CROP + " translate { spread: 0.2 } gamma { exp: true spread: 0.3 } noise { spread: 0.05 mean: 0.1 }")
    both = outputs(text, [PIXELS], tops=2, first_sample=6)
    second = outputs(text, [PIXELS[1:]], tops=2, first_sample=7)
    assert np.array_equal(both[1][1:], second[1])
    np.testing.assert_allclose(both[0][1:], second[0], atol=1e-6)
    later = outputs(text, [PIXELS], tops=2, first_sample=8)
    assert not np.isclose(both[1], later[1]).all(axis=1).any()
    assert not np.array_equal(both[1][0], both[1][1])


def rand(text: str) -> Any:
    from google.protobuf import text_format

    return text_format.Parse(text, caffe_pb2.RandomGeneratorParameter())


def drawn(text: str, count: int = 2000, **settings: Any) -> Any:
    from caffepy.data.random import SampleRng

    rng = SampleRng(1, 2, 3)
    return np.array([coefficients.draw(rand(text), rng, **settings) for _ in range(count)])


def test_distributions() -> None:
    uniform = drawn("mean: 1 spread: 0.5")
    assert abs(uniform.mean() - 1) < 0.03 and uniform.min() >= 0.5 and uniform.max() <= 1.5
    assert abs(uniform.std() - 0.5 / math.sqrt(3)) < 0.02
    normal = drawn("rand_type: 'gaussian' mean: 1 spread: 0.5")
    assert abs(normal.mean() - 1) < 0.04 and abs(normal.std() - 0.5) < 0.03
    assert (drawn("mean: 2 spread: 1", factor=0.0) == 2).all()
    assert drawn("mean: 2 spread: 1 apply_schedule: false", factor=0.0).std() > 0.3
    assert abs(drawn("rand_type: 'bernoulli' prob: 0.3").mean() - 0.3) < 0.04
    some_of_them = drawn("rand_type: 'uniform_bernoulli' prob: 0.4 mean: 3", otherwise=1.5)
    assert set(np.unique(some_of_them)) == {1.5, 3} and abs((some_of_them == 3).mean() - 0.4) < 0.04
    assert set(np.unique(drawn("rand_type: 'gaussian_bernoulli' prob: 0.4 mean: 0.5 exp: true"))) == {1, math.exp(0.5)}
    whole = drawn("mean: 0 spread: 2 discretize: true multiplier: 10")
    assert set(np.unique(whole)) == {-20, -10, 0, 10, 20}


def test_schedule() -> None:
    param = caffe_pb2.CoeffScheduleParameter(half_life=100, initial_coeff=0.5, final_coeff=1)
    found = [coefficients.schedule(param, number) for number in (0, 100, 10**6)]
    assert found == pytest.approx([0.5, 0.75, 1], abs=1e-4)
    text = "type: 'GenerateAugmentationParameters' augmentation_param { crop_width: 4 crop_height: 4 brightness "
    text += "{ spread: 1 } } coeff_schedule_param { half_life: 100 initial_coeff: 0 final_coeff: 1 }"
    place = NAMES.index("brightness")
    early, late = (outputs(text, [PIXELS], pass_number=n)[0][:, place] for n in (0, 10**6))
    np.testing.assert_allclose(early, 0.00549 * late, rtol=2e-2)


def generate(fields: str) -> str:
    return f"type: 'GenerateAugmentationParameters' augmentation_param {{ {fields} }}"


def test_modes() -> None:
    """Added to, in place of, or instead of the given coefficients."""
    given, image, crop = some(dx=0.125, gamma=2.0, contrast=0.5), PIXELS, PIXELS[:, :, :4, :4]
    fields = "translate_x { mean: 0.0625 } gamma { mean: 1.5 } shadow_strength { mean: 0.25 }"
    wanted = {
        "add": {"dx": 0.1875, "gamma": 3.0, "contrast": 0.5, "shadow_strength": 0.25},
        "replace": {"dx": 0.0625, "gamma": 1.5, "contrast": 0.5, "shadow_strength": 0.25},
        "regenerate": {"dx": 0.0625, "gamma": 1.5, "shadow_strength": 0.25},
    }
    for mode, values in wanted.items():
        y = outputs(generate(f"mode: '{mode}' {fields}"), [given, image, crop])[0]
        np.testing.assert_allclose(y[1:], some(**values)[1:], atol=1e-6, err_msg=mode)
    alone = outputs(generate(f"crop_width: 4 crop_height: 4 {fields}"), [image])[0]
    np.testing.assert_allclose(alone[1:], some(**wanted["regenerate"])[1:], atol=1e-6)
    sizes = "crop_width: 4 crop_height: 4 bottomwidth: 10 bottomheight: 9"
    np.testing.assert_allclose(outputs(generate(f"{sizes} {fields}"), [given])[0][1:], some(**wanted["add"])[1:])


def test_coefficients_of_a_test() -> None:
    given = some(dx=0.125)
    for fields, change in (("", False), ("augment_during_test: true", True)):
        text = generate(f"{fields} brightness {{ mean: 0.5 }} crop_width: 4 crop_height: 4")
        found = outputs(text, [given], phase=TEST)[0]
        assert np.array_equal(found, given) != change
        assert outputs(text, [given], phase=TRAIN)[0][0, NAMES.index("brightness")] == 0.5


def test_transformations_stay_within_the_image() -> None:
    fields = (
        "translate { spread: 0.5 } rotate { spread: 0.7 } zoom { exp: true spread: 0.5 } squeeze { exp: true spread: "
    )
    fields += "0.3 } mirror { rand_type: 'bernoulli' prob: 0.5 }"
    image = np.zeros((200, 1, 40, 50), np.float32)
    y = outputs(generate(f"crop_width: 20 crop_height: 16 {fields}"), [image])[0]
    mirrored = 0
    for array in y.reshape(200, -1):
        values = from_array(array)
        mirrored += values["mirror"] == 1
        matrix = coefficients.transformation(values, (40, 50), (16, 20))
        corners = matrix @ np.array([[0, 19, 0, 19], [0, 0, 15, 15], [1, 1, 1, 1]])
        assert corners.min() >= 0 and corners[0].max() < 49 and corners[1].max() < 39
    assert 60 < mirrored < 140 and np.abs(y[:, NAMES.index("angle")]).max() > 0.4
    too_far = outputs(generate("crop_width: 20 crop_height: 16 translate_y { mean: 9 }"), [image[:1]])[0]
    assert not too_far.any()


ALL = {
    "fog_amount": ("fog_amount",),
    "fog_size": ("fog_size",),
    "motion_blur_angle": ("motion_blur_angle",),
    "motion_blur_size": ("motion_blur_size",),
    "shadow_angle": ("shadow_angle",),
    "shadow_distance": ("shadow_distance",),
    "shadow_strength": ("shadow_strength",),
    "noise": ("noise",),
    "gamma": ("gamma",),
    "brightness": ("brightness",),
    "contrast": ("contrast",),
    "color": ("color1", "color2", "color3"),
    "translate": ("dx", "dy"),
    "translate_x": ("dx",),
    "translate_y": ("dy",),
    "rotate": ("angle",),
    "zoom": ("zoom_x", "zoom_y"),
    "mirror": ("mirror",),
    "ladd_pow": ("pow_nomean0",),
    "ladd_add": ("add_nomean0",),
    "ladd_mult": ("mult_nomean0",),
    "col_pow": ("pow_nomean1", "pow_nomean2"),
    "col_add": ("add_nomean1", "add_nomean2"),
    "col_mult": ("mult_nomean1", "mult_nomean2"),
    "sat_pow": ("pow_withmean1", "pow_withmean2"),
    "sat_add": ("add_withmean1", "add_withmean2"),
    "sat_mult": ("mult_withmean1", "mult_withmean2"),
    "lmult_pow": ("lmult_pow",),
    "lmult_add": ("lmult_add",),
    "lmult_mult": ("lmult_mult",),
    "col_rotate": ("col_angle",),
}


@pytest.mark.parametrize("field", ALL)
def test_field_of_each_coefficient(field: str) -> None:
    mean = "rand_type: 'bernoulli'" if field == "mirror" else "mean: 1.0625"
    sizes = "crop_width: 4 crop_height: 4 bottomwidth: 40 bottomheight: 40"
    y = outputs(generate(f"{sizes} mode: 'regenerate' {field} {{ {mean} }}"), [some()])[0]
    wanted = dict.fromkeys(ALL[field], 1.0 if field == "mirror" else 1.0625)
    np.testing.assert_allclose(y[1:], some(**wanted)[1:], atol=1e-6)


def test_squeeze() -> None:
    sizes = "crop_width: 4 crop_height: 4 bottomwidth: 40 bottomheight: 40"
    y = outputs(generate(f"{sizes} mode: 'regenerate' squeeze {{ mean: 1.25 }}"), [some()])[0]
    np.testing.assert_allclose(y[1:], some(zoom_x=1.25, zoom_y=0.8)[1:], atol=1e-6)


def test_flow_between_augmented_images() -> None:
    """A pixel's flow leads to the place where the second augmentation puts the pixel that the flow names."""
    flow = gaussian((2, 2, 9, 10)) * np.float32(0.7)
    first, second = some(dx=0.05, angle=0.1), some(zoom_x=1.2, zoom_y=1.1, mirror=1.0)
    y = outputs(f"type: 'FlowAugmentation' augmentation_param {{ {CROP} }}", [flow, first, second])[0]
    for n in range(2):
        to_first, to_second = (
            coefficients.transformation(from_array(a[n].ravel()), (9, 10), (4, 6)) for a in (first, second)
        )
        for i in range(4):
            for j in range(6):
                place = to_first @ [j, i, 1]
                h, w = int(place[1] + 0.5), int(place[0] + 0.5)
                target = [j, i] + y[n, :, i, j]
                np.testing.assert_allclose(to_second @ [*target, 1], place + flow[n, :, h, w], atol=1e-4)


@pytest.mark.parametrize("per_pixel", ["true", "false"])
def test_mean_of_the_first_passes(per_pixel: str) -> None:
    runner = Runner(data(f"{CROP} recompute_mean: 2 mean_per_pixel: {per_pixel}"), [PIXELS])
    batches = [PIXELS, PIXELS + np.float32(0.5), PIXELS * 3]
    crops = [np.stack([warped(x, DEFAULTS, 4, 6) for x in batch]) for batch in batches]
    means = [crops[0].mean(axis=0), (crops[0].mean(axis=0) + crops[1].mean(axis=0)) / 2]
    for batch, crop, mean in zip(batches, crops, [*means, means[1]], strict=True):
        if per_pixel == "false":
            mean = mean.mean(axis=(1, 2), keepdims=True)
        np.testing.assert_allclose(runner.forward([batch])[0], crop - mean, atol=1e-5)
    assert [blob.shape for blob in runner.layer.blobs] == [(1, 1, 1, 1), (1, 3, 4, 6), (1, 3, 1, 1)]
    assert runner.layer.blobs[0].host_data().item() == 3
    assert all(spec.lr_mult == 0 for spec in runner.layer.param.param)


def test_given_mean() -> None:
    y = outputs(data(f"{CROP} mean: 0.1 mean: 0.2 mean: 0.3 mean_per_pixel: false"), [PIXELS])[0]
    wanted = np.stack([warped(x, DEFAULTS, 4, 6) for x in PIXELS]) - np.reshape([0.1, 0.2, 0.3], (3, 1, 1))
    np.testing.assert_allclose(y, wanted, atol=1e-5)


NET = """
layer {{ name: 'in' type: 'Input' top: 'x' input_param {{ shape {{ dim: 1 dim: 3 dim: 9 dim: 10 }} }} }}
layer {{ name: 'aug' type: 'DataAugmentation' bottom: 'x' top: 'y'
        augmentation_param {{ recompute_mean: 5 mean_per_pixel: {} crop_height: {} crop_width: 6 }} }}
"""


@pytest.mark.parametrize("per_pixel", ["true", "false"])
def test_mean_of_another_size(per_pixel: str) -> None:
    """A file's mean of pixels becomes one of channels where the crop has another size."""
    mean = gaussian((1, 3, 2, 6))
    stored = caffe_pb2.NetParameter()
    layer = stored.layer.add(name="aug", type="DataAugmentation")
    for values in (np.full((1, 1, 1, 1), 9.0), mean, mean.mean(axis=(2, 3), keepdims=True)):
        blob = layer.blobs.add(data=values.ravel())
        blob.shape.dim.extend(values.shape)
    net = build_net(NET.format(per_pixel, 4), TEST)
    copy_trained_layers(net.layers, stored, "file")
    net.blobs["x"].backend.from_host(PIXELS[:1], net.blobs["x"].data)
    net.forward()
    wanted = warped(PIXELS[0], DEFAULTS, 4, 6) - mean.mean(axis=(2, 3)).reshape(3, 1, 1)
    np.testing.assert_allclose(net.blobs["y"].host_data()[0], wanted, atol=1e-5)


def test_parameters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        outputs(data(f"{CROP} write_augmented: 'x' translate_x {{ mean: 0.1 }}"), [PIXELS], first_sample=4)
    assert "sample 5: {'dx': 0.1}" in caplog.text


def test_bad_settings() -> None:
    for text, inputs, error in (
        (data("crop_width: 11 crop_height: 4"), [PIXELS], ShapeError),
        (data(CROP), [PIXELS, np.zeros((2, 41, 1, 1))], ShapeError),
        (data(CROP + " zoom { rand_type: 'normal' }"), [PIXELS], ConfigError),
        (data(CROP + " chromatic_eigvec: 1"), [PIXELS], ConfigError),
        (data(CROP + " mean: 1 mean: 2 mean: 3 mean_per_pixel: false"), [PIXELS[:, :2]], ShapeError),
        (generate("mode: 'multiply'"), [PIXELS], ConfigError),
        (generate("zoom { mean: 1 }"), [PIXELS], ConfigError),
        (generate(""), [PIXELS, PIXELS], ConfigError),
        ("type: 'FlowAugmentation'", [PIXELS[:, :2], some(), some()], ConfigError),
        (f"type: 'FlowAugmentation' augmentation_param {{ {CROP} }}", [PIXELS, some(), some()], ShapeError),
    ):
        with pytest.raises(error):
            Runner(text, inputs)
    for text in (data(CROP), data(CROP)):
        with pytest.raises((ConfigError, ShapeError)):
            outputs(text, [PIXELS[:, :2] if text == data(CROP) else PIXELS, some(gamma=2.0)])
    with pytest.raises(ConfigError, match="nine numbers"):
        outputs(data(CROP), [PIXELS, some(col_angle=2.0)])


TRAINED = """
layer { name: 'd' type: 'DummyData' top: 'x' top: 'flow' dummy_data_param {
  shape { dim: 2 dim: 3 dim: 12 dim: 12 } shape { dim: 2 dim: 2 dim: 12 dim: 12 }
  data_filler { type: 'uniform' min: 0 max: 1 } data_filler { type: 'gaussian' } } }
layer { name: 'aug' type: 'DataAugmentation' bottom: 'x' top: 'a' top: 'p' augmentation_param { crop_width: 8
  crop_height: 8 max_multiplier: 1 recompute_mean: 3 mean_per_pixel: false translate { spread: 0.1 } } }
layer { name: 'gen' type: 'GenerateAugmentationParameters' bottom: 'p' bottom: 'x' bottom: 'a' top: 'q'
  augmentation_param { rotate { spread: 0.1 } } }
layer { name: 'aug2' type: 'DataAugmentation' bottom: 'x' bottom: 'q' top: 'b' augmentation_param { crop_width: 8
  crop_height: 8 max_multiplier: 1 } }
layer { name: 'gt' type: 'FlowAugmentation' bottom: 'flow' bottom: 'p' bottom: 'q' top: 'gt' augmentation_param {
  crop_width: 8 crop_height: 8 } }
layer { name: 'f' type: 'Convolution' bottom: 'a' bottom: 'b' top: 'fa' top: 'fb' convolution_param { num_output: 4
  kernel_size: 3 pad: 1 weight_filler { type: 'msra' } } }
layer { name: 'c' type: 'Correlation' bottom: 'fa' bottom: 'fb' top: 'c' correlation_param { pad: 2 kernel_size: 1
  max_displacement: 2 } }
layer { name: 'u' type: 'Convolution' bottom: 'c' top: 'u' convolution_param { num_output: 2 kernel_size: 3 pad: 1
  weight_filler { type: 'msra' } } }
layer { name: 'w' type: 'Warp' bottom: 'fb' bottom: 'u' top: 'w' }
layer { name: 'l1' type: 'L1Loss' bottom: 'u' bottom: 'gt' top: 'l1' l1_loss_param { l2_per_location: true } }
layer { name: 'l2' type: 'L1Loss' bottom: 'fa' bottom: 'w' top: 'l2' l1_loss_param { } }
"""


def test_a_flow_net_trains() -> None:
    """The mean is kept from weight decay and is that of the test net; the same seed gives the same bits."""
    text = "base_lr: 1e-4 lr_policy: 'fixed' max_iter: 5 weight_decay: 0.5 test_iter: 1 test_interval: 4 "
    text += "snapshot_after_train: false"
    results = []
    for _ in range(2):
        with build_solver(text, TRAINED) as solver:
            solver.solve()
            results.append(weights_of(solver.net))
            test = weights_of(solver.test_nets[0])
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])
    assert results[0]["aug_0"].item() == 5 and abs(results[0]["aug_2"].mean() - 0.5) < 0.1
    assert np.array_equal(test["aug_2"], results[0]["aug_2"])
    assert all(np.isfinite(values).all() for values in results[0].values())


# -- Mean ------------------------------------------------------------------------------------------------


def mean(fields: str) -> str:
    return f"type: 'Mean' mean_param {{ {fields} }}"


def test_value_of_each_channel() -> None:
    x, y = gaussian((2, 4, 3, 5)), gaussian((1, 2, 2, 2))
    fields = "operation: SUBTRACT value: 0.5 value: -2 mean_scale: 3 input_scale: 0.5 output_scale: 2"

    def formula(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        parts = [np.resize([0.5, -2], a.shape[1]).reshape(-1, 1, 1) for a in inputs]
        return tuple(2 * (0.5 * a - 3 * part) for a, part in zip(inputs, parts, strict=True))

    check_layer(mean(fields), [x, y], formula)
    check_layer(mean("operation: ADD value: 0.25"), [x], lambda x: x + 0.25, in_place=True)


def test_file_of_each_pixel(tmp_path: Path) -> None:
    values = gaussian((2, 3, 5))
    blob = caffe_pb2.BlobProto(num=1, channels=2, height=3, width=5, data=values.ravel())
    (tmp_path / "mean").write_bytes(blob.SerializeToString())
    text = mean(f"operation: ADD file: '{tmp_path}/mean'")
    check_layer(text, [gaussian((2, 4, 3, 5))], lambda x: x + np.concatenate([values, values]))
    with pytest.raises(ShapeError, match="does not fit"):
        Runner(text, [gaussian((2, 4, 3, 4))])


def test_bad_settings_of_mean() -> None:
    x = gaussian((1, 2, 3, 3))
    for fields in ("operation: ADD", "operation: ADD value: 1 file: 'x'"):
        with pytest.raises(ConfigError, match="either file or value"):
            Runner(mean(fields), [x])
    with pytest.raises(DataError, match="cannot be read"):
        Runner(mean("operation: ADD file: '/nowhere/x'"), [x])

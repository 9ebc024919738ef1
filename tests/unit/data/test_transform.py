import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.random import SampleRng, below, sample_words
from caffepy.data.transform import DataTransformer
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, BlobProto, BlobShape, TransformationParameter


def transformer(text="", phase=TRAIN, resolve=None):
    param = text_format.Parse(text, TransformationParameter())
    return DataTransformer(param, phase, resolve or (lambda path: path), "layer 'data' (Data)")


def oracle(image, top, left, mirror, crop, mean, scale):
    """Caffe's formula, element by element."""
    channels, height, width = image.shape
    rows, columns = (crop, crop) if crop else (height, width)
    out = np.empty((channels, rows, columns), np.float32)
    for c in range(channels):
        for h in range(rows):
            for w in range(columns):
                value = (np.float32(image[c, top + h, left + w]) - mean[c, top + h, left + w]) * np.float32(scale)
                out[c, h, columns - 1 - w if mirror else w] = value
    return out


def run(subject, images, first=0, seed=0, stream=0):
    crop_params = subject.draw_crops(seed, stream, np.arange(first, first + len(images)))
    n, h, w, c = (len(images), *[subject.output_shape(images.shape[1:])[i] for i in (1, 2, 0)])
    out = np.full((n, h, w, c), np.nan, np.float32).transpose(0, 3, 1, 2)
    for place, image in enumerate(images):
        subject.apply(image, crop_params, place, out[place])
    return out


@settings(max_examples=60)
@given(
    channels=st.integers(1, 5),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    crop=st.integers(0, 6),
    mirror=st.booleans(),
    mean=st.sampled_from(["none", "one", "each", "file"]),
    scale=st.sampled_from([1, 0.00390625, 0.1]),
    phase=st.sampled_from([TRAIN, TEST]),
    kind=st.sampled_from(["bytes", "decoded", "floats"]),
    first=st.integers(0, 1000),
)
def test_formula(tmp_path_factory, channels, height, width, crop, mirror, mean, scale, phase, kind, first):
    crop = min(crop, height, width)
    rng = np.random.default_rng(first)
    images = rng.integers(0, 256, (3, channels, height, width), dtype=np.uint8)
    text = f"scale: {scale} mirror: {str(mirror).lower()} crop_size: {crop} "
    means = np.zeros((channels, height, width), np.float32)
    path = None
    if mean == "file":
        means = rng.random((channels, height, width), np.float32)
        path = tmp_path_factory.mktemp("mean") / "mean"
        path.write_bytes(BlobProto(shape=BlobShape(dim=means.shape), data=means.ravel()).SerializeToString())
        text += "mean_file: 'mean'"
    elif mean != "none":
        values = rng.integers(0, 200, channels if mean == "each" else 1)
        means = means + values.astype(np.float32).reshape(-1, 1, 1)
        text += " ".join(f"mean_value: {v}" for v in values)
    subject = transformer(text, phase, lambda _: path)
    given_images = images.astype(np.float32) if kind == "floats" else images
    if kind == "decoded":
        given_images = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    words = sample_words(5, 6, np.arange(first, first + 3))
    got = run(subject, given_images, first, 5, 6)
    for i in range(3):
        top, left = (height - crop) // 2 if crop else 0, (width - crop) // 2 if crop else 0
        if crop and phase == TRAIN:
            top, left = int(below(words[1], height - crop + 1)[i]), int(below(words[2], width - crop + 1)[i])
        mirrored = mirror and bool(below(words[0], 2)[i])
        np.testing.assert_array_equal(got[i], oracle(images[i], top, left, mirrored, crop, means, scale))


def test_crops_reach_every_place_and_mirror_is_half():
    subject = transformer("crop_size: 2 mirror: true")
    image = np.arange(1, 26, dtype=np.uint8).reshape(1, 1, 5, 5)
    got = run(subject, np.repeat(image, 2000, axis=0))
    mirrored = got[:, 0, 0, 0] > got[:, 0, 0, 1]
    assert abs(mirrored.sum() - 1000) < 100
    corners = np.minimum(got[:, 0, 0, 0], got[:, 0, 0, 1])
    assert set(corners.tolist()) == {1 + 5 * h + w for h in range(4) for w in range(4)}


def test_the_centre_is_rounded_down():
    image = np.arange(36, dtype=np.uint8).reshape(1, 1, 6, 6)
    assert run(transformer("crop_size: 3", TEST), image)[0, 0].tolist() == image[0, 0, 1:4, 1:4].tolist()


def test_a_seed_of_its_own_replaces_the_solvers():
    images = np.random.default_rng(0).integers(0, 256, (20, 1, 9, 9), dtype=np.uint8)
    text = "crop_size: 4 mirror: true"
    own = [run(transformer(f"{text} random_seed: 3"), images, seed=seed) for seed in (1, 2)]
    np.testing.assert_array_equal(*own)
    assert (run(transformer(text), images, seed=1) != run(transformer(text), images, seed=2)).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean_file: 'x' mean_value: 1", "has both mean_file and mean_value"),
        ("force_color: true force_gray: true", "has both force_color and force_gray"),
        (
            "img_rand_resize_lower: 256",
            r"transform_param\.img_rand_resize_lower 256 is more than img_rand_resize_upper 0",
        ),
        ("img_rand_resize_upper: 99999", "img_rand_resize_upper 99999 is more than 65536 pixels"),
        ("rand_resize_ratio_upper: -1.5", r"rand_resize_ratio_upper is -1\.5; give a factor from 0 to 65536"),
        ("horizontal_stretch_lower: nan", "horizontal_stretch_lower is nan; give a factor"),
        ("random_resize_param { }", "random_resize_param needs crop_size"),
        ("crop_size: 5 random_resize_param { min_size: 9 max_size: 8 }", "needs min_size <= max_size <= 65536"),
        ("crop_size: 5 random_aspect_ratio_param { min_area_ratio: 2 }", "needs 0 < min_area_ratio <= max_area_ratio"),
        ("crop_size: 5 random_aspect_ratio_param { aspect_ratio_change: 2 }", "above 0, at most 1"),
        ("crop_h: 20", "needs crop_h and crop_w, or neither; crop_size stands for both"),
        ("crop_size: 70000", "has a crop of more than 65536 pixels"),
        ("resize_param { height: 2 }", "resize_param needs height and width from 1 to 65536, not 2 and 0"),
        ("noise_param { saltpepper: true }", r"noise_param\.saltpepper needs saltpepper_param \{ value"),
        (
            "noise_param { saltpepper: true saltpepper_param { value: 1 fraction: 2 } }",
            "fraction is 2, not from 0 to 1",
        ),
        ("distort_param { hue_delta: -1 }", r"distort_param\.hue_delta is -1; it must not be negative"),
        (
            "distort_param { contrast_prob: 1 contrast_lower: 2 contrast_upper: 1 }",
            r"distort_param\.contrast_upper 1 is less than contrast_lower 2",
        ),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ConfigError, match=f"^layer 'data' .*{message}"):
        transformer(text)


def test_fields_that_change_nothing_are_accepted():
    fields = (
        "use_gpu_transform: true forward_packing: NHWC display: true vertical_stretch_upper: 1 allow_upscale: true "
        "num_labels: 3 "
    )
    images, usual = np.random.default_rng(1).integers(0, 256, (4, 3, 5, 7), dtype=np.uint8), "mirror: true crop_size: 4"
    np.testing.assert_array_equal(run(transformer(fields + usual), images), run(transformer(usual), images))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("crop_size: 6", DataError, "is 5 x 7, smaller than crop_size 6"),
        ("mean_value: 1 mean_value: 2", DataError, "has 3 channels, .* has 2 mean_value; give 1, or one for each chan"),
    ],
)
def test_images_that_do_not_fit(text, error, message):
    with pytest.raises(error, match=message):
        transformer(text).output_shape((3, 5, 7))


def test_a_mean_of_another_shape(tmp_path):
    path = tmp_path / "mean"
    path.write_bytes(BlobProto(num=1, channels=1, height=2, width=2, data=range(4)).SerializeToString())
    with pytest.raises(DataError, match="is 3 x 5 x 7, but the mean in mean_file is 1 x 2 x 2"):
        transformer("mean_file: 'm'", resolve=lambda _: path).output_shape((3, 5, 7))


# -- sizes and noise -------------------------------------------------------------------------------------


def prepared(text, image, sample=0, **settings):
    param = text_format.Parse(text, TransformationParameter())
    subject = DataTransformer(param, TRAIN, where="layer 'data' (Data)", **settings)
    return subject, subject.preprocess(image, SampleRng(1, 2, sample))


def gray(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (1, height, width), dtype=np.uint8)


def test_the_random_resize_comes_before_resize_param_and_noise():
    image = gray(12, 20)
    text = (
        "img_rand_resize_lower: 6 img_rand_resize_upper: 6 resize_param { height: 4 width: 5 interp_mode: NEAREST } "
        "noise_param { inverse: true }"
    )
    _, found = prepared(text, image)
    first = cv2.resize(image[0], (10, 6), interpolation=cv2.INTER_NEAREST)
    np.testing.assert_array_equal(found[0], 255 - cv2.resize(first, (5, 4), interpolation=cv2.INTER_NEAREST))


@pytest.mark.parametrize("nvidia", [False, True])
def test_intels_random_resize_holds_in_both_dialects(nvidia):
    text = "crop_size: 5 random_resize_param { min_size: 6 max_size: 6 }"
    subject, found = prepared(text, gray(9, 9), nvidia=nvidia)
    assert found.shape == (1, 6, 6) and subject.preprocesses
    with pytest.raises(ConfigError, match="random_resize_param of transform_param does not move boxes"):
        prepared(text, gray(9, 9), annotated=True)


@pytest.mark.parametrize(("nvidia", "annotated", "applied"), [(0, 0, True), (1, 0, False), (1, 1, True), (0, 1, True)])
def test_resize_param_holds_but_for_nvidias_data_layers(nvidia, annotated, applied, caplog):
    text = "resize_param { height: 4 width: 5 }"
    subject, found = prepared(text, gray(8, 9), nvidia=bool(nvidia), annotated=bool(annotated))
    assert found.shape == ((1, 4, 5) if applied else (1, 8, 9))
    assert subject.preprocesses is applied
    assert ("resize_param and noise_param have no effect here" in caplog.text) is not applied


def test_what_only_annotated_data_does_is_said(caplog):
    prepared("distort_param { } expand_param { }", gray(2, 2))
    assert "layer 'data' (Data): distort_param and expand_param is for AnnotatedData" in caplog.text


def test_a_crop_may_be_oblong():
    subject = transformer("crop_h: 2 crop_w: 5", TEST)
    image = gray(6, 9)
    assert subject.output_shape(image.shape) == (1, 2, 5)
    np.testing.assert_array_equal(run(subject, image[None])[0], image[:, 2:4, 2:7])
    with pytest.raises(DataError, match="is 6 x 4, smaller than the crop 2 x 5"):
        subject.output_shape((1, 6, 4))


def test_crop_size_overrides_height_and_width():
    assert transformer("crop_size: 3 crop_h: 2 crop_w: 5", TEST).output_shape((1, 6, 9)) == (1, 3, 3)


@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_a_centred_mean_lies_at_its_own_centre(phase, tmp_path):
    """As NVIDIA Caffe does with decoded images: wherever the image is cut, and however large it is."""
    mean = np.arange(2 * 7 * 9, dtype=np.float32).reshape(2, 7, 9)
    path = tmp_path / "mean"
    path.write_bytes(BlobProto(shape=BlobShape(dim=mean.shape), data=mean.ravel()).SerializeToString())
    subject = transformer("mean_file: 'mean' crop_size: 3 mirror: true", phase, lambda _: path)
    subject.center_crops_mean = True
    found = run(subject, np.zeros((8, 2, 20, 30), np.uint8))
    wanted = -mean[:, 2:5, 3:6]
    assert all((one == wanted).all() or (one == wanted[:, :, ::-1]).all() for one in found)
    with pytest.raises(DataError, match="makes 3 x 3 x 3, but the mean in mean_file is 2 x 7 x 9; it needs as many"):
        subject.output_shape((3, 20, 30))

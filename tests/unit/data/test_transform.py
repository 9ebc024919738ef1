import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.random import below, sample_words
from caffepy.data.transform import Transformer
from caffepy.errors import ConfigError, DataError
from caffepy.proto.caffe_pb2 import TEST, TRAIN, BlobProto, BlobShape, TransformationParameter


def transformer(text="", phase=TRAIN, resolve=None):
    param = text_format.Parse(text, TransformationParameter())
    return Transformer(param, phase, resolve or (lambda path: path), "layer 'data' (Data)")


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
    choices = subject.choose(seed, stream, np.arange(first, first + len(images)))
    n, h, w, c = (len(images), *[subject.output_shape(images.shape[1:])[i] for i in (1, 2, 0)])
    out = np.full((n, h, w, c), np.nan, np.float32).transpose(0, 3, 1, 2)
    for place, image in enumerate(images):
        subject.apply(image, choices, place, out[place])
    return out


@settings(deadline=None, max_examples=60)
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
        ("img_rand_resize_lower: 256", r"transform_param\.img_rand_resize_lower is not supported yet"),
        ("rand_resize_ratio_upper: 1.5", "rand_resize_ratio_upper is not supported yet"),
        ("horizontal_stretch_lower: 0.5", "horizontal_stretch_lower is not supported yet"),
        ("crop_h: 20", "crop_h is not supported yet"),
        ("resize_param { height: 2 }", "resize_param is not supported yet"),
        ("noise_param { }", "noise_param is not supported yet"),
        ("distort_param { }", "distort_param is not supported yet"),
        ("expand_param { }", "expand_param is not supported yet"),
        ("emit_constraint { }", "emit_constraint is not supported yet"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ConfigError, match=f"^layer 'data' .*{message}"):
        transformer(text)


def test_fields_that_change_nothing_are_accepted():
    transformer(
        "use_gpu_transform: true forward_packing: NHWC display: true vertical_stretch_upper: 1 allow_upscale: true"
    )


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("crop_size: 6", DataError, "is 5 x 7, smaller than crop_size 6"),
        ("mean_value: 1 mean_value: 2", ConfigError, "has 2 mean_value; give 1, or one for each of the 3 channels"),
    ],
)
def test_images_that_do_not_fit(text, error, message):
    with pytest.raises(error, match=message):
        transformer(text).output_shape((3, 5, 7))


def test_a_mean_of_another_shape(tmp_path):
    path = tmp_path / "mean"
    path.write_bytes(BlobProto(num=1, channels=1, height=2, width=2, data=range(4)).SerializeToString())
    with pytest.raises(
        DataError, match="is 3 x 5 x 7, but the mean in mean_file is 1 x 2 x 2; make the mean of this set"
    ):
        transformer("mean_file: 'm'", resolve=lambda _: path).output_shape((3, 5, 7))

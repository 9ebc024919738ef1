"""Every field of the data layers, in nets, on one device and on several."""

import re

import cv2
import numpy as np
import pytest
from databases import NO_PLYVEL
from google.protobuf import text_format

from caffepy.backend import create_backend
from caffepy.data.sharding import Shard
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import ConfigError, DataError
from caffepy.formats.dialect import Dialect
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, AnnotatedDatum, BlobProto, Datum, NetParameter
from caffepy.layers import LayerContext
from caffepy.net.net import Net

RECORDS = 12


def image(number, height=30, width=40, channels=3):
    noise = np.random.default_rng(number).integers(0, 256, (height // 5, width // 5, channels), dtype=np.uint8)
    return np.atleast_3d(cv2.resize(noise, (width, height)))


def png(pixels):
    return cv2.imencode(".png", pixels)[1].tobytes()


def datum(number, encoded):
    pixels = image(number)
    if encoded:
        return Datum(data=png(pixels), encoded=True, label=number)
    return Datum(channels=3, height=30, width=40, data=pixels.transpose(2, 0, 1).tobytes(), label=number)


def annotated(number):
    made = AnnotatedDatum(datum=datum(number, True), type=AnnotatedDatum.BBOX)
    for n in range(number % 3 + 1):
        box = made.annotation_group.add(group_label=n + 1).annotation.add().bbox
        box.xmin, box.ymin, box.xmax, box.ymax = 0.1 * n, 0.2, 0.1 * n + 0.5, 0.9
    return made


def gray_boxes():
    made = annotated(0)
    made.datum.data = png(image(0, channels=1))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_datums(path / "raw", ((record_key(n), datum(n, False)) for n in range(RECORDS)))
    write_datums(path / "png", ((record_key(n), datum(n, True)) for n in range(RECORDS)))
    write_datums(path / "boxes", ((record_key(n), annotated(n)) for n in range(RECORDS)))
    for n in range(RECORDS):
        (path / f"{n}.png").write_bytes(png(image(n)))
    (path / "list.txt").write_text("".join(f"{n}.png {n}\n" for n in range(RECORDS)))
    (path / "windows.txt").write_text(
        "".join(f"# {n}\n{n}.png\n3 30 40\n2\n1 0.9 2 3 20 25\n0 0.1 5 5 15 15\n" for n in range(RECORDS))
    )
    return path


def run(text, passes=4, phase=TRAIN, **context):
    """The tops of some passes: for each pass a list."""
    param = text_format.Parse(f"layer {{ name: 'd' top: 'a' top: 'b' {text} }}", NetParameter())
    net = Net(param, LayerContext(create_backend(), phase, **context))
    try:
        found = []
        for _ in range(passes):
            net.forward()
            found.append([net.blobs[top].host_data().copy() for top in ("a", "b")])
        return found
    finally:
        net.close()


def joined(parts):
    """The tops of several devices as one would have them; boxes count on."""
    whole = []
    for step in zip(*parts, strict=True):
        images, labels = ([part[index] for part in step] for index in (0, 1))
        if labels[0].ndim == 4:
            first = 0
            for one, rows in zip(images, labels, strict=True):
                rows[0, 0, :, 0] += first
                first += len(one)
        whole.append([np.concatenate(images), np.concatenate(labels, 2 if labels[0].ndim == 4 else 0)])
    return whole


RANDOM = (
    "crop_size: 12 mirror: true img_rand_resize_lower: 14 img_rand_resize_upper: 25 rand_resize_ratio_lower: 1 "
    "rand_resize_ratio_upper: 1.3 vertical_stretch_lower: 0.8 horizontal_stretch_upper: 1.2 "
    "interpolation_algo_down: INTER_LINEAR"
)
BOXES = (
    "mirror: true distort_param { brightness_prob: 0.5 brightness_delta: 20 hue_prob: 0.5 hue_delta: 9 } "
    "expand_param { max_expand_ratio: 2 } resize_param { height: 20 width: 24 interp_mode: LINEAR interp_mode: AREA } "
    "noise_param { saltpepper: true saltpepper_param { fraction: 0.05 value: 0 } } crop_size: 18"
)
SAMPLER = "batch_sampler { sampler { min_scale: 0.5 } sample_constraint { min_jaccard_overlap: 0.3 } }"


def layer(kind, folder, batch):
    files = f"source: '{folder}/list.txt' root_folder: '{folder}/' batch_size: {batch}"
    windows = files.replace("list.txt", "windows.txt")
    return {
        "raw": f"type: 'Data' data_param {{ source: '{folder}/raw' batch_size: {batch} shuffle: true }} "
        f"transform_param {{ {RANDOM} }}",
        "png": f"type: 'Data' data_param {{ source: '{folder}/png' batch_size: {batch} threads: 3 }} "
        f"transform_param {{ {RANDOM} }}",
        "ImageData": f"type: 'ImageData' image_data_param {{ {files} shuffle: true cache: true }} "
        f"transform_param {{ {RANDOM} }}",
        "AnnotatedData": f"type: 'AnnotatedData' data_param {{ source: '{folder}/boxes' batch_size: {batch} }} "
        f"annotated_data_param {{ {SAMPLER} }} transform_param {{ {BOXES} }}",
        "WindowData": f"type: 'WindowData' window_data_param {{ {windows} fg_fraction: 0.5 context_pad: 2 }} "
        "transform_param { crop_size: 12 mirror: true }",
    }[kind]


@pytest.mark.parametrize("kind", ["raw", "png", "ImageData", "AnnotatedData"])
def test_devices_see_the_images_that_one_sees(folder, kind):
    alone = run(layer(kind, folder, 6), seed=3)
    parts = [run(layer(kind, folder, 3), seed=3, shard=Shard(rank, 2)) for rank in (0, 1)]
    for found, wanted in zip(joined(parts), alone, strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    again = run(layer(kind, folder, 6), seed=4)
    assert again[0][0].shape != alone[0][0].shape or (again[0][0] != alone[0][0]).any()


def test_devices_see_the_windows_that_one_sees(folder):
    """Each device takes batches of its own: batch_size is the period of background and foreground."""
    alone = run(layer("WindowData", folder, 4), 4, seed=3)
    parts = [run(layer("WindowData", folder, 4), 2, seed=3, shard=Shard(rank, 2)) for rank in (0, 1)]
    for found, wanted in zip([one for pair in zip(*parts, strict=True) for one in pair], alone, strict=True):
        np.testing.assert_array_equal(found[0], wanted[0])
        assert found[1].tolist() == wanted[1].tolist() == [0, 0, 1, 1]


def test_noise_changes_encoded_records_alone(folder, caplog):
    """As in SSD's Caffe."""
    text = "type: 'Data' data_param {{ source: '{}/{}' batch_size: 2 }} "
    text += "transform_param {{ noise_param {{ inverse: true }} }}"
    inputs = np.stack([image(n).transpose(2, 0, 1) for n in range(2)])
    np.testing.assert_array_equal(run(text.format(folder, "png"), 1)[0][0], 255 - inputs)
    assert "noise_param" not in caplog.text
    np.testing.assert_array_equal(run(text.format(folder, "raw"), 1)[0][0], inputs)
    assert "layer 'd' (Data): noise_param affects encoded records only" in caplog.text


@pytest.mark.parametrize("transform", ["", "force_gray: true"])
def test_force_encoded_color_has_no_effect(tmp_path, transform, caplog):
    """Both Caffes have the field and do not read it; the log names the one that acts."""
    gray = [(record_key(n), Datum(data=png(image(n, channels=1)), encoded=True)) for n in range(2)]
    write_datums(tmp_path / "gray", gray)
    text = f"type: 'Data' data_param {{ source: '{tmp_path}/gray' batch_size: 2 %s }} transform_param {{ {transform} }}"
    wanted = run(text % "", 1)[0][0]
    assert "force_encoded_color" not in caplog.text
    np.testing.assert_array_equal(run(text % "force_encoded_color: true", 1)[0][0], wanted)
    assert wanted.shape[1] == 1
    assert "layer 'd' (Data): force_encoded_color has no effect, as in Caffe; use transform_param" in caplog.text


def test_force_encoded_color_of_boxes_has_no_effect(tmp_path, caplog):
    write_datums(tmp_path / "gray", [(record_key(0), gray_boxes())])
    text = f"type: 'AnnotatedData' data_param {{ source: '{tmp_path}/gray' batch_size: 1 force_encoded_color: true }}"
    assert run(text, 1)[0][0].shape[1] == 1
    assert "layer 'd' (AnnotatedData): force_encoded_color has no effect" in caplog.text


def image_layer(folder, more, transform=""):
    return (
        f"type: 'ImageData' image_data_param {{ source: '{folder}/list.txt' root_folder: '{folder}/' {more} }} "
        f"transform_param {{ {transform} }}"
    )


def test_short_side(folder):
    found = run(image_layer(folder, "batch_size: 2 short_side: 15"), 1)[0][0]
    assert found.shape == (2, 3, 15, 20)
    np.testing.assert_array_equal(found[1], cv2.resize(image(1), (20, 15)).transpose(2, 0, 1))


@pytest.mark.parametrize("more, mode", [("", cv2.INTER_LINEAR), ("bicubic: true", cv2.INTER_CUBIC)])
def test_new_dim(folder, more, mode):
    found = run(image_layer(folder, f"batch_size: 2 new_dim: 14 {more}"), 1)[0][0]
    assert found.shape == (2, 3, 14, 19)  # 18.67 is rounded
    np.testing.assert_array_equal(found[1], cv2.resize(image(1), (19, 14), interpolation=mode).transpose(2, 0, 1))
    with pytest.raises(ConfigError, match="give new_dim, short_side, or new_height and new_width; only one of them"):
        run(image_layer(folder, "batch_size: 2 new_dim: 14 short_side: 9"), 1)


@pytest.mark.parametrize("more", ["cache: true", "cache: true precache: true", "precache: true"])
def test_cached_images_are_read_once(folder, tmp_path, more):
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(png(image(n)))
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{n}.png {n}\n" for n in range(3)))
    text = f"layer {{ name: 'd' top: 'a' top: 'b' type: 'ImageData' image_data_param {{ source: '{tmp_path}/list.txt' "
    param = text_format.Parse(f"{text} batch_size: 3 {more} }} }}", NetParameter())
    net = Net(param, LayerContext(create_backend(), TRAIN))
    try:
        if "precache" not in more:
            net.forward()
        for n in range(3):
            (tmp_path / f"{n}.png").unlink()
        for _ in range(6):
            net.forward()
        wanted = np.stack([image(n).transpose(2, 0, 1) for n in range(3)])
        np.testing.assert_array_equal(net.blobs["a"].host_data(), wanted)
    finally:
        net.close()


def cached_net(tmp_path):
    text = f"layer {{ name: 'd' top: 'a' top: 'b' type: 'ImageData' image_data_param {{ source: '{tmp_path}/list.txt' "
    return Net(
        text_format.Parse(f"{text} batch_size: 2 cache: true }} }}", NetParameter()),
        LayerContext(create_backend(), TRAIN),
    )


@pytest.mark.parametrize("change", ["the list", "an image", "an image's name"])
def test_another_net_gets_what_list_and_images_are_now(tmp_path, change):
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(png(image(n)))
    (tmp_path / "list.txt").write_text(f"{tmp_path}/0.png 0\n{tmp_path}/1.png 1\n")
    first = cached_net(tmp_path)
    second = None
    try:
        for _ in range(2):
            first.forward()
        if change == "the list":
            (tmp_path / "list.txt").write_text(f"{tmp_path}/2.png 2\n{tmp_path}/0.png 0\n")
        elif change == "an image":
            (tmp_path / "0.png").write_bytes(png(image(2)) + b" ")
        else:
            (tmp_path / "2.png").replace(tmp_path / "0.png")
        second = cached_net(tmp_path)
        second.forward()
        images, labels = ((2, 0), [2, 0]) if change == "the list" else ((2, 1), [0, 1])
        wanted = np.stack([image(n).transpose(2, 0, 1) for n in images])
        np.testing.assert_array_equal(second.blobs["a"].host_data(), wanted)
        assert second.blobs["b"].host_data().ravel().tolist() == labels
    finally:
        first.close()
        if second is not None:
            second.close()


@pytest.mark.parametrize(("phase", "shuffle", "used"), [(TRAIN, False, 4), (TRAIN, True, 4), (TEST, False, RECORDS)])
def test_dataset_share_per_node(folder, phase, shuffle, used):
    more = f"batch_size: 4 dataset_share_per_node: 3 shuffle: {str(shuffle).lower()}"
    labels = [run_of[1].astype(int).tolist() for run_of in run(image_layer(folder, more), 3, phase, seed=5)]
    assert len({label for batch in labels for label in batch}) == used
    if not shuffle:
        assert labels[0] == [0, 1, 2, 3]


def test_nvidias_mean_of_decoded_images_is_cut_at_its_centre(folder, tmp_path):
    from caffepy.formats.proto.caffe_pb2 import BlobProto, BlobShape

    mean = np.random.default_rng(0).random((3, 34, 44)).astype(np.float32)
    path = tmp_path / "mean"
    path.write_bytes(BlobProto(shape=BlobShape(dim=mean.shape), data=mean.ravel()).SerializeToString())
    text = f"type: 'Data' data_param {{ source: '{folder}/png' batch_size: 4 }} transform_param {{ "
    found = run(f"{text} mean_file: '{path}' crop_size: 10 }}", 1, dialect=Dialect.NVIDIA, seed=1)[0][0]
    plain = run(f"{text} crop_size: 10 }}", 1, dialect=Dialect.NVIDIA, seed=1)[0][0]
    np.testing.assert_allclose(plain - found, np.broadcast_to(mean[:, 12:22, 17:27], found.shape), atol=1e-4)
    with pytest.raises(DataError, match="but the mean in mean_file is 3 x 34 x 44"):
        run(f"{text} mean_file: '{path}' crop_size: 10 }}", 1, dialect=Dialect.BVLC)


def test_a_leveldb_is_read_as_an_lmdb_is(folder, tmp_path):
    plyvel = pytest.importorskip("plyvel", reason=NO_PLYVEL)
    with plyvel.DB(str(tmp_path / "db"), create_if_missing=True) as file:
        for n in range(RECORDS):
            file.put(record_key(n), datum(n, True).SerializeToString())
    more = f"batch_size: 5 shuffle: true }} transform_param {{ {RANDOM} }}"
    wanted = run(f"type: 'Data' data_param {{ source: '{folder}/png' {more}", seed=2)
    for backend in ("", "backend: LMDB"):
        found = run(f"type: 'Data' data_param {{ {backend} source: '{tmp_path}/db' {more}", seed=2)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one[0], other[0])
            np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "type: 'WindowData' window_data_param { batch_size: 1 crop_mode: 'x' }",
            "crop_mode is 'x'; give warp or square",
        ),
        ("type: 'WindowData' window_data_param { batch_size: 1 }", "crop_size 0 must be more than twice context_pad 0"),
        ("type: 'VideoData' video_data_param { video_type: VIDEO } data_param { batch_size: 1 }", "needs video_file"),
        (
            "type: 'AnnotatedData' data_param { source: 'x' batch_size: 2 } transform_param { resize_param "
            "{ resize_mode: FIT_SMALL_SIZE height: 4 width: 4 } }",
            "FIT_SMALL_SIZE gives images of different sizes; set batch_size: 1",
        ),
        (
            "type: 'AnnotatedData' data_param { source: 'x' batch_size: 2 } annotated_data_param { batch_sampler "
            "{ sampler { max_scale: 3 } } }",
            "a sampler needs 0 < min_scale <= max_scale <= 1, not 1 and 3",
        ),
    ],
)
def test_settings_that_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        run(text)


def test_a_camera_serves_one_device():
    with pytest.raises(ConfigError, match="a camera serves one device"):
        run("type: 'VideoData' data_param { batch_size: 1 }", shard=Shard(0, 2))


def test_a_damaged_annotated_record_is_named(folder, tmp_path):
    bad = annotated(1)
    bad.annotation_group[0].annotation[0].bbox.xmin = float("nan")
    write_datums(tmp_path / "db", [(record_key(0), annotated(0)), (record_key(1), bad)])
    text = f"type: 'AnnotatedData' data_param {{ source: '{tmp_path}/db' batch_size: 1 }}"
    with pytest.raises(
        DataError, match=r"layer 'd' \(AnnotatedData\): LMDB .*: record 1 \(key '00000001'\) has a box \(nan"
    ):
        run(text, 2)


@pytest.mark.parametrize("header", [(3, 16), (-1, 16), (1, 15), (float("nan"), 16)])
def test_detectnet_labels_that_cannot_be_read(header):
    text = """
        layer { name: 'i' type: 'Input' top: 'x' top: 'y' input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 }
          shape { dim: 1 dim: 1 dim: 3 dim: 16 } } }
        layer { name: 'L' type: 'DetectNetTransformation' bottom: 'x' bottom: 'y' top: 'a' top: 'b'
          detectnet_groundtruth_param { image_size_x: 8 image_size_y: 8 } }"""
    net = Net(text_format.Parse(text, NetParameter()), LayerContext(create_backend(), TEST))
    labels = np.zeros((1, 1, 3, 16), np.float32)
    labels[0, 0, 0, :2] = header
    net.context.backend.from_host(labels, net.blobs["y"].data)
    with pytest.raises(DataError, match="'y' of image 0 of the batch begins with .* at most 2, and 16"):
        net.forward()


# -- what a field changes --------------------------------------------------------------------------------

BIGGER, SMALLER = (f"img_rand_resize_lower: {n} img_rand_resize_upper: {n} allow_upscale: true" for n in (45, 13))
RATIOS = "allow_upscale: true rand_resize_ratio_lower: 1.1 rand_resize_ratio_upper: 1.6"
EFFECTS = {
    "rand_resize_ratio_lower": (
        "png",
        RATIOS,
        "1.5",
    ),
    "rand_resize_ratio_upper": (
        "png",
        RATIOS,
        "1.2",
    ),
    "vertical_stretch_lower": ("png", "vertical_stretch_lower: 0.6 vertical_stretch_upper: 0.8", "0.5"),
    "vertical_stretch_upper": ("png", "vertical_stretch_lower: 0.6 vertical_stretch_upper: 0.8", "0.9"),
    "horizontal_stretch_lower": ("png", "horizontal_stretch_lower: 0.6 horizontal_stretch_upper: 0.8", "0.5"),
    "horizontal_stretch_upper": ("png", "horizontal_stretch_lower: 0.6 horizontal_stretch_upper: 0.8", "0.9"),
    "interpolation_algo_down": ("png", SMALLER + " interpolation_algo_down: INTER_NEAREST", "INTER_AREA"),
    "interpolation_algo_up": ("png", BIGGER + " interpolation_algo_up: INTER_NEAREST", "INTER_CUBIC"),
    "allow_upscale": ("png", BIGGER, "false"),
    "shuffle": ("png", "shuffle: true", "false"),
    "shuffle of ImageData": ("ImageData", "shuffle: true", "false"),
    "rand_skip": ("png", "rand_skip: 9", "0"),
    "rand_skip of ImageData": ("ImageData", "rand_skip: 9", "0"),
    "context_pad": ("WindowData", "context_pad: 3", "0"),
    "crop_mode": ("WindowData", "crop_mode: 'square'", "'warp'"),
}
"""By field the kind of layer, settings in which it acts, and another value."""


def with_settings(kind, folder, text):
    files = f"source: '{folder}/list.txt' root_folder: '{folder}/' batch_size: 4"
    windows, mine = files.replace("list.txt", "windows.txt"), text.split(":")[0]
    of_data = mine in ("shuffle", "rand_skip", "context_pad", "crop_mode")
    own, transform = (text, "") if of_data else ("", text)
    return {
        "png": f"type: 'Data' data_param {{ source: '{folder}/png' batch_size: 4 {own} }} "
        f"transform_param {{ crop_size: 9 {transform} }}",
        "ImageData": f"type: 'ImageData' image_data_param {{ {files} {own} }}",
        "WindowData": f"type: 'WindowData' window_data_param {{ {windows} {own} }} transform_param {{ crop_size: 12 }}",
    }[kind]


@pytest.mark.parametrize("name", EFFECTS)
def test_a_data_field_has_an_effect(folder, name):
    kind, text, other = EFFECTS[name]
    field = name.split()[0]
    changed = re.sub(rf"{field}: \S+", f"{field}: {other}", text)
    assert changed != text
    found = [run(with_settings(kind, folder, one), seed=3, phase=TRAIN) for one in (text, changed)]
    assert any((one[0] != two[0]).any() or (one[1] != two[1]).any() for one, two in zip(*found, strict=True))


def test_windows_take_the_fields_of_their_own_message(folder, tmp_path):
    """`scale`, `mean_file`, `crop_size` and `mirror` of window_data_param, as of transform_param."""
    mean = BlobProto(num=1, channels=3, height=12, width=12, data=np.arange(432.0))
    (tmp_path / "mean").write_bytes(mean.SerializeToString())
    start = f"source: '{folder}/windows.txt' root_folder: '{folder}/' batch_size: 4"
    fields = ["crop_size: 12", "scale: 0.5", f"mean_file: '{tmp_path}/mean'", "mirror: true"]

    def images(own, transform=""):
        text = f"type: 'WindowData' window_data_param {{ {start} {own} }} transform_param {{ {transform} }}"
        return np.stack([one[0] for one in run(text, seed=3, phase=TRAIN)])

    whole = images(" ".join(fields))
    np.testing.assert_array_equal(whole, images("", " ".join(fields)))
    for field in fields[1:]:
        assert (images(" ".join(one for one in fields if one != field)) != whole).any(), field
    assert images(" ".join(fields[1::2]) + " crop_size: 8").shape[-1] == 8

"""Clips of C3D and TSN, and C3D's volumes, against what the files hold."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from training import build_net

from caffepy.data.clips import ClipLine, ClipList, SegmentClips, SegmentTransform
from caffepy.data.images import resize_image
from caffepy.data.mean import read_volume_mean
from caffepy.data.random import SampleRng
from caffepy.errors import CaffepyError, ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net
from caffepy.net.record_shape import told_shape

HEIGHT, WIDTH, FRAMES = 12, 16, 9


def shade(video: int, number: int, direction: str = "") -> int:
    """The gray of a frame; of flow, y is brighter than x."""
    return 72 * video + 8 * number + 4 * (direction == "y")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three folders with images of one gray each, and a video of them."""
    root = tmp_path_factory.mktemp("clips")
    for video in range(3):
        (root / str(video)).mkdir()
        for number in range(1, FRAMES + 1):
            for name, direction in (
                (f"{number:06d}.jpg", ""),
                (f"image_{number:04d}.jpg", ""),
                (f"flow_x_{number:04d}.jpg", "x"),
                (f"flow_y_{number:04d}.jpg", "y"),
            ):
                gray = np.full((HEIGHT, WIDTH, 3), shade(video, number, direction), np.uint8)
                cv2.imwrite(str(root / str(video) / name), gray)
        writer = cv2.VideoWriter(str(root / f"{video}.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
        for number in range(FRAMES):
            writer.write(np.full((48, 64, 3), shade(video, number), np.uint8))
        writer.release()
    return root


def tops_of(
    root: Path, lines: list[str], settings: str, transform: str = "", phase: int = TEST, passes: int = 1, seed: int = 1
) -> list[np.ndarray]:
    """The tops of the last pass of a VideoData of that list."""
    (root / "list.txt").write_text("\n".join(lines) + "\n")
    net = build_net(
        f"layer {{ name: 'v' type: 'VideoData' top: 'x' top: 'y' transform_param {{ {transform} }} "
        f"video_data_param {{ source: '{root}/list.txt' {settings} }} }}",
        phase=phase,
        seed=seed,
    )
    for number in range(passes):
        net.context.passes.number = number
        net.forward()
    result = [net.blobs[name].host_data() for name in "xy"]
    net.close()
    return result


def shades(x: np.ndarray) -> list[list[int]]:
    """The mean gray of each frame of each clip, a multiple of 8."""
    assert x.ndim == 5
    return (8 * np.rint(x.mean((1, 3, 4)) / 8)).astype(int).tolist()


# -- C3D -------------------------------------------------------------------------------------------------


def test_folders_from_their_frame_on(folder: Path):
    x, y = tops_of(
        folder, [f"{folder}/0 2 7", f"{folder}/2 1 -1"], "use_image: true new_length: 3 batch_size: 2 sampling_rate: 2"
    )
    assert x.shape == (2, 3, 3, HEIGHT, WIDTH) and y.tolist() == [7, -1]
    assert shades(x) == [[shade(0, n) for n in (2, 4, 6)], [shade(2, n) for n in (1, 3, 5)]]


def test_videos_from_their_frame_on(folder: Path):
    x, y = tops_of(
        folder,
        ["1.avi 0 3", "0.avi 4 5"],
        f"root_folder: '{folder}/' new_length: 2 batch_size: 2 sampling_rate: 2 new_height: 24 new_width: 32",
    )
    assert x.shape == (2, 3, 2, 24, 32) and y.tolist() == [3, 5]
    assert shades(x) == [[shade(1, n) for n in (0, 2)], [shade(0, n) for n in (4, 6)]]


def test_random_first_frames(folder: Path):
    seen = set()
    for number in range(1, 13):
        x, y = tops_of(
            folder,
            [f"{folder}/0 {FRAMES} 4"],
            "use_image: true use_temporal_jitter: true new_length: 6",
            phase=TRAIN,
            passes=number,
        )
        first = shades(x)[0][0] // 8
        assert shades(x) == [[shade(0, first + i) for i in range(6)]] and y.tolist() == [4]
        seen.add(first)
    assert seen == {1, 2, 3, 4}
    seen = {
        shades(tops_of(folder, [f"{folder}/0.avi 4"], "use_temporal_jitter: true new_length: 7", passes=n)[0])[0][0]
        for n in range(1, 9)
    }
    assert seen == {0, 8, 16}


def test_random_rates(folder: Path):
    rates = set()
    for number in range(1, 9):
        x, _ = tops_of(
            folder,
            [f"{folder}/0 1 0"],
            "use_image: true new_length: 2 use_sampling_rate_jitter: true max_sampling_rate: 3",
            passes=number,
        )
        rates.add((shades(x)[0][1] - shades(x)[0][0]) // 8)
    assert rates == {1, 2, 3}


def test_several_labels(folder: Path):
    settings = "use_image: true new_length: 1 batch_size: 2 use_multiple_label: true num_of_labels: 4"
    _, y = tops_of(folder, [f"{folder}/0 1 0,3", f"{folder}/0 1 2"], settings)
    assert y.tolist() == [[1, 0, 0, 1], [0, 0, 1, 0]]
    with pytest.raises(DataError, match="label 4; num_of_labels is 4"):
        tops_of(folder, [f"{folder}/0 1 4"], settings)


def ramp_folder(root: Path) -> tuple[str, np.ndarray]:
    """A folder with two frames whose pixels differ, and their clip (3, 2, H, W)."""
    where = root / "ramp"
    where.mkdir(exist_ok=True)
    clip = np.random.default_rng(0).integers(0, 256, (3, 2, HEIGHT, WIDTH), np.uint8)
    for number in (1, 2):
        content = cv2.imencode(".png", clip[:, number - 1].transpose(1, 2, 0))[1].tobytes()
        (where / f"{number:06d}.jpg").write_bytes(content)
        (where / f"image_{number:04d}.jpg").write_bytes(content)
        for i, direction in enumerate("xy"):
            plane = cv2.imencode(".png", clip[i, number - 1])[1].tobytes()
            (where / f"flow_{direction}_{number:04d}.jpg").write_bytes(plane)
    return str(where), clip


def test_crop_mirror_mean_and_scale(tmp_path: Path):
    where, clip = ramp_folder(tmp_path)
    mean = np.random.default_rng(1).normal(100, 30, clip.shape).astype(np.float32)
    blob = caffe_pb2.BlobProto(data=mean.ravel().tolist(), shape=caffe_pb2.BlobShape(dim=[1, *mean.shape]))
    (tmp_path / "mean").write_bytes(blob.SerializeToString())
    settings = "use_image: true new_length: 2"
    x, _ = tops_of(tmp_path, [f"{where} 1 0"], settings, f"crop_size: 8 mean_file: '{tmp_path}/mean' scale: 0.5")
    np.testing.assert_allclose(x[0], ((clip - mean) * 0.5)[..., 2:10, 4:12], rtol=1e-6)
    found = set()
    for number in range(1, 25):
        x, _ = tops_of(
            tmp_path,
            [f"{where} 1 0"],
            settings,
            f"crop_size: 11 mirror: true mean_file: '{tmp_path}/mean'",
            TRAIN,
            number,
        )
        for top in range(2):
            for left in range(6):
                part = (clip - mean)[..., top : top + 11, left : left + 11]
                found |= {(top, left, m) for m, p in enumerate((part, part[..., ::-1])) if np.allclose(x[0], p)}
        assert len(found) <= number
    assert {0, 1} == {where[0] for where in found} == {where[2] for where in found} and len(found) > 12


def test_a_mean_of_c3d(tmp_path: Path):
    """Its BlobProto has the fields num, channels, length, height, width, data."""
    mean = np.arange(2 * 3 * 200 * 2, dtype=np.float32).reshape(2, 3, 200, 2)

    def varint(number: int) -> bytes:
        return bytes([number & 127 | 128, number >> 7]) if number > 127 else bytes([number])

    def size(number: int) -> bytes:
        low, rest = number & 127 | 128, number >> 7
        return bytes([low]) + (size(rest) if rest > 127 else bytes([rest]))

    head = b"".join(bytes([field << 3]) + varint(n) for field, n in enumerate((1, *mean.shape), 1))
    data = mean.tobytes()
    (tmp_path / "m").write_bytes(head + bytes([6 << 3 | 2]) + size(len(data)) + data)
    np.testing.assert_array_equal(read_volume_mean(tmp_path / "m"), mean)
    (tmp_path / "short").write_bytes(head + bytes([6 << 3 | 2, 4]) + data[:4])
    with pytest.raises(DataError, match="holds 1 values in the shape 2 x 3 x 200 x 2"):
        read_volume_mean(tmp_path / "short")


def test_a_missing_clip_is_replaced_in_training_only(folder: Path):
    lines = [f"{folder}/none 1 0", f"{folder}/1 1 1", f"{folder}/2 1 2"]
    settings = "use_image: true new_length: 2 batch_size: 3"
    x, y = tops_of(folder, lines, settings, phase=TRAIN)
    assert y.tolist() == [1, 1, 2] and shades(x)[0] == shades(x)[1]
    with pytest.raises(DataError, match=r"clip 0 \('.*none'\) of list .*000001.jpg' cannot be read"):
        tops_of(folder, lines, settings)
    with pytest.raises(DataError, match="cannot be read"):
        tops_of(folder, lines[:1], settings, phase=TRAIN)


def test_lines_and_their_order(folder: Path):
    lines = [f"{folder}/{n % 3} 1 {n}" for n in range(8)]
    settings = "use_image: true new_length: 1 batch_size: 8 shuffle: true"
    first, again, other = (tops_of(folder, lines, settings, phase=TRAIN, seed=s)[1].tolist() for s in (1, 1, 2))
    assert first == again != other and sorted(first) == sorted(other) == list(range(8))
    _, y = tops_of(folder, lines, "use_image: true new_length: 1 batch_size: 3 rand_skip: 8", phase=TRAIN)
    assert np.diff(y).tolist() in ([1, 1], [-7, 1], [1, -7])


@pytest.mark.parametrize(
    ("settings", "line", "message"),
    [
        ("use_image: true new_length: 0", "a 1 0", "new_length, sampling_rate"),
        ("use_image: true new_height: 4", "a 1 0", "new_height and new_width"),
        ("use_image: true", "a 0", "'a 0' is not a line of a path, a number, a label"),
        ("use_temporal_jitter: true", "a x", "is not a line of a path, a label"),
        ("use_image: true use_multiple_label: true", "a 1 0", "needs num_of_labels"),
        ("use_image: true rand_skip: 5", "{0}/0 1 0", "rand_skip 5 is more than the 1 lines"),
        ("show_data: true", "a 1 0", "show_data of VideoDataParameter is refused"),
        ("new_length: 10", "{0}/0.avi 0 1", "has 9 frames; a clip needs 10"),
        ("new_length: 2", "{0}/0.avi 8 1", "cannot begin at frame 8"),
        ("new_length: 2", "{0}/list.txt 0 1", "cannot be opened by OpenCV"),
        ("use_image: true use_temporal_jitter: true new_length: 4", "{0}/0 3 1", "has 3 frames; a clip needs 4"),
        ("num_segments: 0", "a 1 0", "new_length and num_segments"),
        ("modality: RGB name_pattern: '%s.jpg'", "a 1 0", "name_pattern is '%s.jpg'"),
        ("modality: FLOW name_pattern: '%04d.jpg'", "a 1 0", "needs %c for the direction"),
    ],
)
def test_wrong_settings_are_refused(folder: Path, settings: str, line: str, message: str):
    with pytest.raises(CaffepyError, match=message.replace("(", r"\(")):
        tops_of(folder, [line.format(folder)], settings)


# -- TSN -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["RGB", "FLOW"])
def test_segments(folder: Path, modality: str):
    """Nine frames in two segments of four: a clip of two frames begins before the second frame of each."""
    settings = f"modality: {modality} num_segments: 2 new_length: 2 batch_size: 2"
    x, y = tops_of(folder, [f"{folder}/0 {FRAMES} 3", f"{folder}/2 {FRAMES} 5"], settings)
    numbers = (2, 3, 6, 7)
    channels = [shade(0, n) for n in numbers for _ in "bgr"]
    if modality == "FLOW":
        channels = [shade(0, n, d) for n in numbers for d in "xy"]
    assert x.shape == (2, len(channels), HEIGHT, WIDTH) and y.tolist() == [3, 5]
    np.testing.assert_allclose(x[0].mean((1, 2)), channels, atol=1)


def test_segments_of_gray_frames_by_another_name(folder: Path):
    settings = "modality: RGB name_pattern: '%06d.jpg' grayscale: true new_length: 3"
    x, _ = tops_of(folder, [f"{folder}/1 3 3"], settings)
    np.testing.assert_allclose(x[0].mean((1, 2)), [shade(1, n) for n in (1, 2, 3)], atol=1)


def test_segments_begin_at_random_frames_in_training():
    transform = SegmentTransform(caffe_pb2.TransformationParameter(), TRAIN, Path, "v")
    reader = SegmentClips(caffe_pb2.VideoDataParameter(num_segments=3, new_length=2), transform)
    drawn = np.array([reader.offsets(15, SampleRng(1, 2, s)) for s in range(200)])
    assert [set(column) for column in drawn.T.tolist()] == [{0, 1, 2, 3}, {5, 6, 7, 8}, {10, 11, 12, 13}]
    assert reader.offsets(5, SampleRng(1, 2, 0)) == [0, 0, 0]


def test_the_crops_of_segments():
    text = "crop_size: 224 multi_scale: true scale_ratios: [1, .875, .75, .66] max_distort: 1"
    transform = SegmentTransform(text_format.Parse(text, caffe_pb2.TransformationParameter()), TRAIN, Path, "v")
    sides = [256, 224, 192, 168]
    wanted = [(sides[i], sides[j]) for i in range(4) for j in range(4) if abs(i - j) <= 1]
    assert transform.sizes(256, 340) == wanted
    assert transform.sizes(257, 340)[0] == (257, 257) and (224, 224) in transform.sizes(257, 340)
    assert transform.places(32, 116) == [(0, 0), (0, 116), (32, 0), (32, 116), (16, 58)]
    transform.param.more_fix_crop = True
    assert transform.places(33, 119)[5:] == [
        (0, 58),
        (32, 58),
        (16, 0),
        (16, 116),
        (8, 29),
        (8, 87),
        (24, 29),
        (24, 87),
    ]


@pytest.mark.parametrize("multi_scale", [False, True])
@pytest.mark.parametrize("fix_crop", [False, True])
def test_segments_are_cropped_scaled_and_mirrored(tmp_path: Path, multi_scale: bool, fix_crop: bool):
    """Each result is one of those that the settings allow, and over many samples most of these come."""
    where, clip = ramp_folder(tmp_path)
    image = clip[:2].transpose(1, 0, 2, 3).reshape(4, HEIGHT, WIDTH)  # x and y of both frames
    text = f"crop_size: 10 mirror: true is_flow: true mean_value: [10, 20] multi_scale: {multi_scale} ".lower()
    text += f"fix_crop: {fix_crop} scale_ratios: [1, 0.5] max_distort: 0".lower()
    transform = SegmentTransform(text_format.Parse(text, caffe_pb2.TransformationParameter()), TRAIN, Path, "v")
    reader = SegmentClips(caffe_pb2.VideoDataParameter(new_length=2), transform)
    sizes = [10, 6] if multi_scale else [10]  # 12 is near 10
    allowed = {}
    for size in sizes:
        rows, columns = HEIGHT - size, WIDTH - size
        steps = [(0, 0), (0, 4), (4, 0), (4, 4), (2, 2)]
        places = (
            [(i * (rows // 4), j * (columns // 4)) for i, j in steps]
            if fix_crop
            else [(i, j) for i in range(rows + 1) for j in range(columns + 1)]
        )
        for top, left in places:
            part = image[:, top : top + size, left : left + size]
            part = np.concatenate([resize_image(channel[None], 10, 10) for channel in part]).astype(np.float32)
            flipped = part[..., ::-1].copy()
            flipped[::2] = 255 - flipped[::2]
            mean = np.array([10, 20, 10, 20], np.float32)[:, None, None]
            for mirrored, values in enumerate((part, flipped)):
                allowed[(size, top, left, mirrored)] = (values - mean).tobytes()
    drawn = [reader.read(ClipLine(where, 2, (0,)), SampleRng(3, 4, s))[0].tobytes() for s in range(12 * len(allowed))]
    assert set(drawn) <= set(allowed.values())
    assert len(set(drawn)) >= 0.9 * len(set(allowed.values()))


def test_segments_are_cut_in_the_center_in_testing(tmp_path: Path):
    where, clip = ramp_folder(tmp_path)
    text = "crop_size: 10 multi_scale: true fix_crop: true mean_value: 7 scale: 2"
    x, _ = tops_of(tmp_path, [f"{where} 2 0"], "modality: RGB new_length: 1", text)
    np.testing.assert_array_equal(x[0], (clip[:, 1, 1:11, 3:13].astype("f") - 7) * 2)


def test_too_large_ratios_are_refused():
    transform = SegmentTransform(
        caffe_pb2.TransformationParameter(crop_size=4, multi_scale=True, scale_ratios=[1.5]), TRAIN, Path, "v"
    )
    with pytest.raises(DataError, match="scale_ratios give crops of"):
        transform.sizes(20, 20)
    transform.param.max_distort = -1
    transform.param.scale_ratios[0] = 1
    with pytest.raises(DataError, match="max_distort is -1"):
        transform.sizes(20, 20)


# -- volumes ---------------------------------------------------------------------------------------------


def volume_net(root: Path, kind: str, volume: np.ndarray, settings: str, transform: str, phase: int, number: int):
    path = root / "volume"
    path.write_bytes(np.array([1, *volume.shape], "<i4").tobytes() + volume.tobytes())
    (root / "list").write_text(f"{path}\n")
    net = build_net(
        f"layer {{ name: 'v' type: '{kind}' top: 'x' top: 'y' transform_param {{ {transform} }} "
        f"image_data_param {{ source: '{root}/list' {settings} }} }}",
        phase=phase,
    )
    for passed in range(number + 1):
        net.context.passes.number = passed
        net.forward()
    result = [net.blobs[name].host_data()[0] for name in "xy"]
    net.close()
    return result


def test_volumes_with_flow(tmp_path: Path):
    volume = np.random.default_rng(0).standard_normal((5, 2, 6, 8)).astype("<f4")
    settings = "num_truth_channels: 2 is_flow: true truth_scale: 0.5"
    x, y = volume_net(tmp_path, "VideoWithVoxelTruthData", volume, settings, "crop_size: 4 mean_value: 1", TEST, 0)
    inner = volume[..., 1:5, 2:6]
    np.testing.assert_allclose(x, inner[:3] - 1, rtol=1e-6)
    np.testing.assert_allclose(y, 0.5 * inner[3:], rtol=1e-6)
    mirrored = 0
    for number in range(12):
        transform = "crop_size: 4 mirror: true"
        x, y = volume_net(tmp_path, "VideoWithVoxelTruthData", volume, settings, transform, TRAIN, number)
        whole = [
            (volume[..., i : i + 4, j : j + 4], flip) for i in range(3) for j in range(5) for flip in (False, True)
        ]
        [(part, flip)] = [(p, f) for p, f in whole if np.allclose(x, p[:3, ..., ::-1] if f else p[:3])]
        truth = 0.5 * part[3:] * np.array([-1 if flip else 1, 1])[:, None, None, None]
        np.testing.assert_allclose(y, truth[..., ::-1] if flip else truth, rtol=1e-6)
        mirrored += flip
    assert 0 < mirrored < 12


def test_volumes_whose_truth_is_cut(tmp_path: Path):
    volume = np.arange(2 * 1 * 2 * 3, dtype=np.uint8).reshape(2, 1, 2, 3)
    settings = "use_byte_input: true clip_min: 7 clip_max: 9"
    x, y = volume_net(tmp_path, "VideoWithVoxelTruthData", volume, settings, "scale: 2", TRAIN, 0)
    assert x.ravel().tolist() == [0, 2, 4, 6, 8, 10]
    assert y.ravel().tolist() == [0, 0, 0.5, 1, 1, 1]


def test_volumes_of_classes(tmp_path: Path):
    volume = np.random.default_rng(0).integers(0, 8, (4, 3, 5, 6)).astype(np.uint8)
    x, y = volume_net(tmp_path, "VideoSegmentationData", volume, "", "mean_value: 2", TRAIN, 0)
    np.testing.assert_array_equal(x, volume[:3].astype("f") - 2)
    np.testing.assert_array_equal(y, volume[3:])


def test_wrong_volumes_are_refused(tmp_path: Path):
    volume = np.zeros((2, 1, 2, 3), np.uint8)
    kind = "VideoWithVoxelTruthData"
    for settings, transform, message in (
        ("", "", "has 32 bytes and begins with the sizes 1 x 2 x 1 x 2 x 3"),
        ("use_byte_input: true num_truth_channels: 2", "", "has 2 channels; num_truth_channels is 2"),
        ("use_byte_input: true", "mirror: true", "mirror needs crop_size"),
        ("clip_min: 2 clip_max: 1", "", "clip_min is 2 and clip_max 1"),
        ("num_truth_channels: 0", "", "num_truth_channels must be"),
        ("use_byte_input: true", "crop_size: 3", "is 2 x 3, smaller than crop_size 3"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            volume_net(tmp_path, kind, volume, settings, transform, TEST, 0)


# -- nets of C3D 1.0 ---------------------------------------------------------------------------------------


def test_data_layers_of_the_old_format():
    text = """layers { name: 'd' type: VIDEO_DATA top: 'x' top: 'y' image_data_param { source: 'list' use_image: true
        mean_value: 128 batch_size: 50 crop_size: 112 mirror: true show_data: 0 new_height: 128 new_width: 171
        new_length: 16 shuffle: true use_temporal_jitter: true sampling_rate: 2 } }"""
    net = caffe_pb2.NetParameter()
    parse_text(text, net, "n")
    upgrade_net(net, "n")
    [layer] = net.layer
    assert layer.type == "VideoData" and not layer.HasField("image_data_param")
    assert layer.video_data_param == caffe_pb2.VideoDataParameter(
        source="list",
        use_image=True,
        batch_size=50,
        show_data=False,
        new_height=128,
        new_width=171,
        new_length=16,
        shuffle=True,
        use_temporal_jitter=True,
        sampling_rate=2,
    )
    transform = caffe_pb2.TransformationParameter(crop_size=112, mirror=True, mean_value=[128])
    assert layer.transform_param == transform


def test_a_list_needs_lines(tmp_path: Path):
    (tmp_path / "l").write_text("\n \n")
    with pytest.raises(DataError, match="names no clips"):
        ClipList(tmp_path / "l")
    (tmp_path / "l").write_text("a b 3 4\n")
    assert ClipList(tmp_path / "l").lines == [ClipLine("a b", 3, (4,))]


@pytest.mark.parametrize(
    ("settings", "transform", "wanted"),
    [
        ("new_length: 8 new_height: 12 new_width: 16", "", (3, 8, 12, 16)),
        ("new_length: 8 new_height: 12 new_width: 16", "crop_size: 10", (3, 8, 10, 10)),
        ("new_length: 5 num_segments: 2", "crop_size: 10", (20, 10, 10)),
        ("num_segments: 3 modality: RGB", "crop_size: 10", (9, 10, 10)),
        ("num_segments: 3 modality: RGB grayscale: true", "crop_size: 10", (3, 10, 10)),
        ("new_length: 8", "", None),
    ],
)
def test_what_the_prototxt_tells_of_the_shape(settings: str, transform: str, wanted: tuple[int, ...] | None):
    layer = caffe_pb2.LayerParameter(type="VideoData")
    text_format.Parse(f"source: 'list' {settings}", layer.video_data_param)
    text_format.Parse(transform, layer.transform_param)
    told = told_shape(layer, False)
    assert (told and told[0]) == wanted

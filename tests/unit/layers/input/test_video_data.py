from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from training import build_net

from caffepy.data.clips import VideoSource
from caffepy.data.prefetch import Batch
from caffepy.data.transform import DataTransformer
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import TEST, TransformationParameter
from caffepy.layers.input.video_data import VideoLoader

FRAMES = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Twelve frames, each of one shade of gray: 20 times its number."""
    path = tmp_path_factory.mktemp("video") / "a.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for number in range(FRAMES):
        writer.write(np.full((48, 64, 3), 20 * number, np.uint8))
    writer.release()
    return path


def loader(path, text="", skip=0):
    transformer = DataTransformer(text_format.Parse(text, TransformationParameter()), TEST, annotated=True)
    return VideoLoader(VideoSource(path), transformer, skip, 1, 2, "layer 'v'")


def frames(subject, first, count):
    batch = Batch(2)
    subject.load(first, count, batch)
    assert (batch.arrays[1] == 0).all()
    return np.rint(batch.arrays[0].mean((1, 2, 3)) / 20).astype(int).tolist()


def test_frames_come_in_their_order_from_any_one_on(path):
    subject = loader(path)
    assert subject.sample_shape() == (3, 48, 64)
    assert frames(subject, 0, 4) == [0, 1, 2, 3]
    assert frames(subject, 7, 3) == [7, 8, 9]
    assert frames(subject, 2, 2) == [2, 3]
    assert len(VideoSource(path)) == FRAMES


def test_frames_may_be_left_out(path):
    assert frames(loader(path, skip=2), 0, 4) == [2, 5, 8, 11]
    assert loader(path, skip=2).describe(1) == f"frame 5 of video '{path}'"


def test_the_layer_leaves_out_skip_frames(path):
    for more, wanted in (("", [0, 1, 2]), ("skip_frames: 3", [3, 7, 11])):
        net = build_net(
            f"layer {{ name: 'v' type: 'VideoData' top: 'x' data_param {{ batch_size: 3 prefetch: 1 }} "
            f"video_data_param {{ video_type: VIDEO video_file: '{path}' {more} }} }}"
        )
        net.forward()
        assert np.rint(net.blobs["x"].host_data().mean((1, 2, 3)) / 20).tolist() == wanted
        net.close()


@pytest.mark.parametrize(("more", "camera"), [("", 0), ("device_id: 2", 2), ("video_type: WEBCAM device_id: 5", 5)])
def test_a_camera_is_opened_by_its_number(monkeypatch, more, camera):
    """The stand-in's frames have the number of the camera that was asked for."""

    def open_camera(number):
        frame = np.full((6, 8, 3), 10 * number, np.uint8)
        return SimpleNamespace(isOpened=lambda: True, read=lambda: (True, frame), release=lambda: None)

    monkeypatch.setattr(cv2, "VideoCapture", open_camera)
    net = build_net(
        "layer { name: 'v' type: 'VideoData' top: 'x' data_param { batch_size: 2 prefetch: 1 } "
        f"video_data_param {{ {more} }} }}"
    )
    net.forward()
    np.testing.assert_array_equal(net.blobs["x"].host_data(), np.full((2, 3, 6, 8), 10 * camera))
    net.close()


def test_frames_are_resized_and_cut(path):
    batch = Batch(1)
    loader(path, "resize_param { height: 20 width: 30 } crop_size: 16").load(0, 1, batch)
    assert batch.arrays[0].shape == (1, 3, 16, 16)


def test_the_end_is_said(path):
    with pytest.raises(DataError, match=r"layer 'v': frame 12 of video '.*a.avi' .*the video has ended"):
        frames(loader(path), 10, 4)


def test_what_is_no_video(tmp_path):
    with pytest.raises(DataError, match="video '.*none.avi' does not exist"):
        VideoSource(tmp_path / "none.avi")
    (tmp_path / "text.avi").write_text("text")
    with pytest.raises(DataError, match="video '.*text.avi' cannot be opened by OpenCV"):
        VideoSource(tmp_path / "text.avi")

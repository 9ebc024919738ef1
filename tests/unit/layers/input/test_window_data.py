import cv2
import numpy as np
import pytest
from training import build_net

from caffepy.data.prefetch import Batch
from caffepy.errors import DataError
from caffepy.layers.input.window_data import WindowLoader, WindowSettings, WindowSource, crop_window

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), IMAGE)
    return tmp_path


def source(folder, windows, **more):
    text = f"# 0\na.png\n3 40 60\n{len(windows)}\n" + "".join(" ".join(map(str, one)) + "\n" for one in windows)
    (folder / "windows.txt").write_text(more.pop("text", text))
    return WindowSource(folder / "windows.txt", f"{folder}/", (0.5, 0.3), **{"cache": False, **more})


def settings(**more):
    plain = {
        "batch_size": 8,
        "fg_fraction": 0.25,
        "crop": 20,
        "context_pad": 0,
        "square": False,
        "mirror": False,
        "mean": np.zeros((1, 1, 1), np.float32),
        "scale": 1.0,
        "nvidia": False,
    }
    return WindowSettings(**{**plain, **more})


def load(of, count=8, **more):
    batch = Batch(2)
    subject = WindowLoader(of, settings(**more), 1, 2, "layer 'w'")
    subject.load(0, count, batch)
    return batch.arrays


FOREGROUND, BACKGROUND, NEITHER = (2, 0.7, 5, 6, 30, 25), (3, 0.1, 20, 3, 50, 38), (4, 0.4, 0, 0, 9, 9)


def cut(window, size=(20, 20)):
    x1, y1, x2, y2 = window[2:]
    return cv2.resize(IMAGE[y1 : y2 + 1, x1 : x2 + 1], size).transpose(2, 0, 1).astype(np.float32)


def test_each_batch_has_background_first_and_then_foreground(folder):
    images, labels = load(source(folder, [FOREGROUND, NEITHER, BACKGROUND]), 16)
    assert labels.tolist() == ([0] * 6 + [2] * 2) * 2
    for image, label in zip(images, labels, strict=True):
        np.testing.assert_array_equal(image, cut(FOREGROUND if label else BACKGROUND))


def test_mean_scale_and_mirror(folder):
    of = source(folder, [FOREGROUND, BACKGROUND], cache=True)
    mean = np.array([1, 2, 3], np.float32).reshape(3, 1, 1)
    images, _ = load(of, 40, mean=mean, scale=0.5, mirror=True, fg_fraction=0)
    plain = (cut(BACKGROUND) - mean) * np.float32(0.5)
    mirrored = (cut(BACKGROUND)[:, :, ::-1] - mean) * np.float32(0.5)
    flips = [bool((image == mirrored).all()) for image in images]
    assert all(flip or (image == plain).all() for flip, image in zip(flips, images, strict=True))
    assert 8 < sum(flips) < 32


def test_both_scales_act(folder):
    """Caffe reads window_data_param.scale alone."""
    source(folder, [FOREGROUND, BACKGROUND])
    files = f"source: '{folder}/windows.txt' root_folder: '{folder}/' batch_size: 4 fg_fraction: 1"
    net = build_net(
        f"layer {{ name: 'w' type: 'WindowData' top: 'x' top: 'y' window_data_param {{ {files} scale: 0.5 }} "
        "transform_param { crop_size: 20 scale: 0.25 } }"
    )
    net.forward()
    np.testing.assert_array_equal(net.blobs["x"].host_data()[0], cut(FOREGROUND) * np.float32(0.125))
    net.close()


def test_context_and_square():
    """A window of 10 x 10 in a result of 20 with 5 of context is doubled; at the border the context is zeros."""
    one = settings(context_pad=5)
    inner = crop_window([25, 15, 34, 24], (40, 60), one, False)
    assert inner.corners == (20, 10, 40, 30)
    assert (inner.height, inner.width, inner.top, inner.left) == (20, 20, 0, 0)
    corner = crop_window([0, 0, 9, 9], (40, 60), one, False)
    assert corner.corners == (0, 0, 15, 15)
    assert (corner.top, corner.left) == (5, 5)
    assert (corner.height, corner.width) == (15, 15)
    right = crop_window([50, 10, 59, 19], (40, 60), one, True)
    assert right.left == 6  # mirrored, the zeros of the right side come first: 6 of 21 pixels, of 20
    square = crop_window([10, 10, 29, 14], (40, 60), settings(square=True), False)
    assert square.corners[2] - square.corners[0] == square.corners[3] - square.corners[1]


def test_zeros_stand_around_a_window_at_the_border(folder):
    images, _ = load(source(folder, [(1, 1.0, 0, 0, 9, 9), BACKGROUND]), 8, context_pad=5, fg_fraction=1)
    assert (images[:, :, :5] == 0).all()
    assert (images[:, :, :, :5] == 0).all()
    np.testing.assert_array_equal(images[0, :, 5:, 5:], cv2.resize(IMAGE[:16, :16], (15, 15)).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("thresholds", "foreground", "background"),
    [
        ("", [FOREGROUND], [BACKGROUND, NEITHER]),
        ("bg_threshold: 0.3", [FOREGROUND], [BACKGROUND]),
        ("fg_threshold: 0.3", [FOREGROUND, NEITHER], [BACKGROUND]),
    ],
)
def test_thresholds_say_which_windows_a_batch_takes(folder, thresholds, foreground, background):
    source(folder, [FOREGROUND, NEITHER, BACKGROUND])
    files = f"source: '{folder}/windows.txt' root_folder: '{folder}/' batch_size: 40 fg_fraction: 0.5 {thresholds}"
    net = build_net(
        f"layer {{ name: 'w' type: 'WindowData' top: 'x' top: 'y' window_data_param {{ {files} }} "
        "transform_param { crop_size: 20 } }"
    )
    net.forward()
    images = net.blobs["x"].host_data()
    net.close()
    for half, windows in ((images[20:], foreground), (images[:20], background)):
        seen = {one for one in (FOREGROUND, NEITHER, BACKGROUND) if any((cut(one) == image).all() for image in half)}
        assert seen == set(windows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no images"),
        ("a.png", "'a.png' where '# 0' was expected"),
        ("# 0 a.png 3 40 60 2 1 0.5 1 2 3 4", "image 0 .*; each is '# number path"),
        ("# 1 a.png 3 40 60 0", "'# 1' where '# 0' was expected"),
        ("# 0 a.png 3 40 60 1 0 0.9 1 2 3 4", "has a foreground window of class 0 or less"),
        ("# 0 a.png 3 40 60 1 1 0.9 1 2 3 99999999999999999999", "image 0 .*path or window"),
        ("# 0 a.png 3 40 60 2 1 0.9 1 2 3 99999999999999999999 1 1 1 2 3 4", "image 0 .*path or window"),
        ("# 0 a.png 3 40 60 2 -9999999999999999999999 0.9 1 2 3 4 1 1 1 2 3 4", "image 0 .*path or window"),
    ],
)
def test_damaged_files(folder, text, message):
    with pytest.raises(DataError, match=rf"window file '.*windows.txt'.*{message}"):
        source(folder, [], text=text)


def test_what_the_windows_do_not_allow(folder):
    with pytest.raises(DataError, match="has no foreground windows; see fg_threshold"):
        load(source(folder, [BACKGROUND]))
    with pytest.raises(DataError, match=r"window \(5, 5, 60, 9\) of image 0 .* exceeds the image of 40 x 60"):
        load(source(folder, [(1, 0.0, 5, 5, 60, 9)]), 1)
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match=r"layer 'w': window .* cannot be read: No such file .* see root_folder"):
        load(source(folder, [BACKGROUND]), 1)

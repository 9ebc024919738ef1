"""FLOWriter and ImgWriter."""

from __future__ import annotations

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, gaussian

from caffepy.errors import RunError, ShapeError

FLOW, IMAGE = "type: 'FLOWriter'", "type: 'ImgWriter'"


def writer(head: str, fields: str) -> str:
    return f"{head} writer_param {{ {fields} }}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_flow(tmp_path: Path, backend: str) -> None:
    flow = gaussian((1, 2, 4, 5))
    text = writer(FLOW, f"folder: '{tmp_path}/a/b' prefix: 'x-' suffix: '-y'")
    Runner(text, [flow], backend, pass_number=12).forward()
    content = (tmp_path / "a" / "b" / "x-0000012-y.flo").read_bytes()
    assert content[:4] == b"PIEH" and struct.unpack("<ii", content[4:12]) == (5, 4)
    values = np.frombuffer(content[12:], "<f4").reshape(4, 5, 2)
    assert np.array_equal(values.transpose(2, 0, 1), flow[0])


def test_names(tmp_path: Path) -> None:
    """The number of the batch in a test, and of the sample if there are several."""
    text = writer(FLOW, f"folder: '{tmp_path}'")
    Runner(text, [gaussian((3, 2, 4, 5))], phase=TEST, first_sample=21).forward()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"0000007({n:03d}).flo" for n in range(3)]
    Runner(writer(FLOW, f"file: '{tmp_path}/one' folder: 'x'"), [gaussian((1, 2, 4, 5))]).forward()
    assert (tmp_path / "one").exists()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_image(tmp_path: Path, channels: int, backend: str) -> None:
    image = np.random.default_rng(0).uniform(-0.2, 1.2, (1, channels, 6, 5)).astype(np.float32)
    extension = {1: "pgm", 3: "ppm"}[channels]
    for fields in ("scale: 255", "normalize: true"):
        Runner(writer(IMAGE, f"folder: '{tmp_path}' {fields}"), [image], backend).forward()
        found = cv2.imread(str(tmp_path / f"0000000.{extension}"), cv2.IMREAD_UNCHANGED).reshape(6, 5, channels)
        values = image[0] * 255.0
        if "normalize" in fields:
            values = 255 * (image[0].astype(float) - image.min()) / (float(image.max()) - image.min())
        wanted = np.clip(values, 0, 255).transpose(1, 2, 0)
        assert np.abs(found - np.floor(wanted)).max() <= (1 if "normalize" in fields else 0)


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="2 channels"):
        Runner(writer(FLOW, ""), [gaussian((1, 3, 4, 4))])
    with pytest.raises(ShapeError, match="1 or 3 channels"):
        Runner(writer(IMAGE, ""), [gaussian((1, 2, 4, 4))])
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        Runner(writer(FLOW, f"folder: '{tmp_path}/file/x'"), [gaussian((1, 2, 4, 4))]).forward()

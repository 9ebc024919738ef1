"""What decodes a data layer's images, by the field `decode` and by the option that replaces it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from image_files import jpeg, smooth_image

from caffepy.backend import create_backend
from caffepy.backend.image_decoder import ImageDecoder
from caffepy.blob import Blob
from caffepy.data.sources.record_write import write_datums
from caffepy.errors import MissingExtraError
from caffepy.layers.core.base import LayerContext, layer_class
from caffepy.layers.input import images
from caffepy.proto.caffe_pb2 import TEST, TRAIN, Datum, LayerParameter

CROP = "crop_size: 200 "
"""Batches of this size are copied one by one."""


class Sevens(ImageDecoder):
    """Decodes every file to sevens."""

    def decode(self, files: Sequence[Any], places: Any, pixels: Any) -> list[bool]:
        pixels[...] = 7
        return [file is not None for file in files]

    def close(self) -> None:
        """There is nothing to close."""


def layer_over(
    folder: Path, text: str, phase: int = TRAIN, option: str = "", decoder: Any = Sevens, threads: int = 1
) -> Any:
    """A Data layer on a device that decodes images, with its blobs."""
    path = folder / "db"
    if not path.exists():
        datums = (Datum(data=jpeg(smooth_image(n, 210, 220)), encoded=True) for n in range(4))
        write_datums(path, ((b"%d" % n, datum) for n, datum in enumerate(datums)))
    backend: Any = create_backend(threads=1)
    if decoder is not None:
        backend.decodes_images, backend.image_decoder = True, decoder
    data = f"data_param {{ source: '{path}' backend: LMDB batch_size: 10 threads: {threads} }}"
    data += f" transform_param {{ {text} }}"
    param = text_format.Parse(f"name: 'd' type: 'Data' top: 'x' top: 'y' {data}", LayerParameter())
    layer = layer_class("Data")(param, LayerContext(backend, phase, decode=option))
    tops = [Blob(backend), Blob(backend)]
    layer.setup([], tops)
    return layer, tops


def run(layer: Any, tops: list[Blob]) -> bool:
    """Run a pass; whether the device decoded its images."""
    layer.forward([], tops)
    layer.context.passes.number += 1
    return bool((tops[0].host_data() == 7).all())


@pytest.mark.parametrize(
    ("field", "option", "phase", "by_device"),
    [
        ("", "", TRAIN, False), ("decode: GPU", "", TRAIN, True), ("decode: GPU", "", TEST, True),
        ("decode: GPU", "cpu", TRAIN, False), ("", "gpu", TRAIN, True), ("decode: AUTO", "", TEST, False),
        ("decode: AUTO", "", TRAIN, False),
    ],
)  # fmt: skip
def test_the_option_replaces_the_field(tmp_path: Path, field: str, option: str, phase: int, by_device: bool) -> None:
    layer, tops = layer_over(tmp_path, CROP + field, phase, option)
    assert run(layer, tops) == by_device
    layer.close()


@pytest.mark.parametrize(
    ("text", "decoder", "reason"),
    [
        (CROP, None, "cpu cannot"),
        (CROP + "noise_param { inverse: true } ", Sevens, "noise_param"),
        (CROP + "resize_param { height: 205 width: 205 } ", Sevens, "resize_param"),
        (CROP + "random_resize_param { min_size: 205 max_size: 205 } ", Sevens, "random_resize_param"),
    ],
)
def test_the_log_says_why_the_cpu_decodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, decoder: Any, reason: str
) -> None:
    layer, tops = layer_over(tmp_path, text + "decode: GPU", decoder=decoder)
    with caplog.at_level(logging.WARNING):
        assert not run(layer, tops)
    assert any("the CPU decodes" in message and reason in message for message in caplog.messages)
    layer.close()


def test_a_missing_library_is_an_error(tmp_path: Path) -> None:
    def missing() -> ImageDecoder:
        raise MissingExtraError("nvImageCodec", "decode13", "to decode images on the GPU")

    layer, tops = layer_over(tmp_path, CROP + "decode: GPU", decoder=missing)
    with pytest.raises(MissingExtraError, match="decode13"):
        run(layer, tops)
    layer.close()


@pytest.fixture
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO judges the passes 3 to 6."""
    monkeypatch.setattr(images, "_FIRST_PASSES", 2)
    monkeypatch.setattr(images, "_JUDGED_PASSES", 4)


@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize("slow", [True, False])
def test_auto_decodes_on_the_device_once_training_waits_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slow: bool
) -> None:
    from caffepy.data import loader

    def slowed(decode: Any) -> Any:
        def slowly(*arguments: Any) -> Any:
            time.sleep(0.003 if slow else 0)
            return decode(*arguments)

        return slowly

    # The second decodes files that a kernel has located, if an earlier run has compiled the kernel.
    for name in ("decode_image", "decode_plain_jpeg"):
        monkeypatch.setattr(loader, name, slowed(getattr(loader, name)))
    layer, tops = layer_over(tmp_path, CROP + "decode: AUTO")
    with caplog.at_level(logging.INFO):
        by_device = []
        for _ in range(30):
            by_device.append(run(layer, tops))
            time.sleep(0 if slow else 0.03)
    assert not any(by_device[:6]), "the first batches are judged"
    assert by_device[-1] == slow
    assert any(("the GPU decodes from now on" if slow else "the CPU decodes") in message for message in caplog.messages)
    layer.close()

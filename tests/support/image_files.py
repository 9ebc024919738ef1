"""Image files of all kinds that decoders meet, made of smooth random images."""

from __future__ import annotations

import struct

import cv2
import numpy as np


def smooth_image(seed: int, height: int = 40, width: int = 56, channels: int = 3) -> np.ndarray:
    """A colourful image without sharp edges, (H, W, C): JPEG keeps it, whatever the subsampling."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, channels), dtype=np.uint8)
    return np.atleast_3d(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC))


def jpeg(image: np.ndarray, *settings: int) -> bytes:
    """A JPEG file of quality 90; `settings` are further ones of `cv2.imwrite`."""
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 90, *settings])[1].tobytes()


def with_segment(file: bytes, marker: int, content: bytes) -> bytes:
    """A JPEG file with another segment after its first marker."""
    return file[:2] + struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content + file[2:]


def rotated(file: bytes, orientation: int = 6) -> bytes:
    """A JPEG file whose Exif segment gives an orientation."""
    directory = struct.pack(">HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    return with_segment(file, 0xE1, b"Exif\0\0MM\0\x2a\0\0\0\x08" + directory)


def files(seed: int = 0) -> dict[str, bytes]:
    """One file of each kind, by name."""
    image = smooth_image(seed)
    plain = jpeg(image)
    return {
        "baseline": plain,
        "subsampled": jpeg(image, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420),
        "not subsampled": jpeg(image, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
        "with restarts": jpeg(image, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
        "progressive": jpeg(image, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "rotated by Exif": rotated(plain),
        "CMYK": cmyk_jpeg(seed),
        "PNG": cv2.imencode(".png", image)[1].tobytes(),
        "BMP": cv2.imencode(".bmp", image)[1].tobytes(),
    }


def cmyk_jpeg(seed: int = 0) -> bytes:
    """A baseline JPEG whose frame says that it has four channels, as CMYK files do; its scan has too few."""
    file = bytearray(jpeg(smooth_image(seed)))
    frame = file.index(b"\xff\xc0")
    length, parts = file[frame + 3], bytes(file[frame + 10 : frame + 19])
    file[frame + 3], file[frame + 9] = length + 3, 4
    file[frame + 10 : frame + 19] = parts + b"\x04" + parts[1:3]
    return bytes(file)

"""How close `caffepy convert_imageset` comes to what decoding alone takes.

    python benchmarks/convert_imageset.py [--count 10000] [--rows 375] [--columns 500] [--resize 256] [--rounds 3]

Makes JPEGs of random shapes and textures in a temporary folder, then reads and decodes all of them with OpenCV alone,
in as many threads as there are cores, resizing and encoding as the case asks, and lets convert_imageset make LMDBs of
them: of resized pixels, of resized JPEGs, of pixels as they are, and of the files themselves. The rounds alternate;
each line has the best round of each. The folder lies where --folder says (default: where temporary files lie), and so
do the databases.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from caffepy.backend.cpu.jit.deferred import cpu_count
from caffepy.data.conversion.image_sets import Database, ImageOptions, convert_image_set


def make_images(folder: Path, count: int, rows: int, columns: int) -> list[str]:
    """Write JPEGs of noise at several scales, which compress about as photographs do, and the list of them."""

    def make(number: int) -> str:
        rng = np.random.default_rng(number)
        image = np.zeros((rows, columns, 3), np.float32)
        for cells, strength in ((4, 120), (24, 60), (120, 25)):
            noise = rng.uniform(-1, 1, (cells, cells, 3)).astype(np.float32) * strength
            image += cv2.resize(noise, (columns, rows), interpolation=cv2.INTER_CUBIC)
        name = f"{number % 100:02d}/{number:06d}.jpg"
        cv2.imwrite(str(folder / name), np.clip(image + 128, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])
        return name

    for number in range(min(count, 100)):
        (folder / f"{number:02d}").mkdir()
    with ThreadPoolExecutor(cpu_count()) as pool:
        names = list(pool.map(make, range(count)))
    (folder / "list.txt").write_text("".join(f"{name} {n % 1000}\n" for n, name in enumerate(names)))
    return names


def decode_all(folder: Path, names: list[str], resize: int, encode: bool = False) -> None:
    """OpenCV alone: read, decode and, as wished, resize and encode every image; the results are thrown away."""

    def decode(some: list[str]) -> None:
        for name in some:
            image = cv2.imdecode(np.frombuffer((folder / name).read_bytes(), np.uint8), cv2.IMREAD_COLOR)
            image = cv2.resize(image, (resize, resize)) if resize else image
            if encode:
                cv2.imencode(".jpg", image)

    cv2.setNumThreads(1)
    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(decode, [names[first : first + 16] for first in range(0, len(names), 16)]))


def convert_all(folder: Path, **options: Any) -> None:
    target = folder / "database"
    convert_image_set(str(folder), folder / "list.txt", Database(target), ImageOptions(**options))


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("count", 10000), ("rows", 375), ("columns", 500), ("resize", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    folder = Path(tempfile.mkdtemp(prefix="convert_imageset-", dir=args.folder))
    try:
        names = make_images(folder, args.count, args.rows, args.columns)
        size = sum(os.path.getsize(folder / name) for name in names) / len(names)
        print(f"{len(names)} JPEGs of {args.columns} x {args.rows}, {size / 1e3:.0f} kB each; {cpu_count()} cores")
        compare(folder, names, args.resize, args.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(folder: Path, names: list[str], resize: int, rounds: int) -> None:
    """Print the images a second of each way beside OpenCV's."""
    resized = {"resize_height": resize, "resize_width": resize}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        f"pixels, {resize} x {resize}": (resize, resized),
        f"jpg, {resize} x {resize}": (resize, {"encode_type": "jpg", **resized}),
        "pixels as they are": (0, {}),
        "files as they are": (0, {"encoded": True}),
    }
    for title, (size, options) in cases.items():
        alone, ours = [], []
        for _ in range(rounds):
            alone.append(timed(partial(decode_all, folder, names, size, "encode_type" in options)))
            ours.append(timed(partial(convert_all, folder, **options)))
            written = sum(path.stat().st_size for path in (folder / "database").iterdir())
            shutil.rmtree(folder / "database")
        rate, best, ratio = len(names) / min(alone), len(names) / min(ours), min(alone) / min(ours)
        print(
            f"{title:20} OpenCV alone {rate:7.0f}/s   convert_imageset {best:7.0f}/s   {ratio:.2f}   "
            f"{written / min(ours) / 1e6:5.0f} MB/s written"
        )


if __name__ == "__main__":
    main()

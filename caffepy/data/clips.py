"""Clips of C3D and TSN: lists of videos or of folders with frames, and the loader that fills batches with clips.

`caffepy.layers.input.video_data` and `volume_data` use it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import as_channels_first, opencv, read_image, resize_image
from caffepy.data.mean import read_volume_mean
from caffepy.data.random import SampleRng
from caffepy.data.sampler import SampleLoader, Sampler
from caffepy.data.sources.databases import hash_of
from caffepy.data.sources.image_list import list_lines
from caffepy.data.transform import both_sides, check_transform
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import working_folder

logger = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
_NUMBER = re.compile(r"[-+]?[0-9]{1,10}")
_FORMAT = re.compile(r"%(%|0?[0-9]{0,3}[dicu])")
"""Conversions of a name pattern: a number, a character, or a percent sign."""


_OF_TSN = ("modality", "num_segments", "name_pattern", "grayscale", "encoded")
"""Fields that only TSN has."""


def is_of_segments(param: caffe_pb2.VideoDataParameter) -> bool:
    """Return whether a list is of TSN's VideoData, not of C3D's."""
    return any(map(param.HasField, _OF_TSN))


@dataclass(frozen=True)
class ClipLine:
    """A line of a list: the file or folder, a number (first frame or number of frames), and the labels."""

    path: str
    number: int
    labels: tuple[int, ...]


class ClipList:
    """The clips of a list, in its order; a `Source`.

    Args:
        path: the list. A line is a path, a number unless `numbered` is false, and a label unless `labelled` is false.
        root_folder: prefix of each path; no slash is added.
        numbered: whether lines have the number.
        labelled: whether lines have labels.
        several: whether lines have several labels, divided by commas.

    Raises:
        DataError: the list cannot be read, is empty, or has a line of another form.
    """

    def __init__(
        self, path: Path, root_folder: str = "", numbered: bool = True, labelled: bool = True, several: bool = False
    ) -> None:
        self.description = f"list '{path}'"
        self.lines: list[ClipLine] = []
        fields = 1 + numbered + labelled
        form = (
            "a path" + ", a number" * numbered + (", labels divided by commas" if several else ", a label") * labelled
        )
        for number, text in list_lines(path):
            parts = text.rsplit(maxsplit=fields - 1) if fields > 1 else [text.strip()]
            labels = (parts[-1].split(",") if several else parts[-1:]) if labelled else []
            numbers = [*parts[1 : 1 + numbered], *labels]
            if len(parts) != fields or not all(map(_NUMBER.fullmatch, numbers)):
                raise DataError(f"'{path}':{number}: '{text[:60]}' is not a line of {form}")
            first = int(parts[1]) if numbered else 0
            self.lines.append(ClipLine(root_folder + parts[0], first, tuple(map(int, labels))))
        if not self.lines:
            raise DataError(f"{self.description} names no clips; each line must be {form}")

    def __len__(self) -> int:
        return len(self.lines)

    def fingerprint(self) -> dict[str, str]:
        text = "\n".join(f"{line.number} {line.labels}" for line in self.lines)
        return {"the number of clips": str(len(self)), "the hash of the list": hash_of(text.encode())}

    def close(self) -> None:
        """Do nothing: no file is open between reads."""


# -- reading frames ------------------------------------------------------------------------------------


def read_frame(path: str, size: tuple[int, int] | None, gray: bool = False) -> Pixels:
    """Return an image file as (C, H, W) of one or three channels, resized to `size`.

    Raises:
        DataError: it cannot be read or decoded; the message names it.
    """
    try:
        image = read_image(path, force_color=not gray, force_gray=gray)
        return image if size is None else resize_image(image, *size)
    except DataError as error:
        raise DataError(f"'{path}' {error}") from error


def read_folder(path: str, first: int, length: int, step: int, size: tuple[int, int] | None) -> Pixels:
    """Return the frames first, first + step, … of a folder as a clip (3, length, H, W).

    Frame number n is the file `%06d.jpg` of n.

    Raises:
        DataError: a frame cannot be read, or the frames differ in size.
    """
    return _stacked([read_frame(f"{path}/{first + i * step:06d}.jpg", size) for i in range(length)], path)


class VideoSource:
    """The frames of a video file or camera. One thread reads at a time.

    Args:
        path: the file; None: a camera.
        device: number of the camera.

    Raises:
        DataError: the video cannot be opened, or has no frames.
    """

    index = None

    def __init__(self, path: Path | None, device: int = 0) -> None:
        self.description = f"camera {device}" if path is None else f"video '{path}'"
        self.is_camera = path is None
        self._target: str | int = device if path is None else os.fspath(path)
        self._lock = Lock()
        self._next = 0
        if path is not None and not os.path.isfile(path):
            raise DataError(f"{self.description} does not exist or is not a file (looked from {working_folder()})")
        self._capture: Any
        self._open()
        frames = 0 if path is None else int(self._capture.get(opencv().CAP_PROP_FRAME_COUNT))
        self._length = frames if frames > 0 else sys.maxsize
        self._first: NDArray[np.uint8] | None = None
        try:
            self._first = self.frame(0)
        except DataError as error:
            self.close()
            raise DataError(f"{self.description}: frame 0 {error}") from error

    def _open(self) -> None:
        self._capture = opencv().VideoCapture(self._target)
        self._next = 0
        if not self._capture.isOpened():
            raise DataError(f"{self.description} cannot be opened by OpenCV")

    def __len__(self) -> int:
        """Return the number of frames; sys.maxsize if it is unknown."""
        return self._length

    def frame(self, number: int) -> NDArray[np.uint8]:
        """Return a frame (C, H, W). A camera returns its current frame.

        The first frame is stored, because the net's shapes follow from it: `frame(0)` returns it again.

        Raises:
            DataError: there is no such frame. The message lacks the subject, which the caller prepends.
        """
        with self._lock:
            if number == 0 and self._first is not None:
                return self._first
            if not self.is_camera:
                self._skip_to(number)
            done, image = self._capture.read()
            self._next += 1
            if not done or image is None:
                raise DataError("cannot be read" if self.is_camera else "does not exist: the video has ended")
            return as_channels_first(image)

    def _skip_to(self, number: int) -> None:
        """Decode frames up to `number`, because seeking is inexact in many formats."""
        if number < self._next:
            self._capture.release()
            self._open()
        while self._next < number:
            if not self._capture.grab():
                raise DataError("does not exist: the video has ended")
            self._next += 1

    def fingerprint(self) -> dict[str, str]:
        first = b"" if self._first is None or self.is_camera else np.ascontiguousarray(self._first).tobytes()
        return {"the number of frames": str(len(self)), "the hash of the first frame": hash_of(first)}

    def close(self) -> None:
        """Release the file or camera. Idempotent."""
        with self._lock:
            capture, self._capture = self._capture, None
        if capture is not None:
            capture.release()


def read_video(path: str, first: Callable[[int], int], length: int, step: int, size: tuple[int, int] | None) -> Pixels:
    """Return frames of a video as a clip (3, length, H, W).

    Raises:
        DataError: the video cannot be opened, has too few frames, or a frame cannot be read.
    """
    video = VideoSource(Path(path))
    try:
        count = len(video)
        if count < length * step:
            raise DataError(f"'{path}' has {count} frames; a clip needs {length * step}")
        start = first(count)
        if start < 0 or start + length * step > count:
            raise DataError(f"'{path}' has {count} frames; a clip of {length * step} cannot begin at frame {start}")
        try:
            frames = [video.frame(start + i * step) for i in range(length)]
        except DataError as error:
            raise DataError(f"'{path}': a frame {error}") from error
    finally:
        video.close()
    return _stacked([frame if size is None else resize_image(frame, *size) for frame in frames], path)


def _stacked(frames: list[Pixels], path: str) -> Pixels:
    """Return frames (C, H, W) as a clip (C, frames, H, W)."""
    if len({frame.shape for frame in frames}) > 1:
        raise DataError(f"'{path}' has frames of different sizes; set new_height and new_width")
    return np.stack(frames, axis=1)


# -- transformation ------------------------------------------------------------------------------------


class ClipTransform:
    """Crops, mirrors, subtracts the mean and scales arrays (C, …, H, W).

    Args:
        param: the layer's transform_param.
        phase: caffe_pb2.TRAIN or TEST.
        resolve: resolves the path of the mean file.
        where: the layer, for messages.

    Raises:
        ConfigError: fields contradict each other.
        DataError: the mean file cannot be read.
    """

    fields = frozenset({"scale", "mirror", "crop_size", "mean_file", "mean_value", "random_seed"})
    """Those of transform_param that act."""

    def __init__(
        self, param: caffe_pb2.TransformationParameter, phase: int, resolve: Callable[[str], Path], where: str
    ) -> None:
        check_transform(param, where)
        unused = [field.name for field, _ in param.ListFields() if field.name not in self.fields]
        if unused:
            logger.warning("%s: transform_param's %s has no effect here", where, " and ".join(unused))
        self.param = param
        self.training = phase == caffe_pb2.TRAIN
        self.where = where
        self._mean_file = read_volume_mean(resolve(param.mean_file)) if param.HasField("mean_file") else None
        self._mean_values = np.array(param.mean_value, np.float32)

    def seed(self, seed: int) -> int:
        """Return `transform_param.random_seed` if set, else the solver's seed."""
        return seed if self.param.random_seed < 0 else self.param.random_seed

    def crop_of(self, height: int, width: int, rng: SampleRng) -> tuple[slice, slice]:
        """Return the rows and columns to take: random ones in TRAIN, the central ones in TEST.

        Raises:
            DataError: the image is smaller than the crop.
        """
        crop = self.param.crop_size
        if not crop:
            return slice(0, height), slice(0, width)
        self.check_size(height, width)
        top, left = (rng.below(size - crop + 1) if self.training else (size - crop) // 2 for size in (height, width))
        return slice(top, top + crop), slice(left, left + crop)

    def check_size(self, height: int, width: int) -> None:
        """Check that an image is no smaller than the crop.

        Raises:
            DataError: it is.
        """
        if min(height, width) < self.param.crop_size:
            raise DataError(f"is {height} x {width}, smaller than crop_size {self.param.crop_size}")

    def mirrors(self, rng: SampleRng) -> bool:
        """Draw whether to mirror a sample."""
        return self.param.mirror and rng.below(2) == 1

    def mean(self, shape: tuple[int, ...]) -> Floats:
        """Return the mean of arrays (C, …, H, W), of a shape that can be broadcast to theirs.

        Raises:
            DataError: mean_file has another shape, or the number of mean values does not divide the channels.
        """
        if self._mean_file is not None:
            if self._mean_file.shape != shape:
                raise DataError(
                    f"is {' x '.join(map(str, shape))}, but the mean in mean_file is "
                    f"{' x '.join(map(str, self._mean_file.shape))}"
                )
            return self._mean_file
        values, channels = self._mean_values, shape[0]
        if values.size and channels % values.size:
            raise DataError(f"has {channels} channels, but transform_param has {values.size} mean_value")
        values = np.tile(values, channels // values.size) if values.size else np.zeros(channels, np.float32)
        return values.reshape(channels, *(1,) * (len(shape) - 1))

    def normalised(self, image: NDArray[np.generic], mean: Floats) -> Floats:
        """Return (image - mean) * scale."""
        result: Floats = np.subtract(image, mean, dtype=np.float32)
        return result if self.param.scale == 1 else result * np.float32(self.param.scale)

    def apply(self, clip: NDArray[np.generic], rng: SampleRng) -> Floats:
        """Transform a clip."""
        rows, columns = self.crop_of(clip.shape[-2], clip.shape[-1], rng)
        mean = np.broadcast_to(self.mean(clip.shape), clip.shape)[..., rows, columns]
        result = self.normalised(clip[..., rows, columns], mean)
        return result[..., ::-1] if self.mirrors(rng) else result


SCALE_RATIOS = (1.0, 0.875, 0.75, 0.66)
"""TSN's, where transform_param has none."""
_NEAR = 3
"""Crops whose side differs by less from crop_size have that side."""


class SegmentTransform(ClipTransform):
    """TSN's transformation of images (C, H, W): crops of several sizes at fixed places (`data_transformer.cpp`).

    In TRAIN, `multi_scale` draws height and width of the crop from the parts `scale_ratios` of the shorter side, no
    more than `max_distort` entries apart, and resizes the crop to `crop_size`. `fix_crop` draws its place from the
    corners and the center, with `more_fix_crop` also from the middles of the sides and the centers of the quarters.
    With `is_flow`, mirroring turns the values x of even channels, the horizontal flow, into 255 - x. Mean values repeat
    over the channels.
    """

    fields = ClipTransform.fields | {
        "fix_crop",
        "more_fix_crop",
        "multi_scale",
        "scale_ratios",
        "max_distort",
        "is_flow",
    }

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return heights and widths that `multi_scale` may draw."""
        crop, ratios = self.param.crop_size, np.array(self.param.scale_ratios or SCALE_RATIOS, np.float32)
        sides = [int(np.float32(min(height, width)) * ratio) for ratio in ratios]
        sides = [crop if abs(side - crop) < _NEAR else side for side in sides]
        if min(sides) < 1 or max(sides) > min(height, width):
            raise DataError(f"is {height} x {width}: scale_ratios give crops of {sides} pixels, which do not fit")
        pairs = [(i, j) for i in range(len(sides)) for j in range(len(sides)) if abs(i - j) <= self.param.max_distort]
        if not pairs:
            raise DataError(f"cannot be cropped: max_distort is {self.param.max_distort}; give at least 0")
        return [(sides[i], sides[j]) for i, j in pairs]

    def places(self, free_rows: int, free_columns: int) -> list[tuple[int, int]]:
        """Return the rows and columns at which `fix_crop` may begin a crop."""
        corners = [(0, 0), (0, 4), (4, 0), (4, 4), (2, 2)]
        more = [(0, 2), (4, 2), (2, 0), (2, 4), (1, 1), (1, 3), (3, 1), (3, 3)] if self.param.more_fix_crop else []
        return [(i * (free_rows // 4), j * (free_columns // 4)) for i, j in corners + more]

    def crop_of(self, height: int, width: int, rng: SampleRng) -> tuple[slice, slice]:
        crop = self.param.crop_size
        if not crop or not self.training:
            return super().crop_of(height, width, rng)
        self.check_size(height, width)
        rows = columns = crop
        if self.param.multi_scale:
            sizes = self.sizes(height, width)
            rows, columns = sizes[rng.below(len(sizes))]
        if self.param.fix_crop:
            places = self.places(height - rows, width - columns)
            top, left = places[rng.below(len(places))]
        else:
            top, left = rng.below(height - rows + 1), rng.below(width - columns + 1)
        return slice(top, top + rows), slice(left, left + columns)

    def apply(self, clip: NDArray[np.generic], rng: SampleRng) -> Floats:
        """Transform an image (C, H, W) of bytes."""
        mirrored, crop = self.mirrors(rng), self.param.crop_size
        rows, columns = self.crop_of(clip.shape[1], clip.shape[2], rng)
        image = np.asarray(clip[:, rows, columns], np.uint8)
        if crop and image.shape[1:] != (crop, crop):
            image = np.concatenate([resize_image(channel[None], crop, crop) for channel in image])
        if mirrored:
            image = image[:, :, ::-1].copy()
            if self.param.is_flow:
                image[::2] = 255 - image[::2]
        mean = np.broadcast_to(self.mean(clip.shape), clip.shape)
        if self.param.multi_scale and crop:  # TSN takes the corner of a mean image then
            rows, columns = slice(0, crop), slice(0, crop)
        part = mean[:, rows, columns]
        return self.normalised(image, part[:, :, ::-1] if mirrored else part)


# -- readers of samples --------------------------------------------------------------------------------


ClipReader = Callable[[ClipLine, SampleRng], "list[Floats]"]
"""Returns the values of each top of a sample, given a line. Its errors follow the clip's name."""


def labels_of(line: ClipLine, count: int) -> Floats:
    """Return the line's label; with a `count`, zeros with a 1 for each label.

    Raises:
        DataError: a label is negative, or not below `count`.
    """
    if not count:
        return np.array(line.labels[0], np.float32)
    values = np.zeros(count, np.float32)
    for label in line.labels:
        if not 0 <= label < count:
            raise DataError(f"has the label {label}; num_of_labels is {count}")
        values[label] = 1
    return values


class FrameClips:
    """Clips (3, new_length, H, W) of C3D, and their labels (`video_data_layer.cpp` of C3D 1.1).

    Args:
        param: of the layer.
        transform: of the clips.

    Raises:
        ConfigError: a setting is missing or contradictory.
    """

    def __init__(self, param: caffe_pb2.VideoDataParameter, transform: ClipTransform) -> None:
        where = transform.where
        self._param, self._transform = param, transform
        if min(param.new_length, param.sampling_rate, param.max_sampling_rate) < 1:
            raise ConfigError(f"{where}: new_length, sampling_rate and max_sampling_rate must be at least 1")
        self._size = both_sides(param.new_height, param.new_width, where)
        if param.use_multiple_label and not param.HasField("num_of_labels"):
            raise ConfigError(f"{where}: use_multiple_label needs num_of_labels")
        self._label_count = param.num_of_labels if param.use_multiple_label else 0

    @staticmethod
    def source(path: Path, param: caffe_pb2.VideoDataParameter) -> ClipList:
        """Return the list; lines about videos with random first frames have none."""
        numbered = param.use_image or not param.use_temporal_jitter
        return ClipList(path, param.root_folder, numbered, several=param.use_multiple_label)

    def read(self, line: ClipLine, rng: SampleRng) -> list[Floats]:
        clip = self._clip(line, rng)
        return [self._transform.apply(clip, rng), labels_of(line, self._label_count)]

    def _clip(self, line: ClipLine, rng: SampleRng) -> Pixels:
        param, length = self._param, self._param.new_length
        step = rng.below(param.max_sampling_rate) + 1 if param.use_sampling_rate_jitter else param.sampling_rate
        if not param.use_image:
            return read_video(line.path, lambda count: self._first(line, count, step, rng), length, step, self._size)
        if not param.use_temporal_jitter:
            return read_folder(line.path, line.number, length, step, self._size)
        if line.number < length * step:
            raise DataError(f"has {line.number} frames; a clip needs {length * step}")
        first = rng.below(line.number - length * step + 1) + 1 if self._transform.training else 0
        return read_folder(line.path, first, length, step, self._size)

    def _first(self, line: ClipLine, count: int, step: int, rng: SampleRng) -> int:
        if not self._param.use_temporal_jitter:
            return line.number
        return rng.below(count - self._param.new_length * step + 1)


class SegmentClips:
    """Images (C, H, W) of the frames of segments of videos, and their labels (TSN's `video_data_layer.cpp`).

    The number of a line is that of the video's frames; a folder has one file for each frame, or for flow two.

    Args:
        param: of the layer.
        transform: of the images.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, param: caffe_pb2.VideoDataParameter, transform: ClipTransform) -> None:
        where = transform.where
        self._param, self._transform = param, transform
        if min(param.new_length, param.num_segments) < 1:
            raise ConfigError(f"{where}: new_length and num_segments must be at least 1")
        self._size = both_sides(param.new_height, param.new_width, where)
        flow = param.modality == caffe_pb2.VideoDataParameter.FLOW
        self._pattern = param.name_pattern or ("flow_%c_%04d.jpg" if flow else "image_%04d.jpg")
        kinds = [match[1][-1] for match in _FORMAT.finditer(self._pattern) if match[1] != "%"]
        wanted = [["c", "d"]] if flow else [["d"]]
        if [["d" if kind in "diu" else kind for kind in kinds]] != wanted or _FORMAT.sub("", self._pattern).count("%"):
            raise ConfigError(
                f"{where}: name_pattern is '{self._pattern}'; it needs "
                + ("%c for the direction and then %04d" if flow else "one %04d")
                + " for the frame's number"
            )
        self._directions = ("x", "y") if flow else ()

    def read(self, line: ClipLine, rng: SampleRng) -> list[Floats]:
        frames: list[Pixels] = []
        for offset in self.offsets(line.number, rng):
            for number in range(offset + 1, offset + 1 + self._param.new_length):
                frames.extend(self._frame(line.path, number))
        if len({frame.shape for frame in frames}) > 1:
            raise DataError("has frames of different sizes; set new_height and new_width")
        return [self._transform.apply(np.concatenate(frames), rng), labels_of(line, 0)]

    def offsets(self, frames: int, rng: SampleRng) -> list[int]:
        """Return the number of frames before those of each segment: random in TRAIN, the middle ones in TEST."""
        each = frames // self._param.num_segments
        free = each - self._param.new_length + 1
        if free < 1:
            return [0] * self._param.num_segments
        return [
            i * each + (rng.below(free) if self._transform.training else free // 2)
            for i in range(self._param.num_segments)
        ]

    def _frame(self, folder: str, number: int) -> list[Pixels]:
        if self._directions:
            names = [self._pattern % (direction, number) for direction in self._directions]
            return [read_frame(f"{folder}/{name}", self._size, gray=True) for name in names]
        return [read_frame(f"{folder}/{self._pattern % number}", self._size, self._param.grayscale)]


# -- batches -------------------------------------------------------------------------------------------


class ClipLoader(SampleLoader):
    """Fills batches with samples of a list; a `Loader`.

    In TRAIN a clip that cannot be read is replaced by the next of the order that can, with a warning for each line, as
    C3D skips them. In TEST it is an error.

    Args:
        source: the list.
        order: of its lines.
        reader: makes the samples.
        transform: tells the phase and the seed.
        seed: of the solver.
        stream: random stream of the layer.
        where: the layer, for messages.
    """

    def __init__(
        self,
        source: ClipList,
        order: Sampler,
        reader: ClipReader,
        transform: ClipTransform,
        seed: int,
        stream: int,
        where: str,
    ) -> None:
        key = (transform.seed(seed), stream)
        super().__init__(
            where,
            lambda record, number: reader(source.lines[record], SampleRng(*key, number)),
            lambda record: f"clip {record} ('{source.lines[record].path}') of {source.description}",
            order,
        )
        self._tries = len(source) if transform.training else 1
        self._warned: set[int] = set()

    def sample(self, record: int, number: int) -> Sequence[Floats]:
        """Return the values of each top of a global sample; see `SampleLoader.sample`.

        Raises:
            DataError: the clip cannot be read; in TRAIN, no clip can.
        """
        for attempt in range(self._tries):
            record = record if attempt == 0 else int(self._order.records(number + attempt, 1)[0])
            try:
                return super().sample(record, number)
            except DataError as error:
                failure = error
            if self._tries > 1 and record not in self._warned:
                self._warned.add(record)
                logger.warning("%s; the next clip takes its place", failure)
        raise failure

    def first_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the tops of the first sample."""
        return [part.shape for part in self.sample(int(self._order.records(0, 1)[0]), 0)]

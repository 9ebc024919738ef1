"""CPMData: people of a database with maps of their parts and of the connections between these."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data import random
from caffepy.data.datum import opencv
from caffepy.data.random import SampleRng
from caffepy.data.sampler import SampleLoader, Sampler
from caffepy.data.sources.source import RecordSource
from caffepy.errors import DataError
from caffepy.forks.pose.people import (
    OUTSIDE,
    Grid,
    People,
    Pixels,
    check_side,
    mark_outside,
    means,
    mirroring,
    planes_of,
    read_people,
    rotation,
    scaling,
    shift,
    warped,
)
from caffepy.forks.pose.skeletons import MODELS, Pairs, Skeleton, Sources
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.images import open_records
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.layer import register_layer

Floats = NDArray[np.float32]
MADE_BY = "the repository of the net has the programs that make such databases"
CHANNELS = 6
"""Planes of a record: three colors, numbers, mask of people without parts, mask of all people."""
_GRAY = 128
_MAX_MAP = 1 << 14
_UNNAMED = 3
"""State of a part that the record of CPMData spares."""

_LIMBS_COCO: Pairs = (
    (1, 8), (8, 9), (9, 10), (1, 11), (11, 12), (12, 13), (1, 2), (2, 3), (3, 4), (2, 16), (1, 5), (5, 6), (6, 7),
    (5, 17), (1, 0), (0, 14), (0, 15), (14, 16), (15, 17),
)  # fmt: skip
_LIMBS_MPI: Pairs = (
    (0, 1), (1, 2), (2, 3), (3, 4), (1, 5), (5, 6), (6, 7), (1, 14), (14, 8), (8, 9), (9, 10), (14, 11), (11, 12),
    (12, 13),
)  # fmt: skip
_MPI_SOURCES: Sources = (
    (9,), (8,), (12,), (11,), (10,), (13,), (14,), (15,), (2,), (1,), (0,), (3,), (4,), (5,), (7, 6)
)  # fmt: skip
BODIES: dict[int, tuple[Skeleton, Sources]] = {
    56: (Skeleton(18, _LIMBS_COCO, MODELS["COCO_18"].skeleton.mirrored), MODELS["COCO_18"].sources),
    43: (Skeleton(15, _LIMBS_MPI, ((2, 5), (3, 6), (4, 7), (8, 11), (9, 12), (10, 13))), _MPI_SOURCES),
}
"""By num_parts, the number of maps without the background: the skeleton, and the parts of the database for each."""


class RecordsLoader(SampleLoader):
    """Fills batches with samples that a layer makes of records.

    Args:
        layer: makes the samples.
        seed: of the solver.
        stream: of the layer's random numbers.
    """

    def __init__(self, layer: RecordsLayer, seed: int, stream: int) -> None:
        super().__init__(layer.where)
        self._layer, self._key = layer, (seed, stream)

    def sample(self, number: int) -> list[Floats]:
        try:
            return self._layer.make_sample(number, self._key)
        except DataError as error:
            raise DataError(f"{self.where}: {self.describe(number)} {error}") from error

    def describe(self, sample: int) -> str:
        return self._layer.record_of(sample, self._key)


class RecordsLayer(PrefetchingLayer):
    """A data layer whose samples are made of records on the host, each by itself."""

    def batch_size(self) -> int:
        return self.param.data_param.batch_size

    def prefetch_depth(self) -> int:
        return self.param.data_param.prefetch

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return RecordsLoader(self, stream.seed, stream.stream)

    def make_sample(self, number: int, key: tuple[int, int]) -> list[Floats]:
        """Return the values of each top of a global sample.

        Args:
            number: of the sample.
            key: seed and stream of the random numbers.

        Raises:
            DataError: the record does not hold what the layer needs. The message follows the record's name.
        """
        raise NotImplementedError

    def record_of(self, number: int, key: tuple[int, int]) -> str:
        """Return the name of the record of a global sample."""
        raise NotImplementedError

    def open_records(self, path: str) -> RecordSource:
        """Open a database of records."""
        leveldb = self.param.data_param.backend == caffe_pb2.DataParameter.LEVELDB
        return open_records(self.context.resolve(path), leveldb, self.where, MADE_BY)


@register_layer("CPMData")
class CPMDataLayer(RecordsLayer):
    """People of a database and maps of their parts (CMU's `cpm_data_layer.cpp`; Cao et al. 2017).

    Tops: images (N, 6, H, W), maps (N, 2 (M + 1), H / stride, W / stride), where H and W are crop_size_y and
    crop_size_x in TRAIN and those of the record in TEST. M is `num_parts`: 56 (COCO: 2 * 19 connections, 18 parts) or
    43 (MPI: 2 * 14 connections, 15 parts). The first M + 1 maps are weights between 0 and 1, which are 0 where people
    have no parts; the others are, in this order, the connections' unit vectors, the parts, and the background, which
    is 1 less the largest part. A part's map is the sum over people of exp(-d^2 / (2 sigma^2)), at most 1; in a
    connection's maps, the last person counts. The image's first channels are (x - 128) / 256; the other three are 0.

    A record is a Datum of 6 planes: blue, green, red, numbers about the people, weights, and one that is not read. In
    TRAIN the image is scaled by target_dist / scale of the person, times a random factor, rotated, shifted so that the
    person is within center_perterb_max of the center, and flipped, all at random. `gray` and `do_clahe` change colors.

    Raises:
        ConfigError: a setting is wrong, or aug_way is not "rand".
        DataError: the database or a record cannot be read.
    """

    tops = (1, 2)

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.settings = self.param.cpm_transform_param
        if param.num_parts not in BODIES:
            raise self.error(f"num_parts is {param.num_parts}; it must be 56 (COCO) or 43 (MPI)")
        if param.aug_way != "rand" or not param.transform_body_joint:
            raise self.error('only aug_way: "rand" and transform_body_joint: true are supported; leave both out')
        self._skeleton, self._parts = BODIES[param.num_parts]
        needed = 1 + max(max(source) for source in self._parts)
        if param.np_in_lmdb < needed:
            raise self.error(f"np_in_lmdb is {param.np_in_lmdb}; num_parts {param.num_parts} needs at least {needed}")
        if min(param.stride, param.crop_size_x, param.crop_size_y) < 1 or not param.sigma > 0:
            raise self.error("stride, crop_size_x, crop_size_y and sigma must be positive")
        if max(param.crop_size_x, param.crop_size_y) > _MAX_MAP:
            raise self.error(f"crop_size_x and crop_size_y must be at most {_MAX_MAP}")
        self._records = self.open_records(self.param.data_param.source)
        try:
            shapes = [part.shape for part in RecordsLoader(self, 0, 0).sample(0)]
        except BaseException:
            self._records.close()
            raise
        return self._records, shapes[: len(self.param.top)]

    def _record(self, number: int, key: tuple[int, int]) -> int:
        param = self.param.data_param
        skip = random.rand_skip_count(*key, param.rand_skip) if param.rand_skip else 0
        return int(Sampler(len(self._records), skip).records(number, 1)[0])

    def record_of(self, number: int, key: tuple[int, int]) -> str:
        return f"{self._records.record_name(self._record(number, key))} of {self._records.description}"

    def make_sample(self, number: int, key: tuple[int, int]) -> list[Floats]:
        planes = planes_of(self._records.read(self._record(number, key)))
        if planes.shape[0] != CHANNELS:
            raise DataError(f"has {planes.shape[0]} planes; CPMData needs {CHANNELS}")
        people = self._people(planes[3])
        image, mask = self._recolored(np.ascontiguousarray(planes[:3].transpose(1, 2, 0))), planes[4]
        if self.context.phase == caffe_pb2.TRAIN:
            image, mask = self._augmented(image, mask, people, SampleRng(*key, number))
        data = np.zeros((CHANNELS, *image.shape[:2]), np.float32)
        data[:3] = (image.transpose(2, 0, 1).astype(np.float32) - _GRAY) / 256
        return [data, self._maps(image.shape[0], image.shape[1], mask, people)]

    def _people(self, plane: Pixels) -> People:
        people = read_people(plane, self.settings.np_in_lmdb, 1, 1.0)
        for index, person in enumerate(people.people):
            unnamed = (person.states == _UNNAMED) & (index == 0)
            person.states = np.where(unnamed, _UNNAMED, (person.states != 0).astype(np.int64))
        mark_outside(people, (_UNNAMED,))
        for person in people.people:
            person.points = means(person.points, self._parts)
            person.states = np.array([self._state(person.states[list(source)]) for source in self._parts])
        return people

    def _state(self, states: NDArray[np.int64]) -> int:
        """Return the state of a part that is the mean of parts with these states."""
        if (states == OUTSIDE).any():
            return OUTSIDE
        if (states == _UNNAMED).any() and self._skeleton.parts == 18:
            return _UNNAMED
        return int(states.all())

    def _recolored(self, image: Pixels) -> Pixels:
        cv2, param = opencv(), self.settings
        if param.do_clahe:
            lab = cv2.cvtColor(image, cv2.COLOR_BGR2Lab)
            tiles = (int(param.clahe_tile_size),) * 2
            lab[..., 0] = cv2.createCLAHE(int(param.clahe_clip_limit), tiles).apply(np.ascontiguousarray(lab[..., 0]))
            image = cv2.cvtColor(lab, cv2.COLOR_Lab2BGR)
        if param.gray == 1:
            image = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), cv2.COLOR_GRAY2BGR)
        return image

    def _augmented(self, image: Pixels, mask: Pixels, people: People, rng: SampleRng) -> tuple[Pixels, Pixels]:
        """Return image and mask of the net's size; move the people likewise."""
        cv2, param = opencv(), self.settings
        factor = 1.0
        if rng.uniform(0, 1) <= param.scale_prob:
            factor = rng.uniform(param.scale_min, param.scale_max)
        scale = param.target_dist / people.people[0].scale * factor
        for side in image.shape[:2]:
            check_side(side * scale)
        image, mask = (
            np.asarray(cv2.resize(part, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC), np.uint8)
            for part in (image, mask)
        )
        people.move(scaling(scale))
        size = (image.shape[0], image.shape[1])
        matrix, box = rotation(size, (rng.uniform(0, 1) - 0.5) * 2 * param.max_rotate_degree)
        image, mask = warped(image, matrix, box, _GRAY), warped(mask, matrix, box, 255)
        people.move(matrix)
        offsets = [int((rng.uniform(0, 1) - 0.5) * 2 * param.center_perterb_max) for _ in range(2)]
        x, y = (int(np.rint(value + by)) for value, by in zip(people.people[0].center, offsets, strict=True))
        left, top = x - param.crop_size_x // 2, y - param.crop_size_y // 2
        image, mask = (
            cut(part, top, left, (param.crop_size_y, param.crop_size_x), border)
            for part, border in ((image, _GRAY), (mask, 255))
        )
        people.move(shift(-left, -top))
        if rng.uniform(0, 1) <= param.flip_prob:
            image, mask = image[:, ::-1], mask[:, ::-1]
            people.move(mirroring(image.shape[1]))
            swap(people, self._skeleton)
        return image, mask

    def _maps(self, height: int, width: int, mask: Pixels, people: People) -> Floats:
        cv2, param, skeleton = opencv(), self.settings, self._skeleton
        grid = Grid(height // param.stride, width // param.stride, param.stride)
        count, limbs = skeleton.channels, 2 * len(skeleton.limbs)
        maps = np.zeros((2 * count, grid.height, grid.width), np.float32)
        small = cv2.resize(
            np.ascontiguousarray(mask), None, fx=1 / param.stride, fy=1 / param.stride, interpolation=cv2.INTER_CUBIC
        )
        maps[:count] = np.asarray(small, np.float32)[: grid.height, : grid.width] / 255
        for part, state in enumerate(people.people[0].states):
            if state == _UNNAMED:
                maps[part] = 0
        targets = maps[count:]
        for person in people.people:
            for part in range(skeleton.parts):
                if person.shown(part):
                    targets[limbs + part] += grid.peak(person.points[part], param.sigma)
                    np.minimum(targets[limbs + part], 1, out=targets[limbs + part])
            for index, (begin, end) in enumerate(skeleton.limbs):
                if person.shown(begin, end):
                    near, direction = grid.limb(person.points[begin] / 8, person.points[end] / 8)
                    targets[2 * index][near], targets[2 * index + 1][near] = direction
        targets[-1] = np.maximum(1 - targets[limbs:-1].max(axis=0), 0)
        return maps


def cut(image: Pixels, top: int, left: int, size: tuple[int, int], border: int) -> Pixels:
    """Return the part of an image that begins at a row and column, which may lie outside, filled with `border`."""
    result = np.full((*size, *image.shape[2:]), border, np.uint8)
    begins = max(top, 0), max(left, 0)
    ends = min(top + size[0], image.shape[0]), min(left + size[1], image.shape[1])
    if begins[0] < ends[0] and begins[1] < ends[1]:
        part = image[begins[0] : ends[0], begins[1] : ends[1]]
        result[begins[0] - top : ends[0] - top, begins[1] - left : ends[1] - left] = part
    return result


def swap(people: People, skeleton: Skeleton) -> None:
    """Exchange left and right parts, after a flip."""
    order = np.arange(skeleton.parts)
    for first, second in skeleton.mirrored:
        order[[first, second]] = second, first
    for person in people.people:
        person.points, person.states = person.points[order], person.states[order]

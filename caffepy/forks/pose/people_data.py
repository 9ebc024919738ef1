"""CPMData and OPData: people of one or several databases, with maps of their parts and connections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data import random
from caffepy.data.images import AREA, CUBIC, MAX_PIXELS, cut, opencv, read_image, resize, rounded, scaled, to_pixels
from caffepy.data.random import SampleRng
from caffepy.data.sampler import SampleLoader, Sampler
from caffepy.data.sources.databases import RecordSource
from caffepy.errors import DataError
from caffepy.forks.pose.people import (
    IGNORED,
    MIXED,
    MODELS,
    OCCLUDED,
    OUTSIDE,
    SMALL_RATIO,
    VISIBLE,
    Grid,
    People,
    PeopleSource,
    Person,
    Pixels,
    Skeleton,
    Sources,
    check_side,
    from_parts,
    mark_outside,
    means,
    mirroring,
    model_named,
    pairs,
    planes_of,
    read_people,
    rotation,
    scaling,
    shift,
    warped,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.images import open_records
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.layer import register_layer

# -- the base of both layers ---------------------------------------------------------------------------

Floats = NDArray[np.float32]
MADE_BY = "the repository of the net has the programs that make such databases"
CHANNELS = 6
"""Planes of a record: three colors, numbers, mask of people without parts, mask of all people."""
_GRAY = 128
_MAX_MAP = 1 << 14
_UNNAMED = 3
"""State of a part that the record of CPMData spares."""

_LIMBS_MPI = pairs("0-1-2-3-4 1-5-6-7 1-14-8-9-10 14-11-12-13")
_MPI_SOURCES = from_parts(9, 8, 12, 11, 10, 13, 14, 15, 2, 1, 0, 3, 4, 5, (7, 6))
BODIES: dict[int, tuple[Skeleton, Sources]] = {
    56: (MODELS["COCO_18"].skeleton, MODELS["COCO_18"].sources),
    43: (Skeleton(15, _LIMBS_MPI, pairs("2-5 3-6 4-7 8-11 9-12 10-13")), _MPI_SOURCES),
}
"""By num_parts, the number of maps without the background: the skeleton, and the parts of the database for each."""


class RecordsLayer(PrefetchingLayer):
    """A data layer whose samples are made of records on the host, each by itself."""

    def batch_size(self) -> int:
        return self.param.data_param.batch_size

    def prefetch_depth(self) -> int:
        return self.param.data_param.prefetch

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self._loader_of((stream.seed, stream.stream))

    def _loader_of(self, key: tuple[int, int]) -> SampleLoader:
        return SampleLoader(
            self.where, lambda _, sample: self.make_sample(sample, key), lambda sample: self.record_of(sample, key)
        )

    def make_sample(self, number: int, key: tuple[int, int]) -> list[Floats]:
        """Return the values of each top of a global sample.

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

    def shapes_of_first(self, source: Source) -> list[tuple[int, ...]]:
        """Return the shapes of the tops of the first sample; close the source if it cannot be made."""
        try:
            shapes = [part.shape for part in self._loader_of((0, 0)).sample(0, 0)]
        except BaseException:
            source.close()
            raise
        return shapes[: len(self.param.top)]


def colors_of(planes: Pixels) -> Pixels:
    """Return the image (H, W, 3) of a record's first planes."""
    return np.ascontiguousarray(planes[:3].transpose(1, 2, 0))


# -- CPMData -------------------------------------------------------------------------------------------


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
        return self._records, self.shapes_of_first(self._records)

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
        image, mask = self._recolored(colors_of(planes)), planes[4]
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
        param, factor = self.settings, 1.0
        if rng.uniform(0, 1) <= param.scale_prob:
            factor = rng.uniform(param.scale_min, param.scale_max)
        scale = param.target_dist / people.people[0].scale * factor
        for side in image.shape[:2]:
            check_side(side * scale)
        image, mask = (scaled(part, scale, CUBIC) for part in (image, mask))
        mask = mask[:, :, 0]
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
        param, skeleton = self.settings, self._skeleton
        grid = Grid(height // param.stride, width // param.stride, param.stride)
        count, limbs = skeleton.channels, 2 * len(skeleton.limbs)
        maps = np.zeros((2 * count, grid.height, grid.width), np.float32)
        small = scaled(np.ascontiguousarray(mask), 1 / param.stride, CUBIC)[: grid.height, : grid.width, 0]
        maps[:count] = np.asarray(small, np.float32) / 255
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


def swap(people: People, skeleton: Skeleton) -> None:
    """Exchange left and right parts, after a flip."""
    order = np.arange(skeleton.parts)
    for first, second in skeleton.mirrored:
        order[[first, second]] = second, first
    for person in people.people:
        person.points, person.states = person.points[order], person.states[order]


# -- OPData --------------------------------------------------------------------------------------------

_NORMALIZATIONS = {
    0: ((128.0, 128.0, 128.0), 1 / 256),
    1: ((102.9801, 115.9465, 122.7717), 1.0),
    2: ((103.94, 116.78, 123.68), 0.017),
}
"""Mean of blue, green and red, and the factor, by `normalization`."""
_BATCHES = 1 << 40
"""Added to the number of a batch, as the sample whose random numbers choose its database."""
_MASKED_SETS = ("face70_mask_out",)
"""Names of sets of faces that have a mask."""
_PIXELS_AT_SCALE_1 = 368.0
_BODY_SIDES, _WHOLE_SIDES = 0.3, 1.0
"""How far the masked region around a person reaches beyond the parts, as a part of their extent."""
_BACKGROUND_LIMIT = 0.85


@dataclass(frozen=True)
class Origin:
    """A database and the settings that go with it."""

    records: RecordSource
    model: PeopleSource
    chance: float
    degrees: float
    scale_min: float
    scale_max: float
    occlusions: int
    sigma: float


class Origins:
    """The databases of the layer; a `Source`.

    Args:
        origins: with people.
        background: without people; None: there is no such database.
    """

    def __init__(self, origins: list[Origin], background: RecordSource | None) -> None:
        self.origins, self.background = origins, background

    @property
    def _all(self) -> list[RecordSource]:
        return [origin.records for origin in self.origins] + ([self.background] if self.background else [])

    def __len__(self) -> int:
        return sum(len(origin.records) for origin in self.origins)

    def fingerprint(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for index, records in enumerate(self._all):
            found |= {f"{name} of database {index}": value for name, value in records.fingerprint().items()}
        return found

    def close(self) -> None:
        """Close the databases. Idempotent."""
        for records in self._all:
            records.close()


@register_layer("OPData")
class OPDataLayer(RecordsLayer):
    """People of databases and maps of their parts (OpenPose's `oPDataLayer.cpp`; Hidalgo et al. 2019).

    Tops: images (N, 3, H, W), maps (N, 2 C, H / stride, W / stride), where H and W are crop_size_y and crop_size_x in
    TRAIN and those of the record in TEST. The model gives C = 2 * connections + parts, and 1 for the background if it
    has it: COCO_25 has 26 connections, 25 parts and a background. The first C maps are weights, the others are, in
    this order, the connections' unit vectors, the parts, and the background, which is 1 less the largest part. A part's
    map is the largest of exp(-d^2 / (2 sigma^2)) over people; a connection's maps are means over people. Weights are 0
    where the database does not annotate a part.

    A batch is of one of the `sources` (or of source_background alone), which the batch's random number chooses with
    the given `probabilities`; sample s is record s mod its size. In TRAIN the image is scaled by target_dist / scale of
    the person, times a random factor, rotated, shifted so that the person is within center_perterb_max of the center,
    and flipped, all at random; an image of source_background fills what is outside, and up to
    number_max_occlusions * (shown parts / parts) of its parts cover a person that is alone. `normalization` gives
    (x - 128) / 256 (0), x - mean (1), or (x - mean) 0.017 (2).

    A record is a Datum of planes: blue, green, red, numbers about the people, and for most models a mask. Records of
    DOME models have only the numbers, with the name of a file in media_directory. Lists are divided by semicolons.
    Older nets have data_param.source, model, scale_min, scale_max, max_rotate_degree, source_secondary,
    model_secondary and prob_secondary in place of lists.

    Raises:
        ConfigError: a setting is wrong, the lists differ in length, or a model is not known.
        DataError: a database or a record cannot be read.
    """

    tops = (1, 2)

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.settings = self.param.op_transform_param
        if min(param.stride, param.crop_size_x, param.crop_size_y) < 1:
            raise self.error("stride, crop_size_x and crop_size_y must be at least 1")
        if max(param.crop_size_x, param.crop_size_y) > _MAX_MAP:
            raise self.error(f"crop_size_x and crop_size_y must be at most {_MAX_MAP}")
        if param.normalization not in _NORMALIZATIONS:
            raise self.error(f"normalization is {param.normalization}; it must be 0, 1 or 2")
        self._origins = self._open_origins()
        return self._origins, self.shapes_of_first(self._origins)

    @property
    def _background_chance(self) -> float:
        return self.settings.prob_only_background if self.settings.source_background else 0.0

    def _open_origins(self) -> Origins:
        param = self.settings
        paths, models, chances = self._sources()
        count = len(paths)
        degrees, low, high, occlusions, sigmas = (
            self._numbers(name, count, old)
            for name, old in (
                ("max_degree_rotations", "max_rotate_degree"),
                ("scale_mins", "scale_min"),
                ("scale_maxs", "scale_max"),
                ("number_max_occlusions", ""),
                ("sigmas", ""),
            )
        )
        if not all(sigma > 0 for sigma in sigmas):
            raise self.error("sigmas must be positive")
        known = [model_named(model, self.where) for model in models]
        if len({model.skeleton.channels for model in known}) > 1:
            raise self.error(f"the models {', '.join(models)} have different numbers of maps")
        total = sum(chances) + self._background_chance
        if min(*chances, 0.0) < 0 or abs(total - 1) > 1e-4:
            raise self.error(f"the probabilities, with prob_only_background, have the sum {total:g}; it must be 1")
        opened: list[RecordSource] = []
        try:
            for path in (*paths, *([param.source_background] if param.source_background else [])):
                opened.append(self.open_records(path))
        except BaseException:
            for records in opened:
                records.close()
            raise
        return Origins(
            [
                Origin(opened[i], known[i], chances[i], degrees[i], low[i], high[i], int(occlusions[i]), sigmas[i])
                for i in range(count)
            ],
            opened[count] if param.source_background else None,
        )

    def _sources(self) -> tuple[list[str], list[str], list[float]]:
        """Return path, model and chance of each database."""
        param = self.settings
        if param.sources:
            paths = param.sources.split(";")
            models, chances = param.models.split(";"), self._numbers("probabilities", 0)
            models = models * len(paths) if len(models) == 1 else models
            if not len(paths) == len(models) == len(chances):
                counts = f"{len(paths)} sources, {len(models)} models and {len(chances)} probabilities"
                raise self.error(f"has {counts}; give as many of each")
            return paths, models, chances
        first = self.param.data_param.source
        if not first:
            raise self.error("needs sources, or data_param's source")
        model = param.model if param.HasField("model") else param.models
        if not param.source_secondary:
            return [first], [model], [1 - self._background_chance]
        rest = 1 - param.prob_secondary - self._background_chance
        return [first, param.source_secondary], [model, param.model_secondary or model], [rest, param.prob_secondary]

    def _numbers(self, name: str, count: int, old: str = "") -> list[float]:
        """Return the numbers of a list, or of its older field, repeated where there is one."""
        param = self.settings
        if old and param.HasField(old) and not param.HasField(name):
            return [getattr(param, old)] * count
        try:
            numbers = [float(text) for text in getattr(param, name).split(";")]
        except ValueError:
            numbers = []
        if not all(map(math.isfinite, numbers)) or not numbers or 1 < len(numbers) < count:
            raise self.error(
                f"{name} is '{getattr(param, name)}'; give a number, or one for each source, divided by semicolons"
            )
        return numbers * count if len(numbers) == 1 and count else numbers

    # -- records -------------------------------------------------------------------------------------

    def _chosen(self, number: int, key: tuple[int, int]) -> Origin | None:
        """Return the database of a sample's batch; None: the background alone."""
        chance = SampleRng(*key, _BATCHES + number // self.batch_size()).uniform(0, 1)
        for origin in self._origins.origins:
            chance -= origin.chance
            if chance < 0:
                return origin
        return None if self._background_chance > 0 else self._origins.origins[-1]

    def record_of(self, number: int, key: tuple[int, int]) -> str:
        origin = self._chosen(number, key)
        records = self._origins.background if origin is None else origin.records
        assert records is not None
        return f"{records.record_name(number % len(records))} of {records.description}"

    def make_sample(self, number: int, key: tuple[int, int]) -> list[Floats]:
        origin, rng = self._chosen(number, key), SampleRng(*key, number)
        background = self._background(number, rng)
        if origin is None:
            assert background is not None
            return [self._normalised(background), self._empty_maps()]
        people, image, mask = self._read(origin, number)
        if self.context.phase == caffe_pb2.TRAIN:
            image, mask = self._augmented(origin, people, image, mask, background, rng)
        return [self._normalised(image), self._maps(origin, people, image.shape[0], image.shape[1], mask)]

    def _read(self, origin: Origin, number: int) -> tuple[People, Pixels, Pixels]:
        """Return people, image (H, W, 3) and mask (H, W) of a record."""
        model = origin.model
        dome, coco = model.category == "DOME", model.category == "COCO"
        planes = planes_of(origin.records.read(number % len(origin.records)))
        if planes.shape[0] < (1 if dome else 4):
            raise DataError(f"has {planes.shape[0]} planes; a model of the category {model.category} needs more")
        people = read_people(planes[0 if dome else 3], model.lmdb_parts, 0, 1.0 if coco else 0.0)
        mark_outside(people, ())
        for person in people.people:
            person.scale *= _PIXELS_AT_SCALE_1 / self.settings.crop_size_y
            person.points = means(person.points, model.sources)
            person.states = np.array([_state(person.states[list(source)]) for source in model.sources])
        image = self._file(people.source) if dome else colors_of(planes)
        has_mask = model.category in ("COCO", "MPII", "PT", "HAND") or people.dataset in _MASKED_SETS
        if has_mask and planes.shape[0] < 5:
            raise DataError(f"has {planes.shape[0]} planes; the fifth is the mask of model's category {model.category}")
        return people, image, planes[4] if has_mask else np.full(image.shape[:2], 255, np.uint8)

    def _file(self, name: str) -> Pixels:
        """Return an image (H, W, 3) of media_directory."""
        path = Path(self.settings.media_directory + name)
        try:
            return to_pixels(read_image(path, force_color=True))
        except DataError as error:
            raise DataError(f"names the image '{path}', which {error}") from error

    def _background(self, number: int, rng: SampleRng) -> Pixels | None:
        """Return an image without people, of the net's size, or None. It is flipped, as OpenPose's is."""
        records = self._origins.background
        if records is None or (self.context.phase != caffe_pb2.TRAIN and not self._background_chance):
            return None
        param = self.settings
        planes = planes_of(records.read(number % len(records)))
        if planes.shape[0] < 3:
            raise DataError(f"takes a background of {planes.shape[0]} planes; it needs 3")
        image = colors_of(planes)
        height, width = param.crop_size_y, param.crop_size_x
        if image.shape[1] > width and image.shape[0] > height:
            ratio = max(width / image.shape[1], height / image.shape[0])
            rows, columns = (max(rounded(ratio * a), b) for a, b in zip(image.shape, (height, width), strict=False))
            image = resize(image, rows, columns, CUBIC, ipp=True)
            left, top = (rounded(free * rng.uniform(0, 1)) for free in (columns - width, rows - height))
            image = image[top : top + height, left : left + width]
        else:
            image = resize(image, height, width, CUBIC, ipp=True)
        return np.ascontiguousarray(image[:, ::-1])

    def _normalised(self, image: Pixels) -> Floats:
        mean, factor = _NORMALIZATIONS[self.settings.normalization]
        values = (image.astype(np.float32) - np.array(mean, np.float32)) * np.float32(factor)
        return np.ascontiguousarray(values.transpose(2, 0, 1))

    # -- augmentation --------------------------------------------------------------------------------

    def _augmented(
        self, origin: Origin, people: People, image: Pixels, mask: Pixels, background: Pixels | None, rng: SampleRng
    ) -> tuple[Pixels, Pixels]:
        """Return image and mask of the net's size; move the people likewise."""
        param, first = self.settings, people.people[0]
        factor = 1.0
        if rng.uniform(0, 1) <= param.scale_prob:
            factor = rng.uniform(origin.scale_min, origin.scale_max)
        scale = param.target_dist / first.scale * factor
        self._choose_center(origin.model.category, first, factor, rng)
        size = rounded(image.shape[0] * scale), rounded(image.shape[1] * scale)
        if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
            raise DataError(f"becomes an image of {size[0]} x {size[1]} pixels")
        matrix, _ = rotation(size, (rng.uniform(0, 1) - 0.5) * 2 * origin.degrees)
        moved = _joined(matrix, scaling(scale))
        x, y = matrix[:, :2] @ (first.center * scale) + matrix[:, 2]
        x, y = (int(value + int((rng.uniform(0, 1) - 0.5) * 2 * param.center_perterb_max)) for value in (x, y))
        height, width = param.crop_size_y, param.crop_size_x
        moved = _joined(shift(width // 2 - x, height // 2 - y), moved)
        flipped = rng.uniform(0, 1) <= param.flip_prob
        moved = _joined(mirroring(width), moved) if flipped else moved
        people.move(moved)
        for person in people.people:
            person.scale *= scale
        if flipped:
            swap(people, origin.model.skeleton)
        result = warped(image, moved, (height, width), 0)
        mask = warped(mask, moved, (height, width), 0 if background is None else 255)
        if background is not None:
            self._cover(result, background, people, origin, rng)
            outside = warped(np.zeros(image.shape[:2], np.uint8), moved, (height, width), 255) != 0
            result[outside] = np.minimum(result[outside].astype(np.int64) + background[outside], 255)
        return result, mask

    def _choose_center(self, category: str, person: Person, factor: float, rng: SampleRng) -> None:
        """Take the wrists or the nose as the person's center, often, where these become large."""
        if category not in ("HAND", "FACE", "DOME"):
            return
        chance = rng.uniform(0, 1)
        if not (chance > 0.05 if factor > 2 else factor > 1.3 and chance > 0.5):
            return
        if category == "HAND" or (category == "DOME" and chance < 0.5):
            shown = [wrist for wrist in (9, 10) if person.shown(wrist)]
            if shown:
                person.center = person.points[shown[0] if len(shown) == 1 or rng.uniform(0, 1) <= 0.5 else 10].copy()
        elif person.shown(0):
            person.center = person.points[0].copy()

    def _cover(self, image: Pixels, background: Pixels, people: People, origin: Origin, rng: SampleRng) -> None:
        """Copy rectangles of the background over parts of a person that is alone."""
        first, parts = people.people[0], origin.model.skeleton.parts
        shown = np.flatnonzero(first.states <= VISIBLE)
        if len(people.people) > 1 or not shown.size:
            return
        for _ in range(rounded(origin.occlusions * rng.uniform(0, 1) * shown.size / parts)):
            x, y = first.points[shown[rng.below(shown.size)]]
            width, height = (
                rounded(side * first.scale / 2 * (1 + (rng.below(1001) - 500) / 1000))
                for side in (image.shape[1], image.shape[0])
            )
            place = 1 + (rng.below(1001) - 500) / 500
            left, top = rounded(x - width // 2 * place), rounded(y - height // 2 * place)
            part = _region(left, top, width, height, image.shape[0], image.shape[1])
            image[part] = background[part]

    # -- maps ----------------------------------------------------------------------------------------

    def _empty_maps(self) -> Floats:
        """Return the maps of an image without people: weights of 1, and the background."""
        param, skeleton = self.settings, self._origins.origins[0].model.skeleton
        sizes = param.crop_size_y // param.stride, param.crop_size_x // param.stride
        maps = np.zeros((2 * skeleton.channels, *sizes), np.float32)
        maps[: skeleton.channels] = 1
        if skeleton.background:
            maps[-1] = 1
        return maps

    def _maps(self, origin: Origin, people: People, height: int, width: int, mask: Pixels) -> Floats:
        param, model = self.settings, origin.model
        skeleton = model.skeleton
        grid = Grid(height // param.stride, width // param.stride, param.stride)
        count, limbs = skeleton.channels, 2 * len(skeleton.limbs)
        maps = np.zeros((2 * count, grid.height, grid.width), np.float32)
        weights, targets = maps[:count], maps[count:]
        small = resize(np.ascontiguousarray(mask), grid.height, grid.width, AREA, ipp=True)[:, :, 0]
        weights[:] = np.asarray(small, np.float32) / 255
        ignored = set(np.flatnonzero(people.people[0].states >= IGNORED).tolist())
        if skeleton.parts > model.lmdb_parts:
            weights[skeleton.channels_of({*model.masked, *ignored})] = 0
            self._mask_feet(weights, model, people)
        for person in people.people:
            for state in (MIXED, IGNORED):
                self._mask_near(weights, model, person, state, grid)
        self._put_parts(weights, targets, origin, people, grid)
        if model.masked_near:
            hidden = skeleton.channels_of({*model.masked_near, *ignored})
            for person in people.people:
                self._mask(weights, skeleton.background, person, hidden, _WHOLE_SIDES, grid)
        if skeleton.background:
            targets[-1] = np.maximum(1 - targets[limbs:-1].max(axis=0), 0)
        self._put_limbs(weights, targets, origin, people, grid)
        if skeleton.background:
            weights[-1][targets[-1] < _BACKGROUND_LIMIT] = 1
        return maps

    def _put_parts(self, weights: Floats, targets: Floats, origin: Origin, people: People, grid: Grid) -> None:
        skeleton = origin.model.skeleton
        for part in range(skeleton.parts):
            ratio, channel = SMALL_RATIO if part in skeleton.small else 1.0, 2 * len(skeleton.limbs) + part
            for person in people.people:
                if person.shown(part):
                    peak = grid.peak(person.points[part], origin.sigma * ratio)
                    np.maximum(targets[channel], peak, out=targets[channel], casting="same_kind")
                    weights[channel][peak > 0] = 1 / ratio

    def _put_limbs(self, weights: Floats, targets: Floats, origin: Origin, people: People, grid: Grid) -> None:
        for index, (begin, end) in enumerate(origin.model.skeleton.limbs):
            counts = np.zeros((grid.height, grid.width))
            sums = np.zeros((2, grid.height, grid.width))
            for person in people.people:
                if person.shown(begin, end):
                    near, direction = grid.limb(person.points[begin] / grid.stride, person.points[end] / grid.stride)
                    counts += near
                    sums += near * direction[:, None, None]
            some = counts > 0
            for axis in range(2):
                weights[2 * index + axis][some] = 1
                targets[2 * index + axis][some] = sums[axis][some] / counts[some]

    def _mask_near(self, weights: Floats, model: PeopleSource, person: Person, state: int, grid: Grid) -> None:
        """Set the weights of a person's parts with a state, and of ignored parts, to 0 near the person."""
        parts = set(np.flatnonzero(person.states == state).tolist())
        parts |= set(np.flatnonzero(person.states >= IGNORED).tolist())
        channels = model.skeleton.channels_of(parts)
        self._mask(weights, model.skeleton.background, person, channels, _BODY_SIDES, grid)

    def _mask(
        self, weights: Floats, background: bool, person: Person, channels: list[int], sides: float, grid: Grid
    ) -> None:
        """Set channels, and the background's, to 0 in the box of a person's parts, which is wider by `sides`."""
        points = person.points[person.states <= VISIBLE] / grid.stride
        if not channels or not points.size:
            return
        low, high = points.min(axis=0), points.max(axis=0)
        center, extent = (low + high) / 2, high - low
        extent = np.maximum(extent, extent[::-1] / 2)
        x, y = (rounded(value) for value in center - extent / 2 - sides * extent)
        width, height = (rounded(value) for value in extent * (1 + 2 * sides))
        part = _region(x, y, width, height, grid.height, grid.width)
        for channel in (*channels, *([weights.shape[0] - 1] if background else [])):
            weights[channel][part] = 0

    def _mask_feet(self, weights: Floats, model: PeopleSource, people: People) -> None:
        """Set the background's weight to 0 around feet that the database does not annotate."""
        if not model.skeleton.background:
            return
        stride = self.settings.stride
        for person in people.people:
            for knee, ankle in model.feet:
                if OUTSIDE in (person.states[knee], person.states[ankle]):
                    continue
                begin, end = person.points[knee] / stride, person.points[ankle] / stride
                distance = rounded(0.8 * math.hypot(*(end - begin)))
                drift = [rounded_even(value) for value in (end - begin) * 0.15]
                x, y = (rounded(value + by) - distance for value, by in zip(end, drift, strict=True))
                part = _region(x, y, 2 * distance, 2 * distance, *weights.shape[1:])
                weights[-1][part] = 0


def rounded_even(value: float) -> int:
    """Return the nearest whole number, half to even, as OpenCV's conversion of points."""
    return int(np.rint(value))


def _joined(after: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the affine transformation (2, 3) that applies one after the other."""
    linear = after[:, :2] @ before[:, :2]
    return np.concatenate([linear, (after[:, :2] @ before[:, 2] + after[:, 2])[:, None]], axis=1)


def _region(left: int, top: int, width: int, height: int, rows: int, columns: int) -> tuple[slice, slice]:
    """Return rows and columns of a rectangle within an image."""
    return (
        slice(min(max(top, 0), rows), min(max(top + height, 0), rows)),
        slice(min(max(left, 0), columns), min(max(left + width, 0), columns)),
    )


def _state(states: NDArray[np.int64]) -> int:
    """Return the state of a part that is the mean of parts with these states."""
    if not states.size:
        return IGNORED
    if states.size == 1:
        return int(states[0]) if states[0] in (OCCLUDED, OUTSIDE, IGNORED) else VISIBLE
    if not np.isin(states, (OCCLUDED, VISIBLE, OUTSIDE)).all():
        return IGNORED
    outside = states == OUTSIDE
    if outside.any():
        return OUTSIDE if outside.all() else MIXED
    return OCCLUDED if (states == OCCLUDED).any() else VISIBLE

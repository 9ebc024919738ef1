"""DataAugmentation, FlowAugmentation and GenerateAugmentationParameters, the coefficients that they draw, and Mean.

The coefficients are those of FlowNet 2's `augmentation_layer_base.cpp` and `rng.cpp`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Border, Each, Scalar, expression
from caffepy.backend.formulas import minus_channel, scaled
from caffepy.data.mean import read_mean
from caffepy.data.random import SampleRng
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayerContext, flatten_samples, register_layer

logger = logging.getLogger(__name__)


# -- coefficients --------------------------------------------------------------------------------------

Coefficients = dict[str, float]
"""Values by name; all of NAMES."""

SPATIAL = ("mirror", "dx", "dy", "angle", "zoom_x", "zoom_y")
CHROMATIC = ("gamma", "brightness", "contrast", "color1", "color2", "color3")
EIGEN = (
    *(f"{kind}_{when}{k}" for when in ("nomean", "withmean") for kind in ("pow", "add", "mult") for k in range(3)),
    "lmult_pow",
    "lmult_add",
    "lmult_mult",
    "col_angle",
)
EFFECTS = (
    "fog_amount",
    "fog_size",
    "motion_blur_angle",
    "motion_blur_size",
    "shadow_angle",
    "shadow_distance",
    "shadow_strength",
    "noise",
)
NAMES = (*SPATIAL, *CHROMATIC, *EIGEN, *EFFECTS)
"""The order in the array that layers exchange."""

FACTORS = frozenset(
    name for name in NAMES if name in ("zoom_x", "zoom_y", "gamma", "contrast") or name[:3] in ("pow", "mul")
) | {"color1", "color2", "color3", "lmult_pow", "lmult_mult"}
"""Coefficients whose default is 1. The array holds their logarithms."""

DEFAULTS: Coefficients = {name: float(name in FACTORS) for name in NAMES}

NEGLIGIBLE = 1e-3
"""Coefficients that are nearer to their default are the default."""

TRIES = 50
"""Draws of a spatial transformation that stays within the image."""

SPATIAL_FIELDS = ("mirror", "rotate", "zoom", "translate", "squeeze", "translate_x", "translate_y")
CHROMATIC_FIELDS = ("brightness", "gamma", "contrast", "color")
EIGEN_FIELDS = {
    "ladd_pow": ("pow_nomean0",),
    "col_pow": ("pow_nomean1", "pow_nomean2"),
    "ladd_add": ("add_nomean0",),
    "col_add": ("add_nomean1", "add_nomean2"),
    "ladd_mult": ("mult_nomean0",),
    "col_mult": ("mult_nomean1", "mult_nomean2"),
    "sat_pow": ("pow_withmean1", "pow_withmean2"),
    "sat_add": ("add_withmean1", "add_withmean2"),
    "sat_mult": ("mult_withmean1", "mult_withmean2"),
    "lmult_pow": ("lmult_pow",),
    "lmult_mult": ("lmult_mult",),
    "lmult_add": ("lmult_add",),
    "col_rotate": ("col_angle",),
}
"""The coefficients of each field. Those of `sat_` fields are equal, others are drawn one by one."""

Augmentation = caffe_pb2.AugmentationParameter
Random = caffe_pb2.RandomGeneratorParameter

RANDOM_TYPES = ("uniform", "gaussian", "bernoulli", "uniform_bernoulli", "gaussian_bernoulli")


def has_any(param: Augmentation, fields: Sequence[str]) -> bool:
    """Return whether one of the fields is set."""
    return any(param.HasField(name) for name in fields)


def unknown_type(param: Augmentation) -> str:
    """Return the first unknown `rand_type` as ``field: type``, or ''."""
    for field, value in param.ListFields():
        if isinstance(value, Random) and value.rand_type not in RANDOM_TYPES:
            return f"{field.name}: {value.rand_type}"
    return ""


def schedule(param: caffe_pb2.CoeffScheduleParameter, number: float) -> float:
    """Return the factor of all spreads in pass `number`, counted from 1."""
    progress = 2 / (1 + math.exp(-1.0986 * number / param.half_life)) - 1 if param.half_life else 1.0
    return param.initial_coeff + (param.final_coeff - param.initial_coeff) * progress


def draw(param: Random, rng: SampleRng, factor: float = 1.0, otherwise: float | None = None) -> float:
    """Return a random number.

    Args:
        param: its distribution.
        rng: of the sample.
        factor: of the spread, unless `apply_schedule` is false.
        otherwise: the result of types with bernoulli with the chance 1 - prob; None: that of the number 0.
    """
    spread = param.spread * (factor if param.apply_schedule else 1.0)
    kind = param.rand_type
    if kind == "bernoulli":
        number = float(rng.uniform(0, 1) < param.prob)
    else:
        number = 0.0
        chosen = not kind.endswith("_bernoulli") or (param.prob > 0 and rng.uniform(0, 1) < param.prob)
        if not chosen and otherwise is not None:
            return otherwise
        if chosen:
            number = param.mean
            if spread > 0:
                number += spread * (rng.uniform(-1, 1) if kind.startswith("uniform") else normals(rng, 1)[0])
        if param.exp:
            number = math.exp(number)
    if param.discretize:
        number = math.copysign(math.floor(abs(number) + 0.5), number)
    return float(param.multiplier * number)


def normals(rng: SampleRng, count: int) -> NDArray[np.float32]:
    """Return normal numbers, by Box and Muller's method."""
    half = -(-count // 2)
    radius = np.sqrt(-2 * np.log(1 - rng.uniforms(0, 1, half).astype(np.float64) * (1 - 2.0**-25)))
    angle = 2 * np.pi * rng.uniforms(0, 1, half).astype(np.float64)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].astype(np.float32)


def to_array(values: Coefficients) -> NDArray[np.float32]:
    """Return the array that layers exchange."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.array([np.log(values[name]) if name in FACTORS else values[name] for name in NAMES], np.float32)


def from_array(array: NDArray[np.float32]) -> Coefficients:
    """Return the coefficients of an array."""
    with np.errstate(over="ignore"):
        return {
            name: float(np.exp(np.float64(value)) if name in FACTORS else value)
            for name, value in zip(NAMES, array, strict=True)
        }


def without_negligible(values: Coefficients) -> Coefficients:
    """Return the coefficients; a coefficient near its default gets the default."""
    return {k: DEFAULTS[k] if abs(v - DEFAULTS[k]) < NEGLIGIBLE else v for k, v in values.items()}


def draw_spatial(param: Augmentation, rng: SampleRng, factor: float) -> Coefficients:
    """Return new coefficients of which the spatial ones are drawn."""
    values = dict(DEFAULTS)
    if param.HasField("mirror"):
        values["mirror"] = float(bool(draw(param.mirror, rng, 0.0)))
    for field, names in (("translate", ("dx", "dy")), ("translate_x", ("dx",)), ("translate_y", ("dy",))):
        if param.HasField(field):
            for name in names:
                values[name] = draw(getattr(param, field), rng, factor, 0.0)
    if param.HasField("rotate"):
        values["angle"] = draw(param.rotate, rng, factor, 0.0)
    if param.HasField("zoom"):
        values["zoom_x"] = values["zoom_y"] = draw(param.zoom, rng, factor, 1.0)
    if param.HasField("squeeze"):
        squeeze = draw(param.squeeze, rng, factor, 1.0)
        values["zoom_x"] *= squeeze
        values["zoom_y"] /= squeeze
    return values


def draw_valid_spatial(
    param: Augmentation,
    rng: SampleRng,
    factor: float,
    given: Coefficients,
    size: tuple[int, int],
    crop: tuple[int, int],
) -> Coefficients:
    """Return `given` plus a drawn transformation whose crop lies within the image; `given` after TRIES failures."""
    start = to_array(given)
    for _ in range(TRIES - 1):
        values = from_array(to_array(draw_spatial(param, rng, factor)) + start)
        matrix = transformation(values, size, crop)
        corners = np.array([(x, y, 1) for x in (0, crop[1] - 1) for y in (0, crop[0] - 1)], np.float64).T
        places = np.floor(matrix @ corners)
        if (places >= 0).all() and (places[0] <= size[1] - 2).all() and (places[1] <= size[0] - 2).all():
            return values
    return given


def draw_chromatic(param: Augmentation, rng: SampleRng, factor: float, values: Coefficients) -> None:
    """Replace the chromatic coefficients that the parameter has."""
    for field in ("gamma", "brightness", "contrast"):
        if param.HasField(field):
            values[field] = draw(getattr(param, field), rng, factor)
    if param.HasField("color"):
        for number in range(1, 4):
            values[f"color{number}"] = draw(param.color, rng, factor)


def draw_eigen(param: Augmentation, rng: SampleRng, factor: float, values: Coefficients) -> None:
    """Replace the coefficients in the space of eigenvectors that the parameter has."""
    for field, names in EIGEN_FIELDS.items():
        if param.HasField(field):
            for index, name in enumerate(names):
                repeated = index > 0 and field.startswith("sat_")
                values[name] = values[names[0]] if repeated else draw(getattr(param, field), rng, factor)


def draw_effects(param: Augmentation, rng: SampleRng, factor: float, values: Coefficients) -> None:
    """Replace the coefficients of effects that the parameter has."""
    for names in (EFFECTS[:2], EFFECTS[2:4], EFFECTS[4:7]):
        if has_any(param, names):
            for name in names:
                values[name] = draw(getattr(param, name), rng, factor, 0.0)
    if param.HasField("noise"):
        values["noise"] = draw(param.noise, rng, factor)


def transformation(values: Coefficients, size: tuple[int, int], crop: tuple[int, int]) -> NDArray[np.float64]:
    """Return the matrix (2, 3) from (column, row, 1) in the crop to column and row in the image.

    Args:
        values: mirror, angle, dx, dy, zoom_x and zoom_y.
        size: height and width of the image.
        crop: height and width of the crop.
    """
    (height, width), (rows, columns) = size, crop
    sign = -1.0 if values["mirror"] else 1.0
    matrix: NDArray[np.float64] = np.array([[sign, 0, -sign * columns / 2], [0, 1, -rows / 2]])
    cosine, sine = math.cos(values["angle"]), math.sin(values["angle"])
    matrix = np.array([[cosine, -sine], [sine, cosine]]) @ matrix
    matrix[:, 2] += (values["dx"] * columns, values["dy"] * rows)
    with np.errstate(divide="ignore", invalid="ignore"):
        matrix /= np.array([[values["zoom_x"]], [values["zoom_y"]]])
    matrix[:, 2] += (width / 2, height / 2)
    return matrix


# -- layers of augmentation ----------------------------------------------------------------------------


MEAN_CHANNELS = 3
"""Channels of an image for `mean`, and for augmentations of colours."""

EDGE = 1.05
"""Positions are at most the size minus this number, so that the next pixel exists."""

LEAST = 1e-2
"""Values in the space of eigenvectors that count as 0."""

Images = NDArray[np.float32]


class AugmentationLayer(Layer):
    """A layer that draws or applies the coefficients of augmentations."""

    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._settings = self.param.augmentation_param
        if unknown := unknown_type(self._settings):
            raise self.error(f"unknown rand_type in augmentation_param, {unknown}; use one of {_TYPES}")

    def augments(self) -> bool:
        """Return whether coefficients are drawn in this phase."""
        wanted = self.context.phase == caffe_pb2.TRAIN or self._settings.augment_during_test
        fields = (*SPATIAL_FIELDS, *CHROMATIC_FIELDS, *EIGEN_FIELDS)
        return wanted and has_any(self._settings, (*fields, *EFFECTS))

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST where the spreads follow the number of passes, which is another on each device."""
        given = param.augmentation_param
        drawn = given.augment_during_test and (param.type != "DataAugmentation" or len(param.bottom) < 2)
        schedule = param.coeff_schedule_param
        return context.phase == caffe_pb2.TEST and drawn and schedule.initial_coeff != schedule.final_coeff

    def check_coefficients(self, bottom: Blobs, index: int) -> None:
        """Check that a bottom has the coefficients of each sample.

        Raises:
            ShapeError: it has not.
        """
        samples = bottom[0].shape[0]
        shape = bottom[index].shape
        if not shape or shape[0] != samples or bottom[index].count != samples * len(NAMES):
            raise self.shape_error(f"'{bottom[index].title}' must have {len(NAMES)} coefficients a sample", *bottom)

    def read_coefficients(self, bottom: Blobs, index: int) -> NDArray[np.float32]:
        """Return the coefficients of a bottom, (N, coefficients)."""
        values: NDArray[np.float32] = bottom[index].host_data().reshape(-1, len(NAMES))
        return values

    def rng(self, index: int) -> SampleRng:
        """Return the random numbers of a sample of this pass."""
        self.context.passes.uses_random = True
        stream = self.random_stream()
        return SampleRng(stream.seed, stream.stream, self.first_sample() + index)

    def factor(self, number: float) -> float:
        """Return the factor of all spreads in pass `number`, counted from 1."""
        return schedule(self.param.coeff_schedule_param, number)


_TYPES = ", ".join(RANDOM_TYPES)


@register_layer("GenerateAugmentationParameters")
class GenerateAugmentationParametersLayer(AugmentationLayer):
    """y (N, 42, 1, 1) = coefficients of an augmentation, drawn for each sample by `augmentation_param`.

    With three bottoms, coefficients, image and augmented image, or with one, coefficients of shape (N, 42, 1, 1),
    `mode` says whether new coefficients are added to those of the bottom ("add"; factors are multiplied), replace those
    of the same name ("replace"), or replace all ("regenerate"). With one bottom that is an image all are new. A spatial
    transformation whose corners lie outside the image is drawn again, up to 49 times. In the TEST phase coefficients
    are drawn with `augment_during_test` only. `coeff_schedule_param` changes all spreads over the passes. Source:
    FlowNet 2's `generate_augmentation_parameters_layer.cu`.

    Raises:
        ConfigError: the mode or a rand_type is unknown, or a size is missing.
        ShapeError: the bottoms have other shapes.
    """

    bottoms = (1, 3)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self._settings
        if len(bottom) == 2:
            raise self.error("needs one bottom, or three: coefficients, image and augmented image")
        if param.mode not in ("add", "replace", "regenerate"):
            raise self.error(f"augmentation_param.mode is '{param.mode}'; use add, replace or regenerate")
        if any(len(blob.shape) != 4 for blob in bottom):
            raise self.shape_error("the bottoms must have four axes, (N, C, H, W)", *bottom)
        is_image = len(bottom) == 1 and max(bottom[0].shape[2:]) > 1
        self._mode = "regenerate" if is_image else param.mode
        if self._mode != "regenerate":
            self.check_coefficients(bottom, 0)
        self._size, self._crop = (param.bottomheight, param.bottomwidth), (param.crop_height, param.crop_width)
        if len(bottom) == 3:
            self._size, self._crop = (bottom[1].shape[2], bottom[1].shape[3]), (bottom[2].shape[2], bottom[2].shape[3])
        elif is_image:
            self._size = (bottom[0].shape[2], bottom[0].shape[3])
        self._spatial = has_any(param, SPATIAL_FIELDS)
        if self._spatial and min(*self._size, *self._crop) < 1:
            raise self.error(
                "augmentation_param needs crop_width and crop_height, and bottomwidth and bottomheight or an image"
            )
        top[0].reshape((bottom[0].shape[0], len(NAMES), 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            self.backend.fill(top[0].data, 0)
            return
        samples = top[0].shape[0]
        given = np.zeros((samples, len(NAMES)), np.float32)
        if self._mode != "regenerate":
            given = self.read_coefficients(bottom, 0)
        if self.augments():
            factor = self.factor(self.context.passes.number + 1)
            given = np.stack([self._draw(given[i], self.rng(i), factor) for i in range(samples)])
        self.backend.from_host(given.reshape(top[0].shape), top[0].data)

    def _draw(self, given: NDArray[np.float32], rng: SampleRng, factor: float) -> NDArray[np.float32]:
        """Return the coefficients of one sample."""
        param, values = self._settings, from_array(given)
        if self._spatial:
            if self._mode == "replace":
                values.update({name: DEFAULTS[name] for name in SPATIAL})
            values = draw_valid_spatial(param, rng, factor, values, self._size, self._crop)
        array = to_array(values)
        for draw in (draw_chromatic, draw_eigen, draw_effects):
            if self._mode == "add":
                new: Coefficients = dict(DEFAULTS)
                draw(param, rng, factor, new)
                array = array + to_array(new)
            else:
                draw(param, rng, factor, values)
                array = to_array(values)
        return array

    def capture_blocker(self) -> str | None:
        return "it draws coefficients on the host"


@register_layer("FlowAugmentation")
class FlowAugmentationLayer(AugmentationLayer):
    """The flow between two augmented images, from the flow between the images.

    Bottoms: flow (N, 2, H, W), and the coefficients of the first and of the second image, (N, 42, 1, 1) each. y (N, 2,
    crop_height, crop_width): a pixel p of the first crop lies at q = T1 p in the first image and at q + flow(q) in the
    second; y = T2^-1 (q + flow(q)) - p, with the flow of the pixel nearest to q (of the nearest one within the image;
    FlowNet 2 reads outside). Source: FlowNet 2's `flow_augmentation_layer.cu`.

    Raises:
        ConfigError: crop_width or crop_height is missing.
        ShapeError: the bottoms have other shapes.
    """

    bottoms = (3, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if min(self._settings.crop_width, self._settings.crop_height) < 1:
            raise self.error("augmentation_param needs crop_width and crop_height")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, param = bottom[0].shape, self._settings
        if len(shape) != 4 or shape[1] != 2 or min(shape) < 1:
            raise self.shape_error("the first bottom must be a flow, (N, 2, H, W)", bottom[0])
        self.check_coefficients(bottom, 1)
        self.check_coefficients(bottom, 2)
        self.check_memory(8 * shape[0] * param.crop_height * param.crop_width, "its top")
        top[0].reshape((shape[0], 2, param.crop_height, param.crop_width))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            self.backend.fill(top[0].data, 0)
            return
        flow: Images = bottom[0].host_data()
        size, crop = (flow.shape[2], flow.shape[3]), (top[0].shape[2], top[0].shape[3])
        result = np.empty(top[0].shape, np.float32)
        pixels = pixel_grid(crop)
        arrays = [self.read_coefficients(bottom, index) for index in (1, 2)]
        for n in range(len(flow)):
            first, second = (transformation(from_array(array[n]), size, crop) for array in arrays)
            places = first @ pixels
            with np.errstate(invalid="ignore"):
                nearest = np.nan_to_num(np.trunc(places + 0.5))
            columns, rows = (np.clip(nearest[k], 0, size[1 - k] - 1).astype(np.int64) for k in (0, 1))
            places = places + flow[n][:, rows, columns]
            inverse = np.linalg.inv(second[:, :2])
            result[n] = (inverse @ (places - second[:, 2:]) - pixels[:2]).reshape(result.shape[1:])
        self.backend.from_host(result, top[0].data)

    def capture_blocker(self) -> str | None:
        return "it transforms the flow on the host"


def pixel_grid(crop: tuple[int, int]) -> NDArray[np.float64]:
    """Return column, row and 1 of each pixel, (3, pixels)."""
    rows, columns = np.meshgrid(np.arange(crop[0]), np.arange(crop[1]), indexing="ij")
    return np.stack([columns.ravel(), rows.ravel(), np.ones(rows.size)]).astype(np.float64)


@register_layer("DataAugmentation")
class DataAugmentationLayer(AugmentationLayer):
    """An augmented crop of each image, minus a mean (FlowNet 2's `data_augmentation_layer.cu`).

    Bottoms: images (N, C, H, W), and optionally coefficients (N, 42, 1, 1); tops: images (N, C, crop_height,
    crop_width), and optionally the coefficients. Without the second bottom `augmentation_param` draws the coefficients,
    in the TEST phase with `augment_during_test` only; see GenerateAugmentationParameters. Without a crop nothing is
    augmented.

    A pixel p of the crop is taken, by bilinear interpolation, from A p in the image: mirrored, rotated by an angle,
    shifted and enlarged about the centres, and limited to [0, W - 1.05] x [0, H - 1.05]. Then, for images of three
    channels, if any sample has such coefficients: colours change in the space of `chromatic_eigvec`, whose range is
    that of the batch; colour, gamma, brightness and contrast change; and a shadow and noise are added. Values are
    limited to [0, `max_multiplier`] by each of these steps.

    The mean of the tops is computed in the first `recompute_mean` training passes and subtracted, of each pixel, or of
    each channel without `mean_per_pixel`. Blobs: the number of passes (1, 1, 1, 1), and with recompute_mean the mean of
    each pixel (1, C, crop_height, crop_width) and of each channel (1, C, 1, 1). A file may have another size of crop:
    its mean then becomes one of each channel. `mean` subtracts given numbers from three channels instead.

    Raises:
        ConfigError: a rand_type is unknown, or chromatic_eigvec does not have nine numbers.
        ShapeError: the crop exceeds the image, or the bottoms have other shapes.
    """

    bottoms = (1, 2)
    tops = (1, 2)

    _positions: Array | None = None
    _uploaded: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self._settings
        self._crops = param.HasField("crop_width") and param.HasField("crop_height")
        if len(param.chromatic_eigvec) not in (0, 9):
            raise self.error(f"chromatic_eigvec has {len(param.chromatic_eigvec)} numbers; give nine, three vectors")
        self._check_image(bottom)
        zero = caffe_pb2.FillerParameter(value=0)
        channels = bottom[0].shape[1]
        self.add_parameter((1, 1, 1, 1), zero)
        if param.recompute_mean:
            self.add_parameter((1, channels, *self._output_size(bottom)), zero)
            self.add_parameter((1, channels, 1, 1), zero)
        for index in range(len(self.blobs)):
            if index == len(self.param.param):
                self.param.param.add()
            self.param.param[index].lr_mult = self.param.param[index].decay_mult = 0
        self._fixed_mean: Array | None = None
        if not param.recompute_mean and len(param.mean) == MEAN_CHANNELS and not param.mean_per_pixel:
            self._fixed_mean = self.backend.zeros((MEAN_CHANNELS,))
            if self.backend.holds_values:
                self.backend.from_host(np.array(param.mean, np.float32), self._fixed_mean)

    def _check_image(self, bottom: Blobs) -> None:
        param, shape = self._settings, bottom[0].shape
        if len(shape) != 4 or min(shape) < 1:
            raise self.shape_error("the first bottom must have four axes, (N, C, H, W)", bottom[0])
        if self._crops and (not 1 <= param.crop_height <= shape[2] or not 1 <= param.crop_width <= shape[3]):
            raise self.shape_error(
                f"a crop of {param.crop_height} x {param.crop_width} pixels does not fit into the image", bottom[0]
            )

    def _output_size(self, bottom: Blobs) -> tuple[int, int]:
        if self._crops:
            return self._settings.crop_height, self._settings.crop_width
        return bottom[0].shape[2], bottom[0].shape[3]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._check_image(bottom)
        shape, size = bottom[0].shape, self._output_size(bottom)
        top[0].reshape((*shape[:2], *size))
        if len(bottom) > 1:
            self.check_coefficients(bottom, 1)
        if len(top) > 1:
            top[1].reshape((shape[0], len(NAMES), 1, 1))
        if self._fixed_mean is not None and shape[1] != MEAN_CHANNELS:
            raise self.shape_error(f"augmentation_param.mean is for {MEAN_CHANNELS} channels", bottom[0])
        if self._settings.recompute_mean and (
            shape[1] != self.blobs[2].shape[1]
            or (self._settings.mean_per_pixel and self.blobs[1].shape[2:] != tuple(size))
        ):
            raise self.shape_error("the mean belongs to images of another shape", bottom[0], self.blobs[1])
        if self._crops:
            positions = (shape[0], 2, *size)
            if self._positions is None or self._positions.shape != positions:
                self.check_memory(4 * math.prod(positions), "its positions")
                self._positions = self.backend.zeros(positions)
                self._uploaded = None

    def _draws(self, bottom: Blobs) -> bool:
        return len(bottom) < 2 and self.augments()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self._crops:
            self.backend.copy(bottom[0].data, top[0].data)
            if len(top) > 1:
                self.backend.fill(top[1].data, 0)
        elif len(bottom) < 2 and not self.augments():
            self._crop(bottom, top)
        elif self.backend.holds_values:
            self._augment(bottom, top)
        else:
            self.backend.sample_forward(bottom[0].data, self._positions, top[0].data, Border.REPEAT, 0.0)
            if len(top) > 1:
                self.backend.fill(top[1].data, 0)
        self._subtract_mean(top[0].data, top)

    # -- augmentation --------------------------------------------------------------------------------

    def _crop(self, bottom: Blobs, top: Blobs) -> None:
        """Take the crops from the centres."""
        shapes = (bottom[0].shape, top[0].shape)
        if self._uploaded != shapes:
            if self.backend.holds_values:
                self._place([DEFAULTS] * shapes[0][0], bottom, top)
            self._uploaded = shapes
        self.backend.sample_forward(bottom[0].data, self._positions, top[0].data, Border.REPEAT, 0.0)
        if len(top) > 1:
            self.backend.fill(top[1].data, 0)

    def _place(self, values: Sequence[Coefficients], bottom: Blobs, top: Blobs) -> None:
        """Set the position of each pixel of the crops."""
        size, crop = bottom[0].shape[2:], top[0].shape[2:]
        pixels, limits = pixel_grid((crop[0], crop[1])), np.array([[size[1] - EDGE], [size[0] - EDGE]])
        matrices = [transformation(v, (size[0], size[1]), (crop[0], crop[1])) for v in values]
        places = [np.maximum(np.minimum(matrix @ pixels, limits), 0) for matrix in matrices]
        assert self._positions is not None
        self.backend.from_host(np.stack(places).astype(np.float32).reshape(self._positions.shape), self._positions)

    def _augment(self, bottom: Blobs, top: Blobs) -> None:
        samples = bottom[0].shape[0]
        self._uploaded = None
        if len(bottom) > 1:
            arrays = self.read_coefficients(bottom, 1)
        else:
            factor = self.factor(float(self.blobs[0].host_data().item()) + 1)
            arrays = np.stack([self._draw(bottom, top, index, factor) for index in range(samples)])
        if len(top) > 1:
            self.backend.from_host(arrays.reshape(top[1].shape), top[1].data)
        values = [without_negligible(from_array(array)) for array in arrays]
        self._place(values, bottom, top)
        self.backend.sample_forward(bottom[0].data, self._positions, top[0].data, Border.REPEAT, 0.0)
        eigen, chromatic, effects = (
            any(v[name] != DEFAULTS[name] for v in values for name in names)
            for names in (EIGEN, CHROMATIC, ("shadow_strength", "noise"))
        )
        if not (eigen or chromatic or effects):
            return
        if bottom[0].shape[1] != MEAN_CHANNELS:
            raise self.shape_error("colours and effects are augmented for images of three channels only", bottom[0])
        images: Images = top[0].host_data()
        most = self._settings.max_multiplier
        if eigen:
            if len(self._settings.chromatic_eigvec) != MEAN_CHANNELS**2:
                raise self.error("augmentation_param needs chromatic_eigvec, nine numbers")
            space = EigenSpace(np.array(self._settings.chromatic_eigvec, np.float32), bottom[0].host_data())
            images = np.stack([space.augmented(image, v, most) for image, v in zip(images, values, strict=True)])
        if chromatic:
            images = np.stack([with_colours(image, v, most) for image, v in zip(images, values, strict=True)])
        if effects:
            for index, v in enumerate(values):
                noise = None
                if v["noise"] > 0:
                    stream = self.random_stream(1)
                    self.context.passes.uses_random = True
                    rng = SampleRng(stream.seed, stream.stream, self.first_sample() + index)
                    noise = normals(rng, images[index].size).reshape(images[index].shape)
                images[index] = with_effects(images[index], v, most, noise)
        self.backend.from_host(images.astype(np.float32), top[0].data)

    def _draw(self, bottom: Blobs, top: Blobs, index: int, factor: float) -> NDArray[np.float32]:
        """Return the coefficients of a sample."""
        param, values, rng = self._settings, dict(DEFAULTS), self.rng(index)
        if has_any(param, SPATIAL_FIELDS):
            size, crop = bottom[0].shape[2:], top[0].shape[2:]
            values = draw_valid_spatial(param, rng, factor, values, (size[0], size[1]), (crop[0], crop[1]))
        for draw in (draw_chromatic, draw_eigen, draw_effects):
            draw(param, rng, factor, values)
        if param.write_augmented:
            changed = {k: round(v, 5) for k, v in values.items() if v != DEFAULTS[k]}
            logger.info("%s: sample %d: %s", self.where, self.first_sample() + index, changed)
        return to_array(values)

    # -- mean ----------------------------------------------------------------------------------------

    def _subtract_mean(self, y: Array, top: Blobs) -> None:
        param, backend = self._settings, self.backend
        if self.context.phase == caffe_pb2.TRAIN and backend.holds_values:
            self._count_pass(top)
        if self._fixed_mean is not None:
            backend.apply(minus_channel, (y, self._fixed_mean), (y,), 1)
        elif param.recompute_mean and param.mean_per_pixel:
            mean = flatten_samples(backend, self.blobs[1].data).reshape(-1)
            rows = flatten_samples(backend, y)
            backend.apply(minus_channel, (rows, mean), (rows,), 1)
        elif param.recompute_mean:
            backend.apply(minus_channel, (y, backend.flat(self.blobs[2].data)), (y,), 1)

    def _count_pass(self, top: Blobs) -> None:
        """Increase the number of passes, and include the tops in the mean."""
        number = float(self.blobs[0].host_data().item()) + 1
        self.backend.fill(self.blobs[0].data, number)
        if number > self._settings.recompute_mean:
            return
        mean = self.blobs[1].host_data().astype(np.float64) * (number - 1)
        mean = (mean + top[0].host_data().mean(axis=0, dtype=np.float64)) / number
        self.backend.from_host(mean.astype(np.float32), self.blobs[1].data)
        self.backend.from_host(mean.mean(axis=(2, 3), keepdims=True).astype(np.float32), self.blobs[2].data)

    def running_statistics(self) -> Sequence[int]:
        return range(len(self.blobs)) if self.context.phase == caffe_pb2.TRAIN else ()

    def local_statistics(self) -> Sequence[int]:
        return range(1, len(self.blobs)) if self.context.phase == caffe_pb2.TRAIN else ()

    def accepts_shape(self, index: int, shape: tuple[int, ...]) -> bool:
        """Whether a file's parameter has a fitting shape: the mean of pixels may have another size."""
        mine = self.blobs[index].shape
        return index == 1 and len(shape) == len(mine) and shape[:2] == mine[:2] and math.prod(shape) > 0

    def convert_shape(self, index: int, values: Any) -> Any:
        mean = np.asarray(values).mean(axis=(2, 3), keepdims=True)
        return np.broadcast_to(mean, self.blobs[index].shape).astype(np.float32)

    def capture_blocker(self) -> str | None:
        training = self.context.phase == caffe_pb2.TRAIN
        if training or len(self.param.bottom) > 1 or self.augments():
            return "it augments images on the host"
        return None


# -- colours ---------------------------------------------------------------------------------------------


class EigenSpace:
    """The space of colours that three eigenvectors span, scaled by the range of a batch of images.

    Args:
        vectors: nine numbers, vector after vector.
        images: (N, 3, H, W).
    """

    def __init__(self, vectors: NDArray[np.float32], images: Images) -> None:
        self._vectors = vectors.reshape(3, 3)
        pixels = images.transpose(1, 0, 2, 3).reshape(3, -1)
        self._mean_rgb = pixels.mean(axis=1, dtype=np.float64).astype(np.float32)
        self._largest = np.abs(self._vectors @ pixels).max(axis=1)
        self._used = self._largest > LEAST
        self._mean = self._vectors @ self._mean_rgb
        self._mean = np.where(self._used, self._mean / np.where(self._used, self._largest, 1), self._mean)
        self._length = float(np.sqrt((self._largest**2).sum()))

    def augmented(self, image: Images, v: Coefficients, most: float) -> Images:
        """Return an image (3, H, W) with changed colours."""
        used, largest = self._used, self._largest[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            eig = self._vectors @ (image.reshape(3, -1) - self._mean_rgb[:, None])
            for c in range(3):
                if used[c]:
                    part = np.copysign(np.abs(eig[c] / largest[c]) ** v[f"pow_nomean{c}"], eig[c])
                    eig[c] = (part + v[f"add_nomean{c}"]) * v[f"mult_nomean{c}"]
            eig = eig + self._mean[:, None]
            if used[0]:
                part = np.copysign(np.abs(eig[0]) ** v["pow_withmean0"], eig[0])
                eig[0] = (part + v["add_withmean0"]) * v["mult_withmean0"]
            saturation = np.sqrt(eig[1] ** 2 + eig[2] ** 2)
            strong = saturation > LEAST
            wanted = np.maximum(saturation ** v["pow_withmean1"] + v["add_withmean1"], 0) * v["mult_withmean1"]
            cosine, sine = math.cos(v["col_angle"]), math.sin(v["col_angle"])
            eig[1], eig[2] = cosine * eig[1] - sine * eig[2], sine * eig[1] + cosine * eig[2]
            eig = np.where(used[:, None], eig * largest, eig)
            before = np.sqrt((eig**2).sum(axis=0))
            eig[1:] = np.where(strong, eig[1:] / saturation * wanted, eig[1:])
            if self._length > LEAST:
                length = np.sqrt((eig**2).sum(axis=0))
                target = np.maximum((before / self._length) ** v["lmult_pow"] + v["lmult_add"], 0)
                target *= v["lmult_mult"] * self._length
                eig = np.where(length > LEAST, np.minimum(eig / length * target, largest), eig)
        rgb = self._vectors.T @ eig
        result: Images = np.clip(rgb, 0, most).astype(np.float32).reshape(image.shape)
        return result


def with_colours(image: Images, v: Coefficients, most: float) -> Images:
    """Return an image (3, H, W) with changed colour, gamma, brightness and contrast."""
    factors = np.array([v["color1"], v["color2"], v["color3"]], np.float32).reshape(3, 1, 1)
    coloured = image * factors
    brightness = image.sum(axis=0) / (coloured.sum(axis=0) + np.float32(0.01))
    values = np.clip(coloured * brightness, 0, 1) ** np.float32(v["gamma"]) + np.float32(v["brightness"])
    values = np.float32(0.5) + (values - np.float32(0.5)) * np.float32(v["contrast"])
    result: Images = np.clip(values, 0, most).astype(np.float32)
    return result


def with_effects(image: Images, v: Coefficients, most: float, noise: Images | None) -> Images:
    """Return an image (3, H, W) with a shadow on one side of a line, and with normal noise."""
    height, width = image.shape[1:]
    rows, columns = np.meshgrid(np.arange(height) - height // 2, np.arange(width) - width // 2, indexing="ij")
    side = columns * math.cos(v["shadow_angle"]) + rows * math.sin(v["shadow_angle"]) - v["shadow_distance"]
    values = np.clip(image - np.where(side > 0, np.float32(v["shadow_strength"]), np.float32(0)), 0, most)
    result: Images = (values if noise is None else values + np.float32(v["noise"]) * noise).astype(np.float32)
    return result


# -- Mean ----------------------------------------------------------------------------------------------


@expression
def with_mean(x: Each, mean: Each, factor: Scalar) -> Each:
    return factor * x + mean


@register_layer("Mean")
class MeanLayer(Layer):
    """y = output_scale * (input_scale * x + mean_scale * mean), or minus the mean with `operation` SUBTRACT.

    Each bottom (N, C, H, W) has its top. The mean is that of each pixel, from the .binaryproto `file`, or `value` of
    each channel; both are used in turn if the bottom has more channels. dx = output_scale * input_scale * dy. Source:
    FlowNet 2's `mean_layer.cpp`.

    Raises:
        ConfigError: neither or both of file and value are given.
        ShapeError: the bottom does not fit the mean.
        DataError: the file cannot be read.
    """

    bottoms = (1, None)
    tops = (1, None)
    equal_bottoms_and_tops = True
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.mean_param
        if param.HasField("file") == bool(param.value):
            raise self.error("mean_param needs either file or value")
        self._means: dict[int, Blob] = {}
        if param.HasField("file"):
            try:
                self._mean: NDArray[np.float32] = read_mean(self.context.resolve(param.file))
            except DataError as error:
                raise DataError(f"{self.where}: {error}") from error
        else:
            self._mean = np.array(param.value, np.float32).reshape(-1, 1, 1)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        size = self._mean.shape[1:]
        for index, (x, y) in enumerate(zip(bottom, top, strict=True)):
            shape = x.shape
            if len(shape) != 4 or shape[1] % len(self._mean) or (size != (1, 1) and size != shape[2:]):
                raise self.shape_error("the bottom does not fit the mean's channels, height and width", x)
            y.reshape(shape)
            if index not in self._means or self._means[index].shape != shape:
                self._means[index] = Blob(self.backend, shape, f"{self.name} mean {index}")
                if self.backend.holds_values:
                    repeated = np.tile(self._mean, (shape[1] // len(self._mean), 1, 1)) * np.float32(self._factor())
                    values = np.ascontiguousarray(np.broadcast_to(repeated, shape))
                    self.backend.from_host(values, self._means[index].data)

    def _factor(self) -> float:
        """Return the factor of the mean."""
        param = self.param.mean_param
        sign = -1 if param.operation == caffe_pb2.MeanParameter.SUBTRACT else 1
        return float(sign * param.mean_scale * param.output_scale)

    def terms(self, index: int) -> Any:
        """Return what is added to bottom `index`, in its shape."""
        return self._means[index].host_data()

    def slope(self) -> float:
        """Return the factor of the bottoms."""
        return self.param.mean_param.input_scale * self.param.mean_param.output_scale

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for index, (x, y) in enumerate(zip(bottom, top, strict=True)):
            self.backend.apply(with_mean, (x.data, self._means[index].data, self.slope()), (y.data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for x, y, wanted in zip(bottom, top, propagate_down, strict=True):
            if wanted:
                self.backend.apply(scaled, (y.diff, self.slope()), (x.diff,))

"""Coefficients of FlowNet 2's augmentations: their draws, their array, and the transformation that they describe.

The functions are those of FlowNet 2's `augmentation_layer_base.cpp` and `rng.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caffepy.data.transforms.sample_rng import SampleRng
from caffepy.proto import caffe_pb2

Coefficients = dict[str, float]
"""Values by name; all of NAMES."""

SPATIAL = ("mirror", "dx", "dy", "angle", "zoom_x", "zoom_y")
CHROMATIC = ("gamma", "brightness", "contrast", "color1", "color2", "color3")
EIGEN = (
    *(f"{kind}_{when}{k}" for when in ("nomean", "withmean") for kind in ("pow", "add", "mult") for k in range(3)),
    "lmult_pow", "lmult_add", "lmult_mult", "col_angle",
)  # fmt: skip
EFFECTS = (
    "fog_amount", "fog_size", "motion_blur_angle", "motion_blur_size", "shadow_angle", "shadow_distance",
    "shadow_strength", "noise",
)  # fmt: skip
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
    """Return the coefficients with those that are near their default set to it."""
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
    """Return `given` plus a drawn transformation whose crop lies within the image; `given` after TRIES failures.

    Args:
        param: the distributions.
        rng: of the sample.
        factor: of the spreads.
        given: coefficients to add to.
        size: height and width of the image.
        crop: height and width of the crop.
    """
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

"""Fillers: initial values of parameters (Caffe's `filler.hpp`).

Random numbers come from a host Philox keyed by the solver's seed and the parameter, so they are equal on every device
and rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.utils.files import open_regular
from caffepy.utils.registry import Registry

if TYPE_CHECKING:
    from caffepy.backend.types import RandomStream

Values: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Draw: TypeAlias = "Callable[[np.random.Generator], Values]"
Filler: TypeAlias = "Callable[[caffe_pb2.FillerParameter, tuple[int, ...], str], Draw]"

FILLERS: Registry[Filler] = Registry("filler")
"""Fillers by type. Each checks its settings and returns a function that draws values from a generator."""

_WORD_MASK = 2**64 - 1

MAX_NUMBER_BYTES = 64
"""The most bytes of a number in a text file, with white space."""


def fill(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], stream: RandomStream, where: str) -> Values:
    """Return a parameter's initial values, float32 in logical order; arguments and errors as `filling`."""
    return filling(filler, shape, stream, where)()


def filling(
    filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], stream: RandomStream, where: str
) -> Callable[[], Values]:
    """Return a thread-safe function that draws a parameter's initial values.

    Args:
        filler: the filler's type and settings.
        shape: the parameter's shape; axis 0 counts outputs.
        stream: key of the random numbers.
        where: layer name for messages.

    Raises:
        ConfigError: the filler is unknown or cannot fill that shape.
    """
    function = FILLERS.get(filler.type, where)
    where = f"{where}: filler '{filler.type}'"
    if filler.sparse != -1 and filler.type != "gaussian":
        raise ConfigError(f"{where} does not support sparse; only gaussian does")
    if math.prod(shape) == 0:
        return lambda: np.zeros(shape, np.float32)
    draw = function(filler, shape, where)
    key = np.array([stream.seed & _WORD_MASK, stream.stream & _WORD_MASK], np.uint64)
    return lambda: draw(np.random.Generator(np.random.Philox(key=key)))


@FILLERS.register("constant")
def constant(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """Fill with `value`."""
    value = filler.value
    return lambda _: np.full(shape, value, np.float32)


@FILLERS.register("uniform")
def uniform(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """Uniform in [min, max)."""
    if filler.max < filler.min:
        raise ConfigError(f"{where} has min {filler.min:g} above max {filler.max:g}")
    return partial(_uniform, shape, filler.min, filler.max)


@FILLERS.register("gaussian")
def gaussian(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """Normal with `mean` and `std`; with `sparse`, each element is nonzero with probability sparse / outputs."""
    if filler.std < 0:
        raise ConfigError(f"{where} has a negative std, {filler.std:g}")
    dense = partial(_gaussian, shape, filler.mean, filler.std)
    if filler.sparse == -1:
        return dense
    outputs, sparse = shape[0] if shape else 1, filler.sparse
    if not 0 <= sparse <= outputs:
        raise ConfigError(f"{where} has sparse {sparse}; it must be from 0 to the {outputs} outputs")

    def draw(generator: np.random.Generator) -> Values:
        values = dense(generator)
        mask = generator.random(shape, dtype=np.float32) < sparse / outputs
        return np.where(mask, values, np.float32(0))

    return draw


@FILLERS.register("positive_unitball")
def positive_unitball(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """Uniform in [0, 1), normalised so that the elements of each output sum to 1."""

    def draw(generator: np.random.Generator) -> Values:
        values = _uniform(shape, 0, 1, generator)
        rows = values.reshape(shape[0] if shape else 1, -1)
        rows /= rows.sum(axis=1, keepdims=True)
        return values

    return draw


@FILLERS.register("xavier")
def xavier(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """Uniform in [-a, a), a = sqrt(3 / n), n by `variance_norm` (Glorot and Bengio 2010)."""
    bound = math.sqrt(3 / _fan(filler, shape))
    return partial(_uniform, shape, -bound, bound)


@FILLERS.register("msra")
def msra(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """Normal with mean 0 and std sqrt(2 / n), n by `variance_norm` (He, Zhang, Ren and Sun 2015)."""
    return partial(_gaussian, shape, 0, math.sqrt(2 / _fan(filler, shape)))


@FILLERS.register("bilinear")
def bilinear(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """Bilinear interpolation weights for upsampling by a Deconvolution layer, equal for all channels.

    Shape (outputs, inputs, K, K); along each axis 1 - |i / f - c| with f = ceil(K / 2) and c = (K - 1) / (2 f).
    """
    if len(shape) != 4 or shape[2] != shape[3]:
        raise ConfigError(f"{where} needs four axes and a square kernel, but the shape is {shape}")
    size = shape[3]
    half = math.ceil(size / 2)
    line = 1 - np.abs(np.arange(size) / half - (size - 1) / (2 * half))
    return lambda _: np.broadcast_to(np.outer(line, line), shape).astype(np.float32)


@FILLERS.register("diagonal")
def diagonal(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """`diag_val`, or 1, divided by the elements of a kernel, where input and output have the same number; else 0."""
    if len(shape) < 2:
        raise ConfigError(f"{where} needs two axes or more, but the shape is {shape}")
    area = math.prod(shape[2:])
    given = list(filler.diag_val)

    def draw(_: np.random.Generator) -> Values:
        values = np.zeros((shape[0], shape[1], area), np.float32)
        for number in range(min(shape[:2])):
            values[number, number] = (given[number] if number < len(given) else 1) / area
        return values.reshape(shape)

    return draw


@FILLERS.register("file")
def from_file(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...], where: str) -> Draw:
    """The numbers of the text file `file`, in logical order."""
    if not filler.file:
        raise ConfigError(f"{where} needs file, the name of a text file with the values")
    count = math.prod(shape)
    values = read_numbers(Path(filler.file), where, count)
    if len(values) < count:
        raise DataError(f"{where}: '{filler.file}' has {len(values)} numbers, but {count} are needed")
    return lambda _: values.reshape(shape).copy()


def read_numbers(path: Path, where: str, count: int) -> Values:
    """Return at most the first `count` numbers of a text file, divided by white space.

    Raises:
        DataError: the file cannot be read, or has something other than numbers.
    """
    try:
        with open_regular(path) as file:
            words = file.read(MAX_NUMBER_BYTES * max(count, 1)).split()[:count]
        return np.array([float(word) for word in words], np.float32)
    except OSError as error:
        raise DataError(f"{where}: '{path}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{where}: '{path}' has something other than numbers: {error}") from error


def _fan(filler: caffe_pb2.FillerParameter, shape: tuple[int, ...]) -> float:
    """Return n of xavier and msra: count / shape[0] inputs, count / shape[1] outputs (all of a vector), or mean."""
    count = math.prod(shape)
    inputs = count / (shape[0] if shape else 1)
    outputs = count / (shape[1] if len(shape) > 1 else 1)
    if filler.variance_norm == caffe_pb2.FillerParameter.FAN_OUT:
        return outputs
    if filler.variance_norm == caffe_pb2.FillerParameter.AVERAGE:
        return (inputs + outputs) / 2
    return inputs


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: np.random.Generator) -> Values:
    values = generator.random(shape, dtype=np.float32)
    values *= np.float32(high - low)
    values += np.float32(low)
    return np.asarray(values, np.float32)


def _gaussian(shape: tuple[int, ...], mean: float, std: float, generator: np.random.Generator) -> Values:
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    values += np.float32(mean)
    return np.asarray(values, np.float32)

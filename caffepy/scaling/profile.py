"""Profiles: the times of a net's layers on one device, and their JSON file."""

from __future__ import annotations

import json
import reprlib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from caffepy.errors import ConfigError
from caffepy.utils.files import atomic_write, read_regular

MAX_BYTES = 2**26
"""Size limit of the file."""
MAX_NUMBER = 1e15
"""Largest valid number in the file."""
FORMAT = "caffepy profile 1"
"""First field of the file, with the version of the format."""


@dataclass(frozen=True)
class LayerProfile:
    """One layer of the schedule.

    Args:
        name: the layer's name.
        forward_ms: milliseconds of the forward pass.
        backward_ms: milliseconds of the backward pass.
    """

    name: str
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Gradient:
    """The gradient of one learned parameter.

    Args:
        layer: index of the layer whose backward pass completes it; for a shared parameter the first such layer.
        bytes: bytes of its float32 values, including alignment padding.
    """

    layer: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """The profile of a net in training on one device.

    Args:
        net: the net's name.
        device: description of the device.
        on_cpu: whether the device is a CPU.
        batch: images per iteration on the device, over all passes.
        passes: forward and backward passes per iteration (iter_size).
        iteration_ms: milliseconds of an iteration on a single device.
        update_ms: milliseconds of the update within it.
        reduce_buckets: number of gradient buckets: the net's field or its default.
        layer_wise_reduce: the solver's field: whether gradients are reduced during the backward pass.
        layers: the layers in forward order.
        gradients: the gradients in the order of completion.
    """

    net: str
    device: str
    on_cpu: bool
    batch: int
    passes: int
    iteration_ms: float
    update_ms: float
    reduce_buckets: int
    layer_wise_reduce: bool
    layers: tuple[LayerProfile, ...]
    gradients: tuple[Gradient, ...]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def forward_ms(self) -> float:
        """Milliseconds of one forward pass."""
        return sum(layer.forward_ms for layer in self.layers)

    @property
    def backward_ms(self) -> float:
        """Milliseconds of one backward pass."""
        return sum(layer.backward_ms for layer in self.layers)

    @property
    def other_ms(self) -> float:
        """Milliseconds of an iteration outside passes and update: data and logging."""
        return self.iteration_ms - self.update_ms - self.passes * (self.forward_ms + self.backward_ms)

    def fitted(self) -> Profile:
        """Return the profile scaled so that `other_ms` is at least 0.

        Separately timed layers, with the device idle in between, can exceed the time of the iteration; their times are
        scaled down.
        """
        if self.other_ms >= 0:
            return self
        update = min(self.update_ms, self.iteration_ms)
        passes = self.passes * (self.forward_ms + self.backward_ms)
        scale = (self.iteration_ms - update) / passes if passes else 0.0
        layers = tuple(
            replace(layer, forward_ms=layer.forward_ms * scale, backward_ms=layer.backward_ms * scale)
            for layer in self.layers
        )
        return replace(self, update_ms=update, layers=layers)


def write_profile(path: Path, profile: Profile) -> None:
    """Write the profile as JSON.

    Raises:
        RunError: the file cannot be written.
    """
    with atomic_write(path) as file:
        file.write((json.dumps({"format": FORMAT, **asdict(profile)}, indent=1) + "\n").encode())


def read_profile(path: Path) -> Profile:
    """Read a file of `write_profile`.

    Raises:
        ConfigError: the file is missing, is not a profile, or a field is missing or invalid.
    """
    try:
        content = json.loads(read_regular(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as a profile: {reason}; make one with --save-profile") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ConfigError(f"{path}: is not a '{FORMAT}'; make one with caffepy plan --save-profile")
    for field, kind in (("layers", LayerProfile), ("gradients", Gradient)):
        content[field] = _checked_list(kind, content.get(field), f"{path}: {field}")
    profile: Profile = _checked(Profile, content, f"{path}")
    _check_gradients(profile, f"{path}: gradients")
    return profile


_MINIMUM = {"batch": 1, "passes": 1, "bytes": 1}
"""Smallest valid values of fields; 0 for other numbers."""
_KINDS: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


def _check_gradients(profile: Profile, where: str) -> None:
    """Check that gradients refer to layers and have the order of the backward pass."""
    before = len(profile.layers) - 1
    for i, gradient in enumerate(profile.gradients):
        if gradient.layer > before:
            limit = f"at most {before}, the one before it" if i else f"below the number of layers, {before + 1}"
            raise ConfigError(f"{where}[{i}].layer: is {gradient.layer}, must be {limit}")
        before = gradient.layer


def _checked_list(kind: type, values: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise ConfigError(f"{where}: must be a list, not {_shown(values)}")
    return tuple(_checked(kind, value, f"{where}[{i}]") for i, value in enumerate(values))


def _checked(kind: type, values: Any, where: str) -> Any:
    """Return a dataclass object from a JSON object with exactly its fields."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: must be an object, not {_shown(values)}")
    known = {field.name: str(field.type) for field in fields(kind)}
    if odd := sorted(known.keys() ^ values.keys()):
        state = "is missing" if odd[0] in known else "is unknown"
        raise ConfigError(f"{where}: field '{odd[0]}' {state}")
    for name, type_name in known.items():
        if type_name in _KINDS:
            _check_value(values[name], type_name, _MINIMUM.get(name, 0), f"{where}.{name}")
    return kind(**values)


def _check_value(value: Any, type_name: str, least: int, where: str) -> None:
    fits = isinstance(value, _KINDS[type_name]) and isinstance(value, bool) == (type_name == "bool")
    if type_name in ("int", "float"):
        fits = fits and least <= value <= MAX_NUMBER
    if not fits:
        raise ConfigError(f"{where}: is {_shown(value)}, must be a {type_name}{_range(type_name, least)}")


def _range(type_name: str, least: int) -> str:
    return f" of at least {least} and at most {MAX_NUMBER:g}" if type_name in ("int", "float") else ""


def _shown(value: Any) -> str:
    """Return a shortened repr of a value; Python does not convert integers of more than 4,300 digits."""
    return reprlib.repr(value) if not isinstance(value, int) or abs(value) < 1 << 128 else "an integer beyond 2^128"

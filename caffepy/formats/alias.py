"""Layer types that are other types under a new name, as a net is read: `CuDNNBatchNorm` of GENet is `BN`.

An alias replaces a layer's type and takes over the settings of the new type's message. `upgrade_net` applies aliases,
so that later parts know the old type only. The environment variable CAFFEPY_ALIAS holds those of --alias, so that child
processes have them. The folders of `caffepy/forks` have lines `register_alias(...)`.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from caffepy.errors import ConfigError
from caffepy.formats.ignore import ALL, ignored_fields, tell_ignored
from caffepy.formats.messages import schema_name
from caffepy.formats.proto.caffe_pb2 import LayerParameter, NetParameter
from caffepy.utils.environment import environment_variable

log = logging.getLogger(__name__)

VARIABLE = "CAFFEPY_ALIAS"
_ALIAS = re.compile(r"(\w+)=(\w+)(?::(\w+))?")
_CALL = re.compile(r"^register_alias\(", re.MULTILINE)
_FORKS = Path(__file__).parents[1] / "forks"


@dataclass(frozen=True)
class Alias:
    """The type that a layer type is read as.

    Args:
        type: the type that caffepy or a program has.
        settings: LayerParameter's field with that type's settings; "": the one named after the type.
        fields: fields of the new type's message that have another name in that of `settings`.
    """

    type: str
    settings: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


_registered: dict[str, Alias | None] = {}
"""Aliases of the program; None: a class has replaced one of caffepy's."""


def register_alias(new: str, old: str, settings: str = "", fields: Mapping[str, str] | None = None) -> None:
    """Read layers of type `new` as layers of type `old`, in nets that are read afterwards.

    The settings of `new` are in LayerParameter's field that is named after it, as `roi_alignment_param` after
    ROIAlignment. They go to the field of `old`: those of the same name and kind are taken over, with the defaults of
    `new`, and others are refused by name unless the user ignores them.

    Args:
        new: the type, as prototxts write it.
        old: the type that caffepy, a family of forks or a program has.
        settings: LayerParameter's field with the settings of `old`; "": the one that is named after it.
        fields: settings of `new` that have another name in `old`.
    """
    _registered[new] = Alias(old, settings, fields or {})


def replace_alias(type_name: str) -> None:
    """Let a class have the name of an alias."""
    if find_alias(type_name) is not None:
        _registered[type_name] = None


def find_alias(type_name: str) -> Alias | None:
    """Return the alias that a layer type is; None: it is none.

    Raises:
        ConfigError: CAFFEPY_ALIAS has another form.
    """
    given = parse_aliases(os.environ.get(VARIABLE, ""))
    return {**_of_forks(), **_registered, **given}.get(type_name)


def parse_aliases(text: str) -> dict[str, Alias]:
    """Return the aliases of a text: ``NEW=OLD`` or ``NEW=OLD:FIELD``, divided by commas.

    Raises:
        ConfigError: the text has another form.
    """
    aliases = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ALIAS.fullmatch(part)
        if match is None or match[1] == match[2]:
            raise ConfigError(
                f"alias: '{part}' is not NEW=OLD, two layer types, as SyncBN=BN, or NEW=OLD:FIELD with the field of "
                "LayerParameter that has the settings of OLD"
            )
        aliases[match[1]] = Alias(match[2], match[3] or "")
    return aliases


@contextmanager
def aliasing(text: str) -> Iterator[None]:
    """Read types as others within a `with` block, in this process and in processes that it starts.

    Args:
        text: as CAFFEPY_ALIAS, which it replaces.

    Raises:
        ConfigError: see `parse_aliases`.
    """
    parse_aliases(text)
    with environment_variable(VARIABLE, text):
        yield


@cache
def _of_forks() -> dict[str, Alias]:
    """Return the aliases of caffepy's families of forks, found in their sources, which are not imported."""
    aliases = {}
    for path in sorted(_FORKS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if _CALL.search(text):
            for line in ast.parse(text).body:
                call = line.value if isinstance(line, ast.Expr) else None
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register_alias":
                    new, *rest = map(ast.literal_eval, call.args)
                    named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                    aliases[new] = Alias(*rest, **named)
    return aliases


# -- nets ----------------------------------------------------------------------------------------------


def apply_aliases(param: NetParameter, origin: str) -> bool:
    """Replace the types that are aliases, in place; return whether there were any.

    Raises:
        ConfigError: a setting has no counterpart.
    """
    types = {layer.type for layer in param.layer}
    aliases = {name: alias for name in types if (alias := find_alias(name)) is not None}
    for layer in param.layer:
        if layer.type in aliases:
            _apply(layer, aliases[layer.type], f"{origin}: layer '{layer.name}' ({layer.type})")
    return bool(aliases)


def settings_field(type_name: str) -> str:
    """Return LayerParameter's field that is named after a type, as `scaled_tanh_param` after ScaledTanH, or ''."""
    names = LayerParameter.DESCRIPTOR.fields_by_name
    wanted = f"{type_name.lower()}param"
    return next((name for name in names if name.endswith("_param") and name.replace("_", "") == wanted), "")


def _apply(layer: LayerParameter, alias: Alias, where: str) -> None:
    source, target = settings_field(layer.type), alias.settings or settings_field(alias.type)
    if alias.settings and alias.settings not in LayerParameter.DESCRIPTOR.fields_by_name:
        raise ConfigError(f"{where}: alias: LayerParameter has no field '{alias.settings}'")
    if source and source != target:
        if target:
            _take_over(getattr(layer, source), getattr(layer, target), alias.fields, where)
        elif layer.HasField(source):
            raise ConfigError(
                f"{where}: LayerParameter has no field named after {alias.type}; name the field with its settings: "
                f"--alias {layer.type}={alias.type}:FIELD"
            )
        layer.ClearField(source)
    layer.type = alias.type


def _take_over(source: Any, target: Any, renamed: Mapping[str, str], where: str) -> None:
    """Write the settings of a message, and its defaults that differ, to fields of another message."""
    ignored, given = ignored_fields(), {each.name for each, _ in source.ListFields()}
    for each in source.DESCRIPTOR.fields:
        other = target.DESCRIPTOR.fields_by_name.get(renamed.get(each.name, each.name))
        fits = other is not None and _kind(each) == _kind(other)
        if fits and (each.name in given or (_default(each) != _default(other) and not target.HasField(other.name))):
            value = getattr(source, each.name)
            if each.enum_type is not None:
                numbers = other.enum_type.values_by_name
                named = [each.enum_type.values_by_number[number].name for number in _listed(value)]
                fits = all(name in numbers for name in named)
                value = [numbers[name].number for name in named if fits]
                value = value if each.default_value == [] or not value else value[0]
            try:
                target.MergeFrom(type(target)(**({other.name: value} if fits else {})))
            except ValueError:  # a number is outside the range of the other field
                fits = False
        if not fits and each.name in given:
            name = f"{schema_name(source.DESCRIPTOR)}.{each.name}"
            if name not in ignored and ALL not in ignored:
                raise ConfigError(
                    f"{where}: {schema_name(target.DESCRIPTOR)} has no {each.name}, or not of this kind or value; if "
                    f"results do not depend on it, --ignore-fields {name}"
                )
            tell_ignored(f"{where}: {name}", "")


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, int) else list(value)


def _kind(each: Any) -> tuple[Any, ...]:
    """The properties that two fields for the same settings share; numbers of all widths are alike."""
    numbers = (each.CPPTYPE_INT32, each.CPPTYPE_INT64, each.CPPTYPE_UINT32, each.CPPTYPE_UINT64)
    kind = "integer" if each.cpp_type in numbers else each.cpp_type
    kind = "float" if each.cpp_type in (each.CPPTYPE_FLOAT, each.CPPTYPE_DOUBLE) else kind
    return kind, each.default_value == [], each.message_type


def _default(each: Any) -> Any:
    return each.enum_type.values_by_number[each.default_value].name if _is_single_enum(each) else each.default_value


def _is_single_enum(each: Any) -> bool:
    return each.enum_type is not None and each.default_value != []

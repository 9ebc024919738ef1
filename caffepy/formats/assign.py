"""Assignments to fields of a solver and of its nets, as `caffepy train --set` gives them, before either is checked.

base_lr=0.01
stepvalue=1000,2000
net.layer[conv1].convolution_param.num_output=64
net.layer[data,TRAIN].data_param.batch_size=32
net.layer[3].param[0].lr_mult=0
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf import text_encoding
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.formats.load import complete_snapshot_prefix, is_included, net_state
from caffepy.formats.logged_solver import inline_nets, read_movable_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, NetParameter, SolverParameter
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_solver
from caffepy.utils.options import whole
from caffepy.utils.registry import suggest

log = logging.getLogger(__name__)

_PART = r"(\w+)(?:\[([^\[\]]*)\])?"
_ASSIGNMENT = re.compile(rf"({_PART}(?:\.{_PART})*)\s*=(.*)", re.DOTALL)
_NET = "net."
"""How the path of a field of the nets begins."""


class _Part(NamedTuple):
    """A field of a path, and what its brackets select; None: nothing."""

    name: str
    choice: str | None


def assign(param: SolverParameter, assignments: Sequence[str], resolve: PathResolver) -> None:
    """Set fields of a solver and of all its nets.

    Nets that the solver names by file become part of it if one of their fields is set.

    Args:
        param: a solver as read; changed in place.
        assignments: each ``PATH=VALUE``. A path that begins with ``net.`` is one of a field of the nets. The value is
            written as in a prototxt; strings need no quotes, and numbers of a repeated field are divided by commas.
        resolve: finds the files that the solver names.

    Raises:
        ConfigError: a path or value is invalid, with the message that a prototxt with it would cause.
    """
    of_nets = [text for text in assignments if text.startswith(_NET)]
    for text in assignments:
        if text not in of_nets:
            _assign(text, SolverParameter, [param])
    if of_nets:
        param.CopyFrom(inline_nets(param, resolve, read_movable_net))
        nets = [net for field in _NETS for net in _values(param, field)]
        if not nets:
            raise ConfigError(f"--set {of_nets[0]}: the solver names no net; add net")
        for text in of_nets:
            _assign(text.removeprefix(_NET), NetParameter, nets, _NET)
    upgrade_solver(param, "--set")
    if resolve.prototxt is not None:
        complete_snapshot_prefix(param, resolve.prototxt)


_NETS = ("net_param", "train_net_param", "test_net_param")


def _values(message: Message, name: str) -> list[Any]:
    """The messages of a field: none if it is not set."""
    value = getattr(message, name)
    if isinstance(value, Message):
        return [value] if message.HasField(name) else []
    return list(value)


def _assign(text: str, kind: type[Message], roots: Sequence[Message], before: str = "") -> None:
    """Set one field in all messages that its path selects in `roots`."""
    origin = f"--set {before}{text}"
    match = _ASSIGNMENT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{origin}: write a field, = and its value, such as base_lr=0.01")
    parts = [_Part(name, choice or None) for name, choice in re.findall(_PART, match[1])]
    fields = _fields(kind.DESCRIPTOR, parts)
    parsed = _parsed(parts, fields, match[match.lastindex or 0], kind, origin)
    targets = list(roots)
    for part, field in zip(parts[:-1], fields, strict=False):
        targets = [inner for target in targets for inner in _selected(target, field, part, origin)]
        if not targets:
            raise ConfigError(f"{origin}: {_missing(roots, part)}")
    for target in targets:
        _set(target, fields[-1], parts[-1], parsed, origin)
    if len(targets) > 1:
        log.info("%s: sets %d fields", origin, len(targets))


def _fields(descriptor: Any, parts: Sequence[_Part]) -> list[FieldDescriptor]:
    """The fields of a path, up to the first that does not exist."""
    fields = []
    for part in parts:
        field = None if descriptor is None else descriptor.fields_by_name.get(part.name)
        if field is None:
            break
        fields.append(field)
        descriptor = field.message_type
    return fields


def _parsed(
    parts: Sequence[_Part], fields: Sequence[FieldDescriptor], value: str, kind: type[Message], origin: str
) -> list[Any]:
    """The values of the last field, one if it is not repeated, as a prototxt with this path gives them."""
    field = fields[-1] if len(fields) == len(parts) else None
    text = f"{parts[-1].name}{_value_text(value.strip(), field)}"
    text = "".join(f"{part.name} {{ " for part in parts[:-1]) + text + " }" * (len(parts) - 1)
    try:
        message: Message = parse_text(text, kind(), origin)
    except ConfigError as error:
        raise ConfigError(re.sub(rf"^{re.escape(origin)}:\d+:\d+: ", lambda _: f"{origin}: ", str(error))) from None
    for field in fields[:-1]:
        if len(message.ListFields()) != 1:
            raise ConfigError(f"{origin}: give one value")
        inner = getattr(message, field.name)
        if _repeated(field) and len(inner) != 1:
            raise ConfigError(f"{origin}: give one value")
        message = inner[0] if _repeated(field) else inner
    if any(found.name != parts[-1].name for found, _ in message.ListFields()):
        raise ConfigError(f"{origin}: give one value")
    found = getattr(message, fields[-1].name)
    return list(found) if _repeated(fields[-1]) else [found]


def _value_text(value: str, field: FieldDescriptor | None) -> str:
    """A value behind its field's name, in a prototxt."""
    if field is None:
        return f": {value}"
    if field.message_type is not None:
        return f" {value}" if value.startswith("{") else f": {value}"
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        if not value.startswith(("'", '"')) and not (value.startswith("[") and _repeated(field)):
            value = f'"{text_encoding.CEscape(value.encode(), True)}"'
    elif _repeated(field) and "," in value and not value.startswith("["):
        value = f"[{value}]"
    return f": {value}"


def _repeated(field: FieldDescriptor) -> bool:
    return isinstance(field.default_value, list)


def _selected(target: Any, field: FieldDescriptor, part: _Part, origin: str) -> list[Any]:
    """The messages of a field that lies on the path; a field that is not set is created."""
    values = getattr(target, field.name)
    if not _repeated(field):
        if part.choice is not None:
            raise ConfigError(f"{origin}: {field.name} is no list; leave [{part.choice}] out")
        return [values]
    if part.choice is None:
        example = f"{field.name}[NAME]" if field.message_type is LayerParameter.DESCRIPTOR else f"{field.name}[0]"
        raise ConfigError(f"{origin}: {field.name} is a list; say which one, such as {example}")
    if field.message_type is LayerParameter.DESCRIPTOR and (named := _layers_named(values, part.choice, origin)):
        return named
    index = whole(part.choice)
    if index is None:
        return []
    if index == len(values) and field.message_type is not LayerParameter.DESCRIPTOR:
        values.add()
    return [values[index]] if index < len(values) else []


def _layers_named(layers: Sequence[LayerParameter], choice: str, origin: str) -> list[LayerParameter]:
    """The layers that ``NAME`` or ``NAME,PHASE`` selects."""
    named = [layer for layer in layers if layer.name == choice]
    name, comma, phase = choice.rpartition(",")
    if named or not comma:
        return named
    phases = {"TRAIN": TRAIN, "TEST": TEST}
    if phase.strip() not in phases:
        raise ConfigError(f"{origin}: '{phase.strip()}' is no phase; {suggest(phase.strip(), list(phases))}")
    state = net_state(phases[phase.strip()])
    return [layer for layer in layers if layer.name == name.strip() and is_included(layer, state)]


def _missing(roots: Sequence[Message], part: _Part) -> str:
    """What to say of a selection that selects nothing."""
    names = [layer.name for root in roots if isinstance(root, NetParameter) for layer in root.layer]
    if part.name != "layer" or not names:
        return f"there is no {part.name}[{part.choice}]"
    return f"the net has no layer [{part.choice}]; {suggest(part.choice or '', list(dict.fromkeys(names)))}"


def _by_number(target: Any, field: FieldDescriptor, choice: str, origin: str) -> str:
    """What to say of an element that is to be replaced and is given by a name."""
    present = getattr(target, field.name)
    if field.message_type is not LayerParameter.DESCRIPTOR:
        return f"[{choice}] is no number; {field.name} has {len(present)} elements, give one from 0 to {len(present)}"
    named = _layers_named(present, choice, origin)
    if not named:
        return _missing([target], _Part(field.name, choice))
    number = next(number for number, layer in enumerate(present) if layer is named[0])
    return (
        f"this replaces the whole layer; set one of its fields, such as {field.name}[{choice}].type, or give the "
        f"layer's number, {field.name}[{number}]"
    )


def _set(target: Any, field: FieldDescriptor, part: _Part, values: list[Any], origin: str) -> None:
    """Give a field of a message its value, or one element of it."""
    if not _repeated(field):
        if part.choice is not None:
            raise ConfigError(f"{origin}: {field.name} is no list; leave [{part.choice}] out")
        if field.message_type is not None:
            getattr(target, field.name).CopyFrom(values[0])
        else:
            setattr(target, field.name, values[0])
        return
    present = getattr(target, field.name)
    if part.choice is None:
        del present[:]
        present.extend(values)
        return
    if not part.choice.isdecimal():
        raise ConfigError(f"{origin}: {_by_number(target, field, part.choice, origin)}")
    index = whole(part.choice, most=len(present))
    if len(values) != 1 or index is None:
        raise ConfigError(
            f"{origin}: {field.name} has {len(present)} elements; give one value, and a number from 0 to {len(present)}"
        )
    if field.message_type is not None:
        (present.add() if index == len(present) else present[index]).CopyFrom(values[0])
    elif index == len(present):
        present.append(values[0])
    else:
        present[index] = values[0]

"""Damages inputs: bytes, text and protobuf messages, each case determined by its random generator."""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Sequence
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Random = random.Random

INTEGERS = (0, 1, 2, 3, -1, -2, 7, 127, 128, 255, 256, 1000, 65535, 65536, 10**6, 2**31 - 1, -(2**31), 2**32 - 1, 2**63)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-38, 3e38, -3e38, math.inf, -math.inf, math.nan, 1e300, 2.5)
TEXTS = ("", "\0", "a\0b", "x" * 300, "x" * 5000, "näch", "a\nb", "-x", "%s{}")
TEXTS += ("../../..", "/dev/zero", "~", "~nobody/x")
LONG = ("9" * 5000, "-" + "7" * 70_000, "0x" + "f" * 5000, "9" * 400 + ".5", "1e" + "9" * 5000, "0" * 5000 + "8")
"""Numbers that no machine holds; Python turns no text of more than 4300 digits into one."""
WORDS = ("0", "-1", "1e6", "1000000", "4294967295", "99999999999999999999", "inf", "-inf", "nan", "1e39", "true", "''")
MAX_BYTES = 1 << 20
"""Longest input; what grows beyond it is cut."""


# -- bytes -----------------------------------------------------------------------------------------------


def damage_bytes(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """One to four changes: flips, overwritten words, cuts, zeroed blocks, copies, pieces of another input."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(_BYTE_CHANGES)(changed, others, random)
    return bytes(changed[:MAX_BYTES])


def _flip(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 8))):
        if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _overwrite(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    size = random.choice((1, 2, 4, 8))
    word = (random.choice(INTEGERS) & (2 ** (8 * size) - 1)).to_bytes(size, random.choice(("little", "big")))
    at = random.randrange(len(data) + 1)
    data[at : at + size] = word


def _cut(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    del data[random.randrange(len(data) + 1) :]


def _zero(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    size = random.choice((16, 64, 512, 4096))
    at = random.randrange(len(data) // size + 1) * size
    data[at : at + size] = bytes(len(data[at : at + size]))


def _remove(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    at = random.randrange(len(data) + 1)
    del data[at : at + random.choice((1, 4, 100))]


def _repeat(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = data[at : at + random.choice((1, 8, 200))] * random.choice((1, 2, 50))


def _splice(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    other = random.choice(others) if others else bytes(data)
    begin = random.randrange(len(other) + 1)
    at = random.randrange(len(data) + 1)
    data[at : at + random.choice((0, 16, 10**9))] = other[begin : begin + random.choice((16, 300, 10**9))]


def _header(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    """A byte near the begin of a page."""
    at = random.randrange(len(data) // 4096 + 1) * 4096 + random.randrange(160)
    data[at : at + 1] = bytes([random.choice((0, 1, 0x7F, 0x80, 0xFF))])


def _exchange(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    """Two pages, or quarters of a small file."""
    size = max(1, min(4096, len(data) // 4))
    one, other = (random.randrange(len(data) // size) * size for _ in range(2))
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def damage_in_place(data: bytes, random: Random) -> bytes:
    """One to four changes that move no byte but those of two pages; a tenth are cut as well."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice((_flip, _header, _header, _overwrite, _zero, _exchange))(changed, (), random)
    if random.random() < 0.1:
        _cut(changed, (), random)
    return bytes(changed)


_BYTE_CHANGES = (_flip, _flip, _overwrite, _overwrite, _cut, _zero, _remove, _repeat, _splice)


# -- text ------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.+-]+|\s+|.', re.DOTALL)


def damage_text(text: str, others: Sequence[str], random: Random) -> bytes:
    """One to four changes of tokens: another's, hostile numbers, left out, repeated, nested; sometimes of bytes."""
    if random.random() < 0.1:
        coded = [other.encode(errors="surrogateescape") for other in (text, *others)]
        return damage_bytes(coded[0], coded[1:], random)
    tokens = _TOKEN.findall(text)
    for _ in range(random.choice((1, 1, 2, 4))):
        _change_tokens(tokens, others, random)
    return "".join(tokens).encode(errors="surrogateescape")[:MAX_BYTES]


def _change_tokens(tokens: list[str], others: Sequence[str], random: Random) -> None:
    if not tokens:
        return
    at = random.randrange(len(tokens))
    what = random.randrange(8)
    if what < 3:
        numbers = [i for i, token in enumerate(tokens) if token[0] in string.digits + "-+."]
        tokens[random.choice(numbers) if numbers else at] = random.choice(
            (*WORDS, str(random.choice(INTEGERS)), random.choice(LONG))
        )
    elif what == 3:
        tokens[at] = tokens[random.randrange(len(tokens))]
    elif what == 4:
        end = at + random.choice((1, 1, 5, 40))
        del tokens[at:end]
    elif what == 5:
        tokens[at:at] = tokens[at : at + random.choice((1, 10, 60))] * random.choice((1, 1, 3, 200))
    elif what == 6:
        strings = [i for i, token in enumerate(tokens) if token[0] == '"']
        value = text_format.text_encoding.CEscape(random.choice(TEXTS).encode(), as_utf8=False)
        tokens[random.choice(strings) if strings else at] = f'"{value}"'
    else:
        _splice_tokens(tokens, at, others, random)


def _splice_tokens(tokens: list[str], at: int, others: Sequence[str], random: Random) -> None:
    if random.random() < 0.2:
        tokens[at] = random.choice(("{", "[", "(", "layer {", "a: {")) * random.choice((1, 10, 3000))
        return
    other = _TOKEN.findall(random.choice(others)) if others else list(tokens)
    begin = random.randrange(len(other) + 1)
    tokens[at:at] = other[begin : begin + random.choice((1, 5, 50))]


# -- protobuf --------------------------------------------------------------------------------------------


def damage_message(message: Message, random: Random, others: Sequence[Message] = ()) -> None:
    """One to four fields, anywhere in a message, set to hostile values, cleared, repeated or another message's."""
    for _ in range(random.choice((1, 1, 2, 4))):
        holder = _some_part(message, random)
        donor = [part for other in others for part in _parts(other) if part.DESCRIPTOR is holder.DESCRIPTOR]
        if donor and random.random() < 0.1:
            holder.MergeFrom(random.choice(donor))
        else:
            _damage_field(holder, random)


def _parts(message: Message) -> list[Message]:
    """A message and all that are in it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if _is_repeated(value) else [value]:
                found += _parts(part)
    return found


def _some_part(message: Message, random: Random) -> Message:
    return random.choice(_parts(message))


def _damage_field(message: Message, random: Random) -> None:
    """Mostly fields that are there already; now and then a new one."""
    there = [field for field, _ in message.ListFields()]
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = random.choice(there) if there and random.random() < 0.7 else random.choice(fields)
    if random.random() < 0.1:
        message.ClearField(field.name)
        return
    current = getattr(message, field.name)
    if field.message_type is not None:
        _damage_messages(current, random)
    elif _is_repeated(current):
        _damage_list(current, field, random)
    else:
        setattr(message, field.name, hostile_value(field, random))


def _is_repeated(value: Any) -> bool:
    return hasattr(value, "append")


def _damage_messages(current: Any, random: Random) -> None:
    if not _is_repeated(current):
        current.SetInParent()
        _damage_field(current, random)
    elif current and random.random() < 0.6:
        what = random.randrange(3)
        if what == 0:
            del current[random.randrange(len(current))]
        elif what == 1:
            copy = random.choice(current)
            current.add().CopyFrom(copy)
        else:
            _swap(current, random)
    else:
        current.add()


def _swap(current: Any, random: Random) -> None:
    first, second = random.randrange(len(current)), random.randrange(len(current))
    copy = type(current[first])()
    copy.CopyFrom(current[first])
    current[first].CopyFrom(current[second])
    current[second].CopyFrom(copy)


def _damage_list(current: Any, field: FieldDescriptor, random: Random) -> None:
    what = random.randrange(4)
    if current and what == 0:
        del current[random.randrange(len(current)) :]
    elif current and what == 1:
        current.extend(list(current)[:64])
    elif current and what == 2:
        current[random.randrange(len(current))] = hostile_value(field, random)
    else:
        current.append(hostile_value(field, random))


_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def hostile_value(field: FieldDescriptor, random: Random) -> Any:
    """A value that a field can hold and hardly anybody writes."""
    if field.cpp_type in _BITS:
        least, most = _BITS[field.cpp_type]
        return min(max(random.choice((*INTEGERS, random.randrange(32))), least), most)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return random.choice(FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return random.choice(field.enum_type.values).number
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.choice(TEXTS).encode() + bytes(random.randrange(20))
    return random.choice((*TEXTS, *NAMES.split()))


NAMES = "data label conv ip loss Convolution Pooling ReLU Softmax Split Concat BatchNorm"
"""Names of blobs, layers and types that the seeds have."""

"""Reads the text of a fork's `caffe.proto` (proto2) into a file descriptor, without protoc.

It reads messages, enumerations and fields with their options. Fields of a oneof become optional fields. Reserved
numbers, extensions and services change no field and are skipped. The text is untrusted: its size and nesting are
limited, and the time is linear in its size.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from caffepy.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    _Messages = RepeatedCompositeFieldContainer[DescriptorProto]
    _Enums = RepeatedCompositeFieldContainer[EnumDescriptorProto]

MAX_BYTES = 2**21
"""Size limit of a .proto file; the largest of a public fork has 150 kB."""
MAX_NESTING = 32
"""Limit of messages within messages."""
MAX_NUMBER = 2**29 - 1
"""protobuf's largest field number."""
RESERVED_NUMBERS = range(19000, 20000)
"""Field numbers that protobuf keeps for itself."""

_Field = FieldDescriptorProto
SCALARS: dict[str, _Field.Type] = {
    name.removeprefix("TYPE_").lower(): kind
    for name, kind in _Field.Type.items()
    if kind not in (_Field.TYPE_GROUP, _Field.TYPE_MESSAGE, _Field.TYPE_ENUM)
}
_FLOATS = (_Field.TYPE_DOUBLE, _Field.TYPE_FLOAT)
_NOT_PACKED = (_Field.TYPE_STRING, _Field.TYPE_BYTES, _Field.TYPE_MESSAGE)
_LIMITS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
_LIMITS |= {name: _LIMITS["int" + name[-2:]] for name in ("sint32", "sint64", "sfixed32", "sfixed64")}
_LIMITS |= {name: _LIMITS["uint" + name[-2:]] for name in ("fixed32", "fixed64")}
_LABELS = {
    "optional": _Field.LABEL_OPTIONAL,
    "required": _Field.LABEL_REQUIRED,
    "repeated": _Field.LABEL_REPEATED,
}
_SKIPPED = ("reserved", "extensions", "option", "import")
"""Statements that end with a semicolon and change no field."""
_SKIPPED_BLOCKS = ("extend", "service")

_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<word>\.?[A-Za-z_][\w.]*)
    |(?P<number>(?:[0-9]|\.[0-9])(?:[eE][+-]|[\w.])*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<symbol>[][{}()<>=;:,+-])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_INTEGER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20}")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


class _TypedField(NamedTuple):
    """A field whose type is looked up at the end of the file."""

    field: FieldDescriptorProto
    scope: str
    default: _Token | None
    line: int


def parse_schema(text: str, origin: str) -> FileDescriptorProto:
    """Return the descriptor of a .proto text, without its package.

    Names of types in it begin with a dot and have no package: ``.LayerParameter``.

    Raises:
        ConfigError: the text is not proto2, or names a type that is not in it; ``origin:line: problem; remedy``.
    """
    return _Parser(text, origin).parse()


class _Parser:
    """A recursive-descent parser with one token of look-ahead.

    Args:
        text: of the file.
        origin: the file's name, for messages.
    """

    def __init__(self, text: str, origin: str) -> None:
        self._origin = origin
        self._tokens = self._split(text)
        self._at = 0
        self._file = FileDescriptorProto(syntax="proto2")
        self._types: dict[str, EnumDescriptorProto | None] = {}
        """Full names of messages (None) and enumerations."""
        self._typed: list[_TypedField] = []
        self._package = ""

    def parse(self) -> FileDescriptorProto:
        while self._next.kind != "end":
            self._statement()
        for each in self._typed:
            self._resolve(each)
        return self._file

    # -- tokens --------------------------------------------------------------------------------------

    def _split(self, text: str) -> list[_Token]:
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{self._origin}: has {len(text)} characters; a caffe.proto has at most {MAX_BYTES}")
        tokens, at, line = [], 0, 1
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._error(f"unexpected character {text[at]!r}; the file is not a .proto text", line)
            if found.lastgroup != "blank":
                tokens.append(_Token(found.lastgroup or "", found[0], line))
            line += found[0].count("\n")
            at = found.end()
        tokens.append(_Token("end", "the end of the file", line))
        return tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        if token.kind != "end":
            self._at += 1
        return token

    def _accept(self, text: str) -> bool:
        if self._next.text != text or self._next.kind == "string":
            return False
        self._at += 1
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._error(f"found {self._next.text} where '{text}' is expected", self._next.line)

    def _word(self, what: str, dotted: bool = False) -> str:
        token = self._take()
        if token.kind != "word" or (not dotted and "." in token.text) or token.text.endswith(".") or ".." in token.text:
            raise self._error(f"found {token.text} where {what} is expected", token.line)
        return token.text

    def _error(self, problem: str, line: int) -> ConfigError:
        return ConfigError(f"{self._origin}:{line}: {problem}")

    # -- statements ----------------------------------------------------------------------------------

    def _statement(self) -> None:
        """Read one statement of the file."""
        token = self._next
        if self._accept(";"):
            return
        if self._accept("message"):
            self._message(self._file.message_type, "", 1)
        elif self._accept("enum"):
            self._enum(self._file.enum_type, "")
        elif self._accept("package"):
            self._package = self._word("a package name", dotted=True)
            self._expect(";")
        elif self._accept("syntax") or self._accept("edition"):
            self._expect("=")
            name = _unquote(self._take().text)
            if name != "proto2":
                raise self._error(f"its language is {name}; Caffe's schema is proto2", token.line)
            self._expect(";")
        elif not self._skip():
            raise self._error(f"found {token.text} where a message or an enum is expected", token.line)

    def _skip(self) -> bool:
        """Skip a statement that changes no field, if the next is one."""
        if self._next.text in _SKIPPED and self._next.kind == "word":
            while not self._accept(";"):
                if self._next.kind == "end":
                    raise self._error("the file ends where ';' is expected", self._next.line)
                self._take()
            return True
        if self._next.text in _SKIPPED_BLOCKS:
            begin, depth = self._take().line, 1
            self._word("a name", dotted=True)
            self._expect("{")
            while depth:
                token = self._take()
                if token.kind == "end":
                    raise self._error("this block is not closed; add '}'", begin)
                depth += (token.text == "{") - (token.text == "}")
            return True
        return False

    def _message(self, into: _Messages, scope: str, depth: int) -> None:
        line = self._next.line
        name = self._word("a message's name")
        if depth > MAX_NESTING:
            raise self._error("messages are nested too deeply to be Caffe's", line)
        full = self._define(scope, name, None, line)
        message = into.add(name=name)
        numbers: dict[int, str] = {}
        names: set[str] = set()
        self._expect("{")
        while not self._accept("}"):
            self._member(message, full, depth, names, numbers)

    def _member(
        self, message: DescriptorProto, full: str, depth: int, names: set[str], numbers: dict[int, str]
    ) -> None:
        """Read one statement of a message."""
        token = self._next
        behind = self._tokens[self._at + 1] if token.kind == "word" else token
        declares = behind.kind == "word"  # a field may have the name of a keyword's type: `message message = 1` is not
        if self._accept(";"):
            return
        if declares and self._accept("message"):
            self._message(message.nested_type, full, depth + 1)
        elif declares and self._accept("enum"):
            self._enum(message.enum_type, full)
        elif declares and self._accept("oneof"):
            self._word("a oneof's name")
            self._expect("{")
            while not self._accept("}"):
                if not self._skip():
                    self._field(message, full, _Field.LABEL_OPTIONAL, names, numbers)
        elif token.text in _LABELS:
            self._take()
            self._field(message, full, _LABELS[token.text], names, numbers)
        elif not self._skip():
            raise self._error(f"found {token.text} where a field is expected; proto2 fields begin with optional, "
                              "required or repeated", token.line)  # fmt: skip

    def _field(
        self, message: DescriptorProto, scope: str, label: _Field.Label, names: set[str], numbers: dict[int, str]
    ) -> None:
        line = self._next.line
        type_name = self._word("a type", dotted=True)
        if type_name == "group" or (type_name == "map" and self._next.text == "<"):
            raise self._error(f"{type_name} fields are not supported; Caffe's files have none", line)
        name = self._word("a field's name")
        self._expect("=")
        number = self._integer("a field's number")
        if not 1 <= number <= MAX_NUMBER or number in RESERVED_NUMBERS:
            raise self._error(f"field '{name}' has number {number}, which protobuf does not allow", line)
        if name in names:
            raise self._error(f"field '{name}' of {scope} is declared twice; remove one", line)
        if number in numbers:
            raise self._error(f"fields '{numbers[number]}' and '{name}' of {scope} both have number {number}", line)
        names.add(name)
        numbers[number] = name
        field = message.field.add(name=name, number=number, label=label)
        options = self._options(line)
        if type_name in SCALARS:
            field.type = SCALARS[type_name]
        else:
            field.type_name = type_name
        if "packed" in options:
            field.options.packed = options["packed"].text == "true"
        self._typed.append(_TypedField(field, scope, options.get("default"), line))
        self._expect(";")

    def _options(self, line: int) -> dict[str, _Token]:
        """Read ``[name = value, …]``; return the values of plain names."""
        options: dict[str, _Token] = {}
        if not self._accept("["):
            return options
        while True:
            if self._accept("("):  # a custom option
                self._word("an option's name", dotted=True)
                self._expect(")")
                name = "()" if self._next.kind != "word" else f"(){self._take().text}"
            else:
                name = self._word("an option's name", dotted=True)
            self._expect("=")
            options[name] = self._value(line)
            if self._accept("]"):
                return options
            self._expect(",")

    def _value(self, line: int) -> _Token:
        """Read a constant; adjacent strings are joined, and a sign is part of the number."""
        token = self._take()
        if token.text in ("-", "+") and self._next.kind in ("number", "word"):
            follows = self._take()
            return _Token(follows.kind, f"{token.text.strip('+')}{follows.text}", token.line)
        if token.kind == "string":
            text = _unquote(token.text)
            while self._next.kind == "string":
                text += _unquote(self._take().text)
            return _Token("string", text, token.line)
        if token.kind not in ("number", "word"):
            raise self._error(f"found {token.text} where a value is expected", line)
        return token

    def _integer(self, what: str) -> int:
        negative = self._accept("-")
        token = self._take()
        number = _read_integer(token.text) if token.kind == "number" else None
        if number is None:
            raise self._error(f"found {token.text} where {what} is expected", token.line)
        return -number if negative else number

    def _enum(self, into: _Enums, scope: str) -> None:
        line = self._next.line
        name = self._word("an enum's name")
        enum = into.add(name=name)
        self._define(scope, name, enum, line)
        numbers: set[int] = set()
        self._expect("{")
        while not self._accept("}"):
            if self._accept(";"):
                continue
            if self._next.text == "option":
                self._take()
                if self._word("an option's name", dotted=True) == "allow_alias":
                    self._expect("=")
                    enum.options.allow_alias = self._word("true or false") == "true"
                while not self._accept(";"):
                    if self._take().kind == "end":
                        raise self._error("the file ends where ';' is expected", self._next.line)
                continue
            if self._next.text == "reserved" and self._skip():
                continue
            self._enum_value(enum, scope, numbers)
        if not enum.value:
            raise self._error(f"enum {name} has no value", line)
        if len(numbers) == len(enum.value):
            enum.ClearField("options")

    def _enum_value(self, enum: EnumDescriptorProto, scope: str, numbers: set[int]) -> None:
        line = self._next.line
        name = self._word("a value's name")
        self._expect("=")
        number = self._integer("a value's number")
        if not -(2**31) <= number < 2**31:
            raise self._error(f"value '{name}' has number {number}; an enum's numbers have 32 bits", line)
        if number in numbers and not enum.options.allow_alias:
            raise self._error(f"two values of {enum.name} have number {number}; give each its own", line)
        self._define(scope, name, None, line, kind="value")
        numbers.add(number)
        enum.value.add(name=name, number=number)
        self._options(line)
        self._expect(";")

    # -- names ---------------------------------------------------------------------------------------

    def _define(self, scope: str, name: str, enum: EnumDescriptorProto | None, line: int, kind: str = "type") -> str:
        """Enter a name of a scope and return its full name; values of an enum are names of the enum's scope."""
        full = f"{scope}.{name}".lstrip(".")
        key = full if kind == "type" else f"value {full}"
        if f"value {full}" in self._types or full in self._types:
            raise self._error(f"'{full}' is defined twice; remove one", line)
        self._types[key] = enum
        return full

    def _resolve(self, each: _TypedField) -> None:
        """Look up the type of a field, from its own message outwards, and check its default."""
        field = each.field
        if not field.HasField("type"):
            full = self._find(field.type_name, each.scope)
            if full is None:
                raise self._error(
                    f"field '{field.name}' of {each.scope} has the type '{field.type_name}', which the file does not "
                    "define; imports are not read: add the definition to the file",
                    each.line,
                )
            field.type_name = f".{full}"
            field.type = _Field.TYPE_MESSAGE if self._types[full] is None else _Field.TYPE_ENUM
        if field.options.packed and (field.label != _Field.LABEL_REPEATED or field.type in _NOT_PACKED):
            raise self._error(f"field '{field.name}' of {each.scope} cannot be packed", each.line)
        if each.default is not None:
            value = self._default(field, each.default)
            if value is None:
                raise self._error(
                    f"field '{field.name}' of {each.scope} cannot have the default {each.default.text}", each.line
                )
            field.default_value = value

    def _find(self, name: str, scope: str) -> str | None:
        if name.startswith("."):
            candidates = [name[1:]]
        else:
            parts = scope.split(".")
            candidates = [".".join([*parts[:end], name]) for end in range(len(parts), -1, -1)]
        for candidate in candidates:
            if candidate in self._types:
                return candidate
        prefix = f"{self._package}."
        bare = name.removeprefix(".")
        if self._package and bare.startswith(prefix) and bare.removeprefix(prefix) in self._types:
            return bare.removeprefix(prefix)
        return None

    def _default(self, field: FieldDescriptorProto, token: _Token) -> str | None:
        """Return a default as descriptors store it; None: it does not fit the type."""
        kind, text = field.type, token.text
        if field.label == _Field.LABEL_REPEATED or kind == _Field.TYPE_MESSAGE:
            return None
        if kind in (_Field.TYPE_STRING, _Field.TYPE_BYTES):
            return text if token.kind == "string" else None
        if token.kind == "string":
            return None
        if kind == _Field.TYPE_BOOL:
            return text if text in ("true", "false") else None
        if kind == _Field.TYPE_ENUM:
            enum = self._types[field.type_name[1:]]
            return text if enum is not None and any(value.name == text for value in enum.value) else None
        if kind in _FLOATS:
            return _read_float(text)
        number = _read_integer(text.removeprefix("-"))
        if number is None:
            return None
        low, high = _LIMITS[_Field.Type.Name(kind).removeprefix("TYPE_").lower()]
        number = -number if text.startswith("-") else number
        return str(number) if low <= number <= high else None


def _read_integer(text: str) -> int | None:
    """Return a decimal, hexadecimal or octal number without sign."""
    if not _INTEGER.fullmatch(text):
        return None
    try:
        return int(text, 16 if text[:2] in ("0x", "0X") else 8 if text.startswith("0") else 10)
    except ValueError:  # 08
        return None


def _read_float(text: str) -> str | None:
    try:
        value = float(text.removesuffix("f") if text[-2:-1].isdigit() else text)
    except ValueError:
        return None
    if math.isnan(value):
        return "nan"
    return repr(value)


def _unquote(text: str) -> str:
    """Return the characters of a quoted string."""

    def unescape(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] == "x" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) & 255)
        return _ESCAPES.get(code, code)

    return _ESCAPE.sub(unescape, text[1:-1])

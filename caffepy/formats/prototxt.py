"""Parsing of protobuf text, with errors that name file, line, column and a remedy."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.formats.ignore import ignored_fields, leave_out
from caffepy.formats.messages import schema_name
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.schemas import fork_schema
from caffepy.formats.upgrade import V1_TYPES
from caffepy.utils.registry import nearest

M = TypeVar("M", bound=Message)

MAX_BACKSLASHES = 1000
"""Consecutive backslashes at which a text is refused."""
MAX_LISTED_NAMES = 15
"""Maximum number of names of fields or values to list in an error."""

FIELD_ADVICE = {
    ("LayerParameter", "blobs_lr"): "it is of the old format; write param { lr_mult: 1 }, one for each, in its place",
    ("LayerParameter", "weight_decay"): "it is of the old format; write param { decay_mult: 1 }, one for each",
}
"""Advice for fields of other Caffe forks and old formats, by message and field."""
POOLING_SHAPES = {"kernel_size": "kernel_shape", "stride": "stride_shape", "pad": "pad_shape"}
"""Settings of PoolingParameter that some forks repeat for each axis, and the fields that hold their values."""
FORK_ADVICE = (
    "if a Caffe fork has it, give the fork's caffe.proto with --proto FILE or caffepy.register_proto(path) "
    "(docs/tutorials/unknown-fork.md)"
)

_UNKNOWN_FIELD = re.compile(r'Message type "caffepy\.([\w.]+)" has no field named "([^"]*)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "caffepy\.([\w.]+)" has no value (?:named|with number) (\S+?)\.?$')
_REPEATED = re.compile(r'Message type "caffepy\.([\w.]+)" should not have multiple "([^"]*)" fields')
_QUOTED_LINE = re.compile(r"^'.*?': (?=[A-Z])", re.DOTALL)
_NO_NUMBER = re.compile(r"Couldn't parse (float|integer|number): (.+)")
_NO_STRING = re.compile(r"[Ee]xpected string but found: ('.*')")
_TOKEN = re.compile(r"""#[^\n]*|"(?:[^"\\\n]+|\\.)*"?|'(?:[^'\\\n]+|\\.)*'?|[{}]|\w+""")
"""An unterminated string ends with its line, so matching is linear in the text."""
_WORD_BACKWARDS = re.compile(r"\s*(\w*)")
_BARE_LIST = re.compile(r"\b(number_max_occlusions)[ \t]*:[ \t]*(\d+)")
"""A list of OPData with one entry, which older nets of OpenPose write as a number."""
_POOLING = re.compile(r"\bpooling_param\s*:?\s*\{[^{}]*\}")
_SIZE = re.compile(r"#[^\n]*|\b(kernel_size|stride|pad)\s*:\s*(\d+)\s*[,;]?")
_LAYERS = re.compile(r"\blayers?\s*\{")
_POSITION = re.compile(r"^\d+:\d+ : ")


def parse_text(text: str, message: M, origin: str, ignored: frozenset[str] = frozenset()) -> M:
    """Merge protobuf text into `message` and return it.

    Args:
        text: the contents of a prototxt.
        message: the message to fill, usually empty.
        origin: the file's name, for messages.
        ignored: fields that are left out, beside those of CAFFEPY_IGNORE_FIELDS; see `ignored_fields`.

    Raises:
        ConfigError: the text cannot be parsed or lacks a required field;
            ``origin:line:column: problem; remedy``.
    """
    run = text.find("\\" * MAX_BACKSLASHES)
    if run >= 0:  # protobuf's time is quadratic in their number
        line = text.count("\n", 0, run) + 1
        raise ConfigError(f"{origin}:{line}: {MAX_BACKSLASHES} consecutive backslashes; remove them")
    text = leave_out(text, message.DESCRIPTOR, ignored_fields(ignored), origin)
    try:
        _parse(_BARE_LIST.sub(r'\1: "\2"', text), message)
    except text_format.ParseError as error:
        where = f"{origin}:{error.GetLine()}:{error.GetColumn()}"
        position = _position(text, error.GetLine() or 1, error.GetColumn() or 1)
        problem = str(error)
        explanation = (
            _explain_fork_field(problem, text, position)
            or _explain_unexpected_block(problem, text, position)
            or _explain(_strip_position(problem), _kind_of_file(message, text))
        )
        raise ConfigError(f"{where}: {explanation}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: messages are nested too deeply to be a net or a solver") from None
    missing = message.FindInitializationErrors()  # type: ignore[attr-defined]
    if missing:
        raise ConfigError(f"{origin}: required field '{missing[0]}' is not set; add it")
    return message


def _parse(text: str, message: Message) -> None:
    """Merge text that may repeat settings of pooling into a message."""
    before = type(message)()
    before.CopyFrom(message)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        repeated = _REPEATED.search(str(error))
        if repeated is None or repeated[1] != "PoolingParameter" or repeated[2] not in POOLING_SHAPES:
            raise
        message.CopyFrom(before)
        text_format.Parse(_POOLING.sub(_as_shapes, text), message)


def _as_shapes(block: re.Match[str]) -> str:
    """Return a `pooling_param` whose repeated settings are shapes; the lines stay."""
    values = dict[str, list[str]]()
    for size in _SIZE.finditer(block[0]):
        if size[1]:
            values.setdefault(size[1], []).append(size[2])
    written = set[str]()

    def write(size: re.Match[str]) -> str:
        name = size[1]
        if not name or len(values[name]) == 1:
            return size[0]
        lines = "\n" * size[0].count("\n")
        if name in written:
            return f" {lines}"
        written.add(name)
        return f"{POOLING_SHAPES[name]} {{ {' '.join(f'dim: {value}' for value in values[name])} }} {lines}"

    return _SIZE.sub(write, block[0])


def decode_text(data: bytes, origin: str) -> str:
    """Decode a prototxt as UTF-8; comments may have any encoding.

    Raises:
        ConfigError: the bytes are not text, or a line is not UTF-8 outside its comment.
    """
    if b"\0" in data:
        raise ConfigError(f"{origin}: this is a binary file, not a prototxt; give the text definition")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "\n".join(_decode_line(line, number, origin) for number, line in enumerate(data.split(b"\n"), 1))


def _decode_line(line: bytes, number: int, origin: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        comment = line.find(b"#")
        if 0 <= comment < error.start:
            return line[:comment].decode("utf-8")
        raise ConfigError(
            f"{origin}:{number}:{error.start + 1}: byte 0x{line[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def _strip_position(message: str) -> str:
    """Return protobuf's message without position and quoted source line."""
    return _QUOTED_LINE.sub("", _POSITION.sub("", message)).rstrip(".")


def _explain(message: str, root: str) -> str:
    unknown_field = _UNKNOWN_FIELD.search(message)
    if unknown_field:
        return _unknown_field(_descriptor(unknown_field[1]), unknown_field[2], root)
    unknown_value = _UNKNOWN_VALUE.search(message)
    if unknown_value:
        return _unknown_value(unknown_value[1], unknown_value[2])
    repeated = _REPEATED.search(message)
    schema = fork_schema()
    if repeated and schema is not None and f"{repeated[1]}.{repeated[2]}" in schema.single:
        return f"field '{repeated[2]}' of {repeated[1]} has several values, of which caffepy reads one; keep one"
    if repeated:
        return f"field '{repeated[2]}' of {repeated[1]} is given twice; keep one"
    if "for integer string conversion" in message:
        return "a number is outside the range of its field; write a smaller one"
    no_number = _NO_NUMBER.search(message)
    if no_number:
        kind = "whole number" if no_number[1] == "integer" else "number"
        return f"found {no_number[2]} where a {kind} is expected; write a {kind} without quotes"
    no_string = _NO_STRING.search(message)
    if no_string:
        return f"found {no_string[1]} where a quoted string is expected; {_quote_advice(no_string[1])}"
    if 'Expected "}"' in message:
        return "the text ends or continues where a '}' is expected; close the block that is still open"
    if "got }" in message:
        return "this '}' closes nothing; remove it or add the missing '{' above"
    if message.endswith("got /"):
        return "comments begin with #, not with a slash"
    if "does not have extensions" in message:
        return "extension names in [brackets] are not part of Caffe's format; remove them"
    return message[:1].lower() + message[1:]


def _quote_advice(word: str) -> str:
    """Return advice for an unquoted word, which may be a layer type of the old format."""
    old_names = caffe_pb2.V1LayerParameter.LayerType
    new_name = {old_names.Name(old): new for old, new in V1_TYPES.items()}.get(word.strip("'"))
    if not new_name:
        return "put it into quotes"
    return f'in layer {{ }} write type: "{new_name}", or make it layers {{ }}, the old format'


def _descriptor(name: str) -> Descriptor:
    descriptor = caffe_pb2.DESCRIPTOR.message_types_by_name[name.split(".")[0]]
    for part in name.split(".")[1:]:
        descriptor = descriptor.nested_types_by_name[part]
    return descriptor


def _unknown_field(message: Descriptor, name: str, root: str) -> str:
    if name[:1].isdigit():  # protobuf reads a comma as the end of a field
        return (
            f"'{name}' follows a number where a field name is expected; a comma is not a decimal point: write 0.01 for "
            "0,01, 10000 for 10,000, and repeat a field for each of its values"
        )
    other = _other_kind_of_file(message, name, root)
    if other:
        return other
    return f"unknown field '{name}' of {message.name}; {_field_advice(message, name)}"


def _other_kind_of_file(message: Descriptor, name: str, root: str) -> str:
    """Return an explanation if the field belongs to a solver where a net is expected, or the reverse."""
    if message.name != root:
        return ""
    if root == "SolverParameter" and name in caffe_pb2.NetParameter.DESCRIPTOR.fields_by_name:
        return f"'{name}' is a field of a net, and a solver was expected; give the solver that has net: \"this file\""
    if root == "NetParameter" and name in caffe_pb2.SolverParameter.DESCRIPTOR.fields_by_name:
        return f"'{name}' is a field of a solver, and a net was expected; give the file that the solver's net: names"
    return ""


def _kind_of_file(message: Message, text: str) -> str:
    """The message that the text should describe; '' for a net with layers, which is no solver."""
    return "" if isinstance(message, caffe_pb2.NetParameter) and _LAYERS.search(text) else message.DESCRIPTOR.name


def _position(text: str, line: int, column: int) -> int:
    return sum(len(row) + 1 for row in text.split("\n")[: line - 1]) + column - 1


def _explain_unexpected_block(message: str, text: str, position: int) -> str:
    """Return an explanation of a block after a field that takes a value."""
    if 'Expected ":"' not in message or text[position : position + 1] != "{":
        return ""
    name = _word_before(text, position)
    if not name:
        return ""
    if name == "param":
        return "in layers { }, the old format, param is a name; write blobs_lr and weight_decay, or make it layer { }"
    return f"found a block where '{name}' takes a value; write {name}: and the value"


def _word_before(text: str, position: int) -> str:
    """Return the word that ends before a position or before the white space there, or ''."""
    # It searches the reversed text: a pattern with `$` would be tried at every letter.
    backwards = _WORD_BACKWARDS.match(text[:position][::-1])
    assert backwards is not None
    return backwards[1][::-1]


def _explain_fork_field(message: str, text: str, position: int) -> str:
    """Return an explanation of an unknown layer parameter, which may belong to a fork's layer type."""
    unknown = _UNKNOWN_FIELD.search(message)
    if not unknown or unknown[1] != "LayerParameter" or not unknown[2].endswith("_param"):
        return ""
    type_name = _type_of_block(text, position)
    if not type_name:
        return ""
    problem = f"unknown field '{unknown[2]}' of LayerParameter"
    if similar := _nearest_field(_descriptor("LayerParameter"), unknown[2]):
        return f"{problem}; did you mean '{similar}'?"
    return f"{problem}, in a layer of type '{type_name}'; {FORK_ADVICE}; {_ignore_advice('LayerParameter', unknown[2])}"


def _nearest_field(message: Descriptor, name: str) -> str | None:
    """Return the field of which `name` is a misspelling; the ending that many fields have counts for nothing."""
    ending = "_param" if name.endswith("_param") else ""
    stems = [field.removesuffix(ending) for field in message.fields_by_name if field.endswith(ending)]
    similar = nearest(name.removesuffix(ending), stems)
    return f"{similar}{ending}" if similar else None


def _type_of_block(text: str, position: int) -> str:
    """Return the `type` in the innermost block around a position, or ''."""
    blocks: list[tuple[int, list[str]]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            blocks.append((token.start(), []))
        elif token[0] == "}":
            start, words = blocks.pop() if blocks else (position, [])
            if start < position < token.start():
                return next((b.strip("\"'") for a, b in itertools.pairwise(words) if a == "type"), "")
        elif blocks and token[0][0] != "#":
            blocks[-1][1].append(token[0])
    return ""


def _field_advice(message: Descriptor, name: str) -> str:
    if (message.name, name) in FIELD_ADVICE:
        return FIELD_ADVICE[message.name, name]
    if similar := _nearest_field(message, name):
        return f"did you mean '{similar}'?"
    holders = [field.name for field in message.fields if _contains_field(field, name)]
    if holders:
        return f"it belongs inside {' or '.join(holders)} {{ }}"
    return f"{_listing(message.fields_by_name)}{FORK_ADVICE}; {_ignore_advice(schema_name(message), name)}"


def _ignore_advice(message: str, name: str) -> str:
    """Return the advice for a field of which the user knows that it does not matter."""
    return f"if results do not depend on it, --ignore-fields {message}.{name}"


def _listing(names: Collection[str]) -> str:
    """Return a clause with all names, or '' for many."""
    return f"known: {', '.join(sorted(names))}; " if len(names) <= MAX_LISTED_NAMES else ""


def _contains_field(field: FieldDescriptor, name: str) -> bool:
    return field.message_type is not None and name in field.message_type.fields_by_name


def _unknown_value(enum_name: str, written: str) -> str:
    known = [entry.name for entry in _enum(enum_name).values]
    value = written.strip("\"'")
    if value in known:
        return f"{enum_name} is an enumeration; write {value} without quotes"
    if similar := nearest(value, known):
        return f"unknown value '{value}' of {enum_name}; did you mean '{similar}'?"
    return f"unknown value '{value}' of {enum_name}; {_listing(known)}{FORK_ADVICE}"


def _enum(name: str) -> EnumDescriptor:
    holder, _, short = name.rpartition(".")
    return (_descriptor(holder) if holder else caffe_pb2.DESCRIPTOR).enum_types_by_name[short]


_LAYER_TOKEN = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[{}<>]|[\w.]+""")


def layer_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each ``layer { }`` and ``layers { }`` of a net, also within a solver. Linear in time.

    Args:
        text: a prototxt that `parse_text` accepts, so that braces match.
    """
    line, counted = 1, 0
    depth, begin, word = 0, 0, re.match("", text)
    for token in _LAYER_TOKEN.finditer(text):
        if token[0] in "{<":
            if depth:
                depth += 1
            elif word is not None and word[0] in ("layer", "layers"):
                begin, depth = word.start(), 1
        elif token[0] in "}>" and depth:
            depth -= 1
            if not depth:
                line += text.count("\n", counted, begin)
                counted = begin
                yield line, text[begin : token.end()]
        if token[0][0] != "#":
            word = token

"""The schema of a process: caffepy's own, or the union with a fork's `caffe.proto`, which is read and merged here.

The schema is fixed before the first use of `caffepy.formats.proto.caffe_pb2`. The environment variable CAFFEPY_PROTO
names the fork's file, so that child processes have the same schema.

The protoc of grpcio-tools turns the text of a fork's `caffe.proto` (proto2) into a file descriptor. protoc runs in a
process of its own, with a limit of time: the text is untrusted. Fields of a oneof become optional fields. Reserved
numbers, extensions, services and options other than `packed` are left out.

The merge matches fields, messages and values of enumerations by name. The fork decides numbers and defaults, and the
types of its own fields. A field that only caffepy has keeps its number if the fork leaves it free.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from caffepy.errors import ConfigError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer


# -- the merge -----------------------------------------------------------------------------------------

FIRST_FREE_NUMBER = 100_000
"""From here on, fields and values of caffepy get numbers where the fork uses theirs."""

Holder: TypeAlias = FileDescriptorProto | DescriptorProto

_Field = FieldDescriptorProto
_KINDS = (
    {_Field.TYPE_DOUBLE, _Field.TYPE_FLOAT},
    {value for name, value in _Field.Type.items() if "INT" in name or "FIXED" in name},
    {_Field.TYPE_BOOL},
    {_Field.TYPE_STRING},
    {_Field.TYPE_BYTES},
)
"""Types whose values Python code reads alike."""


@dataclass
class Merged:
    """A merged schema.

    Args:
        file: its descriptor.
        fields: ``Message.field`` of each field that caffepy does not know, or knows with another type.
        values: ``Enum.VALUE`` of each value of caffepy's enumerations that caffepy does not know.
        single: ``Message.field`` of each field that the fork repeats and caffepy does not.
        deprecated: ``Message.field`` of each field that the fork marks so.
    """

    file: FileDescriptorProto
    fields: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    single: set[str] = field(default_factory=set)
    deprecated: set[str] = field(default_factory=set)


def merge_schemas(fork: FileDescriptorProto, own: FileDescriptorProto) -> Merged:
    """Merge the schema of a fork, as `parse_schema` returns it, into a copy of caffepy's."""
    merged = Merged(FileDescriptorProto())
    merged.file.CopyFrom(own)
    theirs = FileDescriptorProto()
    theirs.CopyFrom(fork)
    _rename_old_layers(theirs)
    _separate_enums(theirs, theirs, merged.file, "")
    _merge_holder(merged.file, theirs, "", own.package, merged)
    _lift_old_fields(merged)
    return merged


def _rename_old_layers(fork: FileDescriptorProto) -> None:
    """Give the layers of Caffe's second format, whose type is an enumeration, the name that they have since 2014."""
    names = {message.name: message for message in fork.message_type}
    old = names.get("LayerParameter")
    if old is None or "V1LayerParameter" in names:
        return
    if not any(each.name == "type" and each.type == _Field.TYPE_ENUM for each in old.field):
        return
    old.name = "V1LayerParameter"
    for message in _messages(fork):
        for each in message.field:
            parts = each.type_name.split(".")
            if parts[1:2] == ["LayerParameter"]:
                each.type_name = ".".join(["", "V1LayerParameter", *parts[2:]])


def _separate_enums(fork: FileDescriptorProto, holder: Holder, own: Holder, scope: str) -> None:
    """Move each enumeration of the fork's own whose values have names of caffepy's into a message of its own."""
    # Values of enumerations are names of the scope that holds the enumeration.
    known = {enum.name for enum in own.enum_type}
    values = {value.name for enum in own.enum_type for value in enum.value}
    names = {message.name: message for message in _inner(own)}
    for message in [message for message in _inner(holder) if message.name in names]:
        _separate_enums(fork, message, names[message.name], f"{scope}{message.name}.")
    for enum in list(holder.enum_type):
        if enum.name in known or values.isdisjoint(value.name for value in enum.value):
            continue
        wrapper = _inner(holder).add(name=f"{enum.name}Values")
        wrapper.enum_type.append(enum)
        old, new = f".{scope}{enum.name}", f".{scope}{wrapper.name}.{enum.name}"
        for message in _messages(fork):
            for each in message.field:
                if each.type_name == old:
                    each.type_name = new
        holder.enum_type.remove(enum)


def _lift_old_fields(merged: Merged) -> None:
    """Give LayerParameter the fields that only the fork's V1LayerParameter has, because V1 layers are upgraded."""
    messages = {message.name: message for message in merged.file.message_type}
    layer = messages["LayerParameter"]
    known, numbers = {each.name for each in layer.field}, {each.number for each in layer.field}
    for old in messages["V1LayerParameter"].field:
        if f"V1LayerParameter.{old.name}" in merged.fields and old.name not in known:
            added = layer.field.add()
            added.CopyFrom(old)
            added.number = _free_number(old.number, numbers)
            numbers.add(added.number)
            merged.fields.add(f"LayerParameter.{old.name}")


def _messages(holder: Holder) -> Iterator[DescriptorProto]:
    for message in _inner(holder):
        yield message
        yield from _messages(message)


def _inner(holder: Holder) -> RepeatedCompositeFieldContainer[DescriptorProto]:
    return holder.message_type if isinstance(holder, FileDescriptorProto) else holder.nested_type


def _merge_holder(own: Holder, fork: Holder, scope: str, package: str, merged: Merged) -> None:
    """Merge the enumerations and messages of a file or a message."""
    known = {enum.name: enum for enum in own.enum_type}
    kept = {enum.name for enum in own.enum_type} - {enum.name for enum in fork.enum_type}
    taken = {value.name for name in kept for value in known[name].value}
    for enum in fork.enum_type:
        if enum.name in known:
            _merge_enum(known[enum.name], enum, taken, f"{scope}{enum.name}", merged)
        else:
            own.enum_type.append(enum)
    messages = {message.name: message for message in _inner(own)}
    for message in _inner(fork):
        mine = messages.get(message.name)
        if mine is None:
            mine = _inner(own).add(name=message.name)
        _merge_holder(mine, message, f"{scope}{message.name}.", package, merged)
        _merge_fields(mine, message, f"{scope}{message.name}", package, merged)


def _merge_enum(
    own: EnumDescriptorProto, fork: EnumDescriptorProto, taken: set[str], name: str, merged: Merged
) -> None:
    """Make `own` the fork's values, without names that other enumerations have `taken`, then those of caffepy only."""
    known = {value.name: value.number for value in own.value}
    for value in [value for value in fork.value if value.name in taken and value.name not in known]:
        fork.value.remove(value)
    names = {value.name for value in fork.value}
    numbers = {value.number for value in fork.value}
    del own.value[:]
    own.value.extend(fork.value)
    own.options.CopyFrom(fork.options)
    merged.values.update(f"{name}.{value}" for value in names - set(known))
    for value, number in known.items():
        if value not in names:
            number = _free_number(number, numbers)
            numbers.add(number)
            own.value.add(name=value, number=number)


def _merge_fields(own: DescriptorProto, fork: DescriptorProto, name: str, package: str, merged: Merged) -> None:
    """Make `own` the fork's fields, then the fields that only caffepy has."""
    known = {each.name: each for each in own.field}
    fields = []
    for theirs in fork.field:
        if theirs.type_name:
            theirs.type_name = f".{package}{theirs.type_name}"
        mine = known.pop(theirs.name, None)
        if mine is None or not _reads_alike(mine, theirs):
            merged.fields.add(f"{name}.{theirs.name}")
        else:
            _adopt_label(theirs, mine, f"{name}.{theirs.name}", merged)
        if theirs.options.deprecated:
            merged.deprecated.add(f"{name}.{theirs.name}")
        fields.append(theirs)
    numbers = {each.number for each in fields}
    for mine in known.values():
        mine.number = _free_number(mine.number, numbers)
        numbers.add(mine.number)
        fields.append(mine)
    copies = DescriptorProto(field=fields)
    del own.field[:]
    own.field.extend(copies.field)
    _separate_json_names(own)


def _separate_json_names(message: DescriptorProto) -> None:
    """Give fields whose JSON names collide, as pooling_3d_param and pooling3d_param, their own names as such."""
    names = Counter(_json_name(each.name) for each in message.field)
    for each in message.field:
        if names[_json_name(each.name)] > 1:
            each.json_name = each.name
        else:
            each.ClearField("json_name")


def _json_name(name: str) -> str:
    return re.sub(r"_+(\w?)", lambda match: match[1].upper(), name)


def _reads_alike(own: FieldDescriptorProto, fork: FieldDescriptorProto) -> bool:
    """Whether code that reads caffepy's field can read the fork's."""
    if own.type_name or fork.type_name:
        return own.type_name == fork.type_name
    return any(own.type in kind and fork.type in kind for kind in _KINDS)


def _adopt_label(fork: FieldDescriptorProto, own: FieldDescriptorProto, name: str, merged: Merged) -> None:
    """Give a field of both schemas caffepy's label: code reads either one value or a list."""
    if fork.label == _Field.LABEL_REPEATED and own.label != _Field.LABEL_REPEATED:
        merged.single.add(name)
        fork.options.ClearField("packed")
    if own.label == _Field.LABEL_REPEATED:
        fork.ClearField("default_value")
    fork.label = own.label


def _free_number(wanted: int, taken: set[int]) -> int:
    if wanted not in taken:
        return wanted
    return next(number for number in itertools.count(FIRST_FREE_NUMBER) if number not in taken)


# -- the text of a fork's schema -----------------------------------------------------------------------

MAX_BYTES = 2**21
"""Size limit of a .proto file; the largest of a public fork has 150 kB."""
_TIMEOUT = 60
"""Seconds; a file of the largest size takes one."""
_NAME, _RESULT = "fork.proto", "fork.bin"
_UNDEFINED = re.compile(r'"([\w.]+)" is not defined')
_ERROR = re.compile(rf"^{re.escape(_NAME)}(:\d+)?(?::\d+)?: (?!warning: )(.*)", re.MULTILINE)


def parse_schema(text: str, origin: str, own: FileDescriptorProto | None = None) -> FileDescriptorProto:
    """Return the descriptor of a .proto text, without its package.

    Names of types in it begin with a dot and have no package: ``.LayerParameter``.

    Args:
        text: the schema, or only the messages that a fork has added to Caffe's.
        origin: the file's name, for messages.
        own: caffepy's schema, in which types are looked up that the text names and lacks.

    Raises:
        ConfigError: the text is not proto2, or names a type that is not in it; ``origin:line: problem``.
    """
    content = text.encode(errors="replace")
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{origin}: has {len(content)} bytes; a caffe.proto has at most {MAX_BYTES}")
    file = _compile(content, origin, own)
    if file.syntax not in ("", "proto2"):
        raise ConfigError(f"{origin}: its language is {file.syntax}; Caffe's schema is proto2")
    if not (file.message_type or file.enum_type):
        log.warning("%s has no message; give the fork's caffe.proto", origin)
    prefix = f".{file.package}." if file.package else "."
    for message in file.message_type:
        _reduce(message, prefix, origin)
    for enum in file.enum_type:
        _reduce_enum(enum)
    return FileDescriptorProto(syntax="proto2", message_type=file.message_type, enum_type=file.enum_type)


def _compile(content: bytes, origin: str, own: FileDescriptorProto | None) -> FileDescriptorProto:
    """Return what protoc makes of a text, with the types of `own` that it lacks."""
    result, output = _run_protoc(content, origin)
    if result is None and own is not None:
        missing = {name.split(".")[0] for name in _UNDEFINED.findall(output)}
        outlines = [_outline(each, "enum") for each in own.enum_type if each.name in missing]
        outlines += [_outline(each, "message") for each in own.message_type if each.name in missing]
        if outlines:
            return _compile("\n".join([content.decode(errors="replace"), *outlines]).encode(), origin, None)
    if result is not None:
        return result
    found = _ERROR.search(output)
    if found is None:
        last = output.rpartition("\n")[2]
        raise ConfigError(f"{origin}: protoc fails: {last}")
    hint = "; add its definitions to the file" if found[2].startswith("Import ") else ""
    raise ConfigError(f"{origin}{found[1] or ''}: {found[2].rstrip('.')}{hint}")


def _outline(own: Any, kind: str) -> str:
    """The definition of an enumeration, or of a message with its inner types and without fields."""
    if kind == "enum":
        inner = " ".join(f"{value.name} = {value.number};" for value in own.value)
        inner = f"option allow_alias = true; {inner}" if own.options.allow_alias else inner
    else:
        inner = " ".join(
            [_outline(e, "enum") for e in own.enum_type] + [_outline(e, "message") for e in own.nested_type]
        )
    return f"{kind} {own.name} {{ {inner} }}"


def _run_protoc(content: bytes, origin: str) -> tuple[FileDescriptorProto | None, str]:
    """Return the descriptor of a text, or None, and what protoc prints."""
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={_RESULT}", _NAME]
    with tempfile.TemporaryDirectory(prefix="caffepy-schema-") as folder:
        Path(folder, _NAME).write_bytes(content)
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{origin}: protoc takes more than {_TIMEOUT} s; give the fork's caffe.proto") from None
        if done.returncode == 0:
            return FileDescriptorSet.FromString(Path(folder, _RESULT).read_bytes()).file[0], ""
    return None, done.stderr.decode(errors="replace").strip() or f"status {done.returncode}"


def _reduce(message: DescriptorProto, prefix: str, origin: str) -> None:
    """Leave in a message what the merge of schemas takes, with names without the package."""
    for each in message.field:
        if each.type == FieldDescriptorProto.TYPE_GROUP or message.options.map_entry:
            raise ConfigError(
                f"{origin}: groups and maps, as in {message.name}, are not supported; Caffe's files have none"
            )
        if each.type_name.startswith(prefix):
            each.type_name = f".{each.type_name.removeprefix(prefix)}"
        packed, deprecated = each.options.packed, each.options.deprecated
        for name in ("json_name", "oneof_index", "options"):
            each.ClearField(name)
        if packed:
            each.options.packed = True
        if deprecated:
            each.options.deprecated = True
    for nested in message.nested_type:
        _reduce(nested, prefix, origin)
    for enum in message.enum_type:
        _reduce_enum(enum)
    for name in ("oneof_decl", "extension", "extension_range", "reserved_range", "reserved_name", "options"):
        message.ClearField(name)


def _reduce_enum(enum: EnumDescriptorProto) -> None:
    """Leave an enumeration's values, and whether several may have one number."""
    alias = enum.options.allow_alias
    for name in ("reserved_range", "reserved_name", "options"):
        enum.ClearField(name)
    if alias:
        enum.options.allow_alias = True
    for value in enum.value:
        value.ClearField("options")


# -- registration --------------------------------------------------------------------------------------

VARIABLE = "CAFFEPY_PROTO"

_MODULE = "caffepy.formats.proto.caffe_pb2"


@dataclass(frozen=True)
class ForkSchema:
    """The fork's schema that this process reads.

    Args:
        path: the file.
        digest: of its content, to compare ranks.
        fields: ``Message.field`` of each field that caffepy does not know.
        values: ``Enum.VALUE`` of each value that caffepy does not know.
        single: ``Message.field`` of each field that the fork repeats and caffepy does not.
        deprecated: ``Message.field`` of each field that the fork marks so.
    """

    path: Path
    digest: str
    fields: frozenset[str]
    values: frozenset[str]
    single: frozenset[str]
    deprecated: frozenset[str]


_registered: list[ForkSchema] = []


def fork_schema() -> ForkSchema | None:
    """Return the registered schema of a fork, or None."""
    return _registered[0] if _registered else None


def register_proto(path: str | os.PathLike[str]) -> None:
    """Read nets, solvers and binary files with the schema of a fork: the text of its ``caffe.proto``.

    Call it before anything of caffepy that reads nets is imported. The union of the fork's schema and caffepy's holds
    for the whole process and for the processes that it starts (CAFFEPY_PROTO). Where both have a field, the number and
    the default are the fork's. To register the same file again does nothing.

    Args:
        path: the fork's file, usually ``src/caffe/proto/caffe.proto``.

    Raises:
        ConfigError: the file cannot be read, or the schema of the process is in use already.
    """
    file = Path(path).resolve()
    if _registered and _registered[0].path == file:
        return
    if _registered:
        raise ConfigError(f"{path}: this process already has the schema {_registered[0].path}; a process has one")
    if _MODULE in sys.modules:
        raise ConfigError(
            f"{path}: caffepy's schema is in use already; call register_proto before nets are read and before "
            f"caffe_pb2 is imported, or set {VARIABLE}"
        )
    load_fork_schema(file)
    os.environ[VARIABLE] = str(file)


def load_fork_schema(path: Path) -> None:
    """Make `caffepy.formats.proto.caffe_pb2` the union of caffepy's schema and a fork's.

    Raises:
        ConfigError: the file cannot be read or is not a schema.
    """
    from caffepy.utils.files import read_input

    content = read_input(path, "schema (.proto)", ConfigError, MAX_BYTES, "give the fork's caffe.proto")
    module = importlib.import_module(_MODULE)
    descriptor, merged = unite(content, str(path), module)
    _replace(module, descriptor)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    sets = (frozenset(names) for names in (merged.fields, merged.values, merged.single, merged.deprecated))
    _registered.append(ForkSchema(path, digest, *sets))


def unite(content: bytes, origin: str, module: Any) -> tuple[Any, Merged]:
    """Return the union of a generated module's schema and a fork's, in a descriptor pool of its own.

    Raises:
        ConfigError: the content is not a schema, or contradicts caffepy's.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    own = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(own)
    merged = merge_schemas(parse_schema(content.decode("utf-8-sig", "replace"), origin, own), own)
    try:
        return DescriptorPool().AddSerializedFile(merged.file.SerializeToString()), merged
    except TypeError as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(f"{origin}: its schema does not fit caffepy's: {problem}") from error


def _replace(module: ModuleType, descriptor: Any) -> None:
    """Replace the classes and enumerations of the generated module."""
    from google.protobuf.internal import builder

    names = vars(module)
    names["DESCRIPTOR"] = descriptor
    builder.BuildMessageAndEnumDescriptors(descriptor, names)
    builder.BuildTopDescriptorsAndMessages(descriptor, _MODULE, names)

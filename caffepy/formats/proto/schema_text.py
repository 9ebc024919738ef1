"""Reads the text of a fork's `caffe.proto` (proto2) into a file descriptor, by the protoc of grpcio-tools.

protoc runs in a process of its own, with a limit of time: the text is untrusted. Fields of a oneof become optional
fields. Reserved numbers, extensions, services and options other than `packed` are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from caffepy.errors import ConfigError

MAX_BYTES = 2**21
"""Size limit of a .proto file; the largest of a public fork has 150 kB."""
_TIMEOUT = 60
"""Seconds; a file of the largest size takes one."""
_NAME, _RESULT = "fork.proto", "fork.bin"
_ERROR = re.compile(rf"^{re.escape(_NAME)}(:\d+)?(?::\d+)?: (?!warning: )(.*)", re.MULTILINE)


def parse_schema(text: str, origin: str) -> FileDescriptorProto:
    """Return the descriptor of a .proto text, without its package.

    Names of types in it begin with a dot and have no package: ``.LayerParameter``.

    Raises:
        ConfigError: the text is not proto2, or names a type that is not in it; ``origin:line: problem``.
    """
    content = text.encode(errors="replace")
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{origin}: has {len(content)} bytes; a caffe.proto has at most {MAX_BYTES}")
    file = _compile(content, origin)
    if file.syntax not in ("", "proto2"):
        raise ConfigError(f"{origin}: its language is {file.syntax}; Caffe's schema is proto2")
    prefix = f".{file.package}." if file.package else "."
    for message in file.message_type:
        _reduce(message, prefix, origin)
    for enum in file.enum_type:
        _reduce_enum(enum)
    return FileDescriptorProto(syntax="proto2", message_type=file.message_type, enum_type=file.enum_type)


def _compile(content: bytes, origin: str) -> FileDescriptorProto:
    """Return what protoc makes of a text."""
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
            return FileDescriptorSet.FromString(Path(folder, _RESULT).read_bytes()).file[0]
    output = done.stderr.decode(errors="replace").strip()
    found = _ERROR.search(output)
    if found is None:
        last = output.rpartition("\n")[2]
        raise ConfigError(f"{origin}: protoc fails with status {done.returncode}: {last}")
    hint = "; add its definitions to the file" if found[2].startswith("Import ") else ""
    raise ConfigError(f"{origin}{found[1] or ''}: {found[2].rstrip('.')}{hint}")


def _reduce(message: DescriptorProto, prefix: str, origin: str) -> None:
    """Leave in a message what the merge of schemas takes, with names without the package."""
    for field in message.field:
        if field.type == FieldDescriptorProto.TYPE_GROUP or message.options.map_entry:
            raise ConfigError(
                f"{origin}: groups and maps, as in {message.name}, are not supported; Caffe's files have none"
            )
        if field.type_name.startswith(prefix):
            field.type_name = f".{field.type_name.removeprefix(prefix)}"
        packed = field.options.packed
        for name in ("json_name", "oneof_index", "options"):
            field.ClearField(name)
        if packed:
            field.options.packed = True
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

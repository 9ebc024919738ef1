"""The schema of a process: caffepy's own, or the union with a fork's `caffe.proto`.

It is fixed before the first use of `caffepy.formats.proto.caffe_pb2`. The environment variable CAFFEPY_PROTO names
the fork's file, so that child processes have the same schema.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from caffepy.errors import ConfigError

if TYPE_CHECKING:
    from caffepy.formats.proto.merge import Merged

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
    """

    path: Path
    digest: str
    fields: frozenset[str]
    values: frozenset[str]
    single: frozenset[str]


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
    from caffepy.formats.proto.schema_text import MAX_BYTES
    from caffepy.utils.files import read_input

    content = read_input(path, "schema (.proto)", ConfigError, MAX_BYTES, "give the fork's caffe.proto")
    module = importlib.import_module(_MODULE)
    descriptor, merged = unite(content, str(path), module)
    _replace(module, descriptor)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    sets = (frozenset(names) for names in (merged.fields, merged.values, merged.single))
    _registered.append(ForkSchema(path, digest, *sets))


def unite(content: bytes, origin: str, module: Any) -> tuple[Any, Merged]:
    """Return the union of a generated module's schema and a fork's, in a descriptor pool of its own.

    Args:
        content: the fork's file.
        origin: its name, for messages.
        module: `caffepy.formats.proto.caffe_pb2`.

    Raises:
        ConfigError: the content is not a schema, or contradicts caffepy's.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    from caffepy.formats.proto.merge import merge_schemas
    from caffepy.formats.proto.schema_text import parse_schema

    own = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(own)
    merged = merge_schemas(parse_schema(content.decode("utf-8-sig", "replace"), origin), own)
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

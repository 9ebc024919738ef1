"""Options by which a command reads a fork's nets and learns layer types that caffepy does not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from caffepy.options.declaration import option
from caffepy.options.types import file_name, plugin_name

_GROUP = "nets of Caffe forks"


@dataclass(frozen=True)
class ExtensionOptions:
    """What a command adds to caffepy's schema and layer types before it reads nets."""

    proto: Path | None = option(
        None,
        "a fork's caffe.proto: its fields and numbers are used too; also by CAFFEPY_PROTO",
        parse=file_name, metavar="FILE", group=_GROUP,
    )  # fmt: skip
    plugins: list[str] = option(
        [],
        "a Python file or module that registers layer types; may be given several times",
        flags=("--plugin",), parse=plugin_name, metavar="MODULE", group=_GROUP, repeatable=True,
    )  # fmt: skip

"""Label maps: class names and label numbers, as SSD's tools write and read them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from google.protobuf import text_format

from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import decode_text, parse_text
from caffepy.utils.files import atomic_write, read_regular

_MAX_BYTES = 1 << 24
_LABELS = range(-(2**31), 2**31)


def read_label_map(path: Path, unique: bool = False) -> dict[str, int]:
    """Read a LabelMap prototxt; return the label of each name.

    Args:
        path: the file.
        unique: refuse duplicate names; otherwise the last label wins.

    Raises:
        ConfigError: the file is not a LabelMap.
        DataError: the file cannot be read, is empty, or has a duplicate name.
    """
    text = decode_text(_read(path), str(path))
    labels: dict[str, int] = {}
    for item in parse_text(text, caffe_pb2.LabelMap(), str(path)).item:
        if unique and item.name in labels:
            raise DataError(f"{path}: the name '{item.name}' occurs twice; remove one, or omit --check_label")
        labels[item.name] = item.label
    if not labels:
        raise DataError(f"{path}: has no names; `caffepy create_label_map` writes label maps")
    return labels


def create_label_map(source: Path, target: Path, delimiters: str = " ", background: bool = False) -> int:
    """Write a LabelMap from a list of classes (`ReadLabelFileToLabelMap` of SSD's `io.cpp`).

    Each line is a name; a name and a label; or a name, a label and a display name. Labels that are not given count
    from 0, or from 1 with `background`.

    Args:
        source: the list of classes.
        target: the prototxt to write.
        delimiters: characters that separate fields.
        background: add the class ``none_of_the_above`` with label 0 first.

    Returns:
        The number of classes.

    Raises:
        ConfigError: `delimiters` is empty.
        DataError: the list cannot be read, or its lines differ in the number of fields or have more than three.
        RunError: the file cannot be written.
    """
    if not delimiters:
        raise ConfigError("--delimiter is empty; give the characters that separate the fields of a line")
    result = caffe_pb2.LabelMap()
    if background:
        result.item.add(name="none_of_the_above", label=0, display_name="background")
    lines = decode_text(_read(source), str(source)).splitlines()
    fields = {n: re.split(f"[{re.escape(delimiters)}]", line) for n, line in enumerate(lines, 1) if line.strip()}
    for number, parts in fields.items():
        first = next(iter(fields.values()))
        if len(parts) != len(first) or not 1 <= len(parts) <= 3:
            raise DataError(
                f"{source}:{number}: has {len(parts)} fields, but the first line has {len(first)}; every line is a "
                "name, a name and a label, or a name, a label and a display name"
            )
        label = _label(parts[1], f"{source}:{number}") if len(parts) > 1 else len(result.item)
        result.item.add(name=parts[0], label=label, display_name=parts[2] if len(parts) > 2 else parts[0])
    with atomic_write(target) as file:
        file.write(text_format.MessageToString(result, as_utf8=True).encode())
    return len(result.item)


def _label(text: str, where: str) -> int:
    if not re.fullmatch(r"[-+]?[0-9]{1,10}", text.strip()) or int(text) not in _LABELS:
        raise DataError(f"{where}: '{text[:40]}' is not a label; the second field is an integer")
    return int(text)


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(f"'{os.fspath(path)}' cannot be read: {error.strerror}") from error

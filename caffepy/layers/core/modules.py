"""In which module each layer type is, as the sources say: to import all of them takes longer than most nets need."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parents[1]
_REGISTERED = re.compile(r"^@register_layer\(([^)]*)\)", re.MULTILINE)
_NAME = re.compile(r"[\"'](\w+)[\"']")


@cache
def layer_modules() -> dict[str, str]:
    """The module of each type that a file beside this one registers; empty where there are no sources."""
    found = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        module = ".".join(("caffepy.layers", *path.relative_to(_FOLDER).with_suffix("").parts))
        for registered in _REGISTERED.finditer(path.read_text(encoding="utf-8")):
            found.update(dict.fromkeys(_NAME.findall(registered[1]), module))
    return found

"""The nets and solvers that come with caffepy: where their files are, and copies of them for users.

A wheel has them in the package, a checkout in ``models``. Commands import this module.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from caffepy.errors import ConfigError, InternalError
from caffepy.utils.files import atomic_write, read_regular
from caffepy.utils.registry import suggest

DEFAULT_FOLDER = Path("models")
"""The folder that the models' own files name."""
_PATTERNS = ("*.md", "*.prototxt")
_ROW = re.compile(r"^\| \[([\w-]+)\]\([^)]*\) \| ([^|]*) \| ([^|]*) \|", re.MULTILINE)
_LARGEST = 2**24


class ModelFiles(NamedTuple):
    """A row of models/README.md.

    Args:
        name: its folder.
        net: the net and its number of weights.
        data: what it is trained on.
    """

    name: str
    net: str
    data: str


def models_folder() -> Path:
    """Return the folder of the models.

    Raises:
        InternalError: this installation has none.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "models", package.parent / "models"):
        if (folder / "README.md").is_file():
            return folder
    raise InternalError(f"{package} has no models; install caffepy again")


def list_models() -> list[ModelFiles]:
    """Return the models in the order of models/README.md."""
    text = read_regular(models_folder() / "README.md", _LARGEST).decode()
    return [ModelFiles(*(part.strip() for part in row)) for row in _ROW.findall(text)]


def copy_model(name: str, to: Path = DEFAULT_FOLDER, force: bool = False) -> list[Path]:
    """Copy a model's files to the folder `to` / `name`. Paths in them follow, if `to` is not ``models``.

    Args:
        name: the model.
        to: a folder, which is made if it is not there.
        force: replace files with other contents.

    Returns:
        The files, existing ones with the same contents included.

    Raises:
        ConfigError: there is no such model, or a file with other contents is there and `force` is off.
        RunError: a file cannot be written.
    """
    names = [model.name for model in list_models()]
    if name not in names:
        raise ConfigError(f"there is no model '{name}'; {suggest(name, names)} 'caffepy models list' lists them")
    source, target = models_folder() / name, to / name
    files = sorted(file for pattern in _PATTERNS for file in source.glob(pattern))
    contents = {target / file.name: _moved(read_regular(file, _LARGEST), to) for file in files}
    changed = {path: content for path, content in contents.items() if _content(path) != content}
    there = [path for path in changed if path.exists()]
    if there and not force:
        raise ConfigError(f"{there[0]} exists with other contents; give --overwrite, or --to another folder")
    _make_folder(target)
    for path, content in changed.items():
        with atomic_write(path) as file:
            file.write(content)
    return list(contents)


def _content(path: Path) -> bytes | None:
    try:
        return read_regular(path, _LARGEST)
    except OSError:
        return None


def _moved(content: bytes, to: Path) -> bytes:
    """Return a file with the paths of the models' folder replaced by those of another one."""
    if to == DEFAULT_FOLDER:
        return content
    names = "|".join(re.escape(model.name) for model in list_models())
    folder = to.as_posix().replace("\\", "\\\\").replace('"', '\\"')
    return re.sub(rf"\bmodels/({names})\b", lambda found: f"{folder}/{found[1]}", content.decode()).encode()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror or error}; give --to another folder") from error

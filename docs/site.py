"""Copies the pages of the documents, and files that they link to, to build/site-source, where mkdocs.yml finds them.

With --requirements it prints the requirements of the extra `docs`, for pip.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "site-source"
PAGES = ("README.md", "CHANGELOG.md", "models/README.md", "models/*/README.md", "docs/**/*.md", "docs/**/*.ipynb")
STYLE = ROOT / "docs" / "site.css"
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def linked_files(page: Path) -> set[Path]:
    """The files that a page's relative links lead to."""
    found = {(page.parent / target).resolve() for target in _LINK.findall(page.read_text())}
    return {path for path in found if path.is_file()}


def requirements() -> list[str]:
    """The requirements of the extra `docs`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]


def main() -> None:
    """Copy the pages; the target is removed first."""
    if sys.argv[1:] == ["--requirements"]:
        print(*requirements())
        return
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    files = {*pages, STYLE}.union(*(linked_files(page) for page in pages if page.suffix == ".md"))
    shutil.rmtree(TARGET, ignore_errors=True)
    for file in sorted(files):
        copy = TARGET / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)


if __name__ == "__main__":
    main()

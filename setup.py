"""Generates caffepy/formats/proto/caffe_pb2.py from proto/caffe.proto in every build; pyproject.toml has the rest.

A wheel contains the models too. With the repository's address in CAFFEPY_URL, as in releases, the metadata have links.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SCHEMA = ROOT / "proto" / "caffe.proto"
MODELS = ROOT / "models"
PACKAGE = Path("caffepy") / "formats" / "proto"
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
_RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def generate() -> None:
    """Writes the Python module and its type stub beside the package's sources, where git ignores them."""
    from grpc_tools import protoc

    # Known to protobuf by the path below caffepy, so that a caffe.proto of somebody else's can be loaded beside it.
    name = (PACKAGE / SCHEMA.name).as_posix()
    include = f"-I{PACKAGE.as_posix()}={SCHEMA.parent}"
    arguments = ["protoc", include, f"--python_out={ROOT}", f"--pyi_out={ROOT}", name]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"protoc could not compile {SCHEMA}")


def copy_models(package: Path) -> None:
    """Copies the models' texts into a package; data and weights beside them stay behind."""
    for pattern in ("README.md", "*/README.md", "*/*.prototxt"):
        for file in MODELS.glob(pattern):
            target = package / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def release_metadata(url: str) -> dict[str, object]:
    """Links for an index, which shows the README at another address; nothing without the repository's address."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    form = {"long_description_content_type": "text/markdown"}
    if not url:
        return {"long_description": readme, **form}
    found = _VERSION.search((ROOT / "caffepy" / "version.py").read_text())
    if found is None:
        raise SystemExit("caffepy/version.py has no __version__")
    files = f"{url}/blob/v{found[1]}"
    return {
        "long_description": _RELATIVE_LINK.sub(rf"]({files}/\1)", readme),
        **form,
        "url": url,
        "project_urls": {
            "Documentation": f"{files}/README.md#documents",
            "Changelog": f"{files}/CHANGELOG.md",
            "Issues": f"{url}/issues",
        },
    }


class BuildWithSchema(build_py):
    """Generates the schema's module first, and puts the commented schema and the models into the package."""

    def run(self) -> None:
        generate()
        if not self.editable_mode:
            # pip builds in the source folder: modules that were removed since would be packed again.
            shutil.rmtree(Path(self.build_lib) / "caffepy", ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copy(SCHEMA, Path(self.build_lib) / PACKAGE / SCHEMA.name)
            copy_models(Path(self.build_lib) / "caffepy")


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithSchema}, **release_metadata(os.environ.get("CAFFEPY_URL", "").rstrip("/")))

"""Generates caffepy/proto/caffe_pb2.py from proto/caffe.proto in every build; setup.cfg holds the metadata."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SCHEMA = ROOT / "proto" / "caffe.proto"
PACKAGE = Path("caffepy") / "proto"


def generate() -> None:
    """Writes the Python module and its type stub beside the package's sources, where git ignores them."""
    from grpc_tools import protoc

    # Known to protobuf as caffepy/proto/caffe.proto, so that a caffe.proto of somebody else's can be loaded beside it.
    name = (PACKAGE / SCHEMA.name).as_posix()
    include = f"-I{PACKAGE.as_posix()}={SCHEMA.parent}"
    arguments = ["protoc", include, f"--python_out={ROOT}", f"--pyi_out={ROOT}", name]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"protoc could not compile {SCHEMA}")


class BuildWithSchema(build_py):
    """Generates the schema's module first, and puts the commented schema itself into the package."""

    def run(self) -> None:
        generate()
        if not self.editable_mode:
            # pip builds in the source folder: modules that were removed since would be packed again.
            shutil.rmtree(Path(self.build_lib) / "caffepy", ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copy(SCHEMA, Path(self.build_lib) / PACKAGE / SCHEMA.name)


setup(cmdclass={"build_py": BuildWithSchema})

"""Which part may import which, and what must not be loaded until it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import caffepy

ROOT = Path(caffepy.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.name != "caffe_pb2.py")

LEVELS = {
    "errors": 0,
    "proto": 0,
    "registry": 1,
    "files": 1,
    "caches": 1,
    "report": 1,
    "awake": 1,
    "trace": 2,
    "backend": 2,
    "config": 3,
    "blob": 3,
    "fillers": 3,
    "data": 4,
    "layers": 5,
    "net": 6,
    "snapshot": 8,
    "solvers": 9,
    "parallel": 10,
    "plan": 10,
    "distributed": 11,
    "cli": 12,
    "__main__": 13,
    "__init__": 13,
}
"""Imports go from higher levels to lower ones, or stay within a part."""

CUPY = ("backend/cuda/*.py", "backend/cuda/*/*.py", "parallel/communicators/nccl*.py", "parallel/hardware/nccl_info.py")
ALLOWED = {
    "cupy": CUPY,
    "cupyx": CUPY,
    "cudnn": ("backend/cuda/convolution/cudnn*.py", "backend/cuda/device.py"),
    "mpi4py": ("parallel/communicators/mpi.py",),
    "tqdm": ("cli/*.py",),
    "matplotlib": ("plan/report.py",),
}
"""Where optional libraries may be imported at all."""

HEAVY = ("numpy", "google.protobuf", "numba", "cv2", "h5py", "lmdb", "tqdm", "mpi4py", "cupy", "matplotlib")
"""What `import caffepy` and `caffepy --help` must not load."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(module: str) -> str:
    """`net` for caffepy.net.wiring."""
    return (module.split(".") + ["__init__"])[1]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Full names of what a module imports, with lines, those for type checking only left out."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative imports hide where a name comes from"
            module = node.module or ""
            if module == "caffepy":
                yield from ((f"caffepy.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno
        todo.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_downwards_only(path: Path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own in LEVELS, f"{own} has no level yet: say in LEVELS where it stands"
    for module, line in imports_of(path):
        if not module.startswith("caffepy."):
            continue
        other = part_of(module)
        fits = other == own or LEVELS.get(other, -1) < LEVELS[own] or other.startswith("__")
        assert fits, f"{name_of(path)}:{line}: {own} must not import {module}, which stands above it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_optional_libraries_are_imported_in_their_places_only(path: Path):
    place = path.relative_to(ROOT)
    for module, line in imports_of(path):
        allowed = ALLOWED.get(module.split(".")[0])
        if allowed is not None:
            assert any(place.match(pattern) for pattern in allowed), f"{place}:{line} imports {module}"


def python(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, cwd=ROOT.parent
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import caffepy; caffepy.__version__; dir(caffepy)",
        "from caffepy.cli.main import main; assert main(['--help']) == 0",
        "from caffepy.cli.main import main; assert main(['train', '--help']) == 0",
        "from caffepy.cli.main import main; assert main(['train', '--sovler']) == 2",
    ],
    ids=["import", "help", "train help", "mistake"],
)
def test_nothing_heavy_is_loaded_before_it_is_needed(code: str):
    loaded = python(f"{code}\nimport sys; print('loaded:', *[m for m in sys.argv[1:] if m in sys.modules])", *HEAVY)
    assert loaded.splitlines()[-1].strip() == "loaded:"


def test_everything_else_imports_without_mpi_and_cuda():
    names = [
        ".".join(("caffepy", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in MODULES
        if not any(path.relative_to(ROOT).match(pattern) for pattern in (*CUPY, *ALLOWED["mpi4py"]))
        or path.relative_to(ROOT).match("cli/*.py")
    ]
    code = (
        "import importlib, sys\n"
        "for absent in ('cupy', 'cudnn', 'mpi4py'): sys.modules[absent] = None\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    python(code, *(name for name in names if not name.endswith("__main__")))


def test_the_packages_own_names_are_there():
    for name in caffepy.__all__:
        assert getattr(caffepy, name) is not None
    assert set(caffepy.__all__) <= set(dir(caffepy))
    with pytest.raises(AttributeError, match="no attribute 'Nett'"):
        _ = caffepy.Nett

"""Which module may import which, and what loads only when it is needed.

The structure itself is read by tests/support/import_graph.py, which also prints it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import import_graph
import pytest

import caffepy

ROOT = import_graph.ROOT
MODULES = import_graph.module_paths()

LEVELS = {
    "errors": 0,
    "forks": 0,
    "proto": 1.5,
    "version": 0,
    "whole_numbers": 0,
    "installation": -1,
    "registry": 1,
    "options": 1.5,
    "files": 1,
    "glog": 1,
    "progress": 2,
    "hdf5": 2,
    "caches": 1,
    "stages": 0,
    "report": 1,
    "monotonic_clock": 1,
    "model_files": 2,
    "backend": 2,
    "trace": 3,
    "config": 3,
    "blob": 3,
    "fillers": 3,
    "data": 4,
    "layers": 5,
    "snapshot": 6,
    "net": 7,
    "solvers": 9,
    "loggers": 9.5,
    "drawing": 9,
    "logs": 2,
    "predict": 11,
    "inference": 10,
    "parallel": 10,
    "plan": 10,
    "project": 10,
    "distributed": 11,
    "training": 11,
    "onnx": 9,
    "torch_export": 9.5,
    "pycaffe": 12,
    "as_caffe": 13,
    "cli": 14,
    "__main__": 15,
    "caffepy": 15,
}
"""Imports go from higher levels to lower ones, or stay within a part."""

FOLDERS = {
    "backend": (
        "backend",
        "backend.meta backend.cpu.jit",
        "backend.cpu",
        "backend.cpu.convolution",
        "backend.cpu.backend",
        "backend.cuda",
        "backend.cuda.convolution",
        "backend.cuda.backend",
        "backend.__init__",
    ),
    "data": (
        "data",
        "data.images",
        "data.transforms",
        "data.sources",
        "data.transform",
        "data.images.bulk_copy",
        "data.loader data.clips data.people data.preparation",
        "data.conversion",
    ),
    "layers": (
        "layers.core",
        "layers.input layers.activation layers.vision layers.normalization layers.loss layers.common layers.recurrent "
        "layers.python",
        "layers.detection",
        "layers.__init__",
    ),
    "net": (
        "net.splits",
        "net.precision",
        "net.wiring",
        "net.fuse",
        "net.fold",
        "net",
        "net.liveness",
        "net.memory_plan",
        "net.forward_runner",
    ),
    "onnx": (
        "onnx.libraries onnx.check onnx.fold",
        "onnx.export.graph",
        "onnx.export",
        "onnx.importer.model",
        "onnx.importer.graph",
        "onnx.importer",
        "onnx.engine",
    ),
    "torch_export": (
        "torch_export.code torch_export.check torch_export.modules",
        "torch_export",
        "torch_export.write",
    ),
    "solvers": ("solvers", "solvers.__init__"),
    "parallel": (
        "parallel.hardware parallel.launch",
        "parallel.store",
        "parallel.communicators",
        "parallel.processes",
        "parallel.control",
        "parallel",
    ),
}
"""Within a part, from the lowest: a module imports from its own entry and from those before. An entry is a folder, or
a module that does not stand where its folder does. Entries of one line are independent of each other."""

DOORS = {
    "backend.cpu": (),
    "backend.cpu.random": ("data.images",),
    "backend.cpu.jit": ("data", "layers.detection", "layers.input"),
    "backend.cuda": (),
    "backend.cuda.device": ("parallel", "distributed", "training", "cli"),
    "backend.meta": ("net", "drawing", "plan", "onnx", "cli"),
    "data.images": ("layers.input", "layers.loss", "predict", "pycaffe", "cli"),
    "data.conversion": ("project", "cli"),
    "data.sources": ("layers.input", "net", "predict", "cli"),
    "layers.activation": ("net.fuse",),
    "layers.common": ("net.fuse",),
    "layers.detection": ("onnx.export", "torch_export"),
    "layers.core": ("snapshot", "net", "solvers", "parallel", "plan", "inference", "onnx", "torch_export", "pycaffe"),
    "layers.input": ("net", "loggers", "parallel", "plan"),
    "layers.loss": (),
    "layers.recurrent": (),
    "layers.normalization": ("net.fuse", "net.fold", "parallel", "onnx", "torch_export"),
    "layers.vision": ("net.fuse", "net.fold", "onnx.export", "torch_export"),
    "parallel.communicators": ("distributed", "cli"),
    "parallel.control": ("distributed",),
    "parallel.hardware": ("cli",),
    "parallel.launch": ("distributed", "training", "cli"),
    "parallel.processes": ("distributed", "training", "cli"),
    "parallel.store": ("distributed",),
}
"""Who, outside of its part, may import a folder or module below a part's root. The roots are open to all above."""

CUPY = (
    "backend/cuda/*.py",
    "backend/cuda/*/*.py",
    "backend/cuda/*/*/*.py",
    "parallel/communicators/nccl.py",
    "parallel/hardware/nccl_info.py",
)
ALLOWED = {
    "cupy": CUPY,
    "cupyx": CUPY,
    "cudnn": ("backend/cuda/convolution/cudnn*.py", "backend/cuda/device.py"),
    "mpi4py": ("parallel/communicators/mpi.py",),
    "tqdm": ("progress.py",),
    "matplotlib": ("plan/report.py", "logs/plot.py"),
    "onnx": ("onnx/*.py", "onnx/*/*.py"),
    "torch": ("torch_export/modules.py",),
    "tensorboardX": ("loggers/tensorboard.py",),
    "wandb": ("loggers/wandb.py",),
    "mlflow": ("loggers/mlflow.py",),
    "onnxruntime": ("onnx/libraries.py", "onnx/quantize.py"),
}
"""Where optional libraries may be imported at all."""

NOT_NEEDED = ("mpi4py", "tensorboardX", "wandb", "mlflow", "torch")
"""Libraries of MPI, loggers and exports, which are imported by the modules that use them."""

HEAVY = ("numpy", "google.protobuf", "numba", "cv2", "h5py", "lmdb", "tqdm", "mpi4py", "cupy", "matplotlib", "onnx")
"""What `import caffepy` and `caffepy --help` must not load."""

PUBLIC = ("caffepy", "caffepy.distributed")
"""The packages whose names users import."""


def short(module: str) -> str:
    """Without the package's name: `net.wiring`; `caffepy` stays."""
    return module.removeprefix("caffepy.")


def part_of(module: str) -> str:
    """`net` for net.wiring."""
    return module.split(".")[0]


def narrowest(module: str, names: Iterable[str]) -> str | None:
    """Of some folders and modules the narrowest that is or holds a module."""
    return max((name for name in names if f"{module}.".startswith(f"{name}.")), key=len, default=None)


def entry(module: str) -> str:
    """The entry of FOLDERS that a module belongs to."""
    entries = " ".join(FOLDERS[part_of(module)]).split()
    found = f"{module}.__init__" if f"{module}.__init__" in entries else narrowest(module, entries)
    assert found, f"{module} stands in no folder that FOLDERS knows: say there how high it is"
    return found


def height(module: str) -> int:
    """How high a module stands within its part."""
    lines = FOLDERS[part_of(module)]
    return next(index for index, line in enumerate(lines) if entry(module) in line.split())


def is_allowed(importer: str, imported: str) -> bool:
    """Whether the tables let one module import another of the package."""
    own, other = part_of(importer), part_of(imported)
    if own != other:
        door = narrowest(imported, DOORS)
        is_open = door is None or narrowest(importer, DOORS[door]) is not None
        return LEVELS[other] < LEVELS[own] and is_open
    if own not in FOLDERS or entry(importer) == entry(imported):
        return True
    return height(imported) < height(importer)


def test_every_part_has_a_level():
    assert {part_of(short(module)) for module in MODULES} == set(LEVELS)


def test_imports_go_downwards_only():
    found = {(short(one.importer), short(one.imported)) for one in import_graph.imports()}
    assert not sorted(pair for pair in found if not is_allowed(*pair))


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("net.net", "layers.core.base", True),
        ("layers.core.base", "net.net", False),
        ("parallel.p2p_sync", "plan.model", False),
        ("backend.cpu.pooling", "backend.cpu.jit.runtime", True),
        ("backend.cpu.jit.runtime", "backend.cpu.pooling", False),
        ("backend.meta", "backend.cpu.jit.runtime", False),
        ("backend.cpu.pooling", "backend", False),
        ("backend.types", "backend", False),
        ("backend", "backend.cpu.backend", True),
        ("layers.loss.loss", "layers.vision.pooling", False),
        ("data.loader", "backend.cpu.jit.runtime", True),
        ("data.loader", "backend.cpu.dense", False),
        ("net.net", "backend.cuda.device", False),
        ("cli.net", "backend.cuda.device", True),
        ("cli.train", "parallel.store.client", False),
        ("parallel.store.client", "parallel.communicators.tcp", False),
        ("parallel.p2p_sync", "parallel.store.client", True),
    ],
)
def test_the_tables_say_what_they_are_meant_to(importer: str, imported: str, allowed: bool):
    assert is_allowed(importer, imported) is allowed


def test_no_tables_name_is_out_of_date():
    folders = {name for module in MODULES for name in (short(module), f"{short(module)}.__init__")}
    named = {name for lines in FOLDERS.values() for line in lines for name in line.split()}
    named |= {name for door, importers in DOORS.items() for name in (door, *importers)}
    assert named <= folders, named - folders


def test_there_are_no_circles():
    assert not [list(map(short, group)) for group in import_graph.circles()]


def test_no_import_is_relative():
    relative = [one for one in import_graph.all_imports() if one.imported.startswith(".")]
    assert not relative, f"relative imports hide where a name comes from: {relative}"


def test_every_folder_says_what_it_owns():
    assert not list(map(short, import_graph.without_docstring()))


def test_optional_libraries_are_imported_in_their_places_only():
    for one in import_graph.all_imports():
        allowed = ALLOWED.get(part_of(one.imported))
        if allowed is not None and not one.typing_only:
            path = MODULES[one.importer].relative_to(ROOT)
            assert any(path.match(pattern) for pattern in allowed), f"{path}:{one.line} imports {one.imported}"


def python(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT.parent
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


def test_everything_else_imports_without_mpi_cuda_and_servers():
    pytest.importorskip("onnx")
    absent = (*CUPY, *(path for name in NOT_NEEDED for path in ALLOWED[name]))
    names = [
        name
        for name, path in MODULES.items()
        if not any(path.relative_to(ROOT).match(pattern) for pattern in absent) and name != "caffepy.__main__"
    ]
    code = (
        "import importlib, sys\n"
        f"for absent in ('cupy', 'cudnn', *{NOT_NEEDED}): sys.modules[absent] = None\n"
        "for name in sys.argv[1:]: importlib.import_module(name)"
    )
    python(code, *names)


def test_the_packages_own_names_are_there():
    names: dict[str, object] = {}
    exec("from caffepy import *", names)
    assert set(caffepy.__all__) <= set(names)
    assert set(caffepy.__all__) <= set(dir(caffepy))
    with pytest.raises(AttributeError, match="no attribute 'Nett'"):
        _ = caffepy.Nett


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_what_they_are_called(package: str):
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert name in (getattr(value, "__name__", name), str(value)), f"{package}.{name} is {value}"


def test_type_checkers_see_the_public_names(tmp_path: Path):
    """The settings are the package's own, so that mypy reads what `make lint` has left in its cache."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install '.[dev]'")
    program = tmp_path / "program.py"
    lines = [
        f"from {package} import {name} as {name}"
        for package in PUBLIC
        for name in importlib.import_module(package).__all__
    ]
    program.write_text("\n".join([*lines, "reveal_type(create_solver)", "from caffepy import Nett"]))
    command = [sys.executable, "-m", "mypy", "--no-warn-unused-configs", str(program)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT.parent).stdout.splitlines()
    assert "-> caffepy.solvers.solver.Solver" in said[0], said
    assert [line for line in said if "error:" in line] == [said[1]], said
    assert 'Module "caffepy" has no attribute "Nett"' in said[1]

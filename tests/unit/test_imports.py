"""Which module may import which, and what loads only when it is needed.

The structure itself is read by tests/support/import_graph.py, which also prints it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import import_graph
import pytest

import caffepy

ROOT = import_graph.ROOT
MODULES = import_graph.module_paths()

FLOORS = (
    "version errors",
    "utils",
    "backend",
    "formats",
    "logs",
    "data",
    "layers",
    "net",
    "forks",
    "distributed",
    "export",
    "infer",
    "training",
    "scaling",
    "scaffold",
    "pycaffe",
    "as_caffe",
    "cli",
    "__main__ caffepy",
)
"""The package's first level, from the lowest floor. A module imports from its own floor and from those below."""

CLOSED = {"backend.cpu": ("data", "layers", "forks"), "backend.cuda": ("distributed", "training", "cli")}
"""Folders of a device, and the folders outside of the backend that may import from them."""

CUPY = (
    "backend/cuda/*.py",
    "backend/cuda/*/*.py",
    "backend/cuda/*/*/*.py",
    "distributed/communicators/nccl.py",
    "distributed/communicators/nvlink.py",
    "distributed/nccl_info.py",
)
LOGGERS = ("training/callbacks/loggers.py",)
ALLOWED = {
    "cupy": CUPY,
    "cupyx": CUPY,
    "cudnn": ("backend/cuda/convolution/cudnn*.py", "backend/cuda/device.py"),
    "mpi4py": ("distributed/communicators/mpi.py",),
    "tqdm": ("utils/progress.py",),
    "matplotlib": ("scaling/predict.py", "logs/plot.py"),
    "onnx": ("export/onnx/*.py", "export/onnx/*/*.py", "export/onnx_import/*.py", "infer/onnx_engine.py"),
    "torch": ("export/torch/modules.py",),
    "tensorboardX": LOGGERS,
    "wandb": LOGGERS,
    "mlflow": LOGGERS,
    "onnxruntime": ("export/onnx/libraries.py", "export/onnx/quantize.py"),
}
"""Where optional libraries may be imported at all."""

NOT_NEEDED = ("mpi4py", "torch")
"""Libraries that the modules of their table import when they are imported themselves."""
SERVERS = ("tensorboardX", "wandb", "mlflow")
"""Libraries of loggers, which a logger imports when it is made."""

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


def is_within(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{folder}.")


def floor(module: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if part_of(module) in names.split())


def is_allowed(importer: str, imported: str) -> bool:
    """Whether the tables let one module import another of the package."""
    for closed, importers in CLOSED.items():
        if is_within(imported, closed) and part_of(importer) not in ("backend", *importers):
            return False
    return floor(imported) <= floor(importer) and {part_of(importer), part_of(imported)} != {"version", "errors"}


def test_every_part_has_a_floor():
    assert {part_of(short(module)) for module in MODULES} == set(" ".join(FLOORS).split())


def test_imports_go_downwards_only():
    found = {(short(one.importer), short(one.imported)) for one in import_graph.imports()}
    assert not sorted(pair for pair in found if not is_allowed(*pair))


def test_the_two_devices_do_not_know_each_other():
    for one in import_graph.imports():
        devices = {
            device
            for device in ("cpu", "cuda")
            for module in (one.importer, one.imported)
            if is_within(short(module), f"backend.{device}")
        }
        assert len(devices) < 2, f"{one.importer} imports {one.imported}"


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("net.net", "layers.layer", True),
        ("layers.layer", "net.net", False),
        ("net.net", "forks.yolo.boxes", False),
        ("forks.yolo.boxes", "layers.layer", True),
        ("distributed.consistency", "training.solver", False),
        ("training.p2p_sync", "distributed.consistency", True),
        ("data.loader", "backend.cpu.jit.kernel", True),
        ("net.net", "backend.cuda.device", False),
        ("training.devices", "backend.cuda.device", True),
        ("formats.caffemodel", "layers.layer", False),
    ],
)
def test_the_tables_say_what_they_are_meant_to(importer: str, imported: str, allowed: bool):
    assert is_allowed(importer, imported) is allowed


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
        f"for absent in ('cupy', 'cudnn', *{NOT_NEEDED + SERVERS}): sys.modules[absent] = None\n"
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
    assert "-> caffepy.training.solver.Solver" in said[0], said
    assert [line for line in said if "error:" in line] == [said[1]], said
    assert 'Module "caffepy" has no attribute "Nett"' in said[1]

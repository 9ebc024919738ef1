"""What `make demo` would do to a clone in each state, and what an installation may bring with it."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLAIN, EDITABLE = "pip install --quiet --no-compile '.[mpi]'", "pip install --quiet --editable '.[mpi,test,dev]'"
DIGITS, TRAIN = "caffepy data mnist --subset --to models/lenet", "mpirun -np 2 caffepy train"
LMDBS = [f"models/lenet/mnist_{part}_lmdb/data.mdb" for part in ("train", "test")]
HOUR = 3600


def set_age(paths: Iterable[Path], hours: float) -> None:
    then = time.time() - hours * HOUR
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
        os.utime(path, (then, then))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of ten hours ago in which nothing is installed but pip."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml", "proto"):
        source = REPOSITORY / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    for name in ("__init__.py", "backend/cuda/kernels/add_n.cu", "net/net.py"):
        (tmp_path / "caffepy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "caffepy" / name).touch()
    set_age([*tmp_path.rglob("*"), tmp_path / ".venv" / "bin" / "pip"], 10)
    return tmp_path


def done(clone: Path, *, demo: float = 0, test: float = 0, digits: float = 0) -> None:
    """So many hours ago each of these was made; 0 is never."""
    stamps = {"demo": demo, "test": test}
    set_age([clone / ".venv" / f"{name}.stamp" for name, hours in stamps.items() if hours], max(demo, test))
    if digits:
        set_age([clone / path for path in LMDBS], digits)


def plan(clone: Path, target: str = "demo") -> list[str]:
    """What make would do, in order."""
    result = subprocess.run(["make", "-n", target], cwd=clone, capture_output=True, text=True, timeout=300, check=True)
    steps = [step for line in result.stdout.splitlines() for step in (PLAIN, EDITABLE, DIGITS, TRAIN) if step in line]
    return list(dict.fromkeys(steps))


def test_the_first_time_everything_is_made(clone: Path):
    assert plan(clone) == [PLAIN, DIGITS, TRAIN]


def test_the_second_time_nothing_but_training_is_left(clone: Path):
    done(clone, demo=5, digits=4)
    assert plan(clone) == [TRAIN]


def test_digits_that_users_made_are_taken(clone: Path):
    done(clone, digits=9)
    assert plan(clone) == [PLAIN, TRAIN]


@pytest.mark.parametrize("missing", LMDBS)
def test_a_missing_lmdb_is_made(clone: Path, missing: str):
    done(clone, demo=5, digits=4)
    (clone / missing).unlink()
    assert plan(clone) == [DIGITS, TRAIN]


@pytest.mark.parametrize(
    "changed", ["setup.cfg", "proto/caffe.proto", "caffepy/net/net.py", "caffepy/backend/cuda/kernels/add_n.cu"]
)
def test_what_git_pull_changed_is_installed_and_the_digits_stay(clone: Path, changed: str):
    done(clone, demo=5, digits=4)
    set_age([clone / changed], 1)
    assert plan(clone) == [PLAIN, TRAIN]


def test_a_file_that_git_pull_removed_is_removed_from_the_installation(clone: Path):
    done(clone, demo=5, digits=4)
    (clone / "caffepy" / "net" / "net.py").unlink()
    assert plan(clone) == [PLAIN, TRAIN]


def test_after_make_test_the_demonstration_uses_the_editable_installation(clone: Path):
    done(clone, demo=5, test=5, digits=4)
    set_age([clone / "caffepy" / "net" / "net.py"], 1)
    guarded = subprocess.run(["make", "-n", "demo"], cwd=clone, capture_output=True, text=True, timeout=300, check=True)
    assert "if [ ! -e .venv/test.stamp ]; then" in guarded.stdout
    set_age([clone / "setup.cfg"], 1)
    assert plan(clone)[0] == EDITABLE


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_cudnn_frontend_brings_no_compilers_with_it(extra: str):
    """1.29.1 takes cutlass-dsl, tvm-ffi and CUDA 13's bindings along, whatever CUDA it is installed for."""
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    wanted = settings["options.extras_require"][extra].split()
    assert [line for line in wanted if "frontend" in line] == ["nvidia-cudnn-frontend>=1.18,<1.29"]
    assert all(extra.removeprefix("cuda") in line or "frontend" in line for line in wanted)


def test_every_file_of_the_package_is_installed():
    """Kernels, digits and py.typed, without which type checkers do not look into the package."""
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    files = (path for path in (REPOSITORY / "caffepy").rglob("*") if path.is_file())
    wanted = {
        str(path.relative_to(REPOSITORY)) for path in files if path.suffix != ".py" and "__pycache__" not in path.parts
    }
    installed = {
        str(path.relative_to(REPOSITORY))
        for package, patterns in settings["options.package_data"].items()
        for pattern in patterns.split()
        for path in (REPOSITORY / package.replace(".", "/")).glob(pattern)
    }
    assert "caffepy/py.typed" in installed
    assert wanted <= installed, wanted - installed

"""What `make demo` would do to a clone in each state, and what an installation, an sdist and a wheel contain."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from caffepy.cli.launch import LaunchCommand
from caffepy.cli.main import parse
from caffepy.cli.options import normalise
from caffepy.cli.train import TrainCommand

REPOSITORY = Path(__file__).resolve().parents[3]
PLAIN, EDITABLE = "pip install --quiet --no-compile '.[mpi]'", "pip install --quiet --editable '.[mpi,test,dev]'"
DIGITS, TRAIN = "caffepy data mnist --subset --to models/lenet", "mpirun -np 2 caffepy train"
LMDBS = [f"models/lenet/mnist_{part}_lmdb/data.mdb" for part in ("train", "test")]
HOUR = 3600
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = SETTINGS["project"]["optional-dependencies"]


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
    for name in ("Makefile", "setup.py", "pyproject.toml", "proto"):
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


def test_what_is_not_there_is_made_and_digits_that_users_made_are_taken(clone: Path):
    assert plan(clone) == [PLAIN, DIGITS, TRAIN]
    done(clone, digits=9)
    assert plan(clone) == [PLAIN, TRAIN]
    done(clone, demo=5, digits=4)
    assert plan(clone) == [TRAIN]


CHANGED = ["pyproject.toml", "proto/caffe.proto", "caffepy/net/net.py", "caffepy/backend/cuda/kernels/add_n.cu"]


@pytest.mark.parametrize(
    ("changed", "removed", "steps"),
    [
        *((path, "", [PLAIN, TRAIN]) for path in CHANGED),  # by git pull; the digits stay
        ("", "caffepy/net/net.py", [PLAIN, TRAIN]),
        *(("", path, [DIGITS, TRAIN]) for path in LMDBS),
    ],
)
def test_what_changed_since_is_made_again(clone: Path, changed: str, removed: str, steps: list[str]):
    done(clone, demo=5, digits=4)
    if changed:
        set_age([clone / changed], 1)
    if removed:
        (clone / removed).unlink()
    assert plan(clone) == steps


def test_after_make_test_the_demonstration_uses_the_editable_installation(clone: Path):
    done(clone, demo=5, test=5, digits=4)
    set_age([clone / "caffepy" / "net" / "net.py"], 1)
    guarded = subprocess.run(["make", "-n", "demo"], cwd=clone, capture_output=True, text=True, timeout=300, check=True)
    assert "if [ ! -e .venv/test.stamp ]; then" in guarded.stdout
    set_age([clone / "pyproject.toml"], 1)
    assert plan(clone)[0] == EDITABLE


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_cudnn_frontend_brings_no_compilers_with_it(extra: str):
    """1.29.1 takes cutlass-dsl, tvm-ffi and CUDA 13's bindings along, whatever CUDA it is installed for."""
    wanted = EXTRAS[extra]
    assert [line for line in wanted if "frontend" in line] == ["nvidia-cudnn-frontend>=1.18,<1.29"]
    assert all(extra.removeprefix("cuda") in line or "frontend" in line for line in wanted)


def test_the_page_on_installing_names_each_extra():
    page = (REPOSITORY / "docs" / "how-to" / "install.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(EXTRAS) - {"docs", "test", "dev"}


def test_every_file_of_the_package_is_installed():
    """Kernels, digits and py.typed, without which type checkers do not look into the package."""
    files = (path for path in (REPOSITORY / "caffepy").rglob("*") if path.is_file())
    wanted = {
        str(path.relative_to(REPOSITORY)) for path in files if path.suffix != ".py" and "__pycache__" not in path.parts
    }
    installed = {
        str(path.relative_to(REPOSITORY))
        for package, patterns in SETTINGS["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (REPOSITORY / package.replace(".", "/")).glob(pattern)
    }
    assert "caffepy/py.typed" in installed
    assert wanted <= installed, wanted - installed


_EDITABLE_PATHS = """
from setuptools import Distribution
from setuptools.command.editable_wheel import editable_wheel

distribution = Distribution({"script_name": "setup.py", "long_description": "of setup.py"})
distribution.parse_config_files()
command = editable_wheel(distribution)
command.ensure_finalized()
print(*(path.resolve() for path in command._select_strategy("caffepy", "none", "build").path_entries))
"""
"""Prints what the .pth file of an editable installation adds to sys.path; an import hook has no `path_entries`."""


def test_python_beside_an_editable_clone_finds_the_package(tmp_path: Path):
    """Not the clone's folder, which has the package's name and is a namespace package to Python."""
    pytest.importorskip("setuptools.command.editable_wheel", reason="a build brings setuptools itself")
    clone = tmp_path / "caffepy"
    (clone / "caffepy").mkdir(parents=True)
    (clone / "caffepy" / "__init__.py").write_text("name = 'the package'")
    shutil.copy(REPOSITORY / "caffepy" / "version.py", clone / "caffepy" / "version.py")
    # This environment's setuptools may be older than that of builds, and then refuses the form of the licence.
    settings = re.sub(r"(?m)^license.*\n", "", (REPOSITORY / "pyproject.toml").read_text())
    (clone / "pyproject.toml").write_text(settings)

    def python(*arguments: str, folder: Path) -> str:
        done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "clone.pth").write_text(python("-c", _EDITABLE_PATHS, folder=clone))
    seen = "import site; site.addsitedir('site'); import caffepy; print(caffepy.name)"
    assert python("-S", "-c", seen, folder=tmp_path) == "the package"  # -S: without this environment's own caffepy


@pytest.fixture
def packaging(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module setup.py; setuptools, which it imports, belongs to the build and need not be installed."""
    for name, member in (
        ("setuptools", "setup"),
        ("setuptools.command", "none"),
        ("setuptools.command.build_py", "build_py"),
    ):
        module = ModuleType(name)
        setattr(module, member, object)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("packaging_of_caffepy", REPOSITORY / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_a_wheel_contains_the_models_texts(packaging: ModuleType, tmp_path: Path):
    packaging.copy_models(tmp_path)
    copied = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    models = {*(REPOSITORY / "models").rglob("*.prototxt"), *(REPOSITORY / "models").rglob("README.md")}
    assert copied == {str(path.relative_to(REPOSITORY)) for path in models}
    assert "models/lenet/solver.prototxt" in copied


def test_a_release_has_links(packaging: ModuleType):
    found = packaging.release_metadata("https://example.org/owner/name")
    text = found["long_description"]
    assert found["url"] == "https://example.org/owner/name"
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    assert all(link.startswith("https://") for link in links)
    assert re.search(r"\(https://example.org/owner/name/blob/v[\d.]+/docs/how-to/install.md\)", text)


def test_a_build_without_an_address_has_no_links(packaging: ModuleType):
    text = (REPOSITORY / "README.md").read_text()
    wanted = {"long_description": text, "long_description_content_type": "text/markdown"}
    assert packaging.release_metadata("") == wanted


def in_sdist(path: str, rules: list[list[str]]) -> bool:
    """Whether MANIFEST.in includes a file; the last rule that concerns it decides."""
    included = path in ("setup.py", "pyproject.toml", "MANIFEST.in")

    def named(patterns: list[str], text: str) -> bool:
        return any(fnmatch.fnmatch(text, pattern) for pattern in patterns)

    for command, first, *others in rules:
        name, below = Path(path).name, path.startswith(f"{first}/")
        if command == "graft":
            included |= below
        elif command == "recursive-include":
            included |= below and named(others, name)
        elif command == "include":
            included |= path == name and named([first, *others], name)
        elif named([first, *others], name if command == "global-exclude" else path):
            included = False
    return included


def test_an_sdist_contains_what_a_clone_contains():
    """Tests, documents, models, benchmarks and examples too; `.github` is for the repository's host."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("this is no clone")
    lines = (REPOSITORY / "MANIFEST.in").read_text().splitlines()
    rules = [line.split() for line in lines if line and not line.startswith("#")]
    assert {rule[0] for rule in rules} <= {"graft", "include", "recursive-include", "exclude", "global-exclude"}
    missing = [path for path in listed.stdout.splitlines() if not in_sdist(path, rules)]
    assert [path for path in missing if not path.startswith(".github/")] == []
    assert not in_sdist("caffepy/formats/proto/caffe_pb2.py", rules)
    assert not in_sdist("models/lenet/mnist_train_lmdb/data.mdb", rules)


def commands_of_examples() -> list[str]:
    """caffepy's command lines in examples/ and in the Dockerfile's first comment."""
    batch = (REPOSITORY / "examples" / "slurm" / "train.sbatch").read_text()
    job = (REPOSITORY / "examples" / "kubernetes" / "mpijob.yaml").read_text()
    (command,) = re.findall(r"^exec (caffepy .*)$", batch, re.MULTILINE)
    (first,), (rest,) = (re.findall(rf"^ +{key}: \[(.*)\]$", job, re.MULTILINE)[:1] for key in ("command", "args"))
    return [command.replace("${1:-solver.prototxt}", "solver.prototxt"), f"{first}, {rest}".replace(",", "")]


@pytest.mark.parametrize("command", commands_of_examples(), ids=["Slurm", "Kubernetes"])
def test_commands_of_the_examples_are_understood(command: str):
    arguments = normalise(shlex.split(command)[1:])
    assert isinstance(parse(arguments), LaunchCommand)
    training = arguments[arguments.index("--") + 1 :]
    assert isinstance(parse(training), TrainCommand)


def test_the_dockerfile_has_a_target_for_each_kind_of_machine():
    text = (REPOSITORY / "Dockerfile").read_text()
    extras = {name for found in re.findall(r"\.whl\)\[([\w,]+)\]", text) for name in found.split(",")}
    assert extras <= set(EXTRAS)
    assert {"cpu", "cuda12", "cuda13"} <= set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    needed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in needed)
    assert {"caffepy", "models", "proto", "setup.py", "pyproject.toml", "README.md", "LICENSE"} == needed


def test_the_devcontainer_is_json():
    settings = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text())
    assert settings["postCreateCommand"] == "make .venv/test.stamp"

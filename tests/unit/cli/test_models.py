"""`caffepy models`: the list is that of models/README.md, and a copied model trains from every folder."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
from small_models import MODELS

from caffepy.cli.main import main
from caffepy.errors import InternalError
from caffepy.scaffold import model_files

FOLDERS = {path.parent.name for path in MODELS.glob("*/README.md")}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["models", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_list_has_each_folder(capsys: pytest.CaptureFixture[str]):
    status, listed, _ = run(capsys, "list")
    assert status == 0
    assert {line.split()[0] for line in listed.splitlines()} == FOLDERS
    assert "lenet              LeNet, 431,080 weights; MNIST" in listed


def test_a_copy_has_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    status, printed, _ = run(capsys, "copy", "cifar10", "lenet")
    assert status == 0
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    assert files == sorted(map(Path, printed.split()))
    for path in files:
        assert filecmp.cmp(path, MODELS.parent / path, shallow=False), path
    assert {"README.md", "solver.prototxt", "train_test.prototxt", "deploy.prototxt"} <= {path.name for path in files}
    assert run(capsys, "copy", "lenet")[0] == 0


def test_changed_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    run(capsys, "copy", "lenet")
    solver = Path("models/lenet/solver.prototxt")
    original = solver.read_text()
    solver.write_text("changed")
    status, _, error = run(capsys, "copy", "lenet")
    assert status == 2
    assert f"{solver} exists with other contents" in error and "--overwrite" in error
    assert solver.read_text() == "changed"
    assert run(capsys, "copy", "lenet", "--overwrite")[0] == 0
    assert solver.read_text() == original


@pytest.mark.parametrize("folder", ["models/lenet", "."])
def test_a_copy_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "copy", "lenet", "--to", "my nets")[0] == 0
    lenet = tmp_path / "my nets" / "lenet"
    assert main(["data", "mnist", "--subset", "--to", str(lenet)]) == 0
    solver = lenet / "solver.prototxt"
    solver.write_text(
        solver.read_text().replace("max_iter: 600", "max_iter: 2").replace("test_iter: 15", "test_iter: 1")
    )
    working = tmp_path / folder
    working.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(working)
    assert main(["train", "--solver", str(solver), "--cpu"]) == 0
    assert (lenet / "lenet_iter_2.caffemodel").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copy", "lennet"], "there is no model 'lennet'; did you mean 'lenet'?"),
        (["copy"], "name a model"),
        (["list", "lenet"], "'caffepy models copy lenet'"),
        (["copy", "lenet", "--to", "file"], "file/lenet: cannot be made: Not a directory"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    status, _, error = run(capsys, *arguments)
    assert status == 2
    assert message in error


def test_the_package_s_models_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a wheel."""
    package = tmp_path / "caffepy"
    monkeypatch.setattr(model_files, "__file__", str(package / "scaffold" / "model_files.py"))
    with pytest.raises(InternalError, match="has no models"):
        model_files.models_folder()
    for folder in (tmp_path, package):
        (folder / "models").mkdir(parents=True)
        (folder / "models" / "README.md").touch()
        assert model_files.models_folder() == folder / "models"

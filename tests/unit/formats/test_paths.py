from __future__ import annotations

import logging
from pathlib import Path

import pytest

from caffepy.formats.paths import PathResolver, is_folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_the_working_directory_comes_first(folders: Path) -> None:
    (folders / "work" / "list.txt").touch()
    (folders / "model" / "list.txt").touch()
    assert PathResolver(folders / "model" / "net.prototxt")("list.txt") == Path("list.txt")


def test_the_prototxt_s_folder_comes_next_and_is_logged_once(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folders / "model" / "list.txt").touch()
    resolve = PathResolver(folders / "model" / "net.prototxt")
    with caplog.at_level(logging.INFO, "caffepy"):
        assert resolve("list.txt") == folders / "model" / "list.txt"
        assert resolve("list.txt") == folders / "model" / "list.txt"
    assert [record.getMessage() for record in caplog.records] == [
        f"'list.txt' is not in the working directory; using {folders}/model/list.txt, beside the prototxt"
    ]


@pytest.mark.parametrize("prototxt", [None, Path("model/net.prototxt")])
def test_what_is_nowhere_is_left_to_the_opener(folders: Path, prototxt: Path | None) -> None:
    assert PathResolver(prototxt)("absent") == Path("absent")


def test_absolute_paths_stay(folders: Path) -> None:
    assert PathResolver(folders / "model" / "n")("/absent/list.txt") == Path("/absent/list.txt")


def test_files_are_written_from_the_working_directory(folders: Path) -> None:
    (folders / "model" / "snap").touch()
    assert PathResolver(folders / "model" / "net.prototxt").output("snap") == Path("snap")


@pytest.mark.parametrize("working", ["model", "work", "."])
def test_paths_of_caffe_s_folder_work_from_every_folder(
    folders: Path, monkeypatch: pytest.MonkeyPatch, working: str
) -> None:
    """They begin with the folder of the prototxt, which is there from Caffe's folder only."""
    monkeypatch.chdir(folders / working)
    (folders / "model" / "net.prototxt").touch()
    resolve = PathResolver(Path("solver.prototxt") if working == "model" else folders / "model" / "solver.prototxt")
    assert resolve("model/net.prototxt").resolve() == folders / "model" / "net.prototxt"
    assert resolve.output("model/snap").resolve() == folders / "model" / "snap"


def test_other_folders_are_not_left_out(folders: Path) -> None:
    (folders / "model" / "net.prototxt").touch()
    resolve = PathResolver(folders / "model" / "solver.prototxt")
    for name in ("other/net.prototxt", "model/other/net.prototxt", "../model/net.prototxt/x"):
        assert resolve(name) == Path(name)
    assert resolve.output("absent/snap") == Path("absent/snap")


@pytest.mark.parametrize("written", ["a\0b", "x" * 5000, "~nobody-of-that-name/x", "\udcff"])
def test_resolving_what_is_no_path_raises_nothing(tmp_path: Path, written: str) -> None:
    resolve = PathResolver(tmp_path / "s.prototxt")
    assert resolve(written) == Path(written)
    assert not is_folder(written)
    assert resolve.output(written) == Path(written)

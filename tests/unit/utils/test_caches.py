"""Where caches live, and which of them are removed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from caffepy.utils import caches
from caffepy.utils.caches import UNUSED_DAYS, cache_folder, version_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """caffepy's cache folder; it does not exist yet."""
    monkeypatch.setattr(caches, "cache_folder", lambda: tmp_path / "cache" / "caffepy")
    version_folder.cache_clear()
    return tmp_path / "cache" / "caffepy"


def unused_for(days: float, path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "kernel.nbc").write_text("old")
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))
    return path


def test_the_folder_is_the_users():
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/caffepy")
    assert cache_folder({}) == Path.home() / ".cache" / "caffepy"
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "caffepy"


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder({}) is None
    monkeypatch.setattr(caches, "cache_folder", lambda: None)
    version_folder.cache_clear()
    assert version_folder("kernels", "1") is None


def test_a_versions_folder_is_made_for_its_user_alone(folder: Path):
    made = version_folder("kernels", "1")
    assert made == folder / "kernels-1"
    assert made.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_that_nobody_used_for_long_are_removed_when_a_new_one_is_made(folder: Path):
    old = unused_for(UNUSED_DAYS + 1, folder / "kernels-1")
    recent = unused_for(UNUSED_DAYS - 1, folder / "kernels-2")
    other = unused_for(UNUSED_DAYS + 1, folder / "something-1")
    assert version_folder("kernels", "3") == folder / "kernels-3"
    assert not old.exists()
    assert recent.exists()
    assert other.exists()


def test_a_process_marks_its_folder_as_used(folder: Path):
    mine = unused_for(UNUSED_DAYS + 1, folder / "kernels-1")
    other = unused_for(UNUSED_DAYS + 1, folder / "kernels-2")
    assert version_folder("kernels", "1") == mine
    assert time.time() - mine.stat().st_mtime < 3600
    assert other.exists(), "nothing is removed where nothing is made"
    version_folder.cache_clear()
    version_folder("kernels", "3")
    assert mine.exists()
    assert not other.exists()


@pytest.mark.parametrize("wrong", ["cache", "cache/caffepy", "cache/caffepy/kernels-1"])
def test_a_file_in_the_way_means_no_folder(folder: Path, wrong: str):
    path = folder.parents[1] / wrong
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way")
    assert version_folder("kernels", "1") is None


@pytest.mark.parametrize("whose", ["caffepy", "caffepy/kernels-1"])
def test_what_everybody_could_have_written_is_not_run(folder: Path, whose: str, caplog: pytest.LogCaptureFixture):
    version_folder("kernels", "1")
    version_folder.cache_clear()
    (folder.parent / whose).chmod(0o777)
    assert version_folder("kernels", "1") is None
    assert f"{folder.parent / whose} can be written by other users" in caplog.text
    assert "set XDG_CACHE_HOME to a folder of your own" in caplog.text


def test_another_users_folder_is_not_ones_own():
    status = os.stat_result((0o700, 0, 0, 1, 1234, 0, 0, 0, 0, 0))
    assert caches.is_own(status, 1234)
    assert not caches.is_own(status, 1235)
    assert not caches.is_own(status, 0)
    assert caches.is_own(os.stat_result((0o755, 0, 0, 1, 0, 0, 0, 0, 0, 0)), 1235), "root may write everywhere anyway"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_another_users_folder_is_not_read(folder: Path):
    version_folder("kernels", "1")
    version_folder.cache_clear()
    os.chown(folder, 1234, -1)
    assert version_folder("kernels", "1") is None

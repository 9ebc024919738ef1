"""Files that are written appear complete or not at all, whatever lies in their folder."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from caffepy.errors import RunError, UserError
from caffepy.utils.files import atomic_write, check_writable, read_private, remove_leftovers


def write(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_that_cannot_be_synced_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match="a: cannot be written: Input/output error"):
        write(tmp_path / "a", b"x")
    assert names(tmp_path) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "a") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


@pytest.mark.parametrize("path", [Path(), Path("/")])
def test_a_path_that_names_no_file(path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written: Is a directory; name a file"):
        write(path, b"x")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="b/a: cannot be written: No such file or directory; make its folder first$"):
        write(tmp_path / "b" / "a", b"x")


def test_the_caller_says_what_a_failure_leaves_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    message = "a: cannot be written: Is a directory; older files are as they were; name a file$"
    with pytest.raises(RunError, match=message), atomic_write(tmp_path / "a", "older files are as they were"):
        ...
    assert names(tmp_path) == ["a"]


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").write_bytes(b"old")
    for name, message in (
        ("folder", "Is a directory; name a file$"),
        ("x/a", "No such file .*; make its folder first$"),
    ):
        with pytest.raises(RunError, match=message):
            check_writable(tmp_path / name)
    check_writable(tmp_path / "old")
    check_writable(tmp_path / "new")
    assert names(tmp_path) == ["folder", "old"]


def test_the_next_write_removes_what_a_killed_process_has_left_of_this_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        left = tmp_path / f".{name}.{'e' * 16}.tmp"
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
    write(tmp_path / "a", b"whole")
    assert names(tmp_path) == [f".b.{'e' * 16}.tmp", "a"]


def test_a_link_at_its_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the name of before, which the process's number gave away, nor at one that was guessed."""
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / f".a.{os.getpid()}.tmp").symlink_to("victim")
    write(tmp_path / "a", b"new")
    assert not (tmp_path / "a").is_symlink()
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    (tmp_path / f".b.{'0' * 16}.tmp").symlink_to("victim")
    with pytest.raises(RunError, match="b: cannot be written: File exists"):
        write(tmp_path / "b", b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / f".b.{'0' * 16}.tmp").is_symlink(), "what is another's is not removed"


def test_the_mode_is_the_umasks(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


KILLED = """
import os, sys
from pathlib import Path
from caffepy.utils.files import atomic_write
with atomic_write(Path(sys.argv[1])) as file:
    print("writing", flush=True)
    sys.stdin.read()
    os._exit(9)
"""


def test_leftovers_of_killed_processes_alone_are_removed(tmp_path: Path) -> None:
    """A running process holds its file's lock, however old the file is."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "x")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (left,) = tmp_path.iterdir()
        assert remove_leftovers(tmp_path, lambda name: True) == [], "younger than this process"
        os.utime(left, (0, 0))
        assert remove_leftovers(tmp_path, lambda name: True) == [], "still being written"
        process.communicate(timeout=300)
    assert process.returncode == 9
    assert remove_leftovers(tmp_path, lambda name: name == "y") == []
    os.utime(left, (time.time() + 100,) * 2)
    assert remove_leftovers(tmp_path, lambda name: name == "x") == [], "younger than this process"
    os.utime(left, (0, 0))
    assert remove_leftovers(tmp_path, lambda name: name == "x") == [left]
    assert names(tmp_path) == []


def test_what_is_no_leftover_stays(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / f".x.{'a' * 16}.tmp").symlink_to("victim")
    (tmp_path / f".x.{'b' * 16}.tmp").mkdir()
    os.mkfifo(tmp_path / f".x.{'c' * 16}.tmp")
    for name in (".x.123.tmp", f"x.{'d' * 16}.tmp", ".x.tmp"):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, 0))
    before = names(tmp_path)
    assert remove_leftovers(tmp_path, lambda name: True) == []
    assert names(tmp_path) == before


def test_a_private_file_is_this_users_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "meet"
    path.write_bytes(b"abc")
    path.chmod(0o600)
    assert read_private(path, 3) == b"abc"
    with pytest.raises(OSError, match="has 3 bytes, more than the 2 that are read"):
        read_private(path, 2)
    path.chmod(0o640)
    with pytest.raises(UserError, match="has the mode 640: it must be user .* and have the mode 600"):
        read_private(path, 3)
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UserError, match="meet belongs to user .*; name another path"):
        read_private(path, 3)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo"):
        with pytest.raises(UserError, match=f"{name} is a link, a folder or a device"):
            read_private(tmp_path / name, 3)

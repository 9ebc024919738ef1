from __future__ import annotations

from pathlib import Path

import pytest

from caffepy.distributed.launch.launchers import Host, parse_hosts, read_hostfile
from caffepy.errors import ConfigError


def read(tmp_path: Path, text: str) -> list[Host]:
    path = tmp_path / "hosts"
    path.write_text(text)
    return read_hostfile(path)


def test_every_mpis_way_of_writing_is_read(tmp_path: Path) -> None:
    text = """
    # the first rack
    node-1 slots=4
    node-2.site:8          # MPICH
    10.0.0.3 slots = 2 max_slots=4
    user@node4
    """
    assert read(tmp_path, text) == [
        Host("node-1", 4), Host("node-2.site", 8), Host("10.0.0.3", 2), Host("user@node4", None)
    ]  # fmt: skip


def test_a_host_named_again_has_the_slots_of_all_its_lines(tmp_path: Path) -> None:
    assert read(tmp_path, "a\na\nb slots=3\na\nb\n") == [Host("a", 3), Host("b", 4)]


@pytest.mark.parametrize("line", ["a b", "a slots=", "a slots=x", "a:", ":4", "a:4 slots=4"])
def test_a_line_that_means_nothing_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"hosts:2: '{line}' is no host; write host, 'host slots=4' or host:4"):
        read(tmp_path, f"# hosts\n{line}\n")


def test_no_slots_no_hosts_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts:1: host 'a' has 0 slots; leave it out"):
        read(tmp_path, "a slots=0\n")
    with pytest.raises(ConfigError, match="names no host"):
        read(tmp_path, "\n# nothing\n")
    with pytest.raises(ConfigError, match="absent: cannot be read: No such file"):
        read_hostfile(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary: cannot be read: it is not text"):
        read_hostfile(tmp_path / "binary")


def test_lists_of_hosts() -> None:
    assert parse_hosts(["a", "b:4"]) == [Host("a"), Host("b", 4)]
    with pytest.raises(ConfigError, match="--hosts: 'a b' is no host"):
        parse_hosts(["a b"])

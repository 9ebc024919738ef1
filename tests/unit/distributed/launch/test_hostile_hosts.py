"""Hostfiles and Slurm variables from strangers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caffepy.distributed.launch.launchers import find_allocation, parse_hosts, read_hostfile
from caffepy.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("h slots=" + "9" * 4301, "hosts:1: host 'h' has 9+ slots; at most 1048576 are possible"),
        ("h:1048577", "hosts:1: host 'h' has 1048577 slots; at most 1048576 are possible"),
        ("-x slots=2", "hosts:1: '-x slots=2' begins with a dash"),
    ],
)
def test_lines_that_no_launcher_stands(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "hosts").write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(tmp_path / "hosts")


def test_a_host_of_the_command_line_that_is_an_option() -> None:
    with pytest.raises(ConfigError, match="--hosts: '-mca' begins with a dash"):
        parse_hosts(["-mca"])


def test_a_hostfile_that_is_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(ConfigError, match="cannot be read: it is a FIFO, not a regular file"):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_NUM_NODES": "many"}, "SLURM_JOB_NUM_NODES: 'many' is not a number from 1"),
        ({"SLURM_JOB_NUM_NODES": "9" * 4301}, "SLURM_JOB_NUM_NODES: '9+' is not a number from 1"),
        ({"SLURM_NTASKS_PER_NODE": "2(x99999999)"}, "speaks of more than|is not a number"),
        ({"SLURM_NTASKS_PER_NODE": "2(x1000000),2(x1000000)"}, "speaks of more than 1048576 hosts"),
        ({"SLURM_JOB_CPUS_PER_NODE": "4 oxen"}, r"SLURM_JOB_CPUS_PER_NODE=4 oxen: is no list such as 4\(x2\),2"),
        ({"SLURM_CPUS_PER_TASK": "²"}, "SLURM_CPUS_PER_TASK: '²' is not a number from 1"),
    ],
)
def test_slurm_variables_that_make_no_sense(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        find_allocation({"SLURM_JOB_ID": "1", "PATH": str(tmp_path), **variables})

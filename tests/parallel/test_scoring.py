"""`caffepy test` on several devices and ranks logs the lines of one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import find_mpirun, program_environment
from scoring_case import COMMAND, scored, write_net
from subprocess_training import RANKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoring")
    write_net(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    lines = scored(folder)
    batches = [line for line in lines if line.startswith("Batch ") and ", accuracy = " in line]
    assert len(batches) == 7 and len({line.split(" = ")[1] for line in batches}) > 1
    assert len([line for line in lines if line.startswith("class AP ")]) == 3
    return lines


@pytest.mark.parametrize("devices", [2, 9])
def test_threads_score_as_one_device(folder: Path, expected: list[str], devices: int) -> None:
    assert scored(folder, "--cpu-solvers", str(devices)) == expected


def test_mpi_ranks_score_as_one_device(folder: Path, expected: list[str]) -> None:
    find_mpirun()
    assert scored(folder, "--cpu-solvers", "2", launcher=(find_mpirun(), "-np", "2")) == expected


def test_ranks_without_mpi_score_as_one_device(folder: Path, expected: list[str]) -> None:
    assert scored(folder, launcher=(sys.executable, str(RANKS), "2")) == expected


def test_test_detection_prints_mean_average_precision(folder: Path, expected: list[str]) -> None:
    lines = scored(folder, "--model", "boxes.prototxt", "--noshow_per_class_result", command="test_detection")
    assert [line for line in lines if "mAP" in line] == [line for line in expected if "mAP" in line]
    assert not any(line.startswith("class AP") for line in lines)


def test_test_detection_refuses_other_outputs(folder: Path) -> None:
    words = [sys.executable, "-m", "caffepy", "test_detection", *COMMAND, "--cpu-solvers", "2"]
    done = subprocess.run(words, cwd=folder, env=program_environment({}), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "output 'accuracy' is made by layer 'accuracy'" in done.stderr

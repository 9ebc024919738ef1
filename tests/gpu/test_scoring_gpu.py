"""`caffepy test` on GPUs: the scores of the CPU, and on several GPUs the lines of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from scoring_case import scored, write_net


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scoring")
    write_net(folder)
    return folder


def test_a_gpu_scores_as_the_cpu(folder: Path) -> None:
    on_cpu, on_gpu = scored(folder), scored(folder, "--gpus", "0", "--math", "fp32")
    assert len(on_cpu) == len(on_gpu)
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        name, _, value = found.split(" (")[0].rpartition(" ")
        assert expected.startswith(name)
        assert float(value) == pytest.approx(float(expected.split(" (")[0].rpartition(" ")[2]), rel=1e-4, abs=1e-5)


def test_several_gpus_score_as_one(folder: Path) -> None:
    from caffepy.backend.cuda.device import device_count

    if device_count() < 2:
        pytest.skip("needs 2 GPUs, 1 is here")
    assert scored(folder, "--gpus", "all") == scored(folder, "--gpus", "0")

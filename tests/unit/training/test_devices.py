from __future__ import annotations

import re

import pytest
from simulated_nccl import run_simulated

CODE = """
import simulated_nccl, caffepy.files
simulated_nccl.install(gpus=0)
def load_library(path):
    if not {driver}:
        raise OSError(path)
caffepy.files.load_library = load_library
from caffepy.errors import DeviceError
from caffepy.training.devices import check_gpus
try:
    check_gpus([1])
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("driver", "reason"),
    [(False, "this machine has no NVIDIA driver"), (True, r"CUDA finds none here \(no device is visible; .*\)")],
)
def test_a_gpu_is_wanted_where_there_is_none(driver: bool, reason: str) -> None:
    (line,) = run_simulated(CODE.format(driver=driver))
    assert re.match(rf"GPU 1 was asked for, and {reason}: train on the CPU with --cpu, or install the driver", line)

"""Random nets whose layers have no names or equal ones: several devices train as one, and files hold all of it.

`tests/support/named_nets.py` tries more of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from named_nets import NamedNet, compare_devices, compare_files, write_data


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("seed", range(8))
def test_threads_and_ranks_train_as_one_device(seed: int, source: Path, tmp_path: Path) -> None:
    net = NamedNet(seed, source)
    assert compare_devices(net, tmp_path) == {}, net.prototxt(1, 1)


@pytest.mark.parametrize("seed", range(100, 106))
def test_training_goes_on_and_is_tested_deployed_and_exported(seed: int, source: Path, tmp_path: Path) -> None:
    net = NamedNet(seed, source)
    assert compare_files(net, tmp_path) == {}, net.prototxt(1, 1)

"""The names that `caffepy.parallel` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import caffepy.parallel


def test_the_seeds_names_are_offered_and_imported_on_first_use() -> None:
    assert set(caffepy.parallel.__all__) <= set(dir(caffepy.parallel))
    assert caffepy.parallel.P2PManager.__module__ == "caffepy.parallel.p2p_manager"
    assert caffepy.parallel.P2PSync.__module__ == "caffepy.parallel.p2p_sync"
    assert caffepy.parallel.SharedScores.__module__ == "caffepy.parallel.communicators.local"
    with pytest.raises(AttributeError, match="module 'caffepy.parallel' has no attribute 'P2PMangler'"):
        _ = caffepy.parallel.P2PMangler


@pytest.mark.parametrize("name", caffepy.parallel.__all__)
def test_each_name_is_a_class_of_its_module(name: str) -> None:
    if name == "NcclCommunicator":
        pytest.importorskip("cupy")
    found = getattr(caffepy.parallel, name)
    assert isinstance(found, type) and found.__name__ == name


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, caffepy.parallel; sys.exit(any(name in sys.modules for name in ('numpy', 'numba', 'cupy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0

"""Random nets of all layer types on a GPU: folded and captured tests, and fused and captured training, give what layer
by layer gives; the seeds are those of the CPU's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import compare_nets
import execution_modes
import pytest
from compare_nets import Differences
from execution_modes import compare_inference, compare_training, persistent
from wide_nets import WideNet

from caffepy.backend import Backend, create_backend

NETS, PARTS = 60, 6


@pytest.fixture(scope="module")
def untuned() -> Iterator[Backend]:
    """A GPU that tries no ways of computing convolutions, of which each net has others, and multiplies in float32."""
    made = create_backend(0, math="fp32", autotune=False)
    with made.activate():
        yield made
    made.close()


@pytest.fixture(autouse=True)
def allow_other_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused and folded kernels add up in another order than cuDNN's; captured ones give the eager ones' bits."""
    monkeypatch.setattr(compare_nets, "TOLERANCE", 1e-4)
    monkeypatch.setattr(execution_modes, "TRAINED", 2e-3)


def check_part(mode: Callable[..., Differences], part: int, backend: Backend) -> None:
    """Every PARTS-th net gives the same in each mode."""
    for seed in range(part, NETS, PARTS):
        found = persistent(lambda wide, attempt: mode(wide, attempt, backend), WideNet(seed))
        assert not found, (
            f"net {seed} differs: {found}; see it with: python tests/support/execution_modes.py "
            f"--first {seed} --count 1 --show"
        )


@pytest.mark.parametrize("part", range(PARTS))
def test_tests_folded_and_captured(untuned: Backend, part: int) -> None:
    check_part(compare_inference, part, untuned)


@pytest.mark.parametrize("part", range(PARTS))
def test_training_fused_and_captured(untuned: Backend, part: int) -> None:
    check_part(compare_training, part, untuned)

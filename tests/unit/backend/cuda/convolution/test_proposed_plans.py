"""Which of the plans that cuDNN's heuristics propose become candidates."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from caffepy.backend.types import Geometry

PACKAGE = "caffepy.backend.cuda.convolution"
FAST = tuple(f"eng{number}" for number in range(40))


def names(frontend: Any, prepare: bool = True, group: int = 1) -> list[str]:
    """Those of the candidates, each of which is prepared before the next is asked for."""
    cudnn, problem = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("cudnn", "problem"))
    resources = SimpleNamespace(cudnn=frontend, handle=1, scratch=MagicMock(), tf32=True, plans=None)
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), group)
    shapes = problem.Problem((2, 16, 8, 8), (16, 16 // group, 3, 3), geometry, "float16")
    task = problem.Task(shapes, problem.Direction.FORWARD)
    return [plan.name for plan in cudnn.cudnn_candidates(task, resources) if not prepare or plan.prepare()]


@pytest.fixture
def new_frontend(cupy_or_mock: None) -> Any:
    return importlib.import_module("fake_cudnn").Frontend


def test_the_first_ten_of_the_faster_heuristics_are_enough(new_frontend: Any) -> None:
    frontend = new_frontend(FAST, ("other",))
    assert names(frontend) == [f"cuDNN {name}" for name in FAST[:10]]
    assert frontend.counts["heuristics"] == 1


def test_few_are_tried_beside_own_depthwise_kernels(new_frontend: Any) -> None:
    assert names(new_frontend(FAST, ("other",)), group=16) == [f"cuDNN {name}" for name in FAST[:3]]


def test_a_mixture_of_releases_is_a_warning(new_frontend: Any, caplog: pytest.LogCaptureFixture) -> None:
    frontend = new_frontend(unloadable="cudnn_status: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED")
    with caplog.at_level(logging.WARNING):
        assert names(frontend) == names(frontend, group=16) == []
    (record,) = caplog.records
    assert "cuDNN 91900 cannot load" in record.getMessage()
    assert "LD_LIBRARY_PATH" in record.getMessage()


@pytest.mark.parametrize("refusal", [RuntimeError, ValueError], ids=["releases before 1.27", "release 1.27"])
def test_those_that_are_barred_do_not_count(new_frontend: Any, refusal: type[Exception]) -> None:
    frontend = new_frontend(FAST, barred=FAST[:25], refusal=refusal)
    assert names(frontend) == [f"cuDNN {name}" for name in FAST[25:35]]


def test_the_slower_heuristics_are_asked_for_what_is_missing(new_frontend: Any) -> None:
    frontend = new_frontend(FAST[:3], ("eng1", "other", "eng77"), barred=("other",))
    assert names(frontend) == ["cuDNN eng0", "cuDNN eng1", "cuDNN eng2", "cuDNN eng77"]
    assert frontend.counts["heuristics"] == 2


def test_the_plan_of_a_name_is_found_however_many_there_are(new_frontend: Any) -> None:
    frontend = new_frontend(FAST, ("last",))
    assert names(frontend, prepare=False)[-1] == "cuDNN last"

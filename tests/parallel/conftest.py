"""Where the parallel tests train."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_case import Trials
from subprocess_training import SubprocessTraining

_AT_A_TIME = 3
"""Cases: most of their time goes by in waiting."""


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> SubprocessTraining:
    """The folder in which all runs of these tests take place."""
    return SubprocessTraining(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, training: SubprocessTraining) -> Iterator[Trials]:
    """The module's fault cases that were chosen, tried beside each other; each test waits for its own."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        chosen = [item for item in request.session.items if item.parent is request.node]
        cases = [item.callspec.params["case"] for item in chosen if "case" in getattr(item, "fixturenames", ())]
        yield {case: pool.submit(case.check, training, 0) for case in cases}
        pool.shutdown(cancel_futures=True)

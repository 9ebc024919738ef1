"""Where the parallel tests train."""

from __future__ import annotations

import pytest
from laboratory import Laboratory


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """The folder in which all runs of these tests take place."""
    return Laboratory(tmp_path_factory.mktemp("parallel"))

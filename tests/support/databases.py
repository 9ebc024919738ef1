"""The kinds of databases that tests are run with."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

WITHOUT_PLYVEL = pytest.mark.skipif(find_spec("plyvel") is None, reason="plyvel is not installed")

BACKENDS = ["lmdb", pytest.param("leveldb", marks=WITHOUT_PLYVEL)]

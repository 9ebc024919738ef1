"""The kinds of databases that tests are run with."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NO_PLYVEL = "plyvel is not installed: pip install '.[leveldb]'"
WITHOUT_PLYVEL = pytest.mark.skipif(find_spec("plyvel") is None, reason=NO_PLYVEL)

BACKENDS = ["lmdb", pytest.param("leveldb", marks=WITHOUT_PLYVEL)]

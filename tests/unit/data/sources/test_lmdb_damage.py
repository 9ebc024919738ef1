"""Thousands of damaged LMDBs: none ends the process, hangs, takes memory or gives other records than it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lmdb_damage


def test_damaged_files_are_refused_or_read_right(tmp_path: Path) -> None:
    program = Path(lmdb_damage.__file__)
    search = os.pathsep.join([str(program.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), "3000"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["refused"] > 1000 and found["read"] > 500, found
    assert found["longest"] < 60 and found["grown"] < 1 << 27, found

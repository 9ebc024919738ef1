"""The update rule of docs/how-to/add-an-update-rule.md, as a user's plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "add-an-update-rule.md"
NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 dim: 3 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "gaussian" std: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
PROGRAM = """
import sys
import numpy as np
from lion import Lion
import caffepy

solver = caffepy.create_solver(caffepy.read_solver(sys.argv[1]), caffepy.create_backend())
(weights, _), = (layer.blobs for layer in solver.net.layers if layer.blobs)
before = weights.host_data().copy()
history = np.zeros_like(before)
for _ in range(3):
    solver.step(1)
    gradient = weights.host_diff().copy()
    before -= 0.01 * np.sign(0.9 * history + (1 - np.float32(0.9)) * gradient)
    history = 0.99 * history + 0.01 * gradient
    np.testing.assert_allclose(weights.host_data(), before, atol=1e-5)
assert len(solver.history) == 1
solver.snapshot()
"""
SOLVER = """net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 5 random_seed: 1 snapshot_prefix: "s"
type: "Lion" momentum: 0.9 momentum2: 0.99 """


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=folder)


def test_the_pages_rule_trains_as_its_formula_says(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert block is not None
    (tmp_path / "lion.py").write_text(block[1])
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    (tmp_path / "program.py").write_text(PROGRAM)
    found = run(tmp_path, "program.py", "solver.prototxt")
    assert found.returncode == 0, found.stderr
    train = ("-m", "caffepy", "train", "--solver", "solver.prototxt", "--cpu", "--plugin", "lion.py")
    found = run(tmp_path, *train, "--snapshot", "s_iter_3.solverstate")
    assert found.returncode == 0 and (tmp_path / "s_iter_5.caffemodel").exists(), found.stderr
    found = run(tmp_path, *train, "--set", "momentum=1.5")
    assert found.returncode == 2 and "momentum is 1.5; with Lion" in found.stderr, found.stderr
    found = run(tmp_path, *train, "--set", 'regularization_type="WD"')
    assert found.returncode == 2 and "for solvers of type SGD and SAG, and type is Lion" in found.stderr, found.stderr

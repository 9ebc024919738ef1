"""The examples of docs/how-to/python.md run as they stand there, one after the other in one folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import caffepy
from caffepy import distributed

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "python.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SOLVER = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 3 snapshot_after_train: false '


def run(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "python.md", "exec"), names)
    return names


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    train, callback, use, processes = EXAMPLES
    trained = run(train)["trained"]
    assert trained.solver.iteration == 60
    trained.close()
    patience = run(callback)["Patience"]
    solver = {"base_lr": 1e-9, "lr_policy": "fixed", "max_iter": 5000, "random_seed": 1}
    stopped = caffepy.train(solver, net=run(train)["net"], callbacks=patience(), threads=1)
    assert stopped.stopped_early
    run(use)
    assert capsys.readouterr().out.split("\n")[-2] == "(3, 2)"
    (tmp_path / "net.prototxt").write_text(str(run(train)["net"].to_proto()))
    (tmp_path / "solver.prototxt").write_text(f'net: "net.prototxt" {SOLVER}')
    run(processes)["work"](0, "solver.prototxt")
    distributed.destroy_process_group()

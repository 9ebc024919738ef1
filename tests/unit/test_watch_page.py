"""The example of docs/how-to/watch.md runs, and its table has the names that loggers get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from training import CLASSIFIER

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "watch.md").read_text()
NET = (
    CLASSIFIER
    + 'layer { name: "a" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }'
)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "lenet"
    folder.mkdir(parents=True)
    (folder / "net.prototxt").write_text(NET)
    (folder / "solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.25 lr_policy: "fixed" max_iter: 4 snapshot_after_train: false display: 1 '
        "test_iter: 1 test_interval: 2 "
    )
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "watch.md", "exec"), {"__name__": "example"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "from iteration 0 with base_lr 0.25"
    assert [line.split()[0] for line in lines[1:-1]] == ["0", "1", "2", "3", "4"]
    assert re.fullmatch(r"best accuracy (0\.\d+|1\.0)", lines[-1])

    written = (tmp_path / "lenet.csv").read_text().splitlines()[0].split(",")
    documented = re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)))
    names = {name.replace("OUTPUT", "loss") for name in documented}
    assert set(written) - {"iteration", "time", "test0/accuracy"} <= names

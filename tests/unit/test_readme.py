"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from caffepy.cli.main import build_parser, main
from caffepy.cli.options import normalise

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line[line.index("caffepy ") :].split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if "caffepy " in line.split("#")[0]
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str):
    arguments = normalise(shlex.split(command)[1:])
    assert build_parser(arguments).parse_strictly(arguments).command == arguments[0]


def test_there_are_commands():
    assert len(COMMANDS) >= 8


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shutil.copytree(ROOT / "models", tmp_path / "models", ignore=shutil.ignore_patterns("*_lmdb", "*_iter_*"))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "mnist", "--subset", "--to", "models/lenet"]) == 0
    capsys.readouterr()
    exec(compile(example.replace("step(100)", "step(2)"), "README.md", "exec"), {})
    assert 0 < float(capsys.readouterr().out) < 5


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "models" / "README.md"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

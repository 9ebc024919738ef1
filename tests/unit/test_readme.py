"""What the README and the documents show works as it stands there, and the links and files that they name exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

import caffepy
from caffepy import distributed
from caffepy.cli.main import COMMANDS as ALL_COMMANDS
from caffepy.cli.main import command_class, main, parse
from caffepy.cli.options import normalise
from caffepy.utils.options import options_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").rglob("*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
"""Pages that docs/decisions/README.md lists, and the site's navigation does not."""
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "models" / "README.md", *DOCS]
MODELS = sorted((ROOT / "models").glob("*/README.md"))
CPU = ROOT / "caffepy" / "backend" / "cpu"
FOLDERS = (ROOT, ROOT / "caffepy", ROOT / "caffepy" / "distributed", CPU, CPU / "convolution")
"""Where pages may begin the path of a source file."""
WIDTH = 120
FOREIGN_OPTIONS = re.compile(
    "--(cpu-bind|cpus-per-task|gres|host|kill-on-bad-exit|no-kill|nodelist|ntasks|ntasks-per-node|oversubscribe|pty"
    "|shm-size|signal|no-python|logdir|its|its-option|target|tag|rm|volume|publish|model-repository|editable)"
)
"""Options of mpirun, srun, scancel, docker, pip, torchrun, tensorboard and Triton, and of any program."""
MADE_OPTIONS = re.compile("--(sig(int|hup|term)-effect|noencoded)")
"""Options whose names the parser puts together."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands_of(lines: list[str]) -> list[str]:
    """The calls of caffepy among lines of a shell; those with brackets show a syntax, not a command."""
    shown = [line.split("#")[0].split(" > ")[0].strip() for line in lines]
    return [line[line.index("caffepy ") :] for line in shown if "caffepy " in line and "[" not in line]


COMMANDS = commands_of("".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL)).split("\n"))
DOCUMENTED = sorted(
    {
        command
        for page in DOCS
        for command in commands_of([line for line in page.read_text().split("\n") if line.startswith("    ")])
        if re.match(r"caffepy (?!import)[a-z]", command)
    }
)


@pytest.mark.parametrize("command", [*COMMANDS, *DOCUMENTED])
def test_commands_are_understood(command: str):
    arguments = normalise(shlex.split(command)[1:])
    assert isinstance(parse(arguments), command_class(arguments[0]))


def test_there_are_commands():
    assert len(COMMANDS) >= 5
    assert len(DOCUMENTED) >= 20


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shutil.copytree(ROOT / "models", tmp_path / "models", ignore=shutil.ignore_patterns("*_lmdb", "*_iter_*"))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "mnist", "--subset", "--to", "models/lenet"]) == 0
    capsys.readouterr()
    shorter = example.replace('solver.prototxt")', 'solver.prototxt", max_iter=2)')
    assert shorter != example
    exec(compile(shorter, "README.md", "exec"), {})
    assert "accuracy" in capsys.readouterr().out


def test_the_example_of_a_process_group_runs(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "how-to" / "distributed.md").read_text()
    (example,) = re.findall(r"(?m)^    import numpy.*\n(?:(?:    .*)?\n)*", page)
    exec(compile(textwrap.dedent(example), "distributed.md", "exec"), {})
    assert capsys.readouterr().out == "0 0.0\n"


def test_the_api_page_has_every_public_name():
    named = re.findall(r"(?m)^::: ([\w.]+)$", (ROOT / "docs" / "reference" / "api.md").read_text())
    for name in named:
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member), name
    constants = {"__version__", "AVG", "MAX", "MIN", "PRODUCT", "SUM"}
    for package in (caffepy, distributed):
        public = {f"{package.__name__}.{name}" for name in package.__all__ if name not in constants}
        assert public <= set(named)


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = [line.lstrip("#").strip().lower() for line in page.read_text().split("\n") if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *MODELS], ids=name_of)
def test_links_lead_somewhere(page: Path):
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#?)([^):]*)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(linked), f"{page.name}: {target}#{anchor}"


def test_the_site_has_every_page_and_what_it_links_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """mkdocs, which `make site` calls, refuses links that lead nowhere; here only what it is given is looked at."""
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    monkeypatch.setattr(site, "TARGET", tmp_path)
    monkeypatch.setattr(sys, "argv", ["site.py"])
    site.main()
    assert all(requirement.startswith("mkdocs") for requirement in site.requirements())
    named = re.findall(r": ([\w/.-]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [page for page in PAGES if page not in DECISIONS]
    assert sorted(named) == sorted(name_of(page) for page in [*pages, *(ROOT / "docs" / "tutorials").glob("*.ipynb")])
    for page in [*(tmp_path / name for name in named), *tmp_path.glob("models/*/README.md")]:
        for target in [] if page.suffix == ".ipynb" else re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name}: {target} is not in the site"


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_source_files_that_are_named_exist(page: Path):
    for path in re.findall(r"`(\w+/[\w/]+\.(?:py|cu|proto))`", page.read_text()):
        assert any((folder / path).exists() for folder in FOLDERS), f"{page.name} names {path}, which is not there"


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    """The text of each of the project's programs, and the flags of the options that are declared as fields."""
    folders = ("caffepy", "benchmarks", "tests", "models", "tools", "docs")
    texts = {name_of(path): path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    texts["setup.py"] = (ROOT / "setup.py").read_text()
    declared = [one for name in ALL_COMMANDS for one in options_of(command_class(name)) if not one.positional]
    flags = {flag for one in declared for flag in one.flags}
    flags |= {flag.replace("--", "--no-") for one in declared if one.default is True for flag in one.flags}
    return texts | {"declared options": " ".join(f'"{flag}"' for flag in flags)}


def spelled(option: str) -> str:
    """How programs write an option: Caffe's tools without the dashes before it; `-` and `_` are the same."""
    return f'"(--)?{re.sub("[-_]", "[-_]", option.removeprefix("--"))}"'


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_options_that_are_named_exist(page: Path, programs: dict[str, str]):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", page.read_text()))
    named = {name for name in named if not FOREIGN_OPTIONS.fullmatch(name) and not MADE_OPTIONS.fullmatch(name)}
    everything = "\n".join(programs.values())
    missing = {name for name in named if not re.search(spelled(name), everything)}
    assert not missing, f"{page.name} names {sorted(missing)}, which no program takes"


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_variables_that_are_named_are_read(page: Path, programs: dict[str, str]):
    named = set(re.findall(r"\b(?:CAFFEPY|CUPY|OMPI|XDG)_[A-Z0-9_]+\b", page.read_text()))
    missing = {name for name in named if not any(name in text for text in programs.values())}
    assert not missing, f"{page.name} names {sorted(missing)}, which nothing reads"


@pytest.mark.parametrize(
    "page", [page for page in DOCS if page.parent.name in ("explanation", "decisions")], ids=name_of
)
def test_names_of_the_code_exist(page: Path, programs: dict[str, str]):
    """Classes, functions and fields between single backticks."""
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text())
    named = {name for span in spans for name in re.findall(r"\b[A-Za-z]\w*_\w+\b|\b[A-Z][a-z]+[A-Z]\w+\b", span)}
    texts = "\n".join([*programs, *programs.values(), (ROOT / "proto" / "caffe.proto").read_text()])
    missing = {name for name in named if not re.search(rf"\b{name}", texts)}
    assert not missing, f"{page.name} names {sorted(missing)}, which the code does not have"


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_programs_that_are_named_without_a_folder_exist(page: Path, programs: dict[str, str]):
    named = set(re.findall(r"`(\w+\.py)`", page.read_text()))
    missing = named - {Path(path).name for path in programs}
    assert not missing, f"{page.name} names {sorted(missing)}, which are not there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_of_text_are_short(page: Path):
    long = [line for line in page.read_text().split("\n") if len(line) > WIDTH and not line.startswith(("|", "    "))]
    assert not long, f"{page.name}: {long[0]}"

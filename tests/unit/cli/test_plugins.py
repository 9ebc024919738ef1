"""`--plugin`: files and modules that register layer types."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caffepy.cli.main import COMMANDS, GROUPS, command_class, main, parse
from caffepy.cli.options import ReadsNets, import_plugin
from caffepy.errors import ConfigError


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory whose modules are gone behind the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)) or name == "package":
            del sys.modules[name]


def test_a_file_is_imported_once_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside_it.py").write_text("NUMBER = 3")
    (tmp_path / "sub" / "my_layers.py").write_text("import beside_it\nprint('imported', beside_it.NUMBER)")
    import_plugin("sub/my_layers.py")
    module = sys.modules["my_layers"]
    import_plugin("./sub/my_layers.py")
    assert sys.modules["my_layers"] is module
    (tmp_path / "my_layers.py").touch()
    with pytest.raises(ConfigError, match=r"my_layers\.py: a module named 'my_layers' is imported already; rename"):
        import_plugin("my_layers.py")


def test_a_module_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("")
    import_plugin("package.part")
    assert "package.part" in sys.modules


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("absent.py", None, r"--plugin absent\.py: no such file"),
        ("absent", None, r"--plugin absent: no module 'absent' on PYTHONPATH or in the working directory; to give a"),
        ("absent.part", None, r"no module 'absent\.part'"),
        ("bad.py", "x = 1\n1 / 0", r"--plugin bad\.py: .*bad\.py:2: ZeroDivisionError"),
        ("worse.py", "def", r"worse\.py:1: SyntaxError"),
        ("other.py", "import absent_too", r"other\.py:1: ModuleNotFoundError: No module named 'absent_too'"),
        ("third", "import absent_too", r"third\.py:1: ModuleNotFoundError: No module named 'absent_too'"),
        ("half.py", "import caffepy\nclass A: ...\ncaffepy.register_layer('Half3', A)", r"class 'A' lacks forward"),
    ],
)
def test_what_cannot_be_imported(tmp_path: Path, name: str, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / f"{name.removesuffix('.py')}.py").write_text(text)
    with pytest.raises(ConfigError, match=error):
        import_plugin(name)
    assert name.removesuffix(".py") not in sys.modules


def test_every_command_that_reads_nets_has_both_options() -> None:
    without = {name for name in COMMANDS if not issubclass(command_class(name), ReadsNets)}
    others = {"data", "new", "models", "device_query", "launch", "bench", "parse_log", "plot_training_log", "shims"}
    assert without == {*others, "completion", *GROUPS["data sets"]}


def test_plugins_are_added_up() -> None:
    words = ["time", "--model", "m", "--proto", "a.proto", "--plugin", "a", "--plugin", "b.py"]
    args = parse(words)
    assert isinstance(args, ReadsNets)
    assert (str(args.proto), args.plugins) == ("a.proto", ["a", "b.py"])


def test_mistakes_are_reported_before_the_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--solver", "s.prototxt", "--plugin", "nothing_here"]) == 2
    assert capsys.readouterr().err.startswith("caffepy: error: --plugin nothing_here: no module")
    assert main(["train", "--solver", "s.prototxt", "--plugin", " "]) == 2
    assert "names nothing: give a Python file or module" in capsys.readouterr().err

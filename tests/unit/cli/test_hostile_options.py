"""Command lines and files from strangers, by the program itself: one line; status 2, or 70 for a mistake of ours."""

from __future__ import annotations

import argparse
import errno
import io
import sys
from pathlib import Path

import pytest

from caffepy.cli.main import main
from caffepy.errors import LONGEST_MESSAGE, one_line
from caffepy.utils import options

SOLVER = 'net_param { name: "n" } base_lr: 1 max_iter: 1 lr_policy: "fixed" solver_mode: CPU snapshot_prefix: "x" '


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run a command line that must end with one line of error."""
    status = main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("caffepy: error: ") for line in lines) == 1, lines
    assert not any("Traceback" in line for line in lines)
    return status, lines[-1].removeprefix("caffepy: error: ")


def test_one_line_escapes_control_characters_and_leaves_out_the_middle() -> None:
    assert one_line("a\nb\x1b[0m\u2028\udcffc\n") == r"a\nb\x1b[0m\u2028\udcffc"
    long = one_line("x" * 10_000)
    assert f"[... {10_000 - LONGEST_MESSAGE} characters ...]" in long
    assert len(long) < LONGEST_MESSAGE + 50


def test_a_path_of_5000_characters(capsys: pytest.CaptureFixture[str]) -> None:
    status, error = fails(capsys, "train", "--solver", "x" * 5000)
    assert status == 2
    assert error.endswith("cannot read the solver: File name too long")
    assert len(error) < LONGEST_MESSAGE + 100


@pytest.mark.parametrize("path", ["a\0b", "a\nb", "\udcff"])
def test_paths_with_odd_characters(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert fails(capsys, "train", "--solver", path)[0] == 2


@pytest.mark.parametrize("arguments", [[], ["--memory"], ["--memory", "--phase", "TEST"]])
def test_a_net_without_layers_has_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    path = tmp_path / "n.prototxt"
    path.write_text("")
    status, error = fails(capsys, "net", "--model", str(path), *arguments)
    assert (status, "n.prototxt: the net has no layers in the" in error) == (2, True)


@pytest.mark.parametrize(
    ("net", "message"), [("/dev/zero", "cannot read the net: "), ("a\\000b", r"solver: net: 'a\x00b' does not exist")]
)
def test_a_net_that_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], net: str, message: str) -> None:
    path = tmp_path / "s.prototxt"
    path.write_text(SOLVER.replace('net_param { name: "n" }', f'net: "{net}"'))
    status, error = fails(capsys, "net", "--solver", str(path))
    assert status == 2
    assert message in error


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (options.positive, "9" * 5000, "is not a whole number of at least 1"),
        (options.positive, str(2**31), "at most 2147483647"),
        (options.level, str(2**31), "is not a whole number from -2147483647"),
        (options.level, "x", "is not a whole number from"),
        (options.gpu_number, "-1", "is no GPU's number"),
        (options.positive_seconds, "1e300", "is more than 1e.08 seconds"),
        (options.iteration_range, f"1:{'9' * 5000}", "is not a range of iterations"),
        (options.record_shape, "100000,100000", "is no shape such as 3,224,224"),
        (options.gpu_list, str(2**31), "is neither 'all' nor GPU numbers"),
        (options.name_list, "\udcff", "is not UTF-8"),
    ],
)
def test_values_that_no_option_takes(parse: object, text: str, message: str) -> None:
    assert callable(parse)
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)


@pytest.mark.parametrize("limit", ["nan", "inf", "-1"])
def test_limits_that_are_no_numbers(capsys: pytest.CaptureFixture[str], limit: str) -> None:
    status, error = fails(capsys, "net", "--model", "n", "--memory", f"--limit={limit}")
    assert (status, "is not a number above 0" in error) == (2, True)


# -- tracebacks and mistakes of caffepy's ----------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr("caffepy.formats.load.read_net", fail)


@pytest.mark.usefixtures("broken")
def test_an_exception_that_nobody_thought_of_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, error = fails(capsys, "net", "--model", "n")
    assert status == 70
    assert error.startswith("KeyError: ")
    assert "this is a bug in caffepy, not in your input: please report it" in error


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("variable", [True, False])
def test_the_traceback_is_there_for_the_asking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    if variable:
        monkeypatch.setenv("CAFFEPY_TRACEBACK", "1")
    assert main(["net", "--model", "n", *([] if variable else ["--traceback"])]) == 70
    text = capsys.readouterr().err
    assert "Traceback (most recent call last)" in text
    assert text.splitlines()[-1].endswith("please report it to the developers with this output")


@pytest.mark.parametrize(
    "failure",
    [
        OSError("Could not find/load shared object file 'libllvmlite.so' from resource location: 'llvmlite.binding'"),
        ImportError("libfoo.so.3: cannot open shared object file: No such file or directory"),
    ],
)
def test_a_library_that_cannot_be_loaded_is_no_mistake_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(path: Path) -> None:
        raise failure

    monkeypatch.setattr("caffepy.formats.load.read_net", fail)
    status, error = fails(capsys, "net", "--model", "n")
    assert (status, error.startswith(f"a library cannot be loaded: {failure}; ")) == (1, True)


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        ImportError("libfoo.so.3: failed to map segment from shared object"),
        OSError("/usr/lib/libfoo.so: cannot map zero-fill pages"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_memory_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(path: Path) -> None:
        raise failure

    monkeypatch.setattr("caffepy.formats.load.read_net", fail)
    status, error = fails(capsys, "net", "--model", "n")
    assert (status, error.startswith("out of memory: ")) == (2, True)


def test_names_that_stdout_cannot_express_are_printed_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "n.prototxt"
    text = 'layer { name: "näch" type: "Input" top: "x" input_param { shape { dim: 1 } } }'
    path.write_text(text, encoding="utf-8")
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii", errors="strict"))
    assert main(["net", "--model", str(path)]) == 0
    assert rb"n\xe4ch" in output.getvalue()

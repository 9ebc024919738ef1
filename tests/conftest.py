"""What holds for all tests, also without the extra `test`: then tests that need its packages are skipped."""

from __future__ import annotations

import importlib.machinery
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType

import pytest
from interrupts import default_interrupts

OF_EXTRA = (
    "hypothesis",
    "matplotlib",
    "nbclient",
    "nbformat",
    "onnx",
    "onnxruntime",
    "psutil",
    "shtab",
    "skimage",
    "tensorboardX",
)
"""Modules of the extra `test` that caffepy and its tests import. SciPy is not among them: numba tries to import it."""


class SkipWithout:
    """Skips the test, or the file of tests, that imports an absent module of the extra `test`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called for what Python has not found."""
        if name in OF_EXTRA:
            pytest.skip(f"{name} is not installed: pip install '.[test]'", allow_module_level=True)
        return None


if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # How long an example takes depends on the machine; pytest's limit ends what hangs.
    settings.register_profile("caffepy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("caffepy")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare pytest-timeout's setting where that is not installed: unknown settings are errors."""
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "seconds, for pytest-timeout")


def pytest_sessionstart() -> None:
    sys.meta_path.append(SkipWithout)  # type: ignore[arg-type]


def pytest_sessionfinish() -> None:
    sys.meta_path.remove(SkipWithout)  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which extras the skipped tests need."""
    reasons = (str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    wanted = Counter(found[1] for reason in reasons if (found := re.search(r"(pip install '\.\[\w+\]')", reason)))
    for command, count in sorted(wanted.items()):
        terminalreporter.write_line(f"{count} tests or files of tests are skipped; they need: {command}")


@pytest.fixture(autouse=True, scope="session")
def _interrupts() -> Iterator[None]:
    with default_interrupts():
        yield


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their number: a packed file holds the time, and each worker collects the tests for itself."""
    return f"{argname} of {len(val)} bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make what a test printed text that one process can send to another: paths need not be UTF-8."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report

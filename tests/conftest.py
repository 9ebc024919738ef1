"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from processes import default_interrupts

# How long an example takes depends on the machine; pytest's limit ends what hangs.
settings.register_profile("caffepy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("caffepy")


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

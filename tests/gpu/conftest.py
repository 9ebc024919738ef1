"""Tests in this folder need an NVIDIA GPU with CuPy and cuDNN.

Without them each file is skipped as a whole, for one stated reason, but imported all the same: to skip each of
thousands of tests by itself would take longer than many a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from caffepy.backend import Backend, create_backend
from caffepy.errors import UserError

HERE = Path(__file__).parent


def _why_not() -> str:
    """Why GPU tests cannot run here; empty if they can."""
    try:
        create_backend(0).close()
    except UserError as error:
        return str(error)
    return ""


def pytest_itemcollected(item: pytest.Item) -> None:
    if HERE in item.path.parents:
        item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After what -k and -m leave out."""
    ours = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_not() if ours else ""
    if not reason:
        return
    counts = Counter(item.path for item in ours)
    first = {item.path: item for item in reversed(ours)}
    for path, item in first.items():
        item.add_marker(pytest.mark.skip(reason=f"{counts[path]} tests of {path.name}: {reason}"))
    left_out = {item for item in ours if first[item.path] is not item}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """GPU 0, active in this thread, which multiplies in float32."""
    made = create_backend(0, math="fp32")
    with made.activate():
        yield made
    made.close()


KEPT_BYTES = 2**28
"""Device memory that a process may keep from test to test."""


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Give back what tests no longer hold: many processes share the GPU, and their pools would keep all of it.

    Not after every test: to free memory waits for all of the process's work, to take it anew costs as much as a test.
    """
    yield
    import cupy

    pool = cupy.get_default_memory_pool()
    if pool.free_bytes() > KEPT_BYTES:
        pool.free_all_blocks()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of these tests' own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def make(cache: Path) -> Iterator[Callable[..., Any]]:
    """Makes backends, active in this thread one at a time, closed at the end."""
    from caffepy.backend.cuda.backend import CudaBackend

    made: dict[tuple[str, bool, bool], Any] = {}

    def backend(math: str = "tf32", autotune: bool = True, deterministic: bool = True) -> Any:
        key = (math, autotune, deterministic)
        if key not in made:
            made[key] = CudaBackend(0, *key)
        return made[key]

    yield backend
    for each in made.values():
        each.close()

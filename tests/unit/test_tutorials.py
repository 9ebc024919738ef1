"""The tutorials run from a fresh folder and print again what they have printed."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.ipynb"))
SECONDS = 300


class _ThisPython(KernelSpecManager):
    """Starts kernels with the interpreter of the tests, whatever kernels the user has installed."""

    def get_kernel_spec(self, kernel_name):
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


def printed(notebook):
    """What each cell printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(out.text for out in cell.outputs if out.output_type == "stream") for cell in cells]


def pictures(notebook):
    return sum("image/png" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", []))


def test_there_are_tutorials():
    assert len(TUTORIALS) >= 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(jupyter|zmq|tornado|asyncio).*")
# nbclient leaves sockets to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path):
    saved = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    manager = AsyncKernelManager(kernel_name="tests", kernel_spec_manager=_ThisPython())
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(fresh, km=manager, timeout=SECONDS, resources=folder).execute()
    del manager
    gc.collect()
    assert pictures(fresh) == pictures(saved) > 0
    # Digits that a machine's rounding may turn are compared by their places alone.
    for before, after in zip(printed(saved), printed(fresh), strict=True):
        assert len(after.splitlines()) == len(before.splitlines())
        truths = [line for line in before.splitlines() if line.endswith("True")]
        assert [line for line in after.splitlines() if line.endswith("True")] == truths

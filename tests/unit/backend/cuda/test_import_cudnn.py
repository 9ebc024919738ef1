"""cuDNN's frontend is imported without PyTorch, which takes seconds and is not used; nobody else notices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
CUDNN = """
try:
    import torch
except ImportError:
    torch = None

def backend_version():
    return 91900
"""
PROGRAM = """
import sys
{before}
from caffepy.backend.cuda.device import import_cudnn
try:
    cudnn = import_cudnn()
    print("PyTorch within cuDNN:", cudnn.torch is not None)
except Exception as error:
    print(type(error).__name__)
print("in sys.modules:", "torch" in sys.modules)
import torch
print(torch.name)
"""


def outcome(folder: Path, cudnn: str, before: str = "") -> list[str]:
    """What a process prints that imports packages of these texts."""
    packages = {"cupy": "", "cudnn": cudnn, "torch": 'name = "the real one"'}
    for name, text in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("cudnn", "before", "lines"),
    [
        (CUDNN, "", ["PyTorch within cuDNN: False", "in sys.modules: False"]),
        (CUDNN, "import torch", ["PyTorch within cuDNN: True", "in sys.modules: True"]),
        (CUDNN, "import cudnn", ["PyTorch within cuDNN: True", "in sys.modules: True"]),
        (f"{CUDNN}\nimport no_such_library", "", ["MissingExtraError", "in sys.modules: False"]),
    ],
    ids=["alone", "PyTorch first", "cuDNN first", "cuDNN is broken"],
)
def test_pytorch_is_left_to_who_wants_it(tmp_path: Path, cudnn: str, before: str, lines: list[str]) -> None:
    assert outcome(tmp_path, cudnn, before) == [*lines, "the real one"]

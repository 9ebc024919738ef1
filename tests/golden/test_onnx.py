"""Small PyTorch modules, exported by both of its exporters, give PyTorch's numbers as Caffe nets.

The files hold a residual block, an inverted residual with squeeze and excitation, a channel shuffle with a transposed
convolution, and an inception block with uneven padding and interpolation; the .npz files hold input and output.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_nets import random_inputs

from caffepy.export.check import run_net
from caffepy.export.onnx_import.read import build_imported, check_imported

FILES = sorted((Path(__file__).parent / "onnx").glob("*.onnx"))


def test_there_are_files():
    assert {path.stem.rpartition("_")[2] for path in FILES} == {"script13", "dynamo20"}
    assert len(FILES) == 8


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_are_those_of_pytorch(path: Path, fold: bool):
    recorded = np.load(path.with_name(f"{path.stem.partition('_')[0]}.npz"))
    _, net = build_imported(path, "net", fold=fold)
    (name,) = random_inputs(net)
    (found,) = run_net(net, {name: recorded["x"]}).values()
    assert found.shape == recorded["y"].shape
    assert np.abs(found - recorded["y"]).max() <= 1e-5 * np.abs(recorded["y"]).max()
    assert all(one.relative <= 1e-5 for one in check_imported(path, net))

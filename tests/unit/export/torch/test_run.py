"""Exported modules run by PyTorch; test_write.py needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_nets import even_out, random_parameters
from torch_nets import assert_module

from caffepy.cli.main import main
from caffepy.export.check import random_inputs, run_net
from caffepy.export.prepare import Settings, open_for_export
from caffepy.export.torch.write import MODULE_NAMES, run_exported, to_torch
from caffepy.formats.caffemodel import write_caffemodel

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[4]


def test_names_that_torch_has_taken():
    assert {name for name in dir(torch.nn.Module()) if not name.startswith("_")} <= set(MODULE_NAMES.split())


@pytest.mark.parametrize("name", ["lenet", "mobilenet_ssd"])
def test_models(name: str, tmp_path: Path):
    net, _ = open_for_export(ROOT / f"models/{name}/deploy.prototxt", [], Settings())
    assert_module(even_out(random_parameters(net)), tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, weights, output = ROOT / "models/lenet/deploy.prototxt", tmp_path / "w.caffemodel", tmp_path / "lenet.py"
    net, _ = open_for_export(model, [], Settings())
    write_caffemodel(weights, "LeNet", even_out(random_parameters(net)).layers)
    assert main(["export", str(model), str(weights), str(output), "--half", "--batch", "dynamic"]) == 0
    said = capsys.readouterr().out
    assert said.count("float16 weights: output 'prob': largest difference") == 2
    inputs = random_inputs(net)
    found, wanted = run_exported(output, inputs, ["prob"])["prob"], run_net(net, inputs)["prob"]
    assert 0 < np.abs(found - wanted).max() < 0.01
    assert output.with_suffix(".safetensors").stat().st_size < 0.51 * weights.stat().st_size
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["lenet.py", "lenet.safetensors", "w.caffemodel"]


def test_a_difference_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, weights, output = ROOT / "models/lenet/deploy.prototxt", tmp_path / "w.caffemodel", tmp_path / "lenet.py"
    net, _ = open_for_export(model, [], Settings())
    write_caffemodel(weights, "LeNet", net.layers)

    def wrong(*given: object):
        text, parameters = to_torch(*given)
        return text, {name: values + 1 for name, values in parameters.items()}

    monkeypatch.setattr("caffepy.export.torch.write.to_torch", wrong)
    assert main(["export", str(model), str(weights), str(output)]) == 1
    assert "above the limit of 1e-05; the file is not written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["w.caffemodel"]

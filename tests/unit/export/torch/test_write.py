"""The text and the parameters of exported PyTorch modules; none of this needs PyTorch."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from export_cases import CHAIN
from onnx_nets import layer_net, layer_text, net_of

from caffepy.cli.main import main
from caffepy.export.prepare import Settings, open_for_export, varying_axes
from caffepy.export.torch.write import WIDTH, class_texts, names_in, to_torch
from caffepy.formats.caffemodel import write_caffemodel

ROOT = Path(__file__).parents[4]

LENET = '''
class LeNet(nn.Module):
    """data (N, 1, 28, 28) to prob (N, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.pool1 = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool2 = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.ip1 = nn.Linear(800, 500)
        self.relu1 = nn.ReLU()
        self.ip2 = nn.Linear(500, 10)
        self.prob = nn.Softmax(dim=1)

    def forward(self, data: Tensor) -> Tensor:
        conv1 = self.conv1(data)
        pool1 = self.pool1(conv1)
        conv2 = self.conv2(pool1)
        pool2 = self.pool2(conv2)
        ip1 = self.ip1(pool2.flatten(1))
        ip1 = self.relu1(ip1)
        ip2 = self.ip2(ip1)
        prob = self.prob(ip2)
        return prob
'''


def test_lenet_reads_like_a_module_written_by_hand():
    net, param = open_for_export(ROOT / "models/lenet/deploy.prototxt", [], Settings())
    text, parameters = to_torch(net, varying_axes(param))
    assert LENET in text
    assert [line for line in text.splitlines() if line.startswith(("import", "from"))] == [
        "from pathlib import Path",
        "from safetensors.torch import load_file",
        "from torch import Tensor, nn",
    ]
    shapes = {name: values.shape for name, values in parameters.items()}
    assert shapes["conv2.weight"] == (50, 20, 5, 5) and shapes["ip2.bias"] == (10,) and len(shapes) == 8
    np.testing.assert_array_equal(parameters["ip1.weight"], net.layers[5].blobs[0].host_data())


@pytest.mark.parametrize("name", ["inception_v3", "mobilenet_ssd"])
def test_the_files_of_models_are_whole(name: str):
    net, _ = open_for_export(ROOT / f"models/{name}/deploy.prototxt", [], Settings())
    text, parameters = to_torch(net)
    tree = ast.parse(text)
    assert max(map(len, text.splitlines())) <= WIDTH
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    imported |= {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    imported |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert names_in(text) & {"math", "torch", "F", "nn", "Path"} <= imported, "each name is imported"
    assert names_in(text) & set(class_texts()) <= defined, "each class is in the file"
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {key.split(".")[0] for key in parameters} <= attributes


HOSTILE = 'x"""\nimport os\nos.abort() #'


def test_names_cannot_add_code():
    net = net_of(layer_text('type: "PReLU"', (1, 3)))
    net.name = net.layers[1].name = HOSTILE
    text, parameters = to_torch(net)
    assert "import os" not in text and "abort()" not in text
    tree = ast.parse(text)
    assert [type(node).__name__ for node in tree.body] == ["Expr", *["ImportFrom"] * 3, "ClassDef", "FunctionDef"]
    assert [key for key in parameters if key.endswith(".weight")] == list(parameters)


def test_outputs_keep_their_names():
    names = ["a b", 'c"d\\', "größe(\n", "plain/1"]
    tops = " ".join(f'top: "y{index}"' for index in range(4))
    net = layer_net(f'type: "Slice" {tops}', (1, 4))
    net.outputs = dict(zip(names, net.outputs.values(), strict=True))
    returned = ast.parse(to_torch(net)[0]).body[-2].body[-1].body[-1].value
    assert [key.value for key in returned.keys] == names


@pytest.mark.parametrize("name", ["forward", "class", "1x1", "", "state_dict", "conv/3x3", "_modules", "größe"])
def test_each_layer_gets_a_name_that_python_and_torch_accept(name: str):
    net = layer_net('type: "PReLU"', (1, 3))
    net.layers[1].name = name
    text, parameters = to_torch(net)
    attribute = next(iter(parameters)).split(".")[0]
    assert attribute.isidentifier() and attribute.isascii() and not attribute.startswith("_")
    assert attribute not in ("forward", "class", "state_dict")
    assert f"self.{attribute} = nn.PReLU(3)" in text
    ast.parse(text)


def test_layers_of_one_name_and_blobs_called_like_modules():
    text = """
    layer { name: "data" type: "Input" top: "torch" input_param { shape { dim: 2 dim: 3 } } }
    layer { name: "same" type: "PReLU" bottom: "torch" top: "nn" }
    layer { name: "same" type: "PReLU" bottom: "nn" top: "Scale" }
    layer { name: "sum" type: "Scale" bottom: "Scale" top: "self" }
    """
    written, parameters = to_torch(net_of(text))
    assert list(parameters) == ["same.weight", "same_1.weight", "sum.weight"]
    assert "def forward(self, torch_1: Tensor) -> Tensor:" in written
    assert "self_1 = self.sum(Scale_1)" in written


def test_batch_norm_takes_the_scale_behind_it():
    net = net_of(CHAIN.replace("batch_norm_param { scale_bias: true }", ""))
    text, parameters = to_torch(net)
    assert "self.bn = nn.BatchNorm2d(4)  # and scale" in text
    assert "self.bn2 = nn.BatchNorm2d(4, affine=False)" in text
    layers = {layer.name: layer for layer in net.layers}
    np.testing.assert_array_equal(parameters["bn.weight"], layers["scale"].blobs[0].host_data())
    mean, _, count = (blob.host_data() for blob in layers["bn"].blobs)
    np.testing.assert_allclose(parameters["bn.running_mean"], mean / count[0], rtol=1e-6)


def test_a_scale_that_is_not_the_only_reader_stays():
    text = """
    layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }
    layer { name: "bn" type: "BatchNorm" bottom: "x" top: "bn" }
    layer { name: "scale" type: "Scale" bottom: "bn" top: "scale" }
    layer { name: "sum" type: "Eltwise" bottom: "bn" bottom: "scale" top: "sum" }
    """
    written, _ = to_torch(net_of(text))
    assert "self.bn = nn.BatchNorm1d(3, affine=False)" in written and "self.scale = Scale(3, bias=False)" in written


# -- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, Path]:
    """A net, its weights, and a folder to write to."""
    text = layer_text('type: "InnerProduct" inner_product_param { num_output: 4 }', (2, 3))
    prototxt, weights = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    prototxt.write_text(text)
    write_caffemodel(weights, "small", net_of(text).layers)
    return str(prototxt), str(weights), tmp_path


def test_without_a_comparison(files, capsys: pytest.CaptureFixture[str]):
    assert main(["export", *files[:2], str(files[2] / "out.py"), "--no-check"]) == 0
    assert "2 tensors" in capsys.readouterr().out
    assert "self.it = nn.Linear(3, 4)" in (files[2] / "out.py").read_text()
    assert (files[2] / "out.safetensors").exists()


def test_without_pytorch(files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert main(["export", *files[:2], str(files[2] / "out.py")]) == 2
    said = capsys.readouterr().err
    assert "torch is not installed" in said and "--no-check" in said and "[torch]'" in said
    assert not (files[2] / "out.py").exists()


def test_weights_that_the_export_would_replace(files, capsys: pytest.CaptureFixture[str]):
    weights, model = files[2] / "net.safetensors", files[2] / "net.py"
    assert main(["export", *files[:2], str(weights)]) == 0
    before = weights.read_bytes()
    assert main(["export", files[0], str(weights), str(model), "--no-check"]) == 2
    assert "net.safetensors: the output is also an input" in capsys.readouterr().err
    assert weights.read_bytes() == before and not model.exists()


@pytest.mark.parametrize(
    ("output", "more", "match"),
    [
        ("out.onnx", ["--to", "torch"], "out.onnx: a PyTorch module is a .py file"),
        ("out.py", ["--opset", "13"], "--opset is for ONNX"),
        ("out.py", ["--to", "weights"], "out.py: weights are written as .safetensors"),
        ("out.safetensors", ["--half"], "--half is for ONNX and PyTorch"),
        ("none/out.py", ["--no-check"], "out.py: cannot be written"),
    ],
)
def test_mistakes(files, output: str, more: list[str], match: str, capsys: pytest.CaptureFixture[str]):
    assert main(["export", *files[:2], str(files[2] / output), *more]) in (1, 2)
    assert match in capsys.readouterr().err.splitlines()[-1]

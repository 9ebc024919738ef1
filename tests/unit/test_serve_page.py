"""The server of docs/how-to/serve-a-model.md answers as the net does; a stand-in takes the place of LitServe."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnx_nets import net_of

import caffepy
from caffepy.cli.main import main
from caffepy.formats.caffemodel import write_caffemodel

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "serve-a-model.md").read_text()
DEPLOY = ROOT / "models" / "lenet" / "deploy.prototxt"
SERVER, CLIENT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Api:
    """LitServe's LitAPI, as far as the server calls it."""

    def __init__(self, **settings: Any) -> None:
        assert settings == {"max_batch_size": 16, "batch_timeout": 0.005}


class Server:
    """LitServe's LitServer: answers one batch in place of listening."""

    answers: list[Any]
    requests: list[Any]

    def __init__(self, api: Any) -> None:
        self.api = api

    def run(self, port: int) -> None:
        self.api.setup("cpu")
        batch = np.stack([self.api.decode_request(json.loads(request)) for request in self.requests])
        Server.answers = [self.api.encode_response(row) for row in self.api.predict(batch)]
        assert f"http://localhost:{port}/predict" in CLIENT


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with lenet.onnx, by the page's command, and the weights that it was made of."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    Path("deploy.prototxt").write_text(DEPLOY.read_text())
    net, random = net_of(DEPLOY.read_text()), np.random.default_rng(2)
    for blob in (blob for layer in net.layers for blob in layer.blobs):
        blob.load(random.normal(0, 0.2, blob.shape).astype(np.float32))
    write_caffemodel(Path("lenet.caffemodel"), net.name, net.layers)
    (command,) = re.findall(r"^    caffepy (export .*)$", PAGE, re.MULTILINE)
    assert main(command.split()) == 0
    return tmp_path


def test_the_server_answers_as_the_net(exported: Path, monkeypatch: pytest.MonkeyPatch):
    images = np.random.default_rng(1).integers(0, 256, (3, 28, 28), np.uint8)
    litserve = ModuleType("litserve")
    vars(litserve).update(LitAPI=Api, LitServer=Server)
    monkeypatch.setitem(sys.modules, "litserve", litserve)
    Server.requests = [json.dumps({"pixels": image.tolist()}) for image in images]
    exec(compile(SERVER, "server.py", "exec"), {"__name__": "__main__"})
    (scale,) = re.findall(r"transform_param { scale: ([\d.]+) }", DEPLOY.read_text())
    net = caffepy.load("deploy.prototxt", "lenet.caffemodel")
    wanted = net(images[:, None] * np.float32(scale))["prob"]
    assert len(set(wanted.argmax(1))) > 1
    assert [answer["digit"] for answer in Server.answers] == wanted.argmax(1).tolist()
    np.testing.assert_allclose([answer["score"] for answer in Server.answers], wanted.max(1), atol=1e-4)


def test_tritons_configuration_names_the_nets_blobs(exported: Path):
    import onnxruntime

    (config,) = re.findall(r"```protobuf\n(.*?)```", PAGE, re.DOTALL)
    named = re.findall(r"(input|output) \[ \{ name: \"(\w+)\" data_type: TYPE_FP32 dims: \[ ([\d, ]+) \]", config)
    session = onnxruntime.InferenceSession("lenet.onnx")
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    wanted = [("input", taken.name, taken.shape[1:]), ("output", given.name, given.shape[1:])]
    assert [(kind, name, [int(size) for size in dims.split(",")]) for kind, name, dims in named] == wanted

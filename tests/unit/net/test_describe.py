"""Nets, solvers and models as Python's prompt and Jupyter show them."""

from __future__ import annotations

import re

import pytest
from training import build_net, build_solver

from caffepy.formats.proto import caffe_pb2

NET = """
name: "<b>small</b>"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [4, 3] } } }
layer { name: "<script>" type: "InnerProduct" bottom: "data" top: "a&b" param { name: "w" } param { name: "b" }
        inner_product_param { num_output: 3 } }
layer { name: "again" type: "InnerProduct" bottom: "a&b" top: "out" param { name: "w" } param { name: "b" }
        inner_product_param { num_output: 3 } }
"""
TRAINED = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "target" dummy_data_param {
  shape { dim: [8, 5] } shape { dim: [8, 2] } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "target" top: "loss" }
"""


def test_a_net_says_what_it_is() -> None:
    net = build_net(NET, caffe_pb2.TEST)
    assert re.fullmatch(r"<caffepy net '<b>small</b>' \(TEST\): 3 layers, 12 parameters, on CPU, 1 thread>", repr(net))


def test_a_nets_table_escapes_its_names() -> None:
    html = build_net(NET, caffe_pb2.TEST)._repr_html_()
    assert html.count("<tr>") == 4
    for text in ("&lt;script&gt;", "a&amp;b 4 × 3", "&lt;b&gt;small&lt;/b&gt;", "3 × 3, 3", "float32"):
        assert text in html
    assert "<script>" not in html
    assert "<b>small" not in html


def test_a_solver_says_how_far_it_is() -> None:
    with build_solver('base_lr: 0.1 lr_policy: "fixed" max_iter: 9 ', TRAINED) as solver:
        assert "SGD solver of net 'small': iteration 0 of 9, on CPU" in repr(solver)
        solver.step(2)
        assert re.search(r"iteration 2 of 9, loss [\d.e-]+, on CPU", repr(solver))
        html = solver._repr_html_()
        assert "base_lr" in html
        assert "InnerProduct" in html


@pytest.mark.parametrize(
    ("progress", "prompt", "shown"),
    [(True, False, True), (None, True, True), (False, True, False), (None, False, False)],
)
def test_a_step_shows_progress_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    progress: bool | None,
    prompt: bool,
    shown: bool,
) -> None:
    monkeypatch.setattr("caffepy.training.solver.interactive", lambda: prompt)
    monkeypatch.setattr("caffepy.utils.progress._INTERVAL", 0.001)
    with build_solver('base_lr: 0.1 lr_policy: "fixed" max_iter: 9 ', TRAINED) as solver:
        solver.step(400, progress)
    assert ("400/400" in capsys.readouterr().err) == shown

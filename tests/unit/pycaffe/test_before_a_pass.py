"""What blobs hold before a net's first pass, and what the first pass makes of what a program wrote there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy import pycaffe as caffe

DUMMY = """
layer { name: 'd' type: 'DummyData' top: 'data' top: 'y'
  dummy_data_param {
    shape { dim: 2 dim: 3 } shape { dim: 2 dim: 1 } data_filler { value: 7 } data_filler { value: 0 } } }
layer { name: 'ip' type: 'InnerProduct' bottom: 'data' top: 'ip'
  inner_product_param { num_output: 1 bias_term: false weight_filler { value: 0.5 } } }
layer { name: 'l' type: 'EuclideanLoss' bottom: 'ip' bottom: 'y' top: 'l' }
"""


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def net(text: str, phase: int = caffe.TEST) -> Any:
        path = tmp_path / "net.prototxt"
        path.write_text(text)
        return caffe.Net(str(path), phase)

    return net


def test_constants_of_dummy_data_are_there_from_the_beginning(make: Any) -> None:
    net = make(DUMMY)
    assert (net.blobs["data"].data == 7).all()
    net = make(DUMMY)
    net.forward(start="ip")
    assert (net.blobs["ip"].data == 10.5).all()


def test_a_solver_trains_on_what_the_program_wrote_into_dummy_data(tmp_path: Path) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text(f"net_param {{ {DUMMY} }} base_lr: 0.1 lr_policy: 'fixed' max_iter: 9 snapshot_after_train: false")
    solver = caffe.get_solver(str(path))
    solver.net.blobs["data"].data[...] = 1
    solver.net.blobs["y"].data[...] = 2
    solver.step(1)
    assert solver.net.blobs["l"].data == pytest.approx(0.125)
    np.testing.assert_allclose(solver.net.params["ip"][0].data, np.full((1, 3), 0.55), rtol=1e-5)


def test_a_reshaped_dummy_data_keeps_what_the_program_writes(make: Any) -> None:
    net = make(DUMMY, caffe.TRAIN)
    for rows in (2, 4, 1, 3):
        net.blobs["data"].reshape(rows, 3)
        net.blobs["y"].reshape(rows, 1)
        net.blobs["data"].data[...] = rows
        net.forward()
        assert (net.blobs["ip"].data == 1.5 * rows).all()


def test_random_dummy_data_is_0_until_the_first_pass_and_new_in_each(make: Any) -> None:
    net = make(
        "layer { name: 'd' type: 'DummyData' top: 'a' top: 'b' dummy_data_param { shape { dim: 4 } "
        "data_filler { type: 'gaussian' std: 1 } data_filler { value: 3 } } }"
    )
    seen = [net.blobs["a"].data.copy()]
    assert not seen[0].any()
    net.blobs["a"].data[...] = 5
    net.blobs["b"].data[0] = 4
    for _ in range(2):
        net.forward()
        seen.append(net.blobs["a"].data.copy())
        assert net.blobs["b"].data.tolist() == [4, 3, 3, 3]
    assert not (seen[1] == 5).any()
    assert (seen[1] != seen[2]).all()

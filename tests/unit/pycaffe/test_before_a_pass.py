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


SUM = "layer { name: 'sum' type: 'Reduction' bottom: 'b' top: 'sum' }"
IMAGE, ROWS = (2, 3, 2, 2), (2, 12)
AT_SETUP = {
    "Reshape of rows": (ROWS, "type: 'Reshape' reshape_param { shape { dim: 0 dim: 4 dim: 3 } }"),
    "Reshape of an image": (IMAGE, "type: 'Reshape' reshape_param { shape { dim: 0 dim: -1 } }"),
    "Reshape to an image": (ROWS, "type: 'Reshape' reshape_param { shape { dim: 0 dim: 3 dim: 2 dim: 2 } }"),
    "Concat": (IMAGE, "type: 'Concat'"),
    "Slice": (IMAGE, "type: 'Slice'"),
}
IN_PASSES = {
    "Flatten of rows": (ROWS, "type: 'Flatten' flatten_param { axis: 0 }"),
    "Flatten of an image": (IMAGE, "type: 'Flatten'"),
    "Split": (IMAGE, "type: 'Split'"),
    "Permute": (IMAGE, "type: 'Permute' permute_param { order: 0 order: 1 }"),
}


def joined(shape: tuple[int, ...], layer: str, source: str = "Input") -> str:
    dims = "shape { " + " ".join(f"dim: {size}" for size in shape) + " }"
    param = f"dummy_data_param {{ {dims} data_filler {{ value: 7 }} }}"
    given = f"input_param {{ {dims} }}" if source == "Input" else param
    return (
        f"layer {{ name: 'a' type: '{source}' top: 'a' {given} }} layer {{ name: 'b' bottom: 'a' top: 'b' {layer} }}"
        f"{SUM}"
    )


def numbers(shape: tuple[int, ...], first: int = 1) -> np.ndarray:
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("shape", "layer"), AT_SETUP.values(), ids=AT_SETUP.keys())
@pytest.mark.parametrize("phase", [caffe.TRAIN, caffe.TEST])
def test_tops_that_share_from_the_beginning(make: Any, shape: Any, layer: str, phase: int) -> None:
    net = make(joined(shape, layer, "DummyData"), phase)
    assert (net.blobs["b"].data == 7).all()
    assert net.forward(start="sum")["sum"] == 7 * np.prod(shape)
    net = make(joined(shape, layer), phase)
    written = numbers(shape)
    net.blobs["a"].data[...] = written
    assert net.blobs["b"].data.ravel().tolist() == written.ravel().tolist()
    assert net.forward(start="sum")["sum"] == written.sum()
    net.blobs["b"].data[...] = 3
    assert (net.blobs["a"].data == 3).all()
    net.blobs["a"].reshape(1, *shape[1:])
    net.reshape()
    net.blobs["a"].data[...] = numbers((1, *shape[1:]), 5)
    assert net.forward(start="sum")["sum"] == numbers((1, *shape[1:]), 5).sum()


@pytest.mark.parametrize(("shape", "layer"), {**AT_SETUP, **IN_PASSES}.values(), ids=[*AT_SETUP, *IN_PASSES])
@pytest.mark.parametrize("phase", [caffe.TRAIN, caffe.TEST])
def test_tops_that_share_after_a_pass(make: Any, shape: Any, layer: str, phase: int) -> None:
    net = make(joined(shape, layer), phase)
    net.forward()
    kept = net.blobs["a"].data
    for first in (1, 50, 90):
        written = numbers(shape, first)
        kept[...] = written
        assert net.forward(start="sum")["sum"] == written.sum()
        assert net.blobs["b"].data.ravel().tolist() == written.ravel().tolist()
        net.blobs["b"].data[...] = written.reshape(net.blobs["b"].shape) + 1
        assert (kept == written + 1).all()
        assert net.forward(start="sum")["sum"] == (written + 1).sum()
        assert net.forward()["sum"] == (written + 1).sum()


@pytest.mark.parametrize(("shape", "layer"), IN_PASSES.values(), ids=IN_PASSES.keys())
def test_tops_that_share_in_passes_only_are_0_before(make: Any, shape: Any, layer: str) -> None:
    net = make(joined(shape, layer, "DummyData"))
    assert not net.blobs["b"].data.any()
    assert net.forward(start="sum")["sum"] == 0
    assert net.forward()["sum"] == 7 * np.prod(shape)


def test_a_value_written_before_flatten_is_seen_behind_it_and_in_the_backward_pass(make: Any) -> None:
    net = make(
        "force_backward: true layer { name: 'a' type: 'Input' top: 'a' input_param { shape { dim: 1 dim: 2 dim: 2 "
        "dim: 2 } } } layer { name: 'flat' type: 'Flatten' bottom: 'a' top: 'flat' } layer { name: 'r' type: 'Reshape' "
        "bottom: 'flat' top: 'r' reshape_param { shape { dim: 0 dim: 4 dim: 2 } } } "
        "layer { name: 'ip' type: 'InnerProduct' bottom: 'r' top: 'ip' inner_product_param { num_output: 1 "
        "bias_term: false weight_filler { value: 1 } } }",
        caffe.TRAIN,
    )
    net.forward()
    net.blobs["a"].data[...] = numbers((1, 2, 2, 2))
    net.blobs["ip"].diff[...] = 1
    net.backward()
    assert net.params["ip"][0].diff.ravel().tolist() == list(range(1, 9))
    net.blobs["r"].data[0, 3] = 0
    assert net.blobs["a"].data[0, 1, 1].tolist() == [0, 0]
    assert net.forward(start="ip")["ip"] == 21


def test_the_top_of_a_parameter_layer_is_the_parameter_after_a_pass(make: Any) -> None:
    net = make(
        "layer { name: 'p' type: 'Parameter' top: 'p' parameter_param { shape { dim: 1 dim: 2 dim: 2 dim: 2 } } }"
    )
    net.params["p"][0].data[...] = 2
    net.blobs["p"].data[...] = 5
    assert (net.forward()["p"] == 2).all()
    net.blobs["p"].data[...] = 3
    assert (net.params["p"][0].data == 3).all()
    assert (net.forward()["p"] == 3).all()


def test_outputs_kept_over_passes_are_overwritten_though_they_are_copies(make: Any) -> None:
    net = make(
        "layer { name: 'a' type: 'Input' top: 'a' input_param { shape { dim: 1 dim: 2 dim: 2 dim: 2 } } } "
        "layer { name: 'p' type: 'Power' bottom: 'a' top: 'p' power_param { scale: 2 } } "
        "layer { name: 'b' type: 'Reshape' bottom: 'p' top: 'b' reshape_param { shape { dim: 0 dim: -1 } } }"
    )
    before = net.blobs["b"].data
    kept = net.forward()["b"]
    for value in (1, 2, 3, 4):
        again = net.forward(a=np.full((1, 2, 2, 2), value))["b"]
        assert (again == 2 * value).all()
        assert (kept == 2 * value).all()
        assert (before == 2 * value).all()


def test_diffs_of_tops_with_a_loss_weight_are_the_weight_from_the_beginning(make: Any) -> None:
    net = make(
        "layer { name: 'a' type: 'Input' top: 'a' top: 'y' input_param { shape { dim: 2 dim: 3 } } } "
        "layer { name: 'p' type: 'Power' bottom: 'a' top: 'p' loss_weight: 2 } "
        "layer { name: 'l' type: 'EuclideanLoss' bottom: 'a' bottom: 'y' top: 'l' loss_weight: 3 }"
    )
    assert (net.blobs["p"].diff == 2).all()
    assert net.blobs["l"].diff == 3


def test_what_was_written_to_an_array_kept_over_a_pass_and_then_released_is_not_lost(make: Any) -> None:
    net = make(joined(IMAGE, "type: 'Power'"), caffe.TRAIN)
    kept = net.blobs["b"].data
    net.forward()
    kept[...] = numbers(IMAGE)
    del kept
    assert net.forward(start="sum")["sum"] == numbers(IMAGE).sum()

"""The policy "stepearly" and test_offset in a solver, LARS of Intel Caffe, and a solver's list of devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training import build_solver, weights_of

from caffepy.formats.load import name_devices, read_solver

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1 } param { lr_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "zero" type: "Power" bottom: "loss" top: "score" power_param { scale: 0 } include { phase: TEST } }
"""
EARLY = """base_lr: 0.5 lr_policy: "stepearly" gamma: 0.5 stepearly: 2 test_iter: 1 test_interval: 1 display: 1
    random_seed: 3 """


def test_steps_while_tests_do_not_improve_and_resumes(tmp_path: Path) -> None:
    text = EARLY + f'snapshot_prefix: "{tmp_path}/x"'
    with build_solver(text, NET) as solver:
        rates = []
        for _ in range(6):
            solver.step(1)
            rates.append(solver.hyperparameters.rate)
        state = solver.snapshot()
        solver.step(3)
        wanted, last = weights_of(solver.net), solver.hyperparameters.rate
    assert rates == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    with build_solver(text, NET) as solver:
        solver.restore(state)
        solver.step(3)
        assert solver.hyperparameters.rate == last < 0.125
        for name, values in weights_of(solver.net).items():
            np.testing.assert_array_equal(values, wanted[name])


def test_tests_begin_at_the_offset(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    text = EARLY.replace('"stepearly"', '"fixed"').replace("test_interval: 1", "test_interval: 3 test_offset: 2")
    with build_solver(text, NET) as solver:
        solver.step(7)
    messages = [record.getMessage() for record in caplog.records]
    assert [text.split(",")[0] for text in messages if "Testing net" in text] == ["Iteration 2", "Iteration 5"]


def test_lars_takes_the_ratio_of_norms_for_the_rate() -> None:
    text = "base_lr: 0.5 lr_policy: 'fixed' weight_decay: 0.1 local_lr_auto: true local_gw_ratio: 0.01 random_seed: 3"
    net = NET.replace("param { lr_mult: 1 }", "param { lr_mult: 7 }")
    with build_solver(text, net) as solver:
        before = weights_of(solver.net)["ip_0"].astype(np.float64)
        solver.step(1)
        gradient = solver.net.layers[solver.net.layer_names.index("ip")].blobs[0].host_diff().astype(np.float64)
        size, slope = np.linalg.norm(before), np.linalg.norm(gradient)
        rate = 0.5 * 0.01 * size / (slope + 0.1 * size)
        wanted = before - rate * (gradient + 0.1 * before)
        np.testing.assert_allclose(weights_of(solver.net)["ip_0"], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("device_id: [0, 1,2]", [0, 1, 2]),
        ("device_id: 3 device_id: 4", [3, 4]),
        ("device_id: 3", []),
        ("# device_id: [1]\ndevice_id: 5", []),
        ('snapshot_prefix: "device_id: [1]" device_id: 5', []),
        ("device_id: [7] device_id: 1 # two", [7, 1]),
    ],
)
def test_a_list_of_devices(tmp_path: Path, text: str, ids: list[int]) -> None:
    path = tmp_path / "solver.prototxt"
    path.write_text(f"net: 'n'\n{text}\n")
    param = read_solver(path)
    assert list(param.device_ids) == ids
    assert ids or name_devices(text) == text

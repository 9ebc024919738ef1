"""An LSTM learns to add binary numbers: the carry has to be kept from one time step to the next."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from training import build_solver

from caffepy.training.solver import preserve_running_stats

BITS, STREAMS, BATCHES = 8, 32, 40

NET = """
layer {{ name: "data" type: "HDF5Data" top: "bits" top: "cont" top: "sum"
  hdf5_data_param {{ source: "{list}" batch_size: {bits} }} }}
layer {{ name: "lstm" type: "LSTM" bottom: "bits" bottom: "cont" top: "h" recurrent_param {{
  num_output: 8 weight_filler {{ type: "uniform" min: -0.3 max: 0.3 }} bias_filler {{ type: "constant" }} }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "h" top: "ip"
  inner_product_param {{ num_output: 1 axis: 2 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SigmoidCrossEntropyLoss" bottom: "ip" bottom: "sum" top: "loss" }}
"""
SOLVER = 'type: "Adam" base_lr: 0.03 momentum: 0.9 momentum2: 0.999 lr_policy: "fixed" max_iter: 400'


def write_sums(folder: Path) -> Path:
    """Pairs of numbers and their sums, lowest bit first, one time step a row; gives the list of files."""
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 2 ** (BITS - 1), (BATCHES, STREAMS, 2))
    steps = np.arange(BITS).reshape(1, BITS, 1)
    bits = [(number[:, None, :] >> steps) & 1 for number in (numbers[..., 0], numbers[..., 1], numbers.sum(-1))]
    cont = np.broadcast_to(steps > 0, bits[0].shape)
    rows = {"bits": np.stack(bits[:2], -1), "cont": cont, "sum": bits[2][..., None]}
    with h5py.File(folder / "sums.h5", "w") as file:
        for name, values in rows.items():
            file[name] = values.reshape(BATCHES * BITS, *values.shape[2:]).astype(np.float32)
    (folder / "list.txt").write_text(f"{folder / 'sums.h5'}\n")
    return folder / "list.txt"


def test_an_lstm_learns_to_add(tmp_path: Path) -> None:
    net = NET.format(list=write_sums(tmp_path), bits=BITS)
    with build_solver(SOLVER, net) as solver:
        solver.step(400)
        net = solver.net
        net.forward()
        found, wanted = net.blobs["ip"].host_data() > 0, net.blobs["sum"].host_data() > 0.5
        assert (found == wanted).mean() > 0.99


def test_a_forward_pass_that_is_no_training_leaves_the_state(tmp_path: Path) -> None:
    """The pass that shows the last loss: what was kept for the next pass is there again."""
    net = NET.format(list=write_sums(tmp_path), bits=BITS)
    with build_solver(SOLVER, net) as solver:
        solver.step(2)
        before = [array.copy() for array in solver.net.state()]
        assert len(before) == 2 and all(array.any() for array in before)
        with preserve_running_stats(solver.net):
            solver.net.forward()
            assert not np.array_equal(solver.net.state()[0], before[0])
        assert all(map(np.array_equal, solver.net.state(), before))

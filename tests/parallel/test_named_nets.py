"""Nets whose layers have no names or equal ones, trained by `caffepy train` under mpirun."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from named_nets import BATCH, NamedNet, write_data
from processes import find_mpirun
from subprocess_training import Outcome, SubprocessTraining

from caffepy.formats.proto.caffe_pb2 import NetParameter

ITERATIONS = 6


def parameters(outcome: Outcome) -> list[np.ndarray]:
    """All parameters in the snapshot after the last iteration, in the order of the layers."""
    net = NetParameter.FromString((outcome.folder / f"{outcome.prefix}_iter_{ITERATIONS}.caffemodel").read_bytes())
    return [np.array(blob.data) for layer in net.layer for blob in layer.blobs if layer.type != "BatchNorm"]


@pytest.mark.parametrize(("seed", "ranks", "threads"), [(1, 3, 1), (2, 2, 2), (7, 2, 1)])
def test_ranks_train_as_one_device(
    training: SubprocessTraining, seed: int, ranks: int, threads: int, tmp_path: Path
) -> None:
    find_mpirun()
    net = NamedNet(seed, write_data(tmp_path))
    outcomes = []
    for count, each in ((0, 1), (ranks, threads)):
        share = BATCH // max(count, 1)
        outcomes.append(
            training.train(
                "--cpu-solvers",
                str(each),
                "--sync-bn",
                ranks=count,
                iterations=ITERATIONS,
                net_text=net.prototxt(share, share // each),
                solver_text="layer_wise_reduce: true",
            )
        )
        assert outcomes[-1].status == 0, outcomes[-1].log
    for mine, theirs in zip(*map(parameters, outcomes), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-4 * max(np.abs(theirs).max(), 0.1))

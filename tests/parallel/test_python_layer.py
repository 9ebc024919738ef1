"""A loss that a user wrote in Python trains a small LeNet on two ranks as on one."""

from __future__ import annotations

import numpy as np
from processes import find_mpirun
from subprocess_training import NET, SubprocessTraining

LOSS = '''
import numpy as np


class OneHotDistance:
    """EuclideanLoss between scores and one-hot labels."""

    def setup(self, bottom, top):
        self.weight = float(self.param_str)

    def reshape(self, bottom, top):
        top[0].reshape(1)

    def forward(self, bottom, top):
        labels = bottom[1].data.astype(int)
        self.difference = bottom[0].data - np.eye(bottom[0].shape[1], dtype=np.float32)[labels]
        top[0].data[...] = self.weight * np.sum(self.difference**2) / bottom[0].num / 2

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff[0] * self.weight * self.difference / bottom[0].num
'''
PYTHON_NET = NET.replace(
    'type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }',
    """type: "Python" bottom: "ip2" bottom: "label" top: "loss" loss_weight: 1
        python_param { module: "one_hot_distance" layer: "OneHotDistance" param_str: "1" } }""",
)


def test_two_ranks_train_with_a_python_loss_as_one_does(training: SubprocessTraining) -> None:
    """The module lies beside the prototxt."""
    find_mpirun()
    (training.folder / "one_hot_distance.py").write_text(LOSS)
    outcomes = [
        training.train(ranks=ranks, batch=64 // max(ranks, 1), iterations=25, net_text=PYTHON_NET, snapshot=25)
        for ranks in (0, 2)
    ]
    for outcome in outcomes:
        assert outcome.status == 0, outcome.log
    alone, together = (outcome.weights(25) for outcome in outcomes)
    for name, values in alone.items():
        np.testing.assert_allclose(together[name], values, rtol=0, atol=2e-4 * np.abs(values).max(), err_msg=name)
    accuracy = float(outcomes[1].scores()[-2].split("accuracy = ")[1])
    assert accuracy > 0.3

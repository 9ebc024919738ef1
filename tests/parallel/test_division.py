"""Two ranks train and score as one does where a user's Python layer makes the data and the test net keeps state."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
from processes import find_mpirun, program_environment
from subprocess_training import RANKS, Outcome, SubprocessTraining

MADE = '''
import numpy as np
import threading
import caffepy.as_caffe
import caffe


class Samples(caffe.Layer):
    """Sample i of the data set, which a thread of the layer's own reads in turns."""

    def setup(self, bottom, top):
        self.batch = int(self.param_str)
        thread = threading.Thread(target=self.seek)
        thread.start()
        thread.join()

    def seek(self):
        self.first = caffe.solver_rank() * self.batch if self.phase == caffe.TRAIN else 0

    def reshape(self, bottom, top):
        top[0].reshape(self.batch, 9)
        top[1].reshape(self.batch)

    def forward(self, bottom, top):
        for row in range(self.batch):
            top[0].data[row] = np.random.default_rng(self.first + row).standard_normal(9)
            top[1].data[row] = (self.first + row) % 3
        self.first += caffe.solver_count() * self.batch

    def backward(self, top, down, bottom): ...
'''
NET = """
name: "small"
layer { name: "train" type: "Python" top: "data" top: "label" include { phase: TRAIN }
  python_param { module: "made_samples" layer: "Samples" param_str: "%(batch)d" } }
layer { name: "test" type: "Python" top: "data" top: "label" include { phase: TEST }
  python_param { module: "made_samples" layer: "Samples" param_str: "4" } }
layer { name: "ip0" type: "InnerProduct" bottom: "data" top: "ip0"
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "drop" type: "Dropout" bottom: "ip0" top: "ip0" }
layer { name: "ip" type: "InnerProduct" bottom: "ip0" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "cont" type: "DummyData" top: "cont" include { phase: TEST }
  dummy_data_param { shape { dim: 2 dim: 2 } data_filler { type: "constant" value: 1 } } }
layer { name: "time" type: "Reshape" bottom: "data" top: "time" include { phase: TEST }
  reshape_param { shape { dim: 2 dim: 2 dim: 9 } } }
layer { name: "lstm" type: "LSTM" bottom: "time" bottom: "cont" top: "lstm" include { phase: TEST }
  recurrent_param { num_output: 4 weight_filler { type: "constant" value: 0.1 } } }
layer { name: "mean" type: "Reduction" bottom: "lstm" top: "mean" include { phase: TEST } }
"""


def scored(outcome: Outcome, *launcher: str) -> list[str]:
    """The lines of scores of `caffepy test` of a run's snapshot."""
    net = f"net{outcome.prefix.removeprefix('run')}.prototxt"
    words = [*launcher, sys.executable, "-m", "caffepy", "test", "--cpu", "--model", net, "--iterations", "5"]
    words += ["--weights", f"{outcome.prefix}_iter_4.caffemodel"]
    done = subprocess.run(
        words, cwd=outcome.folder, env=program_environment({}), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"\] ((?:Batch \d+, )?\w+ = .*)", done.stderr)


def test_ranks_train_and_score_as_one_process(training: SubprocessTraining) -> None:
    find_mpirun()
    (training.folder / "made_samples.py").write_text(MADE)
    alone, together = (
        training.train(ranks=ranks, batch=8 // max(ranks, 1), iterations=4, snapshot=4, net_text=NET)
        for ranks in (0, 2)
    )
    assert alone.status == together.status == 0, together.log
    ours, theirs = alone.weights(4), together.weights(4)
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, rtol=0, atol=2e-6, err_msg=name)
    assert alone.scores() == together.scores() and alone.scores()
    assert len(together.logged("device 0 alone scores this net")) == 1
    lines = scored(alone)
    assert scored(alone, sys.executable, str(RANKS), "2") == lines and len(lines) > 5

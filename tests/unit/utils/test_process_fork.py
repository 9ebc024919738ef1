"""Processes that are forked after their parent made and ran nets and solvers, as `multiprocessing` makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from caffepy.utils.process_fork import free_after_fork, tell_after_fork

PROGRAM = """
import json, multiprocessing, sys
import numpy as np
from caffepy import pycaffe as caffe

folder = sys.argv[1]
x = np.random.default_rng(1).standard_normal((2, 500)).astype(np.float32)

def new_net(phase=caffe.TEST):
    caffe.set_random_seed(7)
    return caffe.Net(folder + "/net.prototxt", phase)

def new_solver():
    return caffe.get_solver(folder + "/solver.prototxt")

def forward(net):
    return net.forward(data=x)["out"].ravel().tolist()

def train(solver):
    solver.step(100)  # more batches than the parent has read ahead
    return float(solver.net.blobs["loss"].data)

def results():
    return {
        "a new net": forward(new_net()), "a new net for training": forward(new_net(caffe.TRAIN)),
        "a net that has run": forward(ran), "a net that has not run": forward(fresh),
        "a new solver": train(new_solver()), "a solver that has trained": train(trained),
        "a solver that has not trained": train(untrained),
    }

def child(pipe):
    pipe.send(results())

ran, trained, untrained = new_net(), new_solver(), new_solver()
for _ in range(2):
    forward(ran)
trained.step(3)
fresh = new_net(caffe.TRAIN)  # its parameters are not filled yet
context = multiprocessing.get_context("fork")
found = []
for _ in range(2):
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(200), "the child waits for ever"
    found.append(ours.recv())
    process.join()
found.append(results())
print(json.dumps(found))
"""

NET = """
layer { name: 'data' type: 'Input' top: 'data' input_param { shape { dim: 2 dim: 500 } } }
layer { name: 'a' type: 'InnerProduct' bottom: 'data' top: 'a'
  inner_product_param { num_output: 1500 weight_filler { type: 'xavier' } } }
layer { name: 'b' type: 'InnerProduct' bottom: 'a' top: 'b'
  inner_product_param { num_output: 1500 weight_filler { type: 'xavier' } } }
layer { name: 'out' type: 'InnerProduct' bottom: 'b' top: 'out'
  inner_product_param { num_output: 5 weight_filler { type: 'gaussian' std: 1 } } }
"""

TRAIN = """
layer { name: 'd' type: 'ImageData' top: 'data' top: 'label'
  image_data_param { source: 'list.txt' root_folder: '%s/' batch_size: 4 shuffle: true } }
layer { name: 'ip' type: 'InnerProduct' bottom: 'data' top: 'ip'
  inner_product_param { num_output: 600 weight_filler { type: 'xavier' } } }
layer { name: 'drop' type: 'Dropout' bottom: 'ip' top: 'ip' }
layer { name: 'out' type: 'InnerProduct' bottom: 'ip' top: 'out'
  inner_product_param { num_output: 4 weight_filler { type: 'xavier' } } }
layer { name: 'loss' type: 'SoftmaxWithLoss' bottom: 'out' bottom: 'label' top: 'loss' }
"""


def write_images(folder: Path) -> None:
    import cv2
    import numpy as np

    lines = []
    for number in range(10):
        pixels = np.random.default_rng(number).integers(0, 255, (9, 9, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), pixels)
        lines.append(f"{number}.png {number % 4}")
    (folder / "list.txt").write_text("\n".join(lines))


@pytest.mark.slow
def test_nets_and_solvers_work_in_forked_processes(tmp_path: Path) -> None:
    """New ones and those of the parent: the numbers are those that the parent has after the same calls."""
    write_images(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "train.prototxt").write_text(TRAIN % tmp_path)
    (tmp_path / "solver.prototxt").write_text(
        f"net: '{tmp_path}/train.prototxt' base_lr: 0.0001 lr_policy: 'fixed' random_seed: 5 max_iter: 1000"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=590, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    *children, parent = json.loads(done.stdout.splitlines()[-1])
    assert len(children) == 2
    for name, numbers in parent.items():
        for child in children:
            assert child[name] == pytest.approx(numbers, rel=1e-4), name


class Listener:
    """Notes that it was told."""

    def __init__(self) -> None:
        self.told = False

    def forked(self) -> None:
        self.told = True


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_locks_are_free_and_objects_are_told() -> None:
    locks = [free_after_fork(lock) for lock in (threading.Lock(), threading.RLock())]
    listener, held, end = Listener(), threading.Event(), threading.Event()
    tell_after_fork(listener)

    def hold() -> None:
        with locks[0], locks[1]:
            held.set()
            end.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(300)
    child = os.fork()
    if child == 0:
        os._exit(0 if listener.told and all(lock.acquire(blocking=False) for lock in locks) else 1)
    end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not listener.told

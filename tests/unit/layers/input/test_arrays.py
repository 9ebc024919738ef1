"""MemoryData and HDF5Output: the program's own arrays in, a file out."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, Runner, backend_named, gaussian
from training import build_solver

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, RunError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.layers.input.arrays import MemoryDataLayer
from caffepy.net.net import Net
from caffepy.utils.options import ExecutionOptions

MEMORY = "type: 'MemoryData' memory_data_param { batch_size: 2 channels: 3 height: 4 width: 5 }"


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_follow_on_each_other_and_begin_again(backend):
    runner = Runner(MEMORY, [], backend, tops=2)
    assert [blob.shape for blob in runner.top] == [(2, 3, 4, 5), (2,)]
    data, labels = gaussian((6, 3, 4, 5)), np.arange(6, dtype=np.float32)
    runner.layer.reset_arrays(data, labels)
    for first in (0, 2, 4, 0, 2):
        found = runner.forward()
        assert [blob.shape for blob in runner.top] == [(2, 3, 4, 5), (2, 1, 1, 1)]
        assert np.array_equal(found[0], data[first : first + 2])
        assert np.array_equal(found[1].ravel(), labels[first : first + 2])
    runner.layer.reset_arrays(data[2:4], labels[2:4].reshape(2, 1, 1, 1))
    assert np.array_equal(runner.forward()[0], data[2:4])
    assert "from the host" in str(runner.layer.capture_blocker())


def test_memory_data_refuses(caplog):
    with pytest.raises(ConfigError, match="needs batch_size, channels, height and width, all at least 1"):
        Runner("type: 'MemoryData' memory_data_param { batch_size: 2 channels: 3 height: 4 }", [], tops=2)
    runner = Runner(MEMORY + " transform_param { scale: 2 }", [], tops=2)
    with pytest.raises(
        RunError, match=r"layer 'L' \(MemoryData\) has no data; call its reset_arrays .*set_input_arrays"
    ):
        runner.forward()
    with pytest.raises(ShapeError, match=r"data of shape \(2, 3, 5, 4\) do not fit"):
        runner.layer.reset_arrays(gaussian((2, 3, 5, 4)), gaussian((2,)))
    for rows, labels in ((3, 3), (2, 4), (0, 0)):
        with pytest.raises(ShapeError, match=rf"{rows} rows of data and {labels} labels; .* of the batch size 2"):
            runner.layer.reset_arrays(gaussian((rows, 3, 4, 5)), gaussian((labels,)))
    runner.layer.reset_arrays(gaussian((2, 3, 4, 5)), gaussian((2,)))
    assert "transform_param has no effect" in caplog.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_hdf5_output_writes_what_it_sees(backend, tmp_path):
    path = tmp_path / "out.h5"
    text = f"""layer {{ name: "d" {MEMORY} top: "x" top: "label" }}
      layer {{ name: "r" type: "ReLU" bottom: "x" top: "r" }}
      layer {{ name: "o" type: "HDF5Output" bottom: "r" bottom: "label"
        hdf5_output_param {{ file_name: "{path}" }} }}"""
    device = backend_named(backend)
    data, labels = gaussian((4, 3, 4, 5)), np.arange(4, dtype=np.float32)
    with device.activate():
        net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(device, caffe_pb2.TEST))
        source = net.layers[0]
        assert isinstance(source, MemoryDataLayer)
        source.reset_arrays(data, labels)
        for first in (0, 2):
            net.forward()
            with h5py.File(path) as file:
                assert file["data"].dtype == np.float32 and file["label"].shape == (2, 1, 1, 1)
                assert np.array_equal(file["data"], np.maximum(data[first : first + 2], 0))
                assert np.array_equal(file["label"][:].reshape(-1), labels[first : first + 2])


def test_hdf5_output_on_rank_0_alone(tmp_path):
    path = tmp_path / "out.h5"
    text = f"type: 'HDF5Output' hdf5_output_param {{ file_name: '{path}' }}"
    runner = Runner(text, [gaussian((2, 3)), gaussian((2,))], shard=Shard(1, 2))
    runner.forward()
    assert not path.exists()
    assert not any(diff.any() for diff in runner.backward([]))


def test_hdf5_output_refuses(tmp_path):
    with pytest.raises(ConfigError, match="hdf5_output_param.file_name must name the file to write"):
        Runner("type: 'HDF5Output'", [gaussian((2, 3)), gaussian((2,))])
    text = f"type: 'HDF5Output' hdf5_output_param {{ file_name: '{tmp_path}/none/out.h5' }}"
    with pytest.raises(ShapeError, match="both bottoms must have the same first axis"):
        Runner(text, [gaussian((2, 3)), gaussian((3,))])
    with pytest.raises(RunError, match="cannot be written"):
        Runner(text, [gaussian((2, 3)), gaussian((2,))]).forward()


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize("kind", ["", "default_forward_type: FLOAT16 default_backward_type: FLOAT16"])
def test_labels_of_memory_data_in_losses(kind, plan):
    """Losses and Accuracy take the labels in the shape before and after the first pass."""
    text = f"""{kind} layer {{ name: "d" {MEMORY} top: "x" top: "label" }}
      layer {{ name: "i" type: "InnerProduct" bottom: "x" top: "i"
        inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
      layer {{ name: "l" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" top: "l" }}
      layer {{ name: "h" type: "HingeLoss" bottom: "i" bottom: "label" top: "h" }}
      layer {{ name: "a" type: "Accuracy" bottom: "i" bottom: "label" top: "a" propagate_down: false
        propagate_down: false }}"""
    settings = "base_lr: 0.1 lr_policy: 'fixed' max_iter: 3 snapshot_after_train: false"
    with build_solver(settings, text, engine=ExecutionOptions(share=plan, fuse=plan)) as solver:
        solver.net.layers[0].reset_arrays(gaussian((2, 3, 4, 5)), np.array([2, 1], np.float32))
        losses = []
        for _ in range(3):
            solver.step(1)
            losses.append(float(solver.net.blobs["l"].host_data()))
    assert losses[2] < losses[0]

"""NdConvolution, NdPooling and PoolingND: Convolution and Pooling with settings under other names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from layer_harness import Runner, gaussian, spread

import caffepy
from caffepy.errors import ConfigError, ShapeError

CLIP = (2, 4, 5, 6, 7)

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 2 dim: 3 dim: 4 dim: 8 dim: 8 } shape { dim: 2 } data_filler { type: "gaussian" }
  data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "NdConvolution" bottom: "data" top: "conv" convolution_param { num_output: 4
  kernel_shape { dim: 3 dim: 3 dim: 3 } stride_shape { dim: 1 dim: 1 dim: 1 } pad_shape { dim: 1 dim: 1 dim: 1 }
  weight_filler { type: "gaussian" std: 0.1 } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "NdPooling" bottom: "conv" top: "pool" pooling_param { pool: MAX
  kernel_shape { dim: 1 dim: 2 dim: 2 } stride_shape { dim: 1 dim: 2 dim: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param { num_output: 3 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def shape(name: str, *sizes: int) -> str:
    return f"{name}_shape {{ {' '.join(f'dim: {size}' for size in sizes)} }}"


@pytest.mark.parametrize(
    ("own", "of_caffe"),
    [
        (f"{shape('kernel', 2, 3, 3)}", "kernel_size: 2 kernel_size: 3 kernel_size: 3"),
        (
            f"group: 2 bias_term: false {shape('kernel', 3)} {shape('stride', 1, 2, 2)} {shape('pad', 0, 1, 1)} pad: 9",
            "group: 2 bias_term: false kernel_size: 3 stride: 1 stride: 2 stride: 2 pad: 0 pad: 1 pad: 1",
        ),
    ],
)
def test_a_convolution_is_that_of_caffe(own: str, of_caffe: str) -> None:
    results = []
    for kind, text in (("NdConvolution", own), ("Convolution", of_caffe)):
        text = f"type: '{kind}' convolution_param {{ num_output: 6 {text} }}"
        runner = Runner(text, [gaussian(CLIP)])
        params = [gaussian(blob.shape, seed) for seed, blob in enumerate(runner.layer.blobs)]
        runner = Runner(text, [gaussian(CLIP)], params=params)
        results.append(runner.run([gaussian(runner.top[0].shape, 9)]))
    first, second = results
    assert np.array_equal(first.tops[0], second.tops[0]) and first.tops[0].any()
    gradients = ([*one.bottom_diffs, *one.param_diffs] for one in (first, second))
    for mine, caffes in zip(*gradients, strict=True):
        assert np.array_equal(mine, caffes)


@pytest.mark.parametrize(
    ("own", "of_caffe"),
    [
        (shape("kernel", 1, 2, 2), shape("kernel", 1, 2, 2)),
        (
            f"pool: AVE {shape('kernel', 3)} {shape('stride', 2)} {shape('pad', 0, 1, 1)} kernel_size: 9 stride: 9",
            f"pool: AVE kernel_size: 3 stride: 2 {shape('pad', 0, 1, 1)}",
        ),
        (f"round_mode: FLOOR {shape('kernel', 2)} {shape('stride', 2)}", "kernel_size: 2 stride: 2"),
        (f"pool: AVE global_pooling: true {shape('kernel', 2)}", "pool: AVE global_pooling: true"),
    ],
)
def test_a_pooling_is_that_of_caffe(own: str, of_caffe: str) -> None:
    same_numbers(f"'NdPooling' pooling_param {{ {own} }}", f"'Pooling' pooling_param {{ {of_caffe} }}")


@pytest.mark.parametrize(
    ("own", "of_caffe"),
    [
        ("kernel_size: 1 kernel_size: 2 kernel_size: 2 stride: 2", f"{shape('kernel', 1, 2, 2)} stride: 2"),
        ("pool: AVE kernel_size: 3 stride: 2 pad: 1", "pool: AVE kernel_size: 3 stride: 2 pad: 1"),
        ("pool: AVE global_pooling: true", "pool: AVE global_pooling: true"),
    ],
)
def test_pooling_nd_is_pooling(own: str, of_caffe: str) -> None:
    same_numbers(f"'PoolingND' pooling_nd_param {{ {own} }}", f"'Pooling' pooling_param {{ {of_caffe} }}")


def same_numbers(*texts: str) -> None:
    """Two types give the same bits forward and backward."""
    results = []
    for text in texts:
        runner = Runner(f"type: {text}", [spread(CLIP)])
        results.append(runner.run([gaussian(runner.top[0].shape, 9)]))
    assert np.array_equal(results[0].tops[0], results[1].tops[0])
    assert np.array_equal(results[0].bottom_diffs[0], results[1].bottom_diffs[0])


def test_a_net_of_clips_is_trained(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text('net: "net.prototxt" base_lr: 0.01 max_iter: 3 lr_policy: "fixed"')
    with caffepy.train(str(tmp_path / "solver.prototxt"), cpu_solvers=1, threads=1) as trained:
        losses = list(trained.losses.values())
        assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'NdConvolution' convolution_param { num_output: 2 kernel_size: 3 }", "needs kernel_shape"),
        (
            f"'NdConvolution' convolution_param {{ num_output: 2 {shape('kernel', 3, 3)} }}",
            "kernel_size is given 2 times, but must be once, or once for each of 3 axes",
        ),
        (
            f"'NdConvolution' convolution_param {{ num_output: 2 {shape('kernel', 3)} {shape('pad', -1)} }}",
            r"pad_shape is \(-1,\); no entry may be below 0",
        ),
        ("'NdPooling' pooling_param { kernel_size: 2 }", "needs kernel_shape"),
        ("'PoolingND' pooling_nd_param { stride: 2 }", "give the window as kernel_size"),
        (f"'NdPooling' pooling_param {{ pool: STOCHASTIC {shape('kernel', 2)} }}", "has no pool: STOCHASTIC"),
        (f"'NdPooling' pooling_param {{ {shape('kernel', 9)} }}", "does not fit"),
    ],
)
def test_bad_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(f"type: {text}", [np.zeros(CLIP, "f")])

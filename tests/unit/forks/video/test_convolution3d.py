"""Convolution3D, Deconvolution3D and Pooling3D against plain loops, and C3D's prototxts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net
from caffepy.layers import layer_class

CONV = "num_output: 4 kernel_size: 3 kernel_depth: 2 stride: 2 temporal_stride: 1 pad: 1 temporal_pad: 1"
OLD, NEW = "convolution_param", "convolution3d_param"


def convolve(x, weights, bias, kernel, stride, pad):
    """Cross-correlation of clips as its definition reads."""
    padded = np.pad(x, ((0, 0), (0, 0), *[(p, p) for p in pad]))
    sizes = [(padded.shape[i + 2] - kernel[i]) // stride[i] + 1 for i in range(3)]
    y = np.zeros((x.shape[0], weights.shape[0], *sizes))
    for at in itertools.product(*map(range, sizes)):
        window = tuple(slice(i * s, i * s + k) for i, s, k in zip(at, stride, kernel, strict=True))
        y[(..., *at)] = np.einsum("nclhw,oclhw->no", padded[(..., *window)], weights) + bias
    return y


def spread_out(x, weights, bias, kernel, stride, pad):
    """The transposed convolution: each element adds the kernel, multiplied by it, to a window of the result."""
    sizes = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], stride, kernel, strict=True)]
    y = np.zeros((x.shape[0], weights.shape[1], *sizes))
    for at in itertools.product(*map(range, x.shape[2:])):
        window = tuple(slice(i * s, i * s + k) for i, s, k in zip(at, stride, kernel, strict=True))
        y[(..., *window)] += np.einsum("nc,colhw->nolhw", x[(..., *at)], weights)
    inner = tuple(slice(p, n - p) for n, p in zip(sizes, pad, strict=True))
    return y[(..., *inner)] + bias[:, None, None, None]


@pytest.mark.parametrize("holder", [OLD, NEW])
def test_convolution(holder: str):
    check_layer(
        f"type: 'Convolution3D' {holder} {{ {CONV} }}",
        [gaussian((2, 3, 4, 5, 6))],
        lambda x, w, b: convolve(x, w, b, (2, 3, 3), (1, 2, 2), (1, 1, 1)),
        params=[gaussian((4, 3, 2, 3, 3), 1), gaussian((4,), 2)],
    )


def test_a_convolution_without_bias_whose_frames_are_left_out():
    text = "num_output: 2 kernel_size: 1 kernel_depth: 3 temporal_stride: 2 bias_term: false"
    check_layer(
        f"type: 'Convolution3D' {NEW} {{ {text} }}",
        [gaussian((2, 3, 7, 3, 4))],
        lambda x, w: convolve(x, w, np.zeros(2), (3, 1, 1), (2, 1, 1), (0, 0, 0)),
        params=[gaussian((2, 3, 3, 1, 1), 1)],
    )


@pytest.mark.parametrize("holder", [OLD, NEW])
def test_deconvolution(holder: str):
    settings = "num_output: 3 kernel_size: 4 kernel_depth: 3 stride: 2 temporal_stride: 2 pad: 1 temporal_pad: 1"
    check_layer(
        f"type: 'Deconvolution3D' {holder} {{ {settings} }}",
        [gaussian((2, 4, 2, 3, 3))],
        lambda x, w, b: spread_out(x, w, b, (3, 4, 4), (2, 2, 2), (1, 1, 1)),
        params=[gaussian((4, 3, 3, 4, 4), 1), gaussian((3,), 2)],
    )


def pool(x, kernel, stride, pad, average):
    """Pooling of clips as its definition reads."""
    sizes = []
    for size, k, s, p in zip(x.shape[2:], kernel, stride, pad, strict=True):
        pooled = math.ceil((size + 2 * p - k) / s) + 1
        sizes.append(pooled - 1 if p and (pooled - 1) * s >= size + p else pooled)
    y = np.zeros((*x.shape[:2], *sizes))
    for at in itertools.product(*map(range, sizes)):
        begins = [i * s - p for i, s, p in zip(at, stride, pad, strict=True)]
        ends = [min(b + k, n + p) for b, k, n, p in zip(begins, kernel, x.shape[2:], pad, strict=True)]
        window = x[(..., *(slice(max(b, 0), e) for b, e in zip(begins, ends, strict=True)))]
        area = math.prod(e - b for b, e in zip(begins, ends, strict=True))
        y[(..., *at)] = window.sum((2, 3, 4)) / area if average else window.max((2, 3, 4))
    return y


@settings(max_examples=15)
@given(st.data())
def test_pooling(data: st.DataObject):
    draw = data.draw
    size, depth = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride, depth_stride = draw(st.integers(1, size)), draw(st.integers(1, depth))
    average = draw(st.booleans())
    pad = draw(st.integers(0, size - 1)) if average else 0
    shape = (2, 3, depth + draw(st.integers(0, 3)), *[size + draw(st.integers(0, 3)) for _ in range(2)])
    text = (
        f"pool: {'AVE' if average else 'MAX'} kernel_size: {size} kernel_depth: {depth} stride: {stride} "
        f"temporal_stride: {depth_stride} pad: {pad}"
    )
    holder = draw(st.sampled_from(["pooling_param", "pooling3d_param"]))
    check_layer(
        f"type: 'Pooling3D' {holder} {{ {text} }}",
        [spread(shape)],
        lambda x: pool(x, (depth, size, size), (depth_stride, stride, stride), (0, pad, pad), average),
    )


def test_the_first_of_equal_maxima_gets_the_gradient():
    runner = Runner(
        "type: 'Pooling3D' pooling_param { kernel_size: 2 kernel_depth: 2 }", [np.ones((1, 1, 2, 2, 2), "f")]
    )
    result = runner.run([np.full((1, 1, 1, 1, 1), 3, np.float32)])
    assert result.bottom_diffs[0].ravel().tolist() == [3, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        (f"'Convolution3D' {OLD} {{ {CONV} }}", (1, 3, 8, 8), "must have five axes"),
        (f"'Convolution3D' {OLD} {{ num_output: 2 kernel_size: 3 }}", (1, 3, 4, 8, 8), "kernel_size and kernel_depth"),
        (f"'Convolution3D' {OLD} {{ {CONV} pad: 2 }}", (1, 3, 4, 8, 8), "pad is given 2 times"),
        (f"'Convolution3D' {OLD} {{ {CONV} }} {NEW} {{ {CONV} }}", (1, 3, 4, 8, 8), "not both"),
        ("'Pooling3D' pooling_param { kernel_size: 2 }", (1, 3, 4, 8, 8), "kernel_depth, temporal_stride"),
        ("'Pooling3D' pooling_param { kernel_size: 2 kernel_depth: 2 pad: 1 }", (1, 3, 4, 8, 8), "pad is 1"),
        ("'Pooling3D' pooling_param { kernel_size: 2 kernel_depth: 2 }", (1, 3, 8, 8), "must have five axes"),
        ("'Pooling3D' pooling_param { kernel_size: 9 kernel_depth: 2 }", (1, 3, 4, 8, 8), "does not fit"),
        (
            "'Pooling3D' pooling3d_param { pool: STOCHASTIC kernel_size: 2 kernel_depth: 2 }",
            (1, 3, 4, 8, 8),
            "STOCHASTIC",
        ),
    ],
)
def test_bad_settings_are_refused(text: str, shape: tuple[int, ...], message: str):
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(f"type: {text}", [np.zeros(shape, "f")])


def test_types_of_the_old_format():
    kinds = {
        "CONVOLUTION3D": "Convolution3D",
        "POOLING3D": "Pooling3D",
        "DECONVOLUTION3D": "Deconvolution3D",
        "VOXEL_SOFTMAX": "Softmax",
        "VOXEL_SOFTMAX_LOSS": "SoftmaxWithLoss",
        "VIDEO_DATA": "VideoData",
        "VIDEO_SEGMENTATION_DATA": "VideoSegmentationData",
        "VIDEO_WITH_VOXEL_TRUTH_DATA": "VideoWithVoxelTruthData",
    }
    net = caffe_pb2.NetParameter()
    parse_text("".join(f"layers {{ name: '{kind}' type: {kind} }}" for kind in kinds), net, "n")
    upgrade_net(net, "n")
    assert [layer.type for layer in net.layer] == list(kinds.values())
    for layer in net.layer:
        layer_class(layer.type)
    assert net.layer[4].loss_param.normalization == caffe_pb2.LossParameter.FULL

"""BN: the two layers of that name, their statistics, and the files of both."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, TEST, Runner, check_layer, gaussian
from training import CPU

from caffepy.errors import ConfigError, ShapeError, SnapshotError
from caffepy.formats.binary import to_blob_proto
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.trained_layers import copy_trained_layers

PSPNET = "slope_filler { value: 1 } bias_filler { value: 0 }"
SEGNET = "scale_filler { value: 1 } shift_filler { value: 0 }"


def layer(fields):
    return f"type: 'BN' bn_param {{ {fields} }}"


def by_channel(values, axes):
    return np.reshape(values, (-1,) + (1,) * (axes - 2))


def normal(x, epsilon):
    axes = (0, *range(2, x.ndim))
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def affine(x, scale, bias):
    return x * by_channel(scale, x.ndim) + by_channel(bias, x.ndim)


def scale_and_bias(channels):
    return [gaussian((channels,)) + 1, gaussian((channels,), 1)]


@settings(max_examples=10)
@given(batch=st.integers(2, 4), channels=st.integers(1, 5), spatial=st.lists(st.integers(1, 4), max_size=3).map(tuple))
def test_training_uses_the_batch(batch, channels, spatial):
    x = gaussian((batch + 2, channels, *spatial)) * 2 + 3
    stored = [gaussian((channels,)), np.ones(channels, np.float32)]

    def pspnet(x, scale, bias, *stored):
        return affine(normal(x, 0.01), scale, bias)

    params = [*scale_and_bias(channels), *stored]
    check_layer(layer(PSPNET + " eps: 0.01"), [x], pspnet, params=params, learned=[0, 1], in_place=True)

    def segnet(x, scale, bias):
        return affine(normal(x, 1e-9), scale, bias)

    params = scale_and_bias(channels)
    for phase in (0, TEST):
        check_layer(layer(SEGNET), [x], segnet, params=params, learned=[0, 1], in_place=True, phase=phase)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_stored_statistics(inverse, frozen):
    mean, variance = gaussian((3,)), np.abs(gaussian((3,), 1)) + 0.2
    stored = (variance + 0.1) ** -0.5 if inverse else variance

    def reference(x, scale, bias, mean, stored):
        inverse_std = stored if inverse else (stored + 0.1) ** -0.5
        return affine((x - by_channel(mean, x.ndim)) * by_channel(inverse_std, x.ndim), scale, bias)

    fields = f"{PSPNET} eps: 0.1 frozen: {str(frozen).lower()} inverse_std: {str(inverse).lower()}"
    check_layer(
        layer(fields),
        [gaussian((2, 3, 4, 4))],
        reference,
        params=[*scale_and_bias(3), mean, stored.astype(np.float32)],
        learned=[] if frozen else [0, 1],
        phase=0 if frozen else TEST,
        in_place=True,
    )


def test_inference_of_segnet_is_a_scale_and_a_bias():
    check_layer(
        layer("bn_mode: INFERENCE"),
        [gaussian((2, 3, 4, 4)) + 2],
        affine,
        params=scale_and_bias(3),
        learned=[0, 1],
        in_place=True,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inverse", [False, True])
def test_moving_averages(backend, inverse):
    x = gaussian((4, 3, 2, 5)) * 2 + 1
    runner = Runner(layer(f"{PSPNET} momentum: 0.8 inverse_std: {str(inverse).lower()}"), [x], backend)
    for _ in range(2):
        runner.forward()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    new = (variance + 1e-5) ** -0.5 if inverse else variance
    for blob, wanted in zip(runner.layer.blobs[2:], (0.36 * mean, 0.36 * new + 0.64 * inverse), strict=True):
        assert np.allclose(blob.host_data(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen, start", [("false", 0), ("true", 1)])
def test_stored_variance_before_any_training(frozen, start):
    runner = Runner(layer(f"{PSPNET} frozen: {frozen}"), [gaussian((4, 3))])
    assert (runner.layer.blobs[3].host_data() == start).all()
    assert runner.layer.running_statistics() == (() if frozen == "true" else (2, 3))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_tops_are_the_statistics_of_the_batch(backend):
    x = gaussian((4, 3, 2, 5)) + 2
    y, mean, variance = Runner(layer(SEGNET), [x], backend, tops=3).forward()
    assert mean.shape == variance.shape == (1, 3, 1, 1)
    assert np.allclose(y, normal(x, 1e-9), atol=1e-5)
    assert np.allclose(mean.ravel(), x.mean((0, 2, 3)), rtol=1e-5)
    assert np.allclose(variance.ravel(), x.var((0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        (SEGNET + " eps: 1e-3", "bn_param has scale_filler of SegNet and eps of PSPNet and TSN; keep one kind"),
        ("momentum: 1.5", "momentum is 1.5; it must be from 0 to 1"),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(ConfigError, match=message):
        Runner(layer(fields), [gaussian((2, 3))])


def test_shapes_and_tops_that_do_not_fit():
    with pytest.raises(ShapeError, match="at least two axes"):
        Runner(layer(PSPNET), [gaussian((2,))])
    for fields in (PSPNET, "bn_mode: INFERENCE"):
        with pytest.raises(ConfigError, match="only SegNet's bn_mode LEARN gives"):
            Runner(layer(fields), [gaussian((2, 3))], tops=2)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 3, 1, 1)])
def test_files_of_all_forks_fit(shape):
    values = [gaussian((3,), seed) for seed in range(4)]
    stored = caffe_pb2.NetParameter()
    blobs = [to_blob_proto(value.reshape(shape)) for value in values]
    stored.layer.add(name="bn", type="BN", blobs=blobs)
    pspnet, segnet = (Runner(f"name: 'bn' {layer(f)}", [gaussian((4, 3))]).layer for f in (PSPNET, SEGNET))
    copy_trained_layers([pspnet], stored, "a.caffemodel", ())
    for blob, value in zip(pspnet.blobs, values, strict=True):
        assert np.array_equal(blob.host_data(), value)
    with pytest.raises(SnapshotError, match="give slope_filler and bias_filler in place of SegNet's"):
        copy_trained_layers([segnet], stored, "a.caffemodel", ())
    del stored.layer[0].blobs[2:]
    copy_trained_layers([segnet], stored, "a.caffemodel", ())
    with pytest.raises(SnapshotError, match="the file is SegNet's: give scale_filler and shift_filler"):
        copy_trained_layers([pspnet], stored, "a.caffemodel", ())


def test_strict_dim_lets_counts_suffice():
    weights = gaussian((4, 18))
    stored = caffe_pb2.NetParameter()
    stored.layer.add(name="c", type="InnerProduct", blobs=[to_blob_proto(weights)])
    text = "name: 'c' type: 'Convolution' convolution_param { num_output: 4 kernel_size: 3 bias_term: false }"
    strict, counts = (Runner(f"{text} {more}", [gaussian((1, 2, 5, 5))]).layer for more in ("", "strict_dim: false"))
    with pytest.raises(SnapshotError, match="shape is 4 18"):
        copy_trained_layers([strict], stored, "a.caffemodel", ())
    copy_trained_layers([counts], stored, "a.caffemodel", ())
    assert np.array_equal(counts.blobs[0].host_data().ravel(), weights.ravel())


@pytest.mark.parametrize("fields, averaged", [(PSPNET, (2, 3)), (SEGNET, ()), (PSPNET + " frozen: true", ())])
def test_statistics_of_all_devices(fields, averaged):
    """With --sync-bn each pass has the mean and variance of all devices; here the others have as much again."""
    x = gaussian((4, 3, 2, 5))
    runner = Runner(layer(fields), [x])
    assert tuple(runner.layer.running_statistics()) == tuple(runner.layer.local_statistics()) == averaged
    runner.layer.context.all_reduce_mean = lambda array: np.multiply(array, 2, out=array)
    assert runner.layer.local_statistics() == () and runner.layer.communicates() is ("frozen" not in fields)
    if "frozen" in fields:
        return
    (y,) = runner.forward()
    mean = 2 * x.mean((0, 2, 3))
    variance = 2 * ((x - by_channel(mean, 4)) ** 2).mean((0, 2, 3))
    assert np.allclose(y, (x - by_channel(mean, 4)) / np.sqrt(by_channel(variance, 4) + 1e-5), atol=1e-4)
    for index, new in zip(averaged, (mean, variance), strict=bool(averaged)):
        assert np.allclose(runner.layer.blobs[index].host_data(), 0.1 * new, rtol=1e-4)


GENET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 dim: 2 dim: 2 } } }
layer { name: "n" type: "CuDNNBatchNorm" bottom: "x" top: "n" cudnn_batch_norm_param { %s } }
"""


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ("", "momentum: 0.999"),
        ("frozen: true momentum: 0.9", "frozen: true momentum: 0.9"),
        (
            "eps: 0.01 scale_filler { value: 2 } bias_filler { value: 3 }",
            "momentum: 0.999 eps: 0.01 slope_filler { value: 2 } bias_filler { value: 3 }",
        ),
    ],
)
def test_the_settings_of_genets_batch_normalisation(fields, wanted):
    net = parse_text(GENET % fields, caffe_pb2.NetParameter(), "genet.prototxt")
    upgrade_net(net, "genet.prototxt")
    assert net.layer[1] == text_format.Parse(
        f"name: 'n' type: 'BN' bottom: 'x' top: 'n' bn_param {{ {wanted} }}", caffe_pb2.LayerParameter()
    )


def test_genets_batch_normalisation_loads_its_four_blobs():
    net = parse_text(GENET % "eps: 0.1 momentum: 0.5", caffe_pb2.NetParameter(), "genet.prototxt")
    upgrade_net(net, "genet.prototxt")
    built = Net(net, LayerContext(CPU, phase=TEST))
    values = [gaussian((3,), seed) for seed in range(3)] + [np.full(3, 2, np.float32)]
    trained = caffe_pb2.NetParameter()
    blobs = [to_blob_proto(value.reshape(1, 3, 1, 1)) for value in values]
    trained.layer.add(name="n", type="CuDNNBatchNorm").blobs.extend(blobs)
    built.copy_trained_layers_from(trained, "genet.caffemodel")
    x = gaussian((4, 3, 2, 2), 9)
    built.blobs["x"].load(x)
    built.forward()
    scale, bias, mean, variance = (by_channel(value, 4) for value in values)
    assert np.allclose(built.blobs["n"].host_data(), (x - mean) / np.sqrt(variance + 0.1) * scale + bias, atol=1e-5)

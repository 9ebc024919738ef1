"""Convolution and Deconvolution against plain loops in float64, and Im2col."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_harness import Runner, check_layer, gaussian
from training import build_net

from caffepy.errors import ConfigError, ShapeError


def correlate(x, weights, bias, stride, pad, dilation, group):
    """Convolution as its definition reads, any number of spatial axes."""
    axes = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0)] + [(pad, pad)] * axes)
    kernel = weights.shape[2:]
    sizes = [(x.shape[2 + i] - dilation * (kernel[i] - 1) - 1) // stride + 1 for i in range(axes)]
    outputs, inputs = weights.shape[0] // group, x.shape[1] // group
    y = np.zeros((x.shape[0], weights.shape[0], *sizes))
    for g in range(group):
        out, into = slice(g * outputs, (g + 1) * outputs), slice(g * inputs, (g + 1) * inputs)
        for place in itertools.product(*map(range, kernel)):
            window = tuple(
                slice(k * dilation, k * dilation + n * stride, stride) for k, n in zip(place, sizes, strict=True)
            )
            w = weights[(out, slice(None), *place)]
            y[:, out] += np.einsum("nc...,oc->no...", x[(slice(None), into, *window)], w)
    return y if bias is None else y + bias.reshape((-1,) + (1,) * axes)


def transpose_of_correlate(x, weights, bias, stride, pad, dilation, group):
    """Deconvolution: each input element adds a scaled kernel to the output."""
    axes = x.ndim - 2
    kernel = weights.shape[2:]
    sizes = [stride * (n - 1) + dilation * (k - 1) + 1 for n, k in zip(x.shape[2:], kernel, strict=True)]
    outputs, inputs = weights.shape[1], x.shape[1] // group
    y = np.zeros((x.shape[0], outputs * group, *sizes))
    for g in range(group):
        out, into = slice(g * outputs, (g + 1) * outputs), slice(g * inputs, (g + 1) * inputs)
        for place in itertools.product(*map(range, kernel)):
            window = tuple(
                slice(k * dilation, k * dilation + n * stride, stride) for k, n in zip(place, x.shape[2:], strict=True)
            )
            w = weights[(into, slice(None), *place)]
            y[(slice(None), out, *window)] += np.einsum("nc...,co->no...", x[:, into], w)
    y = y[(slice(None), slice(None), *[slice(pad, n - pad) for n in sizes])]
    return y if bias is None else y + bias.reshape((-1,) + (1,) * axes)


def sampled(x, weights, stride, pad, dilation, group, axis):
    """Convolution as Caffe's im2col reads: pixel by pixel, 0 outside the image; channels at any axis.

    The number of windows is an integer division that rounds towards 0, as C++ does.
    """
    batch, spatial = x.shape[:axis], x.shape[axis + 1 :]
    images = x.reshape(-1, *x.shape[axis:])
    sizes = []
    for size, kernel in zip(spatial, weights.shape[2:], strict=True):
        sizes.append(int((size + 2 * pad - dilation * (kernel - 1) - 1) / stride) + 1)
    outputs, inputs = weights.shape[0] // group, weights.shape[1]
    y = np.zeros((len(images), weights.shape[0], *sizes))
    for pixel in np.ndindex(*sizes):
        for place in np.ndindex(*weights.shape[2:]):
            at = tuple(p * stride - pad + k * dilation for p, k in zip(pixel, place, strict=True))
            if all(0 <= a < size for a, size in zip(at, spatial, strict=True)):
                for o in range(weights.shape[0]):
                    first = o // outputs * inputs
                    seen = images[(slice(None), slice(first, first + inputs), *at)]
                    y[(slice(None), o, *pixel)] += seen @ weights[(o, slice(None), *place)]
    return y.reshape(*batch, *y.shape[1:])


def spread_out(x, weights, stride, pad, dilation, group, axis):
    """Deconvolution likewise, its transpose: what falls outside the output is dropped."""
    batch, spatial = x.shape[:axis], x.shape[axis + 1 :]
    images = x.reshape(-1, *x.shape[axis:])
    sizes = [
        stride * (n - 1) + dilation * (k - 1) + 1 - 2 * pad for n, k in zip(spatial, weights.shape[2:], strict=True)
    ]
    outputs, inputs = weights.shape[1], weights.shape[0] // group
    y = np.zeros((len(images), outputs * group, *sizes))
    for pixel in np.ndindex(*spatial):
        for place in np.ndindex(*weights.shape[2:]):
            at = tuple(p * stride - pad + k * dilation for p, k in zip(pixel, place, strict=True))
            if all(0 <= a < size for a, size in zip(at, sizes, strict=True)):
                for c in range(weights.shape[0]):
                    first = c // inputs * outputs
                    added = images[(slice(None), c, *pixel)][:, None] * weights[(c, slice(None), *place)]
                    y[(slice(None), slice(first, first + outputs), *at)] += added
    return y.reshape(*batch, *y.shape[1:])


def check_any_axis(type_name, shape, axis, kernel, outputs, stride=1, pad=0, dilation=1, group=1, written_axis=None):
    """A layer whose channels are at any axis, with any number of spatial axes, against the sampled formulas."""
    spatial = len(shape) - axis - 1
    text = (
        f"type: '{type_name}' convolution_param {{ num_output: {outputs} {f'kernel_size: {kernel}' * bool(kernel)} "
        f"stride: {stride} pad: {pad} dilation: {dilation} group: {group} "
        f"axis: {axis if written_axis is None else written_axis} }}"
    )
    convolution = type_name == "Convolution"
    ends = (outputs, shape[axis] // group) if convolution else (shape[axis], outputs // group)
    params = [gaussian(ends + (kernel,) * spatial, 1), gaussian((outputs,), 2)]
    formula = sampled if convolution else spread_out

    def reference(x, weights, bias):
        y = formula(x, weights, stride, pad, dilation, group, axis)
        return y + bias.reshape((-1,) + (1,) * spatial)

    check_layer(text, [gaussian(shape)], reference, params=params)


@pytest.mark.parametrize("type_name", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("kernel", [0, 1, 3])
def test_without_spatial_axes_it_is_an_inner_product_in_groups(type_name, kernel):
    """Caffe's base_conv_layer.cpp then takes the kernel's size and uses it nowhere."""
    check_any_axis(type_name, (3, 6), 1, kernel, 4, stride=2, pad=1, group=2)


@settings(max_examples=12)
@given(st.data())
def test_channels_at_any_axis(data):
    draw = data.draw
    axis, spatial, group = draw(st.integers(0, 3)), draw(st.integers(0, 2)), draw(st.integers(1, 2))
    kernel, stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    batch = [draw(st.integers(1, 2)) for _ in range(axis)]
    extent = dilation * (kernel - 1) + 1
    shape = (*batch, group * draw(st.integers(1, 2)), *[extent + draw(st.integers(0, 2)) for _ in range(spatial)])
    type_name = draw(st.sampled_from(["Convolution", "Deconvolution"]))
    written = draw(st.sampled_from([axis, axis - len(shape)]))
    check_any_axis(type_name, shape, axis, kernel, 2 * group, stride, 0, dilation, group, written)


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 3, 4, 3, 2), 2), ((2, 3, 4, 5), 2), ((2, 3, 4), 2), ((3, 4, 5), 0), ((2, 2, 3, 4, 3), 3)]
)
def test_the_axes_before_the_channels_are_the_batch(shape, axis):
    check_any_axis("Convolution", shape, axis, 2, 3)


@settings(max_examples=12)
@given(st.data())
def test_a_kernel_that_reaches_past_the_padded_image_finds_zeros_there(data):
    """One window, as long as it reaches past it by less than the stride."""
    draw = data.draw
    axes, group = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    pad, stride, dilation = draw(st.integers(0, 1)), draw(st.integers(2, 4)), draw(st.integers(1, 2))
    beyond = draw(st.integers(1, stride - 1))
    kernel = draw(st.integers(2, 4))
    size = dilation * (kernel - 1) + 1 - 2 * pad - beyond
    assume(size > 0)
    other = [size + draw(st.integers(0, 3)) for _ in range(axes - 1)]
    shape = (2, group * draw(st.integers(1, 2)), *draw(st.permutations([size, *other])))
    check_any_axis("Convolution", shape, 1, kernel, 2 * group, stride, pad, dilation, group)


def test_a_kernel_that_reaches_past_the_image_after_a_reshape():
    text = "type: 'Convolution' convolution_param { num_output: 2 kernel_size: 3 stride: 2 }"
    runner = Runner(text, [gaussian((2, 3, 6, 6))])
    weights, bias = (blob.host_data().astype(np.float64) for blob in runner.layer.blobs)
    for shape in ((1, 3, 2, 7), (2, 3, 5, 2), (2, 3, 6, 6)):
        x = gaussian(shape)
        runner.bottom[0].reshape(shape)
        runner.layer.reshape(runner.bottom, runner.top)
        wanted = sampled(x.astype(np.float64), weights, 2, 0, 1, 1, 1) + bias.reshape(-1, 1, 1)
        assert np.allclose(runner.forward([x])[0], wanted, atol=1e-5)


def test_several_bottoms_with_channels_at_axis_2():
    text = "type: 'Convolution' convolution_param { num_output: 2 kernel_size: 2 axis: 2 }"
    params = [gaussian((2, 3, 2, 2), 3), gaussian((2,), 4)]

    def reference(x, z, weights, bias):
        return tuple(sampled(v, weights, 1, 0, 1, 1, 2) + bias.reshape(-1, 1, 1) for v in (x, z))

    check_layer(text, [gaussian((2, 2, 3, 3, 4)), gaussian((2, 2, 3, 3, 4), 5)], reference, params=params)


def check(formula, type_name, shape, outputs, kernel, stride=1, pad=0, dilation=1, group=1, bias=True):
    text = (
        f"type: '{type_name}' convolution_param {{ num_output: {outputs} kernel_size: {kernel} stride: {stride} "
        f"pad: {pad} dilation: {dilation} group: {group} bias_term: {str(bias).lower()} }}"
    )
    ends = (outputs, shape[1] // group) if type_name == "Convolution" else (shape[1], outputs // group)
    params = [gaussian(ends + (kernel,) * (len(shape) - 2), 1)] + ([gaussian((outputs,), 2)] if bias else [])

    def reference(x, weights, bias=None):
        return formula(x, weights, bias, stride, pad, dilation, group)

    check_layer(text, [gaussian(shape)], reference, params=params)


@settings(max_examples=15)
@given(st.data())
def test_convolution(data):
    draw = data.draw
    axes, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    extent = dilation * (kernel - 1) + 1
    shape = (
        draw(st.integers(1, 3)),
        group * draw(st.integers(1, 3)),
        *[extent + draw(st.integers(0, 4)) for _ in range(axes)],
    )
    stride, pad = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    check(
        correlate,
        "Convolution",
        shape,
        group * draw(st.integers(1, 3)),
        kernel,
        stride,
        pad,
        dilation,
        group,
        draw(st.booleans()),
    )


@settings(max_examples=15)
@given(st.data())
def test_deconvolution(data):
    draw = data.draw
    axes, group, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    shape = (draw(st.integers(1, 2)), group * draw(st.integers(1, 3)), *[draw(st.integers(2, 4)) for _ in range(axes)])
    stride, pad = draw(st.integers(1, 3)), draw(st.integers(0, (kernel - 1) // 2))
    check(transpose_of_correlate, "Deconvolution", shape, group * 2, kernel, stride, pad, 1, group, draw(st.booleans()))


def test_several_bottoms_share_the_weights():
    text = "type: 'Convolution' convolution_param { num_output: 2 kernel_size: 2 }"
    params = [gaussian((2, 3, 2, 2), 3), gaussian((2,), 4)]

    def reference(x, z, weights, bias):
        return correlate(x, weights, bias, 1, 0, 1, 1), correlate(z, weights, bias, 1, 0, 1, 1)

    check_layer(text, [gaussian((2, 3, 4, 4)), gaussian((2, 3, 4, 4), 5)], reference, params=params)


def test_ignored_settings_are_accepted():
    runner = Runner(
        "type: 'Convolution' convolution_param { num_output: 2 kernel_h: 3 kernel_w: 1 stride_h: 2 stride_w: 1 "
        "pad_h: 1 pad_w: 0 engine: CUDNN force_nd_im2col: true }",
        [gaussian((1, 3, 6, 6))],
    )
    assert runner.top[0].shape == (1, 2, 3, 6)


def test_reshaping_makes_a_new_plan():
    runner = Runner("type: 'Convolution' convolution_param { num_output: 2 kernel_size: 3 }", [gaussian((2, 3, 6, 6))])
    x = gaussian((1, 3, 5, 7))
    runner.bottom[0].reshape(x.shape)
    runner.layer.reshape(runner.bottom, runner.top)
    weights, bias = (blob.host_data().astype(np.float64) for blob in runner.layer.blobs)
    assert np.allclose(runner.forward([x])[0], correlate(x, weights, bias, 1, 0, 1, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("settings_text", "message"),
    [
        ("num_output: 2", "kernel_size is given 0 times"),
        ("kernel_size: 3", "needs num_output"),
        ("num_output: 2 kernel_size: 3 kernel_size: 3 kernel_size: 3", "kernel_size is given 3 times"),
        ("num_output: 2 kernel_size: 3 kernel_h: 3 kernel_w: 3", "either kernel_size or kernel_h"),
        ("num_output: 2 kernel_size: 0", "kernel is .0, 0.; no entry may be 0"),
        ("num_output: 2 kernel_size: 3 pad_shape { dim: 1 }", "pad_shape is a setting of NdConvolution"),
        ("num_output: 2 kernel_size: 3 type: 'input'", "type is a setting of ConvLSTM"),
        ("num_output: 2 kernel_size: 3 stride: 0", "stride is .0, 0."),
        (
            "num_output: 2 kernel_h: 3 kernel_w: 3 axis: 2",
            "kernel_h and kernel_w are for two spatial axes, .* here are 1",
        ),
        ("num_output: 2 kernel_size: 3 kernel_size: 3 axis: 3", "kernel_size is given 2 times.* each of 0 axes"),
    ],
)
def test_settings_that_do_not_fit(settings_text, message):
    with pytest.raises(ConfigError, match=message):
        Runner(f"type: 'Convolution' convolution_param {{ {settings_text} }}", [gaussian((1, 3, 6, 6))])


@pytest.mark.parametrize(
    ("settings_text", "message"),
    [
        ("num_output: 2 kernel_size: 7", r"kernel \(7, 7\).*smaller kernel or more padding.*'a' is 1 3 6 6 \(108\)"),
        ("num_output: 2 kernel_size: 8 stride: 2", r"kernel \(8, 8\).*leaves a spatial output of \(0, 0\)"),
        ("num_output: 2 kernel_size: 3 axis: 4", r"layer 'L' \(Convolution\): axis 4 does not exist in shape 1 3 6 6"),
        ("num_output: 3 kernel_size: 3 group: 2", "group 2 must divide both the 3 input channels and num_output 3"),
    ],
)
def test_shapes_that_do_not_fit(settings_text, message):
    with pytest.raises(ShapeError, match=message):
        Runner(f"type: 'Convolution' convolution_param {{ {settings_text} }}", [gaussian((1, 3, 6, 6))])


def test_bottoms_of_two_shapes():
    text = "type: 'Convolution' convolution_param { num_output: 2 kernel_size: 2 }"
    with pytest.raises(ShapeError, match=r"one shape \('a' is 2 3 4 4 \(96\); 'b' is 2 3 4 5 \(120\)\)"):
        Runner(text, [gaussian((2, 3, 4, 4)), gaussian((2, 3, 4, 5))])


def test_channels_that_the_weights_do_not_have():
    runner = Runner("type: 'Convolution' convolution_param { num_output: 2 kernel_size: 2 }", [gaussian((1, 3, 4, 4))])
    runner.bottom[0].reshape((1, 5, 4, 4))
    with pytest.raises(
        ShapeError, match=r"need 3 channels at axis 1 and 2 spatial axes.*'a' is 1 5 4 4 \(80\); 'L\[0\]' is 2 3 2 2"
    ):
        runner.layer.reshape(runner.bottom, runner.top)


@pytest.mark.parametrize(
    "settings", ["kernel_size: 3", "kernel_size: 1", "kernel_size: 3 group: 4", "kernel_size: 3 group: 2"]
)
@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
def test_a_batch_without_images_has_results_without_images_and_gradients_of_zero(kind: str, settings: str) -> None:
    layer = f"""name: "c" type: "{kind}" bottom: "x" top: "y"
        convolution_param {{ num_output: 4 weight_filler {{ type: "xavier" }} {settings} }}"""
    shape = "input_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } }"
    net = build_net(f'force_backward: true layer {{ name: "x" type: "Input" top: "x" {shape} }} layer {{ {layer} }}')
    for rows in (2, 0, 2):
        net.blobs["x"].reshape((rows, 4, 6, 6))
        net.reshape()
        net.blobs["x"].data[...] = 1
        net.forward()
        assert net.blobs["y"].shape[:2] == (rows, 4)
        net.blobs["y"].diff[...] = 1
        net.backward()
        weights, bias = (np.abs(blob.host_diff()).max() for blob in net.layers[1].blobs)
        assert (weights > 0, bias > 0) == (rows > 0, rows > 0)
        for blob in net.layers[1].blobs:
            blob.diff[...] = 0


@pytest.mark.parametrize("hole", ["hole: 2", "hole_h: 2 hole_w: 2"])
@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
def test_deeplabs_hole_is_dilation(kind, hole):
    filler = "weight_filler { type: 'gaussian' }"
    found, wanted = (
        Runner(f"type: '{kind}' convolution_param {{ num_output: 2 kernel_size: 3 {filler} {d} }}", [gaussian(IMAGES)])
        for d in (hole, "dilation: 2")
    )
    assert np.array_equal(found.forward()[0], wanted.forward()[0])


IMAGES = (2, 3, 7, 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("hole: 2 dilation: 2", "give either dilation or DeepLab's hole, not both"),
        ("hole_h: 2", "give either hole, or both hole_h and hole_w"),
        ("hole: 2 hole_h: 2 hole_w: 2", "give either hole, or both hole_h and hole_w"),
    ],
)
def test_holes_that_do_not_fit(fields, message):
    with pytest.raises(ConfigError, match=message):
        Runner(f"type: 'Convolution' convolution_param {{ num_output: 2 kernel_size: 3 {fields} }}", [gaussian(IMAGES)])
    with pytest.raises(ConfigError, match="hole is for two spatial axes; the bottom has 1"):
        Runner("type: 'Convolution' convolution_param { num_output: 2 kernel_size: 3 hole: 2 }", [gaussian((2, 3, 7))])


# -- Im2col ----------------------------------------------------------------------------------------------


def im2col(x, axis, kernel, stride, pad, dilation):
    """The definition, window by window."""
    lead, channels, image = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    x = np.pad(x.reshape(-1, channels, *image), [(0, 0), (0, 0), *((p, p + 99) for p in pad)])
    spans = [n + 2 * p - (d * (k - 1) + 1) for n, p, d, k in zip(image, pad, dilation, kernel, strict=True)]
    sizes = [int(span / s) + 1 for span, s in zip(spans, stride, strict=True)]
    out = np.zeros((len(x), channels, math.prod(kernel), *sizes))
    for k, element in enumerate(np.ndindex(*kernel)):
        for window in np.ndindex(*sizes):
            at = tuple(w * s + e * d for w, s, e, d in zip(window, stride, element, dilation, strict=True))
            out[(slice(None), slice(None), k, *window)] = x[(slice(None), slice(None), *at)]
    return out.reshape(*lead, -1, *sizes)


@pytest.mark.parametrize(
    ("shape", "axis", "fields", "numbers"),
    [
        ((2, 3, 5, 6), 1, "kernel_size: 3 stride: 2 pad: 1", ((3, 3), (2, 2), (1, 1), (1, 1))),
        ((2, 2, 7, 6), 1, "kernel_size: 3 dilation: 2", ((3, 3), (1, 1), (0, 0), (2, 2))),
        (
            (1, 2, 5, 6),
            1,
            "kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 2 pad_h: 1 pad_w: 0",
            ((2, 3), (1, 2), (1, 0), (1, 1)),
        ),
        ((2, 3, 8), 1, "kernel_size: 3 stride: 2 pad: 1 dilation: 2", ((3,), (2,), (1,), (2,))),
        (
            (2, 2, 4, 3, 4),
            1,
            "kernel_size: 2 kernel_size: 1 kernel_size: 3 pad: 1",
            ((2, 1, 3), (1,) * 3, (1,) * 3, (1,) * 3),
        ),
        ((2, 3, 4, 5), 2, "axis: 2 kernel_size: 2", ((2,), (1,), (0,), (1,))),
        ((2, 2, 3, 4, 5), -3, "axis: -3 kernel_size: 2 stride: 2", ((2, 2), (2, 2), (0, 0), (1, 1))),
        ((2, 2, 3, 3), 1, "kernel_size: 4 stride: 3 force_nd_im2col: true", ((4, 4), (3, 3), (0, 0), (1, 1))),
    ],
)
def test_im2col(shape, axis, fields, numbers):
    text = f"type: 'Im2col' convolution_param {{ {fields} }}"
    check_layer(text, [gaussian(shape)], lambda x: im2col(x, axis % len(shape), *numbers))


def test_im2col_refuses():
    with pytest.raises(ShapeError, match="spatial axes after axis 3"):
        Runner("type: 'Im2col' convolution_param { axis: 3 kernel_size: 2 }", [gaussian((2, 3, 4, 5))])
    with pytest.raises(ConfigError, match="kernel_size is given 0 times"):
        Runner("type: 'Im2col'", [gaussian((2, 3, 4, 5))])
    with pytest.raises(ShapeError, match="a smaller kernel or more padding"):
        Runner("type: 'Im2col' convolution_param { kernel_size: 9 }", [gaussian((2, 3, 4, 5))])


def test_windows_of_more_elements_than_an_array_may_have():
    """V-Net's images have 2^32: windows are never all in memory."""
    x = gaussian((1, 1, 760, 760))
    text = "type: 'Convolution' convolution_param { num_output: 1 kernel_size: 70 bias_term: false }"
    weights = gaussian((1, 1, 70, 70), 1)
    y = Runner(text, [x], params=[weights]).forward()[0]
    assert 70 * 70 * y.size > 2**31
    for i, j in ((0, 0), (690, 3), (690, 690)):
        expected = (x[0, 0, i : i + 70, j : j + 70].astype(float) * weights[0, 0]).sum()
        assert abs(y[0, 0, i, j] - expected) < 1e-2

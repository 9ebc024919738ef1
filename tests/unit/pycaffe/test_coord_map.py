"""Maps of coordinates between blobs, checked by moving one pixel through the formulas."""

from __future__ import annotations

import numpy as np
import pytest

from caffepy.pycaffe.coord_map import (
    PASS_THROUGH_LAYERS,
    AxisMismatchException,
    UndefinedMapException,
    compose,
    conv_params,
    coord_map,
    coord_map_from_to,
    crop,
    crop_params,
    inverse,
)
from caffepy.pycaffe.net_spec import NetSpec
from caffepy.pycaffe.net_spec import layers as L  # noqa: N812


def net(kernel=3, stride=1, pad=0, pool=2, factor=2, cut=0):
    """Convolution, pooling, and a deconvolution that makes up for the pooling."""
    n = NetSpec()
    n.data = L.Input(shape={"dim": [2, 1, 100, 100]})
    n.conv = L.Convolution(n.data, num_output=10, kernel_size=kernel, stride=stride, pad=pad)
    n.pool = L.Pooling(n.conv, kernel_size=pool, stride=pool)
    n.up = L.Deconvolution(n.pool, convolution_param={"kernel_size": 2 * factor, "stride": factor, "pad": cut})
    return n


def test_a_convolution_and_its_inverse():
    n = net(kernel=5, stride=2, pad=1)
    axis, scale, shift = coord_map(n.conv.fn)
    # Output pixel y looks at input pixels from 2 y - 1 to 2 y + 3; their centre is 2 y + 1.
    assert axis == 1
    assert 7 * scale + shift == 3
    axis, scale, shift = inverse((axis, scale, shift))
    assert 3 * scale + shift == 7


@pytest.mark.parametrize(
    ("settings", "shift"), [({}, 0), ({"pool": 4, "factor": 4}, -1), ({"cut": 3}, 3), ({"pad": 1}, -1)]
)
def test_from_the_deconvolution_to_the_data(settings, shift):
    n = net(**settings)
    axis, scale, found = coord_map_from_to(n.up, n.data)
    assert (axis, scale, found) == (1, 1, shift)


def test_rectangular_windows_map_each_dimension_alone():
    n = net(kernel=[3, 5], stride=[1, 2], pad=[0, 10])
    _, scale, shift = coord_map_from_to(n.up, n.data)
    for index, settings in enumerate(((3, 1, 0), (5, 2, 10))):
        _, own_scale, own_shift = coord_map_from_to(*(lambda m: (m.up, m.data))(net(*settings)))
        assert scale[index] == own_scale
        assert shift[index] == own_shift


def test_dilation_widens_the_window():
    n = net()
    n.wide = L.Convolution(n.data, kernel_size=3, dilation=4, num_output=1)
    assert conv_params(n.wide.fn)[2] == 9


def test_layers_that_pass_coordinates_through():
    n = net()
    top = n.up
    for name in PASS_THROUGH_LAYERS:
        top = getattr(L, name)(top)
    assert coord_map_from_to(top, n.data) == coord_map_from_to(n.up, n.data)


def test_a_crop_shifts_and_its_second_bottom_is_not_followed():
    n = net()
    n.cut = L.Crop(n.up, n.data, axis=2, offset=5)
    assert crop_params(n.cut.fn) == (2, 5)
    assert coord_map_from_to(n.cut, n.data)[2] == coord_map_from_to(n.up, n.data)[2] + 5


def test_crop_makes_the_layer():
    n = net(pool=4, factor=4, pad=2)
    n.cut = crop(n.up, n.data)
    layer = n.to_proto().layer[-1]
    assert layer.type == "Crop"
    assert list(layer.bottom) == ["up", "data"]
    assert layer.crop_param.axis == 2
    assert list(layer.crop_param.offset) == [3]


def test_crop_of_blobs_without_windows_between_them():
    n = net()
    n.relu = L.ReLU(n.data)
    layer = crop(n.relu, n.data).to_proto().layer[-1]
    assert (layer.crop_param.axis, list(layer.crop_param.offset)) == (2, [0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool": 3}, "scale mismatch on crop"),
        ({"cut": 10}, "cannot crop negative offset"),
        ({"pool": 4, "factor": 4, "kernel": 4}, "cannot crop noninteger offset"),
    ],
)
def test_crops_that_cannot_be(settings, message):
    n = net(**settings)
    with pytest.raises(AssertionError, match=message):
        crop(n.up, n.data)


def test_unconnected_blobs():
    n = net()
    n.ip = L.InnerProduct(n.up, num_output=10)
    n.whole = L.Pooling(n.conv, global_pooling=True)
    for top in (n.ip, n.whole):
        with pytest.raises(RuntimeError, match="are they connected by spatial layers"):
            coord_map_from_to(top, n.data)
    with pytest.raises(UndefinedMapException, match="InnerProduct"):
        coord_map(n.ip.fn)


def test_legacy_fields_are_refused():
    n = net()
    with pytest.raises(AssertionError, match="legacy _h/_w params: Pooling has stride_h"):
        coord_map(L.Pooling(n.conv, kernel_size=2, stride_h=2, stride_w=2).fn)


def test_compose():
    assert compose((None, 1, 0), (1, 2, 3)) == (1, 2, 3)
    assert compose((1, 2, 3), (None, 1, 0)) == (1, 2, 3)
    assert compose((1, 2, 3), (1, 5, 7)) == (1, 10, 17)
    with pytest.raises(AxisMismatchException, match="axes 1 and 2"):
        compose((1, 1, 0), (2, 1, 0))


def test_three_spatial_dimensions():
    n = NetSpec()
    n.data = L.Input(shape={"dim": [2, 3, 100, 100, 100]})
    n.conv = L.Convolution(n.data, num_output=1, kernel_size=[3, 3, 3], stride=[1, 1, 1], pad=[0, 1, 2])
    _, scale, shift = coord_map_from_to(n.conv, n.data)
    np.testing.assert_array_equal(scale, 1)
    np.testing.assert_array_equal(shift, [1, 0, -1])

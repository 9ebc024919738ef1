"""Gather and Scatter."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import check_layer, gaussian
from training import build_net


@pytest.mark.parametrize("text", ["type: 'Gather'", "type: 'Scatter'"])
def test_each_top_is_its_bottom(text: str):
    check_layer(text, [gaussian((4, 3, 2, 2)), gaussian((4,), 1)], lambda *bottoms: bottoms)


def test_labels_may_go_along():
    """As in TSN's nets: the loss gives the label's part of Gather no gradient."""
    net = build_net(
        "layer { name: 'd' type: 'Input' top: 'x' top: 'l' "
        "input_param { shape { dim: 3 dim: 4 } shape { dim: 3 } } } "
        "layer { name: 'a' type: 'InnerProduct' bottom: 'x' top: 'a' inner_product_param { num_output: 5 "
        "weight_filler { type: 'xavier' } } } "
        "layer { name: 'g' type: 'Gather' bottom: 'a' bottom: 'l' top: 'all' top: 'labels' } "
        "layer { name: 's' type: 'SoftmaxWithLoss' bottom: 'all' bottom: 'labels' top: 'loss' }"
    )
    net.blobs["x"].data[...] = gaussian((3, 4))
    net.blobs["l"].data[...] = [0, 4, 2]
    net.clear_param_diffs()
    net.forward()
    net.backward()
    assert net.blobs["labels"].host_data().tolist() == [0, 4, 2]
    chances = np.exp(net.blobs["a"].host_data())
    chances /= chances.sum(axis=1, keepdims=True)
    slopes = (chances - np.eye(5)[[0, 4, 2]]) / 3
    np.testing.assert_allclose(net.layers[1].blobs[0].host_diff(), slopes.T @ gaussian((3, 4)), atol=1e-6)
    net.close()

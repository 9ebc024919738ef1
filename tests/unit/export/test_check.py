"""The random inputs of the comparison of a net with its export."""

from __future__ import annotations

import numpy as np
import pytest
from export_cases import DETECT
from onnx_nets import layer_net, net_of

from caffepy.export.check import random_inputs, run_net


@pytest.mark.parametrize("code", ["CORNER", "CENTER_SIZE", "CORNER_SIZE"])
def test_the_check_feeds_boxes_and_scores_that_reach_every_branch(code: str):
    net = net_of(DETECT % (240, f"code_type: {code}", ""))
    rows = run_net(net, random_inputs(net))["out"].reshape(-1, 7)
    width, height = (rows[:, 5:] - rows[:, 3:5]).T
    assert len(np.unique(rows[:, 2])) < len(rows)
    if code == "CENTER_SIZE":
        assert ((width == 0) & (height == 0)).any()
    else:
        assert ((width < 0) & (height > 0)).any() and ((width < 0) & (height < 0)).any()


def test_the_check_feeds_regions_that_reach_every_branch():
    net = layer_net('type: "ROIPooling" roi_pooling_param { pooled_h: 2 pooled_w: 3 }', (2, 6, 7, 5), (40, 5))
    image, left, top, right, bottom = random_inputs(net)["x1"].T
    assert set(image) == {0, 1}
    assert (right < left).any() and (bottom < top).any() and (left > 4).any() and (top < 0).any()
    assert (left % 1 == 0.5).any()

"""Batches without samples, as Filter makes them, pass through the layers: no error, no warning, diffs of the shapes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from layer_harness import BACKENDS, Floats, Runner


def none(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


IMAGES = none(0, 3, 4, 4)
CASES = [
    ("type: 'Reduction' reduction_param { axis: 1 }", [none(0, 3, 2)]),
    ("type: 'Reduction'", [IMAGES]),
    ("type: 'Reduction' reduction_param { axis: 2 operation: MEAN }", [none(2, 3, 0, 2)]),
    ("type: 'Reduction' reduction_param { axis: 1 operation: SUMSQ }", [IMAGES]),
    ("type: 'Permute' permute_param { order: 2 }", [IMAGES]),
    ("type: 'Crop'", [IMAGES, none(0, 3, 2, 2)]),
    ("type: 'Tile' tile_param { tiles: 2 }", [IMAGES]),
    ("type: 'ShuffleChannel' shuffle_channel_param { group: 3 }", [IMAGES]),
    ("type: 'Im2col' convolution_param { kernel_size: 2 }", [IMAGES]),
    ("type: 'Interp' interp_param { zoom_factor: 2 }", [IMAGES]),
    ("type: 'Upsample' upsample_param { scale: 2 }", [IMAGES]),
    ("type: 'Upsample'", [IMAGES, IMAGES]),
    ("type: 'ROIPooling' roi_pooling_param { pooled_h: 2 pooled_w: 2 }", [none(2, 3, 4, 4), none(0, 5)]),
    (
        "type: 'PSROIPooling' psroi_pooling_param { output_dim: 1 group_size: 2 spatial_scale: 1 }",
        [none(2, 4, 4, 4), none(0, 5)],
    ),
    ("type: 'MVN'", [IMAGES]),
    ("type: 'MVN' mvn_param { across_channels: true }", [IMAGES]),
    ("type: 'Normalize'", [IMAGES]),
    ("type: 'Normalize' norm_param { across_spatial: false channel_shared: false }", [IMAGES]),
    ("type: 'Axpy'", [none(0, 3), IMAGES, IMAGES]),
    ("type: 'HingeLoss'", [none(0, 4), none(0)]),
    ("type: 'MultinomialLogisticLoss'", [none(0, 4), none(0)]),
    ("type: 'L1Loss'", [none(0, 4), none(0, 4)]),
    ("type: 'SmoothL1Loss'", [none(0, 4), none(0, 4)]),
    ("type: 'ContrastiveLoss'", [none(0, 4), none(0, 4), none(0)]),
    ("type: 'InfogainLoss'", [none(0, 4), none(0), none(4, 4)]),
    ("type: 'Embed' embed_param { num_output: 2 input_dim: 3 }", [none(0, 2)]),
    ("type: 'BatchReindex'", [none(4, 2), none(0)]),
    ("type: 'Filter'", [none(0, 3), none(0)]),
    ("type: 'ArgMax'", [none(0, 4)]),
    ("type: 'ArgMax' argmax_param { axis: 1 }", [none(0, 4, 2, 2)]),
    ("type: 'SPP' spp_param { pyramid_height: 2 }", [IMAGES]),
    ("type: 'Pooling' pooling_param { pool: STOCHASTIC kernel_size: 2 }", [IMAGES]),
    ("type: 'ReLU6'", [IMAGES]),
    ("type: 'HardSwish'", [IMAGES]),
    ("type: 'Mish'", [IMAGES]),
    ("type: 'Reorg' reorg_param { stride: 2 }", [none(0, 4, 4, 4)]),
    ("type: 'FocalLoss'", [none(0, 4), none(0)]),
    ("type: 'YoloSeg'", [IMAGES, IMAGES]),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("text", "inputs"), CASES, ids=lambda value: value[7:20] if isinstance(value, str) else "")
def test_no_samples(text: str, inputs: list[Floats], backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner = Runner(text, inputs, backend)
        tops = runner.forward()
        assert all(np.isfinite(top).all() for top in tops)
        if runner.layer.has_backward:
            for diff, x in zip(runner.backward([np.ones_like(top) for top in tops]), inputs, strict=True):
                assert diff is None or (diff.shape == x.shape and not diff.any())

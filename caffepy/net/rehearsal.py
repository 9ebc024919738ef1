"""Runs a net's passes on a backend that computes nothing, so that it can note what they will need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from caffepy.backend import Array, Backend
from caffepy.blob import Blob
from caffepy.layers.core.base import LayerContext, PassCounter
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.net.net import Net
from caffepy.proto import caffe_pb2


def rehearse(
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState | None,
    backend: Backend,
) -> None:
    """Make a net anew on `backend` and run it forward, and in the TRAIN phase backward.

    Args:
        param: the net as read.
        context: the net's; with `sample_shapes`, so that no data are opened.
        state: as `Net` takes it.
        backend: one without values.
    """
    assert not backend.holds_values
    own = replace(
        context,
        backend=backend,
        passes=PassCounter(),
        first_sample=None,
        describe_sample=None,
        # The other devices do not rehearse now: whoever waited for them would do so forever.
        all_reduce_sum=context.all_reduce_sum and _not_reduced,
        all_reduce_mean=context.all_reduce_mean and _not_reduced,
    )
    net = Net(param, own, state)
    try:
        net.debug_info = False
        for node in net.schedule:
            node.layer.raise_device_errors = _nothing_found  # type: ignore[method-assign]
            if not node.bottoms and not isinstance(node.layer, PrefetchingLayer):
                node.layer.forward = partial(_allocate, node.tops)  # type: ignore[method-assign]
        net.prepare()
        net.forward()
        if context.phase == caffe_pb2.TRAIN:
            net.backward()
    finally:
        net.close()


def _not_reduced(_: Array) -> None:
    """Replaces the all-reduces of layers."""


def _nothing_found() -> None:
    """Replaces the checks of labels: without values there are none."""


def _allocate(tops: Sequence[Blob], *_: Any) -> None:
    """Replaces the forward pass of layers that the user fills."""
    for top in tops:
        assert top.data is not None

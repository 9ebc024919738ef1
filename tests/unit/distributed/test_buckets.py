"""Cutting the gradients into buckets."""

from __future__ import annotations

import pytest
from training import build_net

from caffepy.distributed.reducer import cut_buckets
from caffepy.net.parameters import ParameterBuffer

DATA = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 10 } shape { dim: 4 dim: 10 } data_filler { type: "gaussian" } } }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "%s" bottom: "label" top: "loss" }'


def inner(name: str, bottom: str, params: str = "") -> str:
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" {params} '
        "inner_product_param { num_output: 10 bias_term: false } }"
    )


CHAIN = DATA + inner("a", "data") + inner("b", "a") + inner("c", "b") + inner("d", "c") + LOSS % "d"


@pytest.mark.parametrize(("count", "made"), [(0, 4), (1, 1), (2, 2), (3, 2), (4, 4), (100, 4)])
def test_buckets_cover_everything_once_in_order(count: int, made: int) -> None:
    net = build_net(CHAIN)
    buckets = cut_buckets(net, count)
    assert len(buckets) == made
    assert buckets[0].start == 0
    assert buckets[-1].stop == net.parameters.learned + ParameterBuffer.FLAGS
    assert all(a.stop == b.start for a, b in zip(buckets, buckets[1:], strict=False))
    assert [b.node for b in buckets] == sorted((b.node for b in buckets), reverse=True)


def test_a_bucket_is_complete_with_its_first_layer() -> None:
    net = build_net(CHAIN)
    names = net.layer_names
    assert [names[bucket.node] for bucket in cut_buckets(net, 2)] == ["c", "a"]
    assert [names[bucket.node] for bucket in cut_buckets(net, 4)] == ["d", "c", "b", "a"]


@pytest.mark.parametrize("name", ["", "same"])
def test_layers_of_one_name_complete_their_own_buckets(name: str) -> None:
    """Their gradients lie in the order of the backward pass, and no bucket ends before its layers have run."""
    text = CHAIN
    for layer in "abcd":
        text = text.replace(f'name: "{layer}"', f'name: "{name}"')
    net = build_net(text)
    assert [bucket.node for bucket in cut_buckets(net, 4)] == [4, 3, 2, 1]
    assert [bucket.node for bucket in cut_buckets(net, 2)] == [3, 1]
    starts = [parameter.start for parameter in net.parameters.parameters]
    assert starts == sorted(starts, reverse=True)


def test_a_shared_parameter_is_complete_with_the_first_layer_that_has_it() -> None:
    shared = 'param { name: "w" }'
    text = DATA + inner("a", "data", shared) + inner("b", "a") + inner("c", "b", shared) + LOSS % "c"
    net = build_net(text)
    buckets = cut_buckets(net, 3)
    assert [net.layer_names[bucket.node] for bucket in buckets] == ["b", "a"]


def test_what_is_not_learned_is_not_exchanged() -> None:
    net = build_net(CHAIN.replace('top: "b" ', 'top: "b" param { lr_mult: 0 } '))
    assert sum(b.stop - b.start for b in cut_buckets(net, 6)) == 3 * 128 + ParameterBuffer.FLAGS


def test_a_net_that_learns_nothing_exchanges_its_flags() -> None:
    net = build_net(DATA + inner("a", "data", "param { lr_mult: 0 }") + LOSS % "a")
    (bucket,) = cut_buckets(net, 6)
    assert bucket.stop - bucket.start == ParameterBuffer.FLAGS

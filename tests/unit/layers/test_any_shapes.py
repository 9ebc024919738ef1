"""Every layer type takes bottoms of any shapes, in place or not, or refuses them by an error of caffepy."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from field_cases import Case, add_inputs, values_of
from google.protobuf import text_format
from layer_cases import own_cases, type_of
from training import CPU

from caffepy.errors import CaffepyError, InternalError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net

TRIES = 6
SIZES = (1, 1, 2, 3, 4, 5)
MOST_AXES = 5


def cases_by_type() -> dict[str, list[Case]]:
    found = defaultdict(list)
    for one in own_cases():
        if one.bottoms:
            found[type_of(one)].append(one)
    return found


CASES = cases_by_type()


def with_more_bottoms(one: Case, draw: random.Random) -> Case:
    """The case, often with one more bottom where its type may have one."""
    count, most = len(one.bottoms.split()), layer_class(type_of(one)).bottoms[1] or MOST_AXES
    if count >= most or draw.random() < 0.5:
        return one
    return replace(one, bottoms=f"{one.bottoms} {draw.choice(one.bottoms.split())}")


def other_shapes(shapes: list[tuple[int, ...]], draw: random.Random) -> list[tuple[int, ...]]:
    """Shapes of which one or all have other axes: changed, left out, added, exchanged, or all new."""
    found = list(shapes)
    for index in range(len(shapes)) if draw.random() < 0.2 else [draw.randrange(len(shapes))]:
        shape = list(found[index])
        kind = draw.randrange(5)
        if kind == 0 and shape:
            shape[draw.randrange(len(shape))] = draw.choice(SIZES)
        elif kind == 1 and shape:
            del shape[draw.randrange(len(shape))]
        elif kind == 2:
            shape.insert(draw.randint(0, len(shape)), draw.choice(SIZES))
        elif kind == 3:
            shape = list(draw.choice(shapes))
        else:
            shape = [draw.choice(SIZES) for _ in range(draw.randint(0, MOST_AXES))]
        found[index] = tuple(shape)
    return found


def pass_or_be_refused(one: Case, shapes: list[tuple[int, ...]], in_place: int | None) -> bool:
    """Whether the net ran; an error that is a bug of caffepy fails the test."""
    layer = text_format.Parse(one.layer, caffe_pb2.LayerParameter(name="L"))
    net = caffe_pb2.NetParameter(force_backward=True)
    inputs = add_inputs(net, layer, one)
    for made, shape in zip(net.layer, shapes, strict=True):
        made.input_param.shape[0].Clear()
        made.input_param.shape[0].dim.extend(shape)
    if in_place is not None:
        layer.top[0] = layer.bottom[in_place]
    net.layer.append(layer)
    try:
        with CPU.activate():
            made_net = Net(net, LayerContext(CPU, phase=one.phase, seed=1))
            for index, (text, shape) in enumerate(zip(inputs, shapes, strict=True)):
                usual = values_of(text, index).ravel()
                made_net.blobs[f"b{index}"].data[...] = np.resize(usual, shape) if usual.size else 0
            made_net.clear_param_diffs()
            made_net.forward()
            made_net.raise_device_errors()
            if made_net.layers[-1].has_backward:
                made_net.backward()
    except InternalError:
        raise
    except CaffepyError:
        return False
    return True


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", sorted(CASES))
def test_bottoms_without_axes_are_taken_or_refused(kind: str) -> None:
    one = CASES[kind][0]
    shapes = [values_of(text, index).shape for index, text in enumerate(one.bottoms.split())]
    for index in range(len(shapes)):
        pass_or_be_refused(one, [*shapes[:index], (), *shapes[index + 1 :]], None)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", sorted(CASES))
def test_other_shapes_are_taken_or_refused(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(TRIES):
        one = with_more_bottoms(draw.choice(CASES[kind]), draw)
        shapes = [values_of(text, index).shape for index, text in enumerate(one.bottoms.split())]
        pass_or_be_refused(one, other_shapes(shapes, draw), None)


@pytest.mark.parametrize("kind", sorted(CASES))
def test_tops_that_are_bottoms_are_taken_or_refused(kind: str) -> None:
    """The arrays of a bottom whose shape the layer would change do not fit the shape any more."""
    one = CASES[kind][0]
    shapes = [values_of(text, index).shape for index, text in enumerate(one.bottoms.split())]
    for index in range(len(shapes)):
        pass_or_be_refused(one, shapes, index)


@pytest.mark.parametrize(
    ("kind", "more", "shapes"),
    [("RegionLoss", "", [(1, 14, 4, 4), ()]), ("GeneralContrastiveLoss", " 4x3", [(4, 3), (4,), (2, 3)])],
)
def test_shapes_that_do_not_fit_are_refused(kind: str, more: str, shapes: list[tuple[int, ...]]) -> None:
    one = CASES[kind][0]
    assert not pass_or_be_refused(replace(one, bottoms=one.bottoms + more), shapes, None)

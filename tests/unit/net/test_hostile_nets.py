"""Nets from strangers: refused with the layer's name before anything is allocated or compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import CaffepyError, InternalError, OutOfMemoryError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.layers.inner_product import InnerProductLayer
from caffepy.net import Net

DATA = """
layer { name: "in" type: "DummyData" top: "x" top: "y" dummy_data_param { shape { %s } shape { dim: 2 } } }
"""
IMAGE = "dim: 2 dim: 3 dim: 8 dim: 8"


def build(text: str, shape: str = IMAGE, backend: MetaBackend | CpuBackend | None = None) -> Net:
    param = text_format.Parse(DATA % shape + text, caffe_pb2.NetParameter())
    return Net(param, LayerContext(backend or MetaBackend()))


def test_a_power_of_a_constant_beyond_the_largest_number() -> None:
    text = 'layer { name: "p" type: "Power" bottom: "x" top: "p" power_param { power: 1e30 scale: 0 shift: 1e30 } }'
    net = build(text, backend=CpuBackend(1))
    net.forward()
    assert net.blobs["p"].host_data().max() == float("inf")


# -- memory ----------------------------------------------------------------------------------------------


class Little(CpuBackend):
    """A machine with little memory, which allocates nothing large."""

    def available_memory(self) -> int:
        return 2**29

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> object:
        assert sum(shape) < 2**26, "nothing large may be allocated"
        return super().zeros(shape, dtype)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'layer { name: "l" type: "InnerProduct" bottom: "x" top: "l" inner_product_param { num_output: 2000000 } }',
            r"layer 'l' \(InnerProduct\): 5.7 GiB are needed for its parameter 2000000 192",
        ),
        (
            'layer { name: "l" type: "Convolution" bottom: "x" top: "l" convolution_param { '
            "num_output: 100 kernel_size: 1"
            " pad: 800 } }",
            r"layer 'l' \(Convolution\): 1.9 GiB are needed for its tops, 2 100 1608 1608",
        ),
    ],
)
def test_what_memory_cannot_hold_is_refused_before_it_is_allocated(text: str, message: str) -> None:
    with pytest.raises(OutOfMemoryError, match=message):
        build(text, backend=Little(1))


def test_a_large_array_is_asked_for_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.backend.cpu.memory.available_memory", lambda: 2**20)
    with pytest.raises(OutOfMemoryError, match="out of memory: 4.00 GiB for an array"):
        CpuBackend(1).zeros((2**30,))


# -- mistakes of caffepy's -------------------------------------------------------------------------------


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


IP = 'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 1 } }'


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("k"), InternalError, "KeyError: 'k'; this is a bug in caffepy"),
        (RecursionError("deep"), InternalError, "RecursionError: deep; this is a bug in caffepy"),
        (MemoryError(), OutOfMemoryError, "out of memory"),
        (ShapeError("blob 'x': odd"), ShapeError, "blob 'x': odd"),
    ],
)
def test_errors_within_a_layer_name_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[CaffepyError], message: str
) -> None:
    monkeypatch.setattr(InnerProductLayer, "reshape", failing(error))
    with pytest.raises(kind, match=rf"^layer 'ip' \(InnerProduct\): {message}"):
        build(IP)

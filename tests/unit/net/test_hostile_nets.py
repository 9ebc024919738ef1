"""Nets from strangers: refused with the layer's name before anything is allocated or compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import CaffepyError, ConfigError, InternalError, OutOfMemoryError, ShapeError, SnapshotError
from caffepy.formats.binary import from_blob_proto
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


@pytest.mark.parametrize(
    ("kind", "tops"),
    [("SoftmaxWithLoss", 'top: "l" top: "y"'), ("EuclideanLoss", 'top: "y"'), ("Accuracy", 'top: "y"')],
)
def test_a_loss_whose_top_is_a_bottom(kind: str, tops: str) -> None:
    ip = 'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 1 } }'
    bottoms = 'bottom: "ip" bottom: "y"' if 'top: "l"' in tops else 'bottom: "y" bottom: "ip"'
    with pytest.raises(ConfigError, match=rf"layer 'loss' \({kind}\): cannot work in place"):
        build(f'{ip} layer {{ name: "loss" type: "{kind}" {bottoms} {tops} }}')


@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize(
    "layer",
    [
        'type: "Input" input_param { shape { %s } }',
        'type: "DummyData" dummy_data_param { shape { %s } }',
        'type: "Parameter" parameter_param { shape { %s } }',
        'type: "Reshape" bottom: "y" reshape_param { shape { dim: 2 dim: 1 %s } }',
    ],
)
def test_shapes_of_thousands_of_axes(layer: str, size: int) -> None:
    """Their number of elements has more digits than Python prints."""
    message = "(a shape of 500[0-9] axes is not possible: a blob has at most 32 axes|2 elements cannot take the shape)"
    with pytest.raises(ShapeError, match=f"layer 'l' .*{message}"):
        build(f'layer {{ name: "l" top: "l" {layer % (f"dim: {size} " * 5000)} }}')


def convolution(settings: str, kind: str = "Convolution") -> str:
    return f'layer {{ name: "c" type: "{kind}" bottom: "x" top: "c" convolution_param {{ num_output: 4 {settings} }} }}'


def test_a_padded_convolution_of_no_channels() -> None:
    with pytest.raises(ShapeError, match=r"layer 'c' \(Convolution\): the bottom has no channels"):
        build(convolution("kernel_size: 3 pad: 1"), "dim: 2 dim: 0 dim: 8 dim: 8")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "Convolution",
            "kernel_size: 1000000 pad: 1000000",
            "kernel is .1000000, 1000000.; at most 16384 along an axis",
        ),
        ("Convolution", "kernel_h: 1000000 kernel_w: 1 pad_h: 500000", "kernel is .1000000, 1.; at most 16384"),
        ("Convolution", "kernel_size: 9999 pad: 9999", "windows of an image 3 9999 9999 10008 10008"),
        ("Convolution", "kernel_h: 16000 kernel_w: 1 pad_h: 100000 pad_w: 0", "windows of an image"),
        ("Convolution", "kernel_size: 3 pad: 1000000 stride: 1000000", "padded image 3 2000008 2000008"),
        ("Convolution", "kernel_size: 1 pad: 1000000", "shape .* is not possible"),
        ("Deconvolution", "kernel_size: 2 stride: 1000000", "shape .* is not possible"),
    ],
)
def test_kernels_and_pads_that_would_compute_for_minutes(kind: str, settings: str, message: str) -> None:
    with pytest.raises((ConfigError, ShapeError), match=rf"layer 'c' \({kind}\): .*{message}"):
        build(convolution(settings, kind))


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("Exp", "exp_param { base: 2 shift: 3e38 }"),
        ("Exp", "exp_param { base: inf }"),
        ("Log", "log_param { base: inf }"),
    ],
)
def test_exponents_beyond_the_largest_number(kind: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"layer 'e' \({kind}\): base"):
        build(f'layer {{ name: "e" type: "{kind}" bottom: "x" top: "e" {setting} }}')


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


def test_raw_data_that_are_no_whole_number_of_values() -> None:
    blob = caffe_pb2.BlobProto(raw_data=bytes(7), raw_data_type=caffe_pb2.FLOAT)
    with pytest.raises(SnapshotError, match="layer 'x' has 7 bytes of raw_data, which end within a value"):
        from_blob_proto(blob, "layer 'x'")


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

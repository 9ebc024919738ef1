from __future__ import annotations

import pytest
from google.protobuf import text_format

from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError, NonFiniteError, exit_status
from caffepy.layers.core.base import LayerContext, layer_class
from caffepy.parallel.control.describe_error import describe_error
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.run_report import batch_sizes, division_warning
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, SolverParameter


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": []}, "nothing to train on"),
        ({"cpu_solvers": 0}, "nothing to train on"),
        ({"devices": [0, 1, 0]}, r"GPU 0 is named twice in \[0, 1, 0\]"),
        ({"timeout": 0.0}, "timeout is 0.0; it must be a positive"),
        ({"max_skipped": 0}, "max_skipped is 0; it must be at least 1"),
        ({"compression": "fp8"}, "unknown compression 'fp8'; known: none, fp16, bf16"),
        ({"sigint_effect": "explode"}, "cannot have the effect 'explode'; known: stop, snapshot, none"),
    ],
)
def test_impossible_options_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(SolverParameter(), **settings).check()  # type: ignore[arg-type]


def test_one_entry_for_each_solver_thread() -> None:
    assert TrainOptions(SolverParameter(), devices=[2, 3]).local_devices == [2, 3]
    assert TrainOptions(SolverParameter(), cpu_solvers=3).local_devices == [None, None, None]


def test_batch_sizes_are_found_in_whatever_layer_has_them() -> None:
    net = text_format.Parse(
        """layer { name: "a" data_param { batch_size: 64 } } layer { name: "b" hdf5_data_param { batch_size: 10 } }
        layer { name: "c" pooling_param { kernel_size: 2 } } layer { name: "d" image_data_param { } }""",
        NetParameter(),
    )
    assert dict(batch_sizes(net)) == {"a": 64, "b": 10, "d": 1}


@pytest.mark.parametrize(
    ("batch_size", "shard", "expected"),
    [
        (64, Shard(0, 4, 2), None),
        (65, Shard(0, 4, 2), "layer 'x': batch_size 65 is not divisible by 2 devices: each takes 33, 66 together"),
        (65, Shard(0, 4, 2, per_device_batch=True), None),
        (65, Shard(0, 4, 1), None),
    ],
)
def test_an_uneven_division_is_worth_a_warning(batch_size: int, shard: Shard, expected: str | None) -> None:
    assert division_warning("x", batch_size, shard) == expected


def failure_in_a_layer(error: Exception) -> Exception:
    """`error` as raised by a layer's forward pass."""
    context = LayerContext(backend=None)  # type: ignore[arg-type]
    layer = layer_class("ReLU")(LayerParameter(name="relu7", type="ReLU"), context)

    def forward(self: object) -> None:
        raise error

    try:
        forward(layer)
    except Exception as raised:
        return raised
    raise AssertionError


def test_an_error_is_described_with_the_layer_that_was_at_work() -> None:
    assert describe_error(failure_in_a_layer(ValueError("odd"))) == "layer 'relu7' (ReLU): ValueError: odd"
    own = NonFiniteError("layer 'relu7' (ReLU): NaN")
    assert describe_error(failure_in_a_layer(own)) == "layer 'relu7' (ReLU): NaN"
    assert describe_error(ValueError("odd")) == "ValueError: odd"


def test_exit_status_is_the_errors_own() -> None:
    assert [exit_status(error) for error in (ConfigError("x"), NonFiniteError("x"), KeyError("x"))] == [2, 1, 1]

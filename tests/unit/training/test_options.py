from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format

from caffepy.cli.main import parse
from caffepy.data.sharding import Shard
from caffepy.distributed.liveness import describe_error
from caffepy.errors import ConfigError, NonFiniteError, exit_status
from caffepy.formats.proto.caffe_pb2 import LayerParameter, NetParameter, SolverParameter
from caffepy.layers.layer import LayerContext, layer_class
from caffepy.training.options import TrainOptions
from caffepy.training.run_summary import batch_sizes, division_warning
from caffepy.utils.options import check_names, option_values, options_of, with_values


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": []}, "nothing to train on"),
        ({"cpu_solvers": 0}, "nothing to train on"),
        ({"devices": [0, 1, 0]}, r"GPU 0 is named twice in \[0, 1, 0\]"),
        ({"timeout": 0.0}, "timeout: '0.0' is not a number of seconds above 0"),
        ({"max_skipped": 0}, "max_skipped: '0' is not a whole number of at least 1"),
        ({"compression": "fp8"}, "compression cannot be 'fp8'; known: none, fp16, bf16"),
        ({"sigint_effect": "explode"}, "sigint_effect cannot be 'explode'; known: stop, snapshot, none"),
    ],
)
def test_impossible_options_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(SolverParameter(), **settings).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "known"),
    [({"fuse": False, "keep_last": 3, "timeout": 9.0}, None), ({"gpus": [0]}, "known"), ({"tmeout": 3}, "timeout")],
)
def test_options_and_their_groups_are_set_by_name(settings: dict[str, object], known: str | None) -> None:
    plain = TrainOptions(SolverParameter())
    names = [one.name for one in options_of(TrainOptions)]
    if known is not None:
        with pytest.raises(ConfigError, match=rf"train has no option '{next(iter(settings))}'; .*{known}"):
            check_names(settings, names, "train")
        return
    check_names(settings, names, "train")
    changed = with_values(plain, settings)
    assert (changed.engine.fuse, changed.retention.keep_last, changed.timeout) == (False, 3, 9.0)
    assert changed.engine == replace(plain.engine, fuse=False)


def test_every_option_of_the_command_has_its_declared_default() -> None:
    given = parse(["train"])
    assert given is not None
    values = given.given_values(TrainOptions)
    for one, value in option_values(TrainOptions(SolverParameter(), devices=None)):
        assert values.get(one.name) == value == one.default, one.name


def test_the_table_of_options_is_current() -> None:
    docs = Path(__file__).parents[3] / "docs"
    made = runpy.run_path(str(docs / "generate.py"))["PAGES"]["reference/options.md"]()
    assert (docs / "reference/options.md").read_text() == made, "run python docs/generate.py"


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
    own = NonFiniteError("layer 'relu7' (ReLU): NaN", 3)
    assert describe_error(failure_in_a_layer(own)) == "iteration 3: layer 'relu7' (ReLU): NaN"
    assert describe_error(ValueError("odd")) == "ValueError: odd"


def test_exit_status_is_the_errors_own() -> None:
    assert [exit_status(error) for error in (ConfigError("x"), NonFiniteError("x", 0), KeyError("x"))] == [2, 1, 1]

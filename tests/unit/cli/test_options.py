"""Options in both of Caffe's spellings, and what a mistyped one gets."""

from __future__ import annotations

import argparse
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import caffepy
from caffepy.cli.main import COMMANDS, build_parser
from caffepy.cli.main import parse as parse_command
from caffepy.cli.options import normalise
from caffepy.cli.train import make_options as train_options
from caffepy.errors import ConfigError
from caffepy.utils import options


def parse(*arguments: str) -> Any:
    return parse_command(normalise(arguments))


@pytest.mark.parametrize("dashes, joined", list(itertools.product(("-", "--"), (True, False))))
def test_every_spelling_of_an_option_with_a_value(dashes: str, joined: bool):
    option = [f"{dashes}solver=a.prototxt"] if joined else [f"{dashes}solver", "a.prototxt"]
    assert parse("train", *option).solver == Path("a.prototxt")


@pytest.mark.parametrize("name", ["sigint", "sighup", "sigterm"])
@pytest.mark.parametrize("spelling", ["--{}_effect=snapshot", "-{}_effect=snapshot", "--{}-effect=snapshot"])
def test_signal_effects_with_dashes_and_underscores(name: str, spelling: str):
    args = parse("train", "--solver=s", spelling.format(name))
    assert getattr(args, f"{name}_effect") == "snapshot"


def test_skipped_updates_and_compression_reach_training(tmp_path: Path):
    solver = tmp_path / "solver.prototxt"
    solver.write_text('net: "n.prototxt" max_iter: 1 base_lr: 1 lr_policy: "fixed"')
    given = parse("train", f"--solver={solver}", "--cpu", "--max_skipped=7", "--compression=bf16")
    options = train_options(given)
    options.check()
    assert (options.max_skipped, options.compression) == (7, "bf16")
    assert train_options(parse("train", f"--solver={solver}", "--cpu")).max_skipped == 50


def test_signal_effects_are_caffes_by_default():
    args = parse("train", "--solver=s")
    assert (args.sigint_effect, args.sighup_effect, args.sigterm_effect) == ("stop", "snapshot", "stop")


@pytest.mark.parametrize("switch", ["autotune", "deterministic"])
def test_switches_of_convolutions_are_on_by_default(switch: str, tmp_path: Path):
    solver = tmp_path / "solver.prototxt"
    solver.write_text('net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 1')
    for given, value in (([], True), ([f"--no-{switch}"], False), ([f"--{switch}"], True)):
        engine = train_options(parse("train", f"--solver={solver}", "--cpu", *given)).engine
        assert getattr(engine, switch) is value


def test_values_keep_their_underscores_and_dashes():
    assert normalise(["-weights=a_b-c.caffemodel", "my_net.prototxt", "-5"]) == [
        "--weights=a_b-c.caffemodel",
        "my_net.prototxt",
        "-5",
    ]


def test_nothing_is_changed_after_two_dashes():
    assert normalise(["-a_b", "--", "-a_b"]) == ["--a-b", "--", "-a_b"]


def test_math_is_on_tensor_cores_by_default():
    assert parse("train").math == parse("time").math == "tf32"
    for function in (caffepy.create_backend, caffepy.load):
        assert inspect.signature(function).parameters["math"].default == "tf32"
    assert parse("train", "-math=tf32").math == "tf32"
    with pytest.raises(ConfigError, match="invalid choice: 'fp8'"):
        parse("train", "--math", "fp8")


@pytest.mark.parametrize("option", ["--gpu", "--gpus", "-gpu", "-gpus"])
def test_gpu_lists(option: str):
    assert parse("train", option, "0,1").gpus == [0, 1]
    assert parse("train", f"{option}=all").gpus == "all"


def test_weights_and_stages_are_lists():
    args = parse("train", "--weights", "a.caffemodel, b.caffemodel", "--stage=deploy,tiny", "--level", "2")
    assert args.weights == [Path("a.caffemodel"), Path("b.caffemodel")]
    assert args.stage == ["deploy", "tiny"]
    assert args.level == 2


def test_defaults_of_train():
    args = parse("train")
    assert (args.gpus, args.cpu, args.cpu_solvers, args.batch, args.keep_going) == (None, False, 1, "per-rank", False)
    assert (args.timeout, args.threads, args.snapshot, args.weights) == (300.0, None, None, [])


@pytest.mark.parametrize("command", ["test", "time"])
def test_test_and_time_take_fifty_iterations_as_caffe(command: str):
    assert parse(command, "-model=m").iterations == 50


def test_the_whole_parser_knows_every_command():
    help_text = build_parser().format_help()
    assert all(command in help_text for command in COMMANDS)


@pytest.mark.parametrize("given", ["--gpus", "--gpu", "-gpus"])
def test_an_error_has_the_options_name_that_was_given(given: str):
    name = f"--{given.lstrip('-')}"
    for words in ([given, "x"], [f"{given}=x"]):
        with pytest.raises(ConfigError, match=f"^argument {name}: 'x' is neither 'all' nor GPU numbers"):
            parse("train", *words)
    with pytest.raises(ConfigError, match=f"^argument {name}: not allowed with argument --cpu"):
        parse("train", "--cpu", given, "0")
    with pytest.raises(ConfigError, match=f"^argument --cpu: not allowed with argument {name};"):
        parse("train", given, "0", "--cpu")


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (options.gpu_list, ["", "x", "0,", "-1", "0,-2", "0;1", str(2**31)], "neither 'all' nor GPU numbers"),
        (options.gpu_list, ["0,1,0"], "names a GPU twice"),
        (options.positive, ["0", "-3", "1.5", "many", "", "9" * 5000], "whole number of at least 1"),
        (options.positive, [str(2**31)], "at most 2147483647"),
        (options.positive_seconds, ["0", "-1", "inf", "nan", "soon"], "number of seconds above 0"),
        (options.positive_seconds, ["1e300"], "is more than 1e.08 seconds"),
        (options.level, [str(2**31)], "is not a whole number from -2147483647"),
        (options.level, ["x"], "is not a whole number from"),
        (options.gpu_number, ["-1"], "is no GPU's number"),
        (options.iteration_range, [f"1:{'9' * 5000}"], "is not a range of iterations"),
        (options.record_shape, ["100000,100000"], "is no shape such as 3,224,224"),
        (options.name_list, ["\udcff"], "is not UTF-8"),
    ],
)
def test_values_that_no_option_takes(parse: Callable[[str], object], texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse(text)


OPTION = "unexpected argument '{}': a file has an option here, {};"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train -sovler=x", r"unknown option '--sovler'; did you mean '--solver'\?"),
        (
            "test --kind TEST",
            "unknown option '--kind'; known: --alias, --ap-version, --cpu",
        ),  # dashes make no option near
        ("train --sol x", "unknown option '--sol'"),  # options are not abbreviated
        ("trian", r"unknown command 'trian'; did you mean 'train'\?"),
        ("train x", "unexpected argument 'x'; 'caffepy train --help'"),
        ("net net.prototxt", OPTION.format("net.prototxt", "--model net.prototxt or --solver net.prototxt")),
        ("train solver.prototxt", OPTION.format("solver.prototxt", "--solver solver.prototxt")),
        (
            "train --solver s s_iter_1.solverstate",
            OPTION.format("s_iter_1.solverstate", "--snapshot s_iter_1.solverstate"),
        ),
        ("test --model n n.caffemodel", OPTION.format("n.caffemodel", "--weights n.caffemodel")),
        ("time net.prototxt", OPTION.format("net.prototxt", "--model net.prototxt")),
        ("train --solver", "--solver: expected one argument; 'caffepy train --help'"),
        ("train --cpu --gpu 0", "not allowed with argument"),
        ("train --sigint_effect=explode", "stop.*snapshot.*none"),
    ],
)
def test_what_mistyped_words_get(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words.split())

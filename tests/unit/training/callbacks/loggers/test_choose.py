"""The text of --log, and what `loggers` of caffepy.train may be."""

from __future__ import annotations

import argparse
import sys

import pytest

import caffepy
from caffepy.errors import ConfigError
from caffepy.training.callbacks.loggers import CsvLogger, JsonLinesLogger, logger_list, make_loggers
from caffepy.utils.installation import MissingExtraError


def test_a_list_has_kinds_and_targets() -> None:
    assert logger_list("csv:a.csv, mlflow:http://host:5000,") == ["csv:a.csv", "mlflow:http://host:5000"]


@pytest.mark.parametrize("text", ["csv", "csv:", "excel:a", "csv:a,b", "", ","])
def test_another_text_is_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no logger; known: tensorboard:DIR, csv:FILE"):
        logger_list(text)
    with pytest.raises(ConfigError, match="is no logger"):
        make_loggers([text])


@pytest.mark.parametrize("text", ["csv:X,csv:X", "csv:X,jsonl:./X", "tensorboard:X,csv:X", "wandb:p,mlflow:u,wandb:p"])
def test_two_loggers_do_not_share_a_target(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="' write to the same place; name another"):
        logger_list(text)
    with pytest.raises(ConfigError, match="' write to the same place"):
        make_loggers(text.split(","))
    assert logger_list("csv:X,jsonl:Y,wandb:X") == ["csv:X", "jsonl:Y", "wandb:X"]


def test_texts_and_objects_are_loggers_alone_or_in_a_list() -> None:
    own = caffepy.Logger()
    assert [name for name, _ in make_loggers(own)] == ["Logger"]
    named = make_loggers(["csv:a.csv,jsonl:b", own])
    assert [name for name, _ in named] == ["csv:a.csv", "jsonl:b", "Logger"]
    assert [type(logger) for _, logger in named] == [CsvLogger, JsonLinesLogger, caffepy.Logger]
    assert make_loggers([]) == []


@pytest.mark.parametrize("given", [3, None, caffepy.Logger, [object()]])
def test_another_object_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="is no logger; give a text"):
        make_loggers(given)


@pytest.mark.parametrize(
    ("text", "package", "extra"),
    [("tensorboard:d", "tensorboardX", "tensorboard"), ("wandb:p", "wandb", "wandb"), ("mlflow:u", "mlflow", "mlflow")],
)
def test_a_missing_library_is_named_with_its_extra(
    text: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"caffepy.training.callbacks.loggers.{extra}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed .*\[{extra}\]'"):
        make_loggers(text)

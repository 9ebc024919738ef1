"""From the text `csv:run.csv` to a logger. Imports an adapter, and its library, when it is asked for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caffepy.errors import ConfigError
from caffepy.training.callbacks.loggers.contract import Logger
from caffepy.utils.installation import MissingExtraError

KINDS = {"tensorboard": "DIR", "csv": "FILE", "jsonl": "FILE", "wandb": "PROJECT", "mlflow": "URI"}
"""The kinds of loggers and what follows their colon."""
_WRITES_THERE = ("tensorboard", "csv", "jsonl")
"""Kinds whose target is a file or folder."""
_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""By kind, which is the name of the extra too."""


def logger_list(text: str) -> list[str]:
    """``KIND:TARGET``, divided by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts or [text]:
        kind, _, target = part.partition(":")
        if kind not in KINDS or not target:
            known = ", ".join(f"{kind}:{target}" for kind, target in KINDS.items())
            raise argparse.ArgumentTypeError(f"'{part}' is no logger; known: {known}")
    targets: dict[str, str] = {}
    for part in parts:
        kind, _, target = part.partition(":")
        other = targets.setdefault(os.path.realpath(target) if kind in _WRITES_THERE else part, part)
        if other is not part:
            raise argparse.ArgumentTypeError(f"'{other}' and '{part}' write to the same place; name another")
    return parts


def make_loggers(given: Any) -> list[tuple[str, Logger]]:
    """Return loggers with their names in messages.

    Args:
        given: texts such as ``csv:run.csv``, or objects, one or a sequence of them.

    Raises:
        ConfigError: one is neither such a text nor a logger, or two write to the same file.
        MissingExtraError: the library of an adapter is not installed.
    """
    parts = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if texts := [part for part in parts if isinstance(part, str)]:
        _parsed(",".join(texts))
    return [named for part in parts for named in _make(part)]


def _make(given: Any) -> list[tuple[str, Logger]]:
    if isinstance(given, str):
        return [(text, _adapter(*text.split(":", 1))) for text in _parsed(given)]
    if not isinstance(given, Logger):
        raise ConfigError(f"loggers: {given!r} is no logger; give a text such as 'csv:run.csv' or a caffepy.Logger")
    return [(type(given).__name__, given)]


def _parsed(given: str) -> list[str]:
    try:
        return logger_list(given)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"loggers: {error}") from error


def _adapter(kind: str, target: str) -> Logger:
    if kind == "csv":
        from caffepy.training.callbacks.loggers.rows import CsvLogger

        return CsvLogger(Path(target))
    if kind == "jsonl":
        from caffepy.training.callbacks.loggers.rows import JsonLinesLogger

        return JsonLinesLogger(Path(target))
    try:
        return _library_adapter(kind, target)
    except ImportError as error:
        raise MissingExtraError(_LIBRARIES[kind], kind, f"for --log {kind}:{KINDS[kind]}") from error


def _library_adapter(kind: str, target: str) -> Logger:
    """Return an adapter; raises ImportError if its library is not installed."""
    if kind == "tensorboard":
        from caffepy.training.callbacks.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger(target)
    if kind == "wandb":
        from caffepy.training.callbacks.loggers.wandb import WandbLogger

        return WandbLogger(target)
    from caffepy.training.callbacks.loggers.mlflow import MlflowLogger

    return MlflowLogger(target)

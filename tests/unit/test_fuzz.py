"""The fuzzing program: its inputs are the same in every run, and a few of each format find nothing."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worker's module."""
    monkeypatch.syspath_prepend(str(TESTS))
    from fuzz import worker

    return worker


SLOW = ("net, run on the CPU", "PNG and JPEG", "image list")
"""Formats of which no inputs are tried here."""


def fast() -> list[str]:
    """The names of the others."""
    return [name for name in names() if name not in SLOW]


def names() -> list[str]:
    """All formats."""
    sys.path.insert(0, str(TESTS))
    try:
        from fuzz.targets import TARGETS
    finally:
        sys.path.remove(str(TESTS))
    return [kind.name for kind in TARGETS]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", fast())
def test_damaged_inputs_are_read_or_refused(
    worker: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fuzz.targets import TARGETS

    monkeypatch.chdir(tmp_path)
    logging.disable(logging.CRITICAL)
    target = next(kind for kind in TARGETS if kind.name == name)(tmp_path)  # type: ignore[attr-defined]
    try:
        for number in range(10):
            data = target.make(worker.case_random(7, name, number))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    target.use(data)
            except Exception as error:
                assert worker.is_ours(error, target.allowed), (number, error)
    finally:
        logging.disable(logging.NOTSET)


def test_what_counts_as_an_escape(worker: ModuleType) -> None:
    from caffepy.errors import ConfigError, InternalError

    assert worker.is_ours(ConfigError("x"), ())
    assert worker.is_ours(OSError("x"), (OSError,))
    assert not worker.is_ours(InternalError("x"), ())
    assert not worker.is_ours(KeyError("x"), ())


def test_an_input_is_determined_by_seed_format_and_number(worker: ModuleType) -> None:
    from fuzz.mutate import damage_bytes, damage_text

    def inputs(seed: int) -> list[bytes]:
        made = []
        for number in range(20):
            random = worker.case_random(seed, "x", number)
            made += [damage_text('a: 1 b: "c"', ["d: 2"], random), damage_bytes(bytes(50), [b"x"], random)]
        return made

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)


def test_every_input_is_tried_once(worker: ModuleType) -> None:
    from fuzz.run import TARGETS, plan_chunks

    chunks = plan_chunks(range(len(TARGETS)), 10_000)
    assert 10_000 <= sum(count for _, _, count in chunks) <= 10_000 + len(TARGETS)
    assert {index for index, _, _ in chunks} == set(range(len(TARGETS)))


def test_messages_are_damaged_within_their_schema(worker: ModuleType) -> None:
    from fuzz.mutate import damage_message

    from caffepy.formats.proto import caffe_pb2

    changed = set()
    for seed in range(50):
        net = caffe_pb2.NetParameter(name="n", layer=[caffe_pb2.LayerParameter(name="l", type="ReLU", bottom=["x"])])
        damage_message(net, Random(seed))
        changed.add(net.SerializePartialToString())
    assert len(changed) > 25

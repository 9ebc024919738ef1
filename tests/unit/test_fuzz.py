"""The fuzzing program: its inputs are the same in every run, and a few of each format find nothing."""

from __future__ import annotations

import logging
import re
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz import worker
from fuzz.hostile import HOSTILE, content
from fuzz.mutate import damage_bytes, damage_message, damage_text
from fuzz.run import plan_chunks
from fuzz.targets import TARGETS

SLOW = ("net, run on the CPU", "PNG and JPEG", "image list")
"""Formats of which no inputs are tried here."""
KINDS: dict[str, Any] = {kind.name: kind for kind in TARGETS}  # type: ignore[attr-defined]
MOST_BYTES = 1 << 27
"""By which memory may grow, unless a text is long."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Gives a format's target, made once."""
    return cache(lambda name: KINDS[name](tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in SLOW])
def test_damaged_inputs_are_read_or_refused(target: Callable[[str], Any], name: str) -> None:
    subject = target(name)
    for number in range(10):
        try:
            subject.use(subject.input(worker.case_random(7, name, number)))
        except Exception as error:
            assert worker.is_ours(error, subject.allowed), (number, error)


def test_a_damaged_database_is_refused_or_gives_its_own_records(target: Callable[[str], Any]) -> None:
    from caffepy.errors import DataError

    subject, refused = target("data.mdb"), 0
    for number in range(1500):
        try:
            subject.use(subject.input(worker.case_random(9, subject.name, number)))
        except DataError:
            refused += 1
    assert 500 < refused < 1250


def peak(use: Callable[[], object]) -> int:
    """The most bytes that NumPy and Python held at once."""
    tracemalloc.start()
    try:
        use()
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, cases in HOSTILE.items() for number in range(len(cases))]
)
def test_hostile_inputs_are_refused_in_time_and_memory(target: Callable[[str], Any], name: str, number: int) -> None:
    subject, (given, message) = target(name), HOSTILE[name][number]
    data = content(given)
    grown, start = worker.peak_bytes(), time.thread_time()

    def use() -> None:
        try:
            subject.use(data)
        except Exception as error:
            assert worker.is_ours(error, subject.allowed)
            assert re.search(message, str(error)) and "\n" not in str(error), str(error)[:1000]
        else:
            assert not message

    if name.endswith(".h5"):
        assert peak(use) < 2 * MOST_BYTES
    else:
        use()
        assert worker.peak_bytes() - grown < (worker.GROWTH if len(data) > 2_000_000 else MOST_BYTES)
    assert time.thread_time() - start < (30 if len(data) > 2_000_000 else 10)


def test_what_counts_as_an_escape() -> None:
    from caffepy.errors import ConfigError, InternalError

    assert worker.is_ours(ConfigError("x"), ())
    assert worker.is_ours(OSError("x"), (OSError,))
    assert not worker.is_ours(InternalError("x"), ())
    assert not worker.is_ours(KeyError("x"), ())


def test_an_input_is_determined_by_seed_format_and_number() -> None:
    def inputs(seed: int) -> list[bytes]:
        made = []
        for number in range(20):
            random = worker.case_random(seed, "x", number)
            made += [damage_text('a: 1 b: "c"', ["d: 2"], random), damage_bytes(bytes(50), [b"x"], random)]
        return made

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)


def test_every_input_is_tried_once() -> None:
    chunks = plan_chunks(range(len(TARGETS)), 10_000)
    assert 10_000 <= sum(count for _, _, count in chunks) <= 10_000 + len(TARGETS)
    assert {index for index, _, _ in chunks} == set(range(len(TARGETS)))


def test_messages_are_damaged_within_their_schema() -> None:
    from caffepy.formats.proto import caffe_pb2

    changed = set()
    for seed in range(50):
        net = caffe_pb2.NetParameter(name="n", layer=[caffe_pb2.LayerParameter(name="l", type="ReLU", bottom=["x"])])
        damage_message(net, Random(seed))
        changed.add(net.SerializePartialToString())
    assert len(changed) > 25

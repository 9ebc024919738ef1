"""Values that travel through the store, and how a connection ends."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from caffepy.distributed.store.wire import WireError, end_in_order, pack, unpack
from caffepy.logs.performance_report import Performance
from caffepy.training.consistency import FieldMismatch

COUNT = 4 << 20


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection; the second one has received nothing of `COUNT` bytes that the first has sent."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    line = socket.create_connection(listening.getsockname())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * COUNT)
    other, _ = listening.accept()
    listening.close()
    return line, other


def test_what_was_sent_last_arrives_where_the_other_end_has_sent_more(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A plain close resets the connection here, and most of the bytes are lost."""
    line, other = ends
    line.setblocking(False)
    sent = line.send(bytes(COUNT))
    other.sendall(b"a request that nobody reads")
    ending = threading.Thread(target=end_in_order, args=(line, 20.0))
    ending.start()
    time.sleep(0.05)
    received = 0
    while data := other.recv(1 << 20):
        received += len(data)
    ending.join(300)
    assert received == sent > 1 << 18
    other.close()


def test_an_end_that_takes_nothing_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    line, other = ends
    line.setblocking(False)
    line.send(bytes(COUNT))
    begin = time.monotonic()
    end_in_order(line, 0.1)
    assert 0.1 <= time.monotonic() - begin < 300.0 and line.fileno() == -1
    other.close()


# -- values ----------------------------------------------------------------------------------------------


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.text(), st.binary())
VALUES = st.recursive(
    PLAIN | st.just(Path("a/b")) | st.builds(FieldMismatch, st.text(), st.text(), st.text()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
)


@dataclass
class Text:
    """A record of a script, which other processes may not have."""

    number: int


@given(VALUES)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    found = unpack(pack(value))
    assert found == value and type(found) is type(value)


def test_numbers_that_are_not_finite_and_records_arrive() -> None:
    assert math.isnan(unpack(pack(math.nan)))
    sent = [Performance(batch=3, seconds=0.5, communication=None)]
    assert unpack(pack(sent)) == sent


@pytest.mark.parametrize("value", [np.float32(0.1), np.float64(0.1), np.int64(-3), np.bool_(True), np.complex64(1j)])
def test_numbers_of_numpy_keep_their_type(value: np.generic) -> None:
    (found,) = unpack(pack([value]))
    assert found == value and type(found) is type(value)


@given(
    npst.arrays(
        npst.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc"), npst.array_shapes(min_dims=0, min_side=0)
    )
)
def test_arrays_arrive_with_dtype_shape_and_bits(array: np.ndarray) -> None:
    (found,) = unpack(pack([array]))
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert found.flags.writeable


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, np.datetime64("now"), np.array([None]), np.array(["a"]), Performance, Text(1)]
)
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="does not travel from rank to rank"):
        pack(value)


@pytest.mark.parametrize(
    "found",
    [
        {"record": ["os", "stat_result", {}]},
        {"record": ["subprocess", "Popen", {"args": "true"}]},
        {"record": ["caffepy.logs.performance_report", "Sequence", {}]},
        {"record": ["caffepy.logs.performance_report", "format_report", {}]},
        {"record": ["caffepy.logs.performance_report", "Performance", {"other": 1}]},
        {"record": ["caffepy.nowhere", "Performance", {}]},
        {"record": [1, 2, 3]},
        {"record": []},
        {"code": "x"},
        {},
        {"bytes": "a", "path": "b"},
        {"bytes": 3},
        {"path": None},
        {"tuple": 3},
        {"dict": [[[1], 2]]},
        {"dict": [1]},
        {"array": ["O", [1], "AAAAAAAAAAA="]},
        {"array": ["f4", [1 << 60], "AAAAAAAAAAA="]},
        {"array": ["f4", [-1, 2], "AAAA"]},
        {"array": ["f4"]},
    ],
)
def test_what_was_not_packed_is_refused(found: Any) -> None:
    with pytest.raises(WireError, match="not a packed value|no record of caffepy's|does not travel"):
        unpack(json.dumps(found).encode())


@given(st.binary())
def test_garbage_is_refused(garbage: bytes) -> None:
    try:
        json.loads(garbage)
    except ValueError:
        with pytest.raises(WireError, match="not a packed value"):
            unpack(garbage)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError, match="not a packed value"):
        unpack(b"[" * 100_000 + b"]" * 100_000)

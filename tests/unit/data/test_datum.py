"""Datums."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data import datum as module
from caffepy.data.datum import datum_shape, parse_datum
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import Datum


@given(
    size=st.sampled_from([0, 1, 127, 128, 300, 16380, 20000]), label=st.integers(-5, 2**31 - 1), encoded=st.booleans()
)
def test_data_and_all_else_come_out_of_small_and_large_records(size, label, encoded):
    written = Datum(channels=3, height=2, width=size, data=bytes(range(256)) * 80, label=label, encoded=encoded)
    written.data = written.data[:size]
    datum, data = parse_datum(memoryview(written.SerializeToString()))
    assert bytes(data) == written.data
    datum.data = written.data
    assert datum == written


def test_large_data_are_not_copied():
    record = Datum(channels=1, height=200, width=200, data=bytes(40000)).SerializeToString()
    assert isinstance(parse_datum(record)[1], memoryview)


@settings(max_examples=50)
@given(st.binary(max_size=50), st.integers(0, 2))
def test_any_bytes_give_a_datum_or_an_error(content, padding):
    for record in (
        content,
        content + b"\0" * padding * module.VIEW_MIN_BYTES,
        b"\x08" * padding * module.VIEW_MIN_BYTES + content,
    ):
        try:
            parse_datum(record)
        except DataError as error:
            assert str(error).startswith("is not a Datum (")


def test_what_is_no_datum_is_refused():
    with pytest.raises(DataError, match=r"is not a Datum \(.*\); rebuild the database"):
        parse_datum(b"\xff\xff\xff")


@pytest.mark.parametrize("shape", [(1, 2, 3), (0, 2, 3), (-1, -2, 3), (65536, 65536, 65536)])
def test_shapes_must_fit_the_values(shape):
    datum = Datum(channels=shape[0], height=shape[1], width=shape[2])
    with pytest.raises(DataError, match=r"is a Datum of 7 bytes, but its channels x height x width is -?\d+ x "):
        datum_shape(datum, 7, "bytes")

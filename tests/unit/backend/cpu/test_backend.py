"""What is particular to the CPU backend; its primitives are in tests/unit/backend/test_primitives.py."""

from __future__ import annotations

import backend_oracle
import numpy as np
import pytest
from backend_arrays import normal, to_device
from primitive_checks.elementwise import two

from caffepy.backend import create_backend
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.errors import DeviceError

BACKEND = CpuBackend(2)


def test_reshaped_is_a_view_where_memory_order_allows() -> None:
    array = BACKEND.zeros((4, 6, 1, 1))
    assert np.shares_memory(BACKEND.reshaped(array, (4, 6)), array)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    x = normal(1, (37, 19, 33, 31))
    results = []
    for threads in (1, 2):
        backend = CpuBackend(threads)
        for shape in ((), (19,)):
            out = backend.zeros(shape)
            backend.reduce(two, (to_device(backend, x),) * 2, (out, backend.zeros(shape)))
            results.append(backend.to_host(out))
    assert np.array_equal(results[0], results[2])
    assert np.array_equal(results[1], results[3])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The vectors that the Random123 library publishes for philox4x32-10."""
    assert backend_oracle.philox(counter, key) == expected


def test_too_few_threads() -> None:
    with pytest.raises(DeviceError, match="0 CPU threads: specify at least 1"):
        CpuBackend(0)


def test_out_of_memory_says_how_much() -> None:
    with pytest.raises(DeviceError, match=r"out of memory: \d+\.\d\d GiB .*use a smaller batch_size"):
        BACKEND.zeros((2**22, 2**22, 2, 2))


def test_description() -> None:
    assert create_backend(None, 1).device_description() == "CPU, 1 thread"
    assert create_backend(None, 2).device_description() == "CPU, 2 threads"

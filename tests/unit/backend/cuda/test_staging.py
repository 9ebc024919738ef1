"""Pinned memory between host and device, on NumPy arrays and a stream that works only when it is waited for."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


class Stream:
    """Work that is queued, and done as late as possible."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], None]] = []
        self.done = 0

    def put(self, work: Callable[[], None]) -> None:
        self.queued.append(work)

    def finish(self, end: int) -> None:
        """Do what was queued before the work of this number."""
        for number in range(self.done, end):
            self.queued[number]()
        self.done = max(self.done, end)

    def synchronize(self) -> None:
        self.finish(len(self.queued))


class Event:
    """A place in a stream."""

    def __init__(self, **_: Any) -> None:
        self.end = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.queued)

    def synchronize(self) -> None:
        self.stream.finish(self.end)


class Pointer:
    """An address whose copies are queued."""

    def __init__(self, address: int) -> None:
        self.ptr = address

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.ptr + offset)

    def copy_from_host_async(self, host: int, size: int, stream: Stream) -> None:
        stream.put(lambda: ctypes.memmove(self.ptr, host, size))

    def copy_to_host_async(self, host: int, size: int, stream: Stream) -> None:
        stream.put(lambda: ctypes.memmove(host, self.ptr, size))


class DeviceArray(np.ndarray):
    """What CuPy's arrays have."""

    @property
    def data(self) -> Pointer:  # type: ignore[override]
        return Pointer(self.ctypes.data)


def on_device(shape: tuple[int, ...], dtype: str = "float32", last: bool = False) -> Any:
    """Zeros, channels last if asked for."""
    if not last:
        return np.zeros(shape, dtype).view(DeviceArray)
    n, c, h, w = shape
    return np.zeros((n, h, w, c), dtype).transpose(0, 3, 1, 2).view(DeviceArray)


class Scratch:
    """One buffer a purpose, as the backend's."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def get(self, purpose: str, count: int) -> Any:
        if purpose not in self._buffers or self._buffers[purpose].size < count:
            self._buffers[purpose] = on_device((count,))
        return self._buffers[purpose][:count]


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def module(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch, stream: Stream) -> Iterator[ModuleType]:
    """caffepy.backend.cuda.memory on that device; CuPy need not be installed."""
    before = set(sys.modules)
    copy = importlib.import_module("caffepy.backend.cuda.memory")
    cuda = SimpleNamespace(alloc_pinned_memory=bytearray, Event=Event)
    monkeypatch.setattr(copy, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(copy, "PART", 500)
    monkeypatch.setattr(copy, "copy", lambda a, b: stream.put(lambda: np.copyto(b, a, casting="unsafe")))
    yield copy
    for name in set(sys.modules) - before:
        if name.startswith("caffepy.backend.cuda.backend"):
            del sys.modules[name]


def numbers(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return np.random.default_rng(seed).integers(0, 99, shape).astype(dtype)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5, 6), (7, 3, 20, 31), (1200,), (0, 3, 4, 4)])
@pytest.mark.parametrize("kind", ["float32", "float64", "uint8", "float16"])
@pytest.mark.parametrize("target", ["float32", "float16"])
@pytest.mark.parametrize("last", [False, True])
def test_what_is_uploaded_arrives(
    module: ModuleType, stream: Stream, shape: tuple[int, ...], kind: str, target: str, last: bool
) -> None:
    staging = module.Staging(stream, Scratch())
    host, destination = numbers(1, shape, kind), on_device(shape, target, last and len(shape) == 4)
    wanted = host.astype(target)
    staging.upload(host, destination)
    host[...] = 0  # the caller may
    stream.synchronize()
    np.testing.assert_array_equal(np.array(destination), wanted)
    staging.close()


def test_arrays_that_do_not_lie_in_one_piece(module: ModuleType, stream: Stream) -> None:
    staging = module.Staging(stream, Scratch())
    for host in (numbers(1, (40, 60)).T, numbers(2, (40, 60))[::2, ::-3], np.broadcast_to(np.float32(3), (50, 60))):
        destination = on_device(host.shape)
        staging.upload(host, destination)
        stream.synchronize()
        np.testing.assert_array_equal(np.array(destination), host)


@pytest.mark.parametrize("sizes", [[7] * 9, [2000] * 9, [3, 900, 5, 3000, 1, 5000, 2, 2, 100]])
def test_many_uploads_do_not_overwrite_each_other(module: ModuleType, stream: Stream, sizes: list[int]) -> None:
    staging = module.Staging(stream, Scratch())
    hosts = [numbers(seed, (size,)) for seed, size in enumerate(sizes)]
    targets = [on_device((size,), "float16" if index % 2 else "float32") for index, size in enumerate(sizes)]
    for host, target in zip(hosts, targets, strict=True):
        staging.upload(host, target)
    assert stream.done < len(stream.queued), "it waited for everything"
    stream.synchronize()
    for host, target in zip(hosts, targets, strict=True):
        np.testing.assert_array_equal(np.array(target), host)


def test_what_is_downloaded_is_the_callers(module: ModuleType, stream: Stream) -> None:
    staging = module.Staging(stream, Scratch())
    arrays = [on_device((2, 3, 4, 5), last=True), on_device((3, 7)), on_device((2, 2), "float16"), on_device((0, 4))]
    wanted = []
    for seed, array in enumerate(arrays):
        array[...] = numbers(seed, array.shape)
        wanted.append(np.array(array, np.float32))
    found = staging.download(arrays)
    staging.download([on_device((100,))])
    for values, expected in zip(found, wanted, strict=True):
        assert (values.dtype, values.flags.c_contiguous) == (np.float32, True)
        np.testing.assert_array_equal(values, expected)


def test_another_shape_is_a_mistake(module: ModuleType, stream: Stream) -> None:
    with pytest.raises(AssertionError, match=r"\(2, 3\), \(3, 2\)"):
        module.Staging(stream, Scratch()).upload(numbers(1, (2, 3)), on_device((3, 2)))

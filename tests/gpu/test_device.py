"""Devices, streams, threads and errors of the CUDA backend."""

from __future__ import annotations

import threading
from typing import Any

import backend_arrays as arrays
import numpy as np
import pytest
from primitive_checks.elementwise import two

from caffepy.backend import Backend, Geometry, RandomStream, create_backend
from caffepy.errors import ConfigError, DeviceError

GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), (1, 1))


def _small_net(backend: Backend, seed: int) -> list[Any]:
    """A bit of everything on one backend, as host arrays."""
    with backend.activate():
        x = arrays.to_device(backend, arrays.normal(seed, (8, 16, 12, 12)))
        weights = arrays.to_device(backend, arrays.normal(seed + 1, (32, 16, 3, 3)))
        y, pooled = backend.zeros((8, 32, 12, 12)), backend.zeros((8, 32, 6, 6))
        mask, sums = backend.zeros((8, 32, 6, 6), "int32"), backend.zeros((32,))
        plan = backend.plan_convolution(x.shape, weights.shape, GEOMETRY)
        plan.forward(x, weights, None, y)
        backend.pool_max_forward(y, pooled, mask, Geometry((2, 2), (2, 2), (0, 0), (1, 1)))
        backend.reduce(two, (pooled, pooled), (sums, backend.zeros((32,))))
        flat = backend.reshaped(pooled, (8, 32 * 36))
        product, noise = backend.zeros((8, 8)), backend.zeros((8, 8))
        backend.gemm(flat, flat, product, transpose_b=True)
        backend.random_uniform(noise, RandomStream(seed, 3), (1, 2))
        return [backend.to_host(a) for a in (y, pooled, sums, product, noise)]


def test_the_cpu_agrees(backend: Backend) -> None:
    for ours, theirs in zip(_small_net(backend, 1), _small_net(create_backend(), 1), strict=True):
        arrays.close(ours, theirs, 2e-5)


@pytest.mark.parametrize("captured", [False, True])
def test_a_device_timer_measures_what_timed_events_measure(backend: Backend, captured: bool) -> None:
    x, y, watch = backend.zeros((2**26,)), backend.zeros((2**26,)), backend.device_timer(2)

    def work() -> None:
        watch.start(0)
        backend.copy(x, y)
        watch.start(1)
        backend.copy(y, x)
        watch.stop(0)
        watch.stop(1)

    work()
    run = backend.capture(work).launch if captured else work
    watch.reset()
    begin = backend.record_timed_event()
    for _ in range(50):
        run()
    whole = backend.record_timed_event().seconds_since(begin)
    both, second = watch.totals()
    # Other processes may use the GPU too, so that only what holds of any times is asked.
    assert 0 < second < both <= whole


def test_the_same_bits_twice(backend: Backend) -> None:
    first = _small_net(backend, 1)
    for ours, again in zip(first, _small_net(backend, 1), strict=True):
        assert np.array_equal(ours, again)


def test_two_backends_in_two_threads() -> None:
    expected = {seed: _small_net(create_backend(), seed) for seed in (1, 5)}
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            own = create_backend(0, math="fp32")
            for _ in range(20):
                for ours, theirs in zip(_small_net(own, seed), expected[seed], strict=True):
                    arrays.close(ours, theirs, 2e-5)
            own.close()
        except BaseException as error:
            wrong.append(f"thread {seed}: {error!r}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_close_may_be_called_twice() -> None:
    own = create_backend(0)
    own.close()
    own.close()


def test_description(backend: Backend) -> None:
    from caffepy.backend.cuda.backend import device_count, device_names, device_properties

    assert "device 0" in backend.device_description() and "GiB" in backend.device_description()
    assert len(device_names()) == device_count() >= 1
    properties = device_properties(0)
    assert properties.memory > 2**30 and properties.name == device_names()[0]
    assert properties.driver_version >= "12" and "." in properties.compute_capability


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match=r"GPU 99 was asked for, this machine has \d+ \(0.*\): .*--gpu"):
        create_backend(99)


def test_an_unknown_math_mode() -> None:
    from caffepy.backend.cuda.backend import CudaBackend

    with pytest.raises(ConfigError, match="unknown math mode 'fp8': use fp32 or tf32"):
        CudaBackend(0, math="fp8")


def test_tf32_is_less_exact_but_close() -> None:
    from caffepy.backend.cuda.backend import CudaBackend

    own = CudaBackend(0, math="tf32")
    for ours, theirs in zip(_small_net(own, 1), _small_net(create_backend(), 1), strict=True):
        arrays.close(ours, theirs, 5e-3)
    own.close()


def test_out_of_memory_says_how_much(backend: Backend) -> None:
    with pytest.raises(DeviceError, match=r"out of memory for an array of shape \(1099511627776,\).*batch_size"):
        backend.zeros((2**40,))


def test_primitives_can_be_captured(backend: Any) -> None:
    """A second run of the same work neither allocates nor waits, so that it can become a CUDA graph."""
    x = arrays.to_device(backend, arrays.normal(1, (8, 16, 12, 12)))
    weights = arrays.to_device(backend, arrays.normal(2, (32, 16, 3, 3)))
    y, dx, dweights = backend.zeros((8, 32, 12, 12)), backend.zeros(x.shape), backend.zeros(weights.shape)
    sums, product = backend.zeros((16,)), backend.zeros((32, 32))
    plan = backend.plan_convolution(x.shape, weights.shape, GEOMETRY)
    flat = backend.reshaped(weights, (32, 144))

    def work() -> None:
        plan.forward(x, weights, None, y)
        plan.backward_weights(x, y, dweights, accumulate=True)
        plan.backward_data(y, weights, dx)
        backend.reduce(two, (x, dx), (sums, sums))
        backend.gemm(flat, flat, product, transpose_b=True)

    work()
    backend.fill(dweights, 0)
    backend.synchronize()
    backend.stream.begin_capture()
    work()
    graph = backend.stream.end_capture()
    for _ in range(3):
        graph.launch(backend.stream)
    once = backend.zeros(weights.shape)
    plan.backward_weights(x, y, once, accumulate=False)
    arrays.close(backend.to_host(dweights), 3 * backend.to_host(once), 1e-5)

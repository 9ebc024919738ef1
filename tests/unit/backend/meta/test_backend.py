"""The backend that computes nothing: what it notes of arrays, and that it knows every primitive."""

from __future__ import annotations

import inspect

import pytest

from caffepy.backend import Geometry, create_backend
from caffepy.backend.interface import Backend
from caffepy.backend.meta.array import SETUP, MetaArray
from caffepy.backend.meta.backend import MetaBackend
from caffepy.backend.types import Normalisation, RandomStream

NUMBERS = {"value", "axis", "accumulate", "transpose_a", "transpose_b", "size", "alpha", "beta", "k", "relu",
           "elements", "ratio", "stream", "counter", "ignore_label", "scale", "divide_by_valid", "geometry",
           "expression", "host", "self"}  # fmt: skip
WITHOUT_ARRAYS = {"activate", "synchronize", "close", "device_description", "zeros", "plan_convolution", "to_host",
                  "device_scalars", "record_event", "record_timed_event", "device_timer", "copy_to_host_async", "view",
                  "flat", "reshaped"}  # fmt: skip


def backend() -> MetaBackend:
    dry = MetaBackend()
    dry.step = 0
    return dry


def span(array: MetaArray) -> tuple[int | None, int | None, bool]:
    return array.memory.first, array.memory.last, array.memory.lasting


@pytest.mark.parametrize("name", sorted(Backend.__abstractmethods__ - WITHOUT_ARRAYS))
def test_every_array_argument_is_noted(name: str):
    dry = backend()
    arguments: dict[str, object] = {}
    fields = [dry.zeros((3,)) for _ in range(7)]
    for argument, parameter in inspect.signature(getattr(Backend, name)).parameters.items():
        if argument == "n":
            arguments[argument] = Normalisation(*fields, 1e-5, 0.9)
        elif parameter.annotation in ("Array", "Array | None"):
            arguments[argument] = dry.zeros((2, 3))
        elif "Sequence" in str(parameter.annotation):
            arguments[argument] = [dry.zeros((2, 3))]
        else:
            assert argument in NUMBERS, f"say in NUMBERS what '{argument}' of {name} is"
            if argument != "self":
                arguments[argument] = 0
    getattr(dry, name)(**arguments)
    arrays = [v for value in arguments.values() for v in (value if isinstance(value, list) else [value])]
    untouched = [a for a in arrays if isinstance(a, MetaArray) and a.memory.first is None]
    assert not untouched
    if "n" in arguments:
        assert any(field.memory.first == 0 for field in fields)


def test_the_first_and_last_step_of_an_array():
    dry = backend()
    x, y = dry.zeros((4, 3)), dry.zeros((4, 3))
    assert span(x) == (None, None, False)
    dry.step = 2
    dry.copy(x, y)
    dry.step = 5
    dry.add(y, x)
    assert span(x) == (2, 5, True)
    assert span(y) == (2, 5, False)


def test_what_is_used_before_the_first_step_lasts():
    dry = MetaBackend()
    x = dry.zeros((3,))
    assert x.memory.made == SETUP
    dry.fill(x, 1)
    assert x.memory.lasting


def test_any_number_of_gradients_are_noted():
    dry = backend()
    arrays = [dry.zeros((2, 3)) for _ in range(8)]
    n = Normalisation(*(dry.zeros((3,)) for _ in range(7)), 1e-5, 0.9)
    dry.step = 4
    dry.batch_norm_backward_sums(arrays[0], arrays[1:7], n, *(dry.zeros((3,)) for _ in range(2)), total=arrays[7])
    assert [span(array)[:2] for array in arrays] == [(4, 4)] * 8
    assert not arrays[7].memory.lasting


def test_views_are_their_memory():
    dry = backend()
    x = dry.zeros((2, 3, 4, 5), "bfloat16")
    assert (x.dtype, x.size, x.nbytes, x.itemsize, x.ndim) == ("uint16", 120, 240, 2, 4)
    for view in (dry.flat(x), dry.view(dry.flat(x), (6, 20)), x.transpose(0, 2, 3, 1), x[:, :], x.reshape(2, -1).T):
        assert view.memory is x.memory
        assert view.size == 120
    assert x.reshape(2, -1).T.shape == (60, 2)
    assert x[1, 1:, :, :1].shape == (2, 4, 1)
    dry.fill(dry.flat(x), 0)
    assert span(x) == (0, 0, False)
    assert dry.reshaped(x, (2, 60)).memory is not x.memory
    assert dry.reshaped(dry.zeros((2, 3, 1, 1)), (2, 3)).memory.shape == (2, 3, 1, 1)


def test_parts_make_a_whole():
    dry = backend()
    x = dry.zeros((2, 5))
    dry.fill(x[:, :2], 0)
    dry.to_host(x[:, :2])
    assert not x.memory.lasting
    dry.fill(x[:, 1:], 0)  # overlaps, so it is not counted
    dry.fill(x[:, 2:], 0)
    dry.to_host(x)
    assert not x.memory.lasting


def test_a_part_is_not_the_whole():
    dry = backend()
    for read in (lambda a: a, lambda a: a[1:2], lambda a: a.reshape(10)[:3]):
        x = dry.zeros((2, 5))
        dry.fill(x[:1], 0)
        dry.to_host(read(x))
        assert x.memory.lasting


def test_sums_are_read_only_where_they_go_on():
    dry = backend()
    a, once, again = dry.zeros((2, 2)), dry.zeros((2, 2)), dry.zeros((2, 2))
    dry.gemm(a, a, once)
    dry.gemm(a, a, again, accumulate=True)
    assert (once.memory.lasting, again.memory.lasting) == (False, True)


def test_convolutions():
    dry = backend()
    plan = dry.plan_convolution((1, 2, 4, 4), (3, 2, 1, 1), Geometry((1, 1), (1, 1), (0, 0), (1, 1)))
    x, weights, y, dweights = (dry.zeros(s) for s in ((1, 2, 4, 4), (3, 2, 1, 1), (1, 3, 4, 4), (3, 2, 1, 1)))
    plan.forward(x, weights, None, y)
    dry.step = 1
    plan.backward_weights(x, y, dweights, False)
    dry.step = 2
    plan.backward_data(y, weights, x)
    assert (span(y), span(dweights), span(weights)) == ((0, 2, False), (1, 1, False), (0, 2, True))


def test_traits_are_a_gpus_or_those_of_a_backend():
    dry = MetaBackend()
    assert (dry.mask_dtype, dry.keeps_lrn_scale, "float16" in dry.dtypes) == ("uint8", False, True)
    cpu = create_backend(threads=1)
    like = MetaBackend(cpu)
    assert (like.name, like.mask_dtype, like.dtypes) == (cpu.name, cpu.mask_dtype, cpu.dtypes)
    assert not like.holds_values
    assert cpu.holds_values


def test_memory_is_forgotten_with_its_last_view():
    dry = backend()
    x = dry.zeros((4, 4))
    part = x[:2]
    del x
    assert [m.nbytes for m in dry.memories] == [64]
    del part
    assert not dry.memories


def test_random_numbers_are_not_drawn():
    dry = backend()
    x = dry.zeros((2, 2))
    dry.random_uniform(x, RandomStream(1, 2), (0, 0))
    assert span(x) == (0, 0, False)
    assert dry.all_finite(x)

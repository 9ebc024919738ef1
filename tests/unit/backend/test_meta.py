"""The backend that computes nothing: what it notes of arrays, and that it knows every primitive."""

from __future__ import annotations

import inspect

import pytest

from caffepy.backend import Geometry, create_backend
from caffepy.backend.interface import Backend
from caffepy.backend.meta import SETUP, MetaArray, MetaBackend
from caffepy.backend.types import BatchNormState, RandomStream, SparseMatrix

NUMBERS = {
    "value",
    "axis",
    "border",
    "fill",
    "accumulate",
    "transpose_a",
    "transpose_b",
    "window",
    "relu",
    "elements",
    "ratio",
    "stream",
    "counter",
    "ignore_label",
    "smoothing",
    "higher_wins",
    "scale",
    "geometry",
    "expression",
    "host",
    "group",
    "self",
}
WITHOUT_ARRAYS = {
    "activate",
    "synchronize",
    "close",
    "device_description",
    "zeros",
    "plan_convolution",
    "to_host",
    "device_scalars",
    "record_event",
    "record_timed_event",
    "device_timer",
    "copy_to_host_async",
    "view",
    "flat",
    "reshaped",
}


def backend() -> MetaBackend:
    meta = MetaBackend()
    meta.step = 0
    return meta


def span(array: MetaArray) -> tuple[int | None, int | None, bool]:
    return array.memory.first, array.memory.last, array.memory.lasting


@pytest.mark.parametrize("name", sorted(Backend.__abstractmethods__ - WITHOUT_ARRAYS))
def test_every_array_argument_is_noted(name: str):
    meta = backend()
    arguments: dict[str, object] = {}
    fields = [meta.zeros((3,)) for _ in range(7)]
    for argument, parameter in inspect.signature(getattr(Backend, name)).parameters.items():
        if argument == "n":
            arguments[argument] = BatchNormState(*fields, 1e-5, 0.9)
        elif argument == "matrix":
            arguments[argument] = SparseMatrix(*fields[:3], (3, 3))
        elif argument == "plan":
            window = Geometry((3, 3), (1, 1), (0, 0), (1, 1))
            arguments[argument] = meta.plan_convolution((1, 3, 5, 5), (4, 3, 3, 3), window)
        elif parameter.annotation in ("Array", "Array | None"):
            arguments[argument] = meta.zeros((2, 3))
        elif "Sequence" in str(parameter.annotation):
            arguments[argument] = [meta.zeros((2, 3))]
        else:
            assert argument in NUMBERS, f"say in NUMBERS what '{argument}' of {name} is"
            if argument != "self":
                arguments[argument] = 0
    getattr(meta, name)(**arguments)
    arrays = [v for value in arguments.values() for v in (value if isinstance(value, list) else [value])]
    untouched = [a for a in arrays if isinstance(a, MetaArray) and a.memory.first is None]
    assert not untouched
    if "n" in arguments or "matrix" in arguments:
        assert any(field.memory.first == 0 for field in fields)


def test_the_first_and_last_step_of_an_array():
    meta = backend()
    x, y = meta.zeros((4, 3)), meta.zeros((4, 3))
    assert span(x) == (None, None, False)
    meta.step = 2
    meta.copy(x, y)
    meta.step = 5
    meta.add(y, x)
    assert span(x) == (2, 5, True)
    assert span(y) == (2, 5, False)


def test_what_is_used_before_the_first_step_lasts():
    meta = MetaBackend()
    x = meta.zeros((3,))
    assert x.memory.made == SETUP
    meta.fill(x, 1)
    assert x.memory.lasting


def test_any_number_of_gradients_are_noted():
    meta = backend()
    arrays = [meta.zeros((2, 3)) for _ in range(8)]
    n = BatchNormState(*(meta.zeros((3,)) for _ in range(7)), 1e-5, 0.9)
    meta.step = 4
    meta.batch_norm_backward_sums(arrays[0], arrays[1:7], n, [meta.zeros((3,)) for _ in range(2)], total=arrays[7])
    assert [span(array)[:2] for array in arrays] == [(4, 4)] * 8
    assert not arrays[7].memory.lasting


def test_views_are_their_memory():
    meta = backend()
    x = meta.zeros((2, 3, 4, 5), "bfloat16")
    assert (x.dtype, x.size, x.nbytes, x.itemsize, x.ndim) == ("uint16", 120, 240, 2, 4)
    for view in (meta.flat(x), meta.view(meta.flat(x), (6, 20)), x.transpose(0, 2, 3, 1), x[:, :], x.reshape(2, -1).T):
        assert view.memory is x.memory
        assert view.size == 120
    assert x.reshape(2, -1).T.shape == (60, 2)
    assert x[1, 1:, :, :1].shape == (2, 4, 1)
    meta.fill(meta.flat(x), 0)
    assert span(x) == (0, 0, False)
    assert meta.reshaped(x, (2, 60)).memory is not x.memory
    assert meta.reshaped(meta.zeros((2, 3, 1, 1)), (2, 3)).memory.shape == (2, 3, 1, 1)


def test_parts_make_a_whole():
    meta = backend()
    x = meta.zeros((2, 5))
    meta.fill(x[:, :2], 0)
    meta.to_host(x[:, :2])
    assert not x.memory.lasting
    meta.fill(x[:, 1:], 0)  # overlaps, so it is not counted
    meta.fill(x[:, 2:], 0)
    meta.to_host(x)
    assert not x.memory.lasting


def test_a_part_is_not_the_whole():
    meta = backend()
    for read in (lambda a: a, lambda a: a[1:2], lambda a: a.reshape(10)[:3]):
        x = meta.zeros((2, 5))
        meta.fill(x[:1], 0)
        meta.to_host(read(x))
        assert x.memory.lasting


def test_sums_are_read_only_where_they_go_on():
    meta = backend()
    a, once, again = meta.zeros((2, 2)), meta.zeros((2, 2)), meta.zeros((2, 2))
    meta.gemm(a, a, once)
    meta.gemm(a, a, again, accumulate=True)
    assert (once.memory.lasting, again.memory.lasting) == (False, True)


def test_convolutions():
    meta = backend()
    plan = meta.plan_convolution((1, 2, 4, 4), (3, 2, 1, 1), Geometry((1, 1), (1, 1), (0, 0), (1, 1)))
    x, weights, y, dweights = (meta.zeros(s) for s in ((1, 2, 4, 4), (3, 2, 1, 1), (1, 3, 4, 4), (3, 2, 1, 1)))
    plan.forward(x, weights, None, y)
    meta.step = 1
    plan.backward_weights(x, y, dweights, False)
    meta.step = 2
    plan.backward_data(y, weights, x)
    assert (span(y), span(dweights), span(weights)) == ((0, 2, False), (1, 1, False), (0, 2, True))


def test_traits_are_a_gpus_or_those_of_a_backend():
    meta = MetaBackend()
    assert (meta.mask_dtype, meta.keeps_lrn_scale, "float16" in meta.dtypes) == ("uint8", False, True)
    cpu = create_backend(threads=1)
    like = MetaBackend(cpu)
    assert (like.name, like.mask_dtype, like.dtypes) == (cpu.name, cpu.mask_dtype, cpu.dtypes)
    assert not like.holds_values
    assert cpu.holds_values


def test_memory_is_forgotten_with_its_last_view():
    meta = backend()
    x = meta.zeros((4, 4))
    part = x[:2]
    del x
    assert [m.nbytes for m in meta.memories] == [64]
    del part
    assert not meta.memories


def test_random_numbers_are_not_drawn():
    meta = backend()
    x = meta.zeros((2, 2))
    meta.random_uniform(x, RandomStream(1, 2), (0, 0))
    assert span(x) == (0, 0, False)
    assert meta.all_finite(x)

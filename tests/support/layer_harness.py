"""Tests of layers: their authors give inputs and settings, the rest happens here.

`check_layer` runs a layer on every backend present and checks the forward pass against a formula in float64 where one
is given, the gradients against central differences, that diffs are overwritten or accumulated as the contract says,
that a second run gives the same bits, that a test's passes depend on earlier ones only where the layer says so, and
that neither working in place nor later layers that do so change anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import text_format

from caffepy.backend import Backend, create_backend
from caffepy.data.sharding import Shard
from caffepy.formats.dialect import Dialect, choose_dialect
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import Layer, LayerContext, layer_class
from caffepy.layers.blob import Blob

Floats = Any
"""A NumPy array."""

TRAIN, TEST = caffe_pb2.TRAIN, caffe_pb2.TEST


def _gpu_present() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    try:
        return bool(cupy.cuda.runtime.getDeviceCount() > 0)
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


BACKENDS = ["cpu", "cuda:0"] if _gpu_present() else ["cpu"]


@functools.cache
def backend_named(name: str) -> Backend:
    """The backend of that name, made once."""
    return create_backend() if name == "cpu" else create_backend(int(name.split(":")[1]), math="fp32")


def forward_tolerance(backend: str) -> float:
    """How far results may be from exact ones, relative to the array's largest value."""
    return 1e-5 if backend == "cpu" else 2e-5


def assert_near(found: Floats, wanted: Floats, tolerance: float, what: str) -> None:
    """Whether two arrays have one shape and differ by no more than tolerance * the largest wanted value."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, f"{what}: shape {found.shape} instead of {wanted.shape}"
    if found.size == 0:
        return
    error = np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    if np.array_equal(found, wanted):
        error = 0.0
    assert error <= tolerance, f"{what}: relative error {error:.3g}, allowed {tolerance:.3g}"


def spread(shape: tuple[int, ...], seed: int = 0, step: float = 0.05) -> Floats:
    """Numbers around 0 in random order, `step` apart and none within step / 2 of 0: safe for kinks and maxima."""
    count = int(np.prod(shape))
    places = np.random.default_rng(seed).permutation(count) - count // 2 + 0.5
    return (places * step).reshape(shape).astype(np.float32)


def gaussian(shape: tuple[int, ...], seed: int = 0) -> Floats:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass
class Result:
    """What one forward and backward pass gave, on the host."""

    tops: list[Floats]
    bottom_diffs: list[Floats | None]
    params: list[Floats]
    """After the pass."""
    param_diffs: list[Floats]


@dataclass
class Runner:
    """One layer with its blobs on one backend.

    Args:
        text: LayerParameter in text format without name, bottoms and tops.
        inputs: the bottoms' values.
        backend: name of the backend.
        tops: how many tops; by default the fewest, at least one if the layer may have one.
        phase: TRAIN or TEST.
        params: values of the parameters instead of the fillers'.
        in_place: whether top 0 is bottom 0.
        first_sample: global number of the first sample, for layers that draw random numbers.
        seed: of random numbers and fillers.
        pass_number: the pass, likewise.
        shard: the device among those that train together.
        loss_weight: weight of top 0; None: 1 for losses, 0 for others.
        dialect: whose numbers, where the two Caffes differ; None: as CAFFEPY_DIALECT says, else BVLC's.
    """

    text: str
    inputs: Sequence[Floats]
    backend: str = "cpu"
    tops: int | None = None
    phase: int = TRAIN
    params: Sequence[Floats] = ()
    in_place: bool = False
    first_sample: int = 0
    seed: int = 1
    pass_number: int = 0
    shard: Shard = field(default_factory=Shard)
    loss_weight: float | None = None
    dialect: Dialect | None = None
    layer: Layer = field(init=False)
    bottom: list[Blob] = field(init=False)
    top: list[Blob] = field(init=False)

    def __post_init__(self) -> None:
        backend = backend_named(self.backend)
        param = text_format.Parse(self.text, caffe_pb2.LayerParameter())
        param.name = param.name or "L"
        names = [chr(ord("a") + i) for i in range(len(self.inputs))]
        param.bottom.extend(names)
        context = LayerContext(backend, self.phase, self.seed, self.shard, first_sample=lambda _: self.first_sample)
        context.passes.number = self.pass_number
        context.dialect = self.dialect or choose_dialect([])
        cls = layer_class(param.type)
        count = self.tops if self.tops is not None else max(cls.tops[0], 0 if cls.tops[1] == 0 else 1)
        if self.tops is None and cls.equal_bottoms_and_tops:
            count = len(self.inputs)
        self.bottom = [Blob(backend, np.shape(x), name) for x, name in zip(self.inputs, names, strict=True)]
        self.top = [Blob(backend, (), f"top{i}") for i in range(count)]
        if self.in_place:
            self.top[0] = self.bottom[0]
        param.top.extend(blob.name for blob in self.top)
        self.layer = cls(param, context)
        weight = self.loss_weight if self.loss_weight is not None else float(cls.is_loss)
        self.layer.loss_weights = [weight] + [0.0] * (count - 1) if count else []
        with backend.activate():
            self.layer.setup(self.bottom, self.top)
            for blob, value in zip(self.layer.blobs, self.params, strict=bool(self.params)):
                backend.from_host(value, blob.data)
            self.layer.reshape(self.bottom, self.top)
            for blob in self.top:  # in Caffe they are 0 before the first pass
                filled = not self.in_place and param.type != "DummyData" and blob.allocated("data") is not None
                assert not (filled and blob.host_data().any()), f"{param.type} fills its top before the first pass"

    def forward(self, inputs: Sequence[Floats] | None = None) -> list[Floats]:
        """The tops' values for these inputs, by default the runner's."""
        backend = self.layer.backend
        with backend.activate():
            for blob, value in zip(self.bottom, inputs or self.inputs, strict=True):
                backend.from_host(value, blob.data)
            self.layer.forward(self.bottom, self.top)
            return [blob.host_data() for blob in self.top]

    def backward(self, top_diffs: Sequence[Floats], propagate: Sequence[bool] | None = None) -> list[Floats | None]:
        """The bottoms' diffs; whatever stood there before is NaN and must not show."""
        backend = self.layer.backend
        wanted = list(propagate) if propagate is not None else self.can_propagate()
        with backend.activate():
            for blob in self.bottom:
                backend.fill(blob.diff, float("nan"))
            for blob, value in zip(self.top, top_diffs, strict=True):
                backend.from_host(value, blob.diff)
            self.layer.backward(self.top, wanted, self.bottom)
            return [blob.host_diff() if want else None for blob, want in zip(self.bottom, wanted, strict=True)]

    def can_propagate(self) -> list[bool]:
        """Which bottoms may have a gradient other than 0."""
        without = self.layer.no_gradient_bottoms | self.layer.exact_bottoms
        return [i not in without for i in range(len(self.bottom))]

    def clear_param_diffs(self) -> None:
        """As the net does before each iteration."""
        for blob in self.layer.blobs:
            blob.gradient_started = False

    def run(self, top_diffs: Sequence[Floats]) -> Result:
        """One forward and, if the layer has one, one backward pass."""
        tops = self.forward()
        self.clear_param_diffs()
        diffs = self.backward(top_diffs) if self.layer.has_backward else [None] * len(self.bottom)
        blobs = self.layer.blobs
        return Result(tops, diffs, [b.host_data() for b in blobs], [b.host_diff() for b in blobs])


Reference = Callable[..., Any]
"""(bottoms and then parameters, float64) -> one array or a tuple of them, one for each top."""


def check_layer(
    text: str,
    inputs: Sequence[Floats],
    reference: Reference | None = None,
    *,
    tops: int | None = None,
    phase: int = TRAIN,
    params: Sequence[Floats] = (),
    in_place: bool = False,
    gradients: bool = True,
    learned: Sequence[int] | None = None,
    step: float = 1e-2,
    loss_weight: float | None = None,
) -> None:
    """Check a layer on every backend present; see the module's text.

    Args:
        text: LayerParameter in text format without name, bottoms and tops.
        inputs: the bottoms' values.
        reference: the forward pass in float64; gradients are then checked against its derivatives, to more digits.
        tops: how many tops.
        phase: TRAIN or TEST.
        params: values of the parameters.
        in_place: whether it must also work in place.
        gradients: whether to check gradients.
        learned: parameters whose gradients are checked, by default all.
        step: of the central differences.
        loss_weight: weight of the first top.
    """
    settings: dict[str, Any] = {"tops": tops, "phase": phase, "params": params, "loss_weight": loss_weight}
    results = []
    for backend in BACKENDS:
        runner = Runner(text, inputs, backend, **settings)
        top_diffs = _top_diffs(runner)
        result = runner.run(top_diffs)
        results.append(result)
        start = [np.array(p) for p in params] or Runner(text, inputs, backend, **settings).run(top_diffs).params
        if reference is not None:
            _check_forward(result, reference, inputs, start, backend)
        _check_independence(*(Runner(text, inputs, backend, tops, TEST, params) for _ in range(2)))
        _check_repeats(runner, result, Runner(text, inputs, backend, **settings), top_diffs)
        if gradients and runner.layer.has_backward:
            which = range(len(runner.layer.blobs)) if learned is None else learned
            _check_gradients(runner, result, reference, top_diffs, list(which), step)
            _check_accumulation(Runner(text, inputs, backend, **settings), top_diffs, list(which))
            _check_overwritten(Runner(text, inputs, backend, **settings), result, top_diffs)
        if in_place:
            _check_in_place(Runner(text, inputs, backend, in_place=True, **settings), result, top_diffs, backend)
    for other in results[1:]:
        for found, wanted in zip(other.tops, results[0].tops, strict=True):
            assert_near(found, wanted, 2e-5, "tops on two backends")


def _top_diffs(runner: Runner) -> list[Floats]:
    """Random numbers for layers, the weights for losses."""
    weights = runner.layer.loss_weights
    return [
        np.full(blob.shape, weight, np.float32) if weight else gaussian(blob.shape, 100 + i)
        for i, (blob, weight) in enumerate(zip(runner.top, weights, strict=True))
    ]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check_forward(
    result: Result, reference: Reference, inputs: Sequence[Floats], params: Sequence[Floats], backend: str
) -> None:
    wanted = _as_tuple(reference(*[np.asarray(a, np.float64) for a in (*inputs, *params)]))
    for i, (found, value) in enumerate(zip(result.tops, wanted, strict=True)):
        assert_near(found, value, forward_tolerance(backend), f"{backend}: top {i}")


def _check_independence(after: Runner, alone: Runner) -> None:
    """A layer that does not say that it depends on earlier passes gives the second of a test without the first."""
    layer = after.layer
    if layer.depends_on_earlier_passes(layer.param, layer.context):
        return
    after.forward()
    layer.context.passes.number += 1
    after.first_sample = alone.first_sample = 1000
    for found, wanted in zip(after.forward(), alone.forward(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def _check_repeats(runner: Runner, result: Result, again: Runner, top_diffs: list[Floats]) -> None:
    """The same bits from a new layer, and from this one once more (where no state has moved on)."""
    fresh = again.run(top_diffs)
    pairs = list(zip(result.tops, fresh.tops, strict=True)) + list(
        zip(result.bottom_diffs, fresh.bottom_diffs, strict=False)
    )
    for first, second in pairs + list(zip(result.param_diffs, fresh.param_diffs, strict=True)):
        assert (first is None and second is None) or np.array_equal(first, second, equal_nan=True)
    for first, second in zip(result.tops, runner.forward(), strict=True):
        assert np.array_equal(first, second, equal_nan=True)


def _check_accumulation(runner: Runner, top_diffs: list[Floats], learned: list[int]) -> None:
    """A second backward pass without clearing doubles the parameters' gradients and repeats the bottoms'."""
    once = runner.run(top_diffs)
    runner.forward()
    twice = runner.backward(top_diffs)
    for first, second in zip(once.bottom_diffs, twice, strict=True):
        assert first is None or np.array_equal(first, second)
    for i in learned:
        assert_near(runner.layer.blobs[i].host_diff(), 2 * once.param_diffs[i], 1e-6, f"parameter {i} after two passes")
    runner.layer.propagate_to_params = [False] * len(runner.layer.blobs)
    runner.clear_param_diffs()
    before = [blob.host_diff() for blob in runner.layer.blobs]
    runner.backward(top_diffs)
    for blob, diff in zip(runner.layer.blobs, before, strict=True):
        assert np.array_equal(blob.host_diff(), diff), "a gradient that nobody wants was computed"


def _check_overwritten(runner: Runner, wanted: Result, top_diffs: list[Floats]) -> None:
    """What later layers write over the tops must show neither in the gradients nor in the bottoms."""
    runner.layer.tops_overwritten = True
    runner.layer.reshape(runner.bottom, runner.top)
    tops = runner.forward()
    for blob, found, value in zip(runner.top, tops, wanted.tops, strict=True):
        assert np.array_equal(found, value, equal_nan=True)
        runner.layer.backend.fill(blob.data, float("nan"))
    for blob, value in zip(runner.bottom, runner.inputs, strict=True):
        assert np.array_equal(blob.host_data(), value), "the bottom shares memory that a later layer writes"
    for found, value in zip(runner.backward(top_diffs), wanted.bottom_diffs, strict=True):
        assert value is None or np.array_equal(found, value), "the gradient depends on what a later layer wrote"
    for blob, value in zip(runner.layer.blobs, wanted.param_diffs, strict=True):
        assert np.array_equal(blob.host_diff(), value)


def _check_in_place(runner: Runner, wanted: Result, top_diffs: list[Floats], backend: str) -> None:
    runner.clear_param_diffs()
    tops = runner.forward()
    layer, device = runner.layer, runner.layer.backend
    with device.activate():
        device.from_host(top_diffs[0], runner.top[0].diff)
        layer.backward(runner.top, runner.can_propagate(), runner.bottom)
    tolerance = forward_tolerance(backend)
    assert_near(tops[0], wanted.tops[0], tolerance, f"{backend}: top in place")
    for i, (blob, diff) in enumerate(zip(runner.bottom, wanted.bottom_diffs, strict=True)):
        if diff is not None:
            assert_near(blob.host_diff(), diff, tolerance, f"{backend}: bottom {i}'s diff in place")
    for i, blob in enumerate(layer.blobs):
        assert_near(blob.host_diff(), wanted.param_diffs[i], tolerance, f"{backend}: parameter {i}'s diff in place")


def _check_gradients(
    runner: Runner,
    result: Result,
    reference: Reference | None,
    top_diffs: list[Floats],
    learned: list[int],
    step: float,
) -> None:
    """Derivatives along random directions, from the reference in float64 if there is one, else from the layer."""
    count = len(runner.inputs)
    values = [np.asarray(x, np.float64) for x in runner.inputs]
    values += [np.asarray(p, np.float64) for p in (runner.params or result.params)]
    found = {i: diff for i, diff in enumerate(result.bottom_diffs) if diff is not None}
    found |= {count + i: result.param_diffs[i] for i in learned}
    exact = reference is not None
    objective = functools.partial(_objective, runner, reference, top_diffs)
    step, tolerance = (1e-5, 2e-5) if exact else (step, 4e-3)
    rng = np.random.default_rng(7)
    for index, gradient in found.items():
        assert np.isfinite(gradient).all(), f"gradient {index} was not written everywhere"
        terms = max(1.0, sum(top.size for top in top_diffs) / max(gradient.size, 1))
        for _ in range(6):
            direction = rng.choice([-1.0, 0.0, 1.0], gradient.shape)
            ends = []
            for sign in (1, -1):
                moved = list(values)
                moved[index] = values[index] + sign * step * direction
                ends.append(objective(moved))
            measured = (ends[0] - ends[1]) / (2 * step)
            computed = float((gradient.astype(np.float64) * direction).sum())
            # Terms near 1 that cancel in a gradient leave float32's rounding of them, 1e-7 each.
            scale = max(float(np.abs(gradient * direction).sum()), 1e-2 * terms)
            assert abs(measured - computed) <= tolerance * scale, (
                f"{runner.backend}: gradient {index}: {computed:.6g} in a direction with a difference of {measured:.6g}"
            )


def _objective(runner: Runner, reference: Reference | None, top_diffs: list[Floats], values: list[Floats]) -> float:
    """The number whose derivatives the diffs are: the tops weighted by their diffs."""
    count = len(runner.inputs)
    if reference is not None:
        tops = _as_tuple(reference(*values))
    else:
        backend = runner.layer.backend
        for blob, value in zip(runner.layer.blobs, values[count:], strict=True):
            backend.from_host(value.astype(np.float32), blob.data)
        tops = tuple(runner.forward([value.astype(np.float32) for value in values[:count]]))
    return float(sum((np.asarray(t, np.float64) * d).sum() for t, d in zip(tops, top_diffs, strict=True)))

"""Nets of single layers on GPUs: captured passes give eager ones' bits, half precision nearly FLOAT's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import Case
from google.protobuf import text_format
from layer_cases import build_case, own_cases, pass_once, results, type_of
from training import CPU

from caffepy.backend import Backend, create_backend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted([*(GOLDEN / "layers").glob("*.npz"), *(GOLDEN / "nvidia" / "layers").glob("*.npz")])
ALLOWED = {"FLOAT16": 0.01, "BFLOAT16": 0.08}
"""Allowed distance from FLOAT, root mean square, relative to the blob's own."""
CHOOSING = ("argmax", "accuracy", "nvacc", "pool_max", "spp_max", "threshold", "eltwise_max", "dropout", "clip")
"""Cases whose numbers depend on which of two near values is larger: rounding may change them altogether."""


def build(backend: Backend, case: Any, kind: str) -> Net:
    """The case's net with the inputs and parameters that Caffe had."""
    param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    net = Net(param, LayerContext(backend, caffe_pb2.Phase.Value(str(case["phase"]))))
    layer = net.layers[net.layer_names.index("L")]
    for name in case:
        start, _, rest = name.partition("_")
        if start == "in":
            backend.from_host(case[name], net.blobs[rest].data)
        elif start == "param" and rest.isdigit():
            backend.from_host(case[name], layer.blobs[int(rest)].data)
    net.forward()  # after which the shapes are those of the numbers
    for name in case:
        if name.startswith("topdiff_"):
            backend.from_host(case[name], net.blobs[name.removeprefix("topdiff_")].diff)
    return net


def one_pass(net: Net) -> None:
    """Forward, and backward where there is such a thing."""
    net.clear_param_diffs()
    net.forward()
    if net.layers[net.layer_names.index("L")].has_backward:
        net.backward()


def numbers(net: Net, case: Any) -> dict[str, Any]:
    """What the case compares."""
    layer, found = net.layers[net.layer_names.index("L")], {}
    for name in case:
        kind, _, rest = name.partition("_")
        if kind == "out":
            found[name] = net.blobs[rest].host_data()
        elif kind == "grad":
            found[name] = net.blobs[rest].host_diff()
        elif kind == "pgrad":
            found[name] = layer.blobs[int(rest)].host_diff()
    return found


@dataclass(frozen=True)
class Subject:
    """A net of a layer: how it is built in a dtype, run once, and what is compared."""

    name: str
    build: Callable[[Backend, str], Net]
    one_pass: Callable[[Net], None]
    numbers: Callable[[Net], dict[str, Any]]
    least: float = 1e-6
    """Size from which on differences are relative: sums that cancel are as inexact as their terms are large."""


def golden_subject(path: Path) -> Subject:
    """A net whose numbers Caffe gave."""
    with np.load(path) as stored:  # threads share the case, and not the file
        case = {name: stored[name] for name in stored.files}
    return Subject(path.stem, lambda b, kind: build(b, case, kind), one_pass, lambda net: numbers(net, case))


def own_subject(one: Case) -> Subject:
    """A net of `layer_cases`."""
    return Subject(type_of(one).lower(), lambda b, kind: build_case(b, one, kind), pass_once, results, 1.0)


SUBJECTS = [*map(golden_subject, CASES), *map(own_subject, own_cases())]
"""Every type but those of `layer_cases.ELSEWHERE`; "Cast" is in every net in half precision."""


def eager_run(backend: Backend, subject: Subject, kind: str) -> dict[str, Any]:
    """What a pass gives whose primitives are put on the stream one by one."""
    net = subject.build(backend, kind)
    subject.one_pass(net)
    net.raise_device_errors()
    return subject.numbers(net)


def captured_run(backend: Backend, subject: Subject, kind: str) -> dict[str, Any] | None:
    """What a captured pass gives, from the parameters and states that the eager one had; None: it needs the host."""
    net = subject.build(backend, kind)
    if any(layer.capture_blocker() for layer in net.layers) or any(layer.changes_shapes for layer in net.layers):
        return None
    arrays = [blob.data for layer in net.layers for blob in layer.blobs] + list(net.state())
    kept, number = [(array, backend.to_host(array)) for array in arrays], net.context.passes.number
    subject.one_pass(net)
    net.context.passes.number = number  # the same random numbers
    for array, values in kept:
        backend.from_host(values, array)
    backend.capture(lambda: subject.one_pass(net)).launch()
    net.raise_device_errors()
    return subject.numbers(net)


def assert_near(found: dict[str, Any], exact: dict[str, Any], allowed: float, least: float) -> None:
    """Whether the root mean square of the differences is at most `allowed` times that of the numbers, or `least`."""
    assert found.keys() == exact.keys()
    for name, values in found.items():
        wanted = exact[name].astype(np.float64)
        size, error = (np.sqrt((one**2).mean()) if one.size else 0.0 for one in (wanted, values - wanted))
        assert error <= allowed * max(size, least), f"{name}: {error:.3g} beside {size:.3g}"


@pytest.mark.parametrize("kind", ["FLOAT", *ALLOWED])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_captured_and_half(backend: Backend, subject: Subject, kind: str) -> None:
    eager, captured = eager_run(backend, subject, kind), captured_run(backend, subject, kind)
    for name, values in (captured or {}).items():
        np.testing.assert_array_equal(values, eager[name], err_msg=f"{name} captured")
    if kind != "FLOAT" and not subject.name.startswith(CHOOSING):
        assert_near(eager, eager_run(backend, subject, "FLOAT"), ALLOWED[kind], subject.least)


@pytest.mark.parametrize("subject", list(map(own_subject, own_cases())), ids=lambda subject: subject.name)
def test_a_gpu_gives_what_the_cpu_gives(backend: Backend, subject: Subject) -> None:
    """The cases that Caffe has no numbers of."""
    with CPU.activate():
        wanted = eager_run(CPU, subject, "FLOAT")
    assert_near(eager_run(backend, subject, "FLOAT"), wanted, 2e-5, subject.least)


@pytest.fixture(scope="module")
def two() -> Iterator[list[Backend]]:
    """GPUs 0 and 1."""
    from caffepy.backend.cuda.device import device_count

    if device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {device_count()} are here")
    made = [create_backend(number, math="fp32") for number in range(2)]
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16"])
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_two_gpus_at_once(two: list[Backend], subject: Subject, kind: str) -> None:
    """Threads of one process, as in training: arrays and kernels of one GPU must not end up on the other."""

    def run(one: Backend) -> tuple[dict[str, Any], dict[str, Any] | None]:
        with one.activate():
            return eager_run(one, subject, kind), captured_run(one, subject, kind)

    with ThreadPoolExecutor(2) as pool:
        (first, first_captured), (second, second_captured) = pool.map(run, two)
    allowed = ALLOWED.get(kind, 2e-5)
    if not subject.name.startswith(CHOOSING) or kind == "FLOAT":
        assert_near(second, first, allowed, subject.least)  # each GPU has chosen its convolutions by itself
    for eager, captured in ((first, first_captured), (second, second_captured)):
        for name, values in (captured or {}).items():
            np.testing.assert_array_equal(values, eager[name], err_msg=f"{name} captured")

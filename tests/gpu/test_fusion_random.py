"""Random nets on a GPU: fused, captured and with shared memory they give what layer by layer gives, in each dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from compare_nets import FUSED, build, errors, fusible_param, groups, pass_once
from compare_nets import root_mean_square as usual
from compare_nets import run as run_net
from execution_modes import ATTEMPTS
from wide_nets import Values, fusible_net

from caffepy.backend import Backend, create_backend
from caffepy.net import Net

NETS, PARTS = 60, 4
ALLOWED = {"FLOAT": FUSED, "FLOAT16": 0.03, "BFLOAT16": 0.2}
"""Allowed distance from plain layers in float32, root mean square."""
SMALLEST = {"FLOAT": 0.01, "FLOAT16": 0.1, "BFLOAT16": 0.1}
"""Part of the net's largest gradient by which each is measured at least: below it half precision leaves roundings."""
WORSE = 4
"""So many times the distance of plain layers in the same dtype is allowed as well."""


@pytest.fixture(scope="module")
def untuned() -> Iterator[Backend]:
    """A GPU that tries no ways of computing convolutions, of which each net has others."""
    made = create_backend(0, math="fp32", autotune=False)
    with made.activate():
        yield made
    made.close()


def run_captured(net: Net, inputs: Values) -> tuple[Values, Values]:
    """What a net gives in an eager run, and in one of captured passes from the same parameters on."""
    kept = [(blob, blob.host_data()) for layer in net.layers for blob in layer.blobs]
    states = [(array, net.backend.to_host(array)) for array in net.state()]
    eager = run_net(net, inputs)
    for blob, values in kept:
        net.backend.from_host(values, blob.data)
    for array, values in states:
        net.backend.from_host(values, array)
    graphs = []

    def captured_pass(net: Net) -> None:
        graphs.append(net.backend.capture(lambda: pass_once(net)))
        graphs[-1].launch()

    return eager, run_net(net, inputs, captured_pass)


def compare(backend: Backend, seed: int, kind: str, share: bool) -> tuple[dict[str, float], list[str]]:
    """As `compare_nets.compare_fused`, with captured passes."""
    wide = fusible_net(seed)
    (exact, phase), (param, _) = fusible_param(wide), fusible_param(wide, kind)
    worst: dict[str, float] = {}
    fused: list[str] = []
    for attempt in range(ATTEMPTS):
        inputs = wide.values(attempt)
        wanted = run_net(build(exact, phase, backend, False), inputs)
        limits = dict.fromkeys(wanted, ALLOWED[kind])
        if kind != "FLOAT":
            plain = errors(run_net(build(param, phase, backend, False), inputs), wanted, usual, SMALLEST[kind])
            limits = {name: max(ALLOWED[kind], WORSE * plain[name]) for name in wanted}
        net = build(param, phase, backend, True, share)
        fused = groups(net)
        eager, captured = run_captured(net, inputs)
        for got in (eager, captured):
            if share:
                got.pop("d data", None)  # others may use its memory when the pass is over
        check_same_bits(captured, eager, f"net {seed}")
        found = errors(
            captured, {name: wanted[name] for name in wanted.keys() & captured.keys()}, usual, SMALLEST[kind]
        )
        far = {name: e for name, e in found.items() if not e <= limits.get(name, 0.0)}
        worst = {name: min(e, worst.get(name, e)) for name, e in far.items() if attempt == 0 or name in worst}
        if not worst:
            break
    return worst, fused


def check_same_bits(captured: Values, eager: Values, where: str) -> None:
    assert captured.keys() == eager.keys()
    for name, values in eager.items():
        np.testing.assert_array_equal(captured[name], values, err_msg=f"{where}, {name}")


@pytest.mark.parametrize("kind", ALLOWED)
@pytest.mark.parametrize("part", range(PARTS))
def test_fused_nets_give_what_plain_ones_give(untuned: Any, part: int, kind: str) -> None:
    found: Counter[str] = Counter()
    for seed in range(part, NETS, PARTS):
        worst, fused = compare(untuned, seed, kind, share=seed // PARTS % 2 == 1)
        found.update(fused)
        assert not worst, f"net {seed} in {kind} differs: {worst}"
    assert sum(found.values()) >= NETS // PARTS // 2, "hardly anything was fused"

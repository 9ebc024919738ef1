"""Every rule with every policy, clipping, iter_size and regularisation together, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training import build_solver

from caffepy.formats.dialect import override_dialect
from caffepy.training.solver import Solver

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 dim: 3 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "gaussian" std: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } bias_filler { value: 0.2 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
MAX_ITER = 5
Floats = Any
RATES = {
    "fixed": ("", lambda t: 1.0),
    "step": ("gamma: 0.5 stepsize: 2", lambda t: 0.5 ** (t // 2)),
    "exp": ("gamma: 0.8", lambda t: 0.8**t),
    "inv": ("gamma: 0.3 power: 0.75", lambda t: (1 + 0.3 * t) ** -0.75),
    "multistep": ("gamma: 0.3 stepvalue: 3 stepvalue: 4", lambda t: 0.3 ** ((t >= 3) + (t >= 4))),
    "sigmoid": ("gamma: -0.7 stepsize: 2", lambda t: 1 / (1 + np.exp(0.7 * (t - 2)))),
}
HYPERPARAMETERS = {
    "SGD": "momentum: 0.9",
    "SAG": "momentum: 0.9",
    "Nesterov": "momentum: 0.9",
    "Adam": "momentum: 0.9 momentum2: 0.99 delta: 1e-3",
    "RMSProp": "rms_decay: 0.9 delta: 1e-2",
    "AdaGrad": "delta: 1e-2",
    "AdaDelta": "momentum: 0.9 delta: 1e-2",
}


PLAIN = {
    "policy": "fixed",
    "momentum": "fixed",
    "regularization": "L2",
    "decay": 0.05,
    "iter_size": 1,
    "clip": 0,
    "min_lr": 0,
    "ramp": 0,
    "larc": "",
}


class Rule:
    """One solver's update in float64, as the solvers' .cpp of NVIDIA Caffe's CPU mode and BVLC's say."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.memory: dict[str, tuple[Floats, Floats]] = {}

    def rate(self, t: int) -> float:
        ramp, least = self.given["ramp"], self.given["min_lr"]
        base = 0.1
        if t < ramp:
            return max(0.02 + (base - 0.02) * (t / ramp) ** 2, least)
        if self.given["policy"] == "poly":
            return float((base - least) * (1 - t / MAX_ITER) ** 1.5 + least)
        return float(max(base * RATES[self.given["policy"]][1](t), least))

    def momentum(self, t: int) -> float:
        if self.given["momentum"] == "poly":
            return float(0.9 + (0.95 - 0.9) * (t / MAX_ITER) ** 2)
        if self.given["momentum"] == "opt":
            return float(min((1 - 0.5 * np.sqrt(self.rate(t))) ** 2, 0.7))
        return 0.9

    def gradients(self, weights: dict[str, Floats], sums: dict[str, Floats], t: int) -> dict[str, Floats]:
        norm = np.sqrt(sum(np.sum(g * g) for g in sums.values()))
        clip = self.given["clip"]
        scale = (clip / norm if clip and norm > clip else 1) / self.given["iter_size"]
        decay = {"ip_0": self.given["decay"], "ip_1": 0.0}
        shrink = np.sign if self.given["regularization"] == "L1" else np.asarray
        return {name: scale * g + decay[name] * shrink(weights[name]) for name, g in sums.items()}

    def local_rate(self, name: str, w: Floats, g: Floats, t: int) -> float:
        rate, lr_mult = self.rate(t), {"ip_0": 1.0, "ip_1": 2.0}[name]
        if not self.given["larc"] or self.given["type"] not in ("SGD", "SAG"):
            return rate * lr_mult
        history = np.asarray(self.memory[name][0])
        sag = self.given["type"] == "SAG"
        along = np.sqrt(np.sum(np.square(history if sag else g)))
        trust = 0.05 * np.sqrt(np.sum(w * w)) / along * (1 if sag else 1 - self.momentum(t)) if along > 0 else 1.0
        return float(rate * trust if self.given["larc"] == "scale" else min(rate, trust))

    def change(self, name: str, w: Floats, g: Floats, t: int) -> Floats:
        first, second = self.memory.setdefault(name, (0 * g, 0 * g))
        rate, m, kind = self.local_rate(name, w, g, t), self.momentum(t), self.given["type"]
        if kind in ("SGD", "SAG", "Nesterov"):
            new = m * first + rate * g
            self.memory[name] = new, second
            return (1 + m) * new - m * first if kind == "Nesterov" else new
        if kind == "Adam":
            first, second = m * first + (1 - m) * g, 0.99 * second + 0.01 * g * g
            self.memory[name] = first, second
            return rate * np.sqrt(1 - 0.99 ** (t + 1)) / (1 - m ** (t + 1)) * first / (np.sqrt(second) + 1e-3)
        if kind in ("RMSProp", "AdaGrad"):
            first = 0.9 * first + 0.1 * g * g if kind == "RMSProp" else first + g * g
            self.memory[name] = first, second
            return rate * g / (np.sqrt(first) + 1e-2)
        first = m * first + (1 - m) * g * g
        update = g * np.sqrt((second + 1e-2) / (first + 1e-2))
        self.memory[name] = first, m * second + (1 - m) * update * update
        return rate * update


def text_of(given: dict[str, Any]) -> str:
    policy, kind = given["policy"], given["type"]
    fields = [
        f"type: '{kind}' base_lr: 0.1 lr_policy: '{policy}' max_iter: {MAX_ITER} solver_mode: CPU random_seed: 3",
        HYPERPARAMETERS[kind],
        RATES[policy][0] if policy in RATES else "power: 1.5",
        f"weight_decay: {given['decay']} regularization_type: '{given['regularization']}'",
        f"iter_size: {given['iter_size']} min_lr: {given['min_lr']}",
    ]
    if given["ramp"]:
        fields.append(f"rampup_interval: {given['ramp']} rampup_lr: 0.02")
    if given["clip"]:
        fields.append(f"clip_gradients: {given['clip']}")
    if given["momentum"] != "fixed":
        most = 0.95 if given["momentum"] == "poly" else 0.7
        fields.append(f"momentum_policy: '{given['momentum']}' max_momentum: {most} momentum_power: 2")
    if given["larc"]:
        fields.append(f"larc: true larc_policy: '{given['larc']}' larc_eta: 0.05")
    return " ".join(fields)


def watch(solver: Solver) -> dict[str, Floats]:
    """The sums of gradients of the passes of the last iteration, by the parameter's name."""
    backward, found = solver.net.backward, {}

    def watched() -> None:
        backward()
        ip = solver.net.layers[solver.net.layer_names.index("ip")]
        found.update({f"ip_{i}": blob.host_diff().astype(np.float64) for i, blob in enumerate(ip.blobs)})

    solver.net.backward = watched  # type: ignore[method-assign]
    return found


def values_of(solver: Solver) -> dict[str, Floats]:
    ip = solver.net.layers[solver.net.layer_names.index("ip")]
    return {f"ip_{i}": blob.host_data().astype(np.float64) for i, blob in enumerate(ip.blobs)}


@st.composite
def solvers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(list(HYPERPARAMETERS)))
    has_momentum = "momentum:" in HYPERPARAMETERS[kind]
    choices = {
        "policy": [*RATES, "poly"],
        "momentum": ["fixed", "poly", "opt"] if has_momentum else ["fixed"],
        "regularization": ["L2", "L1"],
        "decay": [0.0, 0.05],
        "iter_size": [1, 2],
        "clip": [0, 0.5, 50],
        "min_lr": [0, 0.04],
        "ramp": [0, 3],
        "larc": ["", "clip", "scale"],
    }
    return {"type": kind, **{name: draw(st.sampled_from(values)) for name, values in choices.items()}}


@settings(max_examples=60)
@given(solvers())
@example({"type": "SGD", **PLAIN, "clip": 0.5, "larc": "clip"})
@example({"type": "SAG", **PLAIN, "clip": 0.5, "larc": "scale"})
def test_every_combination_is_its_formula(given: dict[str, Any]) -> None:
    rule = Rule(given)
    with override_dialect("nvidia"), build_solver(text_of(given), NET) as solver:
        sums = watch(solver)
        for t in range(MAX_ITER):
            before = values_of(solver)
            solver.step(1)
            gradients = rule.gradients(before, sums, t)
            for name, after in values_of(solver).items():
                wanted = rule.change(name, before[name], gradients[name], t)
                np.testing.assert_allclose(before[name] - after, wanted, rtol=1e-4, atol=2e-6)

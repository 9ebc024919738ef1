"""The training loop: log lines, tests, snapshots, requests, iter_size, clipping, losses that are not finite."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import CPU, PLAIN, TESTED, TINY, build_solver, weights_of

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError
from caffepy.training.callback import Action
from caffepy.training.solver import create_solver


def test_a_solvers_file_must_be_read_first() -> None:
    with pytest.raises(ConfigError, match=r"needs a SolverParameter; caffepy.read_solver\('s.prototxt'\)"):
        create_solver("s.prototxt", CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "warned"),
    [(("", ""), False), (('"SoftmaxWithLoss"', '"SoftmaxWithLoss" loss_weight: 0'), True)],
)
def test_a_net_that_learns_nothing_is_a_warning(
    change: tuple[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert change[0] in TINY
    with build_solver(PLAIN, TINY.replace(*change)) as solver:
        solver.step(1)
    said = [r.levelname for r in caplog.records if r.message.startswith("nothing is learned: no loss depends on a par")]
    assert said == ["WARNING"] * warned


@pytest.mark.parametrize("nvidia", [False, True])
def test_the_log_is_caffes(lines: Any, nvidia: bool) -> None:
    """In BVLC's dialect the rate is a line's last word, which parse_log.sh takes for a number."""
    more = "min_lr: 0 " if nvidia else ""
    unit = "iter" if nvidia else "iters"
    rate = "lr = 0.1, m = 0.9, lrm = 1, wd = 0, gs = 1" if nvidia else "lr = 0.1"
    with build_solver(TESTED + more + "display: 2 momentum: 0.9", TINY) as solver:
        lines()
        solver.solve()
    number = r"[-+.\de]+"

    def lines_of_test(iteration: int) -> list[str]:
        return [
            f"Iteration {iteration}, Testing net (#0)",
            f"    Test net output #0: accuracy = {number}",
            rf"    Test net output #1: loss = {number} (* 1 = {number} loss)",
            f"Tests completed in {number}s",
        ]

    wanted = [
        "Solving tiny",
        "Learning Rate Policy: fixed",
        *lines_of_test(0),
        rf"Iteration 0 ({number} iter/s, {number}s/2 {unit}), loss = {number}",
        rf"    Train net output #0: loss = {number} (* 1 = {number} loss)",
        f"Iteration 0, {rate}",
        *lines_of_test(2),
        rf"Iteration 2 ({number} iter/s, {number}s/2 {unit}), loss = {number}",
        rf"    Train net output #0: loss = {number} (* 1 = {number} loss)",
        f"Iteration 2, {rate}",
        rf"Iteration 4, loss = {number}",
        *lines_of_test(4),
        "Optimization Done.",
        f"Optimization Done in {number}s",
    ]
    found = lines()
    assert len(found) == len(wanted)
    for line, pattern in zip(found, wanted, strict=True):
        for special in "(*)#":
            pattern = pattern.replace(special, "\\" + special)
        assert re.fullmatch(pattern.replace(r"[-+.\de]+", number), line), (line, pattern)


def test_no_test_before_training_without_test_initialization(lines: Any) -> None:
    with build_solver(TESTED + "test_initialization: false", TINY) as solver:
        lines()
        solver.step(2)
        assert not any("Testing" in line for line in lines())
        solver.step(1)
        assert "Iteration 2, Testing net (#0)" in lines()


def test_scores_are_means_over_the_test(lines: Any) -> None:
    with build_solver(TESTED + "test_compute_loss: true", TINY) as solver:
        scores = solver.test_all()
        loss = scores[0]["loss"]
        assert any(line == f"Test loss: {float(loss):.6g}" for line in lines())
        net = solver.test_nets[0]
        net.context.passes.number = 0
        seen = []
        for _ in range(3):
            net.forward()
            seen.append(float(net.blobs["loss"].host_data()))
        assert float(loss) == pytest.approx(np.mean(seen))


def test_each_device_scores_its_own_batches() -> None:
    with build_solver(TESTED, TINY) as whole:
        wanted = whole.test_all()[0]["loss"]
    sums = []
    for rank in range(2):
        with build_solver(TESTED, TINY, shard=Shard(rank=rank, world_size=2)) as part:
            passes = []
            for net in part.test_nets:
                original = net.forward
                net.forward = lambda o=original, p=passes: (p.append(1), o())[1]  # type: ignore[method-assign]
            sums.append(float(part.test_all()[0]["loss"]))
            assert len(passes) == (2, 1)[rank]
    assert wanted > 0
    assert len(set(sums)) == 2  # each has part of the sum, still to be added up


def test_several_test_nets() -> None:
    text = PLAIN + 'test_interval: 2 test_iter: 1 test_iter: 2 test_state { } test_state { stage: "x" } '
    net = TINY + 'layer { name: "extra" type: "Silence" bottom: "ip" include { stage: "x" } }'
    with build_solver(text, net) as solver:
        assert ["extra" in net.layer_names for net in solver.test_nets] == [False, True]
        assert len(solver.test_all()) == 2
        for test_net in solver.test_nets:
            ip = test_net.layers[test_net.layer_names.index("ip")]
            CPU.fill(solver.net.parameters.data, 3.0)
            assert (ip.blobs[0].host_data() == 3).all()


def test_sgd_does_what_its_formula_says() -> None:
    text = PLAIN + "momentum: 0.5 weight_decay: 0.25 "
    with build_solver(text, TINY) as solver:
        history = {name: np.zeros_like(w) for name, w in weights_of(solver.net).items()}
        for _ in range(3):
            before = weights_of(solver.net)
            solver.step(1)
            after = weights_of(solver.net)
            for i, (rate, decay) in enumerate([(0.1, 0.25), (0.2, 0.0)]):
                name = f"ip_{i}"
                gradient = solver.net.layers[1].blobs[i].host_diff() + decay * before[name]
                history[name] = 0.5 * history[name] + rate * gradient
                np.testing.assert_allclose(after[name], before[name] - history[name], rtol=1e-5, atol=1e-7)


def test_iter_size_equals_a_larger_batch() -> None:
    """Two passes of 4 see the samples of one pass of 8."""
    with (
        build_solver(PLAIN + "iter_size: 2", TINY) as small,
        build_solver(PLAIN, TINY.replace("dim: 4", "dim: 8")) as big,
    ):
        small.step(3)
        big.step(3)
        assert small.net.context.passes.number == 6
        assert small.performance.batch == big.performance.batch == 8
        for name, values in weights_of(big.net).items():
            np.testing.assert_allclose(weights_of(small.net)[name], values, rtol=1e-5, atol=1e-7)
        assert small.losses.mean() == pytest.approx(big.losses.mean(), rel=1e-5)


def test_gradients_are_clipped_to_the_norm(lines: Any) -> None:
    with build_solver(PLAIN + "clip_gradients: 0.001", TINY) as solver:
        before = weights_of(solver.net)
        solver.step(1)
        moved = weights_of(solver.net)
        assert any(line.startswith("Gradient clipping: scaling down gradients (L2 norm ") for line in lines())
        norm = np.sqrt(sum(((moved[n] - before[n]) ** 2).sum() / rate**2 for n, rate in (("ip_0", 0.1), ("ip_1", 0.2))))
        assert norm == pytest.approx(0.001, rel=1e-3)


def test_parameters_with_lr_mult_0_stay() -> None:
    with build_solver(PLAIN + "weight_decay: 0.5", TINY.replace("lr_mult: 2", "lr_mult: 0")) as solver:
        before = weights_of(solver.net)
        solver.step(2)
        after = weights_of(solver.net)
        np.testing.assert_array_equal(after["ip_1"], before["ip_1"])
        assert (after["ip_0"] != before["ip_0"]).any()


def test_average_loss_is_the_mean_of_the_last_losses() -> None:
    with build_solver(PLAIN + "average_loss: 3", TINY) as solver:
        seen = []
        for i in range(5):
            solver.step(1)
            seen.append(float(solver.net.blobs["loss"].host_data()))
            assert solver.losses.mean() == pytest.approx(np.mean(seen[-3:])), i


def test_a_stop_is_obeyed_after_the_iteration(lines: Any) -> None:
    with build_solver(PLAIN, TINY, request=lambda: Action.STOP) as solver:
        solver.solve()
        assert solver.iteration == 1
        assert solver.stopped_early
        assert lines()[-1] == "Optimization stopped early."


def test_a_stop_during_a_test_ends_the_test(lines: Any) -> None:
    with build_solver(TESTED, TINY, request=lambda: Action.STOP) as solver:
        solver.solve()
        assert solver.iteration == 0
        assert "Test interrupted." in lines()


def test_a_snapshot_and_a_stop_together(tmp_path: Path) -> None:
    waiting = [Action.SNAPSHOT, Action.STOP]
    text = PLAIN + f'snapshot_prefix: "{tmp_path}/x"'
    with build_solver(text, TINY, request=lambda: waiting.pop(0) if waiting else Action.NONE) as solver:
        solver.solve()
        assert solver.stopped_early
    assert (tmp_path / "x_iter_1.solverstate").is_file()


@pytest.mark.parametrize(
    ("wanted", "files"), [("false", []), ("true", ["x_iter_2.caffemodel", "x_iter_2.solverstate"])]
)
def test_a_snapshot_after_training_where_it_is_wanted(tmp_path: Path, wanted: str, files: list[str]) -> None:
    text = f'base_lr: 0.1 lr_policy: "fixed" max_iter: 2 snapshot_prefix: "{tmp_path}/x" snapshot_after_train: {wanted}'
    with build_solver(text, TINY) as solver:
        solver.solve()
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_debug_info_only_where_it_is_displayed(lines: Any) -> None:
    with build_solver(PLAIN + "display: 2 debug_info: true", TINY) as solver:
        lines()
        solver.step(1)
        shown = lines()
        assert any(line.startswith("    [Forward] Layer ip, top blob ip data: ") for line in shown)
        assert any(re.match(r"    \[Update\] Layer ip, param 0 data: \S+; diff: \S+", line) for line in shown)
        solver.step(1)
        assert not any("[" in line for line in lines())


def test_performance_leaves_out_the_first_iterations() -> None:
    with build_solver(TESTED, TINY) as solver:
        solver.step(2)
        assert solver.performance.iterations == 0
        solver.step(5)
        assert solver.performance.iterations == 5
        assert solver.performance.seconds > 0


def test_a_negative_seed_is_drawn() -> None:
    text = PLAIN + "random_seed: -1"
    with build_solver(text, TINY) as first, build_solver(text, TINY) as second:
        assert first.param.random_seed >= 0
        assert first.param.random_seed != second.param.random_seed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN + 'type: "Adma"', "unknown solver type 'Adma'; did you mean 'Adam'?"),
        (
            PLAIN + 'snapshot: 5 snapshot_prefix: "/nowhere/x"',
            "the folder /nowhere does not exist; create it or change snap",
        ),
        (
            PLAIN + 'snapshot: 5 snapshot_prefix: "/proc/x"',
            "snapshot_prefix: /proc/x_iter_4.solverstate: cannot be written",
        ),
        (
            PLAIN + "test_iter: 1 test_interval: 1 test_state { } test_state { }",
            "2 test_state are given for 1 test nets",
        ),
        (PLAIN + 'net: "also.prototxt"', "net_param and net is given"),
    ],
)
def test_what_does_not_hold_together_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)), build_solver(text, TINY):
        pass


@pytest.mark.parametrize("rule", ["SGD", "Nesterov", "Adam", "AdaGrad", "RMSProp", "AdaDelta"])
def test_every_rule_learns(rule: str) -> None:
    rate = {"AdaDelta": 1.0, "Adam": 0.05, "RMSProp": 0.05}.get(rule, 0.2)
    momentum = "" if rule in ("AdaGrad", "RMSProp") else "momentum: 0.9"
    with build_solver(f'type: "{rule}" base_lr: {rate} lr_policy: "fixed" max_iter: 60 {momentum}', TINY) as solver:
        solver.step(1)
        first = solver.losses.mean()
        solver.step(30)
        assert solver.losses.mean() < first

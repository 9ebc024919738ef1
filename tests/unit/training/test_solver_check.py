from __future__ import annotations

import pytest

from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.formats.prototxt import parse_text
from caffepy.training.solver_check import LR_POLICIES, check_solver, check_values, log_ignored

TRAIN = 'net: "n" max_iter: 10 base_lr: 0.1 lr_policy: "fixed" '
FIELDS = "gamma: 0.5 power: 0.75 stepsize: 3 stepvalue: 2 stepvalue: 4 plateau_winsize: 3 "
FIELDS += "stagelr: 0.1 stagelr: 0.2 stageiter: 3 stageiter: 5 stepearly: 1 test_iter: 1 test_interval: 2 "


def check(text: str) -> None:
    check_solver(parse_text(text, SolverParameter(), "s"), "s")


@pytest.mark.parametrize("policy", LR_POLICIES)
def test_every_policy_passes_with_its_fields(policy: str) -> None:
    check(f'net: "n" max_iter: 10 base_lr: 0.1 lr_policy: "{policy}" {FIELDS}')


@pytest.mark.parametrize(("policy", "field"), [(policy, field) for policy, fs in LR_POLICIES.items() for field in fs])
def test_every_policy_needs_its_fields(policy: str, field: str) -> None:
    fields = " ".join(part for part in FIELDS.replace(": ", ":").split() if not part.startswith(field + ":"))
    with pytest.raises(ConfigError, match=f'^s: {field} is missing, and lr_policy "{policy}" needs it; add {field}$'):
        check(f'net: "n" max_iter: 10 base_lr: 0.1 lr_policy: "{policy}" {fields}')


@pytest.mark.parametrize(
    "text",
    [
        TRAIN,
        TRAIN + "test_iter: 3 test_interval: 5",
        TRAIN + "test_iter: 3 test_iter: 4 test_interval: 5 test_state { } test_state { stage: 'x' }",
        TRAIN + 'test_net: "t" test_iter: 3 test_iter: 4 test_interval: 5',
        TRAIN.replace("net", "train_net"),
        TRAIN.replace("net", "train_net") + 'test_net: "t" test_iter: 3 test_interval: 5',
        TRAIN + 'snapshot: 5 snapshot_prefix: "p"',
        TRAIN + "rampup_interval: 3 rampup_lr: 0.01 min_lr: 0.001",
        TRAIN + 'type: "RMSProp" rms_decay: 0.9',
        TRAIN.replace("fixed", "sigmoid") + "gamma: -0.1 stepsize: 5",
        TRAIN.replace("10", "0"),
        'net_param { } max_iter: 10 base_lr: 0 lr_policy: "fixed"',
    ],
)
def test_good_solvers_pass(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r'^s: no net to train; add net: "FILE" \(or one of net_param, train_net, train_net_param\)$'),
        (TRAIN + 'train_net: "x"', "^s: net and train_net both name a net to train; keep one$"),
        (TRAIN.replace("max_iter: 10", ""), "^s: max_iter is missing; add max_iter$"),
        (TRAIN.replace("base_lr: 0.1", ""), "^s: base_lr is missing; add base_lr$"),
        ('net: "n" max_iter: 1 base_lr: 1', "^s: lr_policy is missing; add lr_policy$"),
        (TRAIN.replace("fixed", "stepp"), "^s: unknown lr_policy 'stepp'; did you mean 'step'"),
        (TRAIN + "iter_size: 0", "^s: iter_size is 0; it must be at least 1$"),
        (TRAIN + "average_loss: 0", "average_loss is 0; it must be at least 1"),
        (TRAIN + "stepsize: 0", "stepsize is 0; it must be at least 1"),
        (TRAIN + "gamma: -0.5", "gamma is -0.5; it must be at least 0"),
        (TRAIN + "gamma: nan", "gamma is nan; it must be a finite number"),
        (TRAIN + "display: -1", "display is -1; it must be at least 0"),
        (TRAIN.replace("10", "-1"), "max_iter is -1; it must be at least 0"),
        (TRAIN + "stepvalue: 5 stepvalue: 3", r"stepvalue \[5, 3\] does not increase; sort the values"),
        (TRAIN.replace("fixed", "poly") + "power: 1 min_lr: 0.5", "base_lr 0.1 is below min_lr 0.5; lower min_lr"),
        (TRAIN + 'momentum_policy: "x"', "unknown momentum_policy 'x'; known: fixed, opt, poly"),
        (TRAIN + 'weight_decay_policy: "polly"', "unknown weight_decay_policy 'polly'; did you mean 'poly'"),
        (TRAIN + 'weight_decay_policy: "poly"', 'max_weight_decay is missing, and weight_decay_policy "poly" needs it'),
        (TRAIN + 'regularization_type: "L3"', "unknown regularization_type 'L3'"),
        (TRAIN + 'larc: true larc_policy: "clap"', "unknown larc_policy 'clap'; did you mean 'clip'"),
        (TRAIN + 'type: "AdaGrad" momentum: 0.9', "AdaGrad has no momentum, and momentum is 0.9; remove it"),
        (TRAIN + 'type: "RMSProp" rms_decay: 1', "rms_decay is 1; with RMSProp it must be at least 0 and below 1"),
        (TRAIN + "test_interval: 5", "^s: test_iter is missing; add test_iter: N"),
        (TRAIN + 'test_net: "t"', "test_iter is missing"),
        (
            TRAIN + 'test_net: "t" test_net: "u" test_iter: 1',
            "1 test_iter for 2 test nets; give one test_iter per test net",
        ),
        (TRAIN.replace("net", "train_net") + "test_iter: 1", "1 test_iter for 0 test nets"),
        (TRAIN + "test_iter: 0 test_interval: 1", "test_iter is 0; it must be at least 1"),
        (TRAIN + "test_iter: 1", "test_iter is given but test_interval is not; add test_interval"),
        (TRAIN + "test_iter: 1 test_interval: 1 test_state { } test_state { }", "2 test_state for 1 test nets"),
        (TRAIN + "snapshot: 5", "snapshot is 5 but snapshot_prefix is empty; set snapshot_prefix"),
    ],
)
def test_bad_solvers_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(text)


def test_a_rampup_rate_without_an_interval_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    check(TRAIN + "rampup_lr: 0.1")
    assert "rampup_lr has no effect without rampup_interval" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('lr_policy: "step"', '^s: stepsize is missing, and lr_policy "step" needs it; add stepsize$'),
        ('lr_policy: "sigmoid"', '^s: stepsize is missing, and lr_policy "sigmoid" needs it; add stepsize$'),
        ('lr_policy: "poly"', '^s: max_iter is missing, and lr_policy "poly" needs it; add max_iter$'),
        ('lr_policy: "step" stepsize: -3', "^s: stepsize is -3; it must be at least 1$"),
        ('lr_policy: "fixed" iter_size: 0', "^s: iter_size is 0; it must be at least 1$"),
        ('lr_policy: "fixed" base_lr: nan', "^s: base_lr is nan; it must be a finite number$"),
        ('lr_policy: "fixed" regularization_type: "L3"', "^s: unknown regularization_type 'L3'; "),
        ('lr_policy: "fixed" type: "AdaGrad" momentum: 0.5', "^s: AdaGrad has no momentum, and momentum is 0.5; "),
        ('lr_policy: ""', "^s: unknown lr_policy ''; "),
    ],
)
def test_values_that_no_solver_can_have(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_values(parse_text(text, SolverParameter(), "s"), "s")


@pytest.mark.parametrize("text", ['lr_policy: "fixed"', ""])
def test_a_program_that_makes_steps_itself_needs_no_max_iter_no_rate_and_no_policy(text: str) -> None:
    check_values(parse_text(text, SolverParameter(), "s"), "s")


# -- fields of forks -------------------------------------------------------------------------------------

STAGES = 'net: "n" max_iter: 10 lr_policy: "multifixed" '


def test_stages_need_no_base_lr() -> None:
    check(STAGES + "stagelr: 0.1 stageiter: 5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STAGES + "stagelr: 0.1 stageiter: 5 stageiter: 6", "1 stagelr and 2 stageiter; give one of each"),
        (
            STAGES + "stagelr: 0.1 stagelr: -1 stageiter: 5 stageiter: 6",
            "a stagelr is -1; each must be a finite number",
        ),
        (STAGES + "stagelr: 1 stagelr: 1 stageiter: 5 stageiter: 5", "stageiter .5, 5. does not increase"),
        (
            TRAIN.replace("fixed", "stepearly") + "gamma: 0.5 stepearly: 1",
            'lr_policy "stepearly" needs tests; add test_iter',
        ),
        (TRAIN + "larc: true local_lr_auto: true", "larc and local_lr_auto exclude each other"),
        (TRAIN + "warmup_iter: -1", "warmup_iter is -1; it must be at least 0"),
        (TRAIN + "local_lr_auto: true local_gw_ratio: -1", "local_gw_ratio is -1; it must be at least 0"),
    ],
)
def test_bad_fields_of_forks(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^s: {message}"):
        check(text)


def test_a_warmup_rate_without_iterations_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    check(TRAIN + "warmup_start_lr: 0.01")
    assert "warmup_start_lr has no effect without warmup_iter" in caplog.text


def test_fields_without_meaning_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_ignored(parse_text('richness: 200 group_id: 0 engine: "MKLDNN" disabled_update: false', SolverParameter(), "s"))
    for field in ("richness", "group_id", "engine", "disabled_update"):
        assert f"{field} is ignored: " in caplog.text

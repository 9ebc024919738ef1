"""What ranks are compared by, and the sentence about the first difference."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from fake_world import FakeWorld
from hypothesis import given
from hypothesis import strategies as st
from process_groups import run_threads
from training import TINY, build_solver, solver_param

from caffepy import version
from caffepy.distributed.processes.world import SingleProcess
from caffepy.errors import ConfigError
from caffepy.formats.dialect import override_dialect
from caffepy.formats.paths import is_path
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto import schemas as registration
from caffepy.formats.proto.schemas import ForkSchema
from caffepy.training.consistency import (
    FieldMismatch,
    agree_on_options,
    check_alike,
    describe_nets,
    describe_options,
    describe_run,
    describe_solver,
    first_difference,
)
from caffepy.training.options import TrainOptions
from caffepy.utils.options import ExecutionOptions

SOLVER = 'base_lr: 0.01 lr_policy: "multistep" stepvalue: 5 stepvalue: 9 gamma: 0.1 max_iter: 3 net: "a/net.prototxt" '
NET = """
name: "tiny"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1 } param { lr_mult: 2 }
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
PLAIN = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 4 snapshot_after_train: false '


class MeetingWorld(SingleProcess):
    """One of several ranks, which are threads."""

    def __init__(self, rank: int, size: int, table: list[Any]) -> None:
        super().__init__()
        self.rank, self.size, self._table = rank, size, table
        self.hosts = [f"h{i}" for i in range(size)]

    def all_gather(self, value: Any) -> list[Any]:
        barrier, rows = self._table
        rows[self.rank] = value
        barrier.wait(20)
        found = list(rows)
        barrier.wait(20)
        return found


def meet(descriptions: list[dict[str, str]]) -> list[Any]:
    """What `check_alike` does on each of some ranks."""
    size = len(descriptions)
    table: list[Any] = [threading.Barrier(size), [None] * size]

    def work(rank: int) -> Any:
        try:
            check_alike(MeetingWorld(rank, size, table), descriptions[rank])
        except SystemExit as leaving:
            return leaving.code
        return None

    return run_threads(size, work)


def difference(one: str, other: str) -> str:
    """The sentence about two solvers' prototxts."""
    found = first_difference(describe_solver(solver_param(one)), describe_solver(solver_param(other)))
    return "" if found is None else found.sentence("rank 0 on a", "rank 1 on b")


@pytest.mark.parametrize(
    ("written", "instead", "sentence"),
    [
        ("base_lr: 0.01", "base_lr: 0.001", "base_lr is 0.01 on rank 0 on a and 0.001 on rank 1 on b"),
        ("max_iter: 3", "max_iter: 30", "max_iter is 3 on rank 0 on a and 30 on rank 1 on b"),
        ("gamma", 'regularization_type: "L1" gamma', "regularization_type is not given on rank 0 on a and 'L1' on"),
        ("gamma", "average_loss: 5 gamma", "average_loss is not given on rank 0 on a and 5 on"),
        ("gamma", "layer_wise_reduce: false gamma", "layer_wise_reduce is not given on rank 0 on a and false on"),
        ("gamma", 'type: "Adam" gamma', "type is not given on rank 0 on a and 'Adam' on"),
        ("gamma", "display: 7 gamma", "display is not given on rank 0 on a and 7 on"),
        ("gamma", "snapshot: 7 gamma", "snapshot is not given on rank 0 on a and 7 on"),
        ("gamma", "snapshot_format: HDF5 gamma", "snapshot_format is not given on rank 0 on a and HDF5 on"),
        ("stepvalue: 9", "stepvalue: 8", "stepvalue is 5, 9 on rank 0 on a and 5, 8 on"),
        ("stepvalue: 9", "", "stepvalue is 5, 9 on rank 0 on a and 5 on"),
        ("gamma", 'train_state { stage: "x" } gamma', "train_state is not given on rank 0 on a and given on"),
        ("gamma: 0.1", "", "gamma is 0.1 on rank 0 on a and not given on rank 1 on b"),
    ],
)
def test_a_differing_field_is_named_with_both_values(written: str, instead: str, sentence: str) -> None:
    assert difference(SOLVER, SOLVER.replace(written, instead)).startswith(sentence)


@pytest.mark.parametrize(
    "instead",
    [
        'net: "/elsewhere/net.prototxt"',
        'net: "a/net.prototxt" snapshot_prefix: "mine/x"',
        'net: "a/net.prototxt" random_seed: 99',
        'net: "a/net.prototxt" device_id: 3 solver_mode: CPU',
        'net: "a/net.prototxt" weights: "mine.caffemodel"',
    ],
)
def test_paths_devices_and_what_is_the_roots_may_differ(instead: str) -> None:
    assert difference(SOLVER, SOLVER.replace('net: "a/net.prototxt"', instead)) == ""


PATHS = {
    "DenseImageDataParameter.source",
    "DenseImageDataParameter.root_folder",
    "DenseImageDataParameter.mean_file",
    "SegDataParameter.source",
    "SolverParameter.net",
    "SolverParameter.train_net",
    "SolverParameter.test_net",
    "SolverParameter.weights",
    "SolverParameter.snapshot_prefix",
    "TransformationParameter.mean_file",
    "DataParameter.source",
    "DataParameter.mean_file",
    "HDF5DataParameter.source",
    "HDF5OutputParameter.file_name",
    "ImageDataParameter.source",
    "ImageDataParameter.root_folder",
    "ImageDataParameter.mean_file",
    "InfogainLossParameter.source",
    "WindowDataParameter.source",
    "WindowDataParameter.root_folder",
    "WindowDataParameter.mean_file",
    "AnnotatedDataParameter.label_map_file",
    "VideoDataParameter.video_file",
    "DetectionOutputParameter.save_file",
    "DetectionEvaluateParameter.name_size_file",
    "SaveOutputParameter.output_directory",
    "SaveOutputParameter.output_name_prefix",
    "SaveOutputParameter.label_map_file",
    "SaveOutputParameter.name_size_file",
    "TRTParameter.deploy",
    "CPMTransformationParameter.mean_file",
    "DataParameter.preselection_file",
    "DetectionDataParameter.root_folder",
    "DetectionDataParameter.source",
    "EvalDataParameter.root_folder",
    "EvalDataParameter.source",
    "FillerParameter.file",
    "ImageGtDataParameter.mean_file",
    "ImageGtDataParameter.root_folder",
    "ImageGtDataParameter.source",
    "MeanParameter.file",
    "OPTransformationParameter.media_directory",
    "PowerFileParameter.shift_file",
    "VideoDataParameter.mean_file",
    "VideoDataParameter.root_folder",
    "VideoDataParameter.source",
    "WriterParameter.file",
    "WriterParameter.folder",
    "WriterParameter.prefix",
    "YoloDetectionOutputParameter.label_map_file",
    "TRTParameter.calibrator",
}


def test_the_fields_that_name_files_are_these() -> None:
    """So that a field that is added to the schema is neither compared nor left out by mistake."""
    old = ("V0LayerParameter", "V1LayerParameter")
    messages = [m for m in caffe_pb2.DESCRIPTOR.message_types_by_name.values() if m.name not in old]
    assert {f"{m.name}.{f.name}" for m in messages for f in m.fields if is_path(f)} == PATHS


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"compression": "fp16"}, "--compression", ("none", "fp16")),
        ({"timeout": 30.0}, "--timeout", ("300", "30")),
        ({"sync_bn": True}, "--sync-bn", ("off", "on")),
        ({"math": "fp32"}, "--math", ("tf32", "fp32")),
        ({"batch": "per-device"}, "--batch", ("per-rank", "per-device")),
        ({"keep_going": True}, "--keep-going", ("off", "on")),
        ({"check_replicas": 5}, "--check-replicas", ("0", "5")),
        ({"trace": Path("x")}, "--trace", ("not given", "given")),
        ({"trace_iterations": range(2, 4)}, "--trace-iterations", ("not given", "2:4")),
        ({"engine": ExecutionOptions(eager=True)}, "--eager", ("off", "on")),
        ({"engine": ExecutionOptions(fuse=False)}, "--fuse", ("on", "off")),
        ({"engine": ExecutionOptions(deterministic=False)}, "--deterministic", ("on", "off")),
    ],
)
def test_options_that_matter_are_compared(change: dict[str, Any], field: str, values: tuple[str, str]) -> None:
    options = TrainOptions(caffe_pb2.SolverParameter())
    found = first_difference(describe_options(options), describe_options(replace(options, **change)))
    assert found == FieldMismatch(field, *values)


def test_options_of_the_ranks_own_are_not() -> None:
    options = TrainOptions(caffe_pb2.SolverParameter())
    own = replace(
        options,
        verbose=True,
        threads=3,
        single_rate=2.0,
        snapshot=Path("x"),
        resume_newest=True,
        weights=[Path("y")],
        sigint_effect="none",
        devices=None,
    )
    assert describe_options(options) == describe_options(own)


def test_schemas_of_forks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(caffe_pb2.SolverParameter())
    before = describe_options(options)
    schema = ForkSchema(Path("a/caffe.proto"), "12ab", frozenset(), frozenset(), frozenset(), frozenset())
    monkeypatch.setattr(registration, "_registered", [schema])
    found = first_difference(before, describe_options(options))
    assert found == FieldMismatch("--proto or CAFFEPY_PROTO", "not given", "a file with hash 12ab")


def test_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainOptions(solver_param(SOLVER))
    before = describe_run(options)
    monkeypatch.setattr(version, "__version__", "7.7")
    assert first_difference(before, describe_run(options)) == FieldMismatch(
        "caffepy's version", before["caffepy's version"], "7.7"
    )
    monkeypatch.undo()
    own = np.__version__
    monkeypatch.setattr(np, "__version__", "9.9")
    assert first_difference(before, describe_run(options)) == FieldMismatch("NumPy's version", own, "9.9")


def described(net: str, solver: str = PLAIN) -> dict[str, str]:
    with build_solver(solver, net) as made:
        return describe_nets(made)


def test_dialects_are_compared() -> None:
    options = TrainOptions(solver_param(SOLVER))
    with override_dialect("nvidia"):
        other = describe_run(options)
    wanted = FieldMismatch("--dialect or CAFFEPY_DIALECT", "not given", "nvidia")
    assert first_difference(describe_run(options), other) == wanted


@pytest.mark.parametrize(
    ("written", "instead", "sentence"),
    [
        (
            "lr_mult: 2",
            "lr_mult: 3",
            "param[1].lr_mult of layer 'ip' of the train net is 2 on a and 3 on b",
        ),
        (
            "num_output: 2",
            "num_output: 3",
            "inner_product_param.num_output of layer 'ip' of the train net is 2 on a and 3 on b",
        ),
        (
            'layer { name: "loss"',
            'layer { name: "relu" type: "ReLU" bottom: "ip" top: "ip" } layer { name: "loss"',
            "layer 2 of the train net is 'loss' (SoftmaxWithLoss) on a and 'relu' (ReLU) on b",
        ),
        (
            'name: "tiny"',
            'name: "tiny" reduce_buckets: 2',
            "reduce_buckets of the train net is not given on a and 2 on b",
        ),
    ],
)
def test_nets_are_compared_layer_by_layer(written: str, instead: str, sentence: str) -> None:
    found = first_difference(described(NET), described(NET.replace(written, instead)))
    assert found is not None
    assert found.sentence("a", "b") == sentence


def test_test_nets_are_compared_too() -> None:
    accuracy = (
        'layer { name: "acc" type: "Accuracy" bottom: "ip" bottom: "label" top: "acc" include { phase: TEST } %s}'
    )
    tested = PLAIN + "test_iter: 1 test_interval: 2 "
    one = described(NET + accuracy % "", tested)
    other = described(NET + accuracy % "accuracy_param { top_k: 2 } ", tested)
    field = "accuracy_param of layer 'acc' of test net 0"
    assert first_difference(other, one) == FieldMismatch(field, "given", "not given")
    assert first_difference(described(NET), one) == FieldMismatch("the number of test nets", "0", "1")


def write_lmdb(path: Path, count: int, label: int = 0, last: int = 0) -> str:
    with lmdb.open(str(path), map_size=1 << 22) as environment, environment.begin(write=True) as transaction:
        for i in range(count):
            shade = label if i == 0 else last if i == count - 1 else 5
            datum = caffe_pb2.Datum(channels=1, height=2, width=2, data=bytes([shade] * 4), label=1)
            transaction.put(b"%08d" % i, datum.SerializeToString())
    return str(path)


def test_data_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    def data(path: str) -> dict[str, str]:
        source = f'data_param {{ source: "{path}" batch_size: 2 backend: LMDB }}'
        layer = f'layer {{ name: "data" type: "Data" top: "data" top: "label" {source} }}'
        rest = NET[NET.index('layer { name: "ip"') :]
        return described(f'name: "tiny" {layer} {rest}')

    first = data(write_lmdb(tmp_path / "first", 6))
    assert first_difference(first, data(write_lmdb(tmp_path / "same", 6))) is None
    where = " of layer 'data' of the train net"
    assert first_difference(first, data(write_lmdb(tmp_path / "longer", 7))) == FieldMismatch(
        f"the number of records{where}", "6", "7"
    )
    for name, change in (("first", {"label": 9}), ("last", {"last": 9})):
        found = first_difference(first, data(write_lmdb(tmp_path / f"other_{name}", 6, **change)))
        assert found is not None
        assert found.field == f"the hash of the {name} record{where}"


def test_data_of_layers_of_one_name_are_compared_each(tmp_path: Path) -> None:
    def data(*paths: str) -> dict[str, str]:
        settings = 'name: "same" type: "Data" data_param { source: "%s" batch_size: 2 backend: LMDB }'
        layers = [f'layer {{ {settings % path} top: "data{i}" }}' for i, path in enumerate(paths)]
        return described(" ".join(layers))

    one, other = write_lmdb(tmp_path / "one", 6), write_lmdb(tmp_path / "other", 7)
    where = "the number of records of layer 'same'%s of the train net"
    assert first_difference(data(one, one), data(other, one)) == FieldMismatch(where % "", "6", "7")
    assert first_difference(data(one, one), data(one, other)) == FieldMismatch(where % " (layer 1)", "6", "7")


def test_ranks_that_agree_go_on() -> None:
    assert meet([{"a": "1"}] * 3) == [None, None, None]


def test_the_root_says_which_rank_differs_and_the_others_leave() -> None:
    results = meet([{"a": "1", "b": "2"}, {"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}])
    assert isinstance(results[0], ConfigError)
    assert str(results[0]).startswith("b is 2 on rank 0 on h0 and 3 on rank 2 on h2; all ranks must train alike")
    assert results[1:] == [2, 2]


@given(st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("123")), st.data())
def test_a_difference_is_found_exactly_where_there_is_one(roots: dict[str, str], data: st.DataObject) -> None:
    other = dict(roots)
    for name in data.draw(st.lists(st.sampled_from("abcdef"), max_size=2)):
        other[name] = data.draw(st.sampled_from("123"))
    found = first_difference(roots, other)
    assert (found is None) == (roots == other)
    if found is not None:
        assert roots.get(found.field, "not given") == found.roots != found.other == other.get(found.field, "not given")


# -- options ---------------------------------------------------------------------------------------------


OPTIONS = TrainOptions(solver_param('base_lr: 0.1 lr_policy: "fixed" max_iter: 3 snapshot_prefix: "run"'))


class RootsWorld(FakeWorld):
    """The second rank of two: the root broadcasts what it has."""

    def __init__(self, **roots: Any) -> None:
        super().__init__(2, 1)
        self.roots = roots

    def broadcast(self, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        kind = "random_seed" if isinstance(value, int) else "weights" if isinstance(value, list) else "snapshot"
        return self.roots[kind]


def test_another_rank_takes_seed_snapshot_and_weights_of_the_root() -> None:
    options = replace(OPTIONS, snapshot=Path("own"), weights=[Path("own")])
    world = RootsWorld(random_seed=7, snapshot=Path("a"), weights=[Path("b")])
    agreed = agree_on_options(world, options)
    assert agreed.solver.random_seed == 7
    assert (agreed.snapshot, agreed.weights) == (Path("a"), [Path("b")])
    assert options.solver.random_seed == 1, "the caller's prototxt is left alone"


def test_a_seed_is_drawn_where_the_prototxt_has_none() -> None:
    options = replace(OPTIONS, solver=solver_param('base_lr: 0.1 lr_policy: "fixed" random_seed: -1'))
    seeds = {agree_on_options(FakeWorld(), options).solver.random_seed for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0


def test_ranks_with_different_devices_are_refused() -> None:
    world = FakeWorld(2, answer=lambda rank, value: 2 if value == 1 and not isinstance(value, bool) else value)
    message = "rank 0 on h0 has 1 CPU solver, rank 1 on h1 has 2 CPU solvers; give every rank as many"
    with pytest.raises(ConfigError, match=f"ranks have different devices: {message}"):
        agree_on_options(world, OPTIONS)
    assert world.ended_together


def test_gpus_and_cpu_solvers_do_not_go_together() -> None:
    world = FakeWorld(2, answer=lambda rank, value: 1 if value is None else value)
    with pytest.raises(ConfigError, match="rank 0 on h0 has 1 CPU solver, rank 1 on h1 has 1 GPU; give every rank"):
        agree_on_options(world, OPTIONS)


def save(folder: Path) -> Path:
    """A snapshot of a solver with the prefix of OPTIONS."""
    with build_solver(f'base_lr: 0.1 lr_policy: "fixed" max_iter: 3 snapshot_prefix: "{folder}/run"', TINY) as solver:
        solver.step(1)
        return solver.snapshot()


def test_the_newest_snapshot_is_looked_for_on_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    options = replace(OPTIONS, resume_newest=True)
    with caplog.at_level(logging.INFO):
        assert agree_on_options(FakeWorld(), options).snapshot is None
    assert "no whole snapshot with the prefix run: training starts from the beginning" in caplog.text
    newest = save(tmp_path)
    assert agree_on_options(RootsWorld(random_seed=1, snapshot=None, weights=[]), options).snapshot is None
    found = agree_on_options(FakeWorld(), options).snapshot
    assert found is not None and found.resolve() == newest


@pytest.mark.parametrize(("age", "wanted"), [(-5.0, "run_iter_1.solverstate"), (5.0, "given.solverstate")])
def test_a_job_that_is_started_again_resumes_from_a_snapshot_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, wanted: str
) -> None:
    """One of an older training with the same prefix is not its own."""
    monkeypatch.chdir(tmp_path)
    newest = save(tmp_path)
    options = replace(OPTIONS, snapshot=Path("given.solverstate"), resume_since=newest.stat().st_mtime + age)
    assert str(agree_on_options(FakeWorld(), options).snapshot) == wanted
    always = replace(options, snapshot=None, resume_newest=True)
    assert str(agree_on_options(FakeWorld(), always).snapshot) == newest.name

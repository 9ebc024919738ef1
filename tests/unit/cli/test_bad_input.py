"""What bad input gets: one line that says what, where and what to do; exit status 2, or 1 for a failure at work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from caffepy.cli import nets as devices
from caffepy.cli.main import main
from caffepy.errors import DeviceError

NET = """
name: "tiny"
layer {{
  name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param {{
    shape {{ dim: 4 dim: 3 }} shape {{ dim: 4 }}
    data_filler {{ type: "gaussian" }} data_filler {{ type: "constant" value: {label} }}
  }}
}}
layer {{
  name: "{name}" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }}
}}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""
SOLVER = """
net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 max_iter: 2 display: 1 snapshot_prefix: "tiny"
random_seed: 1 solver_mode: CPU
"""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a net that trains and its solver, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_net()
    Path("solver.prototxt").write_text(SOLVER)
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; gives the exit status and the error, which must be one line."""

    def call(*arguments: str) -> tuple[int, str]:
        status = main(arguments)
        text = capsys.readouterr().err
        assert "Traceback" not in text
        errors = [line for line in text.splitlines() if line.startswith("caffepy: error: ")]
        assert len(errors) == (status != 0), text
        if errors:
            assert text.rstrip().endswith(errors[0]), "the error must be the last line"
        return status, errors[0].removeprefix("caffepy: error: ") if errors else ""

    return call


def write_net(label: float = 1, outputs: int = 5, name: str = "ip", extra: str = "") -> None:
    Path("net.prototxt").write_text(NET.format(label=label, outputs=outputs, name=name) + extra)


def write_layer(text: str) -> None:
    write_net(extra=f"layer {{ {text} }}\n")


def train(run: Run, *arguments: str) -> tuple[int, str]:
    return run("train", "--solver", "solver.prototxt", *arguments)


def test_the_net_of_these_tests_trains(run: Run):
    assert train(run) == (0, "")
    assert Path("tiny_iter_2.solverstate").exists()


# -- files ----------------------------------------------------------------------------------------------


def test_no_solver(run: Run):
    assert run("train") == (2, "train needs a solver: caffepy train --solver solver.prototxt")


def test_a_solver_that_is_not_there(run: Run):
    status, error = run("train", "--solver=absent.prototxt")
    assert status == 2
    assert error.startswith("absent.prototxt: no such solver")


def test_a_net_that_is_not_there(run: Run):
    Path("net.prototxt").unlink()
    status, error = train(run)
    assert status == 2
    assert error.startswith("solver: net: 'net.prototxt' does not exist (looked from ")


@pytest.mark.parametrize("option", ["--weights", "--snapshot"])
def test_weights_and_snapshots_that_are_not_there(run: Run, option: str):
    status, error = train(run, option, "absent.bin")
    assert status == 2
    assert "absent.bin: no such" in error


def test_weights_together_with_a_snapshot(run: Run):
    status, error = train(run, "--weights=a.caffemodel", "--snapshot=a.solverstate")
    assert status == 2
    assert error.startswith("--snapshot and --weights exclude each other")


def test_a_syntax_error_has_its_place(run: Run):
    Path("solver.prototxt").write_text('net: "net.prototxt"\nbase_lr 0.1\n')
    status, error = train(run)
    assert status == 2
    assert re.match(r"solver\.prototxt:2:\d+: ", error)


def test_an_unknown_field_offers_the_nearest(run: Run):
    Path("solver.prototxt").write_text(f"{SOLVER}\nmomentun: 0.9\n")
    status, error = train(run)
    assert status == 2
    place, _, found = error.partition(": ")
    assert re.fullmatch(r"solver\.prototxt:\d+:\d+", place)
    assert found.startswith("unknown field 'momentun' of SolverParameter; did you mean 'momentum'")


def test_an_unknown_solver_type_offers_the_nearest(run: Run):
    Path("solver.prototxt").write_text(f'{SOLVER}\ntype: "Adm"\n')
    status, error = train(run)
    assert status == 2
    assert "unknown solver type 'Adm'; did you mean 'Adam'?" in error


def test_a_binary_file_as_prototxt(run: Run):
    Path("solver.prototxt").write_bytes(bytes(range(64)))
    status, error = train(run)
    assert status == 2
    assert "binary file, not a prototxt" in error


# -- the net ---------------------------------------------------------------------------------------------


def test_an_unknown_layer_type_offers_the_nearest(run: Run):
    write_layer('name: "c" type: "Convolutoin" bottom: "ip" top: "c"')
    assert train(run) == (
        2,
        "net.prototxt:15: layer 'c': unknown layer type 'Convolutoin'; did you mean 'Convolution'?",
    )


def test_an_undefined_bottom(run: Run):
    write_layer('name: "relu" type: "ReLU" bottom: "pi" top: "r"')
    status, error = train(run)
    assert status == 2
    assert "layer 'relu'" in error
    assert "'pi'" in error


def test_shapes_that_do_not_fit(run: Run):
    write_layer('name: "sum" type: "Eltwise" bottom: "data" bottom: "ip" top: "sum"')
    status, error = train(run)
    assert status == 2
    assert "layer 'sum' (Eltwise)" in error
    assert "4 3 (12)" in error
    assert "4 5 (20)" in error


def test_a_test_net_without_test_iter(run: Run):
    Path("solver.prototxt").write_text(f"{SOLVER}\ntest_interval: 1\n")
    status, error = train(run)
    assert status == 2
    assert "test_iter" in error


def test_a_label_outside_the_classes(run: Run):
    write_net(label=7)
    status, error = train(run)
    assert status == 2
    assert "layer 'loss'" in error
    assert "label of sample 0 is 7" in error
    assert "5 classes, 0 to 4" in error


# -- snapshots -------------------------------------------------------------------------------------------


def test_a_caffemodel_as_snapshot(run: Run):
    assert train(run)[0] == 0
    status, error = train(run, "--snapshot", "tiny_iter_2.caffemodel")
    assert status == 2
    assert "tiny_iter_2.caffemodel" in error
    assert "--weights" in error


def test_a_solverstate_as_weights(run: Run):
    assert train(run)[0] == 0
    status, error = train(run, "--weights", "tiny_iter_2.solverstate")
    assert status == 2
    assert "tiny_iter_2.solverstate" in error
    assert "--snapshot" in error


def test_a_solverstate_of_another_solver_type(run: Run):
    assert train(run)[0] == 0
    Path("solver.prototxt").write_text(f'{SOLVER}\ntype: "Adam"\nmomentum2: 0.999\n')
    status, error = train(run, "--snapshot=tiny_iter_2.solverstate")
    assert status == 2
    assert "tiny_iter_2.solverstate" in error
    assert "SGD" in error
    assert "Adam" in error


def test_a_solverstate_of_other_shapes(run: Run):
    assert train(run)[0] == 0
    write_net(outputs=6)
    status, error = train(run, "--snapshot=tiny_iter_2.solverstate")
    assert status == 2
    assert "layer 'ip'" in error
    assert "5 3 (15)" in error
    assert "6 3 (18)" in error


def test_a_truncated_solverstate(run: Run):
    assert train(run)[0] == 0
    state = Path("tiny_iter_2.solverstate")
    state.write_bytes(state.read_bytes()[:-7])
    status, error = train(run, "--snapshot", str(state))
    assert status == 2
    assert str(state) in error


def test_a_snapshot_folder_that_is_not_there(run: Run):
    Path("solver.prototxt").write_text(SOLVER.replace('"tiny"', '"nowhere/tiny"'))
    status, error = train(run)
    assert status == 2
    assert "nowhere" in error


def test_automatic_snapshots_start_anew_where_there_is_none(run: Run):
    assert train(run, "--snapshot=auto") == (0, "")
    assert Path("tiny_iter_2.solverstate").exists()


def test_a_snapshot_of_another_net(run: Run):
    """Before the first iteration; without it two solvers with one prefix lost the first one's weights in silence."""
    assert train(run) == (0, "")
    before = Path("tiny_iter_2.caffemodel").read_bytes()
    write_net(outputs=7)
    status, error = train(run)
    assert status == 2
    assert error.startswith("snapshot_prefix: tiny_iter_2.caffemodel is of another net (parameter 0 of the layer 'ip'")
    assert "set snapshot_prefix to another one, or give --overwrite" in error
    assert Path("tiny_iter_2.caffemodel").read_bytes() == before
    assert train(run, "--overwrite") == (0, "")
    assert Path("tiny_iter_2.caffemodel").read_bytes() != before


def test_a_prefix_that_cannot_be_written(run: Run):
    Path("solver.prototxt").write_text(SOLVER.replace('"tiny"', '"/proc/x"'))
    status, error = train(run)
    assert status == 2
    assert error.startswith("snapshot_prefix: /proc/x_iter_2.solverstate: cannot be written")


# -- data ------------------------------------------------------------------------------------------------

DATA_LAYER = """
layer { name: "db" type: "Data" top: "x" top: "y" data_param { source: "digits_lmdb" batch_size: 2 backend: LMDB } }
"""


def test_an_lmdb_that_is_not_there(run: Run):
    write_net(extra=DATA_LAYER)
    status, error = train(run)
    assert status == 2
    assert "LMDB 'digits_lmdb' does not exist" in error
    assert "caffepy data" in error


def test_a_label_outside_the_classes_in_an_lmdb_names_the_record(run: Run):
    import lmdb

    from caffepy.formats.proto.caffe_pb2 import Datum

    with lmdb.open("digits_lmdb", map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        for number in range(6):
            datum = Datum(channels=1, height=1, width=3, data=b"abc", label=9 if number == 4 else number % 3)
            transaction.put(f"{number:08d}".encode(), datum.SerializeToString())
    text = NET.format(label=0, outputs=5, name="ip")
    data = DATA_LAYER.replace('top: "x" top: "y"', 'top: "data" top: "label"')
    Path("net.prototxt").write_text(data + text[text.index('layer {\n  name: "ip"') :])
    Path("solver.prototxt").write_text(SOLVER.replace("max_iter: 2", "max_iter: 20"))
    status, error = train(run)
    assert status == 2
    assert "layer 'loss'" in error
    assert "is 9" in error
    assert "00000004" in error


def test_a_truncated_lmdb(run: Run):
    import lmdb

    write_net(extra=DATA_LAYER)
    with lmdb.open("digits_lmdb", map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        for number in range(50):
            transaction.put(f"{number:08d}".encode(), bytes(500))
    file = Path("digits_lmdb/data.mdb")
    file.write_bytes(file.read_bytes()[:9000])
    status, error = train(run)
    assert status == 2
    assert "digits_lmdb" in error


# -- devices ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["driver", "no driver"])
def without_cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is a driver; CuPy is not."""
    has_driver: bool = request.param == "driver"

    def load_library(path: str) -> None:
        if not has_driver:
            raise OSError(f"{path}: cannot open shared object file")

    for name in [name for name in sys.modules if name.startswith("caffepy.backend.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("caffepy.utils.files.load_library", load_library)
    return has_driver


@pytest.mark.parametrize("gpus", ["0", "all"])
def test_a_gpu_without_cupy(run: Run, gpus: str, without_cupy: bool):
    """Where there is no driver either that is said first: CuPy alone would not help."""
    status, error = train(run, "--gpu", gpus)
    assert status == 2
    if without_cupy:
        assert error.startswith("CuPy is not installed and is needed to train on a GPU: ")
    else:
        assert error.startswith("this machine has no NVIDIA driver: train on the CPU with --cpu, or install the driver")
        assert "CuPy" in error


@pytest.mark.usefixtures("without_cupy")
@pytest.mark.parametrize("mode", ["solver_mode: GPU", ""], ids=["written", "default"])
def test_gpu_mode_without_a_gpu_offers_the_cpu(run: Run, mode: str):
    Path("solver.prototxt").write_text(SOLVER.replace("solver_mode: CPU", mode))
    status, error = train(run)
    assert status == 2
    assert error.startswith("solver.prototxt is for a GPU (solver_mode: GPU, also the default; --cpu trains on the CPU")
    assert train(run, "--cpu") == (0, "")


@pytest.mark.parametrize(
    ("device_id", "options", "asked"), [("device_id: 3", [], [3]), ("", [], [0]), ("device_id: 3", ["--gpu", "1"], [1])]
)
def test_the_solver_names_its_gpu(
    run: Run, monkeypatch: pytest.MonkeyPatch, device_id: str, options: list[str], asked: list[int]
):
    """In `device_id`, which the command line overrides."""

    def check(wanted: list[int]) -> list[int]:
        raise DeviceError(f"GPUs {list(wanted)} are asked for")

    monkeypatch.setattr(devices, "check_gpus", check)
    Path("solver.prototxt").write_text(SOLVER.replace("solver_mode: CPU", f"solver_mode: GPU {device_id}"))
    status, error = train(run, *options)
    assert status == 2
    assert f"GPUs {asked} are asked for" in error


def test_device_query_works_without_cuda(here: Path, capsys: pytest.CaptureFixture[str], without_cupy: bool):
    assert main(["device_query"]) == 0
    report = capsys.readouterr().out
    assert f"GPU:\n  none: {'CuPy is not installed' if without_cupy else 'this machine has no NVIDIA driver'}" in report
    assert re.search(r"CPU:\n  .*usable by this process", report)
    assert "NumPy:" in report


@pytest.mark.usefixtures("without_cupy")
def test_device_query_of_a_gpu_that_is_not_there(run: Run):
    status, error = run("device_query", "-gpu=0")
    assert status == 2
    assert "CuPy" in error


def test_cpu_solvers_with_gpus(run: Run):
    status, error = train(run, "--gpu=0", "--cpu-solvers=2")
    assert status == 2
    assert error.startswith("--cpu-solvers is for training on the CPU")


# -- while running ---------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite(run: Run):
    write_net(extra='layer { name: "big" type: "Power" bottom: "ip" top: "big" power_param { scale: 1e30 power: 3 } }')
    text = Path("net.prototxt").read_text().replace('bottom: "ip" bottom: "label"', 'bottom: "big" bottom: "label"')
    lines = text.strip().splitlines()
    Path("net.prototxt").write_text("\n".join(lines[:-2] + lines[-1:] + lines[-2:-1]))
    status, error = train(run)
    assert status == 1
    assert re.search(r"iteration 0\b", error)
    assert "'big'" in error
    assert "--keep-going" in error
    assert train(run, "--keep-going")[0] == 0


def test_an_unexpected_exception_has_its_place_and_a_hint(run: Run, monkeypatch: pytest.MonkeyPatch):
    import caffepy.formats.load

    def fail(path: Path) -> None:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr(caffepy.formats.load, "read_net", fail)
    status, error = run("time", "--model", "net.prototxt")
    assert status == 70
    assert re.fullmatch(
        r"ZeroDivisionError: by accident at .*:\d+; this is a bug in caffepy, not in your input: please report "
        r"it to the developers with the output of the same command with --traceback",
        error,
    )


def test_verbose_shows_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--solver=absent.prototxt", "--verbose"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.rstrip().splitlines()[-1].startswith("caffepy: error: absent.prototxt: no such solver")


def test_ctrl_c_outside_of_training(run: Run, monkeypatch: pytest.MonkeyPatch):
    import caffepy.formats.load

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(caffepy.formats.load, "read_net", interrupt)
    assert run("time", "--model", "net.prototxt") == (130, "interrupted")


TWO_DATA = """
# layer { name: "ip" }
layer {
  name: "data" type: "DummyData" top: "data" top: "label" include { phase: TRAIN }
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } }
}
layer {
  name: "data" type: "DummyData" top: "data" top: "label" include { phase: TEST }
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 } %s }
}
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 %s } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" %s }
"""


@pytest.mark.parametrize(
    ("settings", "place", "message"),
    [
        (("", "axis: 7", ""), "net.prototxt:11", r"layer 'ip' \(InnerProduct\): "),
        (("", "", 'bottom: "nothing"'), "net.prototxt:12", r"layer 'loss' \(SoftmaxWithLoss\): unknown bottom"),
        (("", "", "} layer { name: 'x' type: 'Nothing'"), "net.prototxt:12", "layer 'x': unknown layer type 'Nothing'"),
        (("shape { dim: 0 }", "", ""), "net.prototxt:7", r"layer 'data' \(DummyData\): "),
        (("", "", "include { phase: TEST } exclude { }"), "net.prototxt:12", "layer 'loss' has both include and"),
    ],
    ids=range(5),
)
def test_an_error_of_a_layer_begins_with_its_place(
    run: Run, settings: tuple[str, str, str], place: str, message: str
) -> None:
    """Of two layers with a name it is the one of the net's phase."""
    Path("net.prototxt").write_text(TWO_DATA % settings)
    Path("w.caffemodel").write_bytes(b"")
    with_test = SOLVER + "test_iter: 1 test_interval: 1"
    Path("solver.prototxt").write_text(with_test)
    status, error = run("train", "--solver", "solver.prototxt", "--cpu")
    assert status == 2 and re.match(rf"{place}: {message}", error), error
    inline = with_test.replace('net: "net.prototxt"', "")
    Path("solver.prototxt").write_text(f"{inline} net_param {{ {TWO_DATA % settings} }}")
    status, error = run("train", "--solver", "solver.prototxt", "--cpu")
    moved = re.sub(r"net\.prototxt:(\d+)", lambda found: f"solver.prototxt:{int(found[1]) + 3}", place)
    assert status == 2 and re.match(rf"{moved}: {message}", error), error


def test_layers_of_one_name_are_all_named(run: Run) -> None:
    Path("net.prototxt").write_text(TWO_DATA.replace("include { phase: TEST }", "") % ("", "", ""))
    status, error = run("train", "--solver", "solver.prototxt", "--cpu")
    assert status == 2 and error.startswith("net.prototxt:3 or 7: layer 'data' (DummyData): "), error


def test_layers_of_old_formats_have_their_lines(run: Run) -> None:
    Path("net.prototxt").write_text(
        'input: "data" input_shape { dim: 2 dim: 3 }\n\nlayers { name: "ip" type: INNER_PRODUCT bottom: "data" '
        "top: 'ip' inner_product_param { num_output: 0 } }"
    )
    status, error = run("time", "--model", "net.prototxt", "--cpu")
    assert status == 2 and error.startswith("net.prototxt:3: layer 'ip' (InnerProduct): "), error

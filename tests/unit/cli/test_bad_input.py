"""What bad input gets: one line that says what, where and what to do; exit status 2, or 1 for a failure at work."""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pytest

from caffepy.cli import nets as devices
from caffepy.cli.main import main
from caffepy.errors import LONGEST_MESSAGE, DeviceError, one_line

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
DEPLOY = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 1, 4, 4] } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
"""
DATA_LAYER = """
layer { name: "db" type: "Data" top: "x" top: "y" data_param { source: "digits_lmdb" batch_size: 2 backend: LMDB } }
"""
TRAIN = "train --solver solver.prototxt"

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a net that trains and its solver, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(net())
    Path("solver.prototxt").write_text(SOLVER)
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; gives the exit status and the error, which must be one line, the last one."""

    def call(*arguments: str) -> tuple[int, str]:
        status = main(arguments[0].split() if len(arguments) == 1 else arguments)
        text = capsys.readouterr().err
        assert "Traceback" not in text
        errors = [line for line in text.splitlines() if line.startswith("caffepy: error: ")]
        assert len(errors) == (status != 0), text
        if errors:
            assert text.rstrip().endswith(errors[0]), "the error must be the last line"
        return status, errors[0].removeprefix("caffepy: error: ") if errors else ""

    return call


def net(label: float = 1, outputs: int = 5, name: str = "ip", extra: str = "") -> str:
    return NET.format(label=label, outputs=outputs, name=name) + extra


def with_layer(text: str) -> dict[str, str]:
    """The net with one more layer."""
    return {"net.prototxt": net(extra=f"layer {{ {text} }}\n")}


def solver(*changes: str, more: str = "") -> dict[str, str]:
    """The solver with a text replaced by another one, and with more fields."""
    return {"solver.prototxt": (SOLVER.replace(*changes) if changes else SOLVER) + more}


def test_the_net_of_these_tests_trains(run: Run):
    assert run(f"{TRAIN} --snapshot=auto") == (0, ""), "automatic snapshots start anew where there is none"
    assert Path("tiny_iter_2.solverstate").exists()


class Case(NamedTuple):
    """A command line that fails.

    Args:
        words: its words, or one text with blanks between them.
        says: patterns of the error.
        files: written beforehand.
        trained: the net was trained beforehand.
    """

    words: str | tuple[str, ...]
    says: tuple[str, ...]
    files: dict[str, str | bytes] = {}
    trained: bool = False


NO_LAYERS = "empty.prototxt: the net has no layers in the {} phase"
PACKED = {"packed.caffemodel": gzip.compress(b"weights"), "deploy.prototxt": DEPLOY}
EMPTY = {"empty.prototxt": "# nothing\n"}
STATE = "--snapshot tiny_iter_2.solverstate"
CASES = [
    # files
    Case("train", ("^train needs a solver: caffepy train --solver solver.prototxt$",)),
    Case("train --solver=absent.prototxt", (r"^absent\.prototxt: no such solver",)),
    Case(TRAIN, (r"^solver: net: 'nte.prototxt' does not exist \(looked from ",), solver("net.p", "nte.p")),
    Case(f"{TRAIN} --weights absent.bin", ("absent.bin: no such",)),
    Case(f"{TRAIN} --snapshot absent.bin", ("absent.bin: no such",)),
    Case(f"{TRAIN} --weights=a.caffemodel --snapshot=a.solverstate", ("^--snapshot and --weights exclude each other",)),
    Case(TRAIN, (r"^solver\.prototxt:2:\d+: ",), {"solver.prototxt": 'net: "net.prototxt"\nbase_lr 0.1\n'}),
    Case(
        TRAIN,
        (r"^solver\.prototxt:\d+:\d+: unknown field 'momentun' of SolverParameter; did you mean 'momentum'",),
        solver(more="momentun: 0.9"),
    ),
    Case(TRAIN, (r"unknown solver type 'Adm'; did you mean 'Adam'\?",), solver(more='type: "Adm"')),
    Case(TRAIN, ("binary file, not a prototxt",), {"solver.prototxt": bytes(range(64))}),
    Case(TRAIN, (r"solver.prototxt:2:30: found fast where a number is expected",), solver("0.1", "fast")),
    Case(
        ("train", "--solver", "x" * 5000),
        (rf"^.{{0,{LONGEST_MESSAGE + 57}}}cannot read the solver: File name too long$",),
    ),
    *(Case(("train", "--solver", name), ("",)) for name in ("a\0b", "a\nb", "\udcff")),
    Case("net --solver solver.prototxt", ("cannot read the net: ",), solver("net.prototxt", "/dev/zero")),
    Case(
        "net --solver solver.prototxt",
        (r"solver: net: 'a\\x00b' does not exist",),
        solver("net.prototxt", r"a\000b"),
    ),
    # nets
    Case(
        TRAIN,
        (r"^net.prototxt:15: layer 'c': unknown layer type 'Convolutoin'; did you mean 'Convolution'\?$",),
        with_layer('name: "c" type: "Convolutoin" bottom: "ip" top: "c"'),
    ),
    Case(TRAIN, ("layer 'relu'", "'pi'"), with_layer('name: "relu" type: "ReLU" bottom: "pi" top: "r"')),
    Case(
        TRAIN,
        (r"layer 'sum' \(Eltwise\)", r"4 3 \(12\)", r"4 5 \(20\)"),
        with_layer('name: "sum" type: "Eltwise" bottom: "data" bottom: "ip" top: "sum"'),
    ),
    Case(TRAIN, ("test_iter",), solver(more="test_interval: 1")),
    Case(TRAIN, ("layer 'loss'", "label of sample 0 is 7", "5 classes, 0 to 4"), {"net.prototxt": net(label=7)}),
    Case(
        "net --model v1.prototxt",
        (r'v1.prototxt:3:26: .* write type: "InnerProduct", or make it layers { }',),
        {"v1.prototxt": DEPLOY.replace('"InnerProduct"', "INNER_PRODUCT")},
    ),
    Case("net --model empty.prototxt", (NO_LAYERS.format("TRAIN"),), EMPTY),
    Case("net --model empty.prototxt --memory", (NO_LAYERS.format("TRAIN"),), EMPTY),
    Case("net --model empty.prototxt --memory --phase TEST", (NO_LAYERS.format("TEST"),), EMPTY),
    Case("test --model empty.prototxt --weights x", (NO_LAYERS.format("TEST"),), EMPTY),
    Case("time --model empty.prototxt", (NO_LAYERS.format("TRAIN"),), EMPTY),
    Case(
        TRAIN, ("net file: .*empty.prototxt: the net has no layers in the TRAIN",), EMPTY | solver("net.p", "empty.p")
    ),
    *(Case(f"net --model n --memory --limit={limit}", ("is not a number above 0",)) for limit in ("nan", "inf", "-1")),
    # weights and snapshots
    Case(
        "test --model deploy.prototxt --weights packed.caffemodel",
        ("packed.caffemodel: .* packed with gzip; unpack",),
        PACKED,
    ),
    Case(
        "test --model deploy.prototxt --weights deploy.prototxt",
        ("deploy.prototxt: .* it is text .* give the binary file",),
        PACKED,
    ),
    Case(
        "classify cat.png --model deploy.prototxt --mean-file packed.caffemodel",
        ("'packed.caffemodel' .* gzip; unpack",),
        PACKED | {"cat.png": bytes(cv2.imencode(".png", np.zeros((4, 4), np.uint8))[1])},
    ),
    Case(
        "import deploy.prototxt",
        ("deploy.prototxt: not an ONNX model, or damaged: it is text .*; give the binary file",),
        PACKED,
    ),
    Case(f"{TRAIN} --snapshot tiny_iter_2.caffemodel", ("tiny_iter_2.caffemodel", "--weights"), {}, True),
    Case(f"{TRAIN} --weights tiny_iter_2.solverstate", ("tiny_iter_2.solverstate", "--snapshot"), {}, True),
    Case(
        f"{TRAIN} {STATE}",
        ("tiny_iter_2.solverstate", "SGD", "Adam"),
        solver(more='type: "Adam" momentum2: 0.999'),
        True,
    ),
    Case(f"{TRAIN} {STATE}", ("layer 'ip'", r"5 3 \(15\)", r"6 3 \(18\)"), {"net.prototxt": net(outputs=6)}, True),
    Case(TRAIN, ("nowhere",), solver('"tiny"', '"nowhere/tiny"')),
    Case(
        TRAIN,
        ("^snapshot_prefix: /proc/x_iter_2.solverstate: cannot be written",),
        solver('"tiny"', '"/proc/x"'),
    ),
    Case(f"{TRAIN} --trace absent/t.json", ("^--trace absent/t.json: there is no folder absent; make it first$",)),
    # data and devices
    Case(TRAIN, ("LMDB 'digits_lmdb' does not exist", "caffepy data"), {"net.prototxt": net(extra=DATA_LAYER)}),
    Case(f"{TRAIN} --gpu=0 --cpu-solvers=2", ("^--cpu-solvers is for training on the CPU",)),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_message_helps(run: Run, case: Case):
    if case.trained:
        assert run(TRAIN)[0] == 0
    for name, content in case.files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    status, error = run(case.words) if isinstance(case.words, str) else run(*case.words)
    assert status == 2
    for pattern in case.says:
        assert re.search(pattern, error), (pattern, error)


@pytest.mark.parametrize("name", ["tiny_iter_2.solverstate", "digits_lmdb/data.mdb"])
def test_a_truncated_file_is_named(run: Run, name: str):
    import lmdb

    assert run(TRAIN)[0] == 0
    with lmdb.open("digits_lmdb", map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        for number in range(50):
            transaction.put(f"{number:08d}".encode(), bytes(500))
    if "lmdb" in name:
        Path("net.prototxt").write_text(net(extra=DATA_LAYER))
    content = Path(name).read_bytes()
    Path(name).write_bytes(content[:9000] if "lmdb" in name else content[:-7])
    status, error = run(f"{TRAIN} --snapshot {name}" if "state" in name else f"{TRAIN} --overwrite")
    assert (status, name.split("/")[0] in error) == (2, True), error


def test_a_snapshot_of_another_net(run: Run):
    """Before the first iteration; without it two solvers with one prefix lost the first one's weights in silence."""
    assert run(TRAIN) == (0, "")
    before = Path("tiny_iter_2.caffemodel").read_bytes()
    Path("net.prototxt").write_text(net(outputs=7))
    status, error = run(TRAIN)
    assert status == 2
    assert error.startswith("snapshot_prefix: tiny_iter_2.caffemodel is of another net (parameter 0 of the layer 'ip'")
    assert "set snapshot_prefix to another one, or give --overwrite" in error
    assert Path("tiny_iter_2.caffemodel").read_bytes() == before
    assert run(f"{TRAIN} --overwrite") == (0, "")
    assert Path("tiny_iter_2.caffemodel").read_bytes() != before


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
    status, error = run(TRAIN)
    assert status == 2
    assert "layer 'loss'" in error
    assert "is 9" in error
    assert "00000004" in error


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
    status, error = run(f"{TRAIN} --gpu {gpus}")
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
    status, error = run(TRAIN)
    assert status == 2
    assert error.startswith("solver.prototxt is for a GPU (solver_mode: GPU, also the default; --cpu trains on the CPU")
    assert run(f"{TRAIN} --cpu") == (0, "")


@pytest.mark.parametrize(
    ("device_id", "options", "asked"), [("device_id: 3", "", [3]), ("", "", [0]), ("device_id: 3", "--gpu 1", [1])]
)
def test_the_solver_names_its_gpu(
    run: Run, monkeypatch: pytest.MonkeyPatch, device_id: str, options: str, asked: list[int]
):
    """In `device_id`, which the command line overrides."""

    def check(wanted: list[int]) -> list[int]:
        raise DeviceError(f"GPUs {list(wanted)} are asked for")

    monkeypatch.setattr(devices, "check_gpus", check)
    Path("solver.prototxt").write_text(SOLVER.replace("solver_mode: CPU", f"solver_mode: GPU {device_id}"))
    status, error = run(f"{TRAIN} {options}")
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
    status, error = run("device_query -gpu=0")
    assert status == 2
    assert "CuPy" in error


def test_a_loss_that_is_not_finite(run: Run):
    text = net(extra='layer { name: "big" type: "Power" bottom: "ip" top: "big" power_param { scale: 1e30 power: 3 } }')
    text = text.replace('bottom: "ip" bottom: "label"', 'bottom: "big" bottom: "label"')
    lines = text.strip().splitlines()
    Path("net.prototxt").write_text("\n".join(lines[:-2] + lines[-1:] + lines[-2:-1]))
    status, error = run(TRAIN)
    assert status == 1
    assert re.search(r"iteration 0\b", error)
    assert "'big'" in error
    assert "--keep-going" in error
    assert run(f"{TRAIN} --keep-going")[0] == 0


# -- mistakes of caffepy's and of the system -------------------------------------------------------------

REPORT = "this is a bug in caffepy, not in your input: please report it to the developers with the output of the same"
LIBRARY = "Could not find/load shared object file 'libllvmlite.so' from resource location: 'llvmlite.binding'"
ABSENT_LIBRARY = "libfoo.so.3: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("failure", "wanted", "message"),
    [
        (
            ZeroDivisionError("by accident"),
            70,
            rf"ZeroDivisionError: by accident at .*:\d+; {REPORT} command with --traceback$",
        ),
        (KeyError("two\nlines"), 70, f"KeyError: .*{REPORT}"),
        (OSError(LIBRARY), 1, f"a library cannot be loaded: {LIBRARY}; "),
        (ImportError(ABSENT_LIBRARY), 1, f"a library cannot be loaded: {ABSENT_LIBRARY}; "),
        (MemoryError(), 2, "out of memory: "),
        (ImportError("libfoo.so.3: failed to map segment from shared object"), 2, "out of memory: "),
        (OSError("/usr/lib/libfoo.so: cannot map zero-fill pages"), 2, "out of memory: "),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 2, "out of memory: "),
        (KeyboardInterrupt(), 130, "interrupted$"),
    ],
)
def test_exceptions_are_one_line(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    wanted: int,
    message: str,
) -> None:
    def fail(path: Path) -> None:
        raise failure

    monkeypatch.setattr("caffepy.formats.load.read_net", fail)
    for command in ("net", "time"):
        status, error = run(f"{command} --model net.prototxt")
        assert status == wanted and re.match(message, error), error
    if wanted == 70:
        for variable in (True, False):
            if variable:
                monkeypatch.setenv("CAFFEPY_TRACEBACK", "1")
            assert main(["net", "--model", "n", *([] if variable else ["--traceback"])]) == 70
            text = capsys.readouterr().err
            assert "Traceback (most recent call last)" in text
            assert text.splitlines()[-1].endswith("please report it to the developers with this output")
            monkeypatch.delenv("CAFFEPY_TRACEBACK", raising=False)


def test_verbose_shows_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--solver=absent.prototxt", "--verbose"]) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert text.rstrip().splitlines()[-1].startswith("caffepy: error: absent.prototxt: no such solver")


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
    status, error = run(f"{TRAIN} --cpu")
    assert status == 2 and re.match(rf"{place}: {message}", error), error
    inline = with_test.replace('net: "net.prototxt"', "")
    Path("solver.prototxt").write_text(f"{inline} net_param {{ {TWO_DATA % settings} }}")
    status, error = run(f"{TRAIN} --cpu")
    moved = re.sub(r"net\.prototxt:(\d+)", lambda found: f"solver.prototxt:{int(found[1]) + 3}", place)
    assert status == 2 and re.match(rf"{moved}: {message}", error), error


def test_layers_of_one_name_are_all_named(run: Run) -> None:
    Path("net.prototxt").write_text(TWO_DATA.replace("include { phase: TEST }", "") % ("", "", ""))
    status, error = run(f"{TRAIN} --cpu")
    assert status == 2 and error.startswith("net.prototxt:3 or 7: layer 'data' (DummyData): "), error


def test_layers_of_old_formats_have_their_lines(run: Run) -> None:
    Path("net.prototxt").write_text(
        'input: "data" input_shape { dim: 2 dim: 3 }\n\nlayers { name: "ip" type: INNER_PRODUCT bottom: "data" '
        "top: 'ip' inner_product_param { num_output: 0 } }"
    )
    status, error = run("time --model net.prototxt --cpu")
    assert status == 2 and error.startswith("net.prototxt:3: layer 'ip' (InnerProduct): "), error


# -- outputs ---------------------------------------------------------------------------------------------


@pytest.fixture
def images(here: Path) -> None:
    """A net without data, and two images."""
    Path("deploy.prototxt").write_text(DEPLOY)
    for name in ("cat.png", "dog.png"):
        cv2.imwrite(name, np.zeros((4, 4), np.uint8))


@pytest.mark.usefixtures("images")
def test_a_second_image_is_not_overwritten_with_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("dog.png").read_bytes()
    assert main(["classify", "cat.png", "dog.png", "--model", "deploy.prototxt"]) == 0
    assert "dog.png\n" in capsys.readouterr().out
    assert main(["classify", "cat.png", "--output", "dog.png", "--model", "deploy.prototxt"]) == 2
    assert "'dog.png' is the output" in capsys.readouterr().err
    assert Path("dog.png").read_bytes() == before


@pytest.mark.usefixtures("here")
def test_a_system_without_further_threads_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert main(["train", "--cpu", "--solver", "solver.prototxt"]) == 1
    assert re.search(r"(?m)^caffepy: error: the system gives .* no more threads: .*ulimit -u", capsys.readouterr().err)


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_stream_that_was_closed_at_start_takes_what_is_printed(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, closed, None)
    assert main(["net", "--model", "deploy.prototxt"]) == 0
    assert getattr(sys, closed) is not None


@pytest.mark.usefixtures("images")
def test_output_to_a_full_disk_is_the_disks_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["net", "--model", "deploy.prototxt"]) == 1
    assert capsys.readouterr().err == "caffepy: error: the output cannot be written: No space left on device\n"


def test_an_error_that_cannot_be_printed_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["net"]) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is still buffered


def test_one_line_escapes_control_characters_and_leaves_out_the_middle() -> None:
    assert one_line("a\nb\x1b[0m\u2028\udcffc\n") == r"a\nb\x1b[0m\u2028\udcffc"
    long = one_line("x" * 10_000)
    assert f"[... {10_000 - LONGEST_MESSAGE} characters ...]" in long
    assert len(long) < LONGEST_MESSAGE + 50


def test_names_that_stdout_cannot_express_are_printed_as_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "n.prototxt"
    text = 'layer { name: "näch" type: "Input" top: "x" input_param { shape { dim: 1 } } }'
    path.write_text(text, encoding="utf-8")
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii", errors="strict"))
    assert main(["net", "--model", str(path)]) == 0
    assert rb"n\xe4ch" in output.getvalue()

"""Caffe's tools as commands: their flags in every spelling of gflags, their output, their errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import lmdb
import numpy as np
import pytest

from caffepy.cli.main import ALIASES, COMMANDS, GROUPS, expand, main
from caffepy.cli.options import Parser, add_options, normalise
from caffepy.data.conversion import image_sets as image_records
from caffepy.formats.proto.caffe_pb2 import Datum
from caffepy.utils.options import argument, switch

PROGRAMS = Path(__file__).resolve().parents[3] / "tools"
IMAGES = np.random.default_rng(2).integers(0, 256, (4, 6, 8, 3), np.uint8)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with four images and a list of them, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("img").mkdir()
    for number, image in enumerate(IMAGES):
        cv2.imwrite(f"img/{number}.png", image)
    Path("list.txt").write_text("".join(f"{number}.png {number}\n" for number in range(4)))


def datums(path: str) -> list[Datum]:
    with lmdb.open(path, readonly=True, lock=False) as environment, environment.begin() as transaction:
        return [Datum.FromString(record) for _, record in transaction.cursor()]


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """The one line that a command ends with."""
    assert main(arguments) == status
    return capsys.readouterr().err.splitlines()[-1].removeprefix("caffepy: error: ")


# -- flags -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", False),
        ("-check_size", True),
        ("--check_size", True),
        ("--check-size", True),
        ("--check_size=true", True),
        ("-check_size=True", True),
        ("--check_size=1", True),
        ("--check_size=false", False),
        ("--check_size=False", False),
        ("--nocheck_size", False),
        ("-nocheck_size", False),
        ("--check_size --nocheck_size", False),
        ("--nocheck_size --check_size=y", True),
    ],
)
def test_switches_in_gflags_spellings(words: str, wanted: bool):
    @dataclass(kw_only=True)
    class Options:
        check_size: bool = switch("compare sizes", gflags=True)
        name: str = argument("a name")

    parser = Parser(prog="tool")
    add_options(parser, Options)
    args = parser.parse_strictly(normalise([*words.split(), "db"]))  # the switch takes no word behind it
    assert (args.check_size, args.name) == (wanted, "db")
    assert "--check-size" in parser.format_help() and "=true" not in parser.format_help()


def test_a_switch_with_another_value(capsys: pytest.CaptureFixture[str]):
    error = error_of(capsys, "convert_imageset", "--encoded=maybe", "img/", "list.txt", "db")
    assert error.startswith("argument --encoded: ignored explicit argument 'maybe'")


@pytest.mark.parametrize(
    "flags",
    [
        "-backend lmdb -resize_height 3 -resize_width=2 -gray",
        "--backend=lmdb --resize_height=3 --resize_width 2 --gray=true --noencoded --shuffle=false",
    ],
)
def test_convert_imageset_in_caffes_own_words(flags: str, capsys: pytest.CaptureFixture[str]):
    assert main(["convert_imageset", *flags.split(), "img/", "list.txt", "db"]) == 0
    output = capsys.readouterr()
    assert output.out == "db: 4 images\n"
    assert "A total of 4 images." in output.err and "Processed 4 files." in output.err
    gray = [cv2.resize(cv2.imread(f"img/{n}.png", cv2.IMREAD_GRAYSCALE), (2, 3)) for n in range(4)]
    assert [(one.label, one.data) for one in datums("db")] == [(n, image.tobytes()) for n, image in enumerate(gray)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("convert_imageset img/ list.txt", "the following arguments are required: DB_NAME"),
        ("convert_imageset img/ absent.txt db", "image list 'absent.txt' cannot be read: No such file or directory"),
        ("convert_imageset -resize_hight 3 img/ list.txt db", "unknown option '--resize-hight'; did you mean"),
        ("convert_imageset -resize_height 3 img/ list.txt db", "resize_height and resize_width must be set together"),
        ("convert_imageset -resize_height -3 img/ list.txt db", "argument --resize-height"),
        ("convert_imageset -backend rocksdb img/ list.txt db", "argument --backend: invalid choice: 'rocksdb'"),
        ("convert_annoset --anno_type=detection img/ list.txt db", "pass their labels with --label_map_file"),
        ("compute_image_mean absent_db", "LMDB 'absent_db' does not exist"),
        ("extract_features w n a,b one 1 lmdb", "2 blobs but 1 databases; name one for each blob"),
        ("upgrade_net_proto_text absent new", "absent: no such net"),
        ("convert_cifar_data img out", "'img/data_batch_1.bin' cannot be read"),
        ("convert_imagset", "unknown command 'convert_imagset'; did you mean 'convert_imageset'"),
    ],
)
def test_mistakes(arguments: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert message in error_of(capsys, *arguments.split())


# -- the other tools -------------------------------------------------------------------------------------


def test_the_mean_in_caffes_lines(capsys: pytest.CaptureFixture[str]):
    assert main(["convert_imageset", "img", "list.txt", "db"]) == 0
    assert main(["compute_image_mean", "-backend=lmdb", "db", "mean.binaryproto"]) == 0
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    means = [f"mean_value channel [{c}]: {IMAGES[..., c].mean():.6g}" for c in range(3)]
    assert lines[-5:] == ["Write to mean.binaryproto", "Number of channels: 3", *means]


NET = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "db" batch_size: 2 backend: LMDB } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }
layer { name: "relu" type: "ReLU" bottom: "ip" top: "relu" }
layer { name: "drop" type: "Dropout" bottom: "relu" top: "drop" }
"""


def test_features(capsys: pytest.CaptureFixture[str]):
    assert main(["convert_imageset", "img", "list.txt", "db"]) == 0
    Path("net.prototxt").write_text(NET)
    write_weights("net.caffemodel")
    arguments = ["net.caffemodel", "net.prototxt", "data,ip", "out/data_lmdb,out/ip_lmdb", "3", "lmdb", "CPU"]
    assert main(["extract_features", *arguments]) == 0
    assert capsys.readouterr().out.endswith("out/data_lmdb: 6 records of 'data'\nout/ip_lmdb: 6 records of 'ip'\n")
    images = IMAGES.transpose(0, 3, 1, 2).astype(np.float32)
    for number, datum in enumerate(datums("out/data_lmdb")):
        assert datum == Datum(channels=3, height=6, width=8, float_data=images[number % 4].ravel())
    features = [one.SerializeToString() for one in datums("out/ip_lmdb")]
    sums = images.sum((1, 2, 3))
    for number, feature in enumerate(map(Datum.FromString, features)):
        assert (feature.channels, feature.height, feature.width) == (3, 1, 1)
        np.testing.assert_allclose(feature.float_data, sums[number % 4] * np.arange(3) / 100 + 1, rtol=1e-5)
    with lmdb.open("out/ip_lmdb", readonly=True, lock=False) as environment, environment.begin() as transaction:
        assert next(iter(transaction.cursor().iternext(values=False))) == b"0000000000"  # ten digits
    assert "the net has no blob 'fc7'" in error_of(
        capsys, "extract_features", "net.caffemodel", "net.prototxt", "fc7", "db7", "1", "lmdb"
    )
    assert not Path("db7").exists()


def write_weights(path: str) -> None:
    """Row n of the weights is n / 100, all biases are 1."""
    from caffepy.formats.proto.caffe_pb2 import NetParameter

    weights = NetParameter()
    layer = weights.layer.add(name="ip", type="InnerProduct")
    layer.blobs.add(data=np.repeat(np.arange(3) / 100, 144)).shape.dim.extend((3, 144))
    layer.blobs.add(data=[1.0] * 3).shape.dim.append(3)
    Path(path).write_bytes(weights.SerializeToString())


def test_a_label_map_and_sizes(capsys: pytest.CaptureFixture[str]):
    Path("map.txt").write_text("cat\ndog\n")
    assert main(["create_label_map", "--include_background=true", "--delimiter= ", "map.txt", "map.prototxt"]) == 0
    assert main(["get_image_size", "img/", "list.txt", "sizes.txt"]) == 0
    assert capsys.readouterr().out == "map.prototxt: 3 classes\nsizes.txt: 4 images\n"
    assert Path("sizes.txt").read_text().splitlines()[0] == "0 6 8"


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("upgrade_net_proto_text", 'input: "x" input_dim: 1 input_dim: 1 input_dim: 1 input_dim: 1'),
        ("upgrade_solver_proto_text", 'net: "n" solver_type: SGD'),
    ],
)
def test_upgrades(tool: str, text: str, capsys: pytest.CaptureFixture[str]):
    Path("old").write_text(text)
    assert main([tool, "old", "new"]) == main([tool, "new", "newer"]) == 0
    assert capsys.readouterr().out == "new: upgraded\nnewer: already in the current format\n"


# -- programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expanded"),
    [
        ("train_net s.prototxt", "train --solver s.prototxt"),
        ("train_net s.prototxt a.solverstate", "train --solver s.prototxt --snapshot a.solverstate"),
        ("finetune_net s.prototxt a.caffemodel --gpu 0", "train --solver s.prototxt --weights a.caffemodel --gpu 0"),
        ("finetune_net --solver s.prototxt", "train --solver s.prototxt"),
        (
            "test_net n.prototxt a.caffemodel 7 GPU 1",
            "test --model n.prototxt --weights a.caffemodel --iterations 7 --gpu 1",
        ),
        ("net_speed_benchmark n.prototxt 5 CPU", "time --model n.prototxt --iterations 5 --cpu"),
        ("net_speed_benchmark n.prototxt 5 GPU", "time --model n.prototxt --iterations 5 --gpu 0"),
        ("train_net a b c", "train --solver a --snapshot b c"),
        ("train --solver a", "train --solver a"),
    ],
)
def test_programs_that_caffe_replaced(words: str, expanded: str):
    assert expand(words.split()) == expanded.split()


def test_every_tool_is_a_program_too():
    """An sdist has copies in the place of the links."""
    names = {path.stem for path in PROGRAMS.glob("*.py")} - {"by_name"}
    assert {*GROUPS["data sets"], *GROUPS["old files"], *GROUPS["predictions"], *ALIASES, "device_query"} <= names
    assert names <= {*COMMANDS, *ALIASES}
    assert {path.read_text() for path in PROGRAMS.glob("*.py")} == {(PROGRAMS / "by_name.py").read_text()}


def test_a_program_runs():
    command = [sys.executable, PROGRAMS / "convert_imageset.py", "-encoded", "img/", "list.txt", "db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "db: 4 images\n"), done.stderr
    assert [one.data for one in datums("db")] == [Path(f"img/{n}.png").read_bytes() for n in range(4)]


# -- signals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_end_leaves_no_part_of_a_database(
    number: signal.Signals, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_records, "decode_image", _after(number, image_records.decode_image))
    before = signal.signal(number, signal.SIG_DFL)
    try:
        said = error_of(capsys, "convert_imageset", "img", "list.txt", "db", status=status)
        after = signal.getsignal(number)
    finally:
        signal.signal(number, before)
    assert said == f"ended by {number.name}" and after is signal.SIG_DFL
    assert sorted(os.listdir()) == ["img", "list.txt"]


def _after(number: signal.Signals, call: Callable[..., object]) -> Callable[..., object]:
    signals = iter([number])  # one: a thread that goes on decoding would send others when the handler is gone

    def called(*values: object, **keywords: object) -> object:
        for each in signals:
            os.kill(os.getpid(), each)
        return call(*values, **keywords)

    return called

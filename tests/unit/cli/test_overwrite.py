"""No command replaces an input, or a file that exists, unless it is told to (contract 6 of the design)."""

from __future__ import annotations

import os
import shutil
import struct
from argparse import Action
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
from onnx_nets import net_of

from caffepy.cli.main import COMMANDS, WRITERS, build_parser, command_class, main
from caffepy.cli.options import Commands
from caffepy.formats.caffemodel import write_caffemodel

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } }
  transform_param { scale: 0.00390625 } }
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 3 } }
"""
SSD = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } } }
layer { name: "loc" type: "InnerProduct" bottom: "data" top: "loc" inner_product_param { num_output: 4 } }
layer { name: "conf" type: "InnerProduct" bottom: "data" top: "conf" inner_product_param { num_output: 2 } }
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { global_pooling: true } }
layer { name: "prior" type: "PriorBox" bottom: "pool" bottom: "data" top: "prior" prior_box_param { min_size: 2 } }
layer { name: "found" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "found"
  detection_output_param { num_classes: 2 nms_param { nms_threshold: 0.5 } } }
"""
TRAIN = """
layer { name: "data" type: "ImageData" top: "data" top: "label"
  image_data_param { source: "list.txt" root_folder: "photos/" batch_size: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 3 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "train.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 1 snapshot_prefix: "own" solver_mode: CPU
"""
LOG = """\
I0101 00:00:00.000000 1 solver.cpp:1] Iteration 0, loss = 1
I0101 00:00:00.000000 1 sgd_solver.cpp:1] Iteration 0, lr = 0.1
I0101 00:00:01.000000 1 solver.cpp:1] Iteration 1, loss = 0.5
I0101 00:00:01.000000 1 sgd_solver.cpp:1] Iteration 1, lr = 0.1
"""
PLAN = "plan --solver solver.prototxt --cpu --shape 3,4,4 --forward-ms 1 --backward-ms 2"
WORK = b"somebody's work"


@dataclass(frozen=True)
class Case:
    """A command line and the files that it writes.

    Args:
        words: the command line.
        outputs: the files; or, where `before` makes them, folders.
        before: a command line that makes the outputs beforehand; "": they are files of the user's.
    """

    words: str
    outputs: tuple[str, ...]
    before: str = ""


def database(words: str, *outputs: str, before: str = "") -> Case:
    return Case(words, outputs, before or words)


ASKS = {
    "classify.output": Case("classify photos --model net.prototxt --output found.csv", ("found.csv",)),
    "classify.paths": Case("classify photos found.npy --model net.prototxt", ("found.npy",)),
    "convert_annoset.db_name": database("convert_annoset photos/ list.txt db", "db"),
    "convert_cifar_data.output_folder": Case(
        "convert_cifar_data cifar . lmdb", ("mean.binaryproto", "cifar10_train_lmdb"), "convert_cifar_data cifar . lmdb"
    ),
    "convert_imageset.db_name": database("convert_imageset photos/ list.txt db", "db"),
    "convert_mnist_data.db_name": database("convert_mnist_data images labels db", "db"),
    "convert_mnist_siamese_data.db_name": database("convert_mnist_siamese_data --backend lmdb images labels db", "db"),
    "create_annoset.db_name": database("create_annoset photos/ list.txt sets/db links", "sets/db"),
    "data.to": database(
        "data mnist --from digits --to .",
        "mnist_train_lmdb",
        before="convert_mnist_data labels0 labels mnist_train_lmdb",
    ),
    "deploy.named_output": Case("deploy train.prototxt --output new.prototxt", ("new.prototxt",)),
    "deploy.output": Case("deploy train.prototxt new.prototxt", ("new.prototxt",)),
    "detect.draw": Case("detect photos/0.png --model ssd.prototxt --draw found.png", ("found.png",)),
    "detect.draw folder": Case("detect photos --model ssd.prototxt --draw drawn", ("drawn/0.png", "drawn/1.png")),
    "detect.output": Case("detect photos --model ssd.prototxt --output found.csv --format text", ("found.csv",)),
    "detect.paths": Case("detect photos found.json --model ssd.prototxt", ("found.json",)),
    "detect.paths windows": Case(
        "detect windows.csv scores.h5 --crop-mode list --context-pad 0 --model net.prototxt", ("scores.h5",)
    ),
    "export.output": Case("export net.prototxt net.caffemodel new.onnx --no-check", ("new.onnx",)),
    "export.output torch": Case("export net.prototxt net.caffemodel new.py --no-check", ("new.py", "new.safetensors")),
    "export.output weights": Case("export net.prototxt net.caffemodel new.safetensors", ("new.safetensors",)),
    "extract_features.databases": database("extract_features net.caffemodel train.prototxt fc db 1 lmdb", "db"),
    "import.output": Case("import net.onnx --output new --no-check", ("new.prototxt", "new.caffemodel")),
    "layer-stub.output": Case("layer-stub Own1", ("own1.py", "test_own1.py")),
    "models.to": Case("models copy lenet --to nets", ("nets/lenet/solver.prototxt",)),
    "new.to": Case(
        "new lenet --data set --to new",
        ("new/solver.prototxt", "new/train_val.prototxt", "new/deploy.prototxt", "new/labels.txt", "new/train.txt"),
    ),
    "plan.csv": Case(f"{PLAN} --csv new.csv", ("new.csv",)),
    "plan.plot": Case(f"{PLAN} --plot new.png", ("new.png",)),
    "plan.save_profile": Case(f"{PLAN} --save-profile new.json", ("new.json",)),
    "quantize.output": Case("quantize net.prototxt net.caffemodel new.onnx --images photos", ("new.onnx",)),
    "shims.folder": Case("shims caffe", ("caffe/build/tools/caffe",)),
    "train.lr_find": Case("train --solver solver.prototxt --lr-find new.png --max-iter 6", ("new.png",)),
    "train.trace": Case("train --solver solver.prototxt --trace new.json", ("new.json",)),
}
"""Outputs for which --overwrite is asked, by command and argument."""
CAFFES = {
    "compute_image_mean.output_file": Case("compute_image_mean images_lmdb mean.binaryproto", ("mean.binaryproto",)),
    "create_label_map.outfile": Case("create_label_map names.txt new.prototxt", ("new.prototxt",)),
    "draw_net.picture": Case("draw_net net.prototxt new.dot", ("new.dot",)),
    "get_image_size.outfile": Case("get_image_size photos/ list.txt sizes.txt", ("sizes.txt",)),
    "parse_log.folder": Case("parse_log train.log .", ("train.log.train",)),
    "plot_training_log.words": Case("plot_training_log new.png train.log", ("new.png",)),
    "upgrade_net_proto_binary.new": Case("upgrade_net_proto_binary net.caffemodel new.caffemodel", ("new.caffemodel",)),
    "upgrade_net_proto_text.new": Case("upgrade_net_proto_text net.prototxt new.prototxt", ("new.prototxt",)),
    "upgrade_solver_proto_text.new": Case("upgrade_solver_proto_text solver.prototxt new.prototxt", ("new.prototxt",)),
}
"""Outputs of Caffe's tools, which replace a file as in Caffe."""
OWN_RULES = {
    "create_annoset.exampledir": "a link, which SSD's script replaces; never a file",
    "train.loggers": "rows of an earlier training go to NAME.bak; another file is refused",
}
"""Outputs with a rule of their own, which other tests hold."""
WRITE_NOTHING = "bench completion device_query launch net snapshot test test_detection time warm-up"
"""Commands that write to stdout and caches alone. A net's own layers, such as HDF5Output, write as in Caffe."""
READ = (
    "calibrate calibrate_network classes data files from_log hostfile image_file images input_db input_folder "
    "label_file label_map label_map_file labels like listfile log mapfile mean_file model name_id_file net "
    "old plugins profile proto rootfolder snapshot solver source survey weights"
)
"""Arguments that name files or folders which are read."""
OTHER = (
    "blobs delimiter encode_type export ext hosts keep_best master_addr mpirun names outputs param program stage type"
)
"""Arguments that are texts and name no files."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small inputs of all commands."""
    folder = tmp_path_factory.mktemp("material")
    for name, text in (
        ("net.prototxt", NET),
        ("ssd.prototxt", SSD),
        ("train.prototxt", TRAIN),
        ("solver.prototxt", SOLVER),
        ("train.log", LOG),
        ("list.txt", "0.png 0\n1.png 1\n"),
        ("names.txt", "cat 1\ndog 2\n"),
        ("windows.csv", "filename,xmin,ymin,xmax,ymax\nphotos/0.png,0,0,4,4\n"),
    ):
        (folder / name).write_text(text)
    image = np.random.default_rng(1).integers(0, 256, (4, 4, 3), np.uint8)
    for path in ("photos/0.png", "photos/1.png", *(f"set/{name}/{n}.png" for name in ("cat", "dog") for n in range(3))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / path), image)
    pixels = image.reshape(2, 24)[:, :16].tobytes()
    (folder / "digits").mkdir()
    for start, name in (("train", "train"), ("t10k", "t10k")):
        (folder / f"digits/{start}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 2, 4, 4) + pixels)
        (folder / f"digits/{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 2) + bytes((1, 2)))
    shutil.copy(folder / "digits/train-images-idx3-ubyte", folder / "images")
    shutil.copy(folder / "digits/train-labels-idx1-ubyte", folder / "labels")
    (folder / "labels0").write_bytes(struct.pack(">4I", 2051, 2, 4, 4) + bytes(32))
    (folder / "cifar").mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        (folder / "cifar" / name).write_bytes(bytes(3073))
    net = net_of(NET)
    write_caffemodel(folder / "net.caffemodel", net.name, net.layers)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["convert_imageset", "photos/", "list.txt", "images_lmdb"]) == 0
        assert main(["export", "net.prototxt", "net.caffemodel", "net.onnx", "--no-check"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def here(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of these inputs, which is the working directory."""
    shutil.copytree(material, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def contents(*names: str) -> dict[str, bytes]:
    """The bytes of files and of all files in folders."""
    files = [file for name in names for file in ([Path(name)] if Path(name).is_file() else Path(name).rglob("*"))]
    return {str(file): file.read_bytes() for file in files if file.is_file() and file.name != "lock.mdb"}


def test_each_argument_that_names_a_file_is_an_output_with_a_case_or_is_read():
    """A new command or option that writes needs a case above."""
    (commands,) = [action for action in build_parser()._actions if isinstance(action, Commands)]
    assert set(commands.choices) == set(COMMANDS)
    assert set(COMMANDS) - {name.split(".")[0] for name in (*ASKS, *CAFFES)} == set(WRITE_NOTHING.split())
    known = {name.split()[0] for name in (*ASKS, *CAFFES, *OWN_RULES)}
    found = {
        f"{command}.{action.dest}"
        for command, parser in commands.choices.items()
        for action in parser._actions
        if may_name_a_file(action)
        and (f"{command}.{action.dest}" in known or action.dest not in f"{READ} {OTHER}".split())
    }
    assert found == known


def test_each_command_that_can_overwrite_ends_in_order_after_a_signal():
    """`train` handles signals itself."""
    can_overwrite = {name for name in COMMANDS if hasattr(command_class(name), "overwrite")}
    assert can_overwrite >= {"export", "new", "train"}
    assert can_overwrite - WRITERS == {"train"}


def may_name_a_file(action: Action) -> bool:
    """Whether an argument is a path or any text."""
    kinds = ("Path", "file_name", "file_list", "snapshot_name", "plugin_name", "logger_list", "name_list", "str")
    text = action.type is None or getattr(action.type, "__name__", "") in kinds
    return action.nargs != 0 and action.choices is None and text


@pytest.mark.parametrize("name", ASKS)
def test_a_file_that_exists_is_replaced_only_with_overwrite(name: str, capsys: pytest.CaptureFixture[str]):
    case = ASKS[name]
    if case.before:
        assert main(case.before.split()) == 0
    for output in () if case.before else case.outputs:
        for other in case.outputs:
            shutil.rmtree(other, ignore_errors=True)
            Path(other).unlink(missing_ok=True)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_bytes(WORK)
        kept = contents(".")
        assert main(case.words.split()) == 2
        said = capsys.readouterr().err
        assert Path(output).name in said
        assert "--overwrite" in said
        assert contents(".") == kept
    kept = contents(".")
    assert main(case.words.split()) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert contents(".") == kept
    assert main([*case.words.split(), "--overwrite"]) == 0, capsys.readouterr().err
    for output in case.outputs:
        assert Path(output).exists()
        assert WORK not in contents(output).values()


@pytest.mark.parametrize("name", CAFFES)
def test_a_tool_of_caffe_replaces_its_output(name: str):
    case = CAFFES[name]
    for output in case.outputs:
        Path(output).write_bytes(WORK)
    assert main(case.words.split()) == 0
    assert WORK not in contents(*case.outputs).values()


@pytest.mark.parametrize(
    "words",
    [
        "classify photos list.txt --output list.txt --format csv --model net.prototxt",
        "classify photos net.npy --output net.caffemodel --weights net.caffemodel --format csv --model net.prototxt",
        "compute_image_mean images_lmdb images_lmdb/data.mdb",
        "create_label_map names.txt names.txt",
        "deploy train.prototxt ./train.prototxt",
        "deploy train.prototxt link.prototxt",
        "deploy train.prototxt hard.prototxt",
        "deploy net.prototxt --like train.prototxt --output train.prototxt",
        "detect photos --model ssd.prototxt --draw photos",
        "detect photos/0.png --model ssd.prototxt --draw photos/0.png",
        "detect windows.csv --output windows.csv --crop-mode list --model net.prototxt",
        "draw_net link.dot link.dot",
        "export net.prototxt net.caffemodel net.caffemodel",
        "export net.prototxt net.caffemodel net.prototxt --to onnx",
        "get_image_size photos/ list.txt list.txt",
        "import net.onnx",
        "plan --profile train.log --save-profile train.log",
        "plot_training_log train.png train.png",
        "quantize net.prototxt net.caffemodel net.caffemodel --images photos",
        "train --solver solver.prototxt --trace solver.prototxt",
        "train --solver solver.prototxt --trace net.caffemodel",
    ],
)
def test_an_input_stays(words: str, capsys: pytest.CaptureFixture[str]):
    Path("link.prototxt").symlink_to("train.prototxt")
    os.link("train.prototxt", "hard.prototxt")
    os.link("net.prototxt", "link.dot")
    shutil.copy("train.log", "train.png")
    np.save("net.npy", np.zeros((4, 4, 3), np.float32))
    kept = contents(".")
    assert main(words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the output is also an input" in said or "the output exists" in said
    assert contents(".") == kept


def test_the_tools_that_upgrade_work_in_place():
    for words in (
        "upgrade_net_proto_text train.prototxt train.prototxt",
        "upgrade_net_proto_binary net.caffemodel net.caffemodel",
        "upgrade_solver_proto_text solver.prototxt solver.prototxt",
    ):
        assert main(words.split()) == 0


def test_a_device_is_not_replaced_by_a_file(capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe.prototxt")
    assert main(["deploy", "train.prototxt", "pipe.prototxt", "--overwrite"]) == 1
    assert "pipe.prototxt: cannot be written: it is a FIFO, not a regular file" in capsys.readouterr().err
    assert Path("pipe.prototxt").is_fifo()


def test_the_saved_solver_does_not_replace_the_users(capsys: pytest.CaptureFixture[str]):
    """Caffe's examples have `lenet_solver.prototxt` with `snapshot_prefix: "lenet"`."""
    os.rename("solver.prototxt", "own_solver.prototxt")
    words = ["train", "--solver", "own_solver.prototxt", "--set", "base_lr=0.02"]
    assert main(words) == 0
    assert "own_solver.prototxt: the output is also an input" in capsys.readouterr().err
    assert Path("own_solver.prototxt").read_text() == SOLVER
    os.rename("own_solver.prototxt", "solver.prototxt")
    words[2] = "solver.prototxt"
    for rate in ("0.03", "0.04"):  # the second one replaces what the first one wrote
        assert main([*words, "--set", f"base_lr={rate}"]) == 0
        assert f"base_lr: {rate}" in Path("own_solver.prototxt").read_text()
    Path("own_solver.prototxt").write_bytes(WORK)
    assert main(words) == 0
    assert "own_solver.prototxt: the output exists" in capsys.readouterr().err
    assert Path("own_solver.prototxt").read_bytes() == WORK
    assert main([*words, "--overwrite"]) == 0
    assert "base_lr: 0.02" in Path("own_solver.prototxt").read_text()


def test_a_later_trace_replaces_an_earlier_one():
    for _ in range(2):
        assert main(ASKS["train.trace"].words.split()) == 0


def test_originals_of_an_earlier_call_stay():
    """`caffepy shims --overwrite` in a Caffe that was built again keeps both builds."""
    tool = Path("caffe/build/tools/caffe")
    tool.parent.mkdir(parents=True)
    for build in (b"first build", b"second build"):
        tool.write_bytes(build)
        assert main(["shims", "caffe", "--overwrite"]) == 0
    assert [Path(f"{tool}.orig{number}").read_bytes() for number in ("", "2")] == [b"first build", b"second build"]


def test_force_is_the_earlier_name_of_overwrite():
    for option in ((), ("--force",), ("-force=true",)):
        assert main(["convert_imageset", "photos/", "list.txt", "db", *option]) == 0


def test_deploy_takes_one_output(capsys: pytest.CaptureFixture[str]):
    assert main(["deploy", "train.prototxt", "new.prototxt", "--output", "other.prototxt"]) == 2
    assert "new.prototxt and --output other.prototxt are both the output" in capsys.readouterr().err

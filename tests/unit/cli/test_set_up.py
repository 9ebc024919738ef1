"""The program `caffe` and `caffepy shims`: what scripts and programs that call Caffe see."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import lmdb
import pytest
from training import CLASSIFIER

import caffepy
from caffepy.cli.caffe import take_glog_flags
from caffepy.cli.main import main
from caffepy.formats.proto.caffe_pb2 import Datum
from caffepy.version import CAFFE_VERSION

ROOT = Path(caffepy.__file__).parents[1]
SOLVER = """
net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 4 display: 2 snapshot_prefix: "tiny" solver_mode: CPU
test_iter: 1 test_interval: 2 random_seed: 1
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of the shims; the working directory is another one."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main(["shims", str(tmp_path / "root")]) == 0
    assert str(tmp_path / "root" / "python") in capsys.readouterr().out
    return tmp_path / "root"


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def test_digits_finds_a_caffe_and_reads_its_log(root: Path) -> None:
    """What DIGITS' `config/caffe.py` and `model/tasks/caffe_train.py` do."""
    executable = root / "build" / "tools" / "caffe"
    assert os.access(executable, os.X_OK)
    shown = run(executable, "-version")
    assert (shown.returncode, shown.stdout) == (0, f"caffe version {CAFFE_VERSION}\n")
    version = run(sys.executable, "-c", "import caffe; print(caffe.__version__)", PYTHONPATH=str(root / "python"))
    # DIGITS takes versions from 0.11 to 0.98 for NVIDIA's, where batch_size is that of all GPUs.
    assert version.stdout == f"{CAFFE_VERSION}\n" and 11 <= int(CAFFE_VERSION.split(".")[1]) < 99, version.stderr
    Path("net.prototxt").write_text(CLASSIFIER)
    Path("solver.prototxt").write_text(SOLVER)
    done = run(root / "build" / "tools" / "caffe.bin", "train", "--solver=solver.prototxt")
    assert done.returncode == 0, done.stderr
    lines = [re.match(r"(\w)(\d{4} \S{8}).*]\s+(\S.*)$", line) for line in done.stderr.splitlines()]
    assert all(lines), done.stderr
    log = "\n".join(line[3] for line in lines if line is not None)
    assert re.search(r"(?m)^Iteration 2, lr = 0\.01$", log)
    assert re.search(r"(?m)^Train net output #0: loss = \d", log)
    assert re.search(r"(?m)^Test net output #0: loss = \d", log)
    assert re.search(r"(?m)^Snapshotting to .*tiny_iter_4.caffemodel\s*\nSnapshotting solver state", log)


def test_errors_are_fatal_lines_and_abort_the_process(root: Path) -> None:
    caffe = root / "build" / "tools" / "caffe"
    absent = run(caffe, "train", "-solver", "absent.prototxt")
    assert absent.returncode == -signal.SIGABRT
    assert re.fullmatch(r"F\d{4} .*\] absent\.prototxt: no such solver.*", absent.stderr.splitlines()[-1])
    unknown = run(caffe, "trian")
    assert unknown.returncode == -signal.SIGABRT
    assert [line[0] for line in unknown.stderr.splitlines()] == ["E"] * 6 + ["F"]
    assert unknown.stderr.rstrip().endswith("Unknown action: trian")
    option = run(caffe, "train", "--slover=x")
    assert option.returncode == 1 and re.match(r"E\d{4} .*--slover", option.stderr)
    folder = root / "logs"
    folder.mkdir()
    tool = run(root / "build" / "tools" / "convert_imageset", f"-log_dir={folder}", "/", "absent.txt", "db")
    assert tool.returncode == -signal.SIGABRT and not tool.stdout
    assert "absent.txt" in (folder / "convert_imageset.FATAL").read_text()


def test_flags_of_glog_become_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("minloglevel", "log_dir", "logtostderr", "v"):
        monkeypatch.setenv(f"GLOG_{name}", "before")
    words = "-logtostderr train --minloglevel 2 -solver x --log_dir=/tmp -v=1 -solver_log_dir=y"
    assert take_glog_flags(words.split()) == ["train", "-solver", "x", "-solver_log_dir=y"]
    found = [os.environ[f"GLOG_{name}"] for name in ("minloglevel", "log_dir", "logtostderr", "v")]
    assert found == ["2", "/tmp", "1", "1"]


def test_files_of_a_caffe_are_replaced_only_with_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "python" / "caffe" / "__init__.py"
    own.parent.mkdir(parents=True)
    own.write_text("from .pycaffe import Net")
    assert main(["shims", str(tmp_path)]) == 2
    assert "python/caffe/__init__.py" in capsys.readouterr().err
    assert not (tmp_path / "build").exists(), "nothing is written"
    assert main(["shims", str(tmp_path), "--overwrite"]) == 0
    assert own.with_name("__init__.py.orig").read_text() == "from .pycaffe import Net"
    before = own.read_text()
    assert main(["shims", str(tmp_path)]) == 0, "caffepy's own files are replaced without it"
    assert own.read_text() == before != "from .pycaffe import Net"


def test_scripts_get_a_forks_modules_behind_caffepys(root: Path) -> None:
    folder = root / "python" / "caffe"
    (folder / "model_libs.py").write_text(
        "from caffe import layers as L\n"
        "def UnpackVariable(var, num):\n  assert len > 0\n"
        "def Pair(net, bottom):\n  return [L.ReLU(net[bottom]) for i in xrange(UnpackVariable(2, 1)[0])]\n"
    )
    (folder / "io.py").write_text("raise ImportError('caffepy has this module')")
    (folder / "tools").mkdir()
    (folder / "tools" / "__init__.py").write_text("")
    (folder / "tools" / "own.py").write_text("import caffe; NET = caffe.Net")
    Path("script.py").write_text(
        "import caffe, caffe.io\nassert caffe.model_libs.Pair\n"
        "from caffe.model_libs import *\nfrom caffe.tools import own\n"
        "net = caffe.NetSpec()\nnet.data = caffe.layers.Input()\n"
        "print(len(Pair(net, 'data')), own.NET is caffe.Net, sum(xrange(3)), caffe.Net.__module__)\n"
    )
    done = run(sys.executable, "script.py", PYTHONPATH=f"{root / 'python'}{os.pathsep}{ROOT}")
    assert (done.stdout, done.stderr) == ("2 True 3 caffepy.pycaffe.net\n", "")


def test_create_annoset_makes_a_database_and_a_link(root: Path) -> None:
    for name in ("a.xml", "b.xml"):
        Path(name).write_text("<annotation><size><width>9</width><height>9</height></size></annotation>")
    import cv2
    import numpy as np

    for name in ("a.png", "b.png"):
        cv2.imwrite(name, np.zeros((9, 9, 3), np.uint8))
    Path("list.txt").write_text("a.png a.xml\nb.png b.xml\n")
    Path("map.prototxt").write_text('item { name: "none_of_the_above" label: 0 display_name: "background" }')
    words = ["--anno-type=detection", "--label-map-file=map.prototxt", "--min-dim=0", "--check-label", "--encoded"]
    command = [
        sys.executable,
        root / "scripts" / "create_annoset.py",
        *words,
        ".",
        "list.txt",
        "made/voc_lmdb",
        "links",
    ]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert Path("links/voc_lmdb").resolve() == Path("made/voc_lmdb").resolve()
    assert run(*command).returncode == -signal.SIGABRT, "it exists"
    assert run(*command, "--redo").returncode == 0
    with lmdb.open("links/voc_lmdb", readonly=True) as database:
        assert database.stat()["entries"] == 2


def test_pairs_of_digits_have_the_label_of_their_equality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = files("caffepy.data") / "mnist_subset"
    names = [str(folder / f"t10k-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")]
    target = tmp_path / "pairs"
    assert main(["convert_mnist_siamese_data", *names, str(target), "--backend=lmdb"]) == 0
    images, labels = (gzip.decompress(Path(name).read_bytes()) for name in names)
    label_of = {images[16 + 784 * i : 16 + 784 * (i + 1)]: labels[8 + i] for i in range(len(labels) - 8)}
    with lmdb.open(str(target), readonly=True) as database, database.begin() as transaction:
        datums = [Datum.FromString(value) for _, value in transaction.cursor()]
        assert transaction.get(b"00000000") is not None
    assert f"{len(datums)} pairs" in capsys.readouterr().out
    assert len(datums) == len(labels) - 8
    for datum in datums:
        assert (datum.channels, datum.height, datum.width) == (2, 28, 28)
        first, second = datum.data[:784], datum.data[784:]
        assert datum.label == (label_of[first] == label_of[second])
    assert 0.05 < sum(datum.label for datum in datums) / len(datums) < 0.2


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_completion_script_has_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "convert_imageset" in script
    assert "solver" in script
    if shell == "bash":
        words = "COMP_WORDS=(caffepy train --sigint-eff) COMP_CWORD=2; _shtab_caffepy; echo ${COMPREPLY[@]}"
        done = run("bash", "-c", f"{script}\n{words}")
        assert done.stdout == "--sigint-effect\n", done.stderr

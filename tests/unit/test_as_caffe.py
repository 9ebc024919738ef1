"""`import caffe` by caffepy.as_caffe, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caffepy import as_caffe
from caffepy.formats.proto.caffe_pb2 import NetParameter

ROOT = Path(as_caffe.__file__).parents[1]

SAME = """
import sys
import caffe, caffe.blob, caffe.net, caffe._caffe, caffe.pycaffe
import caffe.proto.caffe_pb2 as direct
from caffe.proto import caffe_pb2
from caffe._caffe import layer_type_list
import caffepy.formats.proto.caffe_pb2, caffepy.pycaffe.net
assert direct is caffe_pb2 is caffe.proto.caffe_pb2 is caffepy.formats.proto.caffe_pb2
assert caffe.net is caffepy.pycaffe.net and caffe.net.Net is caffe.Net
assert caffe.__spec__.name == "caffepy.pycaffe" and caffepy.pycaffe.net.__spec__.name == "caffepy.pycaffe.net"
assert caffe.TRAIN == 0 and caffe.TEST == 1 and caffe.__version__ and "Net" in dir(caffe)
try:
    import caffe.nothing
except ImportError as error:
    print("absent:", error)
try:
    caffe.Nett
except AttributeError as error:
    print("absent:", error)
caffe.log("shown")
print(sys.argv[1:], __name__)
"""


def python(*arguments: str, cwd: Path, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(ROOT), *path.split()])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("way", [("script.py",), ("-m", "script"), ("-c", SAME)])
def test_scripts_and_modules(tmp_path: Path, way: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(SAME)
    done = python("-m", "caffepy.as_caffe", *way, "a", "--b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "absent: No module named 'caffe.nothing'",
        "absent: module 'caffe' (caffepy.pycaffe) has no attribute 'Nett'",
        "['a', '--b'] __main__",
    ]
    assert done.stderr.startswith("I") and done.stderr.rstrip().endswith("] shown")
    quiet = python("-m", "caffepy.as_caffe", *way, cwd=tmp_path, GLOG_minloglevel="2")
    assert quiet.returncode == 0 and not quiet.stderr


def test_a_notebook_imports_it_first(tmp_path: Path) -> None:
    done = python("-c", "import caffepy.as_caffe, caffe; print(caffe.Net.__module__)", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("caffepy.pycaffe.net\n", "")
    without = python("-c", "import caffepy, caffe", cwd=tmp_path)
    assert "No module named 'caffe'" in without.stderr


def test_modules_beside_a_script_are_found_and_sources_of_caffe_are_no_caffe(tmp_path: Path) -> None:
    (tmp_path / "caffe").mkdir()
    (tmp_path / "caffe" / "__init__.py").write_text("from ._caffe import Net")
    (tmp_path / "beside.py").write_text("import caffe; print(caffe.Net.__module__)")
    (tmp_path / "script.py").write_text("import beside")
    done = python("-m", "caffepy.as_caffe", str(tmp_path / "script.py"), cwd=tmp_path.parent)
    assert (done.stdout, done.stderr) == ("caffepy.pycaffe.net\n", "")


def test_an_installed_caffe_comes_first_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "caffe").mkdir()
    (tmp_path / "caffe" / "__init__.py").write_text("name = 'real'")
    (tmp_path / "caffe" / "_caffe.so").write_bytes(b"")
    program = "import caffe; print(getattr(caffe, 'name', 'ours'))"
    (tmp_path / "script.py").write_text(program)
    for arguments, printed in [(["script.py"], "real"), (["--force", "script.py"], "ours")]:
        done = python("-m", "caffepy.as_caffe", *arguments, cwd=tmp_path)
        assert done.stdout == f"{printed}\n"
        assert (f"gives the Caffe in {tmp_path}/caffe, not caffepy's" in done.stderr) is (printed == "real")
    loaded = "import caffe, caffepy.as_caffe as a; a.install(); a.install(force=True)\n" + program
    done = python("-c", loaded, cwd=tmp_path)
    assert done.stdout == "ours\n" and done.stderr.count("not caffepy's") == 2


def test_a_single_file_named_caffe_is_one(tmp_path: Path) -> None:
    (tmp_path / "caffe.py").write_text("name = 'file'")
    done = python("-c", "import caffepy.as_caffe, caffe; print(caffe.name)", cwd=tmp_path)
    assert done.stdout == "file\n" and "caffe.py, not caffepy's" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 2), (["-m"], 2), (["-c"], 2), (["--help"], 0), (["absent.py"], 2)]
)
def test_usage(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_caffe.main(arguments) == status
    shown = capsys.readouterr().err
    assert "usage: python -m caffepy.as_caffe [--force] (script.py | -m module)" in shown
    assert ("there is no script 'absent.py'" in shown) is (arguments == ["absent.py"])


def test_the_command_line_lets_python_layers_import_caffe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import caffe\nclass Mine(caffe.Layer):\n    def setup(self, bottom, top): pass\n"
        "    def reshape(self, bottom, top): top[0].reshape(2)\n"
        "    def forward(self, bottom, top): top[0].data[...] = 4\n"
    )
    (tmp_path / "net.prototxt").write_text(
        "name: 'n' layer { name: 'm' type: 'Python' top: 'm' python_param { module: 'mine' layer: 'Mine' } }"
    )
    (tmp_path / "m.caffemodel").write_bytes(NetParameter(name="n", layer=[{"name": "m"}]).SerializeToString())
    arguments = ["test", "--model", "net.prototxt", "--weights", "m.caffemodel", "--iterations", "1"]
    done = python("-m", "caffepy", *arguments, cwd=tmp_path)
    assert done.returncode == 0 and "m = 4" in done.stderr, done.stderr

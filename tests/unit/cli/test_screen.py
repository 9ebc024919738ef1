"""What `caffepy train` shows on a terminal, and what it writes into the log file."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from training import build_solver

from caffepy.cli.main import main
from caffepy.cli.screen import LogFile, ScreenFormatter, interrupt_notice, live_values
from caffepy.formats.logged_solver import read_logged_solver
from caffepy.utils.glog import ENDS
from caffepy.utils.progress import ProgressBar

NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "target" dummy_data_param {
  shape { dim: [8, 5] } shape { dim: [8, 2] } data_filler { type: "gaussian" } data_filler { type: "uniform" } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "target" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.05 lr_policy: "fixed" max_iter: 6 random_seed: 3 display: 2 snapshot: 3 '


class Terminal(io.StringIO):
    """Keeps what was written when the program closes it."""

    text = ""

    def close(self) -> None:
        self.text = self.getvalue()
        super().close()

    @property
    def lines(self) -> list[str]:
        return [line for line in re.split(r"[\r\n]+", self.text) if line.strip()]


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)
    Path("solver.prototxt").write_text(SOLVER)
    file = Terminal()
    monkeypatch.setattr("caffepy.cli.screen.open_terminal", lambda: file)
    monkeypatch.setenv("COLUMNS", "70")
    return file


def train(*options: str) -> int:
    return main(["train", "--solver", "solver.prototxt", "--cpu", "--threads", "1", *options])


def log_text() -> str:
    (path,) = Path().glob("solver_*.log")
    return path.read_text()


def test_the_start_is_a_summary_and_the_rest_a_file(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--set", "net.layer[ip].inner_product_param.bias_term=false") == 0
    assert capsys.readouterr().err == ""
    before, _, after = terminal.text.partition("Solving small")
    assert len(before.splitlines()) < 14
    for word in ("solver.prototxt", "small: 3 layers, 10 parameters", "8 per device", "bias_term=false"):
        assert word in " ".join(before.split())
    assert max(map(len, before.splitlines())) <= 70
    assert "Iteration 4, lr = 0.05" in after
    log = log_text()
    assert log.startswith("I")
    for word in ("Initializing solver", "Creating training net", "Solving small", "Iteration 4, lr = 0.05"):
        assert word in log
    (path,) = Path().glob("solver_*.log")
    assert read_logged_solver(path)[0].net_param.name == "small"
    assert str(path) in before


def test_an_error_is_shown_as_elsewhere(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--set", "base_lr=x") == 2
    assert capsys.readouterr().err.startswith("caffepy: error: --set base_lr=x: found x")


def test_a_check_leaves_no_log_beside_the_snapshots(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(Path("logs").absolute()))
    Path("logs").mkdir()
    assert train("--check") == 0
    assert "training can begin" in terminal.text
    assert sorted(path.name for path in Path().iterdir()) == ["logs", "net.prototxt", "solver.prototxt"]
    (log,) = Path("logs").iterdir()
    assert str(log) in "".join(terminal.text.split())
    assert "Initializing solver" in log.read_text()


def test_glogs_folder_has_the_log(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("glog").mkdir()
    monkeypatch.setenv("GLOG_log_dir", "glog")
    assert train("--max-iter", "1") == 0
    assert re.search("log +glog\n", terminal.text)
    assert not list(Path().glob("*.log"))
    assert "Initializing solver" in Path("glog/caffe.INFO").read_text()


def test_verbose_shows_the_log_itself(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--verbose", "--max-iter", "1") == 0
    assert "Initializing solver" in capsys.readouterr().err
    assert terminal.getvalue() == ""
    assert not list(Path().glob("*.log"))


def test_loss_and_rate_are_behind_the_bar() -> None:
    file = Terminal()
    with build_solver('base_lr: 0.25 lr_policy: "fixed" max_iter: 4', NET) as solver:
        bar = ProgressBar(lambda: solver.iteration, lambda: 4, status=lambda: live_values(solver), file=file)
        bar.start()
        solver.step(3)
        assert re.fullmatch(r"loss [\d.e-]+, lr 0\.25", live_values(solver))
        bar.show(3)
        bar.close()
    file.close()
    assert re.search(r"3/4 .*loss [\d.e-]+, lr 0\.25", file.lines[-1])


def record(level: int, text: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("caffepy", level, "/a/solver.py", 7, text, None, None)
    made.__dict__.update(extra)
    return made


def test_lines_are_short() -> None:
    form = ScreenFormatter()
    assert re.fullmatch(r"\d\d:\d\d:\d\d Solving", form.format(record(logging.INFO, "Solving")))
    assert form.format(record(logging.WARNING, "look")).endswith(" warning: look")
    assert form.format(record(logging.ERROR, "it broke", **ENDS)) == "caffepy: error: it broke"


def test_an_existing_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    taken = tmp_path / "x.log"
    taken.write_text("of others")
    for path in (taken, tmp_path / "absent" / "x.log", None):
        file = LogFile()
        file.emit(record(logging.INFO, "before"))
        file.open(path)
        file.emit(record(logging.INFO, "behind"))
        file.close()
        assert file.path is not None
        assert [line.rpartition("] ")[2] for line in file.path.read_text().splitlines()] == ["before", "behind"]
    assert taken.read_text() == "of others"


def test_mpirun_is_said_to_end_without_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interrupt_notice() == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert "caffepy launch --nproc-per-node 4" in interrupt_notice()
    monkeypatch.setenv("CAFFEPY_LAUNCH_LINE", "caffepy launch --")
    assert interrupt_notice() == ""

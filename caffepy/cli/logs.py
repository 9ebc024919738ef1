"""`caffepy parse_log` and `plot_training_log`: training logs as CSV and as charts (Caffe's `tools/extra`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from caffepy.cli.options import Command
from caffepy.errors import ConfigError
from caffepy.utils.options import argument, name_list, option, switch, whole


@dataclass(kw_only=True)
class ParseLogCommand(Command):
    """Convert a training log to CSV.

    Write a training log as <log>.train and <log>.test: CSV with the columns NumIters, Seconds, LearningRate and the
    net's outputs. Supported are logs of BVLC's Caffe, NVIDIA's Caffe and caffepy.

      caffepy train --solver solver.prototxt 2>&1 | tee train.log
      caffepy parse_log train.log .
    """

    log: Path = argument("the log", Path, "LOG")
    folder: Path = argument("folder for the tables (default: here)", Path, "FOLDER", default=Path())
    delimiter: str = option("character between columns (default: a comma)", default=",", metavar="C")
    latest: bool = switch("leave out iterations repeated after a restart")

    def run(self) -> int:
        """Write the tables and print their names.

        Raises:
            ConfigError: the delimiter is not one character.
            DataError: the log cannot be read or is not a training log.
            RunError: a table cannot be written.
        """
        from caffepy.logs.read import read_log, write_tables

        delimiter = self.delimiter.replace("\\t", "\t")
        if len(delimiter) != 1 or delimiter in '\r\n"':
            raise ConfigError(f"--delimiter is one character, such as ',' or '\\t', not '{self.delimiter}'")
        log = read_log(self.log)
        chosen = log.latest() if self.latest else log
        for path, rows in zip(
            write_tables(chosen, self.folder, delimiter), filter(None, (chosen.train, chosen.test)), strict=True
        ):
            print(f"{path}: {len(rows)} rows")
        return 0


@dataclass(kw_only=True)
class PlotTrainingLogCommand(Command):
    """Plot training logs.

    Plot training logs in one picture (.png, .svg or .pdf): losses and scores over iterations or seconds.

      caffepy plot_training_log training.png train.log
      caffepy plot_training_log compare.svg first.log second.log --x seconds --outputs accuracy
      caffepy plot_training_log 6 loss.png first.log second.log

    A number before the picture is one of Caffe's chart types:
      0 test accuracy vs. iterations        1 test accuracy vs. seconds
      2 test loss vs. iterations            3 test loss vs. seconds
      4 train learning rate vs. iterations  5 train learning rate vs. seconds
      6 train loss vs. iterations           7 train loss vs. seconds

    Needs matplotlib, which the extra 'plot' installs.
    """

    words: list[str] = argument("chart type, picture and logs", metavar="[TYPE] PICTURE LOG", nargs="+")
    x: str = option("the horizontal axis", default="iterations", choices=("iterations", "seconds"))
    outputs: list[str] = option("outputs to draw, separated by commas", name_list, default=[])
    log_scale: bool = switch("a logarithmic vertical axis for losses")
    latest: bool = switch("leave out iterations repeated after a restart")

    def run(self) -> int:
        """Draw the picture and print its name.

        Raises:
            ConfigError: the picture or logs are missing, the picture is a log, the chart type is unknown, or matplotlib
                is not installed.
            DataError: a log cannot be read, or has nothing to draw.
        """
        from caffepy.logs.plot import plot_logs
        from caffepy.logs.read import read_log
        from caffepy.utils.files import check_not_input

        words = list(self.words)
        chart = None
        if words[0].isascii() and words[0].isdigit():
            chart = whole(words[0])
            if chart is None:
                raise ConfigError(f"'{words[0][:20]}…' is no chart type; 'plot_training_log --help' lists them")
            words.pop(0)
        if len(words) < 2:
            raise ConfigError("plot_training_log needs a picture to write and at least one log: training.png train.log")
        picture, *files = map(Path, words)
        check_not_input(picture, files)
        logs = [read_log(path) for path in files]
        chosen = [log.latest() if self.latest else log for log in logs]
        plot_logs(chosen, picture, chart, self.x, self.outputs, self.log_scale)
        print(f"{picture}: {', '.join(str(log.path) for log in logs)}")
        return 0

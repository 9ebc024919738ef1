"""Commands on files of nets and snapshots: `caffepy draw_net`, `caffepy snapshot verify`, and Caffe's upgrade tools.

`draw_net` draws nets (Caffe's `python/draw_net.py`). `snapshot verify` checks that .caffemodel and .solverstate files
are complete and undamaged. The upgrade tools rewrite files of older versions, as Caffe's upgrade_net_proto_text and
related tools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from caffepy.cli.options import ReadsNets
from caffepy.errors import SnapshotError, one_line
from caffepy.utils.options import argument, option, switch

# -- `caffepy draw_net` --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DrawNetCommand(ReadsNets):
    """Draw a net as SVG, PNG or PDF.

    Draw a net: layers as boxes with their parameters, in-place layers as rows of the preceding box, blobs as arrows
    with their shapes where the prototxt gives them.

      caffepy draw_net deploy.prototxt net.svg
      caffepy draw_net train_val.prototxt net.png --rankdir TB --phase TRAIN

    The file's suffix selects the format. svg, png and pdf need Graphviz (Debian: apt-get install graphviz); dot, gv and
    raw are Graphviz source text.
    """

    net: Path = argument("the net", Path, "NET.prototxt")
    picture: Path = argument("the file to write, e.g. net.svg", Path, "PICTURE")
    rankdir: str = option(
        "direction: left to right (LR), RL, top to bottom (TB), BT",
        str.upper,
        default="LR",
        choices=("LR", "RL", "TB", "BT"),
    )
    phase: str = option("phase to draw", str.upper, default="ALL", choices=("TRAIN", "TEST", "ALL"))
    display_lrm: bool = switch("show lr_mult, where it is not 0")

    def run(self) -> int:
        """Draw the net and print the file's name.

        Raises:
            ConfigError: the net cannot be read or would be replaced, the file's suffix is unknown, or Graphviz is not
                installed.
            RunError: Graphviz fails, or the file cannot be written.
        """
        from caffepy.export.drawing import draw_net
        from caffepy.formats.load import read_net
        from caffepy.formats.proto import caffe_pb2
        from caffepy.utils.files import check_not_input

        check_not_input(self.picture, [self.net])
        phase = None if self.phase == "ALL" else caffe_pb2.Phase.Value(self.phase)
        draw_net(read_net(self.net), self.picture, self.rankdir, phase, rates=self.display_lrm)
        print(f"Drawing net to {self.picture}")
        return 0


# -- `caffepy snapshot` --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SnapshotCommand(ReadsNets):
    """Check snapshots.

    Read snapshots of caffepy, BVLC's or NVIDIA's Caffe in either format, and print one line for each file. Snapshots of
    caffepy are checked by their number of blobs and CRC-32C; for others the line says only that they are readable.

    exit status: 0 all files are readable; 2 a file is unreadable, damaged, or was changed after caffepy wrote it
    """

    action: str = argument("the action", choices=("verify",))
    files: list[Path] = argument(".caffemodel or .solverstate, also .h5", Path, nargs="+")

    def run(self) -> int:
        """Print a line for each file; return 0 if all are valid."""
        from caffepy.formats.snapshot_files import describe_snapshot

        status = 0
        for path in self.files:
            try:
                print(one_line(f"{path}: {describe_snapshot(path)}"), flush=True)
            except SnapshotError as error:
                print(one_line(str(error)), flush=True)
                status = error.exit_status
        return status


# -- Caffe's upgrade tools -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class _UpgradeCommand(ReadsNets):
    old: Path = argument("the file to read", Path, "OLD")
    new: Path = argument("the file to write", Path, "NEW")

    def _upgrade(self, upgrade: Callable[[Path, Path], bool]) -> int:
        """Write the upgraded file and print whether it changed.

        Raises:
            UserError: the old file cannot be read or upgraded.
            RunError: the new file cannot be written.
        """
        changed = upgrade(self.old, self.new)
        print(f"{self.new}: {'upgraded' if changed else 'already in the current format'}")
        return 0


class UpgradeNetProtoTextCommand(_UpgradeCommand):
    """Upgrade a net's prototxt to the current format.

    Write a net's prototxt of an older Caffe in the current format. Comments are lost.
    """

    def run(self) -> int:
        """Write the upgraded file; errors as of `_upgrade`."""
        from caffepy.formats.upgrade_files import upgrade_net_text

        return self._upgrade(upgrade_net_text)


class UpgradeNetProtoBinaryCommand(_UpgradeCommand):
    """Upgrade a .caffemodel to the current format.

    Write a .caffemodel of an older Caffe in the current format.
    """

    def run(self) -> int:
        """Write the upgraded file; errors as of `_upgrade`."""
        from caffepy.formats.upgrade_files import upgrade_net_binary

        return self._upgrade(upgrade_net_binary)


class UpgradeSolverProtoTextCommand(_UpgradeCommand):
    """Upgrade a solver's prototxt to the current format.

    Write a solver's prototxt of an older Caffe in the current format. Comments are lost.
    """

    def run(self) -> int:
        """Write the upgraded file; errors as of `_upgrade`."""
        from caffepy.formats.upgrade_files import upgrade_solver_text

        return self._upgrade(upgrade_solver_text)

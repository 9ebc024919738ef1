"""How far exported PyTorch modules are from the nets of models/: each is exported and run by PyTorch.

    python benchmarks/torch_round_trip.py                 # all models, batch 1; needs the extra torch
    python benchmarks/torch_round_trip.py ssd300 lenet

Weights are random, of such a size that activations keep theirs; BatchNorm has random statistics. Columns: the largest
difference of all outputs over the output's largest value, and as it is; the largest value; of detectors the rows of the
output; the same relative difference with weights rounded to float16, against the net with these weights; how much that
rounding changes the outputs; lines of the file; seconds of PyTorch's run. The program fails if a difference of an
export is above 1e-5.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from onnx_nets import even_out, random_parameters  # noqa: E402
from torch_nets import write_module  # noqa: E402

from caffepy.export.check import compare, random_inputs, run_net  # noqa: E402
from caffepy.export.prepare import Settings, open_for_export, round_to_half  # noqa: E402
from caffepy.export.torch.write import LIMIT, run_exported  # noqa: E402
from caffepy.net import Net  # noqa: E402

MODELS = sorted(str(path.relative_to(ROOT / "models")) for path in ROOT.glob("models/*/*deploy.prototxt"))
Arrays = dict[str, np.ndarray]


def exported(net: Net, inputs: Arrays, folder: Path) -> tuple[Arrays, int, float]:
    """Outputs of the exported net, its lines, and the seconds of a run."""
    path = write_module(net, folder)
    begin = time.perf_counter()
    found = run_exported(path, inputs, list(net.outputs))
    return found, len(path.read_text().splitlines()), time.perf_counter() - begin


def measure(model: str, folder: Path) -> float:
    """Print one line of the table; return the export's relative difference."""
    net, _ = open_for_export(ROOT / "models" / model, [], Settings())
    even_out(random_parameters(net))
    inputs = random_inputs(net)
    wanted = run_net(net, inputs)
    found, lines, seconds = exported(net, inputs, folder)
    differences = compare(found, wanted)
    boxes = [values.shape[2] for values in wanted.values() if values.ndim == 4 and values.shape[3] == 7]
    round_to_half(net)
    rounded = run_net(net, inputs)
    half = compare(exported(net, inputs, folder)[0], rounded)
    same = all(rounded[name].shape == wanted[name].shape for name in wanted) and not boxes
    change = f"{max(one.relative for one in compare(rounded, wanted)):10.2e}" if same else f"{'':10}"
    relative = max(one.relative for one in [*differences, *half])
    peak = max(float(np.abs(values).max()) for values in wanted.values())
    print(
        f"{model.removesuffix('/deploy.prototxt'):29}{max(one.relative for one in differences):10.2e}"
        f"{max(one.largest for one in differences):10.2e}{peak:10.3g}{boxes[0] if boxes else '':>7}"
        f"{max(one.relative for one in half):10.2e}{change}{lines:7}{seconds:8.2f}",
        flush=True,
    )
    return relative


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="folders of models/ (all)")
    names = [name if name.endswith("prototxt") else f"{name}/deploy.prototxt" for name in parser.parse_args().models]
    logging.disable(logging.WARNING)
    print(
        f"{'model':29}{'relative':>10}{'absolute':>10}{'largest':>10}{'boxes':>7}{'half':>10}{'rounding':>10}"
        f"{'lines':>7}{'s':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        worst = [measure(name, Path(folder)) for name in names or MODELS]
    return int(max(worst) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

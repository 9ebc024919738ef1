"""How far ONNX files are from the nets of models/, both ways: each is exported, run by onnxruntime, read back and run.

    python benchmarks/onnx_round_trip.py                      # LeNet to SSD-300, batch 1
    python benchmarks/onnx_round_trip.py resnet50 --fold
    python benchmarks/onnx_round_trip.py --import a.onnx b.onnx   # files of others, e.g. of torch.onnx.export
    PYTHONPATH=<OpenCV 4> python benchmarks/onnx_round_trip.py --opencv   # also cv2.dnn.readNetFromCaffe

Weights are random, of such a size that activations keep theirs; differences are relative to the largest output.
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

from caffepy.export.check import compare, random_inputs, run_net  # noqa: E402
from caffepy.export.onnx.libraries import run_model  # noqa: E402
from caffepy.export.onnx.write import serialised, to_model  # noqa: E402
from caffepy.export.onnx_import.read import build_imported, check_imported  # noqa: E402
from caffepy.export.prepare import Settings, build, fold_batch_norms, open_for_export, with_parameters  # noqa: E402  # noqa: E402
from caffepy.formats.caffemodel import write_caffemodel  # noqa: E402
from caffepy.net import Net  # noqa: E402

MODELS = (
    "lenet",
    "caffenet",
    "googlenet",
    "resnet18",
    "resnet50",
    "squeezenet",
    "mobilenet",
    "densenet121",
    "ssd300",
    "mobilenet_ssd",
)

Arrays = dict[str, np.ndarray]


def largest(found: Arrays, wanted: Arrays) -> float:
    """The largest relative difference of all outputs."""
    return max(one.relative for one in compare(found, wanted))


def by_opencv(model: Path, net: Net, inputs: Arrays, folder: Path) -> Arrays:
    """The outputs of the .caffemodel by OpenCV's importer of Caffe nets."""
    import cv2

    weights = folder / "net.caffemodel"
    write_caffemodel(weights, net.name, net.layers)
    reader = cv2.dnn.readNetFromCaffe(str(model), str(weights))
    for name, values in inputs.items():
        reader.setInput(values, name)
    return {name: reader.forward(name) for name in _plain_outputs(net)}


def _plain_outputs(net: Net) -> list[str]:
    """The outputs; of a detector what its last layer reads, since OpenCV gives boxes in another order."""
    detectors = [node for node in net.nodes if node.layer.type == "DetectionOutput"]
    return [bottom.name for node in detectors for bottom in node.bottoms] or list(net.outputs)


def measure(name: str, fold: bool, opencv: bool, folder: Path) -> None:
    """One line of the table."""
    model = ROOT / f"models/{name}/deploy.prototxt"
    net, param = open_for_export(model, [], Settings(batch=1))
    even_out(random_parameters(net))
    source = net
    if fold:
        folded = fold_batch_norms(with_parameters(param, net))
        source = build(folded, net.backend)
        source.copy_trained_layers_from(folded, "the folded net")
    path, inputs = folder / "net.onnx", random_inputs(net)
    path.write_bytes(content := serialised(to_model(source)))
    wanted = run_net(net, inputs)
    begin = time.perf_counter()
    away = largest(run_model(content, inputs), wanted)
    seconds = time.perf_counter() - begin
    _, again = build_imported(path, name, fold=fold)
    back = largest(run_net(again, inputs), wanted)
    peak = max(float(np.abs(values).max()) for values in wanted.values())
    line = f"{name:14}{away:12.2e}{back:12.2e}{peak:10.3g}{seconds:9.1f}"
    if opencv:
        try:
            found = by_opencv(model, net, inputs, folder)
            own = {name: np.asarray(net.blobs[name].host_data()).reshape(found[name].shape) for name in found}
            line += f"{largest(found, own):12.2e}"
        except Exception as error:  # whatever OpenCV says of a layer that it does not know
            line += f"  OpenCV: {str(error).splitlines()[0][:90]}"
    print(line, flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--fold", action="store_true")
    parser.add_argument("--opencv", action="store_true")
    parser.add_argument("--import", dest="files", nargs="+", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    for path in args.files or ():
        param, net = build_imported(path, path.stem, fold=args.fold)
        found = check_imported(path, net)
        print(f"{path.stem:30}{max(one.relative for one in found):12.2e}{len(param.layer):6} layers", flush=True)
    if not args.files:
        print(f"{'model':14}{'export':>12}{'import':>12}{'largest':>10}{'s':>9}{'OpenCV' if args.opencv else '':>12}")
        with tempfile.TemporaryDirectory() as folder:
            for name in args.models:
                measure(name, args.fold, args.opencv, Path(folder))


if __name__ == "__main__":
    main()

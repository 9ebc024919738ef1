"""Nets from public repositories without their data: each data layer becomes an Input layer of the right shape.

    python tests/support/public_nets.py FOLDER [--repository NAME] [--all] [--jobs N] [--seconds S]
    python tests/support/public_nets.py FILE --times [--gpu 0]

FOLDER has one folder per repository with its prototxt files. The program prints for each repository how many distinct
nets it has, how many of them load, and of the nets that are run how many build and run forward (TRAIN nets backward
too), how many distinct solvers are accepted, and the message of each failure. Of nets with the same layer types and
fields one is run; `--all` runs every net. Each net runs in a process of its own, for `--seconds` at most. `--times`
times the forward pass of nets, and with `--gpu` compares the outputs of a GPU with the CPU's.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import math
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np

from caffepy.backend import create_backend
from caffepy.errors import CaffepyError
from caffepy.forks.pose.people import model_named
from caffepy.formats.load import filter_net, net_state, read_net, read_solver
from caffepy.formats.messages import walk_fields
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_net
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net
from caffepy.net.record_shape import label_shapes, object_list, told_shape
from caffepy.training.rules import RULES
from caffepy.training.solver_check import check_values

DATA = ("AnnotatedData", "BoxData", "Data", "HDF5Data", "ImageData", "MemoryData", "VideoData", "WindowData")
CLIPS = ("VideoData", "VideoSegmentationData", "VideoWithVoxelTruthData")
PEOPLE = ("CPMData", "OPData")
CLIP_FRAMES, CLIP_SIDE = 16, 112
"""Of C3D's volumes, whose prototxts do not say them."""
LABEL_MAPS = ("DenseImageData", "ImageLabelmapData", "ImageSegData", "SegData")
NAMED_SIZES = {"mnist": (1, 28, 28), "cifar": (3, 32, 32), "siamese": (2, 28, 28), "hdf5": (4,)}
"""Records of the sets that a prototxt with this word in its path reads, where it does not say their size."""
LARGEST_IMAGE = 1100
"""Pixels of a side; images of more than twice the size are halved until they fit."""
IMAGE_AXES = 4
TOLERANCE = 1e-4
"""Of outputs of a GPU, relative to the largest value."""
WINDOW_FILES = ("ImageGtData", "DetectionData", "EvalData")
"""Layers with images and objects of window files."""
PLACEHOLDER = re.compile(r"""^([^#"'\n]*)\$\{?([A-Z]+)\w*\}?""", re.MULTILINE)
"""`$NAME` or `${NAME}` of a template, which a script replaces, outside of a string."""
PLACEHOLDER_VALUES = {"ADAPTED": "128", "TARGET": "120", "SCALE": "0.9", "NUM": "21"}
"""By the first word of the placeholder's name, for PWC-Net, LiteFlowNet and DeepLab; others become a string."""


def states_of(param: caffe_pb2.NetParameter) -> list[tuple[int, list[str]]]:
    """Phases and stages in which the net has all layers that its rules speak of."""
    rules = [rule for layer in param.layer for rule in (*layer.include, *layer.exclude)]
    phases = {rule.phase for rule in rules if rule.HasField("phase")} or {caffe_pb2.TEST}
    stages = sorted({stage for rule in rules for stage in (*rule.stage, *rule.not_stage)})
    return [(phase, [stage]) for phase in sorted(phases) for stage in stages] + [(p, []) for p in sorted(phases)]


def read_filled(path: Path) -> caffe_pb2.NetParameter:
    """Read a net; placeholders of a template become values that fit."""
    text = path.read_text(errors="replace")
    if not PLACEHOLDER.search(text):
        return read_net(path)
    text = PLACEHOLDER.sub(lambda found: found[1] + PLACEHOLDER_VALUES.get(found[2], '"x"'), text)
    param = parse_text(text, caffe_pb2.NetParameter(), str(path))
    upgrade_net(param, str(path))
    return param


def without_data(path: Path, small: bool = True) -> caffe_pb2.NetParameter:
    """Return the net of a file with an Input layer in place of each data layer; `small`: with small inputs."""
    param = read_filled(path)
    size = next((size for word, size in NAMED_SIZES.items() if word in str(path)), (3, 227, 227))
    if path.parent.name == "siamese":
        size = NAMED_SIZES["siamese"]
    for layer in param.layer:
        if layer.type in CLIPS and (layer.type != "VideoData" or layer.video_data_param.source):
            _replace_clips(layer)
        elif layer.type in PEOPLE:
            _replace_people(layer)
        elif layer.type in DATA:
            masks = _mask_channels(param, layer)
            _replace(layer, size, masks)
        elif layer.type in WINDOW_FILES:
            _replace_window_file(layer)
        elif layer.type in LABEL_MAPS:
            _replace_maps(layer)
        elif layer.type == "CustomData":
            _replace_slices(layer, param)
        elif layer.type == "DetectNetTransformation":
            _replace_coverage(layer)
        elif small and layer.type in ("Input", "DummyData"):
            _shrink([*layer.input_param.shape, *layer.dummy_data_param.shape])
        elif layer.type in ("DetectionOutput", "DetectionEvaluate"):
            layer.detection_output_param.ClearField("save_output_param")
            layer.detection_evaluate_param.ClearField("name_size_file")
    _find_files(param, path)
    return param


def _find_files(param: caffe_pb2.NetParameter, path: Path) -> None:
    """Name files of numbers where they lie beside the net, and a folder of its own for files that layers write."""
    for layer in param.layer:
        if layer.type == "PowerFile":
            layer.power_file_param.shift_file = _beside(path, layer.power_file_param.shift_file)
        elif layer.type in ("FLOWriter", "ImgWriter"):
            layer.writer_param.folder = str(Path(tempfile.gettempdir()) / "public_nets")
    fillers = [one.message for one in walk_fields(param) if isinstance(one.message, caffe_pb2.FillerParameter)]
    for filler in fillers:
        if filler.type == "file":
            filler.file = _beside(path, filler.file)
            filler.type = "file" if filler.file else "constant"


def _mask_channels(param: caffe_pb2.NetParameter, data: caffe_pb2.LayerParameter) -> int:
    """The channels of the layer whose masks are compared with the third top of YOLO's data layer."""
    mask = data.top[2] if len(data.top) > 2 else ""
    compared = {layer.bottom[0] for layer in param.layer if len(layer.bottom) > 1 and layer.bottom[1] == mask}
    for layer in reversed(param.layer):  # the activation of the masks may come before their comparison
        if compared & {*layer.top} and layer.convolution_param.num_output:
            return layer.convolution_param.num_output
        if compared & {*layer.top}:
            compared |= {*layer.bottom}
    return 1


def _beside(path: Path, name: str) -> str:
    """Return a file of numbers in a folder of the prototxt, or '' if it is not in the repository."""
    places = (folder / part for folder in path.parents for part in (name, Path(name).name))
    return next((str(place) for place in places if place.is_file()), "")


def _replace(layer: caffe_pb2.LayerParameter, size: tuple[int, ...], masks: int) -> None:
    """Into an Input layer with images of `size`, unless the layer says otherwise, and labels."""
    transform, boxes, own = layer.transform_param, layer.type == "AnnotatedData", layer.annotated_data_param
    resize = transform.resize_param[0] if transform.resize_param else caffe_pb2.ResizeParameter()
    side = transform.crop_size or layer.window_data_param.crop_size
    if side:
        size = (size[0], side, side)
    elif layer.HasField("memory_data_param"):
        memory = layer.memory_data_param
        size = (memory.channels, memory.height, memory.width)
    elif boxes or transform.resize_param:
        size = (3, resize.height or 300, resize.width or 300)
    elif layer.type == "BoxData":
        size = (3, 448, 448)
    batch = 1 if size[-1] > 100 else 4
    labels = [[1, 1, 2, 8] if boxes else [batch]] * len(layer.top[1:])
    if boxes and own.yolo_data_type == 1:
        labels[:1] = [[batch, 1, 300, 5]]
    if boxes and len(labels) > 1:
        labels[1] = [batch, masks, size[1] // own.seg_scales, size[2] // own.seg_scales]
    if layer.type == "BoxData":
        labels = [[batch, 7 * cells**2] for cells in layer.data_param.side or [7]]
    layer.type = "Input"
    layer.input_param.shape.add(dim=[batch, *size])
    for shape in labels:
        layer.input_param.shape.add(dim=shape)


def _replace_clips(layer: caffe_pb2.LayerParameter) -> None:
    """Clips of C3D with a label or the truth of each voxel, or the images of TSN."""
    param, side = layer.video_data_param, layer.transform_param.crop_size or CLIP_SIDE
    truth = layer.image_data_param.num_truth_channels
    frames = (param.new_length if layer.type == "VideoData" else CLIP_FRAMES, side, side)
    images = {"modality", "num_segments", "name_pattern"} & {field.name for field, _ in param.ListFields()}
    colors = 2 if param.modality == caffe_pb2.VideoDataParameter.FLOW else 3
    shape = [colors * param.new_length * param.num_segments, side, side] if images else [3, *frames]
    labels = [] if layer.type == "VideoData" else [truth, *frames]
    layer.type = "Input"
    for dim in ([1, *shape], [1, *labels])[: len(layer.top)]:
        layer.input_param.shape.add(dim=dim)


def _replace_people(layer: caffe_pb2.LayerParameter) -> None:
    """Images of people, and maps of their parts."""
    cpm = layer.type == "CPMData"
    param = layer.cpm_transform_param if cpm else layer.op_transform_param
    if cpm:
        planes, maps = 6, 2 * (param.num_parts + 1)
    else:
        name = (param.model if param.HasField("model") else param.models).split(";")[0]
        planes, maps = 3, 2 * model_named(name, layer.name).skeleton.channels
    height, width = param.crop_size_y, param.crop_size_x
    layer.type = "Input"
    for dim in ([1, planes, height, width], [1, maps, height // param.stride, width // param.stride])[: len(layer.top)]:
        layer.input_param.shape.add(dim=dim)


def _replace_window_file(layer: caffe_pb2.LayerParameter) -> None:
    """Images of the size that the layer tells, the labels of their anchors, and two objects."""
    told = told_shape(layer, nvidia=False)
    channels, *sides = told[0] if told else (3, 480, 640)
    while max(sides) > LARGEST_IMAGE:
        sides = [side // 128 * 64 for side in sides]
    shapes = [(channels, *sides), *label_shapes(layer, (channels, *sides))]
    objects = object_list(layer, {})
    layer.type = "Input"
    for index, shape in enumerate(shapes):
        layer.input_param.shape.add(dim=[2 if index == objects else 1, *shape])


def _replace_maps(layer: caffe_pb2.LayerParameter) -> None:
    """One image and the labels of its pixels; a third top has the image's size."""
    dense, transform, images = layer.dense_image_data_param, layer.transform_param, layer.image_data_param
    height = dense.crop_height or dense.new_height or transform.crop_size or transform.crop_height
    width = dense.crop_width or dense.new_width or transform.crop_size or transform.crop_width
    height, width = height or images.new_height, width or images.new_width
    if not height:
        height, width = (360, 480) if layer.type == "DenseImageData" else (224, 320)
    factor = dense.label_divide_factor
    layer.type = "Input"
    shapes = ([1, 3, height, width], [1, 1, height // factor, width // factor], [1, 1, 1, 2])
    for shape in shapes[: len(layer.top)]:
        layer.input_param.shape.add(dim=shape)


def _replace_slices(layer: caffe_pb2.LayerParameter, net: caffe_pb2.NetParameter) -> None:
    """FlowNet 2's images, flow and mask, larger than the net's crops."""
    points, encodings = [0, *layer.data_param.slice_point], list(layer.data_param.encoding)
    last = {caffe_pb2.DataParameter.UINT16FLOW: 2, caffe_pb2.DataParameter.BOOL1: 1}.get(encodings[-1], 3)
    channels = [b - a for a, b in zip(points, points[1:], strict=False)] + [last]
    crops = [other.augmentation_param for other in net.layer] or [caffe_pb2.AugmentationParameter()]
    sides = [max(100, *(crop.crop_height for crop in crops)) + 16, max(100, *(crop.crop_width for crop in crops)) + 16]
    layer.type = "Input"
    for index in range(len(layer.top)):
        shape = [1, channels[index], *sides] if index < len(channels) else [1, 1, 1, 1]
        layer.input_param.shape.add(dim=shape)


def _replace_coverage(layer: caffe_pb2.LayerParameter) -> None:
    """DetectNet's images and coverage maps."""
    truth = layer.detectnet_groundtruth_param
    grid = [truth.image_size_y // truth.stride, truth.image_size_x // truth.stride]
    classes = max(1, len(truth.object_class))
    layer.type = "Input"
    del layer.bottom[:]
    layer.input_param.shape.add(dim=[1, 3, truth.image_size_y, truth.image_size_x])
    layer.input_param.shape.add(dim=[1, 8 + classes, *grid])


def _shrink(shapes: list[caffe_pb2.BlobShape]) -> None:
    for shape in shapes:
        shape.dim[0] = min(shape.dim[0], 2)
        while len(shape.dim) == IMAGE_AXES and max(shape.dim[2:]) > 2 * LARGEST_IMAGE:
            shape.dim[2:] = [(size + 1) // 2 for size in shape.dim[2:]]  # an odd size stays odd, as nets need it


def fill_inputs(net: Net) -> None:
    """Images of normal numbers; labels 0, or two boxes of the first class; stored variances of 1.

    BatchNorm of an untrained net has a stored variance of 0: fifty layers that multiply by a hundred overflow.
    """
    random = np.random.default_rng(0)
    for layer, tops in zip(net.layers, net.tops, strict=True):
        if layer.type == "BatchNorm":
            for blob in layer.blobs[1:3]:
                blob.data[...] = 1
        if layer.type != "Input":
            continue
        for index, top in enumerate(tops):
            values = random.standard_normal(top.shape).astype(np.float32) if index == 0 else np.zeros(top.shape, "f")
            if index and top.shape[:2] == (1, 1) and top.shape[-1:] == (8,):
                values[0, 0] = [[0, 1, 0, 0.1, 0.1, 0.5, 0.6, 0], [0, 1, 1, 0.4, 0.3, 0.9, 0.8, 0]]
            elif index and top.shape[-2:] == (300, 5):
                values[0, 0, :2] = [[0, 0.3, 0.35, 0.4, 0.5], [0, 0.65, 0.55, 0.5, 0.5]]
            elif index and len(top.shape) == IMAGE_AXES == len(tops[0].shape):
                _fill_labels(values, tops[0].shape)
            net.context.backend.from_host(values, top.data)


def _fill_labels(values: np.ndarray, images: tuple[int, ...]) -> None:
    """Objects, labels of anchors or sizes of images, as a window file's layers give them."""
    height, width = images[2:]
    if values.shape[1:] == (2, 1, 1):
        values[:, :, 0, 0] = height, width
    elif values.shape[1] in (7, 8) and values.shape[2:] == (1, 1):
        values[0, :6, 0, 0] = [0, 0.1 * width, 0.1 * height, 0.4 * width, 0.6 * height, 1]
        values[1:, :6, 0, 0] = [0, 0.5 * width, 0.3 * height, 0.9 * width, 0.8 * height, 1]
    elif values.shape[1] == 6:
        row, column = (side // 2 for side in values.shape[2:])
        values[:, :, row, column] = [1, width / 2, height / 2, width / 4, height / 4, 0.7]


def _vary(values: np.ndarray, seed: int) -> np.ndarray:
    """Return weights without a filler, which are 0, as random ones; outputs would be 0 on every device."""
    if values.ndim == 1 or values.any():
        return values
    deviation = min((2 / max(1, math.prod(values.shape[1:]))) ** 0.5, 0.02)  # small: boxes stay near their anchors
    return np.random.default_rng(seed).normal(0, deviation, values.shape).astype(np.float32)


def _relative_errors(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return |one - other| relative to the largest value; infinite for other shapes and where one alone is NaN."""
    if one.shape != other.shape:
        return np.full(one.shape, np.inf)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    errors = np.abs(one - other) / max(float(np.nanmax(np.abs(one), initial=0)), 1e-30)
    return np.where(same, 0, np.nan_to_num(errors, nan=np.inf))


def times_of(path: Path, gpu: int | None) -> str:
    """Time the net's forward pass in TEST with made-up parameters; on a GPU too, whose outputs are compared.

    Returns:
        Seconds of the third pass on each, and the largest difference between their outputs, relative to the largest
        value of the output, with the share of values that differ by more than 1e-4 of it. Unpooling and suppression
        choose among values that are nearly equal, so that rounding may move an output to another place. Therefore
        inputs that differ by 1e-6 are compared on the CPU too.
    """
    param = without_data(path, small=False)
    seconds, outputs, parameters = [], [], []
    for device in (None, gpu) if gpu is not None else (None,):
        backend = create_backend(device)
        with backend.activate():
            net = Net(param, LayerContext(backend, phase=caffe_pb2.TEST), net_state(caffe_pb2.TEST, param.state))
            fill_inputs(net)
            blobs = [blob for layer in net.layers for blob in layer.blobs]
            if device is None:
                parameters = [_vary(blob.host_data(), number) for number, blob in enumerate(blobs)]
            for blob, values in zip(blobs, parameters, strict=True):
                backend.from_host(values, blob.data)
            for _ in range(3):
                begin = time.monotonic()
                net.forward()
                outputs.append({name: blob.host_data().astype("f") for name, blob in net.outputs.items()})
                seconds.append(time.monotonic() - begin)
            if device is None:
                exact = outputs[2]
                _round_inputs(net)
                net.forward()
                rounded = {name: blob.host_data().astype("f") for name, blob in net.outputs.items()}
        backend.close()
    line = f"CPU {seconds[2]:.3f} s, with inputs that differ by 1e-6: {_compare(exact, rounded)}"
    if gpu is not None:
        line += f"; GPU {seconds[5]:.4f} s, {_compare(exact, outputs[5])}"
    return line


def _round_inputs(net: Net) -> None:
    """Change the inputs by 1e-6 of each value, about the rounding of float32 in some layers."""
    random = np.random.default_rng(1)
    for layer, tops in zip(net.layers, net.tops, strict=True):
        if layer.type == "Input" and tops:
            values = tops[0].host_data()
            change = 1 + np.float32(2**-20) * random.integers(-1, 2, values.shape).astype(np.float32)
            net.context.backend.from_host(values * change, tops[0].data)


def _compare(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> str:
    errors = [_relative_errors(*pair) for pair in zip(expected.values(), found.values(), strict=True)]
    count = sum(each.size for each in errors)
    largest = max((float(each.max(initial=0)) for each in errors), default=0)
    above = sum(int((each > TOLERANCE).sum()) for each in errors)
    zeros = "" if any(each.any() for each in expected.values()) else "; all outputs are 0"
    return f"largest difference {largest:.2g}, {above} of {count} values above {TOLERANCE:g}{zeros}"


# -- the program -----------------------------------------------------------------------------------------


@dataclass
class Repository:
    """What became of the files of one repository."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def kind_of(path: Path) -> str:
    """Return solver, net, labels (a LabelMap) or other (a file for another program)."""
    text = re.sub(r"#.*", "", path.read_text(errors="replace"))
    if re.search(r"^\s*(item|object)\s*{", text, re.MULTILINE) and not re.search(r"\blayers?\s*{", text):
        return "labels"
    if re.search(r"^\s*(base_lr|lr_policy|train_net|test_iter)\s*:", text, re.MULTILINE):
        return "net" if re.search(r"\blayers?\s*{", text) and not re.search(r"net_param\s*{", text) else "solver"
    return "net" if re.search(r"\blayers?\s*{", text) else "other"


def distinct(paths: list[Path]) -> list[Path]:
    """Return the first file of each content, comments and spaces aside."""
    found: dict[str, Path] = {}
    for path in paths:
        found.setdefault(" ".join(re.sub(r"#.*", "", path.read_text(errors="replace")).split()), path)
    return list(found.values())


def structure_of(param: caffe_pb2.NetParameter) -> frozenset[str]:
    """Return the net's layer types, each with the fields that are set."""
    return frozenset(
        f"{layer.type} {' '.join(sorted({value.path for value in walk_fields(layer)}))}" for layer in param.layer
    )


def missing_modules(param: caffe_pb2.NetParameter) -> set[str]:
    """Return modules of Python layers that cannot be imported: the repositories' own."""
    wanted = {layer.python_param.module for layer in param.layer if layer.type == "Python"}
    return {name for name in wanted if not _can_import(name)}


def _can_import(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def run(path: Path) -> Iterator[str]:
    """Build and run a net in each of its phases. Yield "build" and "run" when all of them have got so far.

    Raises:
        CaffepyError: the net is refused, with the reason.
    """
    try:
        yield from _run(without_data(path))
    except CaffepyError:  # a layer may want the file's own batch or size
        yield from _run(without_data(path, small=False))


def _run(param: caffe_pb2.NetParameter) -> Iterator[str]:
    nets: dict[bytes, tuple[int, caffe_pb2.NetState]] = {}
    for phase, stages in states_of(param):
        state = net_state(phase, param.state, caffe_pb2.NetState(stage=stages))
        filtered = filter_net(param, state)
        if any(not layer.bottom for layer in filtered.layer):  # else its data layers are of another stage
            nets.setdefault(filtered.SerializeToString(), (phase, state))
    backend = create_backend()
    with backend.activate():
        built = [(phase, Net(param, LayerContext(backend, phase=phase), state)) for phase, state in nets.values()]
        yield "build"
        for phase, net in built:
            fill_inputs(net)
            net.clear_param_diffs()
            net.forward()
            net.raise_device_errors()
            if phase == caffe_pb2.TRAIN and any(any(layer.loss_weights) for layer in net.layers):
                net.backward()
        yield "run"


@dataclass
class Outcome:
    """How far a net has got: build, run; and the message of its error."""

    stages: set[str] = field(default_factory=set)
    error: str = ""


def run_in_child(path: Path, seconds: float, connection: Connection) -> None:
    """Send an `Outcome` after each stage."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 - the process ends
    outcome = Outcome()
    try:
        for stage in run(path):
            outcome.stages.add(stage)
            connection.send(outcome)
    except CaffepyError as error:
        outcome.error = str(error)
    except Exception:
        outcome.error = f"BUG {traceback.format_exc().strip().splitlines()[-1]}"
    connection.send(outcome)


def run_all(paths: list[Path], seconds: float, jobs: int) -> dict[Path, Outcome]:
    """Run each net in a process of its own, `jobs` at a time."""
    fork = multiprocessing.get_context("fork")
    results = {path: Outcome() for path in paths}
    waiting, running = list(reversed(paths)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            path = waiting.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=run_in_child, args=(path, seconds, theirs))
            process.start()
            theirs.close()
            running[ours] = path, process, time.monotonic()
        for ready in wait(list(running), timeout=1):
            assert isinstance(ready, Connection)
            path, process, begin = running[ready]
            try:
                results[path] = ready.recv()
            except EOFError:
                process.join()
                del running[ready]
                if process.exitcode:
                    late = time.monotonic() - begin >= seconds
                    results[path].error = (
                        f"takes longer than {seconds:g} s" if late else f"ended with {process.exitcode}"
                    )
    return results


def survey(folder: Path, every: bool, seconds: float, jobs: int) -> Repository:
    """Load, build and run the files of one repository."""
    result = Repository()
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in (".prototxt", ".pt", ".txt", ".proto", ".template")
    )
    files = [path for path in files if path.is_file()]
    runnable: dict[frozenset[str], list[Path]] = {}
    for path in distinct([path for path in files if kind_of(path) == "net"]):
        result.counts["nets"] += 1
        try:
            param = read_filled(path)
            for layer in param.layer:
                layer_class(layer.type, f"layer '{layer.name}'")
        except CaffepyError as error:
            result.failures.append(f"load {path.relative_to(folder)}: {error}")
            continue
        result.counts["load"] += 1
        if modules := missing_modules(param):
            result.counts["python"] += 1
            result.failures.append(f"not run {path.relative_to(folder)}: needs the Python module {min(modules)}")
        else:
            runnable.setdefault(structure_of(param), []).append(path)
    chosen = [path for paths in runnable.values() for path in (paths if every else paths[:1])]
    result.counts["tried"] = len(chosen)
    for path, outcome in run_all(chosen, seconds, jobs).items():
        result.counts.update(outcome.stages)
        if outcome.error:
            result.failures.append(f"run {path.relative_to(folder)}: {outcome.error}")
    for path in distinct([path for path in files if kind_of(path) == "solver"]):
        result.counts["solvers"] += 1
        try:
            solver = read_solver(path)
            check_values(solver, str(path))  # as for a script that steps by itself
            RULES.get(solver.type, "solver")
            result.counts["accepted"] += 1
        except CaffepyError as error:
            result.failures.append(f"solver {path.relative_to(folder)}: {error}")
    return result


COLUMNS = ("nets", "load", "python", "tried", "build", "run", "solvers", "accepted")


def main() -> None:
    """Print the table and the failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repository", action="append", help="only this subfolder")
    parser.add_argument("--all", action="store_true", help="run every net")
    parser.add_argument("--jobs", type=int, default=2, help="nets at a time (2)")
    parser.add_argument("--seconds", type=float, default=120, help="longest run of a net (120)")
    parser.add_argument("--times", action="store_true", help="time single nets; FOLDER is a prototxt or has some")
    parser.add_argument("--gpu", type=int, help="with --times: compare with this GPU")
    options = parser.parse_args()
    if options.times:
        for path in [options.folder] if options.folder.is_file() else sorted(options.folder.rglob("*.prototxt")):
            try:
                print(f"{path}: {times_of(path, options.gpu)}", flush=True)
            except CaffepyError as error:
                print(f"{path}: {error}", flush=True)
        return
    total: Counter[str] = Counter()
    print(f"{'repository':52}" + "".join(f"{name:>9}" for name in COLUMNS))
    for folder in sorted(path for path in options.folder.iterdir() if path.is_dir()):
        if options.repository and folder.name not in options.repository:
            continue
        result = survey(folder, options.all, options.seconds, options.jobs)
        total += result.counts
        print(f"{folder.name:52}" + "".join(f"{result.counts[name]:9}" for name in COLUMNS), flush=True)
        for failure in result.failures:
            print(f"    {failure}", flush=True)
    print(f"{'all':52}" + "".join(f"{total[name]:9}" for name in COLUMNS))


if __name__ == "__main__":
    main()

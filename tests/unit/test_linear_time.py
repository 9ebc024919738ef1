"""Readers and planners take time in proportion to their input: a small file must not hold a machine for minutes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from caffepy.backend.meta import MetaBackend
from caffepy.data.conversion.annotation_sets import create_label_map, read_boxes, read_label_map
from caffepy.errors import CaffepyError
from caffepy.export.onnx.write import Graph
from caffepy.export.onnx_import.read import read_onnx
from caffepy.export.torch.write import Names
from caffepy.formats.assign import assign
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.formats.safetensors import read_tensors, write_tensors
from caffepy.infer.detect import read_label_names
from caffepy.layers import LayerContext
from caffepy.logs.read import read_log
from caffepy.net.memory_plan import Lifetime, assign_offsets, widest_gaps
from caffepy.net.net import Net
from caffepy.scaffold.data_sets import coco_data_set, read_classes
from caffepy.training.callbacks.loggers import CsvLogger, Run

Task = Callable[[], object]
GLOG = "I1121 11:29:00.123456 12345 solver.py:123]"
BEGIN = f"{GLOG} Iteration 1, loss = 1\n{GLOG} Train net output #0: a = "
INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 dim: 1 dim: 1 } } }'
BOX = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>3</xmax><ymax>3</ymax></bndbox>"
SIZE_OF_IMAGE = "<size><height>9</height><width>9</width></size>"


def written(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def repeated(count: int, form: str) -> str:
    """A text again and again, with numbers in the place of {0}."""
    return "".join(form.replace("{0}", str(index)) for index in range(count))


def boxes(path: Path) -> object:
    """The boxes of an annotation."""
    return read_boxes(str(path), path.suffix[1:], (9, 9), LABELS, caffe_pb2.AnnotatedDatum())


def json_boxes(count: int) -> str:
    found = [{"category_id": 1, "bbox": [1, 1, 1, 1]}] * (count // 4)
    return json.dumps({"image": {"height": 9, "width": 9}, "annotation": found})


LABELS = {"1": 1, **{f"n{index}": index for index in range(2000)}}
LABEL = 'item { name: "n{0}" label: {0} display_name: "d{0}" }\n'
OBJECT = f"<object><name>n{{0}}</name>{BOX}</object>"
ANNOTATION = "<annotation>{}</annotation>"
FILES: dict[str, tuple[str, Callable[[int], str], Callable[[Path], object]]] = {
    "class names": ("classes.txt", lambda count: repeated(count, "name{0}\n"), read_classes),
    "label map of tools": (
        *("map.prototxt", lambda count: repeated(count // 8, LABEL)),
        lambda path: read_label_map(path, unique=True),
    ),
    "label map of detections": ("map.prototxt", lambda count: repeated(count // 8, LABEL), read_label_names),
    "list of labels": (
        *("labels.txt", lambda count: repeated(count // 4, "n{0} {0} d{0}\n")),
        lambda path: create_label_map(path, Path("made.prototxt")),
    ),
    "XML objects": ("a.xml", lambda count: ANNOTATION.format(SIZE_OF_IMAGE + repeated(count // 4, OBJECT)), boxes),
    "XML depth": ("a.xml", lambda count: ANNOTATION.format("<a>" * count + "</a>" * count), boxes),
    "JSON boxes": ("a.json", json_boxes, boxes),
    "log of outputs without values": (
        *("a.log", lambda count: f"{BEGIN}1\n{GLOG} {'Train net output #0: a = ' * (4 * count // 25)}\n"),
        read_log,
    ),
    "log of a long number": ("a.log", lambda count: f"{BEGIN}{'1' * 2 * count}x\n", read_log),
    "log of equal outputs": (
        *("a.log", lambda count: f"{BEGIN}1\n" + f"{GLOG} Train net output #0: a = 1\n" * (count // 4)),
        read_log,
    ),
}
"""Texts of a size, and what reads them."""


def coco_categories(count: int) -> Task:
    document = {
        "images": [{"id": number, "file_name": f"{number}.png"} for number in range(2)],
        "categories": [{"id": index, "name": f"n{index}"} for index in range(count)],
        "annotations": [{"image_id": 0, "category_id": index, "bbox": [0, 0, 1, 1]} for index in range(count)],
    }
    for number in range(2):
        written(f"coco/images/{number}.png", "")
    written("coco/annotations/all.json", json.dumps(document))
    return lambda: coco_data_set(Path("coco"), [f"n{index}" for index in range(count)], 0.5, 1, Path("made"))


def settings(assignments: list[str], refused: bool = False) -> Task:
    solver = written("solver.prototxt", 'net: "net.prototxt" lr_policy: "fixed"')

    def run() -> None:
        with pytest.raises(CaffepyError) if refused else nullcontext():
            assign(read_solver(solver), assignments, PathResolver(solver))

    return run


def columns_of_csv(count: int) -> Task:
    def run() -> None:
        Path("log.csv").unlink(missing_ok=True)
        logger = CsvLogger(Path("log.csv"))
        logger.start(Run(0, {}))
        logger.scalars(1, {f"n{index}": 1.0 for index in range(2 * count)})
        logger.close(failed=False)

    return run


def tensors(count: int) -> Task:
    write_tensors(Path("a.safetensors"), {f"t{index}": np.zeros(2, np.float32) for index in range(count // 4)})
    return lambda: read_tensors(Path("a.safetensors"))


def prior_ratios(count: int) -> Task:
    ratios = " ".join(f"aspect_ratio: {2 + index / 1000}" for index in range(count // 4))
    prior = f"min_size: 3 flip: true {ratios}"
    text = f'{INPUT} layer {{ name: "p" type: "PriorBox" bottom: "data" bottom: "data" prior_box_param {{ {prior} }} }}'
    net = parse_text(text.replace("prior_box_param", 'top: "p" prior_box_param'), caffe_pb2.NetParameter(), "net")
    backend = MetaBackend()

    def run() -> None:
        with backend.activate():
            Net(net, LayerContext(backend, phase=caffe_pb2.TEST)).close()

    return run


def plan(lifetimes: list[Lifetime]) -> Task:
    steps = max(life.last for life in lifetimes) + 1

    def run() -> None:
        offsets, arena = assign_offsets(lifetimes)
        assert widest_gaps(lifetimes, offsets, arena, steps)

    return run


def relu_nodes(count: int, name: str, unread: bool) -> Task:
    nodes = [
        helper.make_node("Relu", ["x" if unread or not index else f"t{index - 1}"], [f"t{index}"], name=name)
        for index in range(count // 8)
    ]
    values = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, 2]) for value in ("x", nodes[-1].output[0])]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:])
    Path("a.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    return lambda: read_onnx(Path("a.onnx"), "net")


def names_of_exports(count: int) -> Task:
    def run() -> None:
        graph, names = Graph(), Names(())
        given = {graph.new_name("name") for _ in range(count)} | {names.new("other") for _ in range(count)}
        assert len(given) == 2 * count

    return run


def plan_of_a_chain(count: int, trained: bool) -> Task:
    lasts = ((index, count - index if trained else index + 1) for index in range(3 * count // 8))
    return plan([Lifetime(256 * (1 + first % 7), first, last) for first, last in lasts])


TASKS: dict[str, Callable[[int], Task]] = {
    "COCO categories": coco_categories,
    "elements that are set": lambda count: settings([f"stepvalue[{index}]={index}" for index in range(count // 4)]),
    "a list that is set": lambda count: settings(["stepvalue=" + ",".join(map(str, range(count)))]),
    "a path that is set": lambda count: settings(["a." * 10 * count + "b=1"], refused=True),
    "columns of CSV": columns_of_csv,
    "tensors": tensors,
    "prior ratios": prior_ratios,
    "ONNX chain": lambda count: relu_nodes(count, "", unread=False),
    "ONNX equal names": lambda count: relu_nodes(count, "name", unread=True),
    "names of exports": names_of_exports,
    "plan of a tested chain": lambda count: plan_of_a_chain(count, trained=False),
    "plan of a trained chain": lambda count: plan_of_a_chain(count, trained=True),
}
SIZE = 1000
GROWTH = 8
LIMIT = 3 * GROWTH
"""Eight times the input takes less than this times as long; 64 times if the time grows with the square."""
SHORT = 0.1
"""Seconds; what takes less with the larger input is not compared, since its time varies."""


def cpu_seconds(task: Task) -> float:
    """The least time of three runs on this thread, which other processes do not lengthen.

    A collection of garbage takes as long as the objects of all earlier tests are many, so there is none.
    """
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            begin = time.thread_time()
            task()
            times.append(time.thread_time() - begin)
    finally:
        gc.enable()
    return min(times)


@pytest.mark.parametrize("name", [*FILES, *TASKS])
def test_time_grows_with_the_input(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def make(count: int) -> Task:
        if name in TASKS:
            return TASKS[name](count)
        file, text, read = FILES[name]
        path = written(file, text(count))
        return lambda: read(path)

    small = cpu_seconds(make(SIZE))
    large = cpu_seconds(make(SIZE * GROWTH))
    assert large < max(SHORT, LIMIT * small)

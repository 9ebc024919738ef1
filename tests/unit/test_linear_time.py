"""Readers and planners take time in proportion to their input: a small file must not hold a machine for minutes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
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
INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 2 dim: 1 dim: 1 } } }'


def written(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(task: Task) -> Task:
    def run() -> None:
        with pytest.raises(CaffepyError):
            task()

    return run


# -- tasks of a size -----------------------------------------------------------------------------------------


def class_names(count: int) -> Task:
    path = written("classes.txt", "".join(f"name{index}\n" for index in range(count)))
    return lambda: read_classes(path)


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


def label_map(count: int) -> Path:
    items = (f'item {{ name: "n{index}" label: {index} display_name: "d{index}" }}\n' for index in range(count // 8))
    return written("map.prototxt", "".join(items))


def label_map_of_tools(count: int) -> Task:
    path = label_map(count)
    return lambda: read_label_map(path, unique=True)


def label_map_of_detections(count: int) -> Task:
    path = label_map(count)
    return lambda: read_label_names(path)


def list_of_labels(count: int) -> Task:
    path = written("labels.txt", "".join(f"n{index} {index} d{index}\n" for index in range(count // 4)))
    return lambda: create_label_map(path, Path("made.prototxt"))


def xml_objects(count: int) -> Task:
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>3</xmax><ymax>3</ymax></bndbox>"
    objects = "".join(f"<object><name>n{index}</name>{box}</object>" for index in range(count // 4))
    path = written("a.xml", f"<annotation><size><height>9</height><width>9</width></size>{objects}</annotation>")
    labels = {f"n{index}": index for index in range(count // 4)}
    return lambda: read_boxes(str(path), "xml", (9, 9), labels, caffe_pb2.AnnotatedDatum())


def xml_depth(count: int) -> Task:
    path = written("a.xml", "<annotation>" + "<a>" * count + "</a>" * count + "</annotation>")
    return lambda: read_boxes(str(path), "xml", (9, 9), {}, caffe_pb2.AnnotatedDatum())


def json_boxes(count: int) -> Task:
    boxes = [{"category_id": 1, "bbox": [1, 1, 1, 1]}] * (count // 4)
    path = written("a.json", json.dumps({"image": {"height": 9, "width": 9}, "annotation": boxes}))
    return lambda: read_boxes(str(path), "json", (9, 9), {"1": 1}, caffe_pb2.AnnotatedDatum())


def settings(assignments: list[str]) -> Task:
    solver = written("solver.prototxt", 'net: "net.prototxt" lr_policy: "fixed"')
    return lambda: assign(read_solver(solver), assignments, PathResolver(solver))


def set_elements(count: int) -> Task:
    return settings([f"stepvalue[{index}]={index}" for index in range(count // 4)])


def set_list(count: int) -> Task:
    return settings(["stepvalue=" + ",".join(map(str, range(count)))])


def set_path(count: int) -> Task:
    return refused(settings(["a." * 10 * count + "b=1"]))


def log_with(line: str, count: int) -> Task:
    begin = f"{GLOG} Iteration 1, loss = 0.25\n"
    path = written("a.log", f"{begin}{GLOG} {line * (count // len(line))}\n")
    return lambda: read_log(path)


def log_of_outputs_without_values(count: int) -> Task:
    return log_with("Train net output #0: a = ", 4 * count)


def log_of_a_long_number(count: int) -> Task:
    path = written("a.log", f"{GLOG} Iteration 1, loss = 1\n{GLOG} Train net output #0: a = {'1' * 2 * count}x\n")
    return lambda: read_log(path)


def log_of_equal_outputs(count: int) -> Task:
    path = written("a.log", f"{GLOG} Iteration 1, loss = 1\n" + f"{GLOG} Train net output #0: a = 1\n" * (count // 4))
    return lambda: read_log(path)


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


def plan_of_a_tested_chain(count: int) -> Task:
    return plan([Lifetime(256 * (1 + index % 7), index, index + 1) for index in range(3 * count // 8)])


def plan_of_a_trained_chain(count: int) -> Task:
    return plan([Lifetime(256 * (1 + index % 7), index, count - index) for index in range(3 * count // 8)])


def relu_nodes(count: int, name: str, unread: bool) -> Task:
    nodes = [
        helper.make_node("Relu", ["x" if unread or not index else f"t{index - 1}"], [f"t{index}"], name=name)
        for index in range(count // 8)
    ]
    values = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, 2]) for value in ("x", nodes[-1].output[0])]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:])
    Path("a.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    return lambda: read_onnx(Path("a.onnx"), "net")


def onnx_chain(count: int) -> Task:
    return relu_nodes(count, "", unread=False)


def onnx_equal_names(count: int) -> Task:
    return relu_nodes(count, "name", unread=True)


def names_of_exports(count: int) -> Task:
    def run() -> None:
        graph, names = Graph(), Names(())
        given = {graph.new_name("name") for _ in range(count)} | {names.new("other") for _ in range(count)}
        assert len(given) == 2 * count

    return run


# -- the test ------------------------------------------------------------------------------------------------

TASKS = (
    class_names,
    coco_categories,
    label_map_of_tools,
    label_map_of_detections,
    list_of_labels,
    xml_objects,
    xml_depth,
    json_boxes,
    set_elements,
    set_list,
    set_path,
    log_of_outputs_without_values,
    log_of_a_long_number,
    log_of_equal_outputs,
    columns_of_csv,
    tensors,
    prior_ratios,
    onnx_chain,
    onnx_equal_names,
    names_of_exports,
    plan_of_a_tested_chain,
    plan_of_a_trained_chain,
)
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


@pytest.mark.parametrize("make", TASKS, ids=lambda make: make.__name__)
def test_time_grows_with_the_input(make: Callable[[int], Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    small = cpu_seconds(make(SIZE))
    large = cpu_seconds(make(SIZE * GROWTH))
    assert large < max(SHORT, LIMIT * small)

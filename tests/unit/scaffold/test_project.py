"""`caffepy new`: data sets in folders become databases, and a model's nets and solver fit them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import lmdb
import numpy as np
import pytest
from small_models import MODELS
from training import CPU

from caffepy.backend.meta import MetaBackend
from caffepy.cli.main import main
from caffepy.formats.caffemodel import write_caffemodel
from caffepy.formats.load import filter_net, net_state, read_net, read_solver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.record_shape import without_data
from caffepy.scaffold.create import (
    CLASSIFIERS,
    DETECTORS,
    known_weights,
    set_boxed_classes,
    set_classes,
    validation_batch,
)
from caffepy.training.solver_check import check_solver

ROOT = Path(__file__).parents[3]
CLASSES = ("robin", "sparrow", "wren")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_image(path: Path, value: int, size: tuple[int, int] = (20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.full((*size, 3), value, np.uint8))


def photos(folder: Path = Path("photos"), count: int = 5, classes: Iterable[str] = CLASSES) -> None:
    for number, name in enumerate(classes):
        for index in range(count):
            write_image(folder / name / f"{index} a.png", 50 * number + index)


def street(names: Iterable[str] = ("car", "bus"), count: int = 5) -> None:
    """A data set in VOC's layout: in each image one object of each class."""
    for index in range(count):
        write_image(Path(f"street/JPEGImages/{index}.jpg"), 10 * index)
        objects = "".join(
            f"<object><name>{name}</name><bndbox><xmin>{3 * at}</xmin><ymin>5</ymin>"
            "<xmax>20</xmax><ymax>15</ymax></bndbox></object>"
            for at, name in enumerate(names)
        )
        path = Path(f"street/Annotations/{index}.xml")
        path.parent.mkdir(exist_ok=True)
        size = "<size><height>20</height><width>30</width></size>"
        path.write_text(f"<annotation>{size}{objects}</annotation>")


def run(command: str) -> int:
    return main(command.split())


def records(path: str) -> list[tuple[str, bytes]]:
    with lmdb.open(path, readonly=True, lock=False) as database, database.begin() as transaction:
        return [(key.decode(), value) for key, value in transaction.cursor()]


def datums(path: str) -> list[tuple[str, caffe_pb2.Datum]]:
    return [(key, caffe_pb2.Datum.FromString(value)) for key, value in records(path)]


def boxes(path: str) -> dict[str, list[tuple[int, float]]]:
    """By image the labels and left edges of its boxes."""
    return {
        key.partition("_")[2]: sorted(
            (group.group_label, box.bbox.xmin)
            for group in caffe_pb2.AnnotatedDatum.FromString(value).annotation_group
            for box in group.annotation
        )
        for key, value in records(path)
    }


# -- classifiers ---------------------------------------------------------------------------------------------


def test_a_folder_for_each_class(capsys: pytest.CaptureFixture[str]):
    photos()
    Path("photos/.hidden").mkdir()
    Path("photos/robin/notes.txt").write_text("no image")
    assert run("new lenet --data photos --to p --batch 4 --epochs 3") == 0
    told = capsys.readouterr().out
    assert "p: lenet for 3 classes, 12 training and 3 validation images, 9 iterations\n" in told
    assert "caffepy train --solver p/solver.prototxt --gpus all" in told
    assert "--weights p/lenet_iter_9.caffemodel --labels p/labels.txt" in told
    assert Path("p/labels.txt").read_text().split() == list(CLASSES)
    train, val = datums("p/train_lmdb"), datums("p/val_lmdb")
    assert Counter(datum.label for _, datum in train) == {0: 4, 1: 4, 2: 4}
    assert Counter(datum.label for _, datum in val) == {0: 1, 1: 1, 2: 1}
    for key, datum in [*train, *val]:
        path = Path(key.partition("_")[2])
        assert path.parent.name == CLASSES[datum.label], "the label is that of the folder"
        assert (datum.channels, datum.height, datum.width) == (1, 28, 28)
        assert set(datum.data) == {50 * datum.label + int(path.name[0])}
    assert [datum.label for _, datum in train] != sorted(datum.label for _, datum in train), "a random order"
    names = {key.partition("_")[2] for key, _ in train}
    assert names == {line.rpartition(" ")[0] for line in Path("p/train.txt").read_text().splitlines()}


def test_the_seed_decides_on_the_division():
    photos(count=20, classes=("a",))
    for name, options in (("p", ""), ("q", ""), ("r", "--seed 2"), ("s", "--val 0.5")):
        assert main(["new", "lenet", "--data", "photos", "--to", name, *options.split()]) == 0
    lists = {name: Path(name, "val.txt").read_text() for name in "pqrs"}
    assert lists["p"] == lists["q"] != lists["r"]
    assert [len(lists[name].splitlines()) for name in "pqrs"] == [4, 4, 4, 10]


def test_a_data_set_that_is_divided_already():
    photos(Path("photos/train"), 4)
    photos(Path("photos/val"), 2)
    Path("classes.txt").write_text("wren\nrobin\nsparrow\n")
    assert run("new cifar10 --data photos --to p --classes classes.txt --encoded") == 0
    assert Path("p/labels.txt").read_text().split() == ["wren", "robin", "sparrow"]
    found = datums("p/val_lmdb")
    assert [datum.label for _, datum in found] == [0, 0, 1, 1, 2, 2]
    assert all(datum.encoded for _, datum in found)
    assert {Path(key).parent.parent.name for key, _ in found} == {"val"}
    assert Path("p/mean.binaryproto").is_file()
    net = read_net(Path("p/deploy.prototxt"))
    assert net.layer[0].transform_param.mean_file == "mean.binaryproto"


def test_the_solver_fits_the_images(capsys: pytest.CaptureFixture[str]):
    photos(count=20)
    Path("w.caffemodel").touch()
    assert run("new resnet18 --data photos --to p --batch 16 --epochs 90 --weights w.caffemodel") == 0
    told = capsys.readouterr().out
    assert "caffepy train --solver p/solver.prototxt --weights w.caffemodel --gpus all" in told
    solver, model = read_solver(Path("p/solver.prototxt")), read_solver(MODELS / "resnet18/solver.prototxt")
    check_solver(solver, "p")
    assert (solver.max_iter, solver.test_interval) == (90 * 3, 3)
    assert [round(step / solver.max_iter, 2) for step in solver.stepvalue] == [
        round(step / model.max_iter, 2) for step in model.stepvalue
    ]
    assert solver.base_lr == pytest.approx(model.base_lr * 16 / 256 / 10)
    assert (solver.momentum, solver.weight_decay) == (model.momentum, model.weight_decay)
    net = read_net(Path("p/train_val.prototxt"))
    train, test = (filter_net(net, net_state(phase)).layer[0] for phase in (caffe_pb2.TRAIN, caffe_pb2.TEST))
    assert (train.data_param.source, train.data_param.batch_size) == ("train_lmdb", 16)
    assert (test.data_param.source, test.data_param.batch_size) == ("val_lmdb", 12)
    assert list(solver.test_iter) == [1]
    head = next(layer for layer in net.layer if layer.name == "fc1000_3")
    assert [param.lr_mult for param in head.param][0] == 10
    assert not [layer.name for layer in net.layer if layer.accuracy_param.top_k > 1], "3 classes have no top-5"
    layer = read_net(Path("p/deploy.prototxt")).layer[0]
    assert (layer.image_data_param.new_height, layer.transform_param.crop_size) == (256, 224)


def test_batches_of_validation():
    assert [validation_batch(count, 50) for count in (1, 7, 50, 100, 90, 53, 106)] == [1, 7, 50, 50, 45, 50, 50]


def inputs(net: caffe_pb2.NetParameter, model: str) -> caffe_pb2.NetParameter:
    shape = list(read_net(next((MODELS / model).glob("*deploy.prototxt"))).layer[0].input_param.shape[0].dim)[1:]
    return without_data(net, {"data": shape, "label": (1, 1, 8) if model in DETECTORS else ()})


@pytest.mark.parametrize("model", [*CLASSIFIERS, *DETECTORS])
def test_every_model_takes_other_classes(model: str):
    """Its nets of both phases can be built, their scores have the classes, and weights for others do not clash."""
    trains = {"lenet": "train_test", "cifar10": "quick_train_test"}
    net = read_net(MODELS / model / f"{trains.get(model, 'train_val')}.prototxt")
    before = {layer.name for layer in net.layer}
    heads = (set_boxed_classes if model in DETECTORS else set_classes)(net, 7)
    assert heads and not before & set(heads)
    for phase in (caffe_pb2.TRAIN, caffe_pb2.TEST):
        backend = MetaBackend()
        with backend.activate():
            built = Net(filter_net(inputs(net, model), net_state(phase)), LayerContext(backend, phase=phase))
        scores = {layer.name: layer.blobs[0].shape[0] for layer in built.layers if layer.name in heads}
        priors = {"ssd300": (4, 6, 6, 6, 4, 4), "mobilenet_ssd": (3, 6, 6, 6, 6, 6)}.get(model)
        assert (
            sorted(scores.values()) == sorted(count * 8 for count in priors) if priors else set(scores.values()) == {7}
        )
        built.close()


def test_what_a_classifier_refuses(capsys: pytest.CaptureFixture[str]):
    photos(count=2)
    Path("photos/sparow").mkdir()
    Path("classes.txt").write_text("robin\nsparrow\nwren\n")
    Path("twice.txt").write_text("robin\nrobin\n")
    Path("empty").mkdir()
    Path("one/a").mkdir(parents=True)
    write_image(Path("one/a/a.png"), 1)
    for command, message in (
        ("new lennet --data photos", "MODEL is 'lennet'; did you mean 'lenet'?"),
        ("new fcn8s --data photos", "MODEL is 'fcn8s'; known: alexnet"),
        ("new lenet --data nowhere", "--data nowhere: is not a folder"),
        ("new lenet --data photos", "class 'sparow' has no images in 'photos/sparow'"),
        ("new lenet --data photos --classes classes.txt", "'photos/sparow' is not a class; did you mean 'sparrow'?"),
        ("new lenet --data photos --classes twice.txt", "names 'robin' twice"),
        ("new lenet --data photos --classes none.txt", "--classes none.txt: cannot be read: No such file"),
        ("new lenet --data empty", "put the images of each class into a folder of the class's name"),
        ("new lenet --data one", "no image is left for validation"),
        ("new lenet --data one --to one/p", "--to one/p lies in the data set one"),
        ("new lenet --data one --val 1", "'1' is not a part between 0 and 1"),
        ("new lenet --data one --weights w", "--weights w: there is no such file"),
        ("new ssd300 --data photos", "has neither Annotations and JPEGImages, as Pascal VOC, nor annotations/*.json"),
    ):
        assert run(command) == 2, command
        assert message in capsys.readouterr().err


def test_existing_files_stay(capsys: pytest.CaptureFixture[str]):
    photos()
    assert run("new lenet --data photos --to p") == 0
    Path("p/solver.prototxt").write_text("mine")
    assert run("new lenet --data photos --to p") == 2
    assert "'p/solver.prototxt' exists; give --to another folder, or --overwrite" in capsys.readouterr().err
    assert Path("p/solver.prototxt").read_text() == "mine"
    assert run("new lenet --data photos --to p --overwrite") == 0
    assert read_solver(Path("p/solver.prototxt")).max_iter == 30


# -- detectors -----------------------------------------------------------------------------------------------


def test_boxes_in_vocs_layout():
    street()
    assert run("new mobilenet_ssd --data street --to p --epochs 2") == 0
    assert Path("p/labels.txt").read_text().split() == ["bus", "car"]
    found = boxes("p/train_lmdb") | boxes("p/val_lmdb")
    assert sorted(found) == [f"street/JPEGImages/{index}.jpg" for index in range(5)]
    assert all(value == [(1, pytest.approx(0.1)), (2, 0)] for value in found.values())
    datum = caffe_pb2.AnnotatedDatum.FromString(records("p/val_lmdb")[0][1]).datum
    assert datum.data == Path(records("p/val_lmdb")[0][0].partition("_")[2]).read_bytes(), "the file as it is"
    names = re.findall(r"display_name: \"(\w+)\"", Path("p/labelmap.prototxt").read_text())
    assert names == ["background", "bus", "car"]
    net = read_net(Path("p/train_val.prototxt"))
    assert {layer.annotated_data_param.label_map_file for layer in net.layer[:2]} == {"labelmap.prototxt"}
    solver = read_solver(Path("p/solver.prototxt"))
    assert (solver.eval_type, solver.type, solver.max_iter) == ("detection", "RMSProp", 2)
    priors = [layer.prior_box_param for layer in net.layer if layer.type == "PriorBox"]
    model = read_net(MODELS / "mobilenet_ssd/train_val.prototxt")
    assert priors == [layer.prior_box_param for layer in model.layer if layer.type == "PriorBox"]


@pytest.mark.parametrize("names", [("train", "val"), ("trainval", "test")])
def test_vocs_lists_divide_the_images(names: tuple[str, str]):
    street()
    lists = Path("street/ImageSets/Main")
    lists.mkdir(parents=True)
    (lists / f"{names[0]}.txt").write_text("3\n1  1\n")
    (lists / f"{names[1]}.txt").write_text("0\n2\n")
    assert run("new ssd300 --data street --to p") == 0
    assert [line.split()[0] for line in Path("p/train.txt").read_text().splitlines()] == [
        "street/JPEGImages/3.jpg",
        "street/JPEGImages/1.jpg",
    ]
    assert sorted(boxes("p/val_lmdb")) == ["street/JPEGImages/0.jpg", "street/JPEGImages/2.jpg"]


def coco(split: bool) -> None:
    """Cars and buses as COCO writes them, and a category that is not used."""
    categories = [{"id": 9, "name": "bus"}, {"id": 4, "name": "car"}, {"id": 5, "name": "sign"}]
    for word, numbers in (("train2017", range(4)), ("val2017", range(4, 6))):
        images, annotations = [], []
        for number in numbers:
            write_image(Path("street", "images" if not split else word, f"{number}.jpg"), 9)
            images.append({"id": number, "file_name": f"{number}.jpg", "height": 20, "width": 30})
            annotations += [
                {"image_id": number, "category_id": kind, "bbox": [3 * kind, 5, 3, 4], "iscrowd": 0}
                for kind in (9, 4, 5)
            ]
        Path("street/annotations").mkdir(exist_ok=True)
        content = {"images": images, "annotations": annotations, "categories": categories}
        if split or word == "train2017":
            Path(f"street/annotations/instances_{word}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("split", [False, True])
def test_boxes_in_cocos_layout(split: bool):
    coco(split)
    Path("classes.txt").write_text("bus\ncar\n")
    assert run("new mobilenet_ssd --data street --to p --classes classes.txt") == 0
    train, val = boxes("p/train_lmdb"), boxes("p/val_lmdb")
    assert (len(train), len(val)) == ((4, 2) if split else (3, 1))
    assert all(
        found == [(1, pytest.approx(0.9)), (2, pytest.approx(0.4))] for found in [*train.values(), *val.values()]
    )
    assert run("new mobilenet_ssd --data street --to q") == 0
    assert Path("q/labels.txt").read_text().split() == ["car", "sign", "bus"], "in the order of COCO's ids"


def test_what_a_detector_refuses(capsys: pytest.CaptureFixture[str]):
    street()
    Path("typo.txt").write_text("buss\ncar\n")
    Path("other/annotations").mkdir(parents=True)
    for command, message in (
        (
            "new ssd300 --data street --classes typo.txt",
            "the class 'bus' is not in the label map; did you mean 'buss'?",
        ),
        ("new ssd300 --data other --to p", "'other/annotations' has no .json files"),
    ):
        assert run(command) == 2, command
        assert message in capsys.readouterr().err
    for text, message in (
        ("[]", "all.json' is not COCO's annotations of objects (TypeError"),
        ('{"images": []}', "all.json' is not COCO's annotations of objects (KeyError: 'categories')"),
        (
            '{"images": [{"id": 1, "file_name": "x.jpg"}], "categories": [], "annotations": []}',
            "image 'x.jpg' is in none of",
        ),
        ('{"images": [], "categories": [], "annotations": []}', "names no images"),
        (
            '{"images": [], "categories": [{"id": 1e999, "name": "x"}], "annotations": []}',
            "all.json' is not COCO's annotations of objects (OverflowError",
        ),
        (
            f'{{"images": [], "categories": [{{"id": {"9" * 5000}, "name": "x"}}], "annotations": []}}',
            "all.json' is not COCO's annotations of objects (ValueError",
        ),
        ('{"images": [{"id": 1}, {"id": 1}], "categories": [], "annotations": []}', "2 images have the id 1"),
        ('{"images": [], "categories": [{"id": 1e999, "name": "a"}], "annotations": []}', "OverflowError"),
    ):
        Path("other/annotations/all.json").write_text(text)
        assert run("new ssd300 --data other --to p") == 2
        assert message in capsys.readouterr().err
    Path("street/Annotations/3.xml").unlink()
    Path("street/ImageSets/Main").mkdir(parents=True)
    for name in ("train", "val"):
        Path(f"street/ImageSets/Main/{name}.txt").write_text("3\n")
    assert run("new ssd300 --data street --to p") == 2
    assert "image '3' has no file 'street/Annotations/3.xml'; add it, or remove the image" in capsys.readouterr().err


def coco_file(
    boxes: Sequence[Any],
    images: Sequence[str] = ("0.jpg", "1.jpg"),
    categories: dict[int, str] | None = None,
    name: str = "all",
    image_id: int = 0,
) -> None:
    """A data set of images of 20 x 30 in COCO's layout, and boxes as (category, box) of one of them."""
    for number in range(2):
        write_image(Path(f"street/images/{number}.jpg"), 9)
    Path("street/annotations").mkdir(exist_ok=True)
    document = {
        "images": [{"id": id_, "file_name": file, "height": 20, "width": 30} for id_, file in enumerate(images)],
        "categories": [
            {"id": id_, "name": text} for id_, text in ({1: "car"} if categories is None else categories).items()
        ],
        "annotations": [{"image_id": image_id, "category_id": category, "bbox": box} for category, box in boxes],
    }
    Path(f"street/annotations/{name}.json").write_text(json.dumps(document))


GOOD = (3, 5, 17, 10)
"""A box as x, y, width and height."""
NO_AREA = {
    "is inverted": (20, 5, -17, 10),
    "has no width or no height": (3, 5, 0, 10),
    "lies outside of its image": (30, 5, 17, 10),
}


@pytest.mark.parametrize("layout", ["coco", "voc"])
def test_boxes_without_an_area_in_the_image_are_named_and_left_out(layout: str, caplog: pytest.LogCaptureFixture):
    boxed = [GOOD, *NO_AREA.values(), NO_AREA["is inverted"]]
    if layout == "coco":
        coco_file([(1, box) for box in boxed] + [(1, (25, 15, 9, 9))], ("0.jpg", "1.jpg"))
        coco_file([(1, GOOD)], name="val")
        Path("street/annotations/all.json").rename("street/annotations/train.json")
    else:
        street(("car",), 2)
        objects = "".join(
            f"<object><name>car</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + width}</xmax>"
            f"<ymax>{y + height}</ymax></bndbox></object>"
            for x, y, width, height in [*boxed, (25, 15, 9, 9)]
        )
        Path("street/Annotations/0.xml").write_text(
            f"<annotation><size><height>20</height><width>30</width></size>{objects}</annotation>"
        )
        Path("street/ImageSets/Main").mkdir(parents=True)
        for name, stem in (("train", "0"), ("val", "1")):
            Path(f"street/ImageSets/Main/{name}.txt").write_text(stem)
    assert run("new mobilenet_ssd --data street --to p") == 0
    assert boxes("p/train_lmdb")["street/images/0.jpg" if layout == "coco" else "street/JPEGImages/0.jpg"] == [
        (1, pytest.approx(0.1)),
        (1, pytest.approx(25 / 30)),
    ], "a box that crosses the border stays"
    for fault, count in zip(NO_AREA, (2, 1, 1), strict=True):
        [line] = [line for line in caplog.messages if fault in line]
        assert f"p/train.txt: {count} boxes are left out" in line
        assert ("train_000000.json" if layout == "coco" else "0.xml") in line


def test_boxes_of_categories_and_images_that_the_file_does_not_have(caplog: pytest.LogCaptureFixture):
    coco_file([(1, GOOD), (7, GOOD), (7, GOOD), ("x", GOOD)], name="train")
    coco_file([(1, GOOD)], name="val")
    path = Path("street/annotations/train.json")
    document = json.loads(path.read_text())
    document["annotations"].append({"image_id": 99, "category_id": 1, "bbox": GOOD})
    path.write_text(json.dumps(document))
    assert run("new mobilenet_ssd --data street --to p") == 0
    assert boxes("p/train_lmdb")["street/images/0.jpg"] == [(1, pytest.approx(0.1))]
    assert f"{path}: 3 boxes are left out: the file has no category '7', 'x'" in caplog.messages
    assert f"{path}: 1 boxes are left out: the file has no image with the id 99" in caplog.messages


def test_a_data_set_without_classes_or_boxes_is_refused(capsys: pytest.CaptureFixture[str]):
    """A net for 0 classes, and a detector without boxes, train with loss 0."""
    cases: list[tuple[Callable[[], None], str]] = [
        (lambda: coco_file([], categories={}), "--data street: has no classes"),
        (lambda: coco_file([]), "'p/train.txt': no image has a box of the classes"),
        (lambda: coco_file([(1, (0, 0, 0, 0))]), "'p/train.txt': no image has a box of the classes"),
        (lambda: coco_file([(1, GOOD)], categories={1: " "}), "the name of the class '' is empty"),
        (lambda: coco_file([(1, GOOD)], categories={1: "a\nb"}), r"the name of the class 'a\nb' has a line break"),
        (lambda: street(()), "--data street: has no classes"),
        (lambda: street((" ",)), "--data street: has no classes"),
    ]
    for make, message in cases:
        shutil.rmtree("street", ignore_errors=True)
        make()
        assert run("new mobilenet_ssd --data street --to p --force") == 2, message
        assert message in capsys.readouterr().err
        assert not Path("p/solver.prototxt").exists()


def test_categories_of_one_name_are_one_class():
    coco_file([(1, GOOD), (2, (6, 5, 9, 9)), (3, (9, 5, 9, 9))], categories={1: "car", 2: "bus", 3: "car"})
    coco_file([(1, GOOD)], categories={1: "car"}, name="val")
    Path("street/annotations/all.json").rename("street/annotations/train.json")
    assert run("new mobilenet_ssd --data street --to p") == 0
    assert Path("p/labels.txt").read_text().split() == ["car", "bus"]
    assert [label for label, _ in boxes("p/train_lmdb")["street/images/0.jpg"]] == [1, 1, 2]


def test_files_with_other_categories_are_refused(capsys: pytest.CaptureFixture[str]):
    coco_file([(1, GOOD)], name="train")
    coco_file([(1, GOOD)], categories={1: "bus"}, name="val")
    assert run("new mobilenet_ssd --data street --to p") == 2
    assert "val.json': category 1 is 'bus', but 'car' in the other file" in capsys.readouterr().err


def test_one_class_of_images_is_warned_of(caplog: pytest.LogCaptureFixture):
    photos(classes=("a",))
    assert run("new lenet --data photos --to p") == 0
    assert "--data photos: has one class, 'a': every image is of that class, and the loss is 0" in caplog.messages


# -- files that a data set names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "{cwd}/secret.jpg",
        "../../secret.jpg",
        "../secret.jpg",
        "x/../../../secret.jpg",
        "../street2/0.jpg",
        "link/../../secret.jpg",
    ],
)
def test_names_that_lead_out_of_the_data_set_are_refused(name: str, capsys: pytest.CaptureFixture[str]):
    write_image(Path("secret.jpg"), 1)
    write_image(Path("street2/0.jpg"), 1)
    Path("else/where").mkdir(parents=True)
    Path("street/images").mkdir(parents=True)
    Path("street/images/link").symlink_to(Path("else/where").resolve())
    name = name.format(cwd=Path.cwd())
    coco_file([(1, GOOD)], [name, "1.jpg"])
    assert run("new mobilenet_ssd --data street --to p") == 2
    assert f"image '{name}' leads out of the data set's folder 'street'" in capsys.readouterr().err
    assert not Path("p/train_lmdb").exists()


@pytest.mark.parametrize("data", ["street", "./street", "{cwd}/street", "p/../street"])
def test_names_that_stay_in_the_data_set(data: str):
    """Also absolute names, names with `..`, and links, which are the user's own."""
    write_image(Path("disk/0.jpg"), 1)
    Path("street").mkdir()
    Path("street/linked").symlink_to(Path("disk").resolve())
    Path("p").mkdir()
    names = [f"{Path.cwd()}/street/images/0.jpg", "../images/1.jpg", "./0.jpg", "linked/0.jpg"]
    coco_file([(1, GOOD)], names, name="train")
    coco_file([(1, GOOD)], name="val")
    assert main(["new", "mobilenet_ssd", "--data", data.format(cwd=Path.cwd()), "--to", "p"]) == 0
    wanted = [Path(name).resolve() for name in ("street/images/0.jpg", "street/images/1.jpg", "disk/0.jpg")]
    assert {Path(name).resolve() for name in boxes("p/train_lmdb")} == set(wanted)


def test_a_line_break_in_a_path_names_no_other_file(capsys: pytest.CaptureFixture[str]):
    write_image(Path("secret.png"), 1)
    photos()
    write_image(Path(f"photos/robin/x 0\n/{Path.cwd()}/secret.png"), 1)
    assert run("new lenet --data photos --to p") == 2
    assert "the path has a line break; rename the image or its folder" in capsys.readouterr().err
    assert not Path("p/train_lmdb").exists()


# -- weights and the tutorial --------------------------------------------------------------------------------


def test_the_readmes_say_where_weights_are():
    for model in (*CLASSIFIERS, *DETECTORS):
        text = (MODELS / model / "README.md").read_text()
        assert "\nWeights: " in text, model
        known = known_weights(model)
        assert known is None or (known[0].endswith(".caffemodel") and known[1].startswith("http"))
        sums = re.findall(r"SHA-(1|256)\s+`([0-9a-f]*)`", text)
        assert all(len(value) == {"1": 40, "256": 64}[kind] for kind, value in sums)
    assert known_weights("ssd300") is not None and known_weights("resnet50") is None


def write_weights(model: str, path: str) -> None:
    """Write random weights of a model's train net."""
    net = inputs(read_net(MODELS / model / "train_val.prototxt"), model)
    with CPU.activate():
        built = Net(filter_net(net, net_state(caffe_pb2.TRAIN)), LayerContext(CPU, phase=caffe_pb2.TRAIN))
        write_caffemodel(Path(path), built.name, built.layers)
        built.close()


def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]):
    """Its commands, on a small data set and random weights; N is the last iteration, which training names."""
    photos(count=2)
    street(count=2)
    write_weights("squeezenet", "squeezenet_v1.1.caffemodel")
    write_weights("mobilenet_ssd", "mobilenet_iter_73000.caffemodel")
    text = (ROOT / "docs/tutorials/own-data.md").read_text()
    commands = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    caffepy ")]
    assert [words[0] for words in commands] == ["new", "train", "classify", "new", "train", "detect"]
    for words in commands:
        trained = re.search(r"(\w+/\w+)_iter_N\.caffemodel", " ".join(words))
        if trained is not None:
            last = max(
                Path().glob(f"{trained[1]}_iter_*.caffemodel"), key=lambda path: int(path.stem.rpartition("_")[2])
            )
            words = [str(last) if word.endswith("_N.caffemodel") else word for word in words]
        assert main(words) == 0, words
        told = capsys.readouterr()
        if words[0] == "classify":
            assert told.out.count("photos/wren/") == 2 and all(name in told.out for name in CLASSES)
        if words[0] == "detect":
            assert told.out.startswith("image,label,name,score,")
        if words[0] == "train":
            assert "Optimization Done" in told.err
    for name in ("train_lmdb", "train.txt", "labels.txt", "train_val.prototxt", "solver.prototxt", "deploy.prototxt"):
        assert Path("birds", name).exists() and f"`{name}`" in text
    assert any(layer.name == "conv10_3" for layer in read_net(Path("birds/train_val.prototxt")).layer)

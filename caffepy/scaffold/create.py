"""A folder to train a model in for the user's own classes: databases, labels, nets and solver.

The train net and the solver are those of a model, changed for other classes and another data set.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.message import Message

from caffepy.data.conversion.annotation_sets import BoxCheck, boxed_reader
from caffepy.data.conversion.image_sets import Database, ImageOptions, convert_entries, convert_image_set
from caffepy.data.mean import compute_mean, write_mean
from caffepy.data.workers import Progress
from caffepy.errors import ConfigError, DataError, printable
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.proto import caffe_pb2
from caffepy.net.deploy import deploy_net, plan_deploy
from caffepy.scaffold.data_sets import DataSet, detection_data_set, folder_data_set, read_classes
from caffepy.scaffold.model_files import models_folder
from caffepy.utils.files import atomic_write, read_regular

logger = logging.getLogger(__name__)


# -- the model's nets and solver -----------------------------------------------------------------------

_LEARNED = {"Convolution": "convolution_param", "InnerProduct": "inner_product_param"}
_NEW_RATE = 10
"""Factor on the learning rate of layers that begin at random while the others have weights, as in Caffe's example of
finetuning; the whole rate is divided by it."""


def set_classes(net: caffe_pb2.NetParameter, classes: int) -> list[str]:
    """Change a classifier's net to a number of classes; return the names of the layers that compute the scores.

    These layers are renamed to name_classes, so that weights for other classes are not loaded into them. Accuracies
    over more classes than there are are removed.

    Raises:
        ConfigError: the net is no classifier.
    """
    scores = {layer.bottom[0] for layer in net.layer if layer.type == "SoftmaxWithLoss"}
    heads = [head for blob in sorted(scores) for head in _learned_before(net, blob)]
    if not heads:
        raise ConfigError(f"net '{net.name}' has no SoftmaxWithLoss behind a layer that learns")
    for head in heads:
        getattr(head, _LEARNED[head.type]).num_output = classes
        head.name = f"{head.name}_{classes}"
    kept = [layer for layer in net.layer if layer.accuracy_param.top_k <= 1 or layer.accuracy_param.top_k < classes]
    _replace_layers(net, kept)
    return [head.name for head in heads]


def set_boxed_classes(net: caffe_pb2.NetParameter, classes: int) -> list[str]:
    """Change an SSD's net to a number of classes, without the background; return the layers of the scores.

    Anchors (PriorBox) and boxes stay. The layers of the scores are renamed as by `set_classes`.

    Raises:
        ConfigError: the net is no SSD.
    """
    losses = [layer for layer in net.layer if layer.type == "MultiBoxLoss"]
    if not losses:
        raise ConfigError(f"net '{net.name}' has no MultiBoxLoss")
    before, after = losses[0].multibox_loss_param.num_classes, classes + 1
    heads = _learned_before(net, losses[0].bottom[1])
    for head in heads:
        head.convolution_param.num_output = head.convolution_param.num_output // before * after
        head.name = f"{head.name}_{classes}"
    for layer in net.layer:
        for name in ("multibox_loss_param", "detection_output_param", "detection_evaluate_param"):
            if layer.HasField(name):
                getattr(layer, name).num_classes = after
        if layer.type == "Reshape" and layer.bottom[0] == losses[0].bottom[1]:
            dims = layer.reshape_param.shape.dim
            dims[:] = [after if dim == before else dim for dim in dims]
    return [head.name for head in heads]


def _learned_before(net: caffe_pb2.NetParameter, blob: str) -> list[caffe_pb2.LayerParameter]:
    """Return the nearest layers before a blob that learn."""
    makers = [layer for layer in net.layer if blob in layer.top and blob not in layer.bottom]
    found: list[caffe_pb2.LayerParameter] = []
    for maker in makers:
        if maker.type in _LEARNED:
            found.append(maker)
        else:
            found += [layer for bottom in maker.bottom for layer in _learned_before(net, bottom)]
    return found


def _replace_layers(net: caffe_pb2.NetParameter, layers: Sequence[caffe_pb2.LayerParameter]) -> None:
    kept = caffe_pb2.NetParameter(layer=layers)
    net.ClearField("layer")
    net.layer.extend(kept.layer)


def learn_new_layers_faster(net: caffe_pb2.NetParameter, heads: Sequence[str]) -> None:
    """Multiply the rates of layers that begin at random, for training from weights."""
    for layer in net.layer:
        for param in layer.param if layer.name in heads else ():
            param.lr_mult *= _NEW_RATE


def data_layers(net: caffe_pb2.NetParameter) -> Iterator[tuple[caffe_pb2.LayerParameter, bool]]:
    """Yield the data layers, and whether each is of the TEST phase."""
    for layer in net.layer:
        if layer.type in ("Data", "AnnotatedData"):
            yield layer, any(rule.phase == caffe_pb2.TEST for rule in layer.include if rule.HasField("phase"))


def validation_batch(images: int, most: int) -> int:
    """Return a batch size for validation: the largest divisor of the number of images up to `most`.

    If that is less than half of `most`, `most` itself: the last batch then begins again with the first images.
    """
    most = min(images, most)
    best = max(size for size in range(1, most + 1) if images % size == 0)
    return best if 2 * best >= most else most


def adapt_solver(
    solver: caffe_pb2.SolverParameter, batch: int, images: tuple[int, int, int], epochs: int, finetuned: bool
) -> None:
    """Set the lengths and the rate of a model's solver for another data set.

    The rate is in proportion to the batch. Steps of the rate stay at the same part of the training.
    """
    own_batch, count, test_iterations = images
    epoch = max(1, math.ceil(count / (own_batch * max(solver.iter_size, 1))))
    total = epoch * epochs
    factor = total / solver.max_iter
    solver.base_lr = float(f"{solver.base_lr * own_batch / batch / (_NEW_RATE if finetuned else 1):.4g}")
    if solver.stepvalue:
        steps = sorted({max(1, round(value * factor)) for value in solver.stepvalue if value < solver.max_iter})
        solver.stepvalue[:] = steps
    if solver.stepsize:
        solver.stepsize = max(1, round(solver.stepsize * factor))
    solver.max_iter = total
    del solver.test_iter[:]
    solver.test_iter.append(test_iterations)
    solver.test_interval = epoch
    solver.snapshot = epoch * max(1, epochs // 10)
    solver.display = max(1, min(100, epoch // 5))
    solver.test_initialization = False


# -- the folder ----------------------------------------------------------------------------------------

CLASSIFIERS = (
    "alexnet",
    "caffenet",
    "cifar10",
    "densenet121",
    "googlenet",
    "inception_v3",
    "lenet",
    "mobilenet",
    "resnet152",
    "resnet18",
    "resnet50",
    "squeezenet",
    "vgg16",
    "vgg19",
)
DETECTORS = ("mobilenet_ssd", "ssd300")
_FILES = {
    "lenet": ("train_test", "solver", "deploy"),
    "cifar10": ("quick_train_test", "quick_solver", "quick_deploy"),
}
"""Names of the train net, solver and deploy net where they are not the usual ones."""
_LISTS_AND_DATABASES = ("train.txt", "val.txt", "train_lmdb", "val_lmdb")

_MAX_README_BYTES = 1 << 20
_NAMED = 5
"""Boxes or classes that a warning names."""
_WEIGHTS = re.compile(r"\[`([^`]+)`\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Project:
    """Settings of `create_project`.

    Args:
        model: one of `CLASSIFIERS` or `DETECTORS`.
        data: folder of the data set.
        to: folder to write.
        classes: file with the names of the classes; None: those of the data.
        finetuned: training begins from weights.
        share: part of the images for validation, if the data set is not divided.
        seed: seed of the division and of the order of the records.
        batch: images of an iteration in training; None: the model's.
        epochs: passes through the training images.
        encoded: store a classifier's images as JPEG.
        force: replace existing files.
    """

    model: str
    data: Path
    to: Path
    classes: Path | None = None
    finetuned: bool = False
    share: float = 0.2
    seed: int = 1
    batch: int | None = None
    epochs: int = 30
    encoded: bool = False
    force: bool = False

    @property
    def detects(self) -> bool:
        """Whether the model finds boxes."""
        return self.model in DETECTORS

    @property
    def snapshot_prefix(self) -> str:
        """The solver's snapshot_prefix."""
        return str(self.to / self.model)


@dataclass(frozen=True)
class Created:
    """The result of `create_project`.

    Attributes:
        classes: names of the classes.
        train: number of training images.
        val: number of validation images.
        skipped: number of unreadable images.
        max_iter: iterations of the solver.
    """

    classes: list[str]
    train: int
    val: int
    skipped: int
    max_iter: int


def known_weights(model: str) -> tuple[str, str] | None:
    """Return file name and address of the first weights that the model's README names; None: it names none."""
    text = read_regular(models_folder() / model / "README.md", _MAX_README_BYTES).decode()
    found = next((match for match in _WEIGHTS.finditer(text) if match[1].endswith(".caffemodel")), None)
    return None if found is None else (found[1], found[2])


def create_project(project: Project) -> Created:
    """Write databases, train net, deploy net, solver and labels for the user's classes.

    Raises:
        ConfigError: the data set has another layout than the model needs, or files exist.
        DataError: the data set is incomplete, or images cannot be read.
        RunError: a file cannot be written.
    """
    folder = models_folder() / project.model
    names = _FILES.get(project.model, ("train_val", "solver", "deploy"))
    net, solver = read_net(folder / f"{names[0]}.prototxt"), read_solver(folder / f"{names[1]}.prototxt")
    shown = read_net(folder / f"{names[2]}.prototxt").layer[0]
    _check_target(project, shown.transform_param.mean_file)
    data = _read_data(project)
    train, val = _write_databases(project, data, shown)
    count = len(data.classes)
    heads = set_boxed_classes(net, count) if project.detects else set_classes(net, count)
    if project.finetuned and not project.detects:
        learn_new_layers_faster(net, heads)
    _set_lengths(project, net, solver, (train, val))
    solver.net, solver.snapshot_prefix = "train_val.prototxt", project.snapshot_prefix
    _write(project.to / "train_val.prototxt", net, f"{project.model} for {count} classes.")
    _write(project.to / "solver.prototxt", solver, f"{project.epochs} passes through {train} images.")
    shape, size = list(shown.input_param.shape[0].dim)[1:], shown.image_data_param
    planned = plan_deploy(net, {"data": shape})
    if size.new_height:
        planned = replace(planned, sizes={"data": (size.new_height, size.new_width)})
    _write(project.to / "deploy.prototxt", deploy_net(net, planned), f"{project.model} for predictions.")
    _write_labels(project, data)
    skipped = len(data.train) + len(data.val) - train - val
    return Created(data.classes, train, val, skipped, solver.max_iter)


def _check_target(project: Project, mean_file: str) -> None:
    """Create the folder to write."""
    if not project.data.is_dir():
        raise ConfigError(f"--data {project.data}: is not a folder")
    if project.to.resolve().is_relative_to(project.data.resolve()):
        raise ConfigError(f"--to {project.to} lies in the data set {project.data}; give another folder")
    written = ["solver.prototxt", "train_val.prototxt", "deploy.prototxt", "labels.txt", *_LISTS_AND_DATABASES]
    written += ["labelmap.prototxt"] if project.detects else []
    there = [project.to / name for name in (*written, mean_file) if name and os.path.lexists(project.to / name)]
    there += [*(project.to / "annotations").glob("*")] if project.detects else []
    if there and not project.force:
        raise ConfigError(f"'{there[0]}' exists; give --to another folder, or --overwrite to replace its files")
    try:
        project.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {project.to}: cannot be made: {error.strerror}; give another folder") from error


def _read_data(project: Project) -> DataSet:
    classes = None if project.classes is None else read_classes(project.classes)
    settings = (project.data, classes, project.share, project.seed)
    detected = project.detects
    data = detection_data_set(*settings, project.to / "annotations") if detected else folder_data_set(*settings)
    _check_classes(project, data.classes)
    for entry in (*data.train, *data.val):
        if "\n" in entry.path:  # the lists have a line for each image
            raise DataError(f"'{entry.path}': the path has a line break; rename the image or its folder")
    if not data.val:
        raise DataError(
            f"--data {project.data}: no image is left for validation; add images, or give --val a larger part"
        )
    return data


def _check_classes(project: Project, names: list[str]) -> None:
    """Check that there are classes, and that each name is a line of labels.txt."""
    if not names:
        raise DataError(f"--data {project.data}: has no classes; add objects with names to the annotations")
    bad = next((name for name in names if not name.strip() or name != printable(name)), None)
    if bad is not None:
        fault = "has a line break or control character" if bad.strip() else "is empty"
        raise DataError(f"--data {project.data}: the name of the class '{bad}' {fault}; rename the class")
    if len(names) == 1 and not project.detects:
        logger.warning(
            "--data %s: has one class, '%s': every image is of that class, and the loss is 0", project.data, names[0]
        )


def _write_databases(project: Project, data: DataSet, shown: caffe_pb2.LayerParameter) -> tuple[int, int]:
    """Write lists and databases; return the number of records of each."""
    counts = []
    for name, entries in (("train", data.train), ("val", data.val)):
        listing, database = project.to / f"{name}.txt", Database(project.to / f"{name}_lmdb", force=project.force)
        lines = "".join(f"{entry.path} {entry.annotation or entry.label}\n" for entry in entries)
        with atomic_write(listing) as file:
            file.write(os.fsencode(lines))
        seed = project.seed if name == "train" else None
        if data.label_type:
            numbered = [replace(entry, number=number) for number, entry in enumerate(entries, 1)]
            kept, check = ImageOptions(encoded=True), BoxCheck()
            reader = boxed_reader(kept, data.label_type, data.labels, check)
            done = convert_entries(numbered, listing, database, kept, reader, seed, Progress())
            _report_boxes(listing, check, data.classes, name == "train")
        else:
            done = convert_image_set("", listing, database, _image_options(shown, project.encoded), seed)
        counts.append(done.records)
    if shown.transform_param.mean_file:
        write_mean(project.to / shown.transform_param.mean_file, compute_mean(project.to / "train_lmdb"))
    return counts[0], counts[1]


def _report_boxes(listing: Path, check: BoxCheck, classes: list[str], training: bool) -> None:
    """Log the boxes that are left out, and the classes without boxes."""
    for fault, count in sorted(Counter(fault for fault, _ in check.left_out).items()):
        places = sorted(where for other, where in check.left_out if other == fault)
        others = f" and {count - _NAMED} others" if count > _NAMED else ""
        logger.warning(
            "%s: %d boxes are left out, each %s: %s%s", listing, count, fault, "; ".join(places[:_NAMED]), others
        )
    if not check.labels and training:
        raise DataError(f"'{listing}': no image has a box of the classes; a detector learns nothing without boxes")
    lacking = [name for label, name in enumerate(classes, 1) if label not in check.labels]
    if lacking:
        logger.warning("%s: no box of %d of the classes: %s", listing, len(lacking), ", ".join(lacking[:_NAMED]))


def _image_options(shown: caffe_pb2.LayerParameter, encoded: bool) -> ImageOptions:
    """Return how images are stored: in the size before the model's crop, gray if its input is."""
    _, channels, height, width = shown.input_param.shape[0].dim
    size = shown.image_data_param
    return ImageOptions(
        gray=channels == 1,
        resize_height=size.new_height or height,
        resize_width=size.new_width or width,
        encoded=encoded,
        encode_type="jpg" if encoded else "",
    )


def _set_lengths(
    project: Project, net: caffe_pb2.NetParameter, solver: caffe_pb2.SolverParameter, records: tuple[int, int]
) -> None:
    """Set databases, batch sizes and the solver's lengths for the numbers of training and validation images."""
    before, batch, tests = 0, 0, 0
    for layer, is_test in data_layers(net):
        param = layer.data_param
        if is_test:
            param.source, param.batch_size = "val_lmdb", validation_batch(records[1], param.batch_size)
            tests = math.ceil(records[1] / param.batch_size)
        else:
            before, batch = param.batch_size, project.batch or param.batch_size
            param.source, param.batch_size = "train_lmdb", batch
        if layer.HasField("annotated_data_param"):
            layer.annotated_data_param.label_map_file = "labelmap.prototxt"
    finetuned = project.finetuned and not project.detects
    adapt_solver(solver, before, (batch, records[0], tests), project.epochs, finetuned)


def _write_labels(project: Project, data: DataSet) -> None:
    with atomic_write(project.to / "labels.txt") as file:
        file.write("".join(f"{name}\n" for name in data.classes).encode("utf-8", "surrogateescape"))
    if project.detects:
        labels = caffe_pb2.LabelMap()
        labels.item.add(name="none_of_the_above", label=0, display_name="background")
        for label, name in enumerate(data.classes, 1):
            labels.item.add(name=name, label=label, display_name=name)
        _write(project.to / "labelmap.prototxt", labels, "Labels in the databases and their names.")


def _write(path: Path, message: Message, comment: str) -> None:
    with atomic_write(path) as file:
        file.write(
            f"# {comment} Written by caffepy new.\n{text_format.MessageToString(message, as_utf8=True)}".encode()
        )

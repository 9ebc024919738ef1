"""Data sets in folders: a folder per class, Pascal VOC's layout, and COCO's."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caffepy.data.conversion.annotation_sets import voc_class_names
from caffepy.data.conversion.image_sets import ListEntry, shuffled
from caffepy.errors import ConfigError, DataError
from caffepy.utils.files import atomic_write, read_list, read_regular
from caffepy.utils.registry import suggest

logger = logging.getLogger(__name__)

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of image files."""
_TRAIN = ("train", "training")
_VAL = ("val", "valid", "validation", "test")
_MAX_LIST_BYTES = 1 << 28
_MAX_JSON_BYTES = 1 << 30


@dataclass(frozen=True)
class DataSet:
    """Images for training and validation.

    Attributes:
        classes: names; a classifier's labels count from 0, a detector's from 1.
        train: images with a label or an annotation file.
        val: the same for validation.
        label_type: format of the annotation files, as in `AnnotationOptions`; "" if the images have labels.
        labels: label of each name in the annotation files.
    """

    classes: list[str]
    train: list[ListEntry]
    val: list[ListEntry]
    label_type: str = ""
    labels: dict[str, int] = field(default_factory=dict)


def read_classes(path: Path) -> list[str]:
    """Return the names of a file with one class per line.

    Raises:
        DataError: the file cannot be read, names no class, or names one twice.
    """
    lines = read_list(path, _MAX_LIST_BYTES, f"--classes {path}:").split("\n")
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise DataError(f"--classes {path}: names no class; write one per line")
    twice, often = Counter(names).most_common(1)[0]
    if often > 1:
        raise DataError(f"--classes {path}: names '{twice}' twice; remove one")
    return names


def split(entries: Sequence[ListEntry], share: float, seed: int) -> tuple[list[ListEntry], list[ListEntry]]:
    """Divide images at random into training and validation: `share` of them for validation, but at least one of two.

    Images keep their order.
    """
    count = min(max(round(share * len(entries)), 1 if share > 0 else 0), len(entries) - 1)
    chosen = set(shuffled(range(len(entries)), seed)[:count])
    return (
        [entry for number, entry in enumerate(entries) if number not in chosen],
        [entry for number, entry in enumerate(entries) if number in chosen],
    )


def images_in(folder: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def _subfolders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


# -- a folder per class --------------------------------------------------------------------------------------


def folder_data_set(folder: Path, classes: list[str] | None, share: float, seed: int) -> DataSet:
    """Return the data set of a folder with a folder of images for each class.

    The classes' folders are in `folder`, which is then divided at random class by class, or in its folders `train` and
    `val`.

    Args:
        folder: the folder.
        classes: the classes in the order of their labels; None: the folders' names in alphabetical order.
        share: the part of the images for validation.
        seed: seed of the division.

    Raises:
        DataError: a class has no images, or a folder is not a class.
    """
    found = {entry.name: entry for entry in _subfolders(folder)}
    train = next((found[name] for name in _TRAIN if name in found), None)
    val = next((found[name] for name in _VAL if name in found), None)
    if train is not None and val is not None and set(found) <= {*_TRAIN, *_VAL}:
        classes = classes or [entry.name for entry in _subfolders(train)]
        return DataSet(classes, _labelled(train, classes), _labelled(val, classes))
    classes = classes or list(found)
    by_label: list[list[ListEntry]] = [[] for _ in classes]
    for entry in _labelled(folder, classes):
        by_label[entry.label].append(entry)
    parts = [split(entries, share, seed + label) for label, entries in enumerate(by_label)]
    return DataSet(classes, [one for part in parts for one in part[0]], [one for part in parts for one in part[1]])


def _labelled(folder: Path, classes: Sequence[str]) -> list[ListEntry]:
    if not classes:
        raise DataError(f"'{folder}' has no folders; put the images of each class into a folder of the class's name")
    names = {entry.name: None for entry in _subfolders(folder)}
    known = set(classes)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise DataError(f"'{folder / unknown}' is not a class; {suggest(unknown, classes)}")
    entries = []
    for label, name in enumerate(classes):
        paths = images_in(folder / name) if name in names else []
        if not paths:
            raise DataError(f"class '{name}' has no images in '{folder / name}'; add some, or remove the class")
        entries += [ListEntry(0, str(path), str(path), label) for path in paths]
    return entries


# -- Pascal VOC ----------------------------------------------------------------------------------------------


def voc_data_set(folder: Path, classes: list[str] | None, share: float, seed: int) -> DataSet:
    """Return the data set of a folder with `Annotations`, `JPEGImages` and perhaps `ImageSets/Main`.

    Lists of ImageSets/Main decide on the division: train.txt and val.txt, else trainval.txt and test.txt; otherwise
    images are divided at random.

    Raises:
        DataError: an image or annotation is missing, or there are no classes.
    """
    images = {path.stem: path for path in images_in(folder / "JPEGImages")}
    if not images:
        raise DataError(f"'{folder / 'JPEGImages'}' has no images")
    lists = folder / "ImageSets" / "Main"
    listed = {name: lists / f"{name}.txt" for name in ("train", "val", "trainval", "test")}
    pair = next(
        (pair for pair in (("train", "val"), ("trainval", "test")) if all(listed[name].is_file() for name in pair)),
        None,
    )
    if pair is not None:
        train, val = (_voc_entries(folder, _list_of_stems(listed[name]), images, str(listed[name])) for name in pair)
    else:
        annotated = folder / "Annotations"
        stems = [stem for stem in sorted(images) if (annotated / f"{stem}.xml").is_file()]
        train, val = split(_voc_entries(folder, stems, images, str(annotated)), share, seed)
    if classes is None:
        classes = sorted({name for entry in [*train, *val] for name in voc_class_names(Path(entry.annotation))})
    return DataSet(classes, train, val, "xml", {name: label for label, name in enumerate(classes, 1)})


def _list_of_stems(path: Path) -> list[str]:
    lines = read_list(path, _MAX_LIST_BYTES, f"'{path}'").split("\n")
    return [line.split()[0] for line in lines if line.split()]


def _voc_entries(folder: Path, stems: Iterable[str], images: dict[str, Path], origin: str) -> list[ListEntry]:
    entries = []
    for stem in stems:
        annotation = folder / "Annotations" / f"{stem}.xml"
        if stem not in images or not os.path.isfile(annotation):
            lacking = annotation if stem in images else folder / "JPEGImages" / f"{stem}.jpg"
            raise DataError(f"'{origin}': image '{stem}' has no file '{lacking}'; add it, or remove the image")
        path = str(images[stem])
        entries.append(ListEntry(0, path, path, -1, str(annotation)))
    if not entries:
        raise DataError(f"'{origin}' names no image with an annotation")
    return entries


# -- COCO ----------------------------------------------------------------------------------------------------


def coco_data_set(folder: Path, classes: list[str] | None, share: float, seed: int, target: Path) -> DataSet:
    """Return the data set of a folder with COCO's `annotations/*.json`; writes an annotation file for each image.

    A file whose name contains "train" and one whose name contains "val" decide on the division; a single file is
    divided at random. Images lie in the folder, in its `images`, or in the folder of the set (`train2017`).

    Raises:
        DataError: a file is not COCO's, or an image is missing.
    """
    files = sorted((folder / "annotations").glob("*.json"))
    if not files:
        raise DataError(f"'{folder / 'annotations'}' has no .json files")
    pair = [next((path for path in files if word in path.stem), None) for word in ("train", "val")]
    if None in pair:
        if len(files) != 1:
            found = ", ".join(path.name for path in files)
            raise DataError(f"'{folder / 'annotations'}' has {found}; name two of them *train*.json and *val*.json")
        pair = [files[0], None]
    documents = [_CocoFile(path, folder) for path in pair if path is not None]
    categories: dict[int, str] = {}
    for document in documents:
        document.add_categories(categories)
    names = classes or list(dict.fromkeys(name for _, name in sorted(categories.items())))
    known = set(categories.values())
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise DataError(f"'{files[0]}' has no category '{unknown}'; {suggest(unknown, known)}")
    label_of = {name: label for label, name in enumerate(names, 1)}
    labels = {str(key): label_of[name] for key, name in categories.items() if name in label_of}
    made = [document.entries(set(labels), target) for document in documents]
    train, val = (made[0], made[1]) if len(made) == 2 else split(made[0], share, seed)
    return DataSet(names, train, val, "json", labels)


class _CocoFile:
    """A file of COCO's annotations.

    Args:
        path: the file.
        folder: the data set's folder.

    Raises:
        DataError: the file cannot be read or is not COCO's.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self._folder = path, folder
        try:
            document = json.loads(read_regular(path, _MAX_JSON_BYTES))
            self._images = {item["id"]: item for item in document["images"]}
            twice, often = next(iter(Counter(item["id"] for item in document["images"]).most_common(1)), (None, 0))
            self._categories = {int(item["id"]): str(item["name"]).strip() for item in document["categories"]}
            self._boxes: dict[Any, list[dict[str, Any]]] = {}
            for item in document["annotations"]:
                kept = {name: item[name] for name in ("category_id", "bbox")} | {"iscrowd": item.get("iscrowd", 0)}
                self._boxes.setdefault(item["image_id"], []).append(kept)
        except OSError as error:
            raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"'{path}' is not COCO's annotations of objects ({type(error).__name__}: {error}); it needs images, "
                "categories and annotations"
            ) from error
        if often > 1:
            raise DataError(f"'{path}': {often} images have the id {twice!r}; give each image another id")

    def add_categories(self, categories: dict[int, str]) -> None:
        """Add the file's categories to those of another file."""
        for key, name in self._categories.items():
            if categories.setdefault(key, name) != name:
                raise DataError(
                    f"'{self.path}': category {key} is '{name}', but '{categories[key]}' in the other file; give both "
                    "files the same categories"
                )

    def entries(self, categories: set[str], target: Path) -> list[ListEntry]:
        """Return the images, with an annotation file each; boxes of other categories are left out."""
        target.mkdir(exist_ok=True)
        known = set(map(str, self._categories))
        unlisted, unknown, entries = 0, Counter[str](), []
        for number, (key, item) in enumerate(self._images.items()):
            path = self._find(str(item.get("file_name")))
            boxes, kept = self._boxes.pop(key, []), []
            for box in boxes:
                category = str(box["category_id"])
                if category in categories:
                    kept.append(box)
                elif category in known:
                    unlisted += 1
                else:
                    unknown[category] += 1
            annotation = target / f"{self.path.stem}_{number:06d}.json"
            content = {"image": {"height": item.get("height"), "width": item.get("width")}, "annotation": kept}
            with atomic_write(annotation) as file:
                file.write(json.dumps(content).encode())
            entries.append(ListEntry(0, str(path), str(path), -1, str(annotation)))
        if unlisted:
            logger.info("%s: %d boxes of classes that are not listed are left out", self.path, unlisted)
        if unknown:
            logger.warning(
                "%s: %d boxes are left out: the file has no category %s",
                self.path,
                unknown.total(),
                _some([repr(category) for category in unknown]),
            )
        if self._boxes:
            logger.warning(
                "%s: %d boxes are left out: the file has no image with the id %s",
                self.path,
                sum(map(len, self._boxes.values())),
                _some([repr(key) for key in self._boxes]),
            )
        if not entries:
            raise DataError(f"'{self.path}' names no images")
        return entries

    def _find(self, name: str) -> str:
        """Return the path of an image; links in the data set's folder are followed, as they are the user's."""
        word, outside = self.path.stem.removeprefix("instances_"), False
        folders = ["images/" + word, word, "images", ""]
        for folder in folders:
            inner = os.path.normpath(os.path.join(folder, name))
            if os.path.isabs(inner):
                inner = os.path.relpath(inner, os.path.abspath(self._folder))
            if inner.split(os.sep)[0] == os.pardir:
                outside = True
            elif os.path.isfile(self._folder / inner):
                return str(self._folder / inner)
        if outside:
            raise DataError(
                f"'{self.path}': image '{name}' leads out of the data set's folder '{self._folder}' or does not "
                "exist; name images by their paths in that folder"
            )
        searched = ", ".join(str(self._folder / folder) for folder in folders)
        raise DataError(f"'{self.path}': image '{name}' is in none of {searched}")


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list as text."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


def detection_data_set(folder: Path, classes: list[str] | None, share: float, seed: int, target: Path) -> DataSet:
    """Return the data set of a folder in VOC's or COCO's layout; arguments as in `coco_data_set`.

    Raises:
        ConfigError: the folder has neither layout.
        DataError: as in `voc_data_set` and `coco_data_set`.
    """
    if (folder / "Annotations").is_dir() and (folder / "JPEGImages").is_dir():
        return voc_data_set(folder, classes, share, seed)
    if (folder / "annotations").is_dir():
        return coco_data_set(folder, classes, share, seed, target)
    raise ConfigError(
        f"--data {os.fspath(folder)}: has neither Annotations and JPEGImages, as Pascal VOC, nor annotations/*.json, "
        "as COCO; a detector needs one of them"
    )

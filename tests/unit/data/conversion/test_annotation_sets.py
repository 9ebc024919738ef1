"""convert_annoset and get_image_size: the records of SSD's tools, against AnnotatedDatums made by hand."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import cv2
import lmdb
import numpy as np
import pytest

from caffepy.data.conversion.annotation_sets import AnnotationOptions, convert_annotation_set, write_image_sizes
from caffepy.data.conversion.image_sets import Database, ImageOptions
from caffepy.data.transforms.boxes import parse_annotated_datum
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto.caffe_pb2 import AnnotatedDatum, Datum

PICTURE = np.random.default_rng(3).integers(0, 256, (40, 60, 3), np.uint8)
XML = """
<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth></size>
{objects}
</annotation>"""
OBJECT = """<object><name>{name}</name><part><name>head</name></part><difficult>{difficult}</difficult>
<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"""
DETECTION = {"anno_type": "detection", "label_map_file": Path("map.prototxt")}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cv2.imwrite("1.png", PICTURE)
    Path("list.txt").write_text("1.png 1.anno\n")
    Path("map.prototxt").write_text('item { name: "dog" label: 7 } item { name: "cat" label: 2 }')
    write_xml(("dog", 0, (6, 4, 30, 20)), ("cat", 1, (0, 0, 60, 40)), ("dog", 1, (1, 2, 3, 4)))


def write_xml(*objects: tuple[str, int, tuple], height: object = 40, width: object = 60) -> None:
    text = "".join(OBJECT.format(name=name, difficult=difficult, box=box) for name, difficult, box in objects)
    Path("1.anno").write_text(XML.format(objects=text, height=height, width=width))


def convert(images: ImageOptions | None = None, **options) -> AnnotatedDatum:
    """The only record of a new LMDB."""
    images = images or ImageOptions(encoded=True, threads=1)
    target = Database(Path("db"), force=True)
    convert_annotation_set("", Path("list.txt"), target, images, AnnotationOptions(**options))
    with lmdb.open("db", readonly=True, lock=False) as environment, environment.begin() as transaction:
        [(key, record)] = transaction.cursor()
    assert key == b"00000000_1.png"
    parsed = AnnotatedDatum.FromString(record)
    assert parsed.SerializeToString() == record  # the fields in their order, nothing else
    return parsed


def expected(*boxes: tuple[int, tuple[float, ...], bool]) -> AnnotatedDatum:
    datum = Datum(channels=3, height=40, width=60, data=Path("1.png").read_bytes(), label=-1, encoded=True)
    result = AnnotatedDatum(datum=datum, type=AnnotatedDatum.BBOX)
    for label, (xmin, ymin, xmax, ymax), difficult in boxes:
        group = next((one for one in result.annotation_group if one.group_label == label), None)
        group = group or result.annotation_group.add(group_label=label)
        box = group.annotation.add(instance_id=len(group.annotation)).bbox
        box.xmin, box.ymin = np.float32(xmin) / np.float32(60), np.float32(ymin) / np.float32(40)
        box.xmax, box.ymax = np.float32(xmax) / np.float32(60), np.float32(ymax) / np.float32(40)
        box.difficult = difficult
    return result


def test_boxes_of_xml():
    assert convert(**DETECTION) == expected(
        (7, (6, 4, 30, 20), False), (2, (0, 0, 60, 40), True), (7, (1, 2, 3, 4), True)
    )


def test_a_data_layer_reads_them():
    _, found = parse_annotated_datum(convert(**DETECTION).SerializeToString())
    assert found.labels.tolist() == [7, 7, 2] and found.difficult.tolist() == [False, True, True]


def test_corners_with_decimals_are_kept():
    write_xml(("dog", 0, (1.5, 2.25, 3.5, 4.75)))
    assert convert(**DETECTION) == expected((7, (1.5, 2.25, 3.5, 4.75), False))


def test_boxes_of_json():
    annotation = [
        {"category_id": 18, "bbox": [1.5, 2.5, 10.25, 20.125], "iscrowd": 0},
        {"category_id": "18", "bbox": [0, 0, 60, 40], "iscrowd": 1},
    ]
    Path("1.anno").write_text(json.dumps({"image": {"height": 40, "width": 60}, "annotation": annotation}))
    Path("map.prototxt").write_text('item { name: "18" label: 16 }')
    assert convert(label_type="json", **DETECTION) == expected(
        (16, (1.5, 2.5, 11.75, 22.625), False), (16, (0, 0, 60, 40), True)
    )


def test_boxes_of_text_need_no_label_map():
    Path("1.anno").write_text("3 1 2 3.5 4\n\n3 0 0 60 40\n")
    assert convert(label_type="txt", anno_type="detection") == expected(
        (3, (1, 2, 3.5, 4), False), (3, (0, 0, 60, 40), False)
    )


def test_an_image_without_its_annotation_gets_no_boxes(caplog: pytest.LogCaptureFixture):
    Path("1.anno").unlink()
    assert convert(**DETECTION) == expected()
    assert "'1.anno' does not exist: '1.png' gets no boxes" in caplog.messages


def test_boxes_count_in_the_size_that_the_annotation_says(caplog: pytest.LogCaptureFixture):
    write_xml(("cat", 0, (0, 0, 30, 20)), height=20, width=30)
    [group] = convert(**DETECTION).annotation_group
    assert (group.annotation[0].bbox.xmax, group.annotation[0].bbox.ymax) == (1, 1)
    assert "'1.anno': declares 20 x 30, but the image is 40 x 60" in caplog.messages


def test_without_a_size_the_images_own_counts(caplog: pytest.LogCaptureFixture):
    write_xml(("cat", 0, (0, 0, 60, 41)), height="unknown")
    [group] = convert(**DETECTION).annotation_group
    assert group.annotation[0].bbox.xmax == 1
    assert caplog.messages[:2] == [
        "'1.anno' has no image size; using the image's own size",
        "'1.anno': the box (0, 0, 60, 41) does not lie within 40 x 60",
    ]


def test_boxes_without_an_area_are_named_and_kept_as_in_caffe(caplog: pytest.LogCaptureFixture):
    write_xml(("cat", 0, (30, 0, 10, 20)), ("cat", 0, (9, 0, 9, 20)))
    [group] = convert(**DETECTION).annotation_group
    assert len(group.annotation) == 2
    assert "'1.anno': the box (30, 0, 10, 20) is inverted" in caplog.messages
    assert "'1.anno': the box (9, 0, 9, 20) has no width or no height" in caplog.messages


def test_labels_of_a_classification():
    Path("list.txt").write_text("1.png 5\n")
    found = convert(ImageOptions(threads=1))
    planes = PICTURE.transpose(2, 0, 1).tobytes()
    assert found == AnnotatedDatum(datum=Datum(channels=3, height=40, width=60, data=planes, label=5, encoded=False))


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        ({"min_dim": 60}, (60, 90)),
        ({"min_dim": 60, "max_dim": 80}, (53, 80)),
        ({"max_dim": 30, "resize_height": 9, "resize_width": 9}, (20, 30)),
        ({"min_dim": 20, "max_dim": 100}, (40, 60)),
    ],
)
def test_smallest_and_largest_sides(limits: dict[str, int], size: tuple[int, int]):
    found = convert(ImageOptions(threads=1, **limits), **DETECTION)
    assert (found.datum.height, found.datum.width) == size
    assert found.annotation_group[0].annotation[0].bbox.xmin == np.float32(6) / np.float32(60)
    scaled = cv2.resize(PICTURE, None, fx=size[1] / 60, fy=size[1] / 60) if size != (40, 60) else PICTURE
    assert found.datum.data == scaled.transpose(2, 0, 1).tobytes()


def test_encoded_records_have_their_size():
    found = convert(ImageOptions(encode_type="jpg", threads=1), **DETECTION).datum
    assert (found.channels, found.height, found.width, found.encoded) == (3, 40, 60, True)
    assert found.data == cv2.imencode(".jpg", PICTURE)[1].tobytes()


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]><annotation>&b;</annotation>'


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "xml",
            XML.format(height=1, width=1, objects=OBJECT.format(name="dgo", difficult=0, box=(0, 0, 1, 1))),
            "'1.anno': the class 'dgo' is not in the label map; did you mean 'dog'",
        ),
        ("xml", "<annotation><object>", "'1.anno' is not XML: no element found"),
        ("xml", "", "'1.anno' is not XML: no element found"),
        ("xml", BOMB, "'1.anno' has a DOCTYPE"),
        ("xml", "<a/>", "the root element is <a>, not VOC's <annotation>"),
        ("xml", XML.format(height=0, width=1, objects=""), "'1.anno': the image's size is 0 x 1; correct it"),
        (
            "xml",
            XML.format(height=1, width="9" * 400, objects=OBJECT.format(name="dog", difficult=0, box=(0, 0, 1, 1))),
            "'1.anno': the image's size is 1 x 9+; correct it",
        ),
        ("xml", XML.format(height=1, width=1, objects="<object><name>dog</name></object>"), "object 1 has no <bndbox>"),
        (
            "xml",
            XML.format(height=1, width=1, objects=OBJECT.format(name="dog", difficult=0, box="x123")),
            "'1.anno': object 1: xmin is 'x', not a number",
        ),
        (
            "xml",
            XML.format(height=1, width=1, objects=OBJECT.format(name="dog", difficult=0, box=("nan", 1, 1, 1))),
            "not finite",
        ),
        ("json", "{", "'1.anno' is not JSON"),
        ("json", "[" * 200_000, "'1.anno' is not JSON"),
        ("json", '{"annotation": [{"category_id": 1}]}', "is not a COCO annotation of one image"),
        ("json", '{"annotation": [{"category_id": "dog", "bbox": [1]}]}', "annotation 1: bbox has 1 numbers"),
        ("txt", "dog 1 2 3 4", "'1.anno':1: a line is a label number, xmin"),
        ("txt", "1 1 2 3 x", "'1.anno':1: a corner is 'x', not a number"),
    ],
)
def test_annotations_that_are_none(kind: str, text: str, message: str):
    Path("1.anno").write_text(text)
    with pytest.raises(DataError, match=message):
        convert(label_type=kind, **DETECTION)
    assert not Path("db").exists()


def test_label_maps_that_are_none():
    with pytest.raises(ConfigError, match="--label_map_file"):
        convert(anno_type="detection")
    Path("map.prototxt").write_text('item { name: "dog" label: 7 } item { name: "dog" label: 1 }')
    with pytest.raises(DataError, match="map.prototxt: the name 'dog' occurs twice"):
        convert(check_label=True, **DETECTION)


def test_a_line_has_two_words():
    Path("list.txt").write_text("1.png\n")
    with pytest.raises(DataError, match="'list.txt':1: has 1 words; a line is an image and its annotation"):
        convert(**DETECTION)


# -- sizes -----------------------------------------------------------------------------------------------


def test_sizes_of_images(caplog: pytest.LogCaptureFixture):
    Path("list.txt").write_text("1.png x\nabsent.png x\n")
    with caplog.at_level(logging.INFO):
        done = write_image_sizes("", Path("list.txt"), Path("sizes.txt"), threads=1)
    assert Path("sizes.txt").read_text() == "1 40 60\n" and (done.records, done.skipped) == (1, 1)
    assert "'list.txt':2: skipped: 'absent.png' cannot be read: No such file or directory" in caplog.messages


def test_numbers_instead_of_names():
    Path("ids.txt").write_text("1 1234\n")
    Path("list.txt").write_text("1.png x\n")
    write_image_sizes("", Path("list.txt"), Path("sizes.txt"), Path("ids.txt"))
    assert Path("sizes.txt").read_text() == "1234 40 60\n"
    Path("ids.txt").write_text("2 1234\n")
    with pytest.raises(DataError, match="'ids.txt' has no number for '1'"):
        write_image_sizes("", Path("list.txt"), Path("sizes.txt"), Path("ids.txt"))
    Path("list.txt").write_text("2.png x\n")
    with pytest.raises(DataError, match="none of the images of 'list.txt' can be read"):
        write_image_sizes("", Path("list.txt"), Path("sizes.txt"))

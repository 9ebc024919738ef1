import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from memory_records import Records
from training import build_net

from caffepy.data.prefetch import Batch
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.data.transform import DataTransformer
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, AnnotatedDatum, BatchSampler, Datum, TransformationParameter
from caffepy.layers.input.annotated_data import AnnotatedLoader, AnnotatedSettings, first_boxes

CORNERS = np.array([[0.1, 0.2, 0.5, 0.6], [0.5, 0.5, 1.0, 0.9], [0.0, 0.0, 0.2, 0.3]], np.float32)


def pixels(number, height=20, width=30):
    return np.random.default_rng(number).integers(0, 256, (3, height, width), dtype=np.uint8)


def record(number, corners=CORNERS, height=20, width=30, encoded=False):
    image = pixels(number, height, width)
    datum = Datum(channels=3, height=height, width=width, data=image.tobytes(), label=number)
    if encoded:
        data = cv2.imencode(".png", np.ascontiguousarray(image.transpose(1, 2, 0)))[1].tobytes()
        datum = Datum(data=data, encoded=True, label=number)
    made = AnnotatedDatum(datum=datum, type=AnnotatedDatum.BBOX)
    for label, (xmin, ymin, xmax, ymax) in enumerate(corners, 1):
        annotation = made.annotation_group.add(group_label=label).annotation.add(instance_id=10 + label)
        annotation.bbox.xmin, annotation.bbox.ymin, annotation.bbox.xmax, annotation.bbox.ymax = xmin, ymin, xmax, ymax
        annotation.bbox.difficult = label == 2
    return made


def loader(records, text="", samplers=(), phase=TRAIN, threads=1, **settings):
    param = text_format.Parse(text, TransformationParameter())
    transformer = DataTransformer(param, phase, where="layer 'd'", annotated=True)
    chosen = [text_format.Parse(sampler, BatchSampler()) for sampler in samplers]
    own = AnnotatedSettings(param, chosen, **settings)
    order = Sampler(len(records))
    return AnnotatedLoader(Records(records), order, transformer, 1, 2, "layer 'd'", threads, settings=own)


def load(subject, first, count):
    batch = Batch(2)
    subject.load(first, count, batch)
    return batch.arrays


def test_rows():
    images, rows = load(loader([record(0), record(1, CORNERS[:1])]), 0, 3)
    assert images.shape == (3, 3, 20, 30)
    assert rows.shape == (1, 1, 7, 8)
    wanted = [(item, label) for item, boxes in enumerate((3, 1, 3)) for label in range(1, boxes + 1)]
    np.testing.assert_array_equal(rows[0, 0, :, :2], wanted)
    np.testing.assert_array_equal(rows[0, 0, :3, 2], [11, 12, 13])
    np.testing.assert_allclose(rows[0, 0, :3, 3:7], CORNERS, rtol=1e-6)
    np.testing.assert_array_equal(rows[0, 0, :, 7], [0, 1, 0, 0, 0, 1, 0])


def test_a_batch_without_boxes_has_one_row_of_minus_one():
    np.testing.assert_array_equal(load(loader([record(0, CORNERS[:0])]), 0, 2)[1], np.full((1, 1, 1, 8), -1))


def test_rows_may_be_filled_up_so_that_their_number_seldom_changes():
    subject = loader([record(0), *[record(n, np.tile(CORNERS, (8, 1))) for n in (1, 2)]])
    batch, counts = Batch(2), []
    batch.least_rows = 16
    for first in (0, 1, 0):
        subject.load(first, 1, batch)
        counts.append(batch.arrays[1].shape[2])
    assert counts == [16, 32, 32]
    rows = batch.arrays[1][0, 0]
    assert (rows[:3, 0] == 0).all()
    assert (rows[3:] == -1).all()


def marked(corners, height=200, width=300):
    """A record whose image is black but for its only box, which is white."""
    made = record(0, [corners], height, width)
    image = np.zeros((3, height, width), np.uint8)
    left, top, right, bottom = np.rint(np.array(corners) * [width, height, width, height]).astype(int)
    image[:, top:bottom, left:right] = 255
    made.datum.data = image.tobytes()
    return made


@pytest.mark.parametrize(
    ("text", "samplers"),
    [
        ("mirror: true", ()),
        ("crop_size: 150 mirror: true", ()),
        ("crop_h: 100 crop_w: 250", ()),
        ("expand_param { max_expand_ratio: 3 }", ()),
        ("resize_param { height: 120 width: 90 }", ()),
        ("resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 120 width: 90 } mirror: true", ()),
        ("resize_param { resize_mode: FIT_SMALL_SIZE height: 120 width: 90 } crop_size: 80", ()),
        ("", ("sampler { min_scale: 0.5 max_scale: 0.9 min_aspect_ratio: 0.5 max_aspect_ratio: 2 }",)),
        (
            "mirror: true expand_param { max_expand_ratio: 2 } resize_param { height: 150 width: 150 } crop_size: 140",
            ("sampler { min_scale: 0.6 } sample_constraint { min_object_coverage: 0.9 }",),
        ),
    ],
)
def test_boxes_go_where_the_pixels_go(text, samplers):
    subject = loader([marked((0.2, 0.4, 0.5, 0.7))], text, samplers)
    moved = set()
    for sample in range(20):
        images, rows = load(subject, sample, 1)
        bright = np.argwhere(images[0, 0] > 127)
        height, width = images.shape[2:]
        if rows[0, 0, 0, 0] == -1:
            assert len(bright) < 0.01 * height * width
            continue
        (ymin, xmin), (ymax, xmax) = bright.min(0), bright.max(0) + 1
        found = rows[0, 0, 0, 3:7] * [width, height, width, height]
        np.testing.assert_allclose(found, [xmin, ymin, xmax, ymax], atol=2.5)
        moved.add(tuple(np.rint(found)))
    assert len(moved) > (0 if text.startswith("resize_param { height") else 1)


def test_the_canvas_has_the_means_color_and_the_ratio_its_range():
    subject = loader([marked((0.0, 0.0, 1.0, 1.0), 20, 30)], "expand_param { max_expand_ratio: 4 } mean_value: 40")
    areas = []
    for sample in range(100):
        images = load(subject, sample, 1)[0][0] + 40
        assert set(np.unique(images)) <= {40, 255}
        assert (images == 255).sum() == 3 * 20 * 30
        areas.append(images.shape[1] / 20)
    assert 1 <= min(areas) < 1.3
    assert 3.7 < max(areas) <= 4
    plain = loader([record(0)], "expand_param { prob: 0 max_expand_ratio: 4 }")
    assert load(plain, 3, 1)[0].shape == (1, 3, 20, 30)


def test_an_image_is_expanded_as_often_as_its_chance_says():
    text = "expand_param { prob: 0.3 max_expand_ratio: 3 }"
    subject = loader([record(0)], text)
    larger = sum(load(subject, sample, 1)[0].shape[2] > 20 for sample in range(400))
    assert abs(larger / 400 - 0.3) < 0.07  # one in 40 is expanded by less than a row


def test_encoded_records_are_written_as_jpeg_again_after_each_change():
    """As Caffe does; raw ones are not."""
    text = "distort_param { }"
    image = np.ascontiguousarray(pixels(0).transpose(1, 2, 0))
    jpeg = cv2.imdecode(cv2.imencode(".jpg", image)[1], cv2.IMREAD_COLOR).transpose(2, 0, 1)
    np.testing.assert_array_equal(load(loader([record(0, encoded=True)], text), 0, 1)[0][0], jpeg)
    np.testing.assert_array_equal(load(loader([record(0)], text), 0, 1)[0][0], pixels(0))


def test_without_recompression_an_encoded_image_is_augmented_as_a_raw_one():
    text = "mirror: true expand_param { max_expand_ratio: 3 } mean_value: 40"
    samplers = ("sampler { min_scale: 0.5 max_scale: 0.9 }",)
    encoded = loader([record(0, encoded=True)], text, samplers, recompress=False)
    raw = loader([record(0)], text, samplers)
    for sample in range(20):
        for found, expected in zip(load(encoded, sample, 1), load(raw, sample, 1), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_raw_records_keep_their_colors(caplog):
    """As in Caffe, which distorts and damages decoded images alone."""
    text = (
        "distort_param { brightness_prob: 1 brightness_delta: 90 random_order_prob: 1 } noise_param { inverse: true }"
    )
    subject = loader([record(0)], text)
    for sample in range(3):
        np.testing.assert_array_equal(load(subject, sample, 1)[0][0], pixels(0))
    assert caplog.text.count("layer 'd': distort_param affects encoded records only") == 1
    assert caplog.text.count("layer 'd': noise_param affects encoded records only") == 1
    caplog.clear()
    found = load(loader([record(0, encoded=True)], text), 0, 1)[0][0]
    assert abs(found - (255.0 - pixels(0))).mean() > 5
    assert not caplog.records


def plain_emitted(box, left, right, least):
    """Whether a box stays that is cut at two columns, in parts of the width; `least`: of its area, None: its centre."""
    xmin, _, xmax, _ = box
    inside = min(xmax, right) - max(xmin, left)
    if least is None:
        return inside > 0 and left <= (xmin + xmax) / 2 <= right
    return inside > 0 and inside / (xmax - xmin) > least


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("", 0),
        ("emit_constraint { }", None),
        ("emit_constraint { emit_type: CENTER emit_overlap: 0.9 }", None),
        ("emit_constraint { emit_type: MIN_OVERLAP }", 0),
        ("emit_constraint { emit_type: MIN_OVERLAP emit_overlap: 0.3 }", 0.3),
        ("emit_constraint { emit_type: MIN_OVERLAP emit_overlap: 0.75 }", 0.75),
    ],
)
def test_the_emit_constraint_drops_boxes(text, least):
    """The crop keeps the columns 5 to 25 of 30, and all rows."""
    rng = np.random.default_rng(4)
    low = rng.uniform(0, 0.8, (40, 2))
    boxes = np.concatenate((low, low + rng.uniform(0.05, 0.2, (40, 2))), 1).astype(np.float32)
    rows = load(loader([record(0, boxes)], f"crop_size: 20 {text}", phase=TEST), 0, 1)[1]
    wanted = [label for label, box in enumerate(boxes.tolist(), 1) if plain_emitted(box, 5 / 30, 25 / 30, least)]
    assert rows[0, 0, :, 1].tolist() == wanted


def test_each_emit_constraint_keeps_other_boxes():
    boxes = [[0.1, 0.1, 0.25, 0.5], [0.15, 0.1, 0.25, 0.5], [0.18, 0, 0.5, 1], [0.05, 0, 0.19, 0.5]]
    kept = []
    for text in ("", "emit_type: CENTER", "emit_type: MIN_OVERLAP emit_overlap: 0.8"):
        constraint = f"emit_constraint {{ {text} }}" if text else ""
        rows = load(loader([record(0, boxes)], f"crop_size: 20 {constraint}", phase=TEST), 0, 1)[1]
        kept.append(rows[0, 0, :, 1].tolist())
    assert kept == [[1, 2, 3, 4], [1, 2, 3], [2, 3]]


def test_scales_stretch_boxes():
    scales = "height_scale: 20 width_scale: 30"
    text = f"resize_param {{ resize_mode: FIT_SMALL_SIZE height: 40 width: 40 {scales} }}"
    rows = load(loader([record(0, CORNERS[:1])], text), 0, 1)[1][0, 0, 0, 3:7]
    np.testing.assert_allclose(rows, CORNERS[0] * [2, 2, 2, 2], rtol=1e-6)
    with pytest.raises(
        DataError, match=r"record 0 \(key 'k0'\) is 40 x 60 after resizing .* less than height_scale 50"
    ):
        load(loader([record(0)], text.replace("20", "50")), 0, 1)


def test_scales_larger_than_the_image_matter_to_boxes_alone():
    text = "resize_param { resize_mode: FIT_SMALL_SIZE height: 40 width: 40 height_scale: 50 width_scale: 30 }"
    images, rows = load(loader([record(0, [])], text), 0, 1)
    assert images.shape == (1, 3, 40, 60)
    np.testing.assert_array_equal(rows, np.full((1, 1, 1, 8), -1))


def test_what_is_loaded_depends_neither_on_the_batch_nor_on_threads():
    text = "mirror: true distort_param { hue_prob: 1 hue_delta: 9 } expand_param { max_expand_ratio: 2 } "
    text += "resize_param { height: 12 width: 12 }"
    samplers = (
        "sampler { min_scale: 0.3 } sample_constraint { min_jaccard_overlap: 0.3 }",
        "max_sample: 1 max_trials: 1",
    )
    records = [record(n, encoded=n % 2 == 0) for n in range(5)]
    images, rows = load(loader(records, text, samplers, threads=3), 3, 12)
    parts = [load(loader(records, text, samplers), first, count) for first, count in ((3, 5), (8, 7))]
    np.testing.assert_array_equal(images, np.concatenate([part[0] for part in parts]))
    parts[1][1][0, 0, :, 0] += 5
    np.testing.assert_array_equal(rows, np.concatenate([part[1] for part in parts], 2))


def test_labels_of_records_without_a_type():
    records = [record(n, CORNERS[:0]) for n in range(3)]
    for one in records:
        one.ClearField("type")
    assert first_boxes(Records(records), "layer 'd'") is None
    labels = load(loader(records, has_boxes=False), 1, 3)[1]
    np.testing.assert_array_equal(labels, np.reshape([1, 2, 0], (3, 1, 1, 1)))
    with pytest.raises(DataError, match=r"record 2 \(key 'k2'\) has no type of annotation, but others have"):
        load(loader([record(0), record(1), records[2]], needs_type=True), 0, 3)


def test_anno_type_makes_boxes_of_records_without_a_type(tmp_path):
    records = [record(n) for n in range(2)]
    for one in records:
        one.ClearField("type")
    write_datums(tmp_path / "db", ((record_key(n), one) for n, one in enumerate(records)))
    for own, shape in (("", (2, 1, 1, 1)), ("annotated_data_param { anno_type: BBOX }", (1, 1, 6, 8))):
        net = build_net(
            f"layer {{ name: 'd' type: 'AnnotatedData' top: 'x' top: 'y' {own} "
            f"data_param {{ source: '{tmp_path}/db' batch_size: 2 }} }}"
        )
        net.forward()
        found = net.blobs["y"].host_data().copy()
        net.close()
        assert found.shape == shape
    np.testing.assert_allclose(found[0, 0, :, 3:7], np.tile(CORNERS, (2, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("sampler", "sizes"),
    [
        ("sampler { min_scale: 0.52 max_scale: 0.52 }", {(31, 46)}),
        ("sampler { min_scale: 0.5 max_scale: 0.5 min_aspect_ratio: 2.2 max_aspect_ratio: 2.2 }", {(20, 66)}),
        ("sampler { min_scale: 0.5 max_scale: 0.5 } use_original_image: false", {(60, 90)}),
    ],
)
def test_the_layer_takes_patches_of_its_batch_sampler(tmp_path, sampler, sizes):
    """Each image is a part of its record; where it was cut out says where the boxes are."""
    write_datums(tmp_path / "db", ((record_key(n), record(n, CORNERS[:1], 60, 90)) for n in range(6)))
    net = build_net(
        "layer { name: 'd' type: 'AnnotatedData' top: 'x' top: 'y' "
        f"annotated_data_param {{ batch_sampler {{ max_trials: 1 {sampler} }} }} "
        f"data_param {{ source: '{tmp_path}/db' batch_size: 1 }} }}"
    )
    found, corners = set(), set()
    for number in range(6):
        net.forward()
        image, row = (net.blobs[top].host_data()[0] for top in ("x", "y"))
        rows, columns = image.shape[1:]
        whole = pixels(number, 60, 90).astype(np.float32)
        parts = np.lib.stride_tricks.sliding_window_view(whole, image.shape)[0]
        ((top, left),) = np.argwhere((parts == image).all((2, 3, 4)))
        scaled = (CORNERS[0] * [90, 60, 90, 60] - [left, top, left, top]) / [columns, rows, columns, rows]
        box = np.clip(scaled, 0, 1)
        if row[0, 0, 0] >= 0:  # else no part of the box lies in the patch
            np.testing.assert_allclose(row[0, 0, 3:7], box, atol=1.5 / rows)  # patches are cut to whole pixels
        found.add((rows, columns))
        corners.add((top, left))
    net.close()
    assert found == sizes
    assert (len(corners) > 2) == (sizes != {(60, 90)})


BOX = CORNERS[:1]
HOSTILE = [
    (b"\xff\xff\xff", "is not an AnnotatedDatum"),
    (AnnotatedDatum(type=AnnotatedDatum.BBOX), "is an AnnotatedDatum without a datum"),
    (record(0, [[float("nan"), 0, 1, 1]]), r"has a box \(nan, 0, 1, 1\)"),
    (record(0, [[0, 0, float("inf"), 1]]), r"has a box \(0, 0, inf, 1\)"),
    (
        record(0, [[10, 20, 300, 200]]),
        r"has a box \(10, 20, 300, 200\), .* normalised to its width and height, not in pix",
    ),
    (record(0, np.tile(BOX, (66000, 1))), "has 66000 boxes; more than 65536 are refused"),
    (AnnotatedDatum(datum=Datum(channels=3, height=2, width=2, data=b"x"), type=0), "is a Datum of 1 bytes"),
    (
        AnnotatedDatum(datum=Datum(channels=1, height=20, width=30, data=bytes(600)), type=0),
        r"is gray \(1 channel\), but record 0 has 3",
    ),
    (record(1, BOX, 9, 9), ".*3 x 9 x 9, .* 3 x 20 x 30; set crop_size or resize_param"),
]


@pytest.mark.parametrize(("bad", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_damaged_records_are_named(bad, message):
    with pytest.raises(DataError, match=rf"^layer 'd': list 'x': record 1 \(key 'k1'\) {message}"):
        load(loader([record(0), bad]), 0, 2)


def test_an_encoded_gray_image_among_colored_ones_can_be_converted():
    gray = record(1, BOX, encoded=True)
    gray.datum.data = cv2.imencode(".png", np.zeros((20, 30), np.uint8))[1].tobytes()
    with pytest.raises(DataError, match=r"record 1 .* is gray \(1 channel\).* force_color: true"):
        load(loader([record(0, encoded=True), gray]), 0, 2)


def test_boxes_beyond_the_border_are_clipped_and_empty_ones_dropped():
    boxes = [[-0.5, 0.2, 0.5, 1.5], [0.5, 0.5, 0.5, 0.9], [0.9, 0.1, 0.2, 0.3], [1.5, 0, 2, 1]]
    rows = load(loader([record(0, boxes)]), 0, 1)[1][0, 0]
    np.testing.assert_allclose(rows[:, 3:7], [[0, 0.2, 0.5, 1]], rtol=1e-6)


# -- YOLO ------------------------------------------------------------------------------------------------


def test_rows_of_yolo():
    images, rows = load(loader([record(0), record(1, CORNERS[:1])], yolo=True), 0, 2)
    assert images.shape == (2, 3, 20, 30)
    assert rows.shape == (2, 1, 300, 5)
    centers, sizes = (CORNERS[:, :2] + CORNERS[:, 2:]) / 2, CORNERS[:, 2:] - CORNERS[:, :2]
    np.testing.assert_array_equal(rows[0, 0, :3, 0], [0, 1, 2])
    np.testing.assert_allclose(rows[0, 0, :3, 1:], np.hstack([centers, sizes]), rtol=1e-6)
    assert not rows[0, 0, 3:].any()
    np.testing.assert_allclose(rows[1, 0, 0, 1:], [*centers[0], *sizes[0]], rtol=1e-6)
    assert not rows[1, 0, 1:].any()


def test_rows_of_yolo_may_leave_out_difficult_boxes_and_keep_300():
    rows = load(loader([record(0)], yolo=True, difficult=False), 0, 1)[1]
    np.testing.assert_array_equal(rows[0, 0, :3, 0], [0, 2, 0])
    many = loader([record(0, np.tile(CORNERS, (101, 1)))], yolo=True)
    assert load(many, 0, 1)[1].shape == (1, 1, 300, 5)
    assert load(many, 0, 1)[1][0, 0, 299].any()


def test_jitter_cuts_off_part_of_the_image_and_moves_the_boxes():
    corner = (0.4, 0.4, 0.7, 0.6)
    subject = loader([marked(corner)], "resize_param { height: 200 width: 300 }", yolo=True, jitter=0.3)
    images, rows = load(subject, 0, 40)
    sizes = set()
    for image, row in zip(images, rows[:, 0, 0], strict=True):
        _, x, y, width, height = row * [1, 300, 200, 300, 200]
        inside, outside = image[0] > 200, image[0] < 50
        columns, lines = np.flatnonzero(inside.any(0)), np.flatnonzero(inside.any(1))
        assert abs(columns[0] - (x - width / 2)) < 4 and abs(columns[-1] - (x + width / 2)) < 4
        assert abs(lines[0] - (y - height / 2)) < 4 and abs(lines[-1] - (y + height / 2)) < 4
        assert outside.any()
        sizes.add((round(float(row[3]), 3), round(float(row[4]), 3)))
    whole = sum(abs(row[3] - 0.3) < 1e-4 and abs(row[4] - 0.2) < 1e-4 for row in rows[:, 0, 0])
    assert 2 <= whole <= 16, "one of five stays whole"
    assert max(size[0] for size in sizes) <= 0.3 / 0.7 + 0.01


RESIZES = " ".join(f"resize_param {{ prob: 0.25 height: {side} width: {side} }}" for side in (8, 16, 24, 32))


def test_one_of_several_sizes_holds_for_ten_batches():
    subject = loader([record(0)], RESIZES, yolo=True, devices=2)
    sides = [load(subject, 4 * number, 2)[0].shape[2] for number in range(60)]
    assert all(len(set(sides[first : first + 10])) == 1 for first in range(0, 60, 10))
    assert len(set(sides)) > 1
    other = [load(subject, 4 * number + 2, 2)[0].shape[2] for number in range(60)]
    assert other == sides, "both devices have the same size"
    alone = loader([record(0)], RESIZES, yolo=True, devices=1)
    assert [load(alone, 4 * number, 4)[0].shape[2] for number in range(60)] == sides
    assert {load(loader([record(0)], RESIZES, yolo=True), 4 * n, 4)[0].shape[2] for n in range(30)} == {8}


def test_chances_of_sizes_must_add_up_to_one():
    with pytest.raises(ConfigError, match="add up to 0.5"):
        loader([record(0)], RESIZES.replace("0.25", "0.125"))


YOLO_NET = """
layer {{ name: "d" type: "AnnotatedData" top: "x" top: "y" transform_param {{ {transform} }}
  data_param {{ source: "{source}" batch_size: 3 backend: LMDB }} annotated_data_param {{ {settings} }} }}
"""


def test_a_net_reads_rows_of_yolo(tmp_path):
    records = [record(number, CORNERS[:2], 40, 40, True) for number in range(4)]
    write_datums(tmp_path / "lmdb", ((record_key(i, "a"), one) for i, one in enumerate(records)))
    shapes, rows = {}, {}
    for settings in (
        "yolo_data_type: 1 yolo_data_jitter: 0.1",
        "yolo_data_type: 1 yolo_data_jitter: 0 train_diffcult: false",
        "yolo_data_jitter: 0.1",
    ):
        text = YOLO_NET.format(
            transform="resize_param { height: 30 width: 30 }", source=tmp_path / "lmdb", settings=settings
        )
        net = build_net(text)
        net.forward()
        shapes[settings], rows[settings] = net.blobs["y"].shape, net.blobs["y"].host_data()
        net.close()
    assert list(shapes.values()) == [(3, 1, 300, 5), (3, 1, 300, 5), (1, 1, 6, 8)]
    moved, whole = list(rows.values())[:2]
    assert not np.allclose(moved[:, 0, 0], whole[:, 0, 0])
    assert not whole[:, 0, 1:].any()
    with pytest.raises(ConfigError, match="yolo_data_jitter is 2"):
        build_net(YOLO_NET.format(transform="", source=tmp_path / "lmdb", settings="yolo_data_jitter: 2"))

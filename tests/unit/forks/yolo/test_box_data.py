"""BoxData."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from training import build_net

from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import CaffepyError, ConfigError, DataError
from caffepy.forks.yolo.box_data import grid_label
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, Datum

Floats = Any
OBJECTS = [(1.0, 0.0, 0.5, 0.4, 0.4, 0.2), (2.0, 1.0, 0.1, 0.9, 0.1, 0.1)]


def record(objects: list[tuple[float, ...]], encoded: bool = True) -> Datum:
    """A black image of 120 x 160 with white objects."""
    image = np.zeros((120, 160, 3), np.uint8)
    for _, _, x, y, width, height in objects:
        left, top = round((x - width / 2) * 160), round((y - height / 2) * 120)
        image[top : round((y + height / 2) * 120), left : round((x + width / 2) * 160)] = 255
    data = cv2.imencode(".png", image)[1].tobytes()
    datum = (
        Datum(data=data, encoded=True) if encoded else Datum(data=image.tobytes(), channels=3, height=120, width=160)
    )
    datum.float_data.extend(value for row in objects for value in row)
    return datum


def net_of(
    folder: Path, records: list[Datum], tops: int, settings: str = "", transform: str = "", phase: int = TEST
) -> Any:
    write_datums(folder / "lmdb", ((record_key(i, "a"), one) for i, one in enumerate(records)))
    names = " ".join(f'top: "t{i}"' for i in range(tops))
    data = f'source: "{folder}/lmdb" batch_size: 2 backend: LMDB {settings}'
    text = f'layer {{ name: "d" type: "BoxData" {names} data_param {{ {data} }} transform_param {{ {transform} }} }}'
    return build_net(text, phase=phase)


def labels_of(objects: list[tuple[float, ...]], side: int) -> Floats:
    difficult, present, kinds = np.zeros(side * side), np.zeros(side * side), np.full(side * side, -1.0)
    boxes = np.zeros((side * side, 4))
    for kind, hard, x, y, width, height in objects:
        cell = int(y * side) * side + int(x * side)
        difficult[cell], present[cell], kinds[cell], boxes[cell] = hard, 1, kind, (x, y, width, height)
    return np.concatenate([difficult, present, kinds, boxes.ravel()])


def test_labels_of_several_grids(tmp_path: Path) -> None:
    net = net_of(tmp_path, [record(OBJECTS), record(OBJECTS[:1])], 3, "side: 7 side: 3")
    net.forward()
    assert net.blobs["t0"].shape == (2, 3, 120, 160)
    for name, side in (("t1", 7), ("t2", 3)):
        wanted = [labels_of(OBJECTS, side), labels_of(OBJECTS[:1], side)]
        np.testing.assert_allclose(net.blobs[name].host_data(), wanted, rtol=1e-6)
    net.close()


def test_the_default_grid_has_seven_cells_in_a_row(tmp_path: Path) -> None:
    net = net_of(tmp_path, [record(OBJECTS)], 2)
    net.forward()
    assert net.blobs["t1"].shape == (2, 7 * 49)
    net.close()


def test_the_last_object_of_a_cell_counts_and_the_border_is_inside() -> None:
    objects = np.array(
        [(1, 0, 0.5, 0.5, 0.1, 0.1), (2, 1, 0.55, 0.5, 0.2, 0.2), (3, 0, 1.0, 1.0, 0.1, 0.1)], np.float32
    )
    label = grid_label(objects, 2)
    np.testing.assert_array_equal(label[8:12], [-1, -1, -1, 3])
    np.testing.assert_array_equal(grid_label(objects[:2], 2)[8:12], [-1, -1, -1, 2])


def test_training_cuts_out_parts_and_moves_the_objects(tmp_path: Path) -> None:
    net = net_of(tmp_path, [record(OBJECTS[:1])], 2, "side: 5", phase=TRAIN)
    sizes = []
    for number in range(8):
        net.context.passes.number = number
        net.forward()
        for image, label in zip(net.blobs["t0"].host_data(), net.blobs["t1"].host_data(), strict=True):
            (cell,) = np.flatnonzero(label[25:50])
            x, y, width, height = label[75 + 4 * cell : 79 + 4 * cell]
            white = image[0] > 128
            columns, rows = np.flatnonzero(white.any(0)), np.flatnonzero(white.any(1))
            assert (
                (columns[0] + columns[-1] + 1) / 2 == pytest.approx(x * 160, abs=3)
                or columns[0] == 0
                or columns[-1] == 159
            )
            assert (rows[0] + rows[-1] + 1) / 2 == pytest.approx(y * 120, abs=3) or rows[0] == 0 or rows[-1] == 119
            assert cell == int(y * 5) * 5 + int(x * 5)
            sizes.append(float(width))
    assert min(sizes) >= 0.39 and max(sizes) <= 0.4 / 0.7
    assert len(set(sizes)) > 4
    net.close()


@pytest.mark.parametrize(
    "records, settings, transform, error, message",
    [
        ([record(OBJECTS)], "side: 7 side: 3", "", ConfigError, "2 side for 1 label tops"),
        ([record(OBJECTS)], "side: 0", "", ConfigError, "from 1 to 1000"),
        ([record(OBJECTS)], "", "mirror: true", ConfigError, "would not move the objects"),
        ([record(OBJECTS)], "", "crop_size: 9", ConfigError, "would not move the objects"),
        ([record([])], "", "", DataError, "has 0 numbers in float_data"),
        ([record([(-1.0, 0, 0.5, 0.5, 0.1, 0.1)])], "", "", DataError, "class from 0"),
        ([record(OBJECTS, encoded=False)], "", "", DataError, "is not an encoded image"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, records: list[Datum], settings: str, transform: str, error: type[CaffepyError], message: str
) -> None:
    with pytest.raises(error, match=message):
        net_of(tmp_path, records, 2, settings, transform).forward()

"""CPMData and OPData against plain loops over what the records hold."""

from __future__ import annotations

import math
from pathlib import Path

import cv2
import numpy as np
import pytest
from training import build_net

from caffepy.data.sources.databases import record_key, write_datums
from caffepy.errors import CaffepyError
from caffepy.forks.pose.people import MODELS, SMALL_RATIO, means, read_people, rotation
from caffepy.forks.pose.people_data import BODIES
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, Datum

SIZE, STRIDE = 96, 8
COCO_PARTS, MPI_PARTS = 17, 16


def person(seed: int, parts: int, low: float = 20, high: float = 75):
    """Points and states of a person: most parts are visible, one is covered, one is outside."""
    random = np.random.default_rng(seed)
    points = random.uniform(low, high, (parts, 2))
    states = np.ones(parts)
    states[3], states[7] = 0, 2
    return points, states


def planes(
    people, parts, *, cpm: bool, scale=0.5, size=SIZE, offset=1.0, mask=255, dataset=b"coco", wide=0, center=None
):
    """A record's planes: an image of its own, the numbers, and the mask."""
    width = max(size, wide)
    result = np.zeros((6, size, width), np.uint8)
    yy, xx = np.mgrid[:size, :width]
    for channel in range(3):
        result[channel] = (128 + 60 * np.sin(xx / (9 + channel)) + 50 * np.cos(yy / (11 - channel))).astype(np.uint8)
    numbers = result[3]

    def put(line, values, first=0):
        data = np.asarray(values, "<f4").tobytes()
        numbers[line, first : first + len(data)] = np.frombuffer(data, np.uint8)

    numbers[0, : len(dataset)] = np.frombuffer(dataset, np.uint8)
    put(1, [size, width])
    numbers[2, 1 if cpm else 0] = len(people) - 1
    others = len(people) - 1
    for index, (points, states) in enumerate(people):
        middle = points.mean(axis=0) if center is None else np.array(center)
        put(3 if index == 0 else 7 + index, middle + offset)
        first = 5 if index == 0 else 9 + others + 3 * (index - 1)
        put(first, points[:, 0] + offset)
        put(first + 1, points[:, 1] + offset)
        put(first + 2, states)
    put(4, [scale])
    if others:
        put(8 + others, [scale] * others)
    result[4] = mask
    return result


def write(path: Path, *records: np.ndarray) -> Path:
    write_datums(
        path,
        (
            (record_key(n), Datum(channels=r.shape[0], height=r.shape[1], width=r.shape[2], data=r.tobytes()))
            for n, r in enumerate(records)
        ),
    )
    return path


def passes_of(
    kind: str, settings: str, source: Path | str = "", phase: int = TEST, count: int = 1, batch: int = 1
) -> list[list[np.ndarray]]:
    """Both tops of each of the first passes."""
    holder = {"CPMData": "cpm_transform_param", "OPData": "op_transform_param"}[kind]
    named = f"source: '{source}'" if source else ""
    net = build_net(
        f"layer {{ name: 'p' type: '{kind}' top: 'x' top: 'y' "
        f"data_param {{ {named} batch_size: {batch} backend: LMDB }} {holder} {{ {settings} }} }}",
        phase=phase,
    )
    found = []
    for number in range(count):
        net.context.passes.number = number
        net.forward()
        found.append([net.blobs[name].host_data() for name in "xy"])
    net.close()
    return found


def tops_of(kind: str, settings: str, source: Path | str = "", phase: int = TEST, batch: int = 1) -> list[np.ndarray]:
    """Both tops of the first pass."""
    return passes_of(kind, settings, source, phase, 1, batch)[0]


# -- maps as plain loops -----------------------------------------------------------------------------------


def peak(point, sigma, rows, columns, stride=STRIDE):
    result = np.zeros((rows, columns))
    for i in range(rows):
        for j in range(columns):
            d2 = (stride * j + stride / 2 - 0.5 - point[0]) ** 2 + (stride * i + stride / 2 - 0.5 - point[1]) ** 2
            if d2 / (2 * sigma**2) <= 4.6052:
                result[i, j] = math.exp(-d2 / (2 * sigma**2))
    return result


def limb(a, b, rows, columns):
    """The elements near a limb, and its direction; points in elements of the map."""
    near, direction = np.zeros((rows, columns), bool), (b - a) / math.hypot(*(b - a))
    for i in range(rows):
        for j in range(columns):
            inside = all(
                max(math.floor(min(p, q) - 1 + 0.5), 0) <= at < min(math.floor(max(p, q) + 1 + 0.5), size)
                for p, q, at, size in ((a[0], b[0], j, columns), (a[1], b[1], i, rows))
            )
            distance = abs((j - a[0]) * direction[1] - (i - a[1]) * direction[0])
            near[i, j] = inside and distance <= 1
    return near, direction


def converted(points, states, sources):
    """Points and whether they are in the image, as both layers convert them (parts of two sources: both must be)."""
    shown = [bool(s) and all(states[i] <= 1 for i in s) for s in sources]
    return means(points, sources), shown


# -- CPMData ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_parts", "parts"), [(56, COCO_PARTS), (43, MPI_PARTS)])
def test_the_maps_of_cpm(tmp_path: Path, num_parts: int, parts: int):
    people = [person(n, parts) for n in range(3)]
    for points, states in people:
        points[states == 2] = (-4, 20)  # outside the image, as a record of CPMData says it
    record = planes(people, parts, cpm=True, mask=200)
    source = write(tmp_path / "db", record)
    settings = f"num_parts: {num_parts} np_in_lmdb: {parts} stride: {STRIDE} sigma: 9"
    x, y = tops_of("CPMData", settings, source)
    np.testing.assert_array_equal(x[0, :3], (record[:3].astype("f") - 128) / 256)
    assert x.shape == (1, 6, SIZE, SIZE) and not x[0, 3:].any()
    skeleton, sources = BODIES[num_parts]
    assert y.shape == (1, 2 * num_parts + 2, SIZE // STRIDE, SIZE // STRIDE)
    np.testing.assert_allclose(y[0, : num_parts + 1], 200 / 255, rtol=1e-6)
    maps, limbs = y[0, num_parts + 1 :], 2 * len(skeleton.limbs)
    rows = columns = SIZE // STRIDE
    total = np.zeros((skeleton.parts, rows, columns))
    for points, states in people:
        converted_points, shown = converted(points, states, sources)
        for part in range(skeleton.parts):
            if shown[part]:
                total[part] = np.minimum(total[part] + peak(converted_points[part], 9, rows, columns), 1)
    np.testing.assert_allclose(maps[limbs:-1], total, atol=1e-5)
    np.testing.assert_allclose(maps[-1], 1 - total.max(axis=0), atol=1e-5)
    for index, (a, b) in enumerate(skeleton.limbs):
        wanted = np.zeros((2, rows, columns))
        for points, states in people:
            moved, shown = converted(points, states, sources)
            if shown[a] and shown[b]:
                near, direction = limb(moved[a] / 8, moved[b] / 8, rows, columns)
                wanted[:, near] = direction[:, None]
        np.testing.assert_allclose(maps[2 * index : 2 * index + 2], wanted, atol=1e-5)


def test_parts_that_a_record_of_cpm_spares(tmp_path: Path):
    """State 3 of the first person: its map's weight is 0."""
    points, states = person(0, COCO_PARTS)
    states[0] = 3
    source = write(tmp_path / "db", planes([(points, states)], COCO_PARTS, cpm=True))
    _, y = tops_of("CPMData", f"num_parts: 56 np_in_lmdb: {COCO_PARTS} stride: {STRIDE}", source)
    assert not y[0, 0].any() and (y[0, 1:57] == 1).all()
    assert not y[0, 57 + 38].any()


FIXED = "flip_prob: 0 max_rotate_degree: 0 center_perterb_max: 0 scale_prob: 0"


def test_cpm_without_chance_scales_and_cuts(tmp_path: Path):
    people = [person(0, COCO_PARTS)]
    record = planes(people, COCO_PARTS, cpm=True, scale=0.5)
    source = write(tmp_path / "db", record)
    settings = f"num_parts: 56 np_in_lmdb: {COCO_PARTS} stride: {STRIDE} crop_size_x: 64 crop_size_y: 48 {FIXED}"
    x, y = tops_of("CPMData", f"{settings} target_dist: 1", source, TRAIN)
    assert x.shape == (1, 6, 48, 64) and y.shape == (1, 114, 6, 8)
    large = cv2.resize(record[:3].transpose(1, 2, 0), None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC)
    half = np.array([[1, 0, 0.5], [0, 1, 0.5]])  # the box of an image that is not rotated is larger by 1
    large = cv2.warpAffine(large, half, (193, 193), flags=cv2.INTER_CUBIC, borderValue=(128,) * 3)
    center = people[0][0].mean(axis=0) * 2
    found = [
        (left, top)
        for left in range(round(center[0]) - 34, round(center[0]) - 29)
        for top in range(round(center[1]) - 26, round(center[1]) - 21)
        if np.array_equal(
            (large[top : top + 48, left : left + 64].transpose(2, 0, 1).astype("f") - 128) / 256, x[0, :3]
        )
    ]
    assert len(found) == 1
    skeleton, sources = BODIES[56]
    people[0][1][7] = 1
    points, shown = converted(people[0][0] * 2 + 0.5 - found[0], people[0][1], sources)
    for part in range(18):
        if shown[part]:
            np.testing.assert_allclose(y[0, 57 + 38 + part], peak(points[part], 7, 6, 8), atol=1e-5)


def test_cpm_flips(tmp_path: Path):
    people = [person(0, COCO_PARTS)]
    source = write(tmp_path / "db", planes(people, COCO_PARTS, cpm=True, scale=0.5))
    settings = f"num_parts: 56 np_in_lmdb: {COCO_PARTS} stride: {STRIDE} crop_size_x: 64 crop_size_y: 64 {FIXED}"
    x, y = tops_of("CPMData", settings, source, TRAIN)
    settings = settings.replace("flip_prob: 0", "flip_prob: 1")
    flipped, maps = tops_of("CPMData", settings, source, TRAIN)
    np.testing.assert_array_equal(flipped, x[..., ::-1])
    for a, b in [(0, 0), (1, 1), (2, 5), (6, 3), (7, 4), (11, 8), (15, 14), (17, 16)]:
        np.testing.assert_allclose(maps[0, 57 + 38 + a], y[0, 57 + 38 + b][:, ::-1], atol=1e-5)


def random_settings(**changes: object) -> str:
    values = {
        "flip_prob": 0,
        "max_rotate_degree": 0,
        "center_perterb_max": 0,
        "scale_prob": 0,
        "scale_min": 0.5,
        "scale_max": 1.5,
        "crop_size_x": 64,
        "crop_size_y": 64,
        "stride": STRIDE,
    }
    return " ".join(f"{name}: {value}" for name, value in (values | changes).items())


@pytest.mark.parametrize(
    "change", [{"flip_prob": 0.5}, {"max_rotate_degree": 40}, {"center_perterb_max": 9}, {"scale_prob": 1}]
)
@pytest.mark.parametrize("kind", ["CPMData", "OPData"])
def test_augmentation_differs_from_sample_to_sample(tmp_path: Path, kind: str, change: dict[str, float]):
    cpm = kind == "CPMData"
    source = write(tmp_path / "db", planes([person(0, COCO_PARTS)], COCO_PARTS, cpm=cpm))
    more = f"num_parts: 56 np_in_lmdb: {COCO_PARTS}" if cpm else "model: 'COCO_18'"
    one, _ = tops_of(kind, f"{more} {random_settings()}", source, TRAIN, batch=8)
    assert all(np.array_equal(one[0], other) for other in one)
    many, maps = tops_of(kind, f"{more} {random_settings(**change)}", source, TRAIN, batch=8)
    again, _ = tops_of(kind, f"{more} {random_settings(**change)}", source, TRAIN, batch=8)
    assert np.array_equal(many, again)
    assert len({image.tobytes() for image in many}) == (2 if "flip_prob" in change else 8)
    assert np.isfinite(maps).all()


@pytest.mark.parametrize("kind", ["CPMData", "OPData"])
def test_parts_stay_where_the_image_shows_them(tmp_path: Path, kind: str):
    """A person's only bright spot is a part: after any augmentation it lies at the part's map's maximum."""
    points, states = person(0, COCO_PARTS)
    points[:], states[1:] = (-9, -9), 2
    points[0] = (50, 45)
    scale = 0.6 if kind == "CPMData" else 0.2
    record = planes([(points, states)], COCO_PARTS, cpm=kind == "CPMData", scale=scale, center=(48, 48))
    record[:3] = 0
    record[:3, 43:48, 48:53] = 255
    source = write(tmp_path / "db", record)
    change = {"flip_prob": 0.5, "max_rotate_degree": 40, "center_perterb_max": 9, "scale_prob": 1, "stride": 1}
    more = f"num_parts: 56 np_in_lmdb: {COCO_PARTS}" if kind == "CPMData" else "model: 'COCO_18'"
    images, maps = tops_of(kind, f"{more} {random_settings(**change)}", source, TRAIN, batch=6)
    for image, channels in zip(images, maps, strict=True):
        spot, peak_map = image[0] > 0.3, channels[57 + 38]
        assert spot.any()
        found = np.argwhere(spot).mean(axis=0)
        wanted = np.array(np.unravel_index(peak_map.argmax(), peak_map.shape))
        assert np.abs(found - wanted).max() <= 1.5


def test_colors_of_cpm(tmp_path: Path):
    source = write(tmp_path / "db", planes([person(0, COCO_PARTS)], COCO_PARTS, cpm=True))
    base = f"num_parts: 56 np_in_lmdb: {COCO_PARTS}"
    plain, gray, even, other, coarse = (
        tops_of("CPMData", f"{base} {more}", source)[0][0, :3]
        for more in (
            "",
            "gray: 1",
            "do_clahe: true",
            "do_clahe: true clahe_clip_limit: 9",
            "do_clahe: true clahe_tile_size: 2",
        )
    )
    assert np.array_equal(gray[0], gray[1]) and np.array_equal(gray[0], gray[2])
    for a, b in ((plain, even), (even, other), (even, coarse)):
        assert not np.array_equal(a, b)


# -- OPData ----------------------------------------------------------------------------------------------


def op_record(seed: int, model: str, count: int = 2, **more) -> tuple[list, np.ndarray]:
    parts = MODELS[model].lmdb_parts
    people = [person(seed + n, parts) for n in range(count)]
    offset = 1.0 if MODELS[model].category == "COCO" else 0.0
    return people, planes(people, parts, cpm=False, offset=offset, wide=4 * parts, **more)


@pytest.mark.parametrize(
    "model", ["COCO_18", "COCO_19", "COCO_25_17", "COCO_25", "COCO_25B_17", "MPII_25B_16", "PT_25B_15"]
)
def test_the_maps_of_open_pose(tmp_path: Path, model: str):
    people, record = op_record(3, model)
    source = write(tmp_path / "db", record)
    x, y = tops_of("OPData", f"models: '{model}' stride: {STRIDE} sigmas: '8'", source)
    np.testing.assert_array_equal(x[0], (record[:3].astype("f") - 128) / 256)
    known = MODELS[model]
    skeleton, count, limbs = known.skeleton, known.skeleton.channels, 2 * len(known.skeleton.limbs)
    rows, columns = record.shape[1] // STRIDE, record.shape[2] // STRIDE
    assert y.shape == (1, 2 * count, rows, columns)
    targets = y[0, count:]
    wanted = np.zeros((skeleton.parts, rows, columns))
    for points, states in people:
        moved, shown = converted(points, states, known.sources)
        for part in range(skeleton.parts):
            if shown[part]:
                wanted[part] = np.maximum(wanted[part], peak(moved[part], 8, rows, columns))
    np.testing.assert_allclose(targets[limbs : limbs + skeleton.parts], wanted, atol=1e-5)
    if skeleton.background:
        np.testing.assert_allclose(targets[-1], 1 - wanted.max(axis=0), atol=1e-5)
    for index, (a, b) in enumerate(skeleton.limbs):
        sums, counts = np.zeros((2, rows, columns)), np.zeros((rows, columns))
        for points, states in people:
            moved, shown = converted(points, states, known.sources)
            if shown[a] and shown[b]:
                near, direction = limb(moved[a] / STRIDE, moved[b] / STRIDE, rows, columns)
                counts += near
                sums += near * direction[:, None, None]
        np.testing.assert_allclose(targets[2 * index : 2 * index + 2], sums / np.maximum(counts, 1), atol=1e-5)
        assert (y[0, 2 * index][counts > 0] == 1).all()


def test_parts_that_a_database_lacks_have_no_weight(tmp_path: Path):
    _, record = op_record(3, "MPII_25B_16")
    source = write(tmp_path / "db", record)
    _, y = tops_of("OPData", f"models: 'MPII_25B_16' stride: {STRIDE}", source)
    known = {part for part, sources in enumerate(MODELS["MPII_25B_16"].sources) if sources}
    skeleton = MODELS["MPII_25B_16"].skeleton
    weights = y[0, : skeleton.channels]
    for part in range(25):
        assert weights[72 + part].any() == (part in known)
    for index, parts in enumerate(skeleton.limbs):
        assert weights[2 * index].any() == (set(parts) <= known)


def test_weights_around_a_part_of_which_one_source_is_outside(tmp_path: Path):
    """The neck of COCO, the mean of the shoulders: its weights are 0 in a box around the person."""
    points, states = person(1, COCO_PARTS)
    states[:] = 1
    states[5] = 2
    source = write(tmp_path / "db", planes([(points, states)], COCO_PARTS, cpm=False))
    _, y = tops_of("OPData", f"models: 'COCO_18' stride: {STRIDE}", source)
    shown = points[[i for i in range(COCO_PARTS) if i != 5]]
    low, high = shown.min(axis=0) / STRIDE, shown.max(axis=0) / STRIDE
    neck = y[0, 38 + 1]
    inside = neck[math.ceil(low[1]) : math.floor(high[1]), math.ceil(low[0]) : math.floor(high[0])]
    assert inside.size and not inside.any() and (y[0, 38] == 1).all()
    assert not y[0, 0].any() or neck.any()


def test_the_background_around_feet_that_are_not_annotated_has_no_weight(tmp_path: Path):
    """Of COCO_25_17; that of COCO_25, which has feet, has its weight."""
    weights = {}
    for model in ("COCO_25", "COCO_25_17"):
        parts = MODELS[model].lmdb_parts
        points = np.full((parts, 2), 8.0)
        points[13], points[15] = (40, 30), (40, 50)  # left knee and ankle
        states = np.full(parts, 2)
        states[[13, 15]] = 1
        source = write(tmp_path / model, planes([(points, states)], parts, cpm=False, wide=4 * parts))
        _, y = tops_of("OPData", f"models: '{model}' stride: {STRIDE} sigmas: '2'", source)
        weights[model] = y[0, 77]
    assert (weights["COCO_25"] == 1).all()
    # Two elements, 0.8 of the shank, to each side of the ankle, and the box of the person, whose feet are not known:
    # rows 3 to 6. Near the parts the weight is 1 again.
    rows, columns = np.nonzero(weights["COCO_25_17"] == 0)
    assert (rows.min(), rows.max()) == (3, 7) and (columns.min(), columns.max()) == (3, 6)


def test_heads_that_coco_does_not_annotate_have_no_weight_near_people(tmp_path: Path):
    points, states = person(2, COCO_PARTS, 30, 60)
    source = write(tmp_path / "db", planes([(points, np.ones(COCO_PARTS))], COCO_PARTS, cpm=False))
    _, y = tops_of("OPData", f"models: 'COCO_25B_17' stride: {STRIDE}", source)
    neck, nose = y[0, 72 + 17], y[0, 72]
    low, high = (points.min(axis=0) / STRIDE).astype(int), (points.max(axis=0) / STRIDE).astype(int)
    assert not neck[low[1] : high[1], low[0] : high[0]].any() and (nose == 1).all()


def test_small_parts_have_narrow_maps(tmp_path: Path):
    people, record = op_record(3, "HAND_135_42", count=1)
    source = write(tmp_path / "db", record)
    _, y = tops_of("OPData", f"models: 'HAND_135_42' stride: {STRIDE} sigmas: '9'", source)
    rows, columns = record.shape[1] // STRIDE, record.shape[2] // STRIDE
    targets = y[0, 439 + 304 :]
    np.testing.assert_allclose(targets[9], peak(people[0][0][0], 9, rows, columns), atol=1e-5)
    near = peak(people[0][0][1], 9 * SMALL_RATIO, rows, columns)
    np.testing.assert_allclose(targets[25], near, atol=1e-5)
    np.testing.assert_allclose(y[0, 304 + 25][near > 0], 1 / SMALL_RATIO, rtol=1e-5)


@pytest.mark.parametrize(
    ("normalization", "mean", "factor"),
    [(0, (128, 128, 128), 1 / 256), (1, (102.9801, 115.9465, 122.7717), 1), (2, (103.94, 116.78, 123.68), 0.017)],
)
def test_normalizations(tmp_path: Path, normalization: int, mean: tuple[float, ...], factor: float):
    _, record = op_record(3, "COCO_18")
    source = write(tmp_path / "db", record)
    x, _ = tops_of("OPData", f"models: 'COCO_18' normalization: {normalization}", source)
    np.testing.assert_allclose(x[0], (record[:3] - np.array(mean)[:, None, None]) * factor, rtol=1e-4, atol=1e-4)


def test_batches_come_from_sources_by_their_probabilities(tmp_path: Path):
    sources = [str(write(tmp_path / name, op_record(0, "COCO_18", dataset=name.encode())[1])) for name in ("a", "b")]
    records = []
    for index, shade in enumerate((50, 100)):
        record = op_record(0, "COCO_18")[1]
        record[:3] = shade
        records.append(record)
        sources[index] = str(write(tmp_path / f"db{index}", record))
    background = np.full((3, 70, 90), 200, np.uint8)
    write(tmp_path / "bkg", background)
    settings = (
        f"models: 'COCO_18' sources: '{sources[0]};{sources[1]}' probabilities: '0.6;0.2' prob_only_background: 0.2 "
        f"source_background: '{tmp_path}/bkg' {random_settings()} target_dist: 3"
    )
    seen = []
    for x, y in passes_of("OPData", settings, phase=TRAIN, count=40, batch=2):
        shades = {round(float(np.median(image)) * 256 + 128) for image in x}
        assert len(shades) == 1
        seen.append(shades.pop())
        if seen[-1] == 200:
            assert (y[:, :57] == 1).all() and (y[:, -1] == 1).all() and not y[:, 57:-1].any()
    counts = [seen.count(shade) for shade in (50, 100, 200)]
    assert sum(counts) == 40 and counts[0] > counts[1] > 0 and counts[2] > 0


def test_backgrounds_fill_what_is_outside_and_cover_parts(tmp_path: Path):
    points, states = person(0, COCO_PARTS)
    record = planes([(points, states)], COCO_PARTS, cpm=False, scale=1.0)
    record[:3] = 90
    source = write(tmp_path / "db", record)
    write(tmp_path / "bkg", np.full((3, 300, 300), 40, np.uint8))
    settings = (
        f"models: 'COCO_18' sources: '{source}' source_background: '{tmp_path}/bkg' crop_size_x: 96 crop_size_y: 96 "
        "scale_mins: '0.9' scale_maxs: '1.1' scale_prob: 0 target_dist: 2 "
        "max_degree_rotations: '0' flip_prob: 0 center_perterb_max: 0 "
    )
    x, y = tops_of("OPData", settings, phase=TRAIN)
    shades = np.rint(x[0, 0] * 256 + 128)
    assert {40, 90} <= set(shades.ravel()) and 0.4 < (shades == 40).mean() < 0.95
    assert (y[0, :38] == 1).all()
    covered = [
        (np.rint(image[0] * 256 + 128) == 90).mean()
        for image in tops_of("OPData", settings + "number_max_occlusions: 30", phase=TRAIN, batch=8)[0]
    ]
    assert min(covered) < 0.9 * (shades == 90).mean() and max(covered) <= (shades == 90).mean()


def test_what_older_nets_have_in_place_of_lists(tmp_path: Path):
    first = write(tmp_path / "a", op_record(0, "COCO_25")[1])
    second = write(tmp_path / "b", op_record(1, "COCO_25_17")[1])
    settings = (
        f"model: 'COCO_25' source_secondary: '{second}' model_secondary: 'COCO_25_17' prob_secondary: 0.5 "
        f"number_max_occlusions: 2 {random_settings(scale_prob=1, max_rotate_degree=30)}"
    )
    feet = set()
    for x, y in passes_of("OPData", settings, first, TRAIN, count=12):
        assert x.shape == (1, 3, 64, 64) and y.shape == (1, 156, 8, 8)
        feet.add(bool(y[0, 78 + 52 + 19 : -1].any()))
    assert feet == {True, False}


def test_images_of_dome_are_files(tmp_path: Path):
    parts = MODELS["DOME_19"].lmdb_parts
    people = [person(5, parts)]
    record = planes(people, parts, cpm=False, offset=0.0)
    image = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "image.png"), image)
    record[3, 8, :9] = np.frombuffer(b"image.png", np.uint8)
    record[3, 8, 9] = 0
    source = write(tmp_path / "db", record[3:4])
    x, y = tops_of("OPData", f"models: 'DOME_19' media_directory: '{tmp_path}/' stride: {STRIDE}", source)
    np.testing.assert_array_equal(x[0], (image.transpose(2, 0, 1).astype("f") - 128) / 256)
    np.testing.assert_allclose(
        y[0, 60 + 40], np.max([peak(p[0][0], 7, SIZE // STRIDE, SIZE // STRIDE) for p in people], axis=0), atol=1e-5
    )


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("CPMData", "num_parts: 14", "num_parts is 14"),
        ("CPMData", "num_parts: 56 np_in_lmdb: 9", "np_in_lmdb is 9"),
        ("CPMData", "num_parts: 56 np_in_lmdb: 17 aug_way: 'table'", "aug_way"),
        ("CPMData", "num_parts: 56 np_in_lmdb: 17 transform_body_joint: false", "transform_body_joint"),
        ("CPMData", "num_parts: 56 np_in_lmdb: 17 stride: 0", "must be positive"),
        ("CPMData", "num_parts: 56 np_in_lmdb: 30", "need line 6 with 120 bytes"),
        ("OPData", "models: 'COCO_17'", "there is no model 'COCO_17'; there are COCO_18"),
        ("OPData", "models: 'COCO_18' sources: 'a;b' probabilities: '0.5'", "2 sources, 2 models and 1 probabilities"),
        ("OPData", "models: 'COCO_18;COCO_19' sources: 'a;b' probabilities: '0.5;0.5'", "different numbers of maps"),
        ("OPData", "models: 'COCO_18' sigmas: 'x'", "sigmas is 'x'"),
        ("OPData", "models: 'COCO_18' sigmas: '0'", "sigmas must be positive"),
        ("OPData", "models: 'COCO_18' sources: 'a' probabilities: '0.5'", "have the sum 0.5"),
        ("OPData", "models: 'COCO_18' normalization: 3", "normalization is 3"),
        ("OPData", "models: 'COCO_18' sources: '/none' probabilities: '1'", "'/none' does not exist"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, kind: str, settings: str, message: str):
    source = write(tmp_path / "db", planes([person(0, COCO_PARTS)], COCO_PARTS, cpm=kind == "CPMData"))
    with pytest.raises(CaffepyError, match=message):
        tops_of(kind, settings, source)


def test_wrong_records_are_refused(tmp_path: Path):
    record = planes([person(0, COCO_PARTS)], COCO_PARTS, cpm=True)
    nan = record.copy()
    nan[3, 5, :4] = np.frombuffer(np.float32("nan").tobytes(), np.uint8)
    for index, (wrong, message) in enumerate(
        ((record[:4], "has 4 planes; CPMData needs 6"), (nan, "not finite"), (record[:, :6], "need line 7"))
    ):
        source = write(tmp_path / f"db{index}", wrong)
        with pytest.raises(CaffepyError, match=message):
            tops_of("CPMData", "num_parts: 56 np_in_lmdb: 17", source)


def test_people_are_read_from_their_lines():
    plane = planes([person_of_five(n) for n in range(3)], 5, cpm=True)[3]
    found = read_people(plane, 5, 1, 1.0)
    assert found.dataset == "coco" and found.size == (SIZE, SIZE) and len(found.people) == 3
    for one, (points, states) in zip(found.people, [person_of_five(n) for n in range(3)], strict=True):
        np.testing.assert_allclose(one.points, points, rtol=1e-6)
        np.testing.assert_allclose(one.center, points.mean(axis=0), rtol=1e-6)
        assert one.states.tolist() == states.tolist() and one.scale == 0.5


def person_of_five(seed: int):
    return np.random.default_rng(seed).uniform(20, 70, (5, 2)), np.array([0, 1, 2, 1, 0])


def test_a_rotation_keeps_the_image_in_its_box():
    for degrees in (0, 13, -40, 90):
        matrix, (height, width) = rotation((30, 50), degrees)
        corners = np.array([(x, y, 1) for x in (0, 50) for y in (0, 30)]) @ matrix.T
        assert corners.min() >= -1.01 and (corners.max(axis=0) <= (width + 1.01, height + 1.01)).all()
        assert (corners.max(axis=0) - corners.min(axis=0) <= (width, height)).all()

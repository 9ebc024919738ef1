"""Non-maximum suppression, and the order of equal scores that it depends on.

SSD (ApplyNMSFast and ApplyNMS in `bbox_util.cpp`), MS-CNN and Cascade R-CNN. `std::sort` is not stable, and its order
of equal scores decides which boxes are mined or suppressed. This module implements the introsort of libstdc++
(`bits/stl_algo.h`, `bits/stl_heap.h`), with which both Caffes are built, a stable selection of the best scores, and the
order of MS-CNN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, Words, device_function, exact_function, kernel
from caffepy.data.boxes import MODES, Boxes, Rows, overlap
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Layer

_MAX_DEPTH = 2 * 64
"""Upper bound of the recursion depth: introsort needs 2 log2(n)."""


@device_function
def _swap(keys: Floats, order: Ints, i: Int, j: Int) -> None:
    keys[i], keys[j] = keys[j], keys[i]
    order[i], order[j] = order[j], order[i]


@device_function
def _median_to_first(keys: Floats, order: Ints, first: Int, a: Int, b: Int, c: Int) -> None:
    """Swap the median of three keys with the first, in descending order."""
    if keys[a] > keys[b]:
        median = b if keys[b] > keys[c] else (c if keys[a] > keys[c] else a)
    else:
        median = a if keys[a] > keys[c] else (c if keys[b] > keys[c] else b)
    _swap(keys, order, first, median)


@device_function
def _partition(keys: Floats, order: Ints, first: Int, last: Int) -> Int:
    """Partition [first, last) around the median of three keys, and return the begin of the second part."""
    _median_to_first(keys, order, first, first + 1, first + (last - first) // 2, last - 1)
    pivot = keys[first]
    low, high = first + 1, last
    while True:
        while keys[low] > pivot:
            low += 1
        high -= 1
        while pivot > keys[high]:
            high -= 1
        if low >= high:
            return low
        _swap(keys, order, low, high)
        low += 1


@device_function
def _adjust_heap(keys: Floats, order: Ints, first: Int, hole: Int, length: Int, key: Float, number: Int) -> None:
    """Sift a key down from `hole` to a leaf of the heap and up from there (`__adjust_heap`)."""
    top, child = hole, hole
    while child < (length - 1) // 2:
        child = 2 * (child + 1)
        if keys[first + child] > keys[first + child - 1]:
            child -= 1
        keys[first + hole], order[first + hole] = keys[first + child], order[first + child]
        hole = child
    if length % 2 == 0 and child == (length - 2) // 2:
        child = 2 * child + 1
        keys[first + hole], order[first + hole] = keys[first + child], order[first + child]
        hole = child
    while hole > top and keys[first + (hole - 1) // 2] > key:
        parent = (hole - 1) // 2
        keys[first + hole], order[first + hole] = keys[first + parent], order[first + parent]
        hole = parent
    keys[first + hole], order[first + hole] = key, number


@device_function
def _heap_sort(keys: Floats, order: Ints, first: Int, last: Int) -> None:
    length = last - first
    for parent in range((length - 2) // 2, -1, -1):
        _adjust_heap(keys, order, first, parent, length, keys[first + parent], order[first + parent])
    for end in range(last - 1, first, -1):
        key, number = keys[end], order[end]
        keys[end], order[end] = keys[first], order[first]
        _adjust_heap(keys, order, first, 0, end - first, key, number)


@device_function
def _insertion_sort(keys: Floats, order: Ints, first: Int, last: Int) -> None:
    for i in range(first + 1, last):
        key, number = keys[i], order[i]
        j = i
        while j > first and key > keys[j - 1]:
            keys[j], order[j] = keys[j - 1], order[j - 1]
            j -= 1
        keys[j], order[j] = key, number


@kernel
def _sort(begin: Int, end: Int, keys: Floats, order: Ints, count: Int, stack: Words) -> None:
    """Sort `count` keys in descending order and `order` with them, as `std::sort` does."""
    depth = 0
    while (count >> (depth + 1)) > 0:
        depth += 1
    stack[0], stack[1], stack[2] = 0, count, 2 * depth
    height = 1
    while height > 0:
        height -= 1
        first, last, depth = stack[3 * height], stack[3 * height + 1], stack[3 * height + 2]
        while last - first > 16:
            if depth == 0:
                _heap_sort(keys, order, first, last)
                break
            depth -= 1
            cut = _partition(keys, order, first, last)
            stack[3 * height], stack[3 * height + 1], stack[3 * height + 2] = cut, last, depth
            height += 1
            last = cut
    _insertion_sort(keys, order, 0, count)


def sort_like_cpp(keys: NDArray[np.float32], order: NDArray[np.int32]) -> None:
    """Sort keys (n,) in descending order and `order` (n,) with them, in place, with ties as `std::sort`.

    No key may be NaN.
    """
    assert keys.flags.c_contiguous and order.flags.c_contiguous
    stack = np.empty(3 * _MAX_DEPTH, np.int64)
    _sort.run(1, 1, 1, keys, order, len(keys), stack)


@device_function
def _is_worse(key: Float, number: Int, other: Float, other_number: Int) -> bool:
    return bool(key < other or (key == other and number > other_number))


@device_function
def _sift_down(keys: Floats, order: Ints, at: Int, hole: Int, length: Int, key: Float, number: Int) -> None:
    """Sift a key down from `hole` in the heap of the best scores, whose root is the worst of them."""
    child = 2 * hole + 1
    while child < length:
        if child + 1 < length and _is_worse(
            keys[at + child + 1], order[at + child + 1], keys[at + child], order[at + child]
        ):
            child += 1
        if not _is_worse(keys[at + child], order[at + child], key, number):
            break
        keys[at + hole], order[at + hole] = keys[at + child], order[at + child]
        hole = child
        child = 2 * hole + 1
    keys[at + hole], order[at + hole] = key, number


@device_function
def best_scores(
    scores: Floats, begin: Int, step: Int, count: Int, threshold: Float, keys: Floats, order: Ints, at: Int, limit: Int
) -> Int:
    """Write the `limit` largest scores above `threshold` and their indices from `at` on, in descending order.

    Equal scores are in the order of their indices. The scores are `scores[begin::step]`, `count` of them. Returns how
    many scores were written.
    """
    found = 0
    for number in range(count):
        key = scores[begin + number * step]
        if not key > threshold or limit == 0:
            continue
        if found < limit:
            keys[at + found], order[at + found] = key, number
            found += 1
            if found == limit:
                for hole in range(limit // 2 - 1, -1, -1):
                    _sift_down(keys, order, at, hole, limit, keys[at + hole], order[at + hole])
        elif key > keys[at]:
            _sift_down(keys, order, at, 0, limit, key, number)
    if found < limit:
        for hole in range(found // 2 - 1, -1, -1):
            _sift_down(keys, order, at, hole, found, keys[at + hole], order[at + hole])
    for last in range(found - 1, 0, -1):
        key, number = keys[at + last], order[at + last]
        keys[at + last], order[at + last] = keys[at], order[at]
        _sift_down(keys, order, at, 0, last, key, number)
    return found


def descending(values: Rows) -> NDArray[np.intp]:
    """Return the indices of values in descending order; of equal ones the last comes first, as in MS-CNN."""
    return np.lexsort((np.arange(len(values)), values))[::-1]


_FIELDS = 5
"""Values of a candidate: four coordinates and the size."""


@device_function
def _gather(boxes: Floats, first: Int, order: Ints, at: Int, count: Int, rows: Floats, row: Int) -> None:
    """Write the candidates order[at: at + count] as structure of arrays, so that loops can be vectorised."""
    for i in range(count):
        number = 4 * (first + order[at + i])
        for field in range(4):
            rows[row + field * count + i] = boxes[number + field]
        width, height = boxes[number + 2] - boxes[number], boxes[number + 3] - boxes[number + 1]
        rows[row + 4 * count + i] = np.float32(0) if width < 0 or height < 0 else width * height


@exact_function
def _raise_overlaps(rows: Floats, row: Int, count: Int, kept: Int, max_overlaps: Floats, at: Int) -> None:
    """Raise `max_overlaps` of the candidates after `kept` to their overlap with it, as `overlap` computes it."""
    # NaN is kept, because in Caffe an overlap that is NaN suppresses. Disjoint boxes have a negative side here.
    left, top = rows[row + kept], rows[row + count + kept]
    right, bottom = rows[row + 2 * count + kept], rows[row + 3 * count + kept]
    size = rows[row + 4 * count + kept]
    for i in range(kept + 1, count):
        own_left, own_top = rows[row + i], rows[row + count + i]
        own_right, own_bottom = rows[row + 2 * count + i], rows[row + 3 * count + i]
        width = (right if right < own_right else own_right) - (left if own_left < left else own_left)
        height = (bottom if bottom < own_bottom else own_bottom) - (top if own_top < top else own_top)
        shared = width * height
        ratio = shared / (rows[row + 4 * count + i] + size - shared)
        value = ratio if (width > 0) & (height > 0) else np.float32(0)
        max_overlaps[at + i] = value if (value > max_overlaps[at + i]) | (value != value) else max_overlaps[at + i]


@device_function
def _suppress(
    rows: Floats, row: Int, order: Ints, at: Int, count: Int, max_overlaps: Floats, threshold: Float, eta: Float
) -> Int:
    """Compact the candidates order[at: at + count] to the kept ones, in place, and return their number."""
    for i in range(count):
        max_overlaps[at + i] = -1
    kept = 0
    for i in range(count):
        if not max_overlaps[at + i] <= threshold:
            continue
        order[at + kept] = order[at + i]
        kept += 1
        if eta < 1 and threshold > 0.5:
            threshold = np.float32(threshold * eta)
        _raise_overlaps(rows, row, count, i, max_overlaps, at)
    return kept


@kernel
def _suppress_classes(
    begin: Int,
    end: Int,
    boxes: Floats,
    scores: Floats,
    classes: Ints,
    keys: Floats,
    order: Ints,
    rows: Floats,
    counts: Ints,
    class_count: Int,
    all_classes: Int,
    priors: Int,
    loc_classes: Int,
    limit: Int,
    min_score: Float,
    threshold: Float,
    eta: Float,
) -> None:
    """An item is (image, class) of boxes (N, L, P, 4) and scores (N, P, C)."""
    row = begin * _FIELDS * limit
    for item in range(begin, end):
        image = item // class_count
        label = classes[item % class_count]
        first = (image * loc_classes + (label if loc_classes > 1 else 0)) * priors
        start = image * priors * all_classes + label
        at = item * limit
        count = best_scores(scores, start, all_classes, priors, min_score, keys, order, at, limit)
        _gather(boxes, first, order, at, count, rows, row)
        counts[item] = _suppress(rows, row, order, at, count, keys, threshold, eta)


def suppress_classes(
    threads: int, boxes: Rows, scores: Rows, classes: NDArray[np.int32], param: caffe_pb2.DetectionOutputParameter
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the kept boxes of each class in descending order of scores: indices (N, K, limit) and counts (N, K).

    Args:
        threads: number of threads.
        boxes: (N, L, P, 4); L is 1 if the classes share locations.
        scores: (N, P, C).
        classes: the K classes to suppress.
        param: with nms_param, whose eta is a factor on the threshold after each kept box while the threshold is above
            0.5, and confidence_threshold: boxes with this score or less are dropped.
    """
    images, priors, all_classes = scores.shape
    nms = param.nms_param
    limit = min(nms.top_k, priors) if nms.HasField("top_k") and nms.top_k >= 0 else priors
    min_score = param.confidence_threshold if param.HasField("confidence_threshold") else np.finfo(np.float32).min
    assert all(array.flags.c_contiguous for array in (boxes, scores, classes))
    shape = (images, len(classes))
    order, counts = np.empty((*shape, limit), np.int32), np.zeros(shape, np.int32)
    keys, rows = np.empty(order.shape, np.float32), np.empty((counts.size, _FIELDS, limit), np.float32)
    arrays = boxes, scores, classes, keys, order, rows, counts
    sizes = len(classes), all_classes, priors, boxes.shape[1], limit
    _suppress_classes.run(threads, counts.size, 1, *arrays, *sizes, float(min_score), nms.nms_threshold, nms.eta)
    return order, counts


@kernel
def _suppress_lists(
    begin: Int,
    end: Int,
    corners: Floats,
    areas: Floats,
    begins: Words,
    limit: Int,
    threshold: Float,
    rule: Int,
    mode: Int,
    kept: Ints,
    counts: Words,
) -> None:
    for item in range(begin, end):
        first, found = begins[item], 0
        for i in range(first, begins[item + 1]):
            keep = True
            for other in range(first, first + found):
                if overlap(corners, areas, kept[other], corners, areas, i, rule, mode) > threshold:
                    keep = False
                    break
            if keep:
                kept[first + found] = i
                found += 1
                if found == limit:
                    break
        counts[item] = found


def suppress(
    boxes: Boxes,
    threshold: float,
    mode: str = "IOU",
    limit: int = 0,
    begins: NDArray[np.int64] | None = None,
    threads: int = 1,
) -> NDArray[np.intp]:
    """Return the indices of the boxes that no kept box before them in their list overlaps by more than `threshold`.

    Args:
        boxes: (n, 4), each list in descending order of scores.
        threshold: of the overlap.
        mode: of `MODES`; the first box of IOFU is the one with the higher score.
        limit: largest number of boxes of a list; 0: all.
        begins: index of the first box of each list, and n at the end; None: there is one list.
        threads: number of threads, each of which takes whole lists.
    """
    count = len(boxes.areas)
    begins = np.array([0, count]) if begins is None else begins
    kept, counts = np.empty(max(count, 1), np.int32), np.zeros(len(begins) - 1, np.int64)
    corners, areas = (np.ascontiguousarray(array, np.float32) for array in (boxes.corners, boxes.areas))
    rule, index = boxes.rule, MODES.index(mode)
    _suppress_lists.run(threads, len(counts), 1, corners, areas, begins, limit, threshold, rule, index, kept, counts)
    lists = [kept[first : first + found] for first, found in zip(begins[:-1], counts, strict=True)]
    return np.concatenate(lists).astype(np.intp)


def suppress_mined(boxes: Rows, scores: Rows, threshold: float, top_k: int) -> NDArray[np.intp]:
    """Return the indices of the kept boxes (n, 4) in descending order of scores (n,); ApplyNMS.

    Boxes with an area below 1e-5 are dropped. Equal scores keep their order. `top_k` limits the number of boxes that
    are considered; -1: all.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[:top_k] if top_k > -1 else order
    candidates = Boxes.from_corners(boxes[order])
    large = ~(candidates.areas < np.float32(1e-5))
    kept: NDArray[np.intp] = order[large][suppress(candidates[large], threshold)]
    return kept


def check_mode(layer: Layer, mode: str) -> None:
    """Check a field nms_type.

    Raises:
        ConfigError: it has another value.
    """
    if mode not in MODES:
        raise layer.error(f"nms_type is '{mode}'; it must be one of {', '.join(MODES)}")

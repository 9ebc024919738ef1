"""Sorting of scores in descending order, with ties in the order of Caffe's `std::sort`.

`std::sort` is not stable, and its order of equal scores decides which boxes are mined or suppressed. This module
implements the introsort of libstdc++ (`bits/stl_algo.h`, `bits/stl_heap.h`), with which both Caffes are built, a
stable selection of the best scores, and the order of MS-CNN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, Words, device_function, kernel
from caffepy.layers.detection.boxes import Rows

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

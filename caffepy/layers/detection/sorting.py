"""Sorting of scores, the largest first, with ties in the order in which Caffe's C++ leaves them.

`std::sort` does not keep the order of equal scores, and which of them are mined or kept depends on it. Owns the
introsort of libstdc++ (`bits/stl_algo.h`, `bits/stl_heap.h`), with which both Caffes are built, and the choice of the
best scores in the order of a stable sort.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, Words, device_function, kernel

_DEPTH = 2 * 64
"""More than any stack of unsorted ranges needs: introsort goes 2 log2(n) deep."""


@device_function
def _swap(keys: Floats, order: Ints, i: Int, j: Int) -> None:
    keys[i], keys[j] = keys[j], keys[i]
    order[i], order[j] = order[j], order[i]


@device_function
def _median_to_first(keys: Floats, order: Ints, first: Int, a: Int, b: Int, c: Int) -> None:
    """Swap the median of three with the first; a key that is larger comes before."""
    if keys[a] > keys[b]:
        chosen = b if keys[b] > keys[c] else (c if keys[a] > keys[c] else a)
    else:
        chosen = a if keys[a] > keys[c] else (c if keys[b] > keys[c] else b)
    _swap(keys, order, first, chosen)


@device_function
def _partition(keys: Floats, order: Ints, first: Int, last: Int) -> Int:
    """Divide [first, last) around the median of three of its keys; where the second part begins."""
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
def _sift(keys: Floats, order: Ints, first: Int, hole: Int, length: Int, key: Float, number: Int) -> None:
    """Let a key sink from `hole` to a leaf of the heap and rise from there (`__adjust_heap`)."""
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
        _sift(keys, order, first, parent, length, keys[first + parent], order[first + parent])
    for end in range(last - 1, first, -1):
        key, number = keys[end], order[end]
        keys[end], order[end] = keys[first], order[first]
        _sift(keys, order, first, 0, end - first, key, number)


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
    """Sort keys (n,) in descending order and `order` (n,) with them, in place, ties as `std::sort` leaves them.

    No key may be NaN.
    """
    assert keys.flags.c_contiguous and order.flags.c_contiguous
    stack = np.empty(3 * _DEPTH, np.int64)
    _sort.run(1, 1, 1, keys, order, len(keys), stack)


@device_function
def _is_worse(key: Float, number: Int, other: Float, other_number: Int) -> bool:
    return bool(key < other or (key == other and number > other_number))


@device_function
def _sink(keys: Floats, order: Ints, at: Int, hole: Int, length: Int, key: Float, number: Int) -> None:
    """Put a key into a heap of the best, whose root is the worst, in place of `hole` or below it."""
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
    """Write the `limit` best of the scores above `threshold`, and their numbers, from `at` on, the best first.

    Equal scores stand in the order of their numbers. Returns how many there are. The scores are `count` from `begin`
    on, each `step` behind the last.
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
                    _sink(keys, order, at, hole, limit, keys[at + hole], order[at + hole])
        elif key > keys[at]:
            _sink(keys, order, at, 0, limit, key, number)
    if found < limit:
        for hole in range(found // 2 - 1, -1, -1):
            _sink(keys, order, at, hole, found, keys[at + hole], order[at + hole])
    for last in range(found - 1, 0, -1):
        key, number = keys[at + last], order[at + last]
        keys[at + last], order[at + last] = keys[at], order[at]
        _sink(keys, order, at, 0, last, key, number)
    return found

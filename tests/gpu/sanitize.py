"""Runs some tests of each kind of own kernel for compute-sanitizer, without CuPy's memory pool.

    compute-sanitizer --tool memcheck --target-processes application-only --report-api-errors no --leak-check no \\
        --error-exitcode 9 python3 tests/gpu/sanitize.py --each 4 --seconds 90
    compute-sanitizer --tool racecheck --target-processes application-only --report-api-errors no \\
        --error-exitcode 9 python3 tests/gpu/sanitize.py --each 2 --seconds 120 --without "large window"

racecheck reports hazards in cuBLAS's kernels (nvjet), whose synchronisation it does not know: they are not ours. Large
windows take it minutes.

With the pool an access behind an array is one inside of the pool's block. Kinds take turns, so that all have their part
where the time does not suffice. No test of pytest's.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent

KINDS = {
    "reductions": ("test_primitives.py::test_reduce", "test_primitives.py::test_reduce_over_many_blocks"),
    "softmax": ("test_primitives.py::test_softmax", "test_primitives.py::test_softmax_loss"),
    "labels": ("test_primitives.py::test_labels_that_are_no_class", "test_primitives.py::test_label_ranks"),
    "finite": ("test_primitives.py::test_all_finite",),
    "normalisation": ("test_primitives.py::test_forward", "test_primitives.py::test_measure"),
    "its gradients": ("test_primitives.py::test_backward_combinations", "test_primitives.py::test_backward"),
    "activations": ("test_primitives.py::test_activation_backward",),
    "own convolutions": ("test_own_kernels.py::test_results_are_right_and_the_same_bits",),
    "depthwise": ("test_convolution.py::test_a_forward_pass_behind_a_normalisation",),
    "depthwise gradients": ("test_convolution.py::test_both_gradients_behind_a_normalisation",),
    "boxes": ("test_detection_gpu.py::test_the_devices_loss_is_the_hosts",),
    "mined boxes": ("test_detection_gpu.py::test_equal_losses_are_mined_from_the_first_prior_on",),
    "rows": ("test_primitives.py::test_rows", "test_primitives.py::test_largest"),
    "regions": (
        "test_primitives.py::test_roi_max",
        "test_primitives.py::test_roi_average",
        "test_primitives.py::test_roi_bilinear",
    ),
    "places": ("test_primitives.py::test_stochastic_pooling", "test_primitives.py::test_unpool"),
    "sparse maps": ("test_primitives.py::test_spatial_product",),
    "products": ("test_primitives.py::test_gemm_of_each_dtype",),
    "pooling": ("test_primitives.py::test_pool_max_shapes", "test_primitives.py::test_pool_average_shapes"),
    "LRN": ("test_primitives.py::test_lrn_windows",),
    "copies": ("test_primitives.py::test_channels_last_to_c_order_and_back", "test_primitives.py::test_slices"),
    "input": ("test_primitives.py::test_images",),
    "random numbers": ("test_primitives.py::test_random_uniform", "test_primitives.py::test_dropout"),
    "recurrent": ("test_primitives.py::test_a_step_of_an_lstm",),
    "formulas": ("test_primitives.py::test_apply_to_each_dtype",),
}
"""Tests of each kind, without their parameters."""

EXAMPLES = 4
"""Of tests that try many made-up inputs."""


class Selection:
    """A plugin that runs some tests of each kind, in turn, until the time is up.

    Args:
        each: how many of a kind.
        end: of `time.monotonic`.
        without: part of the names of tests that are left out; empty: none.
    """

    def __init__(self, each: int, end: float, without: str) -> None:
        self._each = each
        self._without = without
        self._end = end
        self.chosen = self.run = self.failed = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose tests that lie far apart in the list of each kind."""
        own = []
        for names in KINDS.values():
            found = [item for item in items if item.nodeid.split("/")[-1].split("[")[0] in names]
            found = [item for item in found if not self._without or self._without not in item.nodeid]
            assert found, f"no test is called {names}"
            step = max(1, len(found) // self._each)
            own.append(found[:: step + (step % 2 == 0 and step > 2)][: self._each])
        items[:] = [item for turn in zip_longest(*own) for item in turn if item is not None]
        self.chosen = len(items)

    def pytest_runtest_setup(self, item: Any) -> None:
        """Leave out what there is no time for; fewer made-up inputs."""
        if time.monotonic() > self._end:
            pytest.skip("the time is up")
        settings = getattr(item.obj, "_hypothesis_internal_use_settings", None)
        if settings is not None:
            item.obj._hypothesis_internal_use_settings = type(settings)(settings, max_examples=EXAMPLES)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count."""
        self.failed += report.failed
        if report.when == "call" and not report.skipped:
            self.run += 1
            print(f"{report.duration:6.1f} s  {report.outcome}  {report.nodeid.split('/')[-1]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=4, help="tests of each kind")
    parser.add_argument("--seconds", type=float, default=90, help="no test begins later")
    parser.add_argument("--without", default="", metavar="TEXT", help="leave out tests with TEXT in their names")
    parser.add_argument("--list", action="store_true", help="name the tests, run none")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.seconds + 120, exit=True)
    if not arguments.list:
        import cupy

        cupy.cuda.set_allocator(None)
    begin = time.monotonic()
    selection = Selection(arguments.each, begin + arguments.seconds, arguments.without)
    files = sorted({name.split("::")[0] for names in KINDS.values() for name in names})
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "--timeout=600"]
    listing = ["--collect-only"] if arguments.list else []
    status = pytest.main([*options, *listing, *(str(HERE / file) for file in files)], plugins=[selection])
    print(
        f"SUMMARY sanitize: {selection.run} of {selection.chosen} tests of {len(KINDS)} kinds ran, {selection.failed} "
        f"failed, {time.monotonic() - begin:.0f} s"
    )
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

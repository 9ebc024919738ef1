"""Links found again in the times that they make, and tables that hold such times."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.scaling.model import ALGORITHMS, AUTO, Cluster, Link, Measurements, all_reduce, fit_link, read_measurements

SIZES = [4.0**exponent for exponent in range(5, 15)]
UNUSED = Link(1.0, 1.0)


def measured(link: Link, devices: int, algorithm: str, between: bool) -> Measurements:
    """Times that a link makes, if the model is right."""
    cluster = Cluster(devices, 1, UNUSED, link) if between else Cluster(1, devices, link, UNUSED)
    return Measurements(devices, tuple((size, all_reduce(size, cluster, algorithm)[0]) for size in SIZES))


@given(
    st.floats(1e-7, 1e-3), st.floats(1e8, 1e12), st.integers(2, 16), st.sampled_from(["ring", "recursive-halving"]),
    st.booleans(),
)  # fmt: skip
def test_the_link_is_found_again(latency: float, bandwidth: float, devices: int, algorithm: str, between: bool):
    fit = fit_link(measured(Link(latency, bandwidth), devices, algorithm, between), algorithm, between)
    assert fit.error < 1e-6
    again = measured(fit.link, devices, algorithm, between)
    for (_, seconds), (_, expected) in zip(
        again.samples, measured(Link(latency, bandwidth), devices, algorithm, between).samples, strict=True
    ):
        assert seconds == pytest.approx(expected, rel=1e-5)


def test_alpha_and_beta():
    fit = fit_link(Measurements(4, ((0.0, 12e-6), (4e6, 12e-6 + 6e-3))), AUTO)
    assert fit.link.latency == pytest.approx(2e-6) and fit.link.bandwidth == pytest.approx(1e9)
    assert not fit.link.longer


def test_what_auto_predicts_for_the_devices_that_were_measured_is_what_was_measured():
    for between in (False, True):
        fit = fit_link(measured(Link(3e-6, 5e9), 4, "ring", between), AUTO, between)
        cluster = Cluster(4, 1, UNUSED, fit.link) if between else Cluster(1, 4, fit.link, UNUSED)
        assert all_reduce(1e6, cluster)[0] <= ALGORITHMS["ring"](1e6, cluster) == pytest.approx(18e-6 + 1.5e6 / 5e9)


def test_long_messages_have_a_line_of_their_own():
    """Bandwidth falls to a tenth beyond 1 MiB, as where messages no longer fit into a cache."""
    fast, slow = Link(1e-6, 1e10), Link(1e-6, 1e9)
    samples = [(size, (fast if size < 2**20 else slow).cost(2, size)) for size in SIZES]
    fit = fit_link(Measurements(2, tuple(samples)), "ring")
    assert fit.error < 1e-6
    assert fit.link.for_size(1000).bandwidth == pytest.approx(1e10)
    assert fit.link.for_size(2**28).bandwidth == pytest.approx(1e9)
    assert all_reduce(2.0**26, Cluster(1, 2, fit.link, UNUSED))[0] == pytest.approx(slow.cost(2, 2**26), rel=1e-6)


def test_noise_is_averaged():
    samples = [(size, Link(5e-6, 4e9).cost(2, size) * (1.1 if i % 2 else 0.9)) for i, size in enumerate(SIZES)]
    fit = fit_link(Measurements(2, tuple(samples)), "ring")
    assert fit.error < 0.2
    assert fit.link.for_size(2**28).bandwidth == pytest.approx(4e9, rel=0.15)


@pytest.mark.parametrize("times", [[5e-6, 4e-6, 3e-6], [1e-6, 1e-3, 1.0]])
def test_neither_is_ever_negative(times: list[float]):
    """Longer messages that are faster, and a line that would cross below 0."""
    fit = fit_link(Measurements(2, tuple(zip([1e3, 1e4, 1e5], times, strict=True))), "ring")
    assert fit.link.latency >= 0 and fit.link.bandwidth > 0
    assert math.isfinite(fit.error)


@pytest.mark.parametrize("devices, samples", [(1, ((1.0, 1.0), (2.0, 2.0))), (2, ((1.0, 1.0), (1.0, 2.0))), (2, ())])
def test_what_says_nothing(devices: int, samples: tuple[tuple[float, float], ...]):
    with pytest.raises(ConfigError, match="at least two sizes and two devices"):
        fit_link(Measurements(devices, samples), "ring")


TABLE = """\
# all-reduce over 4 devices: nccl, 2 ranks of 2 GPUs, median of 20
#    size (B)      elements         dtype     time (us)  algbw (GB/s)  busbw (GB/s)         wrong
         4096          1024       float32         10.50         0.390         0.585             0
      1048576        262144       float32         40.00        26.214        39.322             0
"""


def test_a_table_is_read(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some line of a launcher\n" + TABLE + "done  in  a  moment  indeed\n")
    found = read_measurements(tmp_path / "a.txt")
    assert found.devices == 4
    assert found.samples == ((4096.0, pytest.approx(10.5e-6)), (1048576.0, pytest.approx(40e-6)))


@pytest.mark.parametrize(
    "head, cells, sample",
    [
        ("size  time", "64 KiB  3.5", (65536, 3.5e-6)),
        ("bytes  count  time ms", "1,000  250  2", (1000, 2e-3)),
        ("algbw  size (B)  time (s)", "9  8  7", (8, 7.0)),
    ],
)
def test_tables_with_other_columns_and_units(tmp_path: Path, head: str, cells: str, sample: tuple[float, float]):
    (tmp_path / "a.txt").write_text(f"2 ranks\n{head}\n{cells}\n")
    assert read_measurements(tmp_path / "a.txt").samples == (pytest.approx(sample),)


@pytest.mark.parametrize(
    "text, message",
    [
        (TABLE.split("\n", 1)[1], "the number of devices"),
        (TABLE.replace("time", "duration"), "a header with columns for size and time"),
        ("", "the number of devices"),
    ],
)
def test_what_is_no_table(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ConfigError, match=f"a.txt: lacks {message}"):
        read_measurements(tmp_path / "a.txt")


def test_a_table_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent.txt: cannot be read: .*caffepy bench allreduce"):
        read_measurements(tmp_path / "absent.txt")

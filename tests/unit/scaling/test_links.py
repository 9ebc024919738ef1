"""Bandwidths and latencies as people write them."""

from __future__ import annotations

import pytest

from caffepy.scaling.model import LINKS, parse_bandwidth, parse_latency, parse_link


@pytest.mark.parametrize(
    "text, bytes_per_second",
    [
        ("400Gb", 50e9), ("400Gb/s", 50e9), ("100GbE", 12.5e9), ("100Gbps", 12.5e9), ("50GB", 50e9), ("50 GB/s", 50e9),
        ("8x400Gb", 400e9), ("2 x 12.5GB", 25e9), ("1.5Tbit", 187.5e9), ("800MB/s", 8e8), ("10kb", 1250), (".5GB", 5e8),
    ],
)  # fmt: skip
def test_bandwidths(text: str, bytes_per_second: float):
    assert parse_bandwidth(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize("text", ["", "400", "fast", "-1GB", "0GB", "0x400Gb", "400 gb of it", "nanGB", "1e9GB"])
def test_what_is_no_bandwidth(text: str):
    with pytest.raises(ValueError, match="is no bandwidth such as 400Gb"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    "text, seconds", [("5", 5e-6), ("5us", 5e-6), ("2.5µs", 2.5e-6), ("0.01ms", 1e-5), ("80 ns", 8e-8), ("0", 0)]
)
def test_latencies(text: str, seconds: float):
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1", "5 minutes", "inf"])
def test_what_is_no_latency(text: str):
    with pytest.raises(ValueError, match="is no latency such as 5us"):
        parse_latency(text)


def test_links():
    assert parse_link("nvlink") is LINKS["nvlink"]
    assert parse_link("25").bandwidth == 25e9  # plain numbers are GB/s
    assert parse_link("200Gb").bandwidth == 25e9
    with pytest.raises(ValueError, match="'nvlnk' is no .*did you mean 'nvlink'"):
        parse_link("nvlnk")

"""Whole numbers in texts of others: files, names and environment variables."""

from __future__ import annotations

LARGEST = 2**31 - 1
_DIGITS = 20
"""Of the longest number; Python refuses to read thousands of digits, and `isdigit` takes characters such as ²."""


def whole(text: str | bytes, least: int = 0, most: int = LARGEST) -> int | None:
    """The whole number that `text` is, in ASCII digits after at most one sign; None if it is none in these bounds."""
    signed = text.decode(errors="replace") if isinstance(text, bytes) else text
    digits = signed[1:] if signed[:1] in ("+", "-") else signed
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS):
        return None
    number = int(signed)
    return number if least <= number <= most else None

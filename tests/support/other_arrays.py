"""Arrays as other libraries have them."""

from __future__ import annotations

from typing import Any


class OnlyDlpack:
    """An array that only DLPack opens.

    Args:
        array: NumPy's or CuPy's.
    """

    def __init__(self, array: Any) -> None:
        self.shape = array.shape
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()  # type: ignore[no-any-return]

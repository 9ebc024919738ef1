"""The GPUs that were asked for, all of them there."""

from __future__ import annotations

from caffepy.phases import phase


def check_gpus(requested: list[int] | str) -> list[int]:
    """The numbers of the GPUs that were asked for; a text means all that there are.

    Raises:
        MissingExtraError: CuPy is not installed.
        DeviceError: there is no such GPU, none at all, or no NVIDIA driver.
    """
    with phase("CUDA import", "Loading CUDA's libraries"):
        from caffepy.backend.cuda.device import check_device, device_count

    if isinstance(requested, str):
        check_device(0)
        return list(range(device_count()))
    for number in requested:
        check_device(number)
    return requested

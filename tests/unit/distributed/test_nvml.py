from __future__ import annotations

from typing import Any

from fake_nvml import FakeNvml, pci

from caffepy.distributed.nvml import Nvml, open_nvml, short_address


def test_links_and_paths() -> None:
    fake = FakeNvml(links={pci(0): [pci(1), pci(1), None, pci(9)]}, levels={(pci(0), pci(1)): 50})
    nvml = Nvml(fake)
    assert nvml.link_ends(pci(0)) == ["0000:02:00.0", "0000:02:00.0", "0000:0A:00.0"]
    assert nvml.link_ends(pci(1)) == []
    assert nvml.common_ancestor(pci(0), pci(1)) == "SYS"
    assert nvml.common_ancestor(pci(1), pci(0)) == ""
    assert nvml.common_ancestor(pci(0), "0000:99:00.0") == ""


def test_a_function_that_the_driver_lacks_is_not_known() -> None:
    class Old(FakeNvml):
        def nvmlDeviceGetNvLinkState(self, device: str, link: int) -> int:
            raise self.NVMLError("Function Not Found")

    assert Nvml(Old(links={pci(0): [pci(1)]})).link_ends(pci(0)) == []


def test_the_library_is_shut_down() -> None:
    fake = FakeNvml()
    with open_nvml(lambda name: fake) as nvml:
        assert nvml is not None and fake.open == 1
    assert fake.open == 0


def test_no_library_and_no_driver() -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named '{name}'")

    with open_nvml(absent) as nvml:
        assert nvml is None
    with open_nvml(lambda name: FakeNvml(driver=False)) as nvml:
        assert nvml is None


def test_addresses_are_written_as_cuda_writes_them() -> None:
    assert short_address("00000000:1b:00.0") == "0000:1B:00.0"
    assert short_address("0000:1B:00.0") == "0000:1B:00.0"

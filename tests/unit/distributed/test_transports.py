from __future__ import annotations

from fake_nvml import FakeNvml, pci

from caffepy.distributed.nvml import Nvml
from caffepy.training.run_summary import Device, describe_devices, gpu_links, transport


def gpu(number: int, rank: int = 0, machine: str = "m") -> Device:
    return Device(rank, f"host{machine}", machine, pci(number), f"GPU {number}")


def test_links_between_gpus() -> None:
    links = {pci(0): [pci(3)], pci(3): [pci(0)], pci(1): [], pci(2): []}
    found = gpu_links([pci(number) for number in range(4)], Nvml(FakeNvml(links=links, readable=[(pci(0), pci(1))])))
    assert found[pci(0), pci(3)] == found[pci(3), pci(0)] == "NVLink"
    assert found[pci(0), pci(1)] == "PCIe"
    assert found[pci(0), pci(2)] == "shared memory"
    assert gpu_links([pci(0)], None) == {}


def test_gpus_of_a_switch() -> None:
    nvml = Nvml(FakeNvml(links={pci(0): ["0000:99:00.0"], pci(1): ["0000:99:00.0"]}))
    assert gpu_links([pci(0), pci(1)], nvml)[pci(0), pci(1)] == "NVLink"


def test_what_lies_between_two_devices() -> None:
    cpus = [Device(rank, "a", machine, None, "CPU") for rank, machine in ((0, "m"), (0, "m"), (1, "m"), (2, "n"))]
    assert transport(cpus[0], cpus[1], {}) == "memory of one process"
    assert transport(cpus[0], cpus[2], {}) == "shared memory"
    assert transport(cpus[0], cpus[3], {}) == transport(gpu(0), gpu(0, 1, "n"), {}) == "network"
    links = {"m": {(pci(0), pci(1)): "NVLink"}}
    assert transport(gpu(0), gpu(1), links) == "NVLink"
    assert transport(gpu(0), gpu(1), {}) == "PCIe or NVLink"


def test_lines() -> None:
    places = [gpu(0), gpu(1), gpu(0, 1, "n")]
    links = {"m": {(pci(0), pci(1)): "NVLink"}}
    assert list(describe_devices(places, links)) == [
        f"Device 0: rank 0 on hostm, GPU 0, PCI {pci(0)}",
        f"Device 1: rank 0 on hostm, GPU 1, PCI {pci(1)}",
        f"Device 2: rank 1 on hostn, GPU 0, PCI {pci(0)}",
        "Transport NVLink between devices 0 and 1",
        "Transport network between devices 0 and 2; 1 and 2",
    ]
    assert list(describe_devices(places[:2], links))[-1] == "Transport NVLink between devices of all pairs"
    assert len(list(describe_devices(places[:1], links))) == 1

"""PyTorch's side of `real_images.py`: a DataLoader over JPEGs in memory, alone and training a net of torchvision.

    python benchmarks/peers/torch_images.py FILES NET CROP BATCH CORES SECONDS GPU [LOWER UPPER]

Worker processes decode whole batches with torchvision, resize the shorter side to a random length from LOWER to UPPER
if they are given, crop and mirror, and hand over bytes; the GPU subtracts the mean. The net is trained in float16 by
autocast, channels last, eagerly.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from typing import Any

import numpy as np
import torch
import torchvision
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional


class Images(Dataset):
    """Batches of crops, indexed by lists of records.

    Args:
        files: path without the endings of the two arrays.
        crop: size of the crops.
        sizes: bounds of the shorter side; None: images are not resized.
    """

    def __init__(self, files: str, crop: int, sizes: tuple[int, int] | None) -> None:
        self._bytes = torch.from_numpy(np.load(f"{files}-bytes.npy"))
        self._ends = np.load(f"{files}-ends.npy").tolist()
        self._crop, self._sizes = crop, sizes

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, records: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        crop = self._crop
        batch = torch.empty((len(records), 3, crop, crop), dtype=torch.uint8)
        for index, record in enumerate(records):
            begin = self._ends[record - 1] if record else 0
            image = decode_jpeg(self._bytes[begin : self._ends[record]], ImageReadMode.RGB)
            if self._sizes is not None:
                image = functional.resize(image, [random.randint(*self._sizes)], antialias=False)
            top, left = random.randint(0, image.shape[1] - crop), random.randint(0, image.shape[2] - crop)
            part = image[:, top : top + crop, left : left + crop]
            batch[index] = part.flip(2) if random.random() < 0.5 else part
        return batch, torch.tensor(records) % 1000


class Endless(Sampler):
    """Lists of records without an end."""

    def __init__(self, length: int, batch: int) -> None:
        self._numbers = itertools.cycle(range(length))
        self._batch = batch

    def __iter__(self) -> Any:
        while True:
            yield list(itertools.islice(self._numbers, self._batch))


def rate(step: Any, batch: int, seconds: float) -> float:
    """Images a second of a step that is repeated."""
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    begin, count = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        step()
        count += 1
    torch.cuda.synchronize()
    return count * batch / (time.monotonic() - begin)


def main() -> None:
    """Measure what the command line asks for."""
    files, name, crop, batch, cores, seconds, gpu, *sizes = sys.argv[1:]
    device = torch.device("cuda", int(gpu))
    torch.backends.cudnn.benchmark = True
    images = Images(files, int(crop), (int(sizes[0]), int(sizes[1])) if sizes else None)
    loader = DataLoader(
        images,
        batch_size=None,
        sampler=Endless(len(images), int(batch)),
        num_workers=int(cores),
        pin_memory=True,
        prefetch_factor=4,
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )
    batches = iter(loader)
    print(f"  {'PyTorch, loader alone':28}{rate(lambda: next(batches), int(batch), float(seconds)):10,.0f} images/s")
    net = getattr(torchvision.models, name)().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 1e-6, momentum=0.9, weight_decay=5e-4)
    scaler, mean = torch.amp.GradScaler(), torch.tensor([123.0, 117.0, 104.0], device=device).view(1, 3, 1, 1)
    made = torch.zeros((int(batch), 3, int(crop), int(crop)), dtype=torch.uint8), torch.zeros(int(batch)).long()
    made = tuple(tensor.to(device) for tensor in made)

    def step(source: Any) -> None:
        pixels, labels = (tensor.to(device, non_blocking=True) for tensor in source())
        with torch.autocast("cuda", torch.float16):
            values = (pixels.to(memory_format=torch.channels_last).float() - mean) / 58
            loss = torch.nn.functional.cross_entropy(net(values), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for label, source in (("made up", lambda: made), ("CPU decodes", lambda: next(batches))):
        found = rate(lambda source=source: step(source), int(batch), float(seconds))
        print(f"  {f'PyTorch, {name} {label}':28}{found:10,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()

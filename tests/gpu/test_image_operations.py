"""Augmentation on a GPU gives a CPU's bytes; nothing waits for the device."""

import numpy as np
import pytest
import torch
from lightnet_data import image_operations
from lightnet_data.draws import Draws
from lightnet_data.rand_augment import Erase, RandAugment, arrays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gpu_gives_the_bytes_of_a_cpu(channels: int) -> None:
    rows, size = 96, 57
    random = np.random.default_rng(channels)
    images = torch.from_numpy(random.integers(0, 256, (rows, channels, size, size), dtype=np.uint8))
    drawn = [arrays(RandAugment(chance=0.9).operations(Draws(1, 0, i), size, size)) for i in range(rows)]
    stacked = {name: torch.from_numpy(np.stack([one[name] for one in drawn])) for name in drawn[0]}
    boxes = torch.from_numpy(np.stack([Erase(0.5)(Draws(2, 0, i), size, size)["erased"] for i in range(rows)]))

    def done(device: str) -> torch.Tensor:
        pixels, tables, factors = (x.to(device) for x in (images, stacked["table"], stacked["factors"]))
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            return image_operations.erase(
                image_operations.augment(pixels, stacked["operation"], tables, factors), boxes
            )
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    image_operations.erase(images.cuda(), boxes)  # the noise and the grey are copied once
    apart = (done("cuda").cpu().int() - done("cpu").int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3

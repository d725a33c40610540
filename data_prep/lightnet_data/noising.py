"""What a denoiser is asked of a sample: noise, a time step, and whether its class is named, by (seed, epoch, sample)."""

from typing import Any

import numpy as np
import torch

from lightnet_data import image_dataset
from lightnet_data.draws import Draws


class NoisedSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """Images or latents with what is drawn for each.

    Args:
        samples: ``ImageSamples``, ``LatentSamples`` or ``PosteriorSamples``.
        steps: of the process.
        classes: of the model; this number stands for "none".
        class_drop: chance that a sample's class is "none".
    """

    def __init__(self, samples: Any, steps: int, classes: int, class_drop: float) -> None:
        self.samples, self.steps, self.classes, self.class_drop = samples, steps, classes, class_drop

    @property
    def samples_per_epoch(self) -> int:
        """As the data set's."""
        return int(self.samples.samples_per_epoch)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """The sample at a global position.

        Returns:
            As of the data set, with the drawn label; timestep 0 to ``steps`` - 1, and noise float32 of the shape of the image
            or latent.
        """
        sample = self.samples[position]
        draws = Draws(self.samples.seed, self.samples.place(position)[0], sample["number"], image_dataset.NOISE)
        timestep, dropped = draws.integer(self.steps), draws.uniform() < self.class_drop
        values = next(sample[name] for name in ("posterior", "image", "latent") if name in sample)
        label = self.classes if dropped else sample["label"]
        noise = np.ascontiguousarray(draws.normals(values.shape))
        return {**sample, "label": label, "timestep": timestep, "noise": noise}

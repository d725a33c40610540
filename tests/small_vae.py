"""A small AutoencoderKL with random weights."""

from typing import Any

import torch


def small_vae(**changes: Any) -> Any:
    """Of 4 latent channels, two pixels a side to one; ``changes`` to its configuration."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    settings = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (4, 8),
        "latent_channels": 4,
        "norm_num_groups": 4,
    }
    return AutoencoderKL(**{**settings, **changes})

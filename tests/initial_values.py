"""The initial values of a language model's parameters, written down a second time: the twin of `models.parameters`."""

import hashlib
import math

import torch
from torch import Tensor

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models.lrpe import frequency_ladder


def drawn(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """fp32 of the full shape, without padding."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if name.endswith(".theta"):
        return frequency_ladder(config)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if name == "tpe.raw":
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        decay = torch.exp(-1 / torch.exp(uniform * math.log(config.tpe_init_length)))
        return torch.log(decay / (1 - decay)).float()
    std = config.initializer_std
    if name == "tpe.beta":
        std = 0.1 / math.sqrt(config.tpe_rank * config.axes)
    elif name.endswith(("attention.output.weight", "glu.down.weight")):
        std /= math.sqrt(2 * config.layers)
    return torch.normal(0.0, std, shape, generator=generator)


def part(full: Tensor, local: tuple[int, ...], rank: int) -> Tensor:
    """What of it one of several ranks holds in the shape ``local``: zeros beyond the end."""
    for dim, size in enumerate(local):
        if size != full.shape[dim]:
            beyond = [*full.shape[:dim], size * (rank + 1), *full.shape[dim + 1 :]]
            full = torch.cat([full, full.new_zeros(beyond)], dim).narrow(dim, rank * size, size)
    return full

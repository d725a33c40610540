"""Counter-based dropout: the mask is a function of (seed, step, place, sample, token, channel) and nothing else.

Every layout, micro-batch size and restart therefore draws the same mask (law 1 of a run), and activation
checkpointing recomputes it without saved random states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def mix32(x: Tensor) -> Tensor:
    """A bijective 32-bit integer hash (multiply-xorshift) on int64 tensors that hold 32-bit values."""
    x = (x ^ (x >> 16)) & _MASK
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _mix_int(*words: int) -> int:
    """The same hash chained over Python integers, 32 bits at a time."""
    state = 0x9E3779B9
    for word in words:
        for part in (word & _MASK, (word >> 32) & _MASK):
            state = int(mix32(torch.tensor((state ^ part) & _MASK, dtype=torch.int64)))
            state = (state + 0x9E3779B9) & _MASK
    return state


@dataclass(frozen=True)
class DropoutKey:
    """What masks of one micro-batch depend on.

    Attributes:
        seed: seed of the run.
        step: optimiser step.
        sample_ids: int64 [B] global sample positions.
        tokens: tokens per sample N.
        offset: position of this rank's first token inside its samples (sequence parallelism).
        shard: (rank, number of ranks) where tensor-parallel ranks share the B x N tokens evenly, in order.
    """

    seed: int
    step: int
    sample_ids: Tensor
    tokens: int
    offset: int = 0
    shard: tuple[int, int] = (0, 1)

    def mask(self, place: int, shape: torch.Size, probability: float, channel_offset: int = 0) -> Tensor:
        """Boolean keep-mask for activations of ``shape`` [.., C], whose leading part holds B x N tokens in order, or this
        rank's share of them.

        Args:
            place: a number that tells dropout sites apart, such as 2 * layer + 1.
            channel_offset: first global channel of this rank's slice.
        """
        device = self.sample_ids.device
        ids = self.sample_ids
        base = _mix_int(self.seed, self.step, place)
        sample = mix32(mix32((ids & _MASK) ^ base) ^ ((ids >> 32) & _MASK))
        token = torch.arange(self.offset, self.offset + self.tokens, device=device) * 0x9E3779B1
        keys = mix32((sample[:, None] + token[None, :]) & _MASK).flatten()  # [B * N]
        rank, ranks = self.shard
        count = keys.numel() // ranks
        keys = keys[rank * count : (rank + 1) * count]
        channel = torch.arange(channel_offset, channel_offset + shape[-1], device=device) * 0x85EBCA77
        bits = mix32((keys.view(*shape[:-1], 1) + channel) & _MASK)
        return bits >= int(probability * 2**32)

    def samples(self, place: int, probability: float) -> Tensor:
        """Boolean keep-mask of whole samples, [B]; independent of the masks of tokens at the same place."""
        ids = self.sample_ids
        base = _mix_int(self.seed, self.step, place, 1)
        bits = mix32(mix32((ids & _MASK) ^ base) ^ ((ids >> 32) & _MASK))
        return bits >= int(probability * 2**32)


def dropout(x: Tensor, probability: float, key: DropoutKey | None, place: int) -> Tensor:
    """Inverted dropout of ``x`` [.., C]; ``key`` None (evaluation) or probability 0 returns ``x`` itself."""
    if key is None or probability == 0.0:
        return x
    keep = key.mask(place, x.shape, probability)
    return torch.where(keep, x / (1.0 - probability), torch.zeros((), dtype=x.dtype, device=x.device))


def drop_path(x: Tensor, probability: float, key: DropoutKey | None, place: int) -> Tensor:
    """Leaves out a branch ``x`` [B, N, C] (or [1, B * N, C]) of whole samples, and scales it up in the others."""
    if key is None or probability == 0.0:
        return x
    rows = x.view(key.sample_ids.numel(), -1, x.shape[-1])
    keep = key.samples(place, probability)[:, None, None]
    return torch.where(keep, rows / (1.0 - probability), torch.zeros((), dtype=x.dtype, device=x.device)).view(x.shape)

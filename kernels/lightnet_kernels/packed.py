"""Queries, keys and values as one tensor: what a joint projection gives, and what it wants the gradient as.

An operator takes them either way: three tensors [B, N, H, D], or [B, N, H, 3, D] and None twice.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apart(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [B, N, H, D] each; views of one tensor where they are one."""
    if key is None or value is None:
        query, key, value = query.unbind(3)
    return query, key, value


class Gradients:
    """Empty tensors for the gradients of inputs that are given either way, made when they are asked for."""

    def __init__(self, query: Tensor, key: Tensor | None, value: Tensor | None):
        self.given = query, key, value
        self.joint = _empty(query) if key is None or value is None else None
        self.made: list[Tensor] = []

    def next(self) -> Tensor:
        """That of the queries, of the keys, of the values."""
        place = len(self.made)
        if self.joint is not None:
            self.made.append(self.joint.select(3, place))
        else:
            like = self.given[place]
            assert like is not None
            self.made.append(_empty(like))
        return self.made[-1]

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """As the inputs are given."""
        if self.joint is not None:
            return self.joint, None, None
        while len(self.made) < 3:
            self.next()
        return self.made[0], self.made[1], self.made[2]


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

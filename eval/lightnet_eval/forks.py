"""Segments of one packed pass that go on from the state of another segment of the same pass.

Layers take what stands before a segment from the context's exchange, as in sequence parallelism: there from other
ranks, here from the segment that holds a shared beginning. So a context and all that may follow it are one forward
pass, in which the context is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightnet_kernels import ScanState, ToeplitzState, identity_state
from torch import Tensor


class _Handed:
    """Gives each segment the state of its parent, and the identity to those that have none."""

    def __init__(self, parents: Tensor, meanwhile: Callable[[], None] | None = None):
        self.parents, self.meanwhile = parents, meanwhile

    def prefix(self, state: Any) -> Any:
        """[segments, ...] of the segments' own to [segments, ...] of what lies before each."""
        if self.meanwhile is not None:
            self.meanwhile()
        own = self.parents < 0
        source = self.parents.clamp_min(0)
        found = []
        for part, empty in zip(state, self._identity(state), strict=True):
            chosen = part.index_select(0, source)
            found.append(torch.where(own.view(-1, *[1] * (part.ndim - 1)), empty, chosen))
        return type(state)(*found)

    def _identity(self, state: Any) -> Any:
        """One row of the state before any token, which broadcasts over segments."""
        if isinstance(state, ToeplitzState):
            return ToeplitzState(*(torch.zeros_like(part[:1]) for part in state))
        _, heads, width = state.max.shape
        rows, value = state.kv.shape[2:]
        empty = identity_state(
            1, heads, width, value, lrpe=rows == 2 * width, dtype=state.kv.dtype, device=state.kv.device
        )
        return ScanState(*empty)


@dataclass(frozen=True)
class Forks:
    """What a forward context carries as its exchange.

    Attributes:
        parents: int64 [segments], index of the segment that each goes on from, -1 for the start of a document. A parent
            has none itself.
    """

    parents: Tensor

    def scan(self, theta: Tensor | None, meanwhile: Callable[[], None] | None = None) -> _Handed:
        """For an additive scan; a state's angle 0 is the next token, so nothing turns."""
        return _Handed(self.parents, meanwhile)

    def toeplitz(self, decay: Tensor) -> _Handed:
        """For a Toeplitz scan."""
        return _Handed(self.parents)

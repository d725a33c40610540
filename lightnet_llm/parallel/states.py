"""States of both scans as what travels between ranks: their fields, how they merge, and how they pass a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightnet_kernels import ScanState, ToeplitzState, merge_states, merge_toeplitz_states
from torch import Tensor

from .segments import Line

BLOCKS = 4  # of heads or channels, that a handed-on state travels in


@dataclass(frozen=True)
class Algebra:
    """A kind of state.

    Attributes:
        kind: the named tuple; its ``max`` and ``length`` are constants, the other fields have gradients.
        merge: of two states and the parameter that moves the left one to the right one's end: theta [H, D], None for
            states on one origin, or the decay [d, e].
        widest: dimensions of the field that holds almost all bytes.
    """

    kind: Any
    merge: Callable[[Any, Any, Any], Any]
    widest: int

    @property
    def flowing(self) -> tuple[str, ...]:
        """Fields with gradients."""
        return tuple(name for name in self.kind._fields if name not in ("max", "length"))

    def identity(self, like: Any) -> Any:
        """The state of no tokens, of the same shape."""
        fill = {"max": float("-inf")}
        return self.kind(*(torch.full_like(x, fill.get(n, 0)) for n, x in zip(like._fields, like, strict=True)))

    def flows(self, state: Any) -> tuple[Tensor, ...]:
        """The fields with gradients."""
        return tuple(getattr(state, name) for name in self.flowing)

    def put(self, state: Any, flows: Sequence[Tensor]) -> Any:
        """The state with other values in the fields that have gradients."""
        return state._replace(**dict(zip(self.flowing, flows, strict=True)))

    def onward(self, before: Any, own: Any, line: Line, at: int, parameter: Tensor | None) -> Any:
        """What arrives at the position after ``at``, from what arrived there and what it adds."""
        whole = self.merge(before, own, parameter)
        single, goes = line.single[at], line.continues[at]
        return self.kind(
            *(
                torch.where(_rows(goes, x), torch.where(_rows(single, x), w, x), n)
                for w, x, n in zip(whole, own, self.identity(own), strict=True)
            )
        )

    def blocks(self, state: Any) -> list[Any]:
        """The state cut along heads (channels), dimension 1; each block has all of the lengths."""
        count = len(state[0].chunk(BLOCKS, 1))
        fields = [[x] * count if x.dim() == 1 else x.chunk(BLOCKS, 1) for x in state]
        return [self.kind(*parts) for parts in zip(*fields, strict=True)]

    def joined(self, blocks: Sequence[Any]) -> Any:
        """The state whose blocks these are."""
        fields = zip(*blocks, strict=True)
        return self.kind(*(parts[0] if parts[0].dim() == 1 else torch.cat(parts, 1) for parts in fields))


SCAN = Algebra(ScanState, merge_states, 4)
TOEPLITZ = Algebra(ToeplitzState, merge_toeplitz_states, 3)


def _rows(flag: Tensor, x: Tensor) -> Tensor:
    """bool [B] beside x [B, ...]."""
    return flag.view(-1, *[1] * (x.dim() - 1))


def gradients(outputs: Sequence[Tensor], inputs: list[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for inputs that no output depends on."""
    used = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
    if not used:
        return [torch.zeros_like(x) for x in inputs]
    wanted = [x for x, _ in used], inputs, [grad for _, grad in used]
    return list(torch.autograd.grad(*wanted, allow_unused=True, materialize_grads=True))

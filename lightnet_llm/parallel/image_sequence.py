"""Sequence parallelism of image models: ranks share the tokens of every image behind its embedding.

Patches and MD-TPE, whose axes are short, are computed whole on every rank; then each takes its part of the tokens in row-major
order, and the scans exchange states as for text. What all ranks need of all tokens again (the mean of a classifier, a
denoiser's prediction) is summed over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.context import ForwardContext
from ..models.dropout import DropoutKey
from .segments import SequencePlace, plan_segments
from .sequence import SequenceExchange


@dataclass(frozen=True)
class ImageExchange(SequenceExchange):
    """The exchange of states, and how tokens are dealt out: ``rows`` images of ``tokens`` tokens."""

    rows: int
    tokens: int

    def part(self, x: Tensor) -> Tensor:
        """[B, N, width] to this rank's tokens of all images, [1, B * w, width]; zeros beyond the last."""
        width = self.place.width(self.tokens)
        padded = F.pad(x, (0, 0, 0, self.place.padding(self.tokens)))
        return padded[:, self.place.rank * width :][:, :width].reshape(1, -1, x.shape[-1])

    def coordinates(self, whole: Tensor) -> Tensor:
        """[N, axes] of an image to [B * w, axes] of this rank's tokens."""
        return self.part(whole[None])[0].repeat(self.rows, 1)

    def mean(self, hidden: Tensor) -> Tensor:
        """This rank's [1, B * w, width] to the mean over all tokens of each image, [B, width], on every rank."""
        rows = hidden.view(self.rows, -1, hidden.shape[-1])[:, : self._own].float()
        return (self.sum(rows.sum(1)) / self.tokens).to(hidden.dtype)

    def whole(self, hidden: Tensor) -> Tensor:
        """This rank's [1, B * w, width] to [B, N, width], on every rank."""
        rows = hidden.view(self.rows, -1, hidden.shape[-1])[:, : self._own]
        before = min(self.place.rank * self.place.width(self.tokens), self.tokens)
        return self.sum(F.pad(rows, (0, 0, before, self.tokens - before - self._own)))

    @property
    def _own(self) -> int:
        """Tokens of an image on this rank, without padding."""
        width = self.place.width(self.tokens)
        return max(0, min(width, self.tokens - self.place.rank * width))


def image_context(
    sample_ids: Tensor, tokens: int, drops: bool, seed: int, step: int | None, place: SequencePlace | None
) -> ForwardContext:
    """The context of a pass over images; :meth:`ForwardContext.at` gives it coordinates.

    Args:
        sample_ids: int64 [B].
        tokens: of an image, prefix included.
        drops: whether the model has dropout or drop path.
        step: optimiser step; None (evaluation) turns them off.
        place: this rank among those that share each image; None for one.
    """
    shared = place is not None and place.size > 1
    width = place.width(tokens) if shared and place else tokens
    offset = place.rank * width if shared and place else 0
    key = DropoutKey(seed, step, sample_ids, width, offset) if drops and step is not None else None
    if not shared or place is None:
        return ForwardContext(dropout=key)
    rows = sample_ids.numel()
    bounds = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
    plan = plan_segments(bounds, rows, tokens, place, sample_ids.device)
    return ForwardContext(cu_seqlens=plan.cu_seqlens, dropout=key, exchange=ImageExchange(plan, place, rows, tokens))

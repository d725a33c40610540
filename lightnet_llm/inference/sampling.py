"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        greedy: take the most likely token; the rest then does not matter. Temperature 0 and top_k 1 mean the same.
        temperature: logits are divided by it; below 1 sharper, above 1 flatter.
        top_k: only the k most likely tokens can be drawn.
        top_p: only the smallest set of most likely tokens whose probabilities reach p can be drawn, after
            temperature and top_k; the most likely token always can.
        seed: of the draws; row b of a batch draws with seed + b, so it does what it would do alone.

    Raises:
        UserError: a value outside its range.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature} must be 0 (greedy) or above, and finite; 1 is neutral")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k} must be at least 1; leave it out to allow every token")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top-p {self.top_p} must be above 0 and at most 1; 1 allows every token")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed {self.seed} must be between 0 and 2^63 - 1")

    @property
    def takes_best(self) -> bool:
        """Whether nothing is left to chance."""
        return self.greedy or self.temperature == 0.0 or self.top_k == 1

    def generators(self, rows: int) -> list[torch.Generator]:
        """One source of draws a row. On the CPU, so that the device does not change the draws."""
        return [torch.Generator().manual_seed((self.seed + row) % 2**63) for row in range(rows)]


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """[.., V] logits with all but the k largest set to -inf (those equal to the k-th stay)."""
    if k >= logits.shape[-1]:
        return logits
    smallest = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """[.., V] logits with -inf outside the smallest set of likeliest tokens whose probabilities sum to p or more."""
    if p >= 1.0:
        return logits
    ordered, places = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # what the likelier tokens hold; 0 for the first
    dropped = before >= p
    dropped[..., 0] = False
    return logits.masked_fill(dropped.scatter(-1, places, dropped), float("-inf"))


def draw(logits: Tensor, generators: list[torch.Generator]) -> Tensor:
    """One token a row from softmax(logits), logits [B, V]; int64 [B]. Tokens at -inf are never drawn.

    Inverse of the cumulative distribution in fp64: one number a row, whatever the vocabulary.
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in generators])
    # uniform <= 1 - 2^-53, so the product rounds to less than the total and the search ends inside, at a token with
    # a probability above 0: one of probability 0 has the same cumulative value as the token before it.
    wanted = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)


def choose(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """The next token of each row: logits [B, V] without padding, any float dtype; int64 [B].

    Raises:
        UserError: logits that are not finite, as of a run that diverged.
    """
    logits = logits.float()
    if not bool(torch.isfinite(logits).all()):
        raise UserError(
            "the model's logits are not finite: its weights are damaged or its run diverged; use another step"
        )
    if sampling.takes_best:
        return logits.argmax(-1)
    # Relative to the largest, so that a tiny temperature gives -inf below it and not inf above.
    logits = (logits - logits.amax(-1, keepdim=True)).double() / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    return draw(keep_top_p(logits, sampling.top_p), generators)

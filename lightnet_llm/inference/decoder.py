"""Decoding: one token a row at a time, from a state that is changed in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models import CausalLM, ForwardContext, ModelState
from ..models.decoding import can_decode, select_rows, to_decode, to_scan
from .cache import StateCache, read


class Decoder:
    """Reads one token a row at a time, on a state of its own that it changes in place.

    Args:
        state: what the model has read before, as a ``StateCache`` has it; it is copied.
    """

    def __init__(self, model: CausalLM, state: ModelState):
        self.model = model
        self.in_place = can_decode(model)  # "no share" reads token by token with the scan
        self.state = to_decode(model, state) if self.in_place else state

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B], on any device, to the logits of the next ones [B, V], as in ``StateCache``."""
        if not self.in_place:
            reading = read(self.model, tokens[:, None], self.state)
            self.state = reading.state
            return reading.logits
        model = self.model
        ids = tokens.to(next(model.parameters()).device)[:, None]
        hidden, _ = model.hidden(ids, ForwardContext(decode=True), self.state)
        return model.layers_set.gather_logits(model.logits(hidden), model.config.vocab_size)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with the named rows only, int64 [R]."""
        self.state = select_rows(self.state, rows)

    def cache(self, logits: Tensor) -> StateCache:
        """A copy of the state after the last token read, with the logits that it gave."""
        return StateCache(logits, to_scan(self.state))

"""Decoding: one token a row at a time, from a state that is changed in place."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from ..models import CausalLM, ForwardContext, ModelState
from ..models.decoding import can_decode, select_rows, to_decode, to_scan
from .cache import StateCache, read

EAGER_STEPS = 3  # before a graph is captured: kernels are compiled, libraries set up, and short texts end
_capturing = threading.Lock()  # PyTorch captures one graph at a time


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Decoder:
    """Reads one token a row at a time, on a state of its own that it changes in place.

    On a GPU the step becomes a CUDA graph after some tokens: launching its kernels one by one takes the host many times
    longer than a GPU needs to run them. The weights must stay where they are meanwhile.

    Args:
        state: what the model has read before, as a ``StateCache`` has it; it is copied.
        graph: whether to capture; where the model is cut over ranks this is never done.
    """

    def __init__(self, model: CausalLM, state: ModelState, *, graph: bool = True):
        self.model = model
        self.in_place = can_decode(model)  # "no share" reads token by token with the scan
        self.state = to_decode(model, state) if self.in_place else state
        self.device = next(model.parameters()).device
        alone = model.layers_set.tensor_parallel == 1
        nvidia = self.device.type == "cuda" and torch.version.hip is None
        self.can_capture = graph and self.in_place and alone and nvidia
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B], on any device, to the logits of the next ones [B, V], as in ``StateCache``."""
        if not self.in_place:
            reading = read(self.model, tokens[:, None], self.state)
            self.state = reading.state
            return reading.logits
        ids = tokens.to(self.device)[:, None]
        self.steps += 1
        if not self.can_capture or self.steps <= EAGER_STEPS:
            return self._step(ids)
        if self.graph is None and not self._capture(ids):
            return self._step(ids)
        assert self.graph is not None
        if ids.shape != self.ids.shape:
            raise ValueError(
                f"Decoder: {len(ids)} tokens for {len(self.ids)} rows; name the rows that go on with keep()"
            )
        self.ids.copy_(ids)
        self.graph.replay()
        return self.logits.clone()

    def _step(self, ids: Tensor) -> Tensor:
        """int64 [B, 1] to [B, V]."""
        model = self.model
        hidden, _ = model.hidden(ids, ForwardContext(decode=True), self.state)
        return model.layers_set.gather_logits(model.logits(hidden), model.config.vocab_size)[:, 0]

    def _capture(self, ids: Tensor) -> bool:
        """Whether there is a graph now. What is captured does not run: the state stays as it is, and where a capture fails,
        as for want of memory, steps go on as they were."""
        graph, given, stream = torch.cuda.CUDAGraph(), ids.clone(), _capture_stream(self.device)
        try:
            with (
                _capturing,
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                logits = self._step(given)
        except RuntimeError:  # OutOfMemoryError is one
            self.can_capture = False
            return False
        self.graph, self.ids, self.logits = graph, given, logits
        return True

    def keep(self, rows: Tensor) -> None:
        """Go on with the named rows only, int64 [R]."""
        self.state = select_rows(self.state, rows)
        self.graph, self.steps = None, 0

    def cache(self, logits: Tensor) -> StateCache:
        """A copy of the state after the last token read, with the logits that it gave."""
        return StateCache(logits, to_scan(self.state))

"""Forward passes over packed segments, and what is wanted of them; the host does not wait for a device until the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightnet_llm.models import CausalLM, ForwardContext, ModelState
from lightnet_llm.models.decoding import select_rows

LOGITS_AT_ONCE = 1 << 19, 1 << 25  # elements, on the CPU (what its caches hold) and on a GPU


class Scores:
    """Log probabilities of tokens, and whose they are. They stay on the device until all are asked for: to fetch those of a
    pass would be to wait for it, while the host could prepare the next."""

    def __init__(self) -> None:
        self.requests: list[NDArray[np.int64]] = []
        self.parts: list[tuple[Tensor, Tensor]] = []

    def add(
        self, model: CausalLM, hidden: Tensor, places: NDArray[Any], tokens: NDArray[Any], requests: NDArray[Any]
    ) -> None:
        """Of ``tokens`` that follow ``places`` of activations [1, N, width]."""
        order = np.argsort(places, kind="stable")
        self.requests.append(requests[order])
        self.parts.append(_predictions(model, hidden, places[order], tokens[order]))

    def sums(self) -> dict[int, tuple[float, bool]]:
        """By request: the sum, and whether each token is the likeliest."""
        if not self.requests:
            return {}
        found, slot = torch.from_numpy(np.concatenate(self.requests)).unique(return_inverse=True)
        nats, greedy = (torch.cat(part).cpu().double() for part in zip(*self.parts, strict=True))
        total, best = torch.zeros(2, len(found), dtype=torch.float64).index_add_(
            1, slot, torch.stack([nats, 1 - greedy])
        )
        rows = zip(found.tolist(), total.tolist(), (best == 0).tolist(), strict=True)
        return {index: (value, likeliest) for index, value, likeliest in rows}


class Pass:
    """Segments of one forward pass, and what is wanted of it: tokens that follow activations, each for a request."""

    def __init__(self) -> None:
        self.ids: list[NDArray[Any]] = []
        self.size = 0
        self.bounds, self.parents = [0], []
        self.places: list[int] = []
        self.tokens: list[NDArray[Any]] = []
        self.requests: list[int] = []

    bounds: list[int]
    parents: list[int]

    def add(self, tokens: NDArray[Any], parent: int = -1) -> None:
        """A segment, which goes on from state ``parent``."""
        self.ids.append(tokens)
        self.size += len(tokens)
        self.bounds.append(self.size)
        self.parents.append(parent)

    def want(self, place: int, tokens: NDArray[Any], request: int) -> None:
        """The predictions of ``tokens`` at ``place`` and the places after it."""
        self.places.append(place)
        self.tokens.append(tokens)
        self.requests.append(request)

    def run(
        self,
        model: CausalLM,
        before: ModelState | None,
        return_state: bool,
        scores: Scores,
        report: Callable[[int], Any],
    ) -> ModelState | None:
        """Read the segments and predict; the states after them where asked for."""
        device = next(model.parameters()).device
        if before is not None:
            before = select_rows(before, sent(self.parents, device))
        context = ForwardContext(cu_seqlens=torch.tensor(self.bounds))
        hidden, after = model.hidden(sent(np.concatenate(self.ids), device)[None], context, before, return_state)
        if self.places:
            sizes = [len(tokens) for tokens in self.tokens]
            firsts = np.repeat(np.array(self.places) - np.cumsum([0, *sizes[:-1]]), sizes)
            places = firsts + np.arange(len(firsts))
            scores.add(model, hidden, places, np.concatenate(self.tokens), np.repeat(self.requests, sizes))
        report(self.size)
        return after


def sent(values: NDArray[Any] | list[int], device: torch.device) -> Tensor:
    """Numbers as int64 on a device; a GPU fetches them in its own time, the host does not wait for it."""
    made = torch.from_numpy(np.asarray(values).astype(np.int64))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def _predictions(model: CausalLM, hidden: Tensor, places: NDArray[Any], tokens: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """Log probability of each token that follows its place, and whether it is the likeliest, from activations [1, N, width]:
    [tokens] on their device.

    Only the wanted places meet the head, each once however many tokens are asked for there.

    Args:
        places: in ascending order.
    """
    device = hidden.device
    new = np.diff(places, prepend=-1) > 0
    owner = np.cumsum(new) - 1
    chosen = hidden[0, sent(places[new], device)]
    step = max(1, LOGITS_AT_ONCE[device.type == "cuda"] // model.config.vocab_size)
    begins = np.arange(0, len(chosen) + step, step)
    bounds = np.searchsorted(owner, begins).tolist()
    rows, targets = sent(owner % step, device), sent(tokens, device)
    nats, greedy = [], []
    for begin, first, last in zip(begins.tolist(), bounds[:-1], bounds[1:], strict=False):
        logits = model.logits(chosen[None, begin : begin + step])
        logits = model.layers_set.gather_logits(logits, model.config.vocab_size)[0].float()
        row, target = rows[first:last], targets[first:last]
        # Of several likeliest tokens the first counts. On a CPU looking for it takes longer than finding the maximum; on a
        # GPU not to look everywhere would be to wait until it is known where.
        wanted = logits[row, target]
        if device.type == "cuda":
            top, likely = logits.max(-1, keepdim=True)
            likeliest = likely[row, 0] == target
        else:
            top = logits.amax(-1, keepdim=True)
            likeliest = wanted == top[row, 0]
            hits = likeliest.nonzero().squeeze(1)
            likeliest[hits] = logits[row[hits]].max(-1).indices == target[hits]
        mass = logits.sub_(top).exp_().sum(-1).log() + top[:, 0]  # logsumexp, in place
        nats.append(wanted - mass[row])
        greedy.append(likeliest)
    return torch.cat(nats), torch.cat(greedy)

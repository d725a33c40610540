"""Log likelihoods of continuations: requests are packed and not padded, and what they begin with alike is read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightnet_llm.errors import UserError
from lightnet_llm.models import CausalLM, ForwardContext, ModelState
from lightnet_llm.models.decoding import join_rows, select_rows

from .heldout import default_batch_tokens
from .prefixes import Group, group
from .ranks import Ranks

LOGITS_AT_ONCE = 1 << 19, 1 << 25  # elements, on the CPU (what its caches hold) and on a GPU
BATCH_TOKENS = 2048  # on a CPU: states of short segments take more memory than their tokens
STATE_BYTES = (1 << 30, 8 << 30)  # of the states of a window of requests, on the CPU and on a GPU
PARTS = 8  # windows for each of several ranks, so that they end together
WINDOW = 32  # forward passes whose segments are put in order of length together


class Request(NamedTuple):
    """One continuation after one context.

    Attributes:
        tokens: of both, in order; the first one is only read.
        start: index >= 1 of the first token that counts.
    """

    tokens: tuple[int, ...]
    start: int


class Likelihood(NamedTuple):
    """Attributes:
    log_likelihood: of the tokens that count, in nats; 0 where none does.
    greedy: whether each of them is the most likely one in its place.
    """

    log_likelihood: float
    greedy: bool


@torch.inference_mode()
def likelihoods(
    model: CausalLM,
    requests: Sequence[Request],
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
    progress: Callable[[int], Any] = lambda done: None,
) -> list[Likelihood]:
    """Score requests; results do not depend on their order, on ``batch_tokens`` or on the number of ranks.

    Args:
        model: in eval mode.
        batch_tokens: tokens of a forward pass; default: by device. A longer request is carried through by its state.
        ranks: all of which call this with the same requests, share the work and get all results.
        progress: told how many requests are done.

    Raises:
        UserError: a token the model does not have, a request that starts at its first token, or a loss that is not finite.
    """
    ranks = ranks or Ranks()
    device = next(model.parameters()).device
    limit = batch_tokens or (default_batch_tokens(device) if device.type == "cuda" else BATCH_TOKENS)
    if limit < 1:
        raise UserError(f"batch-tokens {limit} must be at least 1")
    _check(requests, model.config.vocab_size)
    wanted: dict[Request, list[int]] = {}
    found: dict[int, Likelihood] = {}
    for index, request in enumerate(requests):
        if request.start >= len(request.tokens):
            found[index] = Likelihood(0.0, True)
        else:
            wanted.setdefault(request, []).append(index)
    unique = list(wanted)
    groups = group([request.tokens for request in unique], limit)
    total = sum(_size(item, unique) for item in groups)
    share = min(WINDOW * limit, max(1, -(-total // (PARTS if ranks.size > 1 else 1) // ranks.size)))
    states = max(8, STATE_BYTES[device.type == "cuda"] // _state_bytes(model))

    def own_part() -> dict[int, tuple[float, bool]]:
        mine: dict[int, tuple[float, bool]] = {}
        for window in _windows(groups, unique, share, limit, states)[ranks.rank :: ranks.size]:
            members = [index for item in window for index in item.members]
            count = sum(len(wanted[unique[index]]) for index in members)
            report = _Shares(sum(_size(item, unique) for item in window), count, progress)
            if len(window) == 1 and _size(window[0], unique) > limit:
                mine |= _carried(model, window[0], unique, limit, report)
            else:
                mine |= _packed(model, window, unique, limit, states, report)
        return mine

    for part in ranks.share(own_part):
        for index, (nats, greedy) in part.items():
            if not math.isfinite(nats):
                raise UserError(
                    "log likelihoods are not finite: the weights are damaged or the run diverged; use another step"
                )
            for request_index in wanted[unique[index]]:
                found[request_index] = Likelihood(nats, greedy)
    return [found[index] for index in range(len(requests))]


def _check(requests: Sequence[Request], vocab_size: int) -> None:
    for index, request in enumerate(requests):
        if request.start < 1 or not request.tokens:
            raise UserError(
                f"request {index}: nothing stands before its continuation; put the end-of-document token first"
            )
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocab_size:
            raise UserError(
                f"request {index}: token {max(request.tokens)} is not one of the model's {vocab_size}; "
                "it was cut with another model's tokenizer"
            )


def _size(item: Group, unique: list[Request]) -> int:
    """Tokens that the model reads for a group."""
    return item.shared + sum(len(unique[index].tokens) - 1 - item.shared for index in item.members)


def _windows(groups: list[Group], unique: list[Request], limit: int, longest: int, states: int) -> list[list[Group]]:
    """Groups of up to ``limit`` tokens and ``states`` states together, one longer than a pass, of ``longest``, alone; those
    that share nothing apart."""
    windows: list[list[Group]] = []
    for kind in ([item for item in groups if item.shared], [item for item in groups if not item.shared]):
        filled, held = limit, 0
        for item in kind:
            size, count = _size(item, unique), 1 if item.shared else 0
            if filled + size > limit or held + count > states or size > longest:
                windows.append([])
                filled = held = 0
            windows[-1].append(item)
            filled, held = limit if size > longest else filled + size, held + count
    return windows


class _Shares:
    """Reports requests as done by the share of their tokens that was read."""

    def __init__(self, tokens: int, requests: int, progress: Callable[[int], Any]) -> None:
        self.tokens, self.requests, self.progress = tokens, requests, progress
        self.read = self.told = 0

    def __call__(self, tokens: int) -> None:
        self.read += tokens
        now = self.requests * self.read // max(self.tokens, 1)
        self.progress(now - self.told)
        self.told = now


def _state_bytes(model: CausalLM) -> int:
    """Of one row's state."""
    config = model.config
    scan = config.width * config.head_width * (2 if config.lrpe else 1)
    return 4 * (config.layers * scan + (config.width * config.tpe_rank if config.tpe else 0))


def _packed(
    model: CausalLM,
    window: list[Group],
    unique: list[Request],
    limit: int,
    most: int,
    report: Callable[[int], Any],
) -> dict[int, tuple[float, bool]]:
    """Passes over all shared beginnings and then over all the rests, each from its beginning's state; or over requests
    that share nothing. In each kind the longest come first: a pass over segments of nearly one length pads little.

    Args:
        limit, most: tokens of a pass, and states that one over rests begins from.
    """
    scores, states = _Scores(), []
    rests: list[tuple[int, int, int]] = []  # request, tokens it shares, row of their state
    beginnings = sorted((item for item in window if item.shared), key=lambda item: -item.shared)
    further = any(len(unique[index].tokens) - 1 > item.shared for item in beginnings for index in item.members)
    packed = _Pass()
    for row, item in enumerate(beginnings):
        if packed.ids and len(packed.ids) + item.shared > limit:
            states.append(packed.run(model, None, further, scores, report))
            packed = _Pass()
        begin = len(packed.ids)
        packed.add(unique[item.members[0]].tokens[: item.shared])
        for index in item.members:
            tokens, start = unique[index]
            if start <= item.shared:
                packed.want(begin + start - 1, tokens[start : item.shared + 1], index)
            rests.append((index, item.shared, row))
    if packed.ids:
        states.append(packed.run(model, None, further, scores, report))
    state = join_rows([each for each in states if each is not None]) if further else None
    states.clear()
    rests += [(index, 0, -1) for item in window if not item.shared for index in item.members]
    packed = _Pass()
    for index, shared, row in sorted(rests, key=lambda rest: rest[1] - len(unique[rest[0]].tokens)):
        tokens, start = unique[index]
        size, inside = len(tokens) - 1 - shared, max(start, shared + 1)
        if not size:
            continue
        full = len(packed.ids) + size > limit or (state is not None and len(packed.parents) >= most)
        if packed.ids and full:
            packed.run(model, state, False, scores, report)
            packed = _Pass()
        packed.want(len(packed.ids) + inside - 1 - shared, tokens[inside:], index)
        packed.add(tokens[shared:-1], row)
    if packed.ids:
        packed.run(model, state, False, scores, report)
    return scores.sums()


class _Scores:
    """Log probabilities of tokens, and whose they are."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.parts: list[tuple[Tensor, Tensor]] = []

    def sums(self) -> dict[int, tuple[float, bool]]:
        """By request: the sum, and whether each token is the likeliest."""
        if not self.requests:
            return {}
        request = torch.tensor(self.requests)
        found, slot = request.unique(return_inverse=True)
        nats, greedy = (torch.cat(part).double() for part in zip(*self.parts, strict=True))
        total, best = torch.zeros(2, len(found), dtype=torch.float64).index_add_(
            1, slot, torch.stack([nats, 1 - greedy])
        )
        rows = zip(found.tolist(), total.tolist(), (best == 0).tolist(), strict=True)
        return {index: (value, likeliest) for index, value, likeliest in rows}


class _Pass:
    """Segments of one forward pass, and what is wanted of it: tokens that follow activations, each for a request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.bounds, self.parents = [0], []
        self.places: list[int] = []
        self.tokens: list[int] = []
        self.requests: list[int] = []

    bounds: list[int]
    parents: list[int]

    def add(self, tokens: Sequence[int], parent: int = -1) -> None:
        """A segment, which goes on from state ``parent``."""
        self.ids.extend(tokens)
        self.bounds.append(len(self.ids))
        self.parents.append(parent)

    def want(self, place: int, tokens: Sequence[int], request: int) -> None:
        """The predictions of ``tokens`` at ``place`` and the places after it."""
        self.places.extend(range(place, place + len(tokens)))
        self.tokens.extend(tokens)
        self.requests.extend([request] * len(tokens))

    def run(
        self,
        model: CausalLM,
        before: ModelState | None,
        return_state: bool,
        scores: _Scores,
        report: Callable[[int], Any],
    ) -> ModelState | None:
        """Read the segments and predict; the states after them where asked for."""
        device = next(model.parameters()).device
        if before is not None:
            before = select_rows(before, torch.tensor(self.parents, device=device))
        context = ForwardContext(cu_seqlens=torch.tensor(self.bounds))
        ids = torch.tensor([self.ids], device=device)
        hidden, after = model.hidden(ids, context, before, return_state)
        if self.places:
            scores.requests += self.requests
            scores.parts.append(_predictions(model, hidden, self.places, self.tokens))
        report(len(self.ids))
        return after


def _carried(
    model: CausalLM, item: Group, unique: list[Request], limit: int, report: Callable[[int], Any]
) -> dict[int, tuple[float, bool]]:
    """A single request longer than a pass, piece by piece."""
    (index,) = item.members
    tokens, start = unique[index]
    device = next(model.parameters()).device
    ids = torch.tensor([tokens[:-1]], device=device)
    state, scores = None, _Scores()
    for begin in range(0, len(tokens) - 1, limit):
        hidden, state = model.hidden(ids[:, begin : begin + limit], state=state, return_state=True)
        places = range(max(start - 1, begin), min(begin + limit, len(tokens) - 1))
        if places:
            scores.requests += [index] * len(places)
            wanted = [place - begin for place in places], tokens[places.start + 1 : places.stop + 1]
            scores.parts.append(_predictions(model, hidden, *wanted))
        report(hidden.shape[1])
    return scores.sums()


def _predictions(
    model: CausalLM, hidden: Tensor, places: Sequence[int], tokens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Log probability of each token that follows its place, and whether it is the likeliest, from activations [1, N, width]:
    [tokens] on the CPU.

    Only the wanted places meet the head, each once however many tokens are asked for there.
    """
    device = hidden.device
    distinct, owner = torch.tensor(places).unique(return_inverse=True)
    owner, order = owner.sort(stable=True)
    token = torch.tensor(tokens)[order].to(device)
    chosen = hidden[0, distinct.to(device)]
    step = max(1, LOGITS_AT_ONCE[device.type == "cuda"] // model.config.vocab_size)
    begins = torch.arange(0, len(chosen) + step, step)
    bounds = torch.searchsorted(owner, begins).tolist()
    owner = owner.to(device)
    nats, greedy = [], []
    for begin, first, last in zip(begins.tolist(), bounds[:-1], bounds[1:], strict=False):
        logits = model.logits(chosen[None, begin : begin + step])
        logits = model.layers_set.gather_logits(logits, model.config.vocab_size)[0].float()
        row, target = owner[first:last] - begin, token[first:last]
        wanted, top = logits[row, target], logits.amax(-1, keepdim=True)
        # Of several likeliest tokens the first counts. Looking for it takes longer than finding the maximum.
        likeliest = wanted == top[row, 0]
        hits = likeliest.nonzero().squeeze(1)
        likeliest[hits] = logits[row[hits]].max(-1).indices == target[hits]
        mass = logits.sub_(top).exp_().sum(-1).log() + top[:, 0]  # logsumexp, in place
        nats.append(wanted - mass[row])
        greedy.append(likeliest)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return torch.cat(nats).cpu()[back], torch.cat(greedy).cpu()[back]

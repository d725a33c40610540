"""Log likelihoods of continuations: requests are packed and not padded, and what they begin with alike is read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightnet_llm.errors import UserError
from lightnet_llm.models import CausalLM, ForwardContext, ModelState
from lightnet_llm.models.decoding import select_rows

from .heldout import default_batch_tokens
from .prefixes import Group, group
from .ranks import Ranks

LOGITS_AT_ONCE = 1 << 19, 1 << 25  # elements, on the CPU (what its caches hold) and on a GPU
BATCH_TOKENS = 2048  # on a CPU: states of short segments take more memory than their tokens
STATE_BYTES = (2 << 30, 16 << 30)  # of states held at once, on the CPU and on a GPU


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


class _Row(NamedTuple):
    """A prediction wanted of a pass: the token that follows activation ``place``, for request ``request``."""

    place: int
    token: int
    request: int


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
    share = min(limit, max(1, -(-total // ranks.size)))  # few requests: a part for every rank
    states = max(8, STATE_BYTES[device.type == "cuda"] // _state_bytes(model))

    def own_part() -> dict[int, tuple[float, bool]]:
        mine: dict[int, tuple[float, bool]] = {}
        for batch in _batches(groups, unique, share, states)[ranks.rank :: ranks.size]:
            if len(batch) == 1 and _size(batch[0], unique) > limit:
                scores = _carried(model, batch[0], unique, limit)
            else:
                scores = _packed(model, batch, unique)
            mine |= scores
            progress(sum(len(wanted[unique[index]]) for index in scores))
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


def _batches(groups: list[Group], unique: list[Request], limit: int, states: int) -> list[list[Group]]:
    """Groups of up to ``limit`` tokens and ``states`` states together, a longer one alone; those that share nothing apart."""
    batches: list[list[Group]] = []
    for kind in ([item for item in groups if item.shared], [item for item in groups if not item.shared]):
        filled, held = limit, 0
        for item in kind:
            size, count = _size(item, unique), len(item.members) + 1 if item.shared else 0
            if filled + size > limit or held + count > states:
                batches.append([])
                filled = held = 0
            batches[-1].append(item)
            filled, held = filled + size, held + count
    return batches


def _state_bytes(model: CausalLM) -> int:
    """Of one row's state."""
    config = model.config
    scan = config.width * config.head_width * (2 if config.lrpe else 1)
    return 4 * (config.layers * scan + (config.width * config.tpe_rank if config.tpe else 0))


def _packed(model: CausalLM, batch: list[Group], unique: list[Request]) -> dict[int, tuple[float, bool]]:
    """A pass over all shared beginnings and one over all the rests, each from its beginning's state; or one over groups
    that share nothing."""
    trunks, rests = _Pass(), _Pass()
    for item in batch:
        begin, trunk = len(trunks.ids), len(trunks.bounds) - 1
        if item.shared:
            trunks.add(unique[item.members[0]].tokens[: item.shared])
        for index in item.members:
            tokens, start = unique[index]
            first = len(rests.ids)
            if len(tokens) - 1 > item.shared:
                rests.add(tokens[item.shared : -1], trunk)
            for place in range(start - 1, len(tokens) - 1):
                inside = place < item.shared
                row = _Row(begin + place if inside else first + place - item.shared, tokens[place + 1], index)
                (trunks if inside else rests).rows.append(row)
    rows: list[_Row] = []
    nats: list[float] = []
    greedy: list[bool] = []
    state = None
    for packed in (trunks, rests):
        if not packed.ids:
            continue
        state = packed.run(model, state, packed is trunks and bool(rests.ids))
        rows += packed.rows
        nats += packed.nats
        greedy += packed.greedy
    return _sums(rows, nats, greedy)


class _Pass:
    """Segments of one forward pass, and what is wanted of it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.bounds, self.parents = [0], []
        self.rows: list[_Row] = []
        self.nats: list[float] = []
        self.greedy: list[bool] = []

    bounds: list[int]
    parents: list[int]

    def add(self, tokens: Sequence[int], parent: int = -1) -> None:
        """A segment, which goes on from state ``parent``."""
        self.ids.extend(tokens)
        self.bounds.append(len(self.ids))
        self.parents.append(parent)

    def run(self, model: CausalLM, before: ModelState | None, return_state: bool) -> ModelState | None:
        """Read the segments and predict; the states after them where asked for."""
        device = next(model.parameters()).device
        if before is not None:
            before = select_rows(before, torch.tensor(self.parents, device=device))
        context = ForwardContext(cu_seqlens=torch.tensor(self.bounds))
        ids = torch.tensor([self.ids], device=device)
        hidden, after = model.hidden(ids, context, before, return_state)
        if self.rows:
            self.nats, self.greedy = _predictions(model, hidden, self.rows)
        return after


def _carried(model: CausalLM, item: Group, unique: list[Request], limit: int) -> dict[int, tuple[float, bool]]:
    """A single request longer than a pass, piece by piece."""
    (index,) = item.members
    tokens, start = unique[index]
    device = next(model.parameters()).device
    ids = torch.tensor([tokens[:-1]], device=device)
    state, total, greedy = None, 0.0, True
    for begin in range(0, len(tokens) - 1, limit):
        hidden, state = model.hidden(ids[:, begin : begin + limit], state=state, return_state=True)
        places = range(max(start - 1, begin), min(begin + limit, len(tokens) - 1))
        rows = [_Row(place - begin, tokens[place + 1], index) for place in places]
        if rows:
            nats, best = _sums(rows, *_predictions(model, hidden, rows))[index]
            total, greedy = total + nats, greedy and best
    return {index: (total, greedy)}


def _predictions(model: CausalLM, hidden: Tensor, rows: list[_Row]) -> tuple[list[float], list[bool]]:
    """Log probability of each row's token, and whether it is the likeliest, from activations [1, N, width].

    Only the wanted places meet the head, each once however many tokens are asked for there.
    """
    places = sorted({row.place for row in rows})
    slot = {place: number for number, place in enumerate(places)}
    token = torch.tensor([row.token for row in rows], device=hidden.device)
    owner = torch.tensor([slot[row.place] for row in rows], device=hidden.device)
    order = owner.argsort(stable=True)
    chosen = hidden[0, torch.tensor(places, device=hidden.device)]
    step = max(1, LOGITS_AT_ONCE[hidden.device.type == "cuda"] // model.config.vocab_size)
    nats, greedy = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.bool)
    for begin in range(0, len(places), step):
        logits = model.logits(chosen[None, begin : begin + step])
        logits = model.layers_set.gather_logits(logits, model.config.vocab_size)[0].float()
        inside = order[(owner[order] >= begin) & (owner[order] < begin + step)]
        row = owner[inside] - begin
        wanted, (top, best) = logits[row, token[inside]], logits.max(-1, keepdim=True)
        mass = logits.sub_(top).exp_().sum(-1).log() + top[:, 0]  # logsumexp, in place
        nats[inside.cpu()] = (wanted - mass[row]).cpu()
        greedy[inside.cpu()] = (best[row, 0] == token[inside]).cpu()
    return nats.tolist(), greedy.tolist()


def _sums(rows: list[_Row], nats: list[float], greedy: list[bool]) -> dict[int, tuple[float, bool]]:
    """By request."""
    parts: dict[int, list[float]] = {}
    best: dict[int, bool] = {}
    for row, value, is_best in zip(rows, nats, greedy, strict=True):
        parts.setdefault(row.request, []).append(value)
        best[row.request] = best.get(row.request, True) and is_best
    return {index: (math.fsum(values), best[index]) for index, values in parts.items()}

"""Log likelihoods of continuations: requests are packed and not padded, and what they begin with alike is read once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_llm.errors import UserError
from lightnet_llm.models import CausalLM
from lightnet_llm.models.decoding import join_rows

from .heldout import default_batch_tokens
from .passes import Pass, Scores, sent
from .prefixes import TOKEN, Group, group
from .ranks import Ranks

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
    texts = _checked(requests, model.config.vocab_size)
    wanted: dict[Request, list[int]] = {}
    found: dict[int, Likelihood] = {}
    for index, request in enumerate(requests):
        if request.start >= len(request.tokens):
            found[index] = Likelihood(0.0, True)
        else:
            wanted.setdefault(request, []).append(index)
    alike = list(wanted.values())
    unique = [_Text(texts[indices[0]], requests[indices[0]].start) for indices in alike]
    groups = group([text.tokens for text in unique], limit)
    total = sum(item.size for item in groups)
    share = min(WINDOW * limit, max(1, -(-total // (PARTS if ranks.size > 1 else 1) // ranks.size)))
    states = max(8, STATE_BYTES[device.type == "cuda"] // _state_bytes(model))

    def own_part() -> dict[int, tuple[float, bool]]:
        mine: dict[int, tuple[float, bool]] = {}
        for window in _windows(groups, share, limit, states)[ranks.rank :: ranks.size]:
            count = sum(len(alike[index]) for item in window for index in item.members)
            report = _Shares(sum(item.size for item in window), count, progress)
            if len(window) == 1 and window[0].size > limit:
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
            answer = Likelihood(nats, greedy)
            for request_index in alike[index]:
                found[request_index] = answer
    return [found[index] for index in range(len(requests))]


class _Text(NamedTuple):
    """A request's tokens as an array, and its start."""

    tokens: NDArray[Any]
    start: int


def _checked(requests: Sequence[Request], vocab_size: int) -> list[NDArray[Any]]:
    """Each request's tokens, as parts of one array."""
    for index, request in enumerate(requests):
        if request.start < 1 or not request.tokens:
            raise UserError(
                f"request {index}: nothing stands before its continuation; put the end-of-document token first"
            )
    ends = list(accumulate(len(request.tokens) for request in requests))
    tokens = np.fromiter(chain.from_iterable(request.tokens for request in requests), np.int64, sum(ends[-1:]))
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        raise UserError(
            f"request {bisect_right(ends, wrong[0])}: token {tokens[wrong[0]]} is not one of the model's {vocab_size}; "
            "it was cut with another model's tokenizer"
        )
    tokens = tokens.astype(TOKEN)
    return [tokens[end - len(request.tokens) : end] for end, request in zip(ends, requests, strict=True)]


def _windows(groups: list[Group], limit: int, longest: int, states: int) -> list[list[Group]]:
    """Groups of up to ``limit`` tokens and ``states`` states together, one longer than a pass, of ``longest``, alone; those
    that share nothing apart."""
    windows: list[list[Group]] = []
    for kind in ([item for item in groups if item.shared], [item for item in groups if not item.shared]):
        filled, held = limit, 0
        for item in kind:
            size, count = item.size, 1 if item.shared else 0
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
    unique: list[_Text],
    limit: int,
    most: int,
    report: Callable[[int], Any],
) -> dict[int, tuple[float, bool]]:
    """Passes over all shared beginnings and then over all the rests, each from its beginning's state; or over requests
    that share nothing. In each kind the longest come first: a pass over segments of nearly one length pads little.

    Args:
        limit, most: tokens of a pass, and states that one over rests begins from.
    """
    scores, states = Scores(), []
    rests: list[tuple[int, int, int]] = []  # request, tokens it shares, row of their state
    beginnings = sorted((item for item in window if item.shared), key=lambda item: -item.shared)
    further = any(len(unique[index].tokens) - 1 > item.shared for item in beginnings for index in item.members)
    packed = Pass()
    for row, item in enumerate(beginnings):
        if packed.size and packed.size + item.shared > limit:
            states.append(packed.run(model, None, further, scores, report))
            packed = Pass()
        begin = packed.size
        packed.add(unique[item.members[0]].tokens[: item.shared])
        for index in item.members:
            tokens, start = unique[index]
            if start <= item.shared:
                packed.want(begin + start - 1, tokens[start : item.shared + 1], index)
            rests.append((index, item.shared, row))
    if packed.size:
        states.append(packed.run(model, None, further, scores, report))
    state = join_rows([each for each in states if each is not None]) if further else None
    states.clear()
    rests += [(index, 0, -1) for item in window if not item.shared for index in item.members]
    packed = Pass()
    for index, shared, row in sorted(rests, key=lambda rest: rest[1] - len(unique[rest[0]].tokens)):
        tokens, start = unique[index]
        size, inside = len(tokens) - 1 - shared, max(start, shared + 1)
        if not size:
            continue
        full = packed.size + size > limit or (state is not None and len(packed.parents) >= most)
        if packed.size and full:
            packed.run(model, state, False, scores, report)
            packed = Pass()
        packed.want(packed.size + inside - 1 - shared, tokens[inside:], index)
        packed.add(tokens[shared:-1], row)
    if packed.size:
        packed.run(model, state, False, scores, report)
    return scores.sums()


def _carried(
    model: CausalLM, item: Group, unique: list[_Text], limit: int, report: Callable[[int], Any]
) -> dict[int, tuple[float, bool]]:
    """A single request longer than a pass, piece by piece."""
    (index,) = item.members
    tokens, start = unique[index]
    ids = sent(tokens[:-1], next(model.parameters()).device)[None]
    state, scores = None, Scores()
    for begin in range(0, len(tokens) - 1, limit):
        hidden, state = model.hidden(ids[:, begin : begin + limit], state=state, return_state=True)
        places = np.arange(max(start - 1, begin), min(begin + limit, len(tokens) - 1))
        if len(places):
            scores.add(model, hidden, places - begin, tokens[places + 1], np.full(len(places), index))
        report(hidden.shape[1])
    return scores.sums()

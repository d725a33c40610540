"""Packed, forked scores against a twin that scores one request at a time with the plain model."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_eval.likelihood import Likelihood, Request, likelihoods
from lightnet_eval.prefixes import MIN_SHARED, computed, group

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.errors import UserError
from lightnet_llm.inference import Loaded
from lightnet_llm.models import CausalLM, initialize


def twin(model: CausalLM, request: Request) -> Likelihood:
    """One request by itself: the whole sequence in one pass, fp64 sums."""
    if request.start >= len(request.tokens):
        return Likelihood(0.0, True)
    with torch.inference_mode():
        logits = model(torch.tensor([request.tokens[:-1]])).logits[0, :, : model.config.vocab_size].double()
    tokens = torch.tensor(request.tokens[1:])
    nats = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens][request.start - 1 :]
    greedy = (logits.argmax(-1) == tokens)[request.start - 1 :]
    return Likelihood(float(nats.sum()), bool(greedy.all()))


def questions(vocabulary: int, seed: int = 0) -> list[Request]:
    """Contexts with choices of many kinds: shared, long, one token, none, repeated, with beginnings of their own."""
    draw = random.Random(seed)

    def text(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, vocabulary) for _ in range(length))

    found = []
    for length, choices in (
        (1, (4, 9)),
        (9, (1, 1)),
        (70, (5, 64, 65)),
        (130, (3, 3, 3, 3)),
        (30, (1, 0)),
        (200, (2,)),
    ):
        context = (1, *text(length))
        found += [Request(context + text(choice), len(context)) for choice in choices]
    beginning = (1, *text(20))  # choices that begin alike, whose shared tokens reach into what counts
    same = text(12)
    found += [Request(beginning + same + text(4), len(beginning)) for _ in range(3)]
    found += [Request((1, *text(11), *end), 12 + 0) for end in [text(6)] * 2]  # the same continuation, other contexts
    found += [Request((1, *text(6)), 1), Request((1,), 1)]
    return [*found, found[0], found[5]]


@pytest.fixture(scope="module")
def requests(loaded: Loaded) -> list[Request]:
    return questions(loaded.config.model.vocab_size)


@pytest.fixture(scope="module")
def truth(loaded: Loaded, requests: list[Request]) -> list[Likelihood]:
    return [twin(loaded.model, request) for request in requests]


def check(found: list[Likelihood], truth: list[Likelihood]) -> None:
    for index, (one, other) in enumerate(zip(found, truth, strict=True)):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4), index
        assert one.greedy == other.greedy, index


@pytest.mark.parametrize("batch_tokens", [1, 16, 100, 333, 5000, None])
def test_scores_are_those_of_one_request_at_a_time(
    loaded: Loaded, requests: list[Request], truth: list[Likelihood], batch_tokens: int | None
) -> None:
    chosen = slice(None) if batch_tokens != 1 else slice(0, 4)  # a token a pass is slow
    check(likelihoods(loaded.model, requests[chosen], batch_tokens), truth[chosen])


@pytest.mark.parametrize(("window", "state_bytes"), [(1, 1 << 30), (3, 1 << 30), (1000, 0)])
def test_windows_and_the_states_they_hold_do_not_matter(
    loaded: Loaded,
    requests: list[Request],
    truth: list[Likelihood],
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    state_bytes: int,
) -> None:
    monkeypatch.setattr("lightnet_eval.likelihood.WINDOW", window)
    monkeypatch.setattr("lightnet_eval.likelihood.STATE_BYTES", (state_bytes, state_bytes))
    told: list[int] = []
    check(likelihoods(loaded.model, requests, 210, progress=told.append), truth)
    scored = sum(request.start < len(request.tokens) for request in requests)
    assert sum(told) == scored and min(told) >= 0 and sum(map(bool, told)) > 3, told


@pytest.mark.parametrize("batch_tokens", [64, 100])
def test_passes_and_states_stay_within_their_bounds(
    loaded: Loaded,
    requests: list[Request],
    truth: list[Likelihood],
    monkeypatch: pytest.MonkeyPatch,
    batch_tokens: int,
) -> None:
    """Tokens of a pass, and states that it begins from, however many passes a window has."""
    monkeypatch.setattr("lightnet_eval.likelihood.STATE_BYTES", (0, 0))  # eight states
    read: list[tuple[int, int]] = []
    hidden = loaded.model.hidden

    def noted(ids: torch.Tensor, context: Any = None, state: Any = None, return_state: bool = False) -> Any:
        rows = 0 if state is None else len(state.layers[0].max)
        read.append((ids.shape[1], rows))
        return hidden(ids, context, state, return_state)

    monkeypatch.setattr(loaded.model, "hidden", noted)
    check(likelihoods(loaded.model, requests, batch_tokens), truth)
    assert max(len(request.tokens) for request in requests) > 2 * batch_tokens
    assert max(tokens for tokens, _ in read) <= batch_tokens
    assert max(rows for _, rows in read) <= 8


@pytest.mark.parametrize("seed", [1, 2])
def test_order_does_not_matter(loaded: Loaded, requests: list[Request], truth: list[Likelihood], seed: int) -> None:
    order = list(range(len(requests)))
    random.Random(seed).shuffle(order)
    check(likelihoods(loaded.model, [requests[i] for i in order], 400), [truth[i] for i in order])


@pytest.mark.parametrize("switch", ["tpe", "lrpe", "decay", "tie_embeddings"])
def test_ablations(switch: str) -> None:
    shape = {"layers": 2, "width": 32, "heads": 2, "glu_width": 40, "vocab_size": 50, "gate_rank": 4, "tpe_rank": 4}
    value = "independent" if switch == "decay" else False
    model = CausalLM(ModelConfig(**shape, initializer_std=0.2, **{switch: value})).eval()
    initialize(model, 0)
    requests = questions(50)
    check(likelihoods(model, requests), [twin(model, request) for request in requests])


def test_greedy_is_told(loaded: Loaded) -> None:
    with torch.inference_mode():
        ids = [1, 300]
        for _ in range(5):
            ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1, :330].argmax()))
    assert likelihoods(loaded.model, [Request(tuple(ids), 2)])[0].greedy
    assert not likelihoods(loaded.model, [Request((*ids[:-1], 2 + (ids[-1] == 2)), 2)])[0].greedy


def test_of_equally_likely_tokens_the_first_counts() -> None:
    """As argmax has it, and lm-eval's own models."""
    shape = {"layers": 1, "width": 32, "heads": 2, "glu_width": 40, "vocab_size": 50, "gate_rank": 4, "tpe_rank": 4}
    model = CausalLM(ModelConfig(**shape, tie_embeddings=False)).eval()
    initialize(model, 0)
    torch.nn.init.zeros_(model.head.weight)
    requests = [Request((1, 7, token), 2) for token in (0, 1, 49)]
    check(likelihoods(model, requests), [twin(model, request) for request in requests])
    assert [item.greedy for item in likelihoods(model, requests)] == [True, False, False]


def test_refusals(loaded: Loaded) -> None:
    for request, message in (
        (Request((1, 330), 1), "token 330 is not one of the model's 330"),
        (Request((), 1), "nothing stands before"),
        (Request((1, 2), 0), "nothing stands before"),
    ):
        with pytest.raises(UserError, match=f"request 1: {message}"):
            likelihoods(loaded.model, [Request((1, 2), 1), request])
    with pytest.raises(UserError, match="batch-tokens -1"):
        likelihoods(loaded.model, [Request((1, 2), 1)], -1)
    broken = CausalLM(loaded.config.model).eval()
    initialize(broken, 0)
    with torch.no_grad():
        broken.embedding.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        likelihoods(broken, [Request((1, 2), 1)])


def test_scores_of_a_window_are_fetched_together(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """To fetch each pass's is to wait for a GPU before the next pass is prepared."""
    events: list[str] = []
    hidden, fetch = loaded.model.hidden, torch.Tensor.cpu
    monkeypatch.setattr(loaded.model, "hidden", lambda *given: (events.append("pass"), hidden(*given))[1])
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (events.append("fetch"), fetch(tensor))[1])
    many = [request for seed in range(5) for request in questions(loaded.config.model.vocab_size, seed)]
    likelihoods(loaded.model, [request for request in many if len(request.tokens) <= 100], 100)
    assert events.count("pass") > 5 and "fetch" in events
    turns = sum(one == "fetch" and other == "pass" for one, other in pairwise(events))
    assert turns <= 1, events  # a window of shared beginnings, and one of requests that share nothing


# Shared beginnings ------------------------------------------------------------------------------------------------


def test_a_context_is_read_once() -> None:
    context, endings = tuple(range(50)), [(60, 61), (60, 62, 63), (70,)]
    found = group([context + ending for ending in endings])
    assert [(sorted(item.members), item.shared) for item in found] == [([0, 1, 2], 50)]
    assert computed(found, [context + ending for ending in endings]) == 50 + 1 + 2


def test_questions_do_not_merge_over_a_few_common_words() -> None:
    one, other = (7,) * 9, (7,) * 9
    sequences = [(*one, 1, *range(40), end, 5) for end in (2, 3)] + [(*other, 9, *range(40), end, 5) for end in (2, 3)]
    found = group(sequences)
    assert sorted(sorted(item.members) for item in found) == [[0, 1], [2, 3]]
    assert {item.shared for item in found} == {50}


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.lists(tokens, max_size=12), st.integers(1, 60), st.randoms(use_true_random=False))
def test_groups_hold_every_sequence_once_and_never_cost_more(
    sequences: list[tuple[int, ...]], longest: int, draw: random.Random
) -> None:
    found = group(sequences, longest)
    assert sorted(index for item in found for index in item.members) == list(range(len(sequences)))
    for item in found:
        first = sequences[item.members[0]]
        assert item.shared == 0 or (item.shared >= MIN_SHARED and len(item.members) > 1)
        for index in item.members:
            assert sequences[index][: item.shared] == first[: item.shared] and len(sequences[index]) > item.shared
        assert len(item.members) == 1 or computed([item], sequences) <= longest
    assert sum(item.size for item in found) == computed(found, sequences)
    assert computed(found, sequences) <= sum(len(sequence) - 1 for sequence in sequences)
    order = list(range(len(sequences)))
    draw.shuffle(order)
    again = group([sequences[index] for index in order], longest)
    key = [sorted(sequences[index] for index in item.members) for item in found]
    assert [sorted(sequences[order[index]] for index in item.members) for item in again] == key

"""From logits to tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightnet_llm.errors import UserError
from lightnet_llm.inference.sampling import Sampling, choose, draw, keep_top_k, keep_top_p

PROBABILITIES = [0.0625, 0.5, 0.125, 0.25, 0.0625]
LOGITS = torch.tensor([PROBABILITIES], dtype=torch.float64).log()


def kept(logits: torch.Tensor) -> set[int]:
    return set(torch.isfinite(logits[0]).nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("p", "tokens"),
    [
        (1e-12, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.74, {1, 3}),
        (0.76, {1, 3, 2}),
        (0.88, {1, 3, 2, 0}),  # of two equal ones the first in the vocabulary
        (0.95, {1, 3, 2, 0, 4}),
        (1.0, {1, 3, 2, 0, 4}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, tokens: set[int]) -> None:
    assert kept(keep_top_p(LOGITS, p)) == tokens


@pytest.mark.parametrize(
    ("k", "tokens"), [(1, {1}), (2, {1, 3}), (3, {1, 3, 2}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})]
)
def test_top_k(k: int, tokens: set[int]) -> None:
    assert kept(keep_top_k(LOGITS, k)) == tokens


@pytest.mark.parametrize(("p", "tokens"), [(0.25, {0}), (0.26, {0, 1}), (0.5, {0, 1}), (0.75, {0, 1, 2})])
def test_top_p_reached_exactly_is_enough(p: float, tokens: set[int]) -> None:
    assert kept(keep_top_p(torch.zeros(1, 4, dtype=torch.float64), p)) == tokens


def test_top_p_after_top_k_renormalises() -> None:
    """Of the two kept by top-k the first holds 2/3 of what is left."""
    assert kept(keep_top_p(keep_top_k(LOGITS, 2), 0.6)) == {1}
    assert kept(keep_top_p(keep_top_k(LOGITS, 2), 0.7)) == {1, 3}


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    tokens = draw(LOGITS.expand(count, -1), Sampling(seed=1).generators(count))
    shares = torch.bincount(tokens, minlength=5) / count
    for share, wanted in zip(shares.tolist(), PROBABILITIES, strict=True):
        assert abs(share - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / count)


@pytest.mark.parametrize("value", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_hit_possible_tokens(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[-math.inf, 0.1, 0.2, -math.inf, 0.3, -math.inf]], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.tensor(value, dtype=torch.float64))
    assert draw(logits, Sampling().generators(1)).item() in (1, 2, 4)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    temperature=st.floats(1e-6, 50),
    top_k=st.one_of(st.none(), st.integers(1, 50)),
    top_p=st.floats(1e-9, 1.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_drawn_token_is_always_an_allowed_one(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    row = torch.tensor([logits])
    token = int(choose(row, sampling, sampling.generators(1)))
    assert 0 <= token < len(logits)
    if top_k is not None:
        assert row[0, token] >= row[0].sort(descending=True).values[min(top_k, len(logits)) - 1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"seed": -1},
        {"seed": 2**63},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=str(next(iter(options))).replace("_", "-")):
        Sampling(**options)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite(bad: float) -> None:
    with pytest.raises(UserError, match="not finite"):
        choose(torch.tensor([[0.0, bad]]), Sampling(), Sampling().generators(1))

"""How packed documents fall on sequence-parallel ranks, against a count by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightnet_llm.config import load_config
from lightnet_llm.errors import UserError
from lightnet_llm.parallel.legality import legal_layout
from lightnet_llm.parallel.segments import SegmentPlan, SequencePlace, plan_segments

Case = tuple[int, int, int, list[int]]


@st.composite
def packings(draw: st.DrawFn) -> Case:
    """Ranks, rows, tokens of a row, boundaries: anywhere, also empty segments and on ranks' edges."""
    ranks, rows = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    tokens = draw(st.integers(1, 17))
    total = rows * tokens
    width = -(-tokens // ranks)
    edges = [min(row * tokens + rank * width, total) for row in range(rows) for rank in range(ranks)]
    inner = draw(st.lists(st.integers(0, total), max_size=8)) + draw(st.lists(st.sampled_from(edges), max_size=3))
    return ranks, rows, tokens, sorted([0, total, *inner, *(row * tokens for row in range(rows))])


def plans_of(case: Case) -> list[SegmentPlan]:
    ranks, rows, tokens, bounds = case
    bounds = torch.tensor(bounds, dtype=torch.int32)
    return [plan_segments(bounds, rows, tokens, SequencePlace(rank, ranks, None)) for rank in range(ranks)]


def owners(case: Case) -> list[list[int]]:
    """The segment of every column of every row, padding included, which is one of its own."""
    ranks, rows, tokens, bounds = case
    width = -(-tokens // ranks)
    found = []
    for row in range(rows):
        flat = range(row * tokens, (row + 1) * tokens)
        inside = [max(i for i, bound in enumerate(bounds) if bound <= token) for token in flat]
        found.append(inside + [-1 - row] * (ranks * width - tokens))
    return found


@given(packings())
def test_plan(case: Case) -> None:
    ranks, rows, tokens, _ = case
    width = -(-tokens // ranks)
    owner = owners(case)
    for rank, plan in enumerate(plans_of(case)):
        expected, first, last = [], [], []
        for row in range(rows):
            mine = owner[row][rank * width : (rank + 1) * width]
            begins = [i for i in range(width) if i == 0 or mine[i] != mine[i - 1]]
            first.append(len(expected))
            expected += [row * width + i for i in begins]
            last.append(len(expected) - 1)
        assert plan.cu_seqlens is not None and plan.cu_seqlens.tolist() == [*expected, rows * width]
        assert plan.first.tolist() == first and plan.last.tolist() == last
        for other in range(ranks):
            for row in range(rows):
                begin, end = other * width, (other + 1) * width
                crosses = begin > 0 and owner[row][begin] == owner[row][begin - 1]
                assert bool(plan.continues[other, row]) == crosses
                assert bool(plan.single[other, row]) == (len(set(owner[row][begin:end])) == 1)


@given(packings(), st.booleans())
def test_travel_reaches_exactly_the_segment(case: Case, backwards: bool) -> None:
    """What arrives is the count of tokens of the same segment on the ranks before (after), with a sum as the merge."""
    ranks, rows, tokens, _ = case
    width = -(-tokens // ranks)
    owner, lines = owners(case), [plan.line(backwards) for plan in plans_of(case)]
    plans = plans_of(case)
    order = sorted(range(ranks), key=lambda rank: lines[rank].position)
    assert order == (list(range(ranks))[::-1] if backwards else list(range(ranks)))
    arriving = torch.zeros(rows, dtype=torch.long)
    for position, rank in enumerate(order):
        for row in range(rows):
            edge = owner[row][rank * width if not backwards else (rank + 1) * width - 1]
            others = owner[row][: rank * width] if not backwards else owner[row][(rank + 1) * width :]
            assert int(arriving[row]) == others.count(edge)
        lengths = plans[rank].cu_seqlens.diff()  # type: ignore[union-attr]
        own, line = lengths[lines[rank].source], lines[rank]
        reached = torch.where(line.single[position], arriving + own, own)
        arriving = torch.where(line.continues[position], reached, 0)
    assert not arriving.any()


@given(packings())
def test_parts_make_the_row(case: Case) -> None:
    ranks, rows, tokens, _ = case
    x = torch.arange(1, rows * tokens + 1).view(rows, tokens)
    places = [SequencePlace(rank, ranks, None) for rank in range(ranks)]
    whole = torch.cat([place.part(x, fill=-1) for place in places], 1)
    assert torch.equal(whole[:, :tokens], x) and bool((whole[:, tokens:] == -1).all())
    assert whole.shape[1] % ranks == 0 and whole.shape[1] - tokens == places[0].padding(tokens) < ranks
    # A mean over each rank's columns, averaged, and weighted: the mean over the tokens.
    counted = torch.where(whole > 0, whole, 0).double()
    parts = [counted[:, i * places[0].width(tokens) :][:, : places[0].width(tokens)].mean() for i in range(ranks)]
    assert float(torch.stack(parts).mean() * places[0].loss_weight(tokens)) == pytest.approx(float(x.double().mean()))


@pytest.mark.parametrize(
    ("size", "exchange", "gathers"),
    [(2, "auto", True), (9, "auto", False), (9, "all_gather", True), (2, "prefix", False)],
)
def test_exchange_is_chosen_by_size(size: int, exchange: str, gathers: bool) -> None:
    assert SequencePlace(0, size, None, exchange).gathers == gathers  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sequence_length=7", "parallel.sequence=8"], "parallel.sequence 8 is more than data.sequence_length 7"),
        (["model.causal=false", "model.axes=2", "parallel.sequence=2"], "shares one axis of tokens, model.axes is 2"),
        (["parallel.sequence_exchange=ring"], "parallel.sequence_exchange"),
    ],
)
def test_refusals(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        legal_layout(load_config("lm/pile_150m", overrides), 8)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_any_length_is_taken() -> None:
    assert load_config("lm/pile_150m", ["data.sequence_length=2049", "parallel.sequence=8"]).parallel.sequence == 8

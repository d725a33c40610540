"""How packed documents fall on sequence-parallel ranks, against a count by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightnet_llm.parallel.sequence import SequencePlace, plan_segments


@st.composite
def packings(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    ranks, rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    tokens = ranks * width
    total = rows * tokens
    inner = draw(st.lists(st.integers(0, total), max_size=8))
    bounds = sorted({0, total, *inner, *(row * tokens for row in range(rows))})
    return ranks, rows, tokens, bounds


@given(packings())
def test_plan(case: tuple[int, int, int, list[int]]) -> None:
    ranks, rows, tokens, bounds = case
    width = tokens // ranks
    for rank in range(ranks):
        plan = plan_segments(torch.tensor(bounds, dtype=torch.int32), rows, tokens, SequencePlace(rank, ranks, None))
        expected, first, last = [], [], []
        for row in range(rows):
            start = row * tokens + rank * width
            inside = [start, *(b for b in bounds if start < b < start + width)]
            first.append(len(expected))
            expected += [row * width + b - start for b in inside]
            last.append(len(expected) - 1)
        assert plan.cu_seqlens.tolist() == [*expected, rows * width]
        assert plan.first.tolist() == first and plan.last.tolist() == last
        for other in range(ranks):
            for row in range(rows):
                start = row * tokens + other * width
                inside = [b for b in bounds if start < b < start + width]
                assert bool(plan.continues[other, row]) == (start not in bounds)
                assert bool(plan.single[other, row]) == (not inside)
                assert int(plan.tail[other, row]) == start + width - (inside[-1] if inside else start)

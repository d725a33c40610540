"""How the Triton scan cuts tokens: every block, span and piece in its place, and as many pieces as fill a card."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_kernels import triton_scan, triton_tables
from lightnet_kernels.triton_shape import Shape

CPU = torch.device("cpu")
BLOCK = 64


def covered(rows):
    """Tokens (batch row, place) of a table of blocks, spans or pieces, in its order."""
    return [(row[0], token) for row in rows.tolist() for token in range(row[1], row[1] + row[2])]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    packed=st.booleans(),
    chains=st.integers(1, 64),
    count=st.sampled_from(triton_tables.PIECES),
)
def test_every_token_once(lengths, packed, chains, count):
    """Spans are whole pieces, pieces whole blocks; a span knows its first and its last piece."""
    bounds = (0, *itertools.accumulate(lengths)) if packed else None
    batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tables, "pieces_of", lambda *_: count)
        triton_tables.tables.cache_clear()
        found = triton_tables.tables(batch, tokens, bounds, BLOCK, chains, 1, CPU)
    triton_tables.tables.cache_clear()
    every = [(row, token) for row in range(batch) for token in range(tokens)]
    assert covered(found.blocks) == covered(found.spans) == covered(found.pieces) == every
    sequences = len(lengths) if packed else batch
    assert found.piece_ranges[:, 1].sum() == len(found.pieces) and len(found.piece_ranges) == sequences
    spans = found.spans.tolist()
    last, once = [row for row in spans if row[6]], [row for row in spans if not row[4]]
    ranges = [row for row in found.piece_ranges.tolist() if row[1]]
    assert [row[0] + row[2] - 1 for row in ranges] == [row[7] for row in last]
    assert [row[0] + row[1] - row[3] for row in ranges] == [row[8] for row in once]
    assert found.chained == any(row[4] for row in spans)
    for row in spans:
        _, first, length, block, place, sequence, last, one, end = row
        inside = found.pieces[one : end + 1].tolist()
        assert [x[1] for x in inside] == [first + i * found.piece * BLOCK for i in range(len(inside))]
        assert sum(x[2] for x in inside) == length
        assert [x[3] for x in inside] == [block + i * found.piece for i in range(len(inside))]
        assert all(x[4:7] == [place, sequence, last] for x in inside)
        assert place % triton_tables.WINDOW == 0 and len(inside) <= count
        assert found.blocks[block].tolist()[1:] == [first, min(BLOCK, length), place]


@pytest.mark.parametrize(
    ("batch", "tokens", "spans", "pieces"),
    [
        (256, 2048, 256, 256),
        (4, 131072, 4, 4),
        (2, 262144, 4, 16),
        (1, 524288, 4, 32),
        (1, 131072, 4, 8),
        (1, 16384, 4, 8),
        (1, 1, 1, 1),
    ],
)
def test_sixteen_heads(batch, tokens, spans, pieces):
    """Chains fill a card once; what is summed of them fills it again, in pieces."""
    found = triton_tables.tables(batch, tokens, None, BLOCK, 4 * 16, 2 * 16, CPU)
    assert (len(found.spans), len(found.pieces)) == (spans, pieces)


@pytest.mark.parametrize(
    ("batch", "tokens", "spans", "pieces", "asked"),
    [
        (256, 2048, 256, 256, 256),
        (4, 131072, 4, 4, 8),
        (2, 262144, 4, 64, 8),
        (1, 524288, 4, 64, 8),
        (1, 131072, 4, 32, 8),
        (1, 16384, 4, 16, 8),
    ],
)
def test_sixteen_heads_by_cuda(batch, tokens, spans, pieces, asked):
    """Forward a multiprocessor has one chain, and pieces are small; backward two, and spans are whole."""
    found = triton_tables.tables(batch, tokens, None, BLOCK, 4 * 16, 2 * 16, CPU, cuda=True)
    assert (len(found.spans), len(found.pieces)) == (spans, pieces)
    found = triton_tables.tables(batch, tokens, None, BLOCK, 2 * 16, 0, CPU, cuda=True)
    assert len(found.spans) == len(found.pieces) == asked


@pytest.mark.parametrize(
    ("batch", "tokens", "bounds", "options", "spans"),
    [
        (8, 2048, None, {}, 8),
        (8, 2048, None, {"forward": True}, 8),
        (8, 2048, None, {"shared": True}, 16),  # ranks sum every span
        (4, 2048, None, {}, 4),
        (3, 2048, None, {}, 12),  # 48 chains: too few
        (4, 4096, None, {}, 16),
        (1, 8192, tuple(range(0, 8193, 2048)), {}, 4),
        (1, 4096, (0, 2048, *range(2058, 4097, 10)), {}, 2 + 204),  # one of them is nearly all that there is
        (1, 2078, (0, 2048, 2078, 2078, 2078), {}, 5),  # segments of no token are none
        (1, 0, (0,), {}, 0),
        (0, 2048, None, {}, 0),
    ],
)
def test_short_sequences_are_whole(batch, tokens, bounds, options, spans):
    """Where CUDA kernels scan them and there are enough: 16 chains a sequence here."""
    query = torch.empty(batch, tokens, 8, 128, device="meta")
    shape = Shape(8, 128, 128, double=True, silu=False, wide=False, cuda=True)
    assert len(triton_scan.tables_of(query, shape, bounds, **options).spans) == spans

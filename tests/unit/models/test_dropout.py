"""Counter-based dropout: the mask depends on (seed, step, place, sample, token, channel) alone."""

import pytest
import torch

from lightnet_llm.models.dropout import DropoutKey, dropout

SHAPE = torch.Size((1, 4 * 32, 64))


def key(**changes: object) -> DropoutKey:
    fields = {"seed": 1, "step": 2, "sample_ids": torch.tensor([5, 2**33 + 6, 7, 900]), "tokens": 32}
    return DropoutKey(**{**fields, **changes})  # type: ignore[arg-type]


def test_rate_and_scale() -> None:
    for probability in (0.1, 0.5, 0.9):
        x = torch.ones(1, 4 * 512, 64)
        y = dropout(x, probability, key(tokens=512), 3)
        kept = (y != 0).float()
        assert abs(kept.mean() - (1 - probability)) < 0.01
        assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - probability)))
        assert (kept.mean((0, 1)) - (1 - probability)).abs().max() < 0.06  # no channel ...
        assert (kept.mean((0, 2)) - (1 - probability)).abs().max() < 0.35  # ... and no token is special


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"step": 3}, {"seed": 1 + 2**32}, {"sample_ids": torch.tensor([1, 3, 8, 9])}]
)
def test_everything_changes_it(other: dict[str, object]) -> None:
    same = (key().mask(0, SHAPE, 0.5) == key(**other).mask(0, SHAPE, 0.5)).float().mean()
    assert 0.45 < same < 0.55


def test_places_tokens_and_channels_are_independent() -> None:
    mask = key().mask(0, SHAPE, 0.5)
    assert 0.45 < (mask == key().mask(1, SHAPE, 0.5)).float().mean() < 0.55
    assert 0.45 < (mask[:, 1:] == mask[:, :-1]).float().mean() < 0.55
    assert 0.45 < (mask[..., 1:] == mask[..., :-1]).float().mean() < 0.55


def test_layouts_draw_the_same_mask() -> None:
    whole = key().mask(0, SHAPE, 0.3)
    ids = key().sample_ids
    halves = [key(sample_ids=ids[:2]), key(sample_ids=ids[2:])]
    rows = torch.cat([k.mask(0, torch.Size((1, 64, 64)), 0.3) for k in halves], 1)
    assert torch.equal(rows, whole)
    unflattened = key().mask(0, torch.Size((4, 32, 64)), 0.3)
    assert torch.equal(unflattened.view(SHAPE), whole)
    channels = torch.cat([key().mask(0, torch.Size((1, 128, 16)), 0.3, 16 * i) for i in range(4)], -1)
    assert torch.equal(channels, whole)
    pieces = [key(tokens=8, offset=8 * i).mask(0, torch.Size((4, 8, 64)), 0.3) for i in range(4)]
    assert torch.equal(torch.cat(pieces, 1), unflattened)


def test_evaluation_and_zero_probability_do_nothing() -> None:
    x = torch.randn(1, 128, 64)
    assert dropout(x, 0.5, None, 0) is x
    assert dropout(x, 0.0, key(), 0) is x


def test_frozen_values() -> None:
    """A changed hash would silently change every resumed run."""
    mask = DropoutKey(1234, 10, torch.tensor([7]), 2).mask(3, torch.Size((1, 2, 16)), 0.5)
    text = ["".join("1" if bit else "0" for bit in row) for row in mask[0].tolist()]
    assert text == FROZEN


FROZEN = ["0011101100111000", "0001011000100001"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_the_tokens_have_their_part_of_the_mask(ranks: int) -> None:
    whole = key(offset=96).mask(3, SHAPE, 0.5)
    part = torch.Size((1, SHAPE[1] // ranks, SHAPE[2]))
    parts = [key(offset=96, shard=(rank, ranks)).mask(3, part, 0.5) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts, 1), whole)

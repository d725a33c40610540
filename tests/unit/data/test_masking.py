"""Masks of the masked language model."""

import pickle
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import philox
from lightnet_data.errors import DataError
from lightnet_data.masking import IGNORED, MaskedTokens, Masking
from torch.utils.data import DataLoader

RULE = Masking(vocab_size=50, mask_id=50, special_ids=(0, 3), seed=9)


def written_out(rule: Masking, tokens: list[int], position: int) -> tuple[list[int], list[int]]:
    """The rule once more, token by token."""
    raw = np.random.Philox(key=np.array([rule.seed, 0x6D61736B], dtype=np.uint64), counter=[0, position, 0, 0])
    words = [int(word) for word in raw.random_raw(3 * len(tokens))]
    special = {*rule.special_ids, rule.mask_id}
    ordinary = [token for token in range(rule.vocab_size) if token not in special]
    free = [place for place, token in enumerate(tokens) if token in ordinary]
    hidden = sorted(free, key=lambda place: (words[place], place))[: int(rule.share * len(free) + 0.5)]
    inputs, labels = list(tokens), [IGNORED] * len(tokens)
    for place in hidden:
        labels[place] = tokens[place]
        chance = (words[len(tokens) + place] >> 11) / 2**53
        if chance < rule.masked:
            inputs[place] = rule.mask_id
        elif chance < rule.masked + rule.drawn:
            inputs[place] = ordinary[words[2 * len(tokens) + place] % len(ordinary)]
    return inputs, labels


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 50), max_size=40),
    position=st.sampled_from([0, 1, 2**31, 2**40 + 7]),
    share=st.sampled_from([0.01, 0.15, 0.25, 1.0]),
    shares=st.sampled_from([(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]),
)
def test_equals_the_rule_written_out(
    tokens: list[int], position: int, share: float, shares: tuple[float, float]
) -> None:
    rule = Masking(50, 50, (0, 3), share, *shares, seed=4)
    given_ids = np.array(tokens, dtype=np.int64)
    inputs, labels = rule(given_ids, position)
    assert (inputs.tolist(), labels.tolist()) == written_out(rule, tokens, position)
    assert given_ids.tolist() == tokens, "the stored tokens stay as they are"
    asked = labels != IGNORED
    assert not np.isin(labels[asked], [0, 3, 50]).any()
    assert (inputs[~asked] == given_ids[~asked]).all()


def test_shares_over_many_samples() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, (400, 128))
    found = [RULE(row, place) for place, row in enumerate(tokens)]
    inputs, labels = (np.stack(part) for part in zip(*found, strict=True))
    asked = labels != IGNORED
    free = ~np.isin(tokens, [0, 3])
    assert abs(asked.sum() / free.sum() - 0.25) < 0.002
    masked, kept = (inputs == 50)[asked].mean(), (inputs == tokens)[asked].mean()
    assert abs(masked - 0.8) < 0.01 and abs(kept - (0.1 + 0.1 / 48)) < 0.01
    assert not np.isin(inputs[asked], [0, 3]).any(), "a special token is never drawn"
    assert len(set(inputs[asked & (inputs != 50)].tolist())) == 48, "every other one is"


def test_a_sample_of_special_tokens_asks_for_nothing() -> None:
    inputs, labels = RULE(np.array([0, 3, 3, 0]), 5)
    assert inputs.tolist() == [0, 3, 3, 0] and (labels == IGNORED).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"share": 0.0}, "share 0.0"),
        ({"masked": 0.9, "drawn": 0.2}, "masked 0.9 and drawn 0.2"),
        ({"vocab_size": 2, "special_ids": (0, 1)}, "all 2 tokens are special"),
    ],
)
def test_rules_that_make_no_sense(fields: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Masking(**{"vocab_size": 9, "mask_id": 9, **fields})  # type: ignore[arg-type]


def test_a_data_set_is_masked_by_position_alone() -> None:
    class Windows:
        samples_per_epoch = 7

        def __len__(self) -> int:
            return 7

        def __getitem__(self, position: int) -> dict[str, object]:
            return {"input_ids": np.arange(4, 24), "labels": np.arange(5, 25), "sample_id": position}

    class Together(Windows):
        """Samples that lie elsewhere are fetched at once."""

        asked: ClassVar[list[list[int]]] = []

        def __getitems__(self, positions: list[int]) -> list[dict[str, object]]:
            self.asked.append(positions)
            return [self[position] for position in positions]

    masked = MaskedTokens(Windows(), RULE)
    assert len(masked) == 7 and masked.samples_per_epoch == 7
    first, later = masked[2], masked[2 + 7]
    assert (first["input_ids"] != later["input_ids"]).any(), "another epoch hides other tokens"
    assert (first["input_ids"] == pickle.loads(pickle.dumps(RULE))(np.arange(4, 24), 2)[0]).all()
    for samples in (Windows(), Together()):
        (rows,) = DataLoader(MaskedTokens(samples, RULE), batch_sampler=[[2, 9]], collate_fn=list)
        for row, at in zip(rows, (2, 9), strict=True):
            assert row["sample_id"] == at
            assert all((row[key] == masked[at][key]).all() for key in ("input_ids", "labels"))
    assert Together.asked == [[2, 9]]


def test_streams_stay_apart() -> None:
    """No word of a stream is in another of the same seed, and the words are those of Philox as published."""
    zero = [
        int(word) for word in philox.stream((0, 0), (2**64 - 1,) * 4).random_raw(4)
    ]  # numpy counts up before the first
    assert zero == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]  # Random123's kat_vectors
    seen: set[int] = set()
    for key in ((1, 0), (1, 1), (-1, 0)):
        for counter in ((0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
            seen.update(int(word) for word in philox.stream(key, counter).random_raw(50))
    assert len(seen) == 3 * 4 * 50
    assert philox.uniform(np.array([0, 2**64 - 1], np.uint64)).tolist() == [0.0, 1 - 2.0**-53]

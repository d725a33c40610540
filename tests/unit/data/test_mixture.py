"""Mixing: shares that are kept to, stages without repeats or losses, random access equal to a walk."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data.dataset import PackedTokens
from lightnet_data.errors import DataError
from lightnet_data.mixture import Mixture, Schedule, Stage, spread

from .conftest import write_shards

NAMES = ["a", "b", "c", "d", "e"]
Walk = list[tuple[int, int]]


def walk(names: list[str], stages: list[Stage], samples: int) -> Walk:
    """The twin: from the first sample on, one at a time, each source with a counter of its own.

    Block by block, the number of samples of a source brings it to the floor of its cumulative share; within a block the
    sample goes to the source that must have it first, of those whose next share has begun.
    """
    counters, found = dict.fromkeys(names, 0), []
    for stage, end in zip(stages, [*(stage.start for stage in stages[1:]), samples], strict=True):
        weights = {name: Fraction(str(stage.weights.get(name, 0))) for name in names}
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()}
        block = 1000
        while any(0 < share * block < 1 for share in shares.values()):
            block += 1000
        length = end - stage.start
        given_in_stage = dict.fromkeys(names, 0)
        for first, after in pairwise(range(0, length + block, block)):
            cumulative, counts = Fraction(0), {}
            for name in names:
                upper = (cumulative + shares[name]) * after // 1 - cumulative * after // 1
                counts[name] = upper - given_in_stage[name]
                cumulative += shares[name]
            assert min(counts.values()) >= 0 and sum(counts.values()) == after - first
            done = dict.fromkeys(names, 0)
            for place in range(min(after, length) - first):
                rates = {name: Fraction(counts[name], after - first) for name in names if counts[name]}
                ready = [name for name in rates if done[name] < rates[name] * (place + 1)]
                due = {name: -(-(done[name] + 1) // rates[name]) for name in ready}
                name = min(ready, key=lambda name: (due[name], names.index(name)))
                done[name] += 1
                found.append((names.index(name), counters[name]))
                counters[name] += 1
            for name in names:
                given_in_stage[name] += counts[name]
    return found


def whole_thousandths() -> st.SearchStrategy[dict[str, float]]:
    weight = st.one_of(st.just(0.0), st.integers(1, 1000).map(lambda n: n / 1000), st.floats(0.01, 5.0))
    return st.dictionaries(st.sampled_from(NAMES), weight, min_size=1).filter(
        lambda weights: (
            sum(weights.values()) > 0
            and all(weight == 0 or weight / sum(weights.values()) >= 0.001 for weight in weights.values())
        )
    )


@given(whole_thousandths())
@settings(max_examples=80, deadline=None)
def test_within_one_sample_at_every_thousand(weights: dict[str, float]) -> None:
    schedule, total = Schedule(NAMES, [Stage(0, weights)]), sum(Fraction(str(weight)) for weight in weights.values())
    for position in [*range(0, 20_000, 1000), 10**6, 123_456_000, 10**9, 10**12]:
        found = schedule.given(position)
        assert sum(found.values()) == position
        for name in NAMES:
            share = Fraction(str(weights.get(name, 0))) / total
            assert abs(found[name] - share * position) < 1
            assert found[name] == 0 if not share else True


@given(whole_thousandths(), st.integers(0, 10**10))
@settings(max_examples=40, deadline=None)
def test_never_far_from_the_weights(weights: dict[str, float], position: int) -> None:
    """Between the thousands too: less than two samples, whatever the position."""
    schedule, total = Schedule(NAMES, [Stage(0, weights)]), sum(Fraction(str(weight)) for weight in weights.values())
    for name, count in schedule.given(position).items():
        assert abs(count - Fraction(str(weights.get(name, 0))) / total * position) < 2


@given(st.lists(whole_thousandths(), min_size=1, max_size=3), st.lists(st.integers(1, 4500), min_size=2, max_size=2))
@settings(max_examples=25, deadline=None)
def test_equals_its_twin_over_stages(weights: list[dict[str, float]], lengths: list[int]) -> None:
    """Source and place of every sample; and so no sample of a source is repeated or left out at a change of weights."""
    starts = np.cumsum([0, *lengths])[: len(weights)].tolist()
    stages = [Stage(start, given) for start, given in zip(starts, weights, strict=True)]
    samples = starts[-1] + 2500
    expected, schedule = walk(NAMES, stages, samples), Schedule(NAMES, stages)
    assert [schedule[position] for position in range(samples)] == expected
    for source in range(len(NAMES)):
        own = [place for index, place in expected if index == source]
        assert own == list(range(len(own)))
    for position in {0, *starts, samples // 2, samples}:
        counts = Counter(source for source, _ in expected[:position])
        assert schedule.given(position) == {name: counts[index] for index, name in enumerate(NAMES)}
    backwards = Schedule(NAMES, stages)
    assert [backwards[position] for position in range(samples - 1, -1, -97)] == expected[::-97]


def test_each_stage_keeps_to_its_weights() -> None:
    """At every thousand of a stage within a sample, as far as its last one: where it ends changes nothing before."""
    few = {"a": 0.001, "b": 0.2, "c": 0.001, "d": 0.2}
    stages = [
        Stage(0, few),
        Stage(3_777, {"a": 0.999, "b": 0.001}),
        Stage(7_531, {"b": 1.0}),
        Stage(8_000, {"a": 0.3, "c": 0.7}),
        Stage(9_999, few),
    ]
    schedule = Schedule(NAMES, stages)
    for stage, end in zip(stages, [3_777, 7_531, 8_000, 9_999, 40_000], strict=True):
        total, before = sum(Fraction(str(weight)) for weight in stage.weights.values()), schedule.given(stage.start)
        for count in [*range(1000, end - stage.start + 1, 1000), end - stage.start]:
            after = schedule.given(stage.start + count)
            for name in NAMES:
                share = Fraction(str(stage.weights.get(name, 0))) / total
                off = abs(after[name] - before[name] - share * count)
                assert off < (1 if count % 1000 == 0 else 2), (stage, count, name)
    assert schedule.given(8_000)["b"] - schedule.given(7_531)["b"] == 469
    assert schedule.given(10**9)["e"] == 0


def test_small_shares_and_a_start_far_in() -> None:
    schedule = Schedule(["a", "b"], [Stage(0, {"a": 1.0, "b": 0.00002})])
    share = Fraction("0.00002") / Fraction("1.00002")
    for position in (0, 10**6, 10**9, 10**15):
        assert abs(schedule.given(position)["b"] - share * position) < 2
    source, place = schedule[10**12 + 7]
    assert place == schedule.given(10**12 + 7)["ab"[source]]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any))
@settings(max_examples=100, deadline=None)
def test_spread_is_even(counts: list[int]) -> None:
    order, length = spread(tuple(counts)), sum(counts)
    for source, count in enumerate(counts):
        before = np.cumsum(order == source)
        assert (order == source).sum() == count
        assert all(abs(int(n) * length - count * (place + 1)) < length for place, n in enumerate(before))


FROZEN = [0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 1, 0]


def test_schedule_is_frozen() -> None:
    """Written down: a change that gives positions to other sources must fail here, and raise ORDER_VERSION."""
    schedule = Schedule(["a", "b", "c"], [Stage(0, {"a": 0.65, "b": 0.25, "c": 0.1})])
    assert [schedule[position][0] for position in range(12)] == FROZEN
    assert schedule[123_456_789] == (0, 80_246_913)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Stage(0, {"x": 1})], "weight to 'x'; its sources are a, b, c, d, e"),
        ([Stage(0, {"a": -0.1, "b": 1})], "weight of 'a' in the mixture is -0.1"),
        ([Stage(0, {"a": float("nan")})], "weight of 'a' in the mixture is nan"),
        ([Stage(0, {"a": float("inf")})], "weight of 'a' in the mixture is inf"),
        ([Stage(0, {"a": 0, "b": 0})], "all weights of the mixture are 0"),
        ([Stage(0, {"a": 1, "b": 1e-6})], "weight of 'b' is a share of 1e-06"),
        ([], "from the first sample on"),
        ([Stage(3, {"a": 1})], "from the first sample on"),
        ([Stage(0, {"a": 1}), Stage(9, {"a": 1}), Stage(9, {"b": 1})], "begin at samples 9 and 9"),
    ],
)
def test_refusals(stages: list[Stage], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Schedule(NAMES, stages)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PackedTokens]:
    """Three sources whose tokens tell them apart."""
    folder = tmp_path_factory.mktemp("mixture")
    found = {}
    for number, name in enumerate(("web", "books", "code")):
        documents = [[100 * (number + 1) + length % 100] * length for length in range(3, 40 + 20 * number)]
        found[name] = PackedTokens(write_shards(folder / name, documents), 16, seed=4)
    return found


def test_mixture_gives_each_source_its_own_samples_in_its_own_order(sources: dict[str, PackedTokens]) -> None:
    weights = {"web": 0.5, "books": 0.3, "code": 0.2}
    mixed, schedule = Mixture(sources, [Stage(0, weights)]), Schedule(sorted(weights), [Stage(0, weights)])
    counters: Counter[str] = Counter()
    samples = mixed.__getitems__(range(300))
    for position, sample in enumerate(samples):
        name = sorted(weights)[schedule[position][0]]
        expected = sources[name][counters[name]]
        counters[name] += 1
        assert sample["sample_id"] == position
        for key in ("input_ids", "labels", "segment_starts"):
            assert (sample[key] == expected[key]).all() and (mixed[position][key] == expected[key]).all()
    assert counters == {"web": 150, "books": 90, "code": 60}
    reordered = Mixture(dict(reversed(sources.items())), [Stage(0, weights)])
    assert (reordered[77]["input_ids"] == mixed[77]["input_ids"]).all()
    with pytest.raises(IndexError):
        mixed[-1]


def test_a_mixture_of_one_source_is_that_source(sources: dict[str, PackedTokens], tmp_path: Path) -> None:
    mixed = Mixture({"web": sources["web"]}, [Stage(0, {"web": 0.3}), Stage(50, {"web": 7})])
    for position in (*range(120), 10**6):
        assert (mixed[position]["labels"] == sources["web"][position]["labels"]).all()

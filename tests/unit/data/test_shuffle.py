"""The permutation of an epoch: exact, of any size, frozen, and favouring no place."""

import math
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data.shuffle import Permutation


def reference(count: int, seed: int, epoch: int) -> np.ndarray:
    """The twin: the network as tables over its whole domain, then every cycle followed into ``range(count)``."""
    a = math.isqrt(max(count - 1, 0)) + 1
    b = -(-count // a)
    left, right = np.divmod(np.arange(a * b), b)
    seed, epoch = seed % 2**64, epoch % 2**64
    for step in range(8):
        size, other = (b, a) if step % 2 == 0 else (a, b)
        words = [xxhash.xxh3_64_intdigest(struct.pack("<QQQ", epoch, step, value), seed) for value in range(size)]
        table = np.array([word % other for word in words])
        if step % 2 == 0:
            left = (left + table[right]) % a
        else:
            right = (right + table[left]) % b
    image = left * b + right
    assert sorted(image) == list(range(a * b))
    values = image[:count]
    while (values >= count).any():
        values = np.where(values >= count, image[values], values)
    return values


@given(st.integers(1, 3000), st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_equals_its_twin_and_is_a_bijection(count: int, seed: int, epoch: int) -> None:
    permutation = Permutation(count, seed, epoch)
    values = [permutation(index) for index in range(count)]
    assert sorted(values) == list(range(count))
    assert values == reference(count, seed, epoch).tolist()
    for index in (-1, count):
        with pytest.raises(IndexError):
            permutation(index)


@given(st.integers(2**31, 2**62), st.integers(0, 2**63), st.data())
@settings(max_examples=50, deadline=None)
def test_large_counts(count: int, seed: int, data: st.DataObject) -> None:
    """Injective on a sample of places, and within range."""
    permutation = Permutation(count, seed, 3)
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=50, unique=True))
    values = [permutation(place) for place in places]
    assert len(set(values)) == len(values) and all(0 <= value < count for value in values)


FROZEN = {
    (8, 0, 0): [0, 6, 2, 4, 5, 7, 3, 1],
    (8, 0, 1): [1, 7, 2, 0, 6, 5, 3, 4],
    (1000, 1234, 7): [563, 707, 388, 556, 48, 952, 925, 275],
    (50_000_000_000, 5, 0): [48221232764, 136303267, 34992942994, 39241386391, 17452457543, 30471705670],
}


def test_is_frozen() -> None:
    """Written down: a change of xxhash or of this code that moves samples must fail here."""
    for (count, seed, epoch), values in FROZEN.items():
        assert [Permutation(count, seed, epoch)(index) for index in range(len(values))] == values
    left, right = Permutation(8, -1, 0), Permutation(8, 2**64 - 1, 0)
    assert [left(index) for index in range(8)] == [right(index) for index in range(8)]


def test_favours_no_place() -> None:
    """Over many seeds every (place, value) is as likely, and so is every pair of neighbours."""
    count, draws = 10, 6000
    cells, pairs = np.zeros((count, count)), np.zeros((count, count))
    for seed in range(draws):
        values = [Permutation(count, seed, 0)(index) for index in range(count)]
        cells[np.arange(count), values] += 1
        pairs[values[:-1], values[1:]] += 1
    # Chi-square of 81 degrees of freedom: above 137 once in 10,000.
    assert ((cells - draws / count) ** 2 / (draws / count)).sum() < 137
    off_diagonal = pairs[~np.eye(count, dtype=bool)]
    assert ((off_diagonal - draws / count) ** 2 / (draws / count)).sum() < 150


def test_a_large_epoch_is_spread_evenly() -> None:
    """Windows that lie side by side are read far apart: serial correlation of a million-sample epoch's beginning."""
    permutation = Permutation(1_000_000, 1, 0)
    values = np.array([permutation(index) for index in range(4000)]) / 1_000_000
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06  # 4 / sqrt(4000)
    histogram = np.histogram(values, 20, (0, 1))[0]
    assert ((histogram - 200) ** 2 / 200).sum() < 50  # 19 degrees: above 50 once in 10,000

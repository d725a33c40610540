"""Which token sequences share their beginnings, so that these are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TOKEN = np.dtype(">u4")  # bytes of such tokens sort as the tokens do
MIN_SHARED = 8  # tokens; handing a state on costs about as much as a few tokens


class Group(NamedTuple):
    """Sequences that begin alike.

    Attributes:
        members: indices of the sequences.
        shared: how many tokens all of them begin with; 0 where nothing is gained by it.
        size: tokens that the model reads for them.
    """

    members: list[int]
    shared: int
    size: int


def group(sequences: Sequence[Sequence[int] | NDArray[Any]], longest: int | None = None) -> list[Group]:
    """Cut sequences into groups such that few tokens are computed: each group's shared ones and each member's others.

    Sorted, sequences that share most lie side by side; neighbours are joined from the longest shared beginning to the
    shortest, where that saves tokens.

    Args:
        sequences: of tokens, 0 to 2^32 - 1. The last token of a sequence is predicted and never read, so it is not shared.
        longest: tokens of a group at most (those of one sequence apart), so that it fits a forward pass.

    Returns:
        The groups; the longest ones first, and in an order that does not depend on that of the sequences.
    """
    rows = [np.asarray(sequence, TOKEN) for sequence in sequences]
    keys = [row.tobytes() for row in rows]  # in the order of their sequences, and faster to compare
    order = sorted(range(len(rows)), key=keys.__getitem__)
    del keys
    edges = [(_common(rows[one], rows[other]), place) for place, (one, other) in enumerate(pairwise(order), 1)]
    groups = {place: Group([index], 0, len(rows[index]) - 1) for place, index in enumerate(order)}
    owner = list(range(len(order)))  # first place of each place's group; groups are runs of places

    def find(place: int) -> int:
        while owner[place] != place:
            owner[place] = owner[owner[place]]
            place = owner[place]
        return place

    for shared, place in sorted(
        (edge for edge in edges if edge[0] >= MIN_SHARED), key=lambda edge: (-edge[0], edge[1])
    ):
        left, right = find(place - 1), find(place)
        one, other = groups[left], groups[right]
        saved = one.shared * (len(one.members) - 1) + other.shared * (len(other.members) - 1)
        gained = shared * (len(one.members) + len(other.members) - 1)
        size = one.size + other.size + saved - gained
        if gained <= saved or (longest is not None and size > longest):
            continue
        groups[left] = Group(one.members + other.members, shared, size)
        del groups[right]
        owner[right] = left
    return [groups[place] for place in sorted(groups, key=lambda place: (-groups[place].size, place))]


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Tokens with which both begin, the last ones left out."""
    limit = max(min(len(one), len(other)) - 1, 0)
    unlike = one[:limit] != other[:limit]
    place = int(unlike.argmax()) if limit else 0
    return place if limit and unlike[place] else limit


def computed(groups: Sequence[Group], sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that the model reads for them, counted anew."""
    total = 0
    for found in groups:
        total += found.shared + sum(len(sequences[index]) - 1 - found.shared for index in found.members)
    return total

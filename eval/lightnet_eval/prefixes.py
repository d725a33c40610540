"""Which token sequences share their beginnings, so that these are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_SHARED = 8  # tokens; handing a state on costs about as much as a few tokens


class Group(NamedTuple):
    """Sequences that begin alike.

    Attributes:
        members: indices of the sequences.
        shared: how many tokens all of them begin with; 0 where nothing is gained by it.
    """

    members: list[int]
    shared: int


def group(sequences: Sequence[Sequence[int]], longest: int | None = None) -> list[Group]:
    """Cut sequences into groups such that few tokens are computed: each group's shared ones and each member's others.

    Sorted, sequences that share most lie side by side; neighbours are joined from the longest shared beginning to the
    shortest, where that saves tokens.

    Args:
        sequences: of tokens. The last token of a sequence is predicted and never read, so it is not shared.
        longest: tokens of a group at most (those of one sequence apart), so that it fits a forward pass.

    Returns:
        The groups; the longest ones first, and in an order that does not depend on that of the sequences.
    """
    order = sorted(range(len(sequences)), key=lambda index: (tuple(sequences[index]), index))
    edges = []
    for place in range(1, len(order)):
        before, after = sequences[order[place - 1]], sequences[order[place]]
        edges.append((_common(before, after), place))
    groups = {place: Group([index], 0) for place, index in enumerate(order)}
    owner = list(range(len(order)))  # first place of each place's group; groups are runs of places

    def find(place: int) -> int:
        while owner[place] != place:
            owner[place] = owner[owner[place]]
            place = owner[place]
        return place

    sizes = {place: len(sequences[index]) - 1 for place, index in enumerate(order)}
    for shared, place in sorted(edges, key=lambda edge: (-edge[0], edge[1])):
        if shared < MIN_SHARED:
            break
        left, right = find(place - 1), find(place)
        one, other = groups[left], groups[right]
        saved = one.shared * (len(one.members) - 1) + other.shared * (len(other.members) - 1)
        members = one.members + other.members
        size = sizes[left] + sizes[right] + saved - shared * (len(members) - 1)
        if shared * (len(members) - 1) <= saved or (longest is not None and size > longest):
            continue
        groups[left], sizes[left] = Group(members, shared), size
        del groups[right], sizes[right]
        owner[right] = left
    return [groups[place] for place in sorted(groups, key=lambda place: (-sizes[place], place))]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin, the last ones left out."""
    limit = min(len(one), len(other)) - 1
    for place in range(limit):
        if one[place] != other[place]:
            return place
    return max(limit, 0)


def computed(groups: Sequence[Group], sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that the model reads for them."""
    total = 0
    for found in groups:
        total += found.shared + sum(len(sequences[index]) - 1 - found.shared for index in found.members)
    return total

"""Shuffles of any size that need no index: a permutation computed place by place."""

import math
import struct

import xxhash

_ROUNDS = 8
_MASK = 2**64 - 1


class Permutation:
    """A permutation of ``range(count)`` drawn from (seed, epoch), one value at a time, in no memory.

    An alternating Feistel network over Z_a x Z_b with a * b just above ``count``, walked until it falls below ``count``
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), with XXH3 as the round function, whose values are
    the same in all its versions. So 100 billion samples are shuffled as one, by every rank and loader worker alike, with
    nothing to build, store or share.
    """

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        self.count, self._seed, self._epoch = count, seed & _MASK, epoch & _MASK
        self._left = math.isqrt(max(count - 1, 0)) + 1
        self._right = -(-count // self._left)

    def __call__(self, index: int) -> int:
        """The value at ``index``.

        Raises:
            IndexError: not 0 <= index < count.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"{index} is not in range({self.count})")
        while True:
            left, right = divmod(index, self._right)
            for step in range(0, _ROUNDS, 2):
                left = (left + self._word(step, right)) % self._left
                right = (right + self._word(step + 1, left)) % self._right
            index = left * self._right + right
            if index < self.count:
                return index

    def _word(self, step: int, value: int) -> int:
        return xxhash.xxh3_64_intdigest(struct.pack("<QQQ", self._epoch, step, value), self._seed)

"""Random numbers that are a function of a key and a place alone, the same in every version of numpy.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). numpy promises its raw words, and nothing about
what its generators make of them; so what is made of them stands here.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1


def stream(key: tuple[int, int], counter: tuple[int, int, int, int]) -> np.random.Philox:
    """A stream of words, uint64 (``random_raw(n)``), that no other key and place share.

    The first number of ``counter``, its lowest word, counts along the stream: streams that differ in another one stay apart.
    Integers of any sign and size are taken modulo 2^64.
    """
    words = [np.array([number & _MASK for number in numbers], dtype=np.uint64) for numbers in (key, counter)]
    return np.random.Philox(key=words[0], counter=words[1])


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform in [0, 1), float64, of the upper 53 bits of each word."""
    values: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return values

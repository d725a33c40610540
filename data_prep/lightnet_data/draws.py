"""Random numbers of a sample: a function of (seed, epoch, sample) alone, the same in every version of numpy."""

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1


class Draws:
    """Numbers drawn one after the other for one sample.

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with (seed, epoch) as its key and the sample
    as the high word of its counter: no two samples share a number, and nothing is kept between samples.

    Args:
        seed: of the run.
        epoch: which pass over the data.
        sample: number of the sample in its split.
        stream: of several independent uses of one sample (augmentation, mask, noise, ...).
    """

    def __init__(self, seed: int, epoch: int, sample: int, stream: int = 0) -> None:
        counter = np.array([0, 0, stream, sample], dtype=np.uint64)
        key = np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)
        self._philox = np.random.Philox(counter=counter, key=key)

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Uniform in [0, 1), float64 [count]."""
        raw: NDArray[np.uint64] = self._philox.random_raw(count)
        values: NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return values

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Uniform in [low, high)."""
        return low + (high - low) * float(self.uniforms(1)[0])

    def integer(self, count: int) -> int:
        """Uniform among 0 ... count - 1; exact to count / 2^53."""
        return min(int(self.uniform() * count), count - 1)

    def normals(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Standard normal values, float32 (Box and Muller)."""
        count = int(np.prod(shape))
        half = -(-count // 2)
        first, second = self.uniforms(2 * half).reshape(2, half)
        radius = np.sqrt(-2.0 * np.log1p(-first))  # 1 - first is in (0, 1]
        values = np.concatenate([radius * np.cos(2 * np.pi * second), radius * np.sin(2 * np.pi * second)])
        return values[:count].astype(np.float32).reshape(shape)

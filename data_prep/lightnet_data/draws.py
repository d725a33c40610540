"""Random numbers of a sample: a function of (seed, epoch, sample) alone.

Uniform ones are the same in every version of numpy; normal ones up to the last bits of its logarithm, cosine and sine.
"""

import numpy as np
from numpy.typing import NDArray

from lightnet_data import philox


class Draws:
    """Numbers drawn one after the other for one sample.

    Philox with (seed, epoch) as its key and the sample as the high word of its counter: no two samples share a number, and
    nothing is kept between samples.

    Args:
        seed: of the run.
        epoch: which pass over the data.
        sample: number of the sample in its split.
        stream: of several independent uses of one sample (augmentation, mask, noise, ...).
    """

    def __init__(self, seed: int, epoch: int, sample: int, stream: int = 0) -> None:
        self._philox = philox.stream((seed, epoch), (0, 0, stream, sample))

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Uniform in [0, 1), float64 [count]."""
        return philox.uniform(self._philox.random_raw(count))

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

"""How far samples are from real images in the features of some net: Frechet distance, precision, recall, class score.

With the features of the Inception net of 2015 the figures are FID (Heusel et al. 2017), sFID (Nash et al. 2021), Inception
score (Salimans et al. 2016), and precision and recall (Kynkäänniemi et al. 2019), as ADM and DiT report them. With another net's
they are other figures, which compare with none of those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEIGHBOUR = 3  # whose distance is the radius of a point's ball (Kynkäänniemi et al., section 2)
ROWS = 2048  # of a block of pairwise distances


class Moments:
    """Mean and covariance of features that come in batches; float64.

    Attributes:
        count: features seen.
    """

    def __init__(self) -> None:
        self.count = 0
        self._offset = self._sum = self._squares = torch.zeros(0, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """Of a batch, [B, F]."""
        values = features.detach().double().cpu()
        if not self.count:  # near the mean, so that nothing is lost when its square is taken off
            self._offset = values.mean(0)
            self._sum = torch.zeros_like(self._offset)
            self._squares = torch.zeros(len(self._offset), len(self._offset), dtype=torch.float64)
        values = values - self._offset
        self.count += len(values)
        self._sum = self._sum + values.sum(0)
        self._squares = self._squares + values.T @ values

    def mean(self) -> Tensor:
        """[F]."""
        return self._offset + self._sum / self.count

    def covariance(self) -> Tensor:
        """[F, F], with count - 1 below.

        Raises:
            ValueError: of fewer than two features.
        """
        if self.count < 2:
            raise ValueError(f"a covariance of {self.count} images; give two or more")
        mean = self._sum / self.count
        return (self._squares - self.count * torch.outer(mean, mean)) / (self.count - 1)


def frechet(one: Moments, other: Moments) -> float:
    """Squared Frechet (2-Wasserstein) distance of the Gaussians with these moments.

    |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)); the trace of the root is that of (R S2 R)^(1/2), R the symmetric root of S1,
    whose eigenvalues are real. So no root of a matrix that is not symmetric is taken, and singular ones need no offset.
    """
    first, second = one.covariance(), other.covariance()
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    product = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    apart = (one.mean() - other.mean()).square().sum()
    return float((apart + first.trace() + second.trace() - 2 * product).clamp(min=0))


def class_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """exp of the mean KL divergence of an image's class probabilities from those of all: mean and deviation over splits.

    Args:
        probabilities: [N, classes], rows of sum 1.
        splits: parts of N // splits or one more, in order; at most N of them.
    """
    scores = []
    for part in probabilities.double().tensor_split(min(splits, len(probabilities))):
        mean = part.mean(0, keepdim=True)
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, mean)).sum(1).mean().exp())
    found = torch.stack(scores)
    return float(found.mean()), float(found.std(correction=0))


def precision_recall(real: Tensor, drawn: Tensor, neighbour: int = NEIGHBOUR) -> tuple[float, float]:
    """Share of drawn images among the real ones, and of real ones among the drawn.

    An image is among others if it lies in the ball of one of them, which reaches to that one's k-th neighbour among its own.

    Args:
        real, drawn: features [N, F] and [M, F].
        neighbour: k.

    Raises:
        ValueError: fewer than k + 1 of either.
    """
    fewest = min(len(real), len(drawn))
    if fewest <= neighbour:
        raise ValueError(f"{fewest} images have no neighbour number {neighbour}; give {neighbour + 1} or more of each")
    real, drawn = real.detach().float(), drawn.detach().float()
    return _inside(drawn, real, neighbour), _inside(real, drawn, neighbour)


def _inside(points: Tensor, centers: Tensor, neighbour: int) -> float:
    # A point is its own nearest one, hence k + 1. By differences, not products: equal points are 0 apart.
    exact = "donot_use_mm_for_euclid_dist"
    radii = torch.cat(
        [torch.cdist(rows, centers, compute_mode=exact).kthvalue(neighbour + 1).values for rows in _blocks(centers)]
    )
    found = [(torch.cdist(rows, centers, compute_mode=exact) <= radii).any(1) for rows in _blocks(points)]
    return float(torch.cat(found).double().mean())


def _blocks(points: Tensor) -> Sequence[Tensor]:
    return points.split(ROWS)

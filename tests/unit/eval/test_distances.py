"""Frechet distance, class score, precision and recall, each against its definition."""

import itertools

import numpy as np
import pytest
import torch
from lightnet_eval.distances import Moments, class_score, frechet, precision_recall
from scipy.linalg import sqrtm


def moments(features: np.ndarray, *bounds: int) -> Moments:
    found, bounds = Moments(), (0, *bounds, len(features))
    for first, last in itertools.pairwise(bounds):
        found.add(torch.from_numpy(features[first:last]))
    return found


@pytest.mark.parametrize(
    ("count", "width", "shift"), [(50, 4, 0.0), (400, 7, 3.0), (5, 12, 1.0), (2, 3, 0.0), (60, 1, 0.5), (60, 6, 1e4)]
)
def test_frechet_is_that_of_the_definition(count: int, width: int, shift: float) -> None:
    """Singular covariances (fewer images than features) and features far from 0 among them."""
    random = np.random.default_rng(count)
    one = random.normal(size=(count, width)) @ random.normal(size=(width, width)) + shift
    other = random.normal(size=(count + 3, width)) * random.uniform(0.2, 2, width) + shift / 2
    first, second = np.cov(one.T).reshape(width, width), np.cov(other.T).reshape(width, width)
    offset = 1e-9 * np.eye(width)  # the root of a singular product is not to be had otherwise
    root = sqrtm((first + offset) @ (second + offset)).real
    expected = np.square(one.mean(0) - other.mean(0)).sum() + np.trace(first + second - 2 * root)
    found = frechet(moments(one, 1, count // 2), moments(other, 3))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert frechet(moments(other), moments(one)) == pytest.approx(found, rel=1e-6, abs=1e-7)


def test_moments_are_those_of_all_in_whatever_batches() -> None:
    values = np.random.default_rng(0).normal(size=(37, 5)) + 1e6
    for bounds in ((), (1, 2, 30), (36,)):
        found = moments(values, *bounds)
        np.testing.assert_allclose(found.mean(), values.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.covariance(), np.cov(values.T), rtol=1e-6, atol=1e-8)
    same = moments(values.astype(np.float32))
    assert frechet(same, same) < 1e-6
    with pytest.raises(ValueError, match="a covariance of 1 images"):
        moments(values[:1]).covariance()


def test_class_score() -> None:
    shares = np.random.default_rng(1).dirichlet(np.full(6, 0.3), 43)
    shares[:4] = np.eye(6)[:4]  # 0 log 0 is 0
    expected = []
    for part in np.array_split(shares, 10):
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where(part > 0, part * (np.log(part) - np.log(part.mean(0))), 0)
        expected.append(np.exp(terms.sum(1).mean()))
    found = class_score(torch.from_numpy(shares))
    assert found == pytest.approx((np.mean(expected), np.std(expected)))
    assert class_score(torch.eye(8), 1)[0] == pytest.approx(8.0) and class_score(torch.eye(8))[0] == pytest.approx(1.0)


@pytest.mark.parametrize("neighbour", [1, 3])
def test_precision_and_recall_by_loops(neighbour: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightnet_eval.distances.ROWS", 7)
    random = np.random.default_rng(neighbour)
    real, drawn = random.normal(size=(30, 3)).astype("f"), random.normal(0.8, 1.2, size=(25, 3)).astype("f")
    drawn[:2] = real[:2]  # a copy of a real image is among them

    def inside(points: np.ndarray, centers: np.ndarray) -> float:
        radii = [sorted(np.linalg.norm(centers - c, axis=1))[neighbour] for c in centers]
        hits = [any(np.linalg.norm(p - c) <= r for c, r in zip(centers, radii, strict=True)) for p in points]
        return float(np.mean(hits))

    found = precision_recall(torch.from_numpy(real), torch.from_numpy(drawn), neighbour)
    assert found == pytest.approx((inside(drawn, real), inside(real, drawn)))
    assert 0 < found[0] < 1 and 0 < found[1] < 1 and found[0] != found[1]
    with pytest.raises(ValueError, match="2 images have no neighbour number 3; give 4 or more"):
        precision_recall(torch.from_numpy(real), torch.from_numpy(drawn[:2]))

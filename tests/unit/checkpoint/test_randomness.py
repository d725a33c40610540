"""Random state of a rank: kept exactly, and derived by rule."""

import random
from pathlib import Path

import numpy as np
import torch

from lightnet_llm.checkpoint import randomness


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
        float(torch.rand(())),
    ]


def test_kept_exactly(tmp_path: Path) -> None:
    randomness.derive(1, 2, 3)
    draw()
    torch.save(randomness.capture(), tmp_path / "state.pt")
    ahead = [draw() for _ in range(3)]
    draw()
    randomness.restore(randomness.load(tmp_path / "state.pt"))
    assert [draw() for _ in range(3)] == ahead


def test_derived_from_seed_step_and_rank() -> None:
    def first(*place: int) -> list[float]:
        randomness.derive(*place)
        return draw()

    assert first(1, 2, 3) == first(1, 2, 3)
    others = [first(*place) for place in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))]
    for column in zip(*others, strict=True):
        assert len(set(column)) == len(others)

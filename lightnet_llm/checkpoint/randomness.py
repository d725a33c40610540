"""Random state of a rank. Samples, masks and initial values never draw from it; whatever else does is kept here.

A run that resumes on its layout continues every rank's generators. A fresh start, and a resume on another layout, where
there is no rank to continue, seeds each from (seed, step, rank).
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = "random"


def rank_file(checkpoint: Path, rank: int) -> Path:
    """Where a rank's random state lies in a checkpoint."""
    return checkpoint / FOLDER / f"rank{rank:05d}.pt"


def capture() -> dict[str, Any]:
    """State of Python's, NumPy's, torch's and the current device's generators."""
    numbers: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Inverse of :func:`capture`."""
    random.setstate(state["python"])
    numbers = state["numpy"]
    np.random.set_state({**numbers, "state": {**numbers["state"], "key": np.array(numbers["state"]["key"], np.uint32)}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive(seed: int, step: int, rank: int) -> None:
    """Seed every generator of this rank from (seed, step, rank)."""
    digest = hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)  # the device's generators too


def load(path: Path) -> dict[str, Any]:
    """A state that was written with ``torch.save``."""
    state: dict[str, Any] = torch.load(path, map_location="cpu")
    return state

"""Fields of a model so small that float64 and finite sums over everything are quick."""

from typing import Any

SMALL: dict[str, Any] = {
    "layers": 2,
    "width": 24,
    "heads": 3,
    "glu_width": 20,
    "gate_rank": 5,
    "tpe_rank": 4,
    "initializer_std": 0.3,
}

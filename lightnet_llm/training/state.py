"""The one object that survives a restart."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class RunState:
    """Where a run stands. Sample order, rates and dropout masks are functions of it and the configuration.

    Attributes:
        step: optimiser steps done.
        samples: samples consumed, the next global sample position.
        tokens: tokens consumed.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain mapping, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """Inverse of :meth:`as_dict`; other keys are ignored."""
        return cls(**{key: int(values[key]) for key in ("step", "samples", "tokens")})

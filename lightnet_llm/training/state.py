"""The one object that survives a restart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RunState:
    """Where a run stands. Sample order, rates and dropout masks are functions of it and the configuration.

    Attributes:
        step: optimiser steps done.
        samples: samples consumed, the next global sample position.
        tokens: tokens consumed.
        bad_steps: what the judge of bad steps remembers, see :class:`~.bad_steps.Judge`.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    bad_steps: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain mapping, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        """Inverse of :meth:`as_dict`; other keys are ignored."""
        numbers = {key: int(values[key]) for key in ("step", "samples", "tokens")}
        return cls(**numbers, bad_steps=dict(values.get("bad_steps", {})))

"""Rates, batches and budgets are functions of the step alone."""

import math

import pytest

from lightnet_llm.config.run import RunConfig, ScheduleConfig
from lightnet_llm.errors import UserError
from lightnet_llm.training.schedule import Budget, budget_of, learning_rate_factor

MODEL = {"layers": 1, "width": 8, "heads": 1, "glu_width": 8, "vocab_size": 8}
POINTS = [
    ("cosine", {"warmup_steps": 10, "final_ratio": 0.1}, {0: 0.1, 9: 1.0, 54: 0.55, 99: 0.1}),
    ("inverse_sqrt", {"warmup_steps": 4}, {0: 0.25, 3: 1.0, 15: 0.5, 99: 0.2}),
    ("constant", {"warmup_steps": 2}, {0: 0.5, 1: 1.0, 99: 1.0}),
    ("wsd", {"warmup_steps": 0, "decay_share": 0.2, "final_ratio": 0.0}, {0: 1.0, 79: 1.0, 89: 0.5, 99: 0.0}),
    ("triangle", {"peak_share": 0.5, "final_ratio": 0.0}, {0: 1 / 51, 49: 50 / 51, 74: 0.5, 99: 0.0}),
]


@pytest.mark.parametrize(("kind", "fields", "points"), POINTS)
def test_known_points(kind: str, fields: dict[str, float], points: dict[int, float]) -> None:
    schedule = ScheduleConfig(kind=kind, **fields)  # type: ignore[arg-type]
    for step, factor in points.items():
        assert math.isclose(learning_rate_factor(schedule, step, 100), factor, abs_tol=1e-12), step


@pytest.mark.parametrize("kind", ["cosine", "inverse_sqrt", "constant", "wsd", "triangle"])
@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_short_runs_are_finite_and_positive(kind: str, total: int, warmup: int) -> None:
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup)  # type: ignore[arg-type]
    factors = [learning_rate_factor(schedule, step, total) for step in range(total)]
    assert all(0.0 < factor <= 1.0 for factor in factors)


def test_ramp() -> None:
    budget = Budget(((2, 4), (5, 8)), 16, 10, 32)
    batches = [budget.batch_at(step) for step in range(10)]
    assert batches == [4, 4, 8, 8, 8, 16, 16, 16, 16, 16]
    assert [budget.samples_before(step) for step in range(11)] == [sum(batches[:step]) for step in range(11)]


def config(**train: object) -> RunConfig:
    return RunConfig.model_validate({"model": MODEL, "data": {"sequence_length": 10}, "train": train})


@pytest.mark.parametrize("tokens", [1, 40, 41, 80, 81, 200, 1234])
def test_token_budget_is_rounded_up_to_whole_steps(tokens: int) -> None:
    ramp = [{"until_step": 2, "batch": 4}]
    budget = budget_of(config(tokens=tokens, global_batch=8, micro_batch=2, batch_ramp=ramp), 2)
    assert budget.samples_before(budget.steps) * 10 >= tokens
    assert budget.samples_before(budget.steps - 1) * 10 < tokens


def test_batches_must_divide() -> None:
    with pytest.raises(UserError, match=r"train.global_batch 6 .* nearest that is: 8"):
        budget_of(config(steps=1, global_batch=6, micro_batch=2), 2)
    with pytest.raises(UserError, match=r"batch_ramp\[0\]"):
        budget_of(config(steps=1, global_batch=8, micro_batch=4, batch_ramp=[{"until_step": 1, "batch": 4}]), 2)

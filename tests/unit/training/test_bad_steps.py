"""Which steps are judged bad, and what the judge remembers."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightnet_llm.config.run import BadStepsConfig
from lightnet_llm.training.bad_steps import Judge, deviations, pick_suspects


def judge(steps: int = 0, **fields: float) -> Judge:
    made = Judge(BadStepsConfig(**fields))
    for step in range(steps):
        assert made.judge(3.0 + 0.1 * (step % 3), 1.0 + 0.2 * (step % 2)) is None
    return made


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_bad_from_the_first_step(loss: float) -> None:
    assert judge().judge(loss, 1.0) == "not finite"
    assert judge().judge(1.0, loss) == "not finite"


@pytest.mark.parametrize(
    ("steps", "loss", "norm", "bad"),
    [
        (31, 9.0, 1.0, ""),  # not enough seen
        (32, 9.0, 1.0, "loss"),
        (40, 9.0, 1.0, "loss"),
        (40, 3.9, 1.0, "loss"),  # the deviation is 0.148
        (40, 3.5, 1.0, ""),
        (40, 0.1, 1.0, ""),  # a fall is welcome
        (40, 3.0, 50.0, "gradient norm"),
        (40, 3.0, 1.5, ""),
        (40, 3.0, 0.0, ""),
    ],
)
def test_deviations(steps: int, loss: float, norm: float, bad: str) -> None:
    reason = judge(steps, deviations=4, after=32).reason(loss, norm)
    assert (reason or "").startswith(bad) and bool(reason) == bool(bad)


def test_no_deviation_is_smaller_than_the_floor() -> None:
    constant = judge(0, deviations=5, after=8, window=8)
    for _ in range(8):
        constant.judge(2.0, 1.0)
    assert constant.reason(2.09, 1.0) is None and constant.reason(2.11, 1.0) is not None


def test_bad_steps_are_left_out_of_the_statistics() -> None:
    made = judge(40, deviations=5)
    before = made.as_dict()
    for count in range(1, 5):
        assert made.judge(50.0, 1.0) and made.streak == count
    assert made.judge(50.0, 1.0) and made.streak == 5
    assert {**made.as_dict(), "streak": 0, "skipped": 0} == before
    assert made.judge(3.0, 1.0) is None and made.streak == 0 and made.skipped == 5


@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=60), st.integers(0, 59))
def test_a_restored_judge_decides_alike(losses: list[float], cut: int) -> None:
    """Law 2, for every stream of losses and every place to stop."""
    config = BadStepsConfig(deviations=3, window=12, after=6)
    whole, pieces = Judge(config), Judge(config)
    decisions = [whole.judge(loss, loss) for loss in losses]
    again = [pieces.judge(loss, loss) for loss in losses[:cut]]
    resumed = Judge(config)
    resumed.restore(json.loads(json.dumps(pieces.as_dict())))
    again += [resumed.judge(loss, loss) for loss in losses[cut:]]
    assert again == decisions and resumed.as_dict() == whole.as_dict()


def test_an_old_checkpoint_has_no_judge() -> None:
    made = judge()
    made.restore({})
    assert made.as_dict() == {"streak": 0, "skipped": 0, "losses": [], "norms": []}


def test_robust_deviation_ignores_outliers() -> None:
    seen = [1.0, 1.1, 0.9, 1.05, 0.95, 1e9]
    assert 5 < deviations(2.0, seen, 0.0) < 15
    assert math.isfinite(deviations(2.0, [1.0, 1.0], 0.0))


def test_suspects() -> None:
    nan = float("nan")
    assert pick_suspects([(1.0, [0, 1]), (nan, [4, 5]), (nan, [2])]) == [2, 4, 5]
    assert pick_suspects([(1.0, [0, 1]), (2.0, [4, 5])]) == [4, 5]
    assert pick_suspects([]) == []


def test_config_that_could_never_judge() -> None:
    with pytest.raises(ValueError, match="after 64 is more than window 16"):
        BadStepsConfig(after=64, window=16)

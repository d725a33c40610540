"""The data section: mixtures and stages that cannot be meant are refused in one line."""

from typing import Any

import pytest

from lightnet_llm.config import validate
from lightnet_llm.errors import UserError

SOURCES = {"web": {"path": "w", "weight": 0.75}, "books": {"path": "b", "weight": 0.25, "split": "test"}}


def section(**data: Any) -> dict[str, Any]:
    model = {"layers": 1, "width": 16, "heads": 2, "glu_width": 16, "vocab_size": 8}
    return {"model": model, "train": {"steps": 1, "name": "x"}, "data": {"sequence_length": 64, **data}}


def stages(*given: tuple[int, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"from_tokens": tokens, "weights": weights} for tokens, weights in given]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mixture": {"web": {"path": "w"}}}, "'data.mixture.web.weight' is missing"),
        ({"mixture": {"web": {"weight": 1}}}, "'data.mixture.web.path' is missing"),
        ({"mixture": {"web": {"path": "w", "weight": -1}}}, "'data.mixture.web.weight' is -1"),
        ({"mixture": {"web": {"path": "w", "weight": float("nan")}}}, "'data.mixture.web.weight' is nan"),
        ({"mixture": {"web": {"path": "w", "weight": float("inf")}}}, "'data.mixture.web.weight' is inf"),
        ({"mixture": {"web": {"path": "w", "weight": 0}}}, "all weights of mixture are 0"),
        ({"mixture": {"web": {"path": "w", "weight": 1, "share": 2}}}, "unknown key 'data.mixture.web.share'"),
        ({"mixture": SOURCES, "path": "data"}, "path and mixture are both set"),
        ({"stages": stages((64, {"web": 1}))}, "there is none; give `mixture`"),
        (
            {"mixture": SOURCES, "stages": stages((64, {"wbe": 1}))},
            "a source 'wbe' that mixture has not (did you mean 'web'?)",
        ),
        ({"mixture": SOURCES, "stages": stages((64, {"zzz": 1}))}, "mixture has not; its sources: web, books"),
        ({"mixture": SOURCES, "stages": stages((64, {"web": 0}))}, "all weights from token 64 on are 0"),
        ({"mixture": SOURCES, "stages": stages((64, {"web": -1}))}, "'data.stages.0.weights.web' is -1"),
        ({"mixture": SOURCES, "stages": stages((0, {"web": 1}))}, "'data.stages.0.from_tokens' is 0"),
        ({"mixture": SOURCES, "stages": stages((63, {"web": 1}))}, "from token 0 ends at 63, before a sample of 64"),
        (
            {"mixture": SOURCES, "stages": stages((900, {"web": 1}), (800, {"web": 1}))},
            "from token 900 ends at 800, before a sample of 64",
        ),
    ],
)
def test_refusals(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(section(**data), "run.yaml")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_mixture_with_stages() -> None:
    from lightnet_llm.training.sources import stages_of, used_sources

    config = validate(section(mixture=SOURCES, stages=stages((100, {"books": 1}), (200, {"web": 1, "books": 1}))), "x")
    assert used_sources(config) == ["web", "books"]
    found = [(stage.start, stage.weights) for stage in stages_of(config)]
    assert found == [(0, {"web": 0.75, "books": 0.25}), (2, {"books": 1.0}), (4, {"web": 1.0, "books": 1.0})]
    late = {"web": SOURCES["web"], "books": {"path": "b", "weight": 0}, "never": {"path": "n", "weight": 0}}
    config = validate(section(mixture=late, stages=stages((100, {"books": 1}))), "x")
    assert used_sources(config) == ["web", "books"]

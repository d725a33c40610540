"""Running out of memory names the largest micro-batch that would fit."""

from types import SimpleNamespace

import pytest
import torch

from lightnet_llm.config import ModelConfig, RunConfig
from lightnet_llm.models import CausalLM, initialize
from lightnet_llm.training import out_of_memory
from lightnet_llm.training.schedule import Budget
from lightnet_llm.training.tasks import task_of


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 7])
def test_bisection_finds_the_largest(limit: int) -> None:
    tried = []

    def attempt(rows: int) -> None:
        tried.append(rows)
        if rows > limit:
            raise torch.OutOfMemoryError

    assert out_of_memory.largest_that_fits(attempt, 8) == (limit or None)
    assert len(tried) <= 4


@pytest.mark.parametrize(
    ("limit", "words"), [(3, "set train.micro_batch=2"), (5, "set train.micro_batch=4"), (0, "not even 1 fits")]
)
def test_advice(limit: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(model=ModelConfig(layers=1, width=16, heads=2, glu_width=16, vocab_size=20), train={"steps": 1})
    model = CausalLM(config.model)
    initialize(model, 0)
    original = CausalLM.forward

    def forward(self, input_ids, *rest):  # type: ignore[no-untyped-def]
        if input_ids.shape[0] > limit:
            raise torch.OutOfMemoryError
        return original(self, input_ids, *rest)

    monkeypatch.setattr(CausalLM, "forward", forward)
    engine = SimpleNamespace(
        task=task_of(config),
        config=SimpleNamespace(train=SimpleNamespace(micro_batch=8)),
        groups=SimpleNamespace(layout=SimpleNamespace(world=2, data=2)),
        zero_stage=1,
        module=model,
        engine=model,
        device=torch.device("cpu"),
    )
    batch = {
        "input_ids": torch.randint(0, 20, (8, 6)),
        "labels": torch.randint(0, 20, (8, 6)),
        "cu_seqlens": torch.arange(0, 49, 3, dtype=torch.int32),
        "sample_ids": torch.arange(8),
    }
    engine.last_batch = batch
    message = out_of_memory.advice(engine, Budget(((2, 8),), 64, 10, 6))
    assert words in message and "train.micro_batch 8" in message and "\n" not in message
    assert all(parameter.grad is None for parameter in model.parameters())

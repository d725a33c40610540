"""Blocks recorded whole on a card: the bits of their modules, and no more memory."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import CausalLM, recorded
from lightnet_llm.models.block import Block
from lightnet_llm.models.context import ForwardContext
from tests.gpu.model import bf16_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = ModelConfig(layers=4, width=512, heads=4, glu_width=1344, vocab_size=3072)


@pytest.fixture
def model() -> CausalLM:
    return bf16_model(CONFIG)


def steps(model: CausalLM) -> Iterator[tuple[list[Tensor], int]]:
    """(loss and all gradients, most memory beyond the weights) of batches of other packings."""
    for seed, bounds in enumerate([[0, 4096], [0, 7, 1024, 4096], [0, 2048, 2048, 4095, 4096], [0, 4096]]):
        torch.manual_seed(seed)
        ids = torch.randint(0, 3000, (1, 4096), device="cuda")
        context = ForwardContext(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(ids, context, ids).loss
        assert loss is not None
        loss.backward()
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        yield [loss.detach(), *gradients], torch.cuda.max_memory_allocated() - before
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("every", [0, 1])
def test_bits_and_memory(model: CausalLM, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [x for x in model.modules() if isinstance(x, Block)]
    for one in blocks:
        one.recompute = bool(every)
    found = list(steps(model))
    used = recorded.recordable
    monkeypatch.setattr(recorded, "recordable", lambda x, decided=None: False)
    plain = list(steps(model))
    assert used(torch.ones(1, device="cuda"))
    for (one, _), (two, _) in zip(found, plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert found[-1][1] < 1.03 * plain[-1][1], (found, plain)

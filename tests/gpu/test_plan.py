"""The planner on a card: what autograd keeps with the Triton kernels, the peak of a step, and a calibration."""

import time
from pathlib import Path

import pytest
import torch

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models.context import ForwardContext
from lightnet_llm.plan import activations, load_hardware
from lightnet_llm.plan.activations import Work
from lightnet_llm.plan.calibrate import calibrate
from lightnet_llm.plan.hardware import BY_HOST, cards
from tests.gpu.model import bf16_model
from tests.unit.plan.saved import Saved

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = ModelConfig(layers=3, width=1024, heads=8, glu_width=2688, vocab_size=50272)


def test_kept_bytes_and_peak() -> None:
    model, work = bf16_model(CONFIG), Work(CONFIG, 4, 2048)
    ids = torch.randint(0, 50000, (4, 2048), device="cuda")
    kept = activations.block(work) * CONFIG.layers + activations.embedding(work) + activations.head(work)
    for attempt in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with Saved(list(model.parameters())) as saved:
            loss = model(ids, ForwardContext(), ids).loss
        assert loss is not None
        if attempt:
            assert saved.bytes == kept.total + activations.loss(work)
            peak = torch.cuda.max_memory_allocated() - before
            assert peak == pytest.approx(kept.total + activations.loss_peak(work), rel=0.03)
            torch.cuda.reset_peak_memory_stats()
        loss.backward()
        if attempt:  # the embedding's gradient in the end, beside that of the head
            parameters = sum(p.numel() * p.element_size() for p in model.parameters())
            most = kept.total + activations.loss_peak(work) + parameters
            assert torch.cuda.max_memory_allocated() - before < 1.03 * most
        model.zero_grad(set_to_none=True)
        del loss, saved


@pytest.mark.whole_card  # its times are its own
def test_calibration(tmp_path: Path) -> None:
    path, began, ranks = tmp_path / "cards.json", time.perf_counter(), min(2, torch.cuda.device_count())
    for line in calibrate(path, ranks):
        print(f"{time.perf_counter() - began:5.1f} s  {line}")
    assert time.perf_counter() - began < 120  # 60 with kernels compiled and a quiet host
    (name,) = cards(path)
    card = load_hardware(name, path)
    assert card.gemm_flop_s(1.1e12) < card.peak_flop_s
    assert card.gemm_flop_s(1.1e12) > 0.3 * card.peak_flop_s
    assert 0 < card.scan_s < card.scan_lrpe_s < 1e-9
    assert 1e-5 < card.host_block_s < 0.1
    assert 0.9 < card.sustained < 2.0
    assert ranks == 1 or all(1e-4 < getattr(card, name) < 0.1 for name in BY_HOST)
    assert card.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 0 < card.context_bytes < 2**32

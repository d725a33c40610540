"""Modulated blocks on a card: their kernels beside float64, recorded beside run, times beside the byte floor (pytest -s)."""

import functools
import sys
from collections.abc import Callable

import pytest
import torch
from lightnet_kernels import gated_add, gated_add_norm, modulated_norm
from torch import Tensor

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import Denoiser, initialize, recorded
from lightnet_llm.models.parameters import spec_of
from tests.unit.kernels import modulation_table as table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")
CONFIG = ModelConfig.model_validate(
    {
        "head": "denoiser", "conditioning": "adaln_single", "causal": False, "axes": 2, "norm": "layer", "layers": 4,
        "width": 1152, "heads": 16, "glu_width": 3072, "tpe_init_length": 16,
        "image": {"size": [32, 32], "patch": 2, "channels": 4, "classes": 1000},
    }
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["srms", "layer"])
@pytest.mark.parametrize(
    "shape", [(2, 0, 24), (1, 1, 5), (3, 67, 72), (70, 33, 384), (4, 300, 768), (5, 256, 1152), (2, 9, 6784)], ids=str
)
def test_kernels(shape: tuple[int, int, int], kind: str, dtype: torch.dtype) -> None:
    table.check_modulation(kind, shape, dtype, "cuda", flat=shape[0] == 3, stacked=shape[0] != 70)


def steps(model: Denoiser) -> list[tuple[list[Tensor], int]]:
    """(output and all gradients, most memory beyond the weights) of some batches."""
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        noisy, weights = torch.randn(8, 4, 32, 32, device="cuda").bfloat16(), torch.randn(8, 8, 32, 32, device="cuda")
        times, labels = torch.randint(0, 1000, (8,), device="cuda"), torch.arange(8, device="cuda") * 9 + seed
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = model(noisy, times, labels)
        (out.float() * weights).sum().backward()
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        assert len(gradients) == len(list(model.parameters()))
        found.append(([out.detach(), *gradients], torch.cuda.max_memory_allocated() - before))
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_recorded_bits_and_memory(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Denoiser(CONFIG)
    initialize(model, 1)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    model.cuda().train()
    for parameter in model.parameters():
        if not spec_of(parameter).keep_fp32:
            parameter.data = parameter.data.bfloat16()
    for block in model.layers:
        block.recompute = recompute
    recordings = sys.modules["lightnet_kernels.recorded"]._recordings
    recordings.clear()
    found = steps(model)
    assert [type(x).__name__ for x in recordings.values()] == ["_Pair"], "blocks are recorded whole, all as one"
    monkeypatch.setattr(recorded, "recordable", lambda x, decided=None: False)
    plain = steps(model)
    for (one, _), (two, _) in zip(found, plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert found[-1][1] < 1.03 * plain[-1][1], (found[-1][1], plain[-1][1])


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median of the card's time."""
    for _ in range(3):
        call()
    pairs = []
    for _ in range(repeats):
        pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])  # type: ignore[no-untyped-call]
        torch.cuda._sleep(1_000_000)  # the host runs ahead, so that launches are not timed
        pairs[-1][0].record()
        call()
        pairs[-1][1].record()
    torch.cuda.synchronize()
    return sorted(one.elapsed_time(two) for one, two in pairs)[repeats // 2]


@pytest.mark.parametrize("shape", [(64, 256, 1152), (4, 4096, 1152)], ids=str)
def test_times_beside_the_byte_floor(shape: tuple[int, int, int]) -> None:
    """Printed, not asserted; beside them the same by PyTorch."""
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, branch = draw(shape).requires_grad_(), draw(shape).requires_grad_()
    gate, shift, scale = (t.detach().requires_grad_() for t in draw(shape[0], 6, shape[2])[:, :3].unbind(1))
    weights = [draw(shape[2]).requires_grad_() for _ in range(2)]
    options = {"kind": "layer", "eps": 1e-5}
    size = 2 * x.numel()
    cases: dict[str, tuple[list[Tensor], Callable[..., object], int, int]] = {
        "modulated_norm": ([x, shift, scale, *weights], functools.partial(modulated_norm, **options), 2, 3),
        "gated_add_norm": ([x, branch, gate, shift, scale, *weights], functools.partial(gated_add_norm, **options), 4, 6),
        "gated_add": ([x, branch, gate], gated_add, 3, 3),
    }  # fmt: skip
    print(f"\n{torch.cuda.get_device_name()}, bf16 {shape}; GB/s over each tensor once")
    for name, (leaves, call, forward_passes, backward_passes) in cases.items():
        for backend in ("triton", "torch"):
            run = functools.partial(call, *leaves, backend=backend)
            out = run()
            outputs = list(out) if isinstance(out, tuple) else [out]
            upstream = [torch.randn_like(y) for y in outputs]
            with torch.no_grad():
                one = milliseconds(run)
            two = milliseconds(lambda o=outputs, g=upstream, i=leaves: torch.autograd.grad(o, i, g, retain_graph=True))
            rates = [n * size / t / 1e6 for n, t in ((forward_passes, one), (backward_passes, two))]
            print(
                f"{name:15} {backend:7} forward {one:.4f} ms {rates[0]:5.0f} GB/s  backward {two:.4f} ms {rates[1]:5.0f}"
            )

"""The whole model through every Triton kernel, under the interpreter, against the same without any: loss and each gradient."""

import sys

import pytest
import torch

from lightnet_llm.config import load_config
from lightnet_llm.models import CausalLM, ForwardContext, initialize

from ..kernels.interpreter import inside, outside, run_inside

SMALL = [
    "model.layers=2", "model.width=64", "model.heads=2", "model.glu_width=96", "model.vocab_size=200", "model.gate_rank=8",
    "model.tpe_rank=8", "model.dropout=0",
]  # fmt: skip


@outside
@pytest.mark.slow
def test_table_under_the_interpreter() -> None:
    run_inside(__file__, "-m", "slow or not slow")


def gradients(kernels: str, monkeypatch: pytest.MonkeyPatch, packed: bool) -> dict[str, torch.Tensor]:
    """And the loss, of the wikitext103 preset made small."""
    from lightnet_kernels import checks

    original = checks.check_backend

    def chosen(name: str, backend: str, known: tuple[str, ...]) -> str:
        found = original(name, backend, known)
        return kernels if found == "auto" and kernels in known else found

    with monkeypatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("lightnet_kernels") and getattr(module, "check_backend", None) is original:
                patch.setattr(module, "check_backend", chosen)
        model = CausalLM(load_config("wikitext103", SMALL).model).train()
        initialize(model, 3)
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 200, (1, 91), generator=random)
        bounds = torch.tensor([0, 17, 17, 60, 90] if packed else [0, 45, 90], dtype=torch.int32)
        loss = model(ids[:, :-1], ForwardContext(cu_seqlens=bounds), ids[:, 1:]).loss
        assert loss is not None
        loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@inside
@pytest.mark.parametrize("packed", [False, True])
def test_in_fp32_they_are_the_same(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = (gradients(kernels, monkeypatch, packed) for kernels in ("torch", "triton"))
    assert plain.keys() == fast.keys() and len(plain) >= 20
    assert abs(float(fast["loss"] - plain["loss"])) < 1e-5
    for name, x in plain.items():
        assert float((fast[name] - x).norm()) <= 1e-4 * float(x.norm()), name
    whole = [torch.stack([x.norm() for name, x in found.items() if name != "loss"]).norm() for found in (plain, fast)]
    assert abs(float(whole[1] / whole[0]) - 1) < 1e-5

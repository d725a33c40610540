"""adaLN-single: the denoiser beside its definition, sample by sample; what it must not depend on; its count."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightnet_llm.config import ModelConfig
from lightnet_llm.models import Denoiser, ForwardContext, count_parameters, initialize
from lightnet_llm.models.backbone import grid_coordinates
from lightnet_llm.models.denoiser import guided
from lightnet_llm.models.dropout import DropoutKey
from tests.unit.models.small import SMALL

FIELDS: dict[str, Any] = {
    **SMALL,
    "head": "denoiser",
    "conditioning": "adaln_single",
    "causal": False,
    "axes": 2,
    "norm": "layer",
    "image": {"size": [4, 6], "patch": 2, "channels": 3, "classes": 5},
    "tpe_init_length": 4,
}
GRID = (2, 3)


def small(**changes: Any) -> Denoiser:
    """A model in float64 whose every part matters."""
    model = Denoiser(ModelConfig.model_validate({**FIELDS, **changes})).double()
    initialize(model, 3)
    torch.nn.init.normal_(model.head.weight, std=0.3)  # it begins at zero
    torch.nn.init.normal_(model.modulation.bias, std=0.3)
    return model


def given(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    noisy = torch.randn(count, 3, 4, 6, generator=generator, dtype=torch.float64)
    return noisy, torch.arange(count) * 331 % 1000, torch.arange(count) % 6


def definition(model: Denoiser, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
    """Tokens before the head [N, width] of one sample [C, H, W]: every feature's shift, scale and gate by its own index."""
    d = model.config.width
    condition = model.timestep(time[None])[0] + model.label.weight[label]
    active = condition * torch.sigmoid(condition)
    shared = torch.stack([model.modulation.weight[i] @ active + model.modulation.bias[i] for i in range(6 * d)])
    x, _ = model.tpe(model.embedding(noisy[None]), ForwardContext(), grid=GRID)
    context = ForwardContext(coordinates=grid_coordinates(GRID, 0, x.device))
    for block in model.layers:
        shift1, scale1, gate1, shift2, scale2, gate2 = (shared[k * d : (k + 1) * d] + block.table[k] for k in range(6))
        y, _ = block.attention(
            functional.layer_norm(x, (d,), *_of(block.attention_norm)) * (1 + scale1) + shift1, context
        )
        x = x + gate1 * y
        inside = functional.layer_norm(x, (d,), *_of(block.glu_norm)) * (1 + scale2) + shift2
        x = x + gate2 * block.glu(inside)
    normed = functional.layer_norm(x, (d,), *_of(model.norm))
    return (normed * (1 + condition + model.final.table[1]) + condition + model.final.table[0])[0]


def _of(norm: Any) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


@pytest.mark.parametrize("recompute", [False, True])
def test_it_is_its_definition(recompute: bool) -> None:
    model, (noisy, times, labels) = small().train(), given(3)
    for block in model.layers:
        block.recompute = recompute
    weights = torch.randn(3, 6, 4, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = model(noisy.requires_grad_(), times, labels)
    parts = [model.head(definition(model, *sample)) for sample in zip(noisy, times, labels, strict=True)]
    # Features of a token: row and column in its patch, channel.
    wanted = torch.stack([x.view(2, 3, 2, 2, 6).permute(4, 0, 2, 1, 3).reshape(6, 4, 6) for x in parts])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    inputs = [noisy, *model.parameters()]
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (found, wanted))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-7, atol=1e-9)
        assert mine.abs().max() > 0


def test_a_sample_depends_on_its_own_time_step_and_class_alone() -> None:
    model, (noisy, times, labels) = small(dropout=0.1, drop_path=0.2), given(4)
    ids = torch.tensor([7, 2**33, 1, 8])

    def run(which: slice, times: Tensor, labels: Tensor) -> Tensor:
        key = DropoutKey(1, 0, ids[which], 6)
        return model(noisy[which], times[which], labels[which], ForwardContext(dropout=key))

    base = run(slice(4), times, labels)
    torch.testing.assert_close(torch.cat([run(slice(i, i + 1), times, labels) for i in range(4)]), base)
    for other in (run(slice(4), (times + 1) % 1000, labels), run(slice(4), times, (labels + 1) % 6)):
        assert ((other - base).flatten(1).abs().amax(1) > 1e-6).all()
    assert (model(noisy, times, labels) - base).abs().max() > 1e-3


def test_guidance_and_other_sizes() -> None:
    model, (noisy, times, labels) = small(), given(2)
    wide = noisy.repeat(1, 1, 2, 1)
    with_class, without = model(wide, times, labels), model(wide, times, torch.full_like(labels, 5))
    assert with_class.shape == (2, 6, 8, 6)
    found = guided(model, wide, times, labels, 4.0)
    torch.testing.assert_close(found[:, :3], without[:, :3] + 4 * (with_class[:, :3] - without[:, :3]))


def test_count() -> None:
    """One projection with bias, six vectors a block and two at the end, and no prefix."""
    tokens, adaln = (ModelConfig.model_validate({**FIELDS, "conditioning": x}) for x in ("tokens", "adaln_single"))
    assert (tokens.prefix, adaln.prefix) == (2, 0)
    with torch.device("meta"):
        plain, found = count_parameters(Denoiser(tokens)), count_parameters(Denoiser(adaln))
    d = tokens.width
    assert found == plain + 6 * d * d + 6 * d + 2 * 6 * d + 2 * d


def test_bf16_stays_bf16() -> None:
    model, (noisy, times, labels) = small(), given(2)
    wanted = model(noisy, times, labels)
    found = model.to(torch.bfloat16)(noisy, times, labels)
    assert found.dtype == torch.bfloat16
    assert ((found - wanted).norm() / wanted.norm()) < 3e-2


def test_other_heads_refuse_it() -> None:
    with pytest.raises(ValueError, match="conditioning: adaln_single is of head: denoiser, not of classifier"):
        ModelConfig.model_validate({**FIELDS, "head": "classifier"})

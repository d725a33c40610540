"""The language model against its definition, written out."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lightnet_llm.config import ModelConfig
from lightnet_llm.models import CausalLM, ForwardContext, PlainLayers, count_parameters, initialize
from lightnet_llm.models.layers import padded_size
from lightnet_llm.models.parameters import shard, spec_of, unshard

TINY = {"layers": 2, "width": 24, "heads": 3, "glu_width": 20, "vocab_size": 50, "gate_rank": 5, "tpe_rank": 4}
VARIANTS = [{}, {"tpe": False}, {"lrpe": False}, {"decay": "independent"}, {"norm": "layer"}, {"tie_embeddings": False}]


def build(**changes: object) -> CausalLM:
    config = ModelConfig.model_validate({**TINY, "tpe_init_length": 16, "initializer_std": 0.3, **changes})
    model = CausalLM(config).double()
    initialize(model, 3)
    return model


def norm(x: Tensor, module: torch.nn.Module) -> Tensor:
    if module.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    if module.weight is not None:
        x = x * module.weight.view(x.shape[-2:] if module.weight.numel() != x.shape[-1] else (-1,))
    return (
        x
        if module.bias is None
        else x + module.bias.view(x.shape[-2:] if module.bias.numel() != x.shape[-1] else (-1,))
    )


def definition(model: CausalLM, ids: Tensor) -> Tensor:
    """Logits [N, V] of one sequence by the formulas of model-spec 1 to 4, token by token."""
    config = model.config
    x = model.embedding.weight[ids]
    count = len(ids)
    if model.tpe is not None:
        decay = torch.sigmoid(model.tpe.raw[0])
        gain = model.tpe.beta[0] * (1 - decay)
        y = [sum((gain * decay ** (n - m)).sum(-1) * x[m] for m in range(n + 1)) for n in range(count)]
        x = x + torch.stack(y)
    heads, width = config.heads, config.head_width
    for block in model.layers:
        attention = block.attention
        inside = norm(x, block.attention_norm)
        query, key, value = attention.qkv(inside).view(count, heads, 3, width).unbind(2)
        gate = torch.sigmoid(attention.gate_up(attention.gate_down(inside)))
        mass, values = key, torch.ones_like(key)
        if config.decay == "independent":
            mass = attention.decay_up(attention.decay_down(inside)).view(count, heads, width)
            values = torch.nn.functional.silu(key)
        out = torch.zeros(count, heads, width, dtype=x.dtype)
        for t in range(count):
            total = mass[: t + 1].exp().sum(0)
            for r in range(t + 1):
                weight = torch.nn.functional.silu(query[t]) * mass[r].exp() / total * values[r]
                if attention.lrpe is not None:
                    weight = weight * torch.cos((t - r) * attention.lrpe.theta)
                out[t] += weight.sum(-1, keepdim=True) * value[r]
        x = x + attention.output(norm(out, attention.norm).view(count, -1) * gate)
        inside = norm(x, block.glu_norm)
        x = x + block.glu.down(torch.nn.functional.silu(block.glu.gate(inside)) * block.glu.up(inside))
    head = model.embedding.weight if model.head is None else model.head.weight
    return norm(x, model.norm) @ head.T


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_logits_equal_the_definition(changes: dict[str, object]) -> None:
    model = build(**changes)
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits
    for row in range(2):
        expected = definition(model, ids[row])
        assert (logits[row] - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_packed_documents_equal_each_alone(changes: dict[str, object]) -> None:
    model = build(**changes)
    ids = torch.randint(0, 50, (2, 8))
    bounds = torch.tensor([0, 3, 8, 9, 16], dtype=torch.int32)
    packed = model(ids, ForwardContext(cu_seqlens=bounds)).logits.view(16, -1)
    flat = ids.view(-1)
    for start, end in itertools.pairwise(bounds):
        alone = model(flat[None, start:end]).logits[0]
        assert (packed[start:end] - alone).abs().max() < 1e-10 * alone.abs().max()


def test_documents_do_not_see_each_other() -> None:
    model = build().float()
    bounds = torch.tensor([0, 6, 16], dtype=torch.int32)
    first = torch.randint(0, 50, (1, 16))
    second = first.clone()
    second[0, 2] = (first[0, 2] + 1) % 50
    one, two = (model(ids, ForwardContext(cu_seqlens=bounds)).logits for ids in (first, second))
    assert (one[0, 6:] - two[0, 6:]).abs().max() <= 1e-6 * one[0, 6:].abs().max()
    assert (one[0, 2:6] - two[0, 2:6]).abs().max() > 1e-3
    hidden = torch.randn(1, 16, 24, requires_grad=True)
    context = ForwardContext(cu_seqlens=bounds)
    out = model.tpe(hidden, context)[0]
    for block in model.layers:
        out, _ = block(out, context)
    out[0, 6:].square().sum().backward()
    assert hidden.grad is not None
    assert torch.all(hidden.grad[0, :6] == 0) and torch.any(hidden.grad[0, 6:] != 0)


def test_relative_positions_only() -> None:
    """Left context of the same content moves nothing but the lag: shifted sequences give shifted outputs."""
    model = build(tpe=False)
    ids = torch.randint(0, 50, (1, 12))
    mask = torch.ones(1, 12, dtype=torch.bool)
    shifted = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    padding = torch.cat([torch.zeros(1, 5, dtype=torch.bool), mask], 1)
    plain = model(ids).logits
    padded = model(shifted, ForwardContext(key_mask=padding)).logits
    assert (plain - padded[:, 5:]).abs().max() < 1e-10 * plain.abs().max()


def test_padding_of_vocabulary_and_glu_stays_zero() -> None:
    class Split(PlainLayers):
        """Pads the GLU as sixteen ranks would, on one."""

        def split(self, size: int) -> int:
            return padded_size(size, 16) if size == 20 else size

    config = ModelConfig.model_validate({**TINY, "heads": 3, "width": 48})
    model = CausalLM(config, Split())
    initialize(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (2, 8))).mean().backward()
        optimizer.step()
    assert model.embedding.weight.shape[0] == 128 and torch.all(model.embedding.weight[50:] == 0)
    glu = model.layers[0].glu
    assert glu.gate.weight.shape[0] == 32 and torch.all(glu.gate.weight[20:] == 0)
    assert torch.all(glu.down.weight[:, 20:] == 0) and torch.all(glu.up.weight[20:] == 0)
    assert count_parameters(model) == count_parameters(CausalLM(config))


def test_padded_vocabulary_takes_no_probability() -> None:
    model = build()
    ids, labels = torch.randint(0, 50, (1, 6)), torch.randint(0, 50, (1, 6))
    logits = model(ids).logits
    assert logits.shape[-1] == 128
    expected = -torch.log_softmax(logits[..., :50], -1).gather(-1, labels[..., None])[..., 0]
    assert torch.allclose(model.loss(ids, labels).double(), expected, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_join_to_the_whole(ranks: int, dim: int) -> None:
    model = build()
    parameter = model.layers[0].glu.down.weight if dim else model.layers[0].glu.gate.weight
    spec = spec_of(parameter)
    size = padded_size(spec.shape[dim], ranks) // ranks
    local = tuple(size if axis == dim else length for axis, length in enumerate(spec.shape))
    full = parameter.detach()
    parts = [shard(full, spec, local, rank) for rank in range(ranks)]
    assert all(part.shape == local for part in parts)
    assert torch.equal(unshard(parts, spec.shape, dim), full)


def test_same_seed_same_model_and_names_decide() -> None:
    one, two, other = build(), build(), build(tpe=False)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, dict(two.named_parameters())[name])
        if not name.startswith("tpe"):
            assert torch.equal(parameter, dict(other.named_parameters())[name])


def test_model_files_need_neither_megatron_nor_deepspeed() -> None:
    code = (
        "import sys, lightnet_llm.models; "
        "sys.exit(any(m.split('.')[0] in ('megatron', 'deepspeed', 'transformers') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_norm_behind_the_scan_has_an_epsilon_of_its_own():
    plain, other = (build(norm_eps=1e-4, scan_norm_eps=eps) for eps in (None, 1e-2))
    for model, eps in ((plain, 1e-4), (other, 1e-2)):
        assert {layer.attention.norm.eps for layer in model.layers} == {eps}
        rest = [model.norm, *(norm for layer in model.layers for norm in (layer.attention_norm, layer.glu_norm))]
        assert {norm.eps for norm in rest} == {1e-4}

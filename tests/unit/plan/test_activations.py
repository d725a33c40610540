"""What the planner says is kept for the backward pass is what autograd keeps."""

from typing import Any

import pytest
import torch
from lightnet_kernels import additive_scan

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.plan import activations
from lightnet_llm.plan.activations import Work

from . import saved

pytest.importorskip("triton")

BF16, FP32 = torch.bfloat16, torch.float32


def model(**changes: Any) -> ModelConfig:
    fields = {"layers": 2, "width": 256, "heads": 4, "glu_width": 300, "vocab_size": 1000, "gate_rank": 16}
    return ModelConfig(**{**fields, **changes})


def predicted(work: Work, every: int = 0) -> int:
    """Of a forward pass with loss."""
    again = sum(every > 0 and index % every == 0 for index in range(work.model.layers))
    kept = activations.block(work) * (work.model.layers - again) + activations.recomputed(work) * again
    return (kept + activations.embedding(work) + activations.head(work)).total + activations.loss(work)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("changes", "rows", "length", "tensor"),
    [
        ({}, 2, 300, 1),
        ({}, 1, 64, 2),
        ({}, 3, 65, 4),
        ({}, 2, 4500, 1),  # more than one tile of MD-TPE's states
        ({"lrpe": False}, 2, 129, 2),
        ({"lrpe_learnable": False}, 2, 129, 1),
        ({"lrpe_gradient_scale": 1.0}, 2, 129, 1),
        ({"dropout": 0.1}, 2, 129, 1),
        ({"norm": "layer"}, 2, 129, 2),
        ({"norm": "rms"}, 2, 129, 1),
        ({"tpe": False}, 2, 129, 1),
        ({"tie_embeddings": False}, 2, 129, 2),
        ({"width": 144, "heads": 2}, 2, 129, 2),  # head width 72
        ({"width": 48, "heads": 2, "glu_width": 31}, 1, 1, 2),  # padded GLU
        ({"causal": False}, 2, 300, 2),
        ({"causal": False, "lrpe": False}, 3, 65, 1),
    ],
)
def test_kept_bytes_are_exact(changes: dict[str, Any], rows: int, length: int, tensor: int, dtype: torch.dtype) -> None:
    config = model(**changes)
    work = Work(config, rows, length, tensor, False, dtype.itemsize)
    assert saved.of_model(config, rows, length, dtype, tensor) == predicted(work)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputed_blocks(every: int) -> None:
    config = model(layers=5)
    work = Work(config, 2, 100)
    assert saved.of_model(config, 2, 100, BF16, every=every) == predicted(work, every)


@pytest.mark.parametrize(
    "changes", [{}, {"lrpe": False}, {"dropout": 0.1}, {"norm": "layer"}, {"tie_embeddings": False}]
)
@pytest.mark.parametrize(("length", "tensor", "every"), [(300, 1, 0), (65, 2, 0), (129, 1, 2)])
def test_stage_3_in_bf16(changes: dict[str, Any], length: int, tensor: int, every: int) -> None:
    """The stream and its norms are fp32 there, and products keep their input as it comes."""
    config = model(**changes)
    work = Work(config, 2, length, tensor, wide=4)
    assert saved.of_model(config, 2, length, FP32, tensor, every=every, autocast=True) == predicted(work, every)


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}])
def test_shared_tokens(changes: dict[str, Any]) -> None:
    """One row, so that what is cut and gathered is the row."""
    config = model(**changes)
    work = Work(config, 1, 256, 2, True)
    assert saved.of_model(config, 1, 256, BF16, 2, shared=True) == predicted(work)


@pytest.mark.parametrize("name", ["pile_150m", "pile_1b", "pile_2.9b"])
def test_presets_at_full_size(name: str) -> None:
    from lightnet_llm.config import load_config

    config = load_config(name).model.model_copy(update={"layers": 2})
    assert saved.of_model(config, 8, 2048, BF16) == predicted(Work(config, 8, 2048))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows, length", [(1, 512), (2, 1024), (8, 128)])
@pytest.mark.parametrize(
    "changes",
    [
        {"decay": "independent"},
        {"decay": "independent", "lrpe": False},
        {"decay": "independent", "causal": False},
        {"decay": "independent", "causal": False, "lrpe": False},
    ],
)
def test_scans_in_pytorch(changes: dict[str, Any], rows: int, length: int, dtype: torch.dtype) -> None:
    config = model(**changes)
    heads, width = config.heads, config.head_width
    fused = torch.randn(rows, length, heads, 3, width, dtype=dtype, requires_grad=True)
    theta = torch.rand(heads, width, requires_grad=True) if config.lrpe else None
    decay = torch.randn(rows, length, heads, width, dtype=dtype) if config.decay == "independent" else None
    with saved.Saved([fused, *([] if theta is None else [theta])]) as kept:
        angles = None if theta is None else theta * 0.5 + theta.detach() * 0.5
        query, key, value = (1 * fused).unbind(-2)
        additive_scan(
            query,
            key,
            value,
            theta=angles,
            decay=None if decay is None else decay.requires_grad_(),
            causal=config.causal,
        )
    found = activations._scan(Work(config, rows, length, 1, False, dtype.itemsize)).total
    assert found == pytest.approx(kept.bytes, rel=0.01)


def test_a_ranks_part_is_less() -> None:
    """Tensor parallelism cuts what is inside of layers, sharing the tokens the rest."""
    whole, part = Work(model(), 2, 256), Work(model(), 2, 256, 2)
    shared = Work(model(), 2, 256, 2, True)
    sizes = [activations.block(work).total for work in (whole, part, shared)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] > sizes[0] / 2

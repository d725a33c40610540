"""AdamW over parameter groups; DeepSpeed partitions it."""

from __future__ import annotations

import torch
from torch import nn

from ..config.run import OptimizerConfig
from ..models.parameters import spec_of
from . import ema


def parameter_groups(model: nn.Module, weight_decay: float, learning_rate: float) -> list[dict[str, object]]:
    """Groups by weight decay, by dtype kept and by rate: DeepSpeed flattens a group, so its parameters share one dtype.

    Weight decay applies to matrices only: never to norms, biases, theta and TPE (model-spec section 7).
    """
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            spec = spec_of(parameter)
            groups.setdefault((spec.decay, spec.keep_fp32, spec.rate), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": learning_rate * rate,
            "weight_decay": weight_decay if decay else 0.0,
            "name": ("decay" if decay else "no_decay") + ("_fp32" if fp32 else ""),
        }
        for (decay, fp32, rate), parameters in sorted(groups.items(), reverse=True)
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig, decay: float | None = None) -> torch.optim.Optimizer:
    """torch's fused AdamW, which runs on CPU and CUDA without compiling anything.

    Args:
        decay: of an exponential average of the weights that goes along (:mod:`.ema`), None for none.
    """
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay, config.learning_rate),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    if decay is not None:
        ema.follow(optimizer, decay)
    return optimizer

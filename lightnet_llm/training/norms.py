"""Norms over the whole model in any layout: that of the gradient, and of gradients and weights by kind of parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

from ..models.parameters import spec_of
from ..parallel.layout import Groups


def kind_of(name: str) -> str:
    """``layers.3.attention.qkv.weight`` is of the kind ``layers.attention.qkv``."""
    return ".".join(part for part in name.split(".") if not part.isdigit()).removesuffix(".weight")


def group_norms(model: nn.Module, groups: Groups) -> dict[str, dict[str, float]]:
    """L2 norms ``{"gradient": {kind: norm}, "weight": {kind: norm}}``; every rank calls it, after gradients are reduced.

    Parts of a split parameter add up over tensor-parallel ranks; a parameter that every rank holds counts once.
    """
    mine: dict[str, dict[str, float]] = {"gradient": {}, "weight": {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient, weight = safe_get_full_grad(parameter), safe_get_full_fp32_param(parameter)
        if weight is None:  # no ZeRO: the parameter is its own master
            weight = parameter.detach()
        counted = spec_of(parameter).partition_dim is not None or groups.place["tensor"] == 0
        if getattr(parameter, "ds_pipe_replicated", False) or not counted:
            continue
        for what, tensor in (("gradient", gradient), ("weight", weight)):
            if tensor is not None:
                kind = kind_of(name)
                mine[what][kind] = mine[what].get(kind, 0.0) + float(tensor.float().square().sum())
    parts: list[Any] = [None] * dist.get_world_size(groups.model_group)
    dist.all_gather_object(parts, mine, group=groups.model_group)
    total: dict[str, dict[str, float]] = {"gradient": {}, "weight": {}}
    for part in parts:
        for what, kinds in part.items():
            for kind, square in kinds.items():
                total[what][kind] = total[what].get(kind, 0.0) + square
    return {what: {kind: math.sqrt(square) for kind, square in kinds.items()} for what, kinds in total.items()}


def reduce_norm_once(optimizer: Any) -> None:
    """Let pipeline stages hold different groups of parameters: the gradient norm is reduced over them once a step.

    DeepSpeed (0.19.8) reduces it once for each group of the optimiser: where one stage has more groups than another, such
    as TPE's beside those of the blocks, ranks would wait for reductions that others never make. (:mod:`.bf16` reduces it
    once by itself.)
    """
    if hasattr(optimizer, "scaled_global_norm"):  # ZeRO 1
        of_this_rank = optimizer.scaled_global_norm

        def scaled_global_norm(*args: Any, **kwargs: Any) -> Tensor:
            optimizer._model_parallel_all_reduce = lambda tensor, op: None
            try:
                norm = of_this_rank(*args, **kwargs)
            finally:
                del optimizer._model_parallel_all_reduce
            square = torch.where(norm < 0, float("inf"), norm.double()).square()  # -1 stands for what is not finite
            optimizer._model_parallel_all_reduce(square, dist.ReduceOp.SUM)
            total = square.sqrt().to(norm.dtype)
            return torch.where(torch.isfinite(total), total, -1.0)

        optimizer.scaled_global_norm = scaled_global_norm

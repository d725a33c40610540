"""From the universal form into a DeepSpeed engine of any layout and ZeRO stage: values, masters, moments, step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state
from torch import Tensor, nn

from ..errors import UserError
from ..models.parameters import spec_of
from .native import FP32, STEP
from .universal import UniversalForm


@torch.no_grad()
def restore(engine: Any, zero_stage: int, form: UniversalForm) -> None:
    """Set every parameter of ``engine.module`` and all optimiser state; every rank calls it.

    Args:
        engine: a fresh DeepSpeed engine, plain or pipeline.
        zero_stage: the stage it runs.
        form: where to read.
    """
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise UserError(
            "a run cannot move to optimiser states on NVMe (deepspeed.zero_optimization.offload_optimizer); resume it "
            "without, or on the layout that wrote its checkpoint",
            shared=True,
        )
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    for parameter in [parameter for parameter in names if not parameter.requires_grad]:
        _restore_frozen(parameter, names.pop(parameter), form)  # the optimiser does not know it
    if zero_stage == 0:
        _restore_plain(engine.optimizer, names, form)
    elif zero_stage == 3:
        _restore_zero3(engine.optimizer, names, form)
    else:
        _restore_zero12(engine.optimizer, names, form)


def _step(form: UniversalForm, name: str, like: Tensor) -> Tensor:
    return torch.tensor(form.step(name), dtype=torch.float32, device=like.device)  # as torch's fused AdamW keeps it


def _restore_frozen(parameter: nn.Parameter, name: str, form: UniversalForm) -> None:
    if not hasattr(parameter, "ds_tensor"):
        parameter.copy_(form.part(name, FP32, spec_of(parameter), tuple(parameter.shape)))
        return
    piece, flat = parameter.ds_tensor, form.part(name, FP32, spec_of(parameter), tuple(parameter.ds_shape)).flatten()
    first = dist.get_rank(parameter.ds_process_group) * piece.numel()
    mine = flat[first : first + piece.numel()]
    piece.view(-1)[: mine.numel()].copy_(mine)


def _restore_plain(optimizer: Any, names: dict[nn.Parameter, str], form: UniversalForm) -> None:
    for parameter, name in names.items():
        spec, shape = spec_of(parameter), tuple(parameter.shape)
        parameter.copy_(form.part(name, FP32, spec, shape))
        kept = [key for key in form.keys(name) if key != FP32]
        moments = {key: torch.empty_like(parameter).copy_(form.part(name, key, spec, shape)) for key in kept}
        optimizer.state[parameter] = {STEP: _step(form, name, parameter), **moments}


def _restore_zero12(optimizer: Any, names: dict[nn.Parameter, str], form: UniversalForm) -> None:
    """Each group's partition is one flat fp32 vector; DeepSpeed's mapping says which piece of a parameter lies where."""
    groups = optimizer.bf16_groups if hasattr(optimizer, "bf16_groups") else optimizer.bit16_groups
    for group, parameters in zip(optimizer.optimizer.param_groups, groups, strict=True):
        flat = group["params"][0]
        moments = {key: torch.zeros_like(flat) for key in form.keys(names[parameters[0]]) if key != FP32}
        targets = {FP32: flat.data, **moments}
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:  # lies wholly in other ranks' partitions
                continue
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            for key, target in targets.items():
                part = form.part(names[parameter], key, spec_of(parameter), tuple(parameter.shape))
                target.narrow(0, here.start, here.numel).copy_(part.flatten().narrow(0, there.start, there.numel))
        step = _step(form, names[parameters[0]], flat)
        optimizer.optimizer.state[flat] = {STEP: step, **moments}
    optimizer.update_lp_params()


def _restore_zero3(optimizer: Any, names: dict[nn.Parameter, str], form: UniversalForm) -> None:
    """Each parameter is cut evenly over its data-parallel ranks, padded at the end."""
    optimizer.checkpoint_event_prologue()  # no parameter stays gathered
    any_name = next(iter(names.values()))  # the optimiser has stepped all parameters alike
    keys = form.keys(any_name)
    for flat in optimizer.fp32_partitioned_groups_flat:
        moments = {key: torch.zeros_like(flat) for key in keys if key != FP32}
        optimizer.optimizer.state[flat] = {STEP: _step(form, any_name, flat), **moments}
    for parameter, name in names.items():
        piece = parameter.ds_tensor
        first = dist.get_rank(parameter.ds_process_group) * piece.numel()
        for key in keys:
            flat = form.part(name, key, spec_of(parameter), tuple(parameter.ds_shape)).flatten()
            local = torch.zeros(piece.numel(), dtype=torch.float32)
            mine = flat[first : first + piece.numel()]
            local[: mine.numel()] = mine
            if key == FP32:
                safe_set_local_fp32_param(parameter, local)
                piece.copy_(local.view(piece.shape))
            else:
                safe_set_local_optimizer_state(parameter, local, key)
    optimizer.checkpoint_event_epilogue()

"""Updates of lightnet_llm.training.bf16 beside DeepSpeed's own, one process: prints what differs most, as JSON."""

import copy
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from lightnet_llm.launch.hosts import free_port
from lightnet_llm.parallel.layout import prepare_backend
from lightnet_llm.training.bf16 import Bf16Optimizer

SHAPES = (((3, 5), (7,), (4, 4)), ((6,), (2, 3, 2)))


def build(weights: list[list[Tensor]], clip: float) -> tuple[BF16_Optimizer, list[list[nn.Parameter]]]:
    parameters = [[nn.Parameter(tensor.clone()) for tensor in group] for group in weights]
    groups = [{"params": list(group), "weight_decay": 0.1 * index} for index, group in enumerate(parameters)]
    names = {p: str(index) for index, p in enumerate(p for group in parameters for p in group)}
    optimizer = BF16_Optimizer(
        torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), fused=True),
        names,
        SimpleNamespace(enabled=True, immediate_grad_update=True),
        clip_grad=clip,
        dp_process_group=dist.group.WORLD,
        grad_acc_dtype=torch.float32,
    )
    return optimizer, parameters


def steps(optimizer: Any, parameters: list[list[nn.Parameter]]) -> list[dict[str, Any]]:
    """Six steps of two micro-batches; one parameter has no gradient in the third, another is infinite in the fourth."""
    generator, kept = torch.Generator().manual_seed(1), []
    for step in range(6):
        for micro in range(2):
            loss = torch.zeros(())
            for group in parameters:
                for index, p in enumerate(group):
                    factor = torch.randn(p.shape, generator=generator) * (index + 1 if step != 5 else 1e-3)
                    if step == 3 and micro == 1:
                        factor = torch.full_like(factor, float("inf"))
                    if not (step == 2 and index == 1):
                        loss = loss + (p.float() * factor).sum()
            loss.backward()
        optimizer.get_grads_for_reduction()
        kept.append({"gradients": [g.clone() for g in optimizer.fp32_groups_gradients_flat]})
        optimizer.step()
        optimizer.zero_grad()
        masters = optimizer.fp32_groups_flat_partition
        states = [optimizer.optimizer.state.get(m, {}) for m in masters]
        kept[-1] |= {
            "masters": [m.detach().clone() for m in masters],
            "weights": [p.detach().float().clone() for group in parameters for p in group],
            "moments": [copy.deepcopy({k: v for k, v in state.items() if torch.is_tensor(v)}) for state in states],
            "norm": torch.as_tensor(optimizer._global_grad_norm),
        }
    return kept


def main() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    prepare_backend()
    generator = torch.Generator().manual_seed(0)
    weights = [[torch.randn(shape, generator=generator).bfloat16() for shape in group] for group in SHAPES]
    found: dict[str, Any] = {}
    for clip, held_back in ((0.0, None), (0.5, 20), (1e4, 0)):
        theirs, ours = build(weights, clip), build(weights, clip)
        engine = SimpleNamespace(optimizer=ours[0], pipeline_parallelism=False, sequence_parallel_size=1)
        Bf16Optimizer.take_over(engine, lambda square: (square.sqrt(), (~square.isfinite()).float()))
        if held_back is not None:
            ours[0].held_back = held_back
        off = {"gradients": 0.0, "masters": 0.0, "moments": 0.0, "weights": 0.0, "norm": 0.0}
        still = True
        before: list[Tensor] = []
        for step, (a, b) in enumerate(zip(steps(*theirs), steps(*ours), strict=True)):
            for name in ("gradients", "masters", "weights"):
                for x, y in zip(a[name], b[name], strict=True):
                    if step != 3 or name != "gradients":
                        off[name] = max(off[name], float((x - y).abs().max()))
            for x, y in zip(a["moments"], b["moments"], strict=True):
                for key in x:
                    off["moments"] = max(off["moments"], float((x[key] - y[key]).abs().max()))
            if step != 3:
                off["norm"] = max(off["norm"], abs(float(b["norm"] / a["norm"]) - 1))
            else:
                still = all(torch.equal(x, y) for x, y in zip(before, b["masters"], strict=True))
            before = b["masters"]
        found[str(clip)] = {**off, "still": still, "steps": float(b["moments"][0]["step"])}
    print(json.dumps(found), file=sys.__stdout__, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

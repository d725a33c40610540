"""DeepSpeed's optimiser for bf16 weights (ZeRO 1, gradients and masters in fp32) with a step that never waits for the device.

The host of DeepSpeed's own step reads the gradient norm to know whether to clip and whether to skip, and all that time the
device has nothing to do: about ten milliseconds a step on an H200. Here both are tensors that torch's fused AdamW takes
(``grad_scale`` and ``found_inf``, as from a gradient scaler), so that the host goes on to the next step. Fewer passes over
the gradients besides: the first micro-batch is copied to the fp32 buffer, not added to zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

CLIP_EPS = 1e-6  # DeepSpeed's, beside the norm


class Bf16Optimizer(BF16_Optimizer):
    """See the module. Made from DeepSpeed's by :meth:`take_over`.

    Attributes:
        judge: given the global gradient norm, a scalar on the device, says whether the step must be skipped (1.0) or not
            (0.0), as a fp32 scalar there.
    """

    judge: Callable[[Tensor], Tensor]

    @classmethod
    def take_over(cls, optimizer: Any, judge: Callable[[Tensor], Tensor]) -> None:
        """Make DeepSpeed's optimiser one of these, with its state."""
        optimizer.__class__ = cls
        optimizer.judge = judge

    @torch.no_grad()
    def _update_hp_grad(self, lp: Any, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
        if lp.grad is None:
            return
        into, seen = self.fp32_groups_gradients[group_idx][param_idx], self.fp32_groups_has_gradients[group_idx]
        found = lp.grad.detach().view(into.shape)
        if seen[param_idx]:
            into.add_(found)
        else:
            into.copy_(found)
        lp._hp_grad = into
        seen[param_idx] = True
        if clear_lp_grads:
            lp.grad.zero_()

    @torch.no_grad()
    def get_grads_for_reduction(self) -> Any:
        """The flat buffers, in which parameters without a gradient count zero."""
        for gradients, seen in zip(self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True):
            for gradient, known in zip(gradients, seen, strict=True):
                if not known:
                    gradient.zero_()
        return super().get_grads_for_reduction()

    def clear_hp_grads(self) -> None:
        """What is in the buffers is of an earlier step; it is overwritten, or zeroed before it is reduced."""
        for seen in self.fp32_groups_has_gradients:
            seen[:] = [False] * len(seen)

    def global_norm(self) -> Tensor:
        """L2 norm of the reduced gradients over all model-parallel ranks, a fp32 scalar on the device."""
        found, _ = self.get_grads_for_norm()
        norms = torch._foreach_norm(found) if found else [self.fp32_groups_gradients_flat[0].new_zeros(())]
        square = torch.stack(norms).square().sum()
        group = self.mpu.get_model_parallel_group() if self.mpu is not None else None
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
        return square.sqrt()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update, or none where the judge says so; moments and their count are then left alone too."""
        norm = self.global_norm()
        self._global_grad_norm = norm
        self.optimizer.found_inf = self.judge(norm)
        if self.clip_grad > 0:
            self.optimizer.grad_scale = ((norm + CLIP_EPS) / self.clip_grad).clamp(min=1.0)
        for master, gradient in zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        ):
            master.grad = gradient
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()
        self.update_lp_params()
        self.clear_hp_grads()

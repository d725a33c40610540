"""DeepSpeed's optimiser for bf16 weights (ZeRO 1, gradients and masters in fp32) with a step that never waits for the device.

The host of DeepSpeed's own step reads the gradient norm to know whether to clip and whether to skip, and all that time the
device has nothing to do. Here both are tensors that torch's fused AdamW takes (``grad_scale`` and ``found_inf``, as from a
gradient scaler), so that the host goes on to the next step.

Fewer passes over the gradients besides. The first micro-batch is copied to the fp32 buffer, not added to zeros, and many
parameters at once, which takes less than half as long. Ranks add their buffers up in fp32, each its own part; DeepSpeed rounds
the sums to bf16 for it, on a single rank too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor

from ..config.deepspeed import COPIED_AT_ONCE, NO_CLIP

CLIP_EPS = 1e-6  # DeepSpeed's, beside the norm


class Bf16Optimizer(BF16_Optimizer):
    """See the module. Made from DeepSpeed's by :meth:`take_over`.

    Attributes:
        judge: given the squares of this rank's part of the gradients, summed to a fp32 scalar on the device, gives the
            global gradient norm and whether the step must be skipped (1.0) or not (0.0), fp32 scalars there.
        average_over: by how much ranks' sums are divided.
        held_back: how many numbers of bf16 gradients may wait to be copied together.
        waiting: those gradients, each with its place in the fp32 buffer; held: how many numbers they are.
    """

    judge: Callable[[Tensor], tuple[Tensor, Tensor]]
    average_over: float
    held_back: int
    waiting: list[tuple[Tensor, Tensor]]
    held: int

    @classmethod
    def take_over(cls, engine: Any, judge: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """Make the optimiser of DeepSpeed's engine one of these, with its state."""
        optimizer = engine.optimizer
        optimizer.__class__ = cls
        optimizer.judge = judge
        optimizer.held_back, optimizer.waiting, optimizer.held = COPIED_AT_ONCE, [], 0
        # Pipelines read tied weights' gradients before they are reduced; without the second, gradients are zeroed in place.
        if engine.pipeline_parallelism or not optimizer.immediate_grad_update:
            optimizer.held_back = 0
        ranks = dist.get_world_size(optimizer.dp_process_group)
        # The plain engine counts ranks that share a sample as one.
        optimizer.average_over = ranks if engine.pipeline_parallelism else ranks / engine.sequence_parallel_size

    @torch.no_grad()
    def _update_hp_grad(self, lp: Any, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
        if lp.grad is None:
            return
        into, seen = self.fp32_groups_gradients[group_idx][param_idx], self.fp32_groups_has_gradients[group_idx]
        found = lp.grad.detach().view(into.shape)
        if seen[param_idx]:
            self.copy_waiting()  # this one among them
            into.add_(found)
        elif found.dtype == into.dtype:
            into.copy_(found)
        else:  # of one dtype, or they are copied one by one
            self.waiting.append((into, found))
            self.held += found.numel()
        lp._hp_grad = into
        seen[param_idx] = True
        if clear_lp_grads or self.held > self.held_back:
            self.copy_waiting()
        if clear_lp_grads:
            lp.grad.zero_()

    def copy_waiting(self) -> None:
        if self.waiting:
            places, gradients = zip(*self.waiting, strict=True)
            self.forget_waiting()
            torch._foreach_copy_(places, gradients)

    def forget_waiting(self) -> None:
        self.waiting.clear()
        self.held = 0

    @torch.no_grad()
    def get_grads_for_reduction(self) -> Any:
        """Averages gradients over data-parallel ranks, each rank its part; leaves nothing for DeepSpeed to reduce."""
        self.copy_waiting()
        for gradients, seen in zip(self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True):
            for gradient, known in zip(gradients, seen, strict=True):
                if not known:  # what is there is of an earlier step
                    gradient.zero_()
        ranks = dist.get_world_size(self.dp_process_group)
        for whole, part in zip(self.fp32_groups_gradients_flat, self.fp32_groups_gradient_flat_partition, strict=True):
            if ranks > 1 and whole.is_cuda:
                dist.reduce_scatter_tensor(part, whole, group=self.dp_process_group)  # in place
            elif ranks > 1:
                dist.all_reduce(whole, group=self.dp_process_group)
            if self.average_over != 1:
                part.mul_(1 / self.average_over)
        return [], {}

    @functools.cached_property
    def counted(self) -> list[Tensor]:
        """Of this rank's part of the gradients, what counts for the norm: of a parameter that several ranks hold, one."""
        found = []
        first = self.mpu is None or bwc_tensor_model_parallel_rank(mpu=self.mpu) == 0
        for part, parameters in zip(self.fp32_groups_gradient_flat_partition, self.bf16_groups, strict=True):
            for parameter in parameters:
                copy = getattr(parameter, PIPE_REPLICATED, False)
                if parameter._hp_mapping is None or copy or not (first or is_model_parallel_parameter(parameter)):
                    continue
                here = parameter._hp_mapping.hp_fragment_address
                found.append(part.narrow(0, here.start, here.numel))
        return found or [self.fp32_groups_gradient_flat_partition[0].new_zeros(1)]

    def clear_hp_grads(self) -> None:
        """What stays in the buffers is overwritten, or zeroed before it is reduced."""
        self.forget_waiting()
        for seen in self.fp32_groups_has_gradients:
            seen[:] = [False] * len(seen)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update, or none where the judge says so; moments and their count are then left alone too."""
        norm, skipped = self.judge(torch.stack(torch._foreach_norm(self.counted)).square().sum())
        self._global_grad_norm = norm
        self.optimizer.found_inf = skipped
        clips = 0 < self.clip_grad < NO_CLIP
        self.optimizer.grad_scale = ((norm + CLIP_EPS) / self.clip_grad).clamp(min=1.0) if clips else None
        for master, gradient in zip(
            self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
        ):
            master.grad = gradient
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()
        self.update_lp_params()
        self.clear_hp_grads()

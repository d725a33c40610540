"""megatron-core's tensor-parallel layers behind the interface of :class:`lightnet_llm.models.layers.PlainLayers`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from ..models.layers import PlainLayers


class ColumnLinear(ColumnParallelLinear):
    """Returns the product alone; its input's gradient is summed once, by ``enter``."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled(input_.device.type):  # megatron-core's own backward knows autocast on CUDA alone
            return F.linear(input_, self.weight)
        return super().forward(input_, *args, **kwargs)[0]


class RowLinear(RowParallelLinear):
    """Returns the sum alone."""

    def forward(self, input_: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input_.device.type):
            return reduce_from_tensor_model_parallel_region(F.linear(input_, self.weight), group=self.tp_group)
        return super().forward(input_.contiguous())[0]


class MegatronLayers(PlainLayers):
    """Layers split over the ranks of ``group``. Initial values come from the models' own declarations."""

    def __init__(self, group: dist.ProcessGroup, vocab_multiple: int = 128):
        super().__init__(vocab_multiple)
        self.group = group
        self.tensor_parallel = dist.get_world_size(group)
        self.tensor_rank = dist.get_rank(group)
        self.megatron = ModelParallelConfig(
            tensor_model_parallel_size=self.tensor_parallel,
            use_cpu_initialization=True,
            perform_initialization=False,
        )

    def enter(self, x: Tensor) -> Tensor:
        return copy_to_tensor_model_parallel_region(x, group=self.group)

    def gather_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        return gather_from_tensor_model_parallel_region(logits.contiguous(), group=self.group)[..., :vocab_size]

    def _column(self, in_features: int, out_features: int) -> nn.Module:
        return ColumnLinear(
            in_features,
            out_features,
            config=self.megatron,
            init_method=lambda weight: weight,
            bias=False,
            disable_grad_reduce=True,
            tp_group=self.group,
        )

    def _row(self, in_features: int, out_features: int) -> nn.Module:
        return RowLinear(
            in_features,
            out_features,
            config=self.megatron,
            init_method=lambda weight: weight,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=self.group,
        )

    def _embedding(self, rows: int, width: int) -> nn.Module:
        return VocabParallelEmbedding(
            rows, width, init_method=lambda weight: weight, config=self.megatron, tp_group=self.group
        )

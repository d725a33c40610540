"""megatron-core's tensor-parallel layers behind the interface of :class:`lightnet_llm.models.layers.PlainLayers`."""

from __future__ import annotations

from collections import OrderedDict
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
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from ..models.layers import PlainLayers
from ..models.parameters import spec_of


class ColumnLinear(ColumnParallelLinear):
    """Returns the product alone; its input's gradient is summed once, by ``enter``."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled(input_.device.type):  # megatron-core's own backward knows autocast on CUDA alone
            return F.linear(input_, self.weight)
        return super().forward(input_, *args, **kwargs)[0]


class RowLinear(RowParallelLinear):
    """Returns the sum alone: of all tokens, or of this rank's where ranks share them."""

    shares_tokens = False

    def forward(self, input_: Tensor) -> Tensor:
        if self.shares_tokens:
            product = F.linear(input_, self.weight)
            return reduce_scatter_to_sequence_parallel_region(product[0], group=self.tp_group)[None]
        if torch.is_autocast_enabled(input_.device.type):
            return reduce_from_tensor_model_parallel_region(F.linear(input_, self.weight), group=self.tp_group)
        return super().forward(input_.contiguous())[0]


class MegatronLayers(PlainLayers):
    """Layers split over the ranks of ``group``. Initial values come from the models' own declarations.

    Args:
        share_tokens: whether ranks hold a share of the tokens each where a model works token by token (Megatron's
            sequence parallelism): activations are then [1, tokens / ranks, width], in order of ranks.
    """

    products = (nn.Linear, ColumnLinear)

    def __init__(self, group: dist.ProcessGroup, vocab_multiple: int = 128, share_tokens: bool = False):
        super().__init__(vocab_multiple)
        self.group = group
        self.recordings = OrderedDict()
        self.tensor_parallel = dist.get_world_size(group)
        self.tensor_rank = dist.get_rank(group)
        self.shares = share_tokens and self.tensor_parallel > 1
        if self.shares:
            self.token_shard = (self.tensor_rank, self.tensor_parallel)
        self.megatron = ModelParallelConfig(
            tensor_model_parallel_size=self.tensor_parallel,
            use_cpu_initialization=True,
            perform_initialization=False,
        )

    def enter(self, x: Tensor) -> Tensor:
        if self.shares:
            return gather_from_sequence_parallel_region(x[0], group=self.group)[None]
        return copy_to_tensor_model_parallel_region(x, group=self.group)

    def share_tokens(self, x: Tensor) -> Tensor:
        if not self.shares:
            return x
        # Not a view: ranks record what they compute at the same calls if it is aligned alike.
        return scatter_to_sequence_parallel_region(x[0], group=self.group)[None].clone()

    def sum_shared_gradients(self, model: nn.Module) -> None:
        for parameter in model.parameters() if self.shares else ():
            if spec_of(parameter).per_token and parameter.requires_grad:
                parameter.register_hook(self._sum)

    def _sum(self, grad: Tensor) -> Tensor:
        """Sum over the ranks, made in float32 where gradients are narrower."""
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total.to(grad.dtype)

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
        layer = RowLinear(
            in_features,
            out_features,
            config=self.megatron,
            init_method=lambda weight: weight,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=self.group,
        )
        layer.shares_tokens = self.shares
        return layer

    def _embedding(self, rows: int, width: int) -> nn.Module:
        return VocabParallelEmbedding(
            rows, width, init_method=lambda weight: weight, config=self.megatron, tp_group=self.group
        )

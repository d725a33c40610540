"""The LightNet block: attention and gated linear unit, each on a normed residual stream (model-spec section 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightnet_kernels import recordable, recorded, swiglu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config.model import ModelConfig
from .attention import LightNetAttention
from .context import ForwardContext
from .dropout import drop_path, dropout
from .layers import PlainLayers
from .norms import Norm, ResidualNorm


class GatedLinearUnit(nn.Module):
    """GLU(x) = (silu(x W1) * (x W2)) W3, no biases. A width that the ranks do not divide is padded with zeros."""

    def __init__(self, config: ModelConfig, layers: PlainLayers):
        super().__init__()
        std = config.initializer_std
        self.layers_set = layers
        self.gate = layers.column(config.width, config.glu_width, std)
        self.up = layers.column(config.width, config.glu_width, std)
        self.down = layers.row(config.glu_width, config.width, std / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, width] to the same."""
        inside = self.layers_set.enter(x)
        return self.down(swiglu(self.gate(inside), self.up(inside)))


def _gather(module: nn.Module, tensors: list[Tensor], kinds: list[Any]) -> bool:
    """Adds all parameters and buffers in order, and modules' types; false where a hook waits for a module's call."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    kinds.append(type(module))
    tensors += [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    return all(_gather(child, tensors, kinds) for child in module._modules.values() if child is not None)


class Block(nn.Module):
    """h = x + LNA(norm(x)); out = h + GLU(norm(h))."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, index: int):
        super().__init__()
        self.index, self.dropout = index, config.dropout
        self.drop_path = config.drop_path * index / max(config.layers - 1, 1)
        self.causal, self.layers_set = config.causal, layers
        self.key = repr((config, type(layers)))
        self.recompute = False  # whether training computes activations again in the backward pass, to save memory
        self.attention_norm = Norm(config.norm, config.width, config.norm_eps)
        self.attention = LightNetAttention(config, layers)
        self.glu_norm = ResidualNorm(config.norm, config.width, config.norm_eps)
        self.glu = GatedLinearUnit(config, layers)

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """[B, N, width] to the same, and the scan state after the last token (None unless asked for)."""
        if not return_state and self._recordable(x, context, state):
            return self._recorded(x, context), None
        if self.recompute and self.training and not return_state:
            return checkpoint(self._run, x, context, state, False, use_reentrant=False)
        return self._run(x, context, state, return_state)

    def _recordable(self, x: Tensor, context: ForwardContext, state: Any) -> bool:
        """Whether the steps of this block follow from what `recorded` looks at."""
        drops = context.dropout is not None and (self.dropout > 0 or self.drop_path > 0)
        alone = context.exchange is None and self.layers_set.tensor_parallel == 1
        packed = context.cu_seqlens is not None and not self.causal  # bounds are arguments of operators
        return alone and state is None and not (context.decode or drops or packed) and recordable(x)

    def _recorded(self, x: Tensor, context: ForwardContext) -> Tensor:
        inputs: list[Tensor] = [x]
        kinds: list[Any] = [self.key]
        if not _gather(self, inputs, kinds):
            return self._run(x, context, None, False)[0]

        def run(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
            return self._run(x, replace(context, cu_seqlens=cu_seqlens), None, False)[0]

        extra = [y for y in (context.coordinates, context.key_mask) if y is not None]
        kinds += [context.coordinates is None, context.key_mask is None]
        again = self.recompute and self.training
        return recorded(run, [*inputs, *extra], [context.cu_seqlens], tuple(kinds), again)

    def _run(self, x: Tensor, context: ForwardContext, state: Any, return_state: bool) -> tuple[Tensor, Any]:
        place = 2 * self.index + 1  # place 0 is the embedding
        y, after = self.attention(self.attention_norm(x), context, state, return_state)
        x, inside = self.glu_norm(x, self._dropped(y, context, place))
        return x + self._dropped(self.glu(inside), context, place + 1), after

    def _dropped(self, branch: Tensor, context: ForwardContext, place: int) -> Tensor:
        branch = dropout(branch, self.dropout, context.dropout, place)
        return drop_path(branch, self.drop_path, context.dropout, place)

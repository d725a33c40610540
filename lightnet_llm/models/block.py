"""The LightNet block: attention and gated linear unit, each on a normed residual stream (model-spec section 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightnet_kernels import gated_add, swiglu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config.model import ModelConfig
from .attention import LightNetAttention
from .context import ForwardContext
from .dropout import drop_path, dropout
from .layers import PlainLayers
from .modulation import modulation_table
from .norms import Norm, ResidualNorm
from .recorded import hooked, replayed


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
        gate, up = self.layers_set.pair(self.layers_set.enter(x), self.gate, self.up)
        return self.down(swiglu(gate, up))


class Block(nn.Module):
    """h = x + LNA(norm(x)); out = h + GLU(norm(h)). With ``conditioning: adaln_single`` shifted, scaled and gated by
    ``context.modulation`` plus the block's table (see `modulation`)."""

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
        self.table = modulation_table(6, config.width) if config.conditioning == "adaln_single" else None

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """[B, N, width] to the same, and the scan state after the last token (None unless asked for)."""
        again = self.recompute and self.training and not return_state
        packed = context.cu_seqlens is not None and not self.causal  # where bounds are arguments of operators
        if not (packed or return_state or context.exchange) and state is None and self._repeats(context):
            whole = self._whole(x, context, again)
            if whole is not None:
                return whole, None
        if again:
            if context.exchange is not None:
                context = replace(context, exchange=context.exchange.again())
            return checkpoint(self._run, x, context, state, False, {}, use_reentrant=False)
        return self._run(x, context, state, return_state)

    def _repeats(self, context: ForwardContext) -> bool:
        """Whether a block's steps are those of another."""
        drops = context.dropout is not None and (self.dropout > 0 or self.drop_path > 0)
        return not drops and not context.decode

    def _whole(self, x: Tensor, context: ForwardContext, again: bool) -> Tensor | None:
        def run(x: Tensor, *others: Any) -> Tensor:
            given = replace(context, modulation=others[0] if modulated else None, cu_seqlens=others[-1])
            return self._run(x, given, None, False)[0]

        modulated = context.modulation is not None
        inputs = [x] if context.modulation is None else [x, context.modulation]
        others = [y for y in (context.coordinates, context.key_mask) if y is not None]
        key = (self.key, context.coordinates is None, context.key_mask is None)
        return replayed(run, [self], inputs, others, [context.cu_seqlens], key, again, store=self.layers_set.recordings)

    def _run(
        self,
        x: Tensor,
        context: ForwardContext,
        state: Any,
        return_state: bool,
        decided: dict[Any, Any] | None = None,
    ) -> tuple[Tensor, Any]:
        place, attention = 2 * self.index + 1, self.attention  # place 0 is the embedding
        parts = context.exchange is not None and self._repeats(context)

        def start(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
            return attention.project(self.attention_norm(x, *vectors))

        def end(x: Tensor, out: Tensor, gate: Tensor, *vectors: Tensor) -> Tensor:
            x, inside = self.glu_norm(x, self._dropped(attention.finish(out, gate), context, place), *vectors[:3])
            branch = self._dropped(self.glu(inside), context, place + 1)
            return gated_add(x, branch, vectors[3]) if vectors else x + branch

        def part(run: Any, modules: list[nn.Module], *inputs: Tensor) -> Any:
            name = (self.key, run.__name__)
            if not parts:
                return run(*inputs)
            found = replayed(run, modules, inputs, [], [], name, decided=decided, store=self.layers_set.recordings)
            return run(*inputs) if found is None else found

        def gate(low: Tensor) -> Tensor:
            found: Tensor = part(attention.gate, [attention.gate_up], low)
            return found

        vectors = self._vectors(context)
        other = type(self.attention_norm) is not Norm or hooked(self.attention_norm)
        if vectors or context.exchange is not None or other:
            projections = part(start, [self.attention_norm, *attention.projections], x, *vectors[:2])
        else:
            x, normed = self.attention_norm.beside(x)
            projections = attention.project(normed)
            del normed
        out, gated, after = attention.mix(projections, gate, context, state, return_state)
        del projections  # not held through the rest where no gradient needs them
        modules = [attention.norm, attention.output, self.glu_norm, self.glu]
        return part(end, modules, x, out, gated, *vectors[2:]), after

    def _vectors(self, context: ForwardContext) -> tuple[Tensor, ...]:
        """Shift and scale of the attention's norm, gate of the attention, shift, scale and gate of the GLU, [B, width] each."""
        if self.table is None:
            return ()
        assert context.modulation is not None
        found: tuple[Tensor, ...] = (context.modulation + self.table).unbind(1)
        return found

    def _dropped(self, branch: Tensor, context: ForwardContext, place: int) -> Tensor:
        branch = dropout(branch, self.dropout, context.dropout, place)
        return drop_path(branch, self.drop_path, context.dropout, place)

"""The causal language model: embedding, TPE, blocks, norm, head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ..config.model import ModelConfig
from .backbone import Backbone
from .context import ForwardContext, ModelState
from .dropout import dropout
from .layers import PlainLayers
from .tpe import ToeplitzEncoding


class CausalLMOutput(NamedTuple):
    """logits [B, N, vocabulary slice of this rank], or with labels the mean loss; state when asked for."""

    logits: Tensor | None
    state: ModelState | None
    loss: Tensor | None = None


class CausalLM(Backbone):
    """LightNet language model; not causal, the same parts make the masked language model.

    Parameter names (``embedding``, ``tpe``, ``layers.I``, ``norm``, ``head``) are the one naming scheme of the project: the
    pipeline engine builds the same parts under the same names.
    """

    def __init__(self, config: ModelConfig, layers: PlainLayers | None = None):
        layers = layers or PlainLayers()
        super().__init__(config, layers, layers.embedding(config.vocab_size, config.width, config.initializer_std))
        self.head = None if config.tie_embeddings else build_head(config, layers)

    def embed(
        self, input_ids: Tensor, context: ForwardContext, state: ModelState | None = None, return_state: bool = False
    ) -> tuple[Tensor, object]:
        """Token ids [B, N] to activations: [1, B*N, width] with segments, else [B, N, width]; and TPE's state."""
        if context.cu_seqlens is not None:
            input_ids = input_ids.reshape(1, -1)
        parts = self.embedding, self.tpe, self.layers_set
        return embed(*parts, self.config, input_ids, context, state and state.tpe, return_state)

    def logits(self, hidden: Tensor) -> Tensor:
        """Activations to this rank's slice of the logits over the padded vocabulary."""
        return project(hidden, self._head_weight(), self.norm, self.layers_set)

    def nll(self, hidden: Tensor, labels: Tensor, reduction: str = "none") -> Tensor:
        """Activations [B, N, width] to the negative log likelihood in nats, fp32, of as many labels; see :func:`head_loss`."""
        return head_loss(
            hidden, self._head_weight(), self.norm, self.layers_set, labels, self.config.vocab_size, reduction
        )

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        input_ids: Tensor,
        context: ForwardContext | None = None,
        labels: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> CausalLMOutput:
        """Next-token logits, or with labels their mean loss, for which all logits are never held.

        Args:
            input_ids: integer [B, N].
            context: segments, padding, dropout; None for B independent full rows.
            labels: integer [B, N]; those below 0 do not count.
            state: what the model has read before these tokens.

        Returns:
            logits [B, N, V / TP], activations' dtype, and the state after the last token when asked for. With labels,
            in place of logits, the sum of their losses in nats divided by B * N, so that means of equal batches add up.
        """
        hidden, after = self.hidden(input_ids, context, state, return_state)
        if labels is not None:
            total = self.nll(hidden, labels, "sum")
            return CausalLMOutput(None, after, total / labels.numel())
        return CausalLMOutput(self.logits(hidden).view(*input_ids.shape, -1), after)

    def hidden(
        self,
        input_ids: Tensor,
        context: ForwardContext | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, ModelState | None]:
        """What ``logits`` is given: activations before the final norm, as ``embed`` shapes them, and the state.

        For readers that want the logits of a few tokens, or of a slice at a time.
        """
        context = context or ForwardContext()
        hidden, tpe_state = self.embed(input_ids, context, state, return_state)
        states = []
        for index, block in enumerate(self.layers):
            hidden, after = block(hidden, context, state.layers[index] if state else None, return_state)
            states.append(after)
        return hidden, ModelState(tpe_state, tuple(states)) if return_state else None

    def loss(self, input_ids: Tensor, labels: Tensor, context: ForwardContext | None = None) -> Tensor:
        """Negative log likelihood in nats of every label, fp32 [B, N]."""
        hidden, _ = self.hidden(input_ids, context)
        return self.nll(hidden, labels).view(labels.shape)


def embed(
    embedding: nn.Module,
    tpe: ToeplitzEncoding | None,
    layers: PlainLayers,
    config: ModelConfig,
    input_ids: Tensor,
    context: ForwardContext,
    state: object = None,
    return_state: bool = False,
) -> tuple[Tensor, object]:
    """Embedding, TPE and the first dropout; shared by the plain and the pipelined model.

    TPE runs over whole sequences: ranks share the tokens only after it.
    """
    hidden = embedding(input_ids)
    after = None
    if tpe is not None:
        hidden, after = tpe(hidden, context, state=state, return_state=return_state)
    return dropout(layers.share_tokens(hidden), config.dropout, context.dropout, 0), after


def project(hidden: Tensor, weight: Tensor, norm: nn.Module, layers: PlainLayers) -> Tensor:
    """Final norm and head; shared by the plain and the pipelined model."""
    return nn.functional.linear(layers.enter(norm(hidden)), weight)


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    norm: nn.Module,
    layers: PlainLayers,
    labels: Tensor,
    vocab_size: int,
    reduction: str,
) -> Tensor:
    """Final norm, head and loss, fp32 nats of labels ("none") or their sum; shared by the plain and the pipelined model."""
    inside = layers.enter(norm(hidden))
    return layers.cross_entropy(inside, weight, labels.reshape(inside.shape[:-1]), vocab_size, reduction)


def build_head(config: ModelConfig, layers: PlainLayers) -> nn.Module:
    """An untied head: the same vocabulary-split weight as an embedding."""
    return layers.embedding(config.vocab_size, config.width, config.initializer_std)

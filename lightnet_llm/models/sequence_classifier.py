"""Classifier of sentences and pairs, or a regression: a language model's blocks, mean over tokens, a head (model-spec 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.model import ModelConfig
from .backbone import Backbone, Biased
from .causal_lm import embed
from .classifier import ClassifierOutput
from .context import ForwardContext
from .dropout import dropout
from .layers import PlainLayers


class SentenceHead(nn.Module):
    """Linear of the model's width, tanh, dropout, linear to the classes: the head of the Cramming recipe."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.classes is not None
        self.dropout, self.place = config.dropout, 2 * config.layers + 1  # behind the blocks' places
        self.dense = Biased(config.width, config.width, config.initializer_std)
        self.output = Biased(config.width, config.classes, config.initializer_std)

    def forward(self, pooled: Tensor, context: ForwardContext) -> Tensor:
        """[B, width] to logits [B, classes]."""
        key = context.dropout
        if key is not None:  # one vector a sample
            key = replace(key, tokens=1, offset=0, shard=(0, 1))
        inner: Tensor = torch.tanh(self.dense(pooled))
        logits: Tensor = self.output(dropout(inner, self.dropout, key, self.place))
        return logits


class SequenceClassifier(Backbone):
    """Reads whole rows, one sample each: a sentence, or two with a token between them.

    The parameters are those of a (masked) language model but for ``head``, so that training may start from its weights.

    Attributes:
        fresh: names of parameters begin so that keep their initial values when another model's weights are read.
    """

    fresh = "head."

    def __init__(self, config: ModelConfig, layers: PlainLayers | None = None):
        layers = layers or PlainLayers()
        super().__init__(config, layers, layers.embedding(config.vocab_size, config.width, config.initializer_std))
        self.head = SentenceHead(config)

    def forward(
        self,
        input_ids: Tensor,
        context: ForwardContext | None = None,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> ClassifierOutput:
        """Classify.

        Args:
            input_ids: integer [B, N]; this rank's columns where the context's exchange shares them.
            context: segments (of which one holds a row's real tokens and others its padding) and dropout. None: rows
                are padded as ``mask`` says.
            labels: int [B] classes, those below 0 do not count; of a regression float [B], NaN does not count.
            mask: bool [B, N] of the same columns, true for real tokens, on whichever side; None for no padding. A row
                without any has the logits of a mean of 0.

        Returns:
            logits [B, classes] (of a regression [B, 1], the value), and with labels the mean loss (:func:`sentence_loss`).
        """
        context = context or ForwardContext(key_mask=mask)
        ids = input_ids if context.cu_seqlens is None else input_ids.reshape(1, -1)
        hidden, _ = embed(self.embedding, self.tpe, self.layers_set, self.config, ids, context)
        for block in self.layers:
            hidden, _ = block(hidden, context)
        logits = classify_rows(self.norm(hidden).view(*input_ids.shape, -1), mask, self.head, context)
        return ClassifierOutput(logits, None if labels is None else sentence_loss(logits, labels))


def classify_rows(tokens: Tensor, mask: Tensor | None, head: nn.Module, context: ForwardContext) -> Tensor:
    """Normed activations [B, N, width] to logits [B, classes]; shared by the plain and the pipelined model."""
    logits: Tensor = head(mean_of_tokens(tokens, mask, context.exchange), context)
    return logits


def mean_of_tokens(tokens: Tensor, mask: Tensor | None, exchange: Any = None) -> Tensor:
    """Mean over the real tokens of each row, summed in fp32 or more.

    Args:
        tokens: [B, N, width].
        mask: bool [B, N], true for real tokens; what is elsewhere, NaN even, does not matter. None: all are real.
        exchange: of a context, over the ranks that share each row's columns, which need a mask.

    Returns:
        [B, width], on every rank that of whole rows.
    """
    wide = tokens if tokens.dtype == torch.float64 else tokens.float()
    if mask is None:
        return wide.mean(1).to(tokens.dtype)
    total = torch.where(mask[..., None], wide, torch.zeros((), dtype=wide.dtype, device=wide.device)).sum(1)
    count = mask.sum(1, keepdim=True)
    if exchange is not None:
        total, count = exchange.sum(torch.cat([total, count.to(total.dtype)], 1)).split([total.shape[1], 1], 1)
    return (total / count.clamp(min=1)).to(tokens.dtype)


def sentence_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats, or of one output its mean squared error, fp32: the sum of all rows that count, divided by all rows.

    Args:
        logits: [B, classes].
        labels: int [B], below 0 where they do not count; of a regression float [B], NaN there.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if wide.shape[1] > 1:
        return F.cross_entropy(wide, labels.clamp(min=-1), ignore_index=-1, reduction="sum") / labels.numel()
    counts = ~torch.isnan(labels)
    wanted = torch.where(counts, labels, torch.zeros((), dtype=labels.dtype, device=labels.device)).to(wide.dtype)
    return (((wide[:, 0] - wanted) ** 2) * counts).sum() / labels.numel()


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of rows whose class is the most likely one, fp32 [1]; labels below 0 are no hits."""
    return (logits.argmax(1) == labels).float().mean()[None]

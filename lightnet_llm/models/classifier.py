"""Image classifier: patches, blocks, mean over tokens, linear head; no class token and no position table (model-spec 5)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.model import ModelConfig
from .backbone import Backbone, Biased
from .context import ForwardContext
from .layers import PlainLayers
from .patches import PatchEmbedding


class ClassifierOutput(NamedTuple):
    """logits [B, classes]; with labels the mean loss in nats."""

    logits: Tensor
    loss: Tensor | None = None


class ImageClassifier(Backbone):
    """Takes images of any size made of whole patches: positions come from MD-TPE and MD-LRPE, which have no size."""

    embedding: PatchEmbedding

    def __init__(self, config: ModelConfig, layers: PlainLayers | None = None):
        assert config.image is not None
        super().__init__(config, layers or PlainLayers(), PatchEmbedding(config))
        self.head = build_class_head(config)

    def forward(
        self, images: Tensor, context: ForwardContext | None = None, labels: Tensor | None = None
    ) -> ClassifierOutput:
        """Classify.

        Args:
            images: [B, C, H, W].
            labels: int [B], or [B, classes] shares of each class (mixup, CutMix, smoothing; all 0: does not count).

        Raises:
            ValueError: images that are not made of whole patches, or of other channels.
        """
        grid = self.embedding.grid(images)
        context = context or ForwardContext()
        hidden = self.image_tokens(self.embedding(images), grid, context)
        logits = classify(hidden, self.head, context)
        return ClassifierOutput(logits, None if labels is None else class_loss(logits, labels))


def classify(hidden: Tensor, head: nn.Module, context: ForwardContext) -> Tensor:
    """Normed activations [B, N, width] to logits [B, classes]; shared by the plain and the pipelined model."""
    exchange = context.exchange
    logits: Tensor = head(hidden.mean(1) if exchange is None else exchange.mean(hidden))
    return logits


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats, fp32: the sum of all rows that count, divided by all rows; labels as of the classifier's."""
    return F.cross_entropy(logits.float(), labels)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Shares of rows whose class is the most likely one, and among the five most likely, fp32 [2].

    Args:
        labels: [B, classes] with a 1 at the class; rows of zeros are no hits.
    """
    order = logits.float().topk(min(5, logits.shape[1]), dim=1).indices
    found = labels.gather(1, order) > 0
    return torch.stack([found[:, 0], found.any(1)]).float().mean(1)


def build_class_head(config: ModelConfig) -> Biased:
    """Linear with bias to the classes."""
    assert config.image is not None
    return Biased(config.width, config.image.classes, config.initializer_std)

"""Image classifier: patches, blocks, mean over tokens, linear head; no class token and no position table (model-spec 5)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
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
        self.head = Biased(config.width, config.image.classes, config.initializer_std)

    def forward(
        self, images: Tensor, context: ForwardContext | None = None, labels: Tensor | None = None
    ) -> ClassifierOutput:
        """Classify.

        Args:
            images: [B, C, H, W].
            labels: int [B], or [B, classes] shares of each class (mixup, CutMix, smoothing).

        Raises:
            ValueError: images that are not made of whole patches, or of other channels.
        """
        grid = self.embedding.grid(images)
        hidden = self.image_tokens(self.embedding(images), grid, context or ForwardContext())
        logits = self.head(hidden.mean(1))
        return ClassifierOutput(logits, None if labels is None else F.cross_entropy(logits.float(), labels))

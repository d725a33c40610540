"""The heads that are not causal, under Hugging Face's interface: masked language model, classifiers of sentences and images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.backbone import Backbone
from ..models.classifier import ImageClassifier, class_loss
from ..models.context import ForwardContext
from ..models.layers import PlainLayers
from ..models.sequence_classifier import SequenceClassifier, sentence_loss
from .configuration_lightnet import LightNetConfig
from .modeling_lightnet import LightNetOutput, LightNetPreTrainedModel, counted, mean_loss, unpacked


class _Bidirectional(LightNetPreTrainedModel):
    """Of texts, and not causal."""

    def __init__(self, config: LightNetConfig):
        if config.causal or config.image is not None:
            name = type(self).__name__
            raise ValueError(
                f"{name}: needs a bidirectional language model's configuration, causal=False and no image_size"
            )
        super().__init__(config)


class LightNetForMaskedLM(_Bidirectional):
    """The masked language model: what stands behind a mask token."""

    _head = "masked_lm"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Logits of every place, and with labels their loss.

        Args:
            input_ids: integer [B, N].
            attention_mask: [B, N], 0 at padding, on either side, which then does not exist; its logits are 0.
            labels: [B, N], of the same places; negative ones do not count. Without any that counts the loss is 0.
            cu_seqlens: int [segments + 1], texts packed into one row, which do not see each other (B = 1).
            num_items_in_batch: the loss is divided by it in place of the number of labels.

        Returns:
            loss and logits [B, N, vocabulary]; in training with labels the logits are None, and never held.
        """
        hidden, mask, _cache = self._read(input_ids, attention_mask, None, False, cu_seqlens)
        assert input_ids is not None
        loss = logits = None
        if labels is not None:
            loss = mean_loss(self.model, hidden, labels if mask is None else labels[mask], num_items_in_batch)
        if loss is None or not self.training:
            logits = self.model.logits(hidden).view(*hidden.shape[:2], -1)
            logits = unpacked(logits, mask).view(*input_ids.shape, -1)
        output = LightNetOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


class LightNetForSequenceClassification(_Bidirectional):
    """Classes of sentences and pairs, or with num_labels=1 a regression."""

    _head = "sequence_classifier"

    def _build(self, config: LightNetConfig) -> Backbone:
        return SequenceClassifier(config, PlainLayers(vocab_multiple=1))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Logits, and with labels their loss.

        Args:
            input_ids: integer [B, N].
            attention_mask: [B, N], 0 at padding, on either side, which then does not exist.
            labels: int [B], negative ones do not count; of a regression float [B], NaN does not count.
            num_items_in_batch: the loss is divided by it in place of the number of labels.

        Returns:
            loss: cross entropy in nats, or the mean squared error; logits [B, num_labels].
        """
        if input_ids is None or input_ids.ndim != 2 or input_ids.numel() == 0:
            raise ValueError("LightNet: give input_ids [B, N] with at least one token; embeddings are not supported")
        mask = None if attention_mask is None else attention_mask.bool()
        if mask is not None and not bool(mask.any(1).all()):
            raise ValueError("LightNet: attention_mask leaves a row without a token; give at least one")
        dropout = self._key(input_ids.shape[0], input_ids.shape[1], input_ids.device)
        context = ForwardContext(key_mask=mask, dropout=dropout)
        logits, loss = self.model(input_ids, context, None, mask).logits, None
        if labels is not None:
            labels = labels.to(logits.device)
            if logits.shape[1] > 1:
                counts = labels >= 0
                labels = labels.masked_fill(~counts, -1)  # Transformers' -100
            else:
                labels = labels.float()
                counts = ~labels.isnan()
            total = sentence_loss(logits, labels.view(-1)) * labels.numel()
            loss = total / counted(counts.sum(), num_items_in_batch, logits.device)
        output = LightNetOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output


class LightNetForImageClassification(LightNetPreTrainedModel):
    """The image classifier, for images of any size made of whole patches."""

    main_input_name = "pixel_values"
    _head = "classifier"

    def __init__(self, config: LightNetConfig):
        if config.image is None:
            raise ValueError(
                "LightNetForImageClassification: the configuration has no image_size; give it with patch_size"
            )
        super().__init__(config)

    def _build(self, config: LightNetConfig) -> Backbone:
        return ImageClassifier(config)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        """Logits, and with labels their loss.

        Args:
            pixel_values: [B, C, H, W], normed as in training.
            labels: int [B], -100 does not count; or shares of each class [B, num_labels].
            num_items_in_batch: the loss is divided by it in place of the number of labels.

        Returns:
            loss in nats; logits [B, num_labels].
        """
        images, context = self._pixels(pixel_values)
        logits, loss = self.model(images, context).logits, None
        if labels is not None:
            labels = labels.to(logits.device)
            whole = labels.is_floating_point()
            count = torch.tensor(len(labels)) if whole else (labels >= 0).sum()
            if whole or bool(count):
                labels = labels if whole else labels.masked_fill(labels < 0, -100)
                loss = class_loss(logits, labels) * count.to(logits.device)
            else:
                loss = logits.sum() * 0.0
            loss = loss / counted(count, num_items_in_batch, logits.device)
        output = LightNetOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

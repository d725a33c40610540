"""Models as DeepSpeed pipeline stages, under the parameter names of the plain models.

Stages of a language model pass (hidden, sample_ids, cu_seqlens), those of a classifier of sentences also the mask of real
tokens. ``cu_seqlens`` is padded to a fixed length by repeating its last entry, so that shapes never change; each stage cuts the
padding off again. Those of an image model pass (hidden, sample_ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from ..config.model import ModelConfig
from ..models.backbone import at_grid, embed_grid
from ..models.block import Block
from ..models.causal_lm import build_head, embed, head_loss
from ..models.classifier import build_class_head, class_loss, classify, hits
from ..models.context import ForwardContext
from ..models.layers import PlainLayers
from ..models.norms import Norm
from ..models.patches import PatchEmbedding
from ..models.sequence_classifier import SentenceHead, SequenceClassifier, accuracy, classify_rows, sentence_loss
from ..models.tpe import ToeplitzEncoding
from .clock import Clock
from .layout import Groups

Payload = tuple[Tensor, ...]


def pad_segments(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int32 [tokens + 1]: the boundaries, then the total repeated."""
    padded = torch.full((tokens + 1,), int(cu_seqlens[-1]), dtype=torch.int32)
    padded[: cu_seqlens.numel()] = cu_seqlens
    return padded


def _trim(cu_seqlens: Tensor) -> Tensor:
    total = cu_seqlens[-1]
    return cu_seqlens[: int((cu_seqlens < total).sum()) + 1]


class _Stage(nn.Module):
    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__()
        self.config, self.layers_set, self.clock = config, layers, clock

    def context(self, payload: Payload) -> ForwardContext:
        """The forward context that travels beside the activations."""
        if self.config.image is not None:
            return self.clock.image_context(payload[1], self.config, self.training)
        sample_ids, cu_seqlens = payload[1:3]
        tokens = (cu_seqlens.numel() - 1) // sample_ids.numel()
        return self.clock.context(_trim(cu_seqlens), sample_ids, tokens, self.config, self.training)


class EmbeddingStage(_Stage):
    """Token ids to embeddings; tied, so the last stage holds a copy for the head."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.embedding = layers.embedding(config.vocab_size, config.width, config.initializer_std)

    def forward(self, payload: Payload) -> Payload:
        return self.embedding(payload[0].reshape(1, -1)), *payload[1:]


class PositionStage(_Stage):
    """TPE and the dropout after it."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.tpe = ToeplitzEncoding(config) if config.tpe else None

    def forward(self, payload: Payload) -> Payload:
        hidden, _ = embed(nn.Identity(), self.tpe, self.layers_set, self.config, payload[0], self.context(payload))
        return hidden, *payload[1:]


class PatchStage(_Stage):
    """Images to embedded patches."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.embedding = PatchEmbedding(config)

    def forward(self, payload: Payload) -> Payload:
        return self.embedding(payload[0]), *payload[1:]


class GridStage(_Stage):
    """TPE of patches and the dropout after it."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.tpe = ToeplitzEncoding(config) if config.tpe else None

    def forward(self, payload: Payload) -> Payload:
        assert self.config.image is not None
        context = self.context(payload)
        return embed_grid(payload[0], self.tpe, self.config, self.config.image.grid, context), *payload[1:]


class BlockStage(_Stage):
    """One LightNet block."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock, index: int):
        super().__init__(config, layers, clock)
        self.block = Block(config, layers, index)

    def forward(self, payload: Payload) -> Payload:
        context = self.context(payload)
        if self.config.image is not None:
            context = at_grid(context, self.config.image.grid, 0, payload[0].device)
        hidden, _ = self.block(payload[0], context)
        return hidden, *payload[1:]


class NormStage(_Stage):
    """Final norm; a language model's head's product follows in the loss, which applies no norm of its own."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.norm = Norm(config.norm, config.width, config.norm_eps)

    def forward(self, payload: Payload) -> Payload:
        return self.norm(payload[0]), *payload[1:]


class HeadStage(_Stage):
    """Holder of the untied head's weight."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.head = build_head(config, layers)

    def forward(self, payload: Payload) -> tuple[Tensor, Tensor]:
        return _with_weight(payload[0], self.head)


class ClassStage(_Stage):
    """Mean over tokens and the head."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.head = build_class_head(config)

    def forward(self, payload: Payload) -> Tensor:
        return classify(payload[0], self.head, self.context(payload))


class SentenceStage(_Stage):
    """Mean over the real tokens of each row and the head."""

    def __init__(self, config: ModelConfig, layers: PlainLayers, clock: Clock):
        super().__init__(config, layers, clock)
        self.head = SentenceHead(config)

    def forward(self, payload: Payload) -> Tensor:
        mask = payload[3].bool()
        return classify_rows(payload[0].view(*mask.shape, -1), mask, self.head, self.context(payload))


def _tied_head(stage: EmbeddingStage, payload: Payload) -> tuple[Tensor, Tensor]:
    return _with_weight(payload[0], stage.embedding)


def _with_weight(hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
    """What the loss needs, the head's product and the loss being one operation.

    The weight as a result of its own: DeepSpeed clears gradients when the first one reaches a stage's results, so one
    that a parameter got directly from the loss would be lost (in bf16).
    """
    return hidden, head.weight.view_as(head.weight)


class PipelinedModel(PipelineModule):
    """DeepSpeed pipeline of a model.

    DeepSpeed names parameters by stage number; here they are registered again under the plain model's names, so that
    checkpoints do not care which engine wrote them.

    Args:
        bounds: of the stages, see :mod:`.stages`.

    Attributes:
        figures: of the micro-batches of an evaluation, see :meth:`_loss`; the caller clears it.
        ragged: whether micro-batches differ in shape, which stages then tell each other.
    """

    ragged = False

    def __init__(self, config: ModelConfig, layers: PlainLayers, groups: Groups, clock: Clock, bounds: Sequence[int]):
        common = (config, layers, clock)
        first, last = self._ends(*common)
        blocks = [LayerSpec(BlockStage, *common, index) for index in range(config.layers)]
        specs = [*first, *blocks, LayerSpec(NormStage, *common), last]
        object.__setattr__(self, "_bounds", list(bounds))  # no module's attribute yet
        topology, seed = groups.topology, clock.seed
        super().__init__(specs, topology=topology, loss_fn=self._loss, base_seed=seed, dynamic_shape=self.ragged)
        self.config, self.layers_set, self.clock = config, layers, clock
        self.figures: list[Tensor] = []
        self._register_plain_names()

    def _ends(self, *common: Any) -> tuple[list[Any], Any]:
        """Specifications of the stages before the blocks, two, and of the last one."""
        raise NotImplementedError

    def _loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """The last stage's outputs to the mean loss times the clock's weight."""
        raise NotImplementedError

    def _partition_layers(self, method: str = "") -> None:
        """DeepSpeed's hook: the bounds are known."""
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _register_plain_names(self) -> None:
        stages = [m for m in self.children() if isinstance(m, _Stage)] + list(self.tied_modules.values())
        tied = self.tied_modules
        for name in list(self._modules):
            del self._modules[name]
        object.__setattr__(self, "tied_modules", tied)  # DeepSpeed still finds it; it has no name of its own
        blocks = nn.ModuleDict()
        for stage in stages:
            if isinstance(stage, BlockStage):
                blocks[str(stage.block.index)] = stage.block
            else:
                for name, module in stage.named_children():
                    self.add_module(name, module)
        self.add_module("layers", blocks)
        object.__setattr__(self, "_stages", stages)

    def train(self, mode: bool = True) -> PipelinedModel:
        """Stages are not children any more, so they are told here."""
        super().train(mode)
        for stage in getattr(self, "_stages", []):
            stage.train(mode)
        return self


class PipelinedCausalLM(PipelinedModel):
    """The causal (or masked) language model; a tied embedding is held by the first and the last stage."""

    def _ends(self, *common: Any) -> tuple[list[Any], Any]:
        positions = LayerSpec(PositionStage, *common)
        if not common[0].tie_embeddings:
            return [LayerSpec(EmbeddingStage, *common), positions], LayerSpec(HeadStage, *common)
        tied = ("embedding", EmbeddingStage, *common)
        head = TiedLayerSpec(*tied, forward_fn=_tied_head, tied_weight_attr="embedding.weight")
        return [TiedLayerSpec(*tied, tied_weight_attr="embedding.weight"), positions], head

    def _loss(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """Normed activations and the head's weight to the mean loss, as of ``CausalLM.forward`` with labels."""
        hidden, weight = outputs
        total = head_loss(hidden, weight, nn.Identity(), self.layers_set, labels, self.config.vocab_size, "sum")
        return total / labels.numel() * self.clock.weight


class PipelinedClassifier(PipelinedModel):
    """The image classifier, on images of the size of the configuration."""

    def _ends(self, *common: Any) -> tuple[list[Any], Any]:
        return [LayerSpec(PatchStage, *common), LayerSpec(GridStage, *common)], LayerSpec(ClassStage, *common)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Logits and shares of classes [B, classes] to the mean loss; in evaluation also hits, for ``figures``."""
        if not self.training:
            self.figures.append(hits(outputs, labels))
        return class_loss(outputs, labels) * self.clock.weight


class PipelinedSentences(PipelinedModel):
    """The classifier of sentences; rows are as long as a micro-batch's longest sample."""

    ragged, fresh = True, SequenceClassifier.fresh

    def _ends(self, *common: Any) -> tuple[list[Any], Any]:
        first = [LayerSpec(EmbeddingStage, *common), LayerSpec(PositionStage, *common)]
        return first, LayerSpec(SentenceStage, *common)

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Logits (values) and labels [B] to the mean loss; in evaluation of classes also their accuracy, for ``figures``."""
        if not self.training and outputs.shape[1] > 1:
            self.figures.append(accuracy(outputs, labels))
        return sentence_loss(outputs, labels) * self.clock.weight

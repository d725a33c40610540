"""What every pass of a run must know beside its batch, in the plain and in the pipeline engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..config.model import ModelConfig
from ..models.context import ForwardContext
from .image_sequence import image_context
from .sequence import SequencePlace, training_context


@dataclass
class Clock:
    """What every pass must know: the step (dropout masks depend on it; None in evaluation) and who shares its rows.

    ``loss_weight`` undoes the mean over columns that sequence-parallel ranks add to rows; ``step_weight`` that over labels that
    do not count; ``token_shard`` is that of the layers: dropout masks depend on a token's place among all.
    """

    seed: int
    step: int | None = None
    place: SequencePlace | None = None
    loss_weight: float = 1.0
    token_shard: tuple[int, int] = (0, 1)
    step_weight: float = 1.0

    @property
    def weight(self) -> float:
        """Factor of a micro-batch's mean loss over all its labels."""
        return self.loss_weight * self.step_weight

    def context(
        self, cu_seqlens: Tensor, sample_ids: Tensor, tokens: int, config: ModelConfig, training: bool
    ) -> ForwardContext:
        """The forward context of a micro-batch; arguments as of :func:`training_context`."""
        step = self.step if training else None
        context = training_context(cu_seqlens, sample_ids, tokens, config, self.seed, step, self.place)
        if context.dropout is None:
            return context
        return replace(context, dropout=replace(context.dropout, shard=self.token_shard))

    def image_context(self, sample_ids: Tensor, config: ModelConfig, training: bool) -> ForwardContext:
        """The forward context of images of the configuration's size, without coordinates."""
        assert config.image is not None
        drops = config.dropout > 0 or config.drop_path > 0
        step = self.step if training else None
        return image_context(sample_ids, config.image.tokens + config.prefix, drops, self.seed, step, self.place)

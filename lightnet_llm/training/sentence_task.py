"""The head ``sequence_classifier``: classes of sentences and pairs, or a regression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightnet_data import sentences
from torch import Tensor

from ..config.run import RunConfig
from ..models.sequence_classifier import accuracy, sentence_loss
from ..parallel.clock import Clock
from ..parallel.segments import SequencePlace
from .schedule import Budget
from .sentence_data import folder_of, open_split
from .tasks import Batch, LanguageTask, Sample

if TYPE_CHECKING:
    from ..parallel.pipeline import PipelinedModel


class SentenceTask(LanguageTask):
    """Cross entropy of classes in nats, or the squared error of a regression; the places of a batch are its samples."""

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.regression = config.model.classes == 1

    def training_samples(self, budget: Budget) -> Any:
        return open_split(f"{folder_of(self.config)}/train", self.config, True)

    def held_out(self, location: str) -> Any:
        return open_split(location, self.config, False)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return sentences.collate(samples)

    def uncounted(self, sample: Sample) -> Sample:
        return {**sample, "label": float("nan") if self.regression else -1}

    def labels(self, batch: Batch) -> Tensor:
        return -batch["labels"].isnan().long() if self.regression else batch["labels"]

    def checksum(self, batch: Batch) -> int:
        # Of real tokens alone: how far a row is padded depends on its micro-batch.
        return super().checksum({**batch, "input_ids": batch["input_ids"] * batch["mask"]})

    def loss(self, model: Callable[..., Any], batch: Batch, clock: Clock, training: bool) -> Tensor:
        input_ids, mask = self._columns(batch, clock)
        loss: Tensor = model(input_ids, self._context(batch, clock, training), batch["labels"], mask).loss
        return loss * clock.weight

    def loss_weight(self, place: SequencePlace) -> float:
        return 1.0  # every rank that shares rows has their logits, and so the whole loss

    def _columns(self, batch: Batch, clock: Clock) -> tuple[Tensor, Tensor]:
        """Token ids and mask of this rank's part of each row."""
        input_ids, mask, place = batch["input_ids"], batch["mask"], clock.place
        return (input_ids, mask) if place is None else (place.part(input_ids), place.part(mask))

    def _context(self, batch: Batch, clock: Clock, training: bool) -> Any:
        tokens = batch["input_ids"].shape[1]
        return clock.context(batch["cu_seqlens"], batch["sample_ids"], tokens, self.config.model, training)

    def logits(self, model: Callable[..., Any], batch: Batch, clock: Clock) -> Tensor:
        """Outside training, [B, classes]."""
        input_ids, mask = self._columns(batch, clock)
        found: Tensor = model(input_ids, self._context(batch, clock, False), None, mask).logits
        return found

    def figures(self, model: Callable[..., Any], batch: Batch, clock: Clock) -> Tensor:
        logits, labels = self.logits(model, batch, clock), batch["labels"]
        loss = sentence_loss(logits, labels)[None]
        return loss if self.regression else torch.cat([loss, accuracy(logits, labels)])

    def pipelined(self) -> type[PipelinedModel]:
        from ..parallel.pipeline import PipelinedSentences

        return PipelinedSentences

    def payload(self, batch: Batch, clock: Clock) -> tuple[tuple[Tensor, ...], Tensor]:
        from ..parallel.pipeline import pad_segments

        segments = pad_segments(batch["cu_seqlens"], batch["input_ids"].numel())
        input_ids, mask = self._columns(batch, clock)
        return (input_ids, batch["sample_ids"], segments, mask.to(torch.uint8)), batch["labels"]

    def facts(self, location: str) -> dict[str, float]:
        return {}

    def report(self, means: Sequence[float], facts: dict[str, float]) -> dict[str, float]:
        """The loss, and of classes the share of samples whose class is the most likely."""
        return dict(zip(("loss", "accuracy"), means, strict=False))

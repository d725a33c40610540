"""What a head adds to the one engine and loop: its samples, a batch on the device, a loss with its weight, its figures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightnet_data import dataset, manifest
from torch import Tensor

from ..config.run import RunConfig
from ..parallel.clock import Clock
from ..parallel.segments import SequencePlace
from .masking import masked
from .schedule import Budget
from .sources import training_samples

if TYPE_CHECKING:
    from ..parallel.pipeline import PipelinedModel

Batch = dict[str, Tensor]
Sample = dict[str, Any]


class Task(ABC):
    """One head of ``model.head``; see :func:`task_of`.

    Losses are in nats (a denoiser's: its objective) and means over *places*: labels, whether they count or not. What does not
    count has no loss, and :class:`Engine` weighs a step by the labels of all its micro-batches.

    Attributes:
        reads_ahead: whether labels that do not count occur in training, so that a step is read whole before it is run.
        on_cpu: names of a batch's tensors that stay there.
    """

    reads_ahead = False
    on_cpu: frozenset[str] = frozenset()

    def __init__(self, config: RunConfig):
        self.config = config

    # Samples ---------------------------------------------------------------------------------------------------------
    @abstractmethod
    def training_samples(self, budget: Budget) -> Any:
        """The map-style data set of the run, by global position."""

    @abstractmethod
    def held_out(self, location: str) -> Any:
        """The samples of a validation set in stored order, with ``samples_per_epoch``."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample]) -> Batch:
        """One micro-batch."""

    @abstractmethod
    def uncounted(self, sample: Sample) -> Sample:
        """The same without a label that counts: what fills up a validation set's last micro-batch."""

    # Batches ---------------------------------------------------------------------------------------------------------
    def labels(self, batch: Batch) -> Tensor:
        """Integers; those below 0 do not count."""
        return batch["labels"]

    @abstractmethod
    def checksum(self, batch: Batch) -> int:
        """A sum over samples of what was read, whichever batch each is in."""

    @abstractmethod
    def rows(self, batch: Batch, count: int) -> Batch:
        """The first samples of a batch."""

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        """A loaded batch where the model is."""
        return {k: x if k in self.on_cpu else x.to(device, non_blocking=True) for k, x in batch.items()}

    def loss_weight(self, place: SequencePlace) -> float:
        """What undoes a mean over what sequence-parallel ranks add."""
        return 1.0

    # Losses ----------------------------------------------------------------------------------------------------------
    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Batch, clock: Clock, training: bool) -> Tensor:
        """Mean over the places of a batch on the device, times the clock's weight."""

    def figures(self, model: Callable[..., Any], batch: Batch, clock: Clock) -> Tensor:
        """Means over places for :meth:`report`, fp32 [1 or more]: first the loss."""
        return self.loss(model, batch, clock, False)[None]

    # Pipelines: layouts with stages are refused for heads that have none -----------------------------------------------
    def pipelined(self) -> type[PipelinedModel]:
        """The model as pipeline stages."""
        raise NotImplementedError

    def payload(self, batch: Batch, clock: Clock) -> tuple[tuple[Tensor, ...], Tensor]:
        """A batch as the first stage takes it, and what the last one takes for labels."""
        raise NotImplementedError

    def facts(self, location: str) -> dict[str, float]:
        """What :meth:`report` wants to know of a validation set."""
        return {}

    def report(self, means: Sequence[float], facts: dict[str, float]) -> dict[str, float]:
        """Figures of a validation set, from means over the labels that count."""
        return {"loss": means[0]}


class LanguageTask(Task):
    """Next tokens, or hidden ones."""

    on_cpu = frozenset({"cu_seqlens"})  # the scans cut their work by it, and would wait for the device to read it there

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.reads_ahead = config.model.head == "masked_lm"  # a causal model's labels all count

    def training_samples(self, budget: Budget) -> Any:
        return masked(training_samples(self.config), self.config)

    def held_out(self, location: str) -> Any:
        return masked(dataset.PackedTokens(location, self.config.data.sequence_length, shuffle=False), self.config)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return dataset.collate(samples)

    def uncounted(self, sample: Sample) -> Sample:
        return {**sample, "labels": sample["labels"] * 0 - 1}

    def checksum(self, batch: Batch) -> int:
        place = torch.arange(1, batch["input_ids"].shape[1] + 1)
        rows = (batch["input_ids"] * place).sum(1) % 1_000_003
        return int((rows * (batch["sample_ids"] % 1_000_003 + 1)).sum())

    def rows(self, batch: Batch, count: int) -> Batch:
        first = {name: x[:count] for name, x in batch.items() if name != "cu_seqlens"}
        bounds = batch["cu_seqlens"]
        return {**first, "cu_seqlens": bounds[bounds <= first["input_ids"].numel()]}

    def loss(self, model: Callable[..., Any], batch: Batch, clock: Clock, training: bool) -> Tensor:
        input_ids, labels = batch["input_ids"], batch["labels"]
        place, tokens = clock.place, input_ids.shape[1]
        context = clock.context(batch["cu_seqlens"], batch["sample_ids"], tokens, self.config.model, training)
        if place is not None:
            input_ids, labels = place.part(input_ids), place.part(labels, fill=-1)
        loss: Tensor = model(input_ids, context, labels).loss
        return loss * clock.weight

    def loss_weight(self, place: SequencePlace) -> float:
        return place.loss_weight(self.config.data.sequence_length)

    def pipelined(self) -> type[PipelinedModel]:
        from ..parallel.pipeline import PipelinedCausalLM  # brings DeepSpeed, which not every user of a task needs

        return PipelinedCausalLM

    def payload(self, batch: Batch, clock: Clock) -> tuple[tuple[Tensor, ...], Tensor]:
        from ..parallel.pipeline import pad_segments

        input_ids, labels, place = batch["input_ids"], batch["labels"], clock.place
        segments = pad_segments(batch["cu_seqlens"], input_ids.numel())
        if place is not None:
            input_ids, labels = place.part(input_ids), place.part(labels, fill=-1)
        return (input_ids, batch["sample_ids"], segments), labels

    def facts(self, location: str) -> dict[str, float]:
        """Bytes per token, of next tokens and where both are known."""
        found = manifest.find(location)
        split = (found or {}).get("splits", {}).get(location.rpartition("/")[2], {})
        known = split.get("tokens") and split.get("bytes") and self.config.model.head == "causal_lm"
        return {"bytes_per_token": split["bytes"] / split["tokens"]} if known else {}

    def report(self, means: Sequence[float], facts: dict[str, float]) -> dict[str, float]:
        """Loss in nats, perplexity and bits per byte."""
        loss = means[0]
        values = {"loss": loss, "perplexity": math.exp(min(loss, 80.0))}
        if "bytes_per_token" in facts:
            values["bits_per_byte"] = loss / math.log(2) / facts["bytes_per_token"]
        return values


def task_of(config: RunConfig) -> Task:
    """The task of ``model.head``."""
    if config.model.head == "sequence_classifier":
        from .sentence_task import SentenceTask

        return SentenceTask(config)
    if config.model.image is None:
        return LanguageTask(config)
    from .image_tasks import ClassifierTask, DenoiserTask  # not every run of text needs what reads images

    return (ClassifierTask if config.model.head == "classifier" else DenoiserTask)(config)

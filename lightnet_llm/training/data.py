"""Loaders of a run: training micro-batches of this rank, and validation batches that every layout weighs alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightnet_data import manifest as manifests
from lightnet_data.dataset import PackedTokens, collate
from lightnet_data.sampler import GlobalBatchSampler
from torch import Tensor
from torch.utils.data import DataLoader

from ..config.run import RunConfig
from ..errors import UserError
from .schedule import Budget

Batch = dict[str, Tensor]


def prepared_folder(config: RunConfig) -> Path:
    """The folder of ``data.path``.

    Raises:
        UserError: not set, or not a folder written by ``lightnet prep``.
    """
    if config.data.path is None:
        raise UserError("data.path is not set; name a folder written by `lightnet prep INPUT... --output DIR`")
    folder = Path(config.data.path)
    if not folder.is_dir():
        raise UserError(f"data.path {folder}: no such folder; write it with `lightnet prep INPUT... --output {folder}`")
    return folder


def check_tokenizer(config: RunConfig) -> Path | None:
    """The tokenizer file beside the data; refuses a model whose vocabulary is smaller than the tokenizer's."""
    folder = prepared_folder(config)
    facts: dict[str, Any] = manifests.load(folder).get("tokenizer") or {}
    size = int(facts.get("vocab_size", 0))
    if size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the {size} ids of the tokenizer in {folder}; "
            f"set model.vocab_size={size} or more"
        )
    return next((p for p in (folder / "tokenizer.model", folder / "tokenizer.json") if p.is_file()), None)


def check_sets(config: RunConfig) -> dict[str, Any]:
    """Open every data set once, so that a missing, cut or too short one is refused before any work.

    Returns:
        What the training data are: number of tokens and the tokenizer's fingerprint.
    """
    folder = prepared_folder(config)
    train = PackedTokens(folder / "train", config.data.sequence_length, config.train.seed)
    if config.validation.interval:
        for prefix in validation_prefixes(config).values():
            PackedTokens(prefix, config.data.sequence_length, shuffle=False)
    tokenizer: dict[str, Any] = manifests.load(folder).get("tokenizer") or {}
    return {"tokens": int(train.tokens), "tokenizer": tokenizer.get("fingerprint")}


def training_batches(config: RunConfig, budget: Budget, rank: int, size: int, start_step: int) -> Iterator[Batch]:
    """This data-parallel rank's micro-batches from ``start_step`` on, in order.

    Args:
        rank, size: place among the ranks that read different samples.
    """
    dataset = PackedTokens(prepared_folder(config) / "train", config.data.sequence_length, config.train.seed)
    sampler = GlobalBatchSampler(budget.batch_at, config.train.micro_batch, rank, size, start_step, budget.steps)
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=config.data.workers,
        pin_memory=False,
        persistent_workers=False,
        generator=torch.Generator(),  # else each start would draw from the process's own
    )
    return iter(loader)


def validation_prefixes(config: RunConfig) -> dict[str, Path]:
    """Named validation sets: the held-out split of ``data.path`` first, then those of ``data.validation``."""
    folder = prepared_folder(config)
    prefixes = {}
    if (folder / "validation.idx").is_file():
        prefixes["heldout"] = folder / "validation"
    for name, given in config.data.validation.items():
        if name in prefixes:
            raise UserError(f"data.validation.{name}: that name is the held-out split of data.path; choose another")
        path = Path(given)
        prefix = path / "validation" if path.is_dir() else path
        if not prefix.with_name(prefix.name + ".idx").is_file():
            raise UserError(f"data.validation.{name}: {prefix}.idx does not exist; name a prepared folder or a prefix")
        prefixes[name] = prefix
    return prefixes


class ValidationSet:
    """The first samples of a held-out set, cut into micro-batches; what fills the last one up does not count."""

    def __init__(self, name: str, prefix: Path, config: RunConfig, rank: int, size: int):
        self.name = name
        self.dataset = PackedTokens(prefix, config.data.sequence_length, shuffle=False)
        self.samples = min(config.validation.samples, self.dataset.samples_per_epoch)
        self.micro, self.rank, self.size = config.train.micro_batch, rank, size
        unit = self.micro * size
        self.micro_batches = -(-self.samples // unit)
        self.scale = self.micro_batches * unit / self.samples  # undoes the mean over positions that do not count
        facts = manifests.find(prefix)
        split = (facts or {}).get("splits", {}).get(prefix.name, {})
        self.bytes_per_token = split["bytes"] / split["tokens"] if split.get("tokens") and split.get("bytes") else None

    def batches(self) -> Iterator[Batch]:
        """This rank's micro-batches; labels of filling samples are -1."""
        for index in range(self.micro_batches):
            first = (index * self.size + self.rank) * self.micro
            samples = []
            for position in range(first, first + self.micro):
                sample = dict(self.dataset[min(position, self.samples - 1)])
                if position >= self.samples:
                    sample["labels"] = sample["labels"] * 0 - 1
                samples.append(sample)
            yield collate(samples)

    def report(self, mean: float) -> dict[str, float]:
        """Loss in nats, perplexity and bits per byte from the engine's mean over all positions."""
        loss = mean * self.scale
        values = {"loss": loss, "perplexity": math.exp(min(loss, 80.0))}
        if self.bytes_per_token:
            values["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return values

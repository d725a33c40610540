"""Loaders of a run: training micro-batches of this rank, and validation batches that every layout weighs alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightnet_data import manifest as manifests
from lightnet_data.dataset import PackedTokens, open_windows
from lightnet_data.errors import DataError
from lightnet_data.mixture import Schedule
from lightnet_data.sampler import GlobalBatchSampler
from torch.utils.data import DataLoader

from ..config.run import RunConfig
from ..errors import UserError
from . import image_data, sentence_data
from .masking import rule_of
from .schedule import Budget
from .sources import (
    Source,
    check_same_tokenizer,
    common_tokenizer,
    identity_of,
    sources_of,
    stages_of,
    tokenizer_file,
    used_sources,
)
from .tasks import Batch, task_of

Note = Callable[[str], None]


def _unsaid(line: str) -> None:
    """A note that nobody reads: rank 0 says it once, at the start."""


def check_tokenizer(config: RunConfig) -> Path | None:
    """The tokenizer file beside the data (None: images); refuses a model whose vocabulary is smaller than the tokenizer's.

    Raises:
        UserError: that, data that are not there, or sources of different tokenizers.
    """
    if config.model.image is not None:
        image_data.folder_of(config)
        return None
    if config.model.head == "sequence_classifier":
        return sentence_data.tokenizer_of(config)
    source = common_tokenizer(sources_of(config))
    size = int(source.tokenizer.get("vocab_size", 0))
    if size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the {size} ids of the tokenizer in "
            f"{source.folder}; set model.vocab_size={size} or more"
        )
    return tokenizer_file(source)


def check_sets(config: RunConfig, note: Note = _unsaid) -> dict[str, Any]:
    """Open every data set once, so that a missing, cut or too short one is refused before any work.

    Args:
        note: takes a line on a held-out split that is left out.

    Returns:
        What the training data are: number of tokens, the tokenizer's fingerprint, and how samples are ordered.
    """
    if config.model.image is not None:
        return image_data.check(config)
    if config.model.head == "sequence_classifier":
        return sentence_data.check(config)
    tokens = {}
    for name, source in sources_of(config).items():
        opened = source.open(config)
        opened.windows.check()
        tokens[name] = int(opened.tokens)
    if config.model.head == "masked_lm":
        rule_of(config)
    if config.data.mixture:
        Schedule(sorted(used_sources(config)), stages_of(config))
    if config.validation.interval:
        check_validation(config, note)
    return identity_of(config, tokens)


def check_validation(config: RunConfig, note: Note = _unsaid) -> None:
    """Find the validation sets, and open them if the run validates.

    Raises:
        UserError, DataError: one named in ``data.validation`` is missing, shorter than a window or of another tokenizer, or
            any is damaged.
    """
    if config.model.image is not None:
        return image_data.check_validation(config)
    if config.model.head == "sequence_classifier":
        return sentence_data.check_validation(config)
    found, sources = validation_prefixes(config, note), [*sources_of(config).values()]
    for name in config.data.validation:
        folder, _, split = found[name].rpartition("/")
        tokenizer = (manifests.find(found[name]) or {}).get("tokenizer")
        if tokenizer and sources[0].tokenizer:  # shards of another stack do not say
            check_same_tokenizer(sources[0], Source(f"data.validation.{name}", folder, split, tokenizer))
    if config.validation.interval and not found and not any(_is_split(f"{x.folder}/validation") for x in sources):
        note("there is no held-out split and no data.validation: nothing will be validated")
    for prefix in found.values() if config.validation.interval else ():
        PackedTokens(prefix, config.data.sequence_length, shuffle=False).windows.check()


def training_batches(config: RunConfig, budget: Budget, rank: int, size: int, start_step: int) -> Iterator[Batch]:
    """This data-parallel rank's micro-batches from ``start_step`` on, in order.

    Args:
        rank, size: place among the ranks that read different samples.
    """
    task = task_of(config)
    sampler = GlobalBatchSampler(budget.batch_at, config.train.micro_batch, rank, size, start_step, budget.steps)
    loader = DataLoader(
        task.training_samples(budget),
        batch_sampler=sampler,
        collate_fn=task.collate,
        num_workers=config.data.workers,
        pin_memory=torch.cuda.is_available(),  # else copies to a card wait for it
        persistent_workers=False,
        generator=torch.Generator(),  # else each start would draw from the process's own
    )
    return iter(loader)


def validation_prefixes(config: RunConfig, note: Note = _unsaid) -> dict[str, str]:
    """Named validation sets: the held-out split of ``data.path``, or those of a mixture's sources, then ``data.validation``.

    Held-out splits shorter than a window are left out, with a ``note``.
    """
    if config.model.image is not None:
        return image_data.validation_locations(config)
    if config.model.head == "sequence_classifier":
        return sentence_data.validation_locations(config)
    prefixes = {}
    for name, source in sources_of(config).items():
        prefix = f"{source.folder}/validation"
        if name not in used_sources(config) or not _is_split(prefix):
            continue
        if config.validation.interval:
            windows = open_windows(prefix, config.data.sequence_length)
            if not windows.samples:
                note(
                    f"{prefix}: {windows.tokens} tokens are fewer than data.sequence_length {config.data.sequence_length} "
                    "+ 1; it is left out of validation"
                )
                continue
        prefixes[name if config.data.mixture else "heldout"] = prefix
    for name, given in config.data.validation.items():
        if name in prefixes:
            raise UserError(
                f"data.validation.{name}: that name is a held-out split of the training data; choose another"
            )
        prefix = f"{given.rstrip('/')}/validation" if _is_folder(given) else given
        if not _is_split(prefix):
            raise UserError(f"data.validation.{name}: {prefix}.idx does not exist; name a prepared folder or a prefix")
        prefixes[name] = prefix
    return prefixes


def _is_folder(given: str) -> bool:
    if not manifests.is_url(given):
        return Path(given).is_dir()
    try:
        manifests.load(given)
    except DataError:
        return False
    return True


def _is_split(location: str) -> bool:
    """Whether there are tokens at a folder or URL and a split's name, of a format that can be read."""
    if not manifests.is_url(location) and Path(f"{location}.idx").is_file():
        return True
    facts = manifests.find(location)
    split = ((facts or {}).get("splits") or {}).get(location.rpartition("/")[2], {})
    return "webdataset" in split or bool(split.get("shards"))


class ValidationSet:
    """The first samples of a held-out set, cut into micro-batches; what fills the last one up does not count."""

    def __init__(self, name: str, location: str, config: RunConfig, rank: int, size: int):
        self.name, self.task = name, task_of(config)
        self.facts = self.task.facts(location)
        self.dataset = self.task.held_out(location)
        self.samples = min(config.validation.samples, self.dataset.samples_per_epoch)
        self.micro, self.rank, self.size = config.train.micro_batch, rank, size
        unit = self.micro * size
        self.micro_batches = -(-self.samples // unit)
        counted = self.samples
        if self.task.reads_ahead:
            labels = (self.task.labels(self.task.collate([self.dataset[i]])) for i in range(self.samples))
            counted = sum(int((x >= 0).sum()) for x in labels)
        places = self.task.labels(self.task.collate([self.dataset[0]])).numel() if self.task.reads_ahead else 1
        self.scale = self.micro_batches * unit * places / max(counted, 1)  # undoes the mean over what does not count

    def batches(self) -> Iterator[Batch]:
        """This rank's micro-batches; filling samples do not count."""
        for index in range(self.micro_batches):
            first = (index * self.size + self.rank) * self.micro
            samples = []
            for position in range(first, first + self.micro):
                sample = dict(self.dataset[min(position, self.samples - 1)])
                samples.append(sample if position < self.samples else self.task.uncounted(sample))
            yield self.task.collate(samples)

    def report(self, means: Sequence[float]) -> dict[str, float]:
        """The task's figures from the engine's means over all places."""
        return self.task.report([mean * self.scale for mean in means], self.facts)

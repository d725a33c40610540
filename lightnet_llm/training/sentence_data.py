"""Folders of sentences with labels that a sequence classifier trains on: found, checked, opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightnet_data import sentences
from lightnet_data.sentences import Sentences

from ..config.run import RunConfig
from ..errors import UserError

ORDER = 1  # changes when the sample at a position does


def folder_of(config: RunConfig) -> str:
    """``data.path``.

    Raises:
        UserError: it is not set, or not a folder.
    """
    if config.data.path is None:
        raise UserError("data.path is not set; `lightnet glue` writes folders of sentences, and runs on them")
    if not Path(config.data.path).is_dir():
        raise UserError(f"data.path {config.data.path}: no such folder; `lightnet glue` writes such folders")
    return config.data.path


def tokenizer_of(config: RunConfig) -> Path:
    """The tokenizer file beside the data.

    Raises:
        UserError: the model's vocabulary is smaller.
    """
    folder = folder_of(config)
    facts = sentences.load(folder)["tokenizer"]
    if facts["vocab_size"] > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the {facts['vocab_size']} ids of the tokenizer in "
            f"{folder}; start from a model that was trained with it"
        )
    return Path(folder, facts["file"])


def open_split(location: str, config: RunConfig, training: bool) -> Sentences:
    """The samples of FOLDER/SPLIT: shuffled in training, else in stored order.

    Raises:
        UserError: their classes are not those of the model.
    """
    found = Sentences(location, config.data.sequence_length, config.train.seed, training)
    classes = found.facts["classes"]
    count = 1 if classes is None else max(len(classes), 2)
    if count != config.model.classes:
        held = "values of a regression" if classes is None else f"{count} classes"
        raise UserError(f"{location}: holds {held}, model.classes is {config.model.classes}; set model.classes={count}")
    return found


def validation_locations(config: RunConfig) -> dict[str, str]:
    """Named validation sets as FOLDER/SPLIT: all splits of ``data.path`` but ``train``.

    Raises:
        UserError: ``data.validation`` names further ones.
    """
    if config.data.validation:
        raise UserError("data.validation is of text; sentences are validated on all splits of data.path but train")
    folder = folder_of(config)
    return {split: f"{folder}/{split}" for split in sentences.load(folder)["splits"] if split != "train"}


def check_validation(config: RunConfig) -> None:
    """Find the validation sets, and open them if the run validates."""
    for location in validation_locations(config).values():
        if config.validation.interval:
            open_split(location, config, False)


def check(config: RunConfig) -> dict[str, Any]:
    """Open every split once; what a run must find again when it is resumed."""
    found = open_split(f"{folder_of(config)}/train", config, True)
    check_validation(config)
    facts = found.facts
    fingerprint, split = facts["tokenizer"]["fingerprint"], facts["splits"]["train"]
    names = {"tokenizer": fingerprint, "classes": facts["classes"], "order": ORDER}
    return {"samples": split["samples"], "sha256": split["sha256"][:16], **names}


def epochs(config: RunConfig, samples: int) -> list[dict[str, Any]]:
    """As of :func:`.sources.epochs`, with samples in place of tokens."""
    folder = folder_of(config)
    stored = int(sentences.load(folder)["splits"]["train"]["samples"])
    row = {"source": "train", "location": f"{folder}/train", "stored_samples": stored, "samples": samples}
    return [{**row, "share": 1.0, "epochs": round(samples / stored, 4)}]

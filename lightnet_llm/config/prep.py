"""Schema of ``lightnet prep --config``: one file for a laptop, a Slurm cluster and a Ray cluster.

inputs: ['/data/pile/train/*.jsonl.zst']
output: /data/pile-prepared
tokenizer: {path: /data/tokenizer.json}
records: {subset_field: meta.pile_set_name}
executor: {kind: slurm, workers: 64, settings: {partition: cpu, time: '24:00:00'}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..errors import UserError
from .base import Section
from .load import load_tree, validate_as


class Records(Section):
    """How documents are read."""

    fields: list[str] = Field(default=["text"], min_length=1)
    """Fields of a record that hold texts, dots for nested ones; several give an output each."""
    subset_field: str | None = None
    """Field that names a record's subset."""
    by_subset: bool = False
    """An output for each subset."""
    separator: str | None = None
    """What stands between the documents of a text file; null: a file is one."""
    read_as: Literal["text", "jsonl", "parquet", "tar"] | None = None
    """Format of files of another suffix."""
    skip_bad: bool = False
    """Count and report bad input instead of stopping at the first."""


class Select(Section):
    """Which documents are kept."""

    min_chars: int | None = None
    """Drop documents of fewer characters."""
    max_chars: int | None = None
    """Drop documents of more characters."""
    language: str | None = None
    """Drop documents that fastText does not find to be of this language (``en``)."""
    language_threshold: float = Field(default=0.65, ge=0, le=1)
    """Certainty asked of it."""
    dedup: Literal["exact", "minhash"] | None = None
    """Drop equal texts, or nearly equal ones."""


class Vocabulary(Section):
    """The tokenizer: one that is there, or one to train."""

    path: str | None = None
    """SentencePiece model, Hugging Face tokenizer.json, or its folder; null: train one."""
    vocab_size: int | None = None
    """Ids of a tokenizer to train; null: suits the corpus."""
    model_type: Literal["bpe", "unigram"] = "bpe"
    """What to train."""
    eod_token: str | None = None
    """End-of-document token of ``path``, where it is not found."""


class Write(Section):
    """What is written."""

    shard_tokens: int | None = None
    """Tokens of a shard at most; null: a split is one."""
    format: Literal["megatron", "webdataset"] = "megatron"
    """.bin/.idx, or tar shards of packed samples."""
    sequence_length: int | None = None
    """Tokens of a packed sample, as the run will read them."""
    holdout: float = 0.05
    """Share of documents for validation."""
    test: float = 0.0
    """Share of documents for a test split."""
    seed: int = 0
    """Of the held-out choice and the tokenizer sample."""


class Executor(Section):
    """Where parts are worked on."""

    kind: Literal["local", "slurm", "ray"] = "local"
    """Processes of this machine, a Slurm array, a Ray cluster."""
    workers: int = 1
    """Tasks at once; the result is the same for any number."""
    settings: dict[str, Any] = {}
    """Further arguments of datatrove's executor: partition, time, cpus_per_task, mem_per_cpu_gb, env_command; address of Ray."""


class PrepConfig(Section):
    """A preparation."""

    inputs: list[str]
    """Files, folders, patterns and URLs."""
    output: str
    """Folder to make."""
    overwrite: bool = False
    """Replace a finished data set there."""
    records: Records = Records()
    select: Select = Select()
    tokenizer: Vocabulary = Vocabulary()
    write: Write = Write()
    executor: Executor = Executor()


def load_prep(name: str, overrides: list[str] | tuple[str, ...] = ()) -> PrepConfig:
    """Read a YAML file and apply ``key=value`` overrides, as ``load_config`` does for a run.

    Raises:
        UserError: with one line that names the file and field, or the override.
    """
    path = Path(name)
    if not path.is_file():
        raise UserError(f"{name}: no such file; give a YAML file with 'inputs:' and 'output:'")
    return validate_as(PrepConfig, load_tree(path, overrides), str(path) + (" with overrides" if overrides else ""))

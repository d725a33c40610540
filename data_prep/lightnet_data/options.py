"""What a preparation depends on besides its sources and the tokenizer file."""

from dataclasses import dataclass

DEFAULT_HOLDOUT = 0.05
DEFAULT_LANGUAGE_THRESHOLD = 0.65  # datatrove's
DEDUPS = ("exact", "minhash")


@dataclass(frozen=True)
class Options:
    """Options of a preparation.

    ``fields``: fields of a record that hold texts, dots for nested ones; each gives an output of its own.
    ``subset_field``: the field that names a record's subset (the Pile: ``meta.pile_set_name``), for counts and, with
    ``by_subset``, an output each. ``separator``: what stands between the documents of a text file; None: a file is
    one. ``read_as``: format of files of another suffix. ``vocab_size``: ids of a tokenizer to train, None for a size
    that suits the corpus; ``model_type``: "bpe" or "unigram". ``eod_token``: spelling of a given tokenizer's end-of-
    document token. ``holdout``: share of documents held out for validation, ``test``: for a test split. ``seed``: of the
    tokenizer's training sample. ``skip_bad``: count what is bad instead of stopping at it.

    ``min_chars``, ``max_chars``: documents of fewer or more characters are dropped. ``language``: as are those that are
    not, with ``language_threshold`` certainty, of this language. ``dedup``: "exact" keeps the first of equal texts, "minhash"
    one of nearly equal ones. ``shard_tokens``: tokens of an output shard at most; None: a split is one shard.
    ``format``: "megatron" for .bin/.idx, "webdataset" for tar shards of samples of ``sequence_length`` tokens.
    """

    fields: tuple[str, ...] = ("text",)
    subset_field: str | None = None
    by_subset: bool = False
    separator: str | None = None
    read_as: str | None = None
    vocab_size: int | None = None
    model_type: str = "bpe"
    eod_token: str | None = None
    holdout: float = DEFAULT_HOLDOUT
    test: float = 0.0
    seed: int = 0
    skip_bad: bool = False
    min_chars: int | None = None
    max_chars: int | None = None
    language: str | None = None
    language_threshold: float = DEFAULT_LANGUAGE_THRESHOLD
    dedup: str | None = None
    shard_tokens: int | None = None
    format: str = "megatron"
    sequence_length: int | None = None


# What decides how finished parts are put together, not what is in them: another value does not redo them.
OF_THE_MERGE = ("shard_tokens", "holdout", "test", "format", "sequence_length")

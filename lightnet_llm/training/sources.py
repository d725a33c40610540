"""Which prepared data a run reads: one folder or a mixture of several, local or by URL."""

from __future__ import annotations

import atexit
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lightnet_data import manifest as manifests
from lightnet_data import remote
from lightnet_data.dataset import ORDER_VERSION, PackedTokens
from lightnet_data.mixture import Mixture, Schedule, Stage

from ..config.run import RunConfig
from ..errors import UserError, nearest
from . import image_data, sentence_data


@dataclass(frozen=True)
class Source:
    """One prepared split.

    Attributes:
        field: where the configuration names it.
        folder: its folder or URL.
        split: its name there.
        tokenizer: what the manifest says of the tokenizer.
    """

    field: str
    folder: str
    split: str
    tokenizer: dict[str, Any]

    @property
    def location(self) -> str:
        """As the readers of lightnet_data take it."""
        return f"{self.folder}/{self.split}"

    def open(self, config: RunConfig) -> PackedTokens:
        """Its samples."""
        return PackedTokens(self.location, config.data.sequence_length, config.train.seed)


def sources_of(config: RunConfig) -> dict[str, Source]:
    """The sources by name; that of ``data.path`` is called "train".

    Raises:
        UserError: none is set, or one is not a folder written by ``lightnet prep``.
    """
    data = config.data
    if not data.mixture:
        if data.path is None:
            raise UserError("data.path is not set; name a folder written by `lightnet prep INPUT... --output DIR`")
        return {"train": _source("data.path", data.path, "train", None)}
    return {
        name: _source(f"data.mixture.{name}.path", given.path, given.split, given.subset)
        for name, given in data.mixture.items()
    }


def _source(field: str, given: str, split: str, subset: str | None) -> Source:
    folder = given.rstrip("/") if remote.is_url(given) else str(Path(given))
    if not remote.is_url(folder) and not Path(folder).is_dir():
        raise UserError(f"{field} {folder}: no such folder; write it with `lightnet prep INPUT... --output {folder}`")
    facts = manifests.load(folder)
    if subset is not None:
        outputs = {output["name"]: place for place, output in (facts.get("outputs") or {}).items()}
        if subset not in outputs:
            known = nearest(subset, list(outputs)) or f"; it has {', '.join(outputs) or 'none'}"
            raise UserError(
                f"{field} {folder}: no subset '{subset}' in it{known} (lightnet prep --by-subset writes them)"
            )
        folder = f"{folder}/{outputs[subset]}"
        facts = manifests.load(folder)
    if facts.get("splits") is not None and split not in facts["splits"]:
        subsets = [output["name"] for output in (facts.get("outputs") or {}).values()]
        has = f"subsets {', '.join(subsets)}" if subsets else f"splits {', '.join(facts['splits']) or 'none'}"
        raise UserError(f"{field} {folder}: no split '{split}' in it, it has {has}")
    return Source(field, folder, split, facts.get("tokenizer") or {})


def common_tokenizer(sources: dict[str, Source]) -> Source:
    """A source whose tokenizer is that of all.

    Raises:
        UserError: two were cut with different tokenizers.
    """
    first, *others = sources.values()
    for other in others:
        check_same_tokenizer(first, other)
    return first


def check_same_tokenizer(first: Source, other: Source) -> None:
    """Refuse another tokenizer than the first's.

    Raises:
        UserError: it was used.
    """
    for fact in ("fingerprint", "eod_id", "vocab_size"):
        mine, its = first.tokenizer.get(fact), other.tokenizer.get(fact)
        if mine != its:
            raise UserError(
                f"{other.field} {other.folder}: cut with another tokenizer ({fact} {_short(its)}) than {first.folder} "
                f"({_short(mine)}); prepare it again with --tokenizer {first.folder}"
            )


def _short(value: Any) -> str:
    return str(value)[:16]


def tokenizer_file(source: Source) -> Path | None:
    """The tokenizer beside a source, in a folder with its manifest; copied to this machine if it lies elsewhere."""
    if remote.is_url(source.folder):
        return _copied_tokenizer(source.folder, source.tokenizer.get("file"))
    files = [Path(source.folder, name) for name in ("tokenizer.model", "tokenizer.json")]
    return next((file for file in files if file.is_file()), None)


@lru_cache(maxsize=32)  # it is asked for several times at a start
def _copied_tokenizer(url: str, file: str | None) -> Path | None:
    """Copies a tokenizer and its manifest into a folder that goes when this process ends."""
    files = {}
    for name in [manifests.FILE_NAME, *([file] if file else [])]:
        try:
            files[name] = remote.read(f"{url}/{name}")
        except FileNotFoundError:
            raise UserError(f"{url}/{name}: no such file; copy the folder again") from None
    folder = Path(mkdtemp(prefix="lightnet-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / file if file else None


def stages_of(config: RunConfig) -> list[Stage]:
    """The weights of a mixture by the sample they hold from; sources that never have any are left out."""
    data = config.data
    used = used_sources(config)
    weights = [(0, {name: source.weight for name, source in data.mixture.items()})]
    weights += [(-(-stage.from_tokens // data.sequence_length), stage.weights) for stage in data.stages]
    return [Stage(start, {name: w for name, w in given.items() if name in used}) for start, given in weights]


def used_sources(config: RunConfig) -> list[str]:
    """Names of sources that have a weight at some time."""
    later = {name for stage in config.data.stages for name, weight in stage.weights.items() if weight}
    return [name for name, source in config.data.mixture.items() if source.weight or name in later] or ["train"]


def training_samples(config: RunConfig) -> PackedTokens | Mixture:
    """What a run trains on; sources without a weight are not opened."""
    sources = sources_of(config)
    if not config.data.mixture:
        return sources["train"].open(config)
    return Mixture({name: sources[name].open(config) for name in used_sources(config)}, stages_of(config))


def identity_of(config: RunConfig, tokens: dict[str, int]) -> dict[str, Any]:
    """What a run must find again when it is resumed; kept in every checkpoint. Weights and stages are in the run's configuration.

    Args:
        tokens: of each source; those that never have a weight are no part of the run.
    """
    sources = sources_of(config)
    tokens = {name: tokens[name] for name in sorted(used_sources(config))}
    fingerprint = next(iter(sources.values())).tokenizer.get("fingerprint")
    identity: dict[str, Any] = {"tokens": sum(tokens.values()), "tokenizer": fingerprint, "order": ORDER_VERSION}
    if config.data.mixture:
        identity["sources"] = tokens
    return identity


def epochs(config: RunConfig, samples: int) -> list[dict[str, Any]]:
    """What a run of ``samples`` samples takes of each source: name, stored tokens, tokens and share of the run, epochs."""
    if config.model.image is not None:
        return image_data.epochs(config, samples)
    if config.model.head == "sequence_classifier":
        return sentence_data.epochs(config, samples)
    sources = sources_of(config)
    if config.data.mixture:
        used = used_sources(config)
        given = Schedule(sorted(used), stages_of(config)).given(samples)
    else:
        given = {"train": samples}
    rows = []
    for name, source in sources.items():
        count = given.get(name, 0)
        opened = source.open(config) if count else None
        rows.append(
            {
                "source": name,
                "location": source.location,
                "stored_tokens": opened.tokens if opened else None,
                "tokens": count * config.data.sequence_length,
                "share": round(count / samples, 6) if samples else 0.0,
                "epochs": round(count / opened.samples_per_epoch, 4) if opened else 0.0,
            }
        )
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of :func:`epochs` for reading."""
    text = []
    for row in rows:
        if "stored_samples" in row:
            of = f"{row['samples']:,} samples of {row['stored_samples']:,} stored, {row['epochs']:.3g} epochs"
            text.append(f"data {row['source']} ({row['location']}): {of}")
            continue
        stored = f" of {row['stored_tokens']:,} stored" if row["stored_tokens"] else ""
        text.append(
            f"data {row['source']} ({row['location']}): {row['tokens']:,} tokens{stored}, {row['share']:.2%} of the run, "
            f"{row['epochs']:.3g} epochs"
        )
    return text

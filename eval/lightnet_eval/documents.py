"""Held-out documents, from prepared token shards or from text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from lightnet_data import manifest, reading, sources
from lightnet_data.documents import DocumentReader
from lightnet_data.options import Options
from lightnet_data.tokenizer import Tokenizer
from numpy.typing import NDArray

from lightnet_llm.errors import UserError


class HeldOutDocument(NamedTuple):
    """One document to score.

    Attributes:
        tokens: int64 [n], n >= 1, the last one the end-of-document token.
        byte_length: UTF-8 bytes of the text.
        text: the text itself, or None where no tokenizer is at hand to decode the tokens.
    """

    tokens: NDArray[np.int64]
    byte_length: int
    text: str | None


class DocumentSource(NamedTuple):
    """Documents in order.

    Attributes:
        documents: read once.
        eod_id: the end-of-document token, which is also every document's first input.
        name: where they come from, for people.
        total_bytes: bytes of all texts, for a progress bar; None when that is not known beforehand.
    """

    documents: Iterator[HeldOutDocument]
    eod_id: int
    name: str
    total_bytes: int | None


def prepared(place: str | Path, tokenizer: Tokenizer | None) -> DocumentSource:
    """Documents of a data set written by ``lightnet prep``.

    Args:
        place: its folder (the held-out split is read) or a .bin/.idx prefix such as ``DIR/train``.
        tokenizer: the model's; None when it is not at hand, and the documents then have no text.

    Raises:
        UserError: there is no such data set, or it was cut with another tokenizer.
        DataError: a file is damaged or lacks the documents' byte lengths.
    """
    path = Path(place)
    prefix = path / "validation" if path.is_dir() else path
    if not Path(f"{prefix}.idx").is_file():
        way_out = "lightnet prep writes a held-out split unless --holdout is 0; or score text with --text"
        raise UserError(f"{prefix}.idx: no such file; name a folder of `lightnet prep` or a prefix ({way_out})")
    facts = (manifest.find(prefix) or {}).get("tokenizer") or {}
    fingerprint = facts.get("fingerprint")
    if tokenizer is not None and fingerprint not in (None, tokenizer.fingerprint):
        raise UserError(
            f"{prefix}: cut with another tokenizer (sha256 {fingerprint[:16]}) than the model's "
            f"({tokenizer.fingerprint[:16]}); score the text itself with --text"
        )
    reader = DocumentReader(prefix)
    if tokenizer is not None and reader.eod_id != tokenizer.eod_id:
        raise UserError(
            f"{prefix}: documents end with token {reader.eod_id}, the model's with {tokenizer.eod_id}; "
            "score the text itself with --text"
        )

    def read() -> Iterator[HeldOutDocument]:
        for document in reader:
            text = tokenizer.decode(document.tokens[:-1].tolist()) if tokenizer is not None else None
            yield HeldOutDocument(document.tokens, document.byte_length, text)

    return DocumentSource(read(), reader.eod_id, str(prefix), int(reader.byte_lengths.sum()))


def from_text(place: str | Path, tokenizer: Tokenizer, warn: Callable[[str], None]) -> DocumentSource:
    """Documents of a file or folder of raw text, cut the way ``lightnet prep`` reads it.

    Args:
        place: .jsonl files hold a document in the field "text" of each line, any other file is one document.
        warn: told about empty documents, which are left out.

    Raises:
        DataError: no such file, or nothing to read in a folder.
        UserError: while reading, at the first file or line that is not text.
    """
    found = sources.find([place])
    plain = all(source.compression is None and source.format == "text" for source in found.files)

    def read() -> Iterator[HeldOutDocument]:
        for source in found.files:
            for item in reading.read(reading.Span(source), Options()):
                if isinstance(item, reading.Problem):
                    if item.kind not in ("empty", reading.BLANK):
                        raise UserError(item.message)
                    warn(item.message)
                    continue
                tokens = np.array([*tokenizer.encode(item.text), tokenizer.eod_id], dtype=np.int64)
                yield HeldOutDocument(tokens, len(item.text.encode()), item.text)

    size = sum(source.path.stat().st_size for source in found.files if source.path.is_file())
    return DocumentSource(read(), tokenizer.eod_id, str(place), size if plain else None)

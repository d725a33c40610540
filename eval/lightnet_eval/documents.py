"""Held-out documents, from prepared token shards or from text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from lightnet_data import manifest, reading, sources
from lightnet_data.documents import DocumentReader
from lightnet_data.options import Options
from lightnet_data.storage import missing_hint
from lightnet_data.stream import shards_of
from lightnet_data.tokenizer import Tokenizer
from numpy.typing import NDArray

from lightnet_llm.errors import UserError


class HeldOutDocument(NamedTuple):
    """One document to score.

    Attributes:
        tokens: int64 [n], n >= 1, the last one the end-of-document token.
        byte_length: UTF-8 bytes of the text.
        text: the text itself, or None where no tokenizer is at hand to decode the tokens.
        subset: the part of the data it belongs to, "" where there are no parts.
    """

    tokens: NDArray[np.int64]
    byte_length: int
    text: str | None
    subset: str = ""


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
        place: its folder (the held-out split is read), a .bin/.idx prefix such as ``DIR/train``, or a folder of such
            folders (``lightnet prep --by-subset``), each of which is a subset.
        tokenizer: the model's; None when it is not at hand, and the documents then have no text.

    Raises:
        UserError: there is no such data set, or it was cut with another tokenizer.
        DataError: a file is damaged or lacks the documents' byte lengths.
    """
    path = Path(place)
    prefix = path / "validation" if path.is_dir() else path
    if _is_there(prefix):
        return _one_prepared(prefix, tokenizer)
    parts = [child for child in sorted(path.glob("*")) if child.is_dir() and _is_there(child / "validation")]
    if not parts:
        way_out = (
            "name a folder of `lightnet prep` or a prefix (lightnet prep writes a held-out split unless --holdout is 0; "
            "or score text with --text)"
        )
        raise UserError(f"{prefix}.idx: no such file; {missing_hint(str(prefix), way_out)}")
    found = [_one_prepared(part / "validation", tokenizer, part.name) for part in parts]
    if len({source.eod_id for source in found}) > 1:
        raise UserError(f"{path}: its subsets were cut with different tokenizers; score the text itself with --text")
    documents = (document for source in found for document in source.documents)
    total = sum(source.total_bytes or 0 for source in found)
    return DocumentSource(documents, found[0].eod_id, str(path), total)


def _is_there(prefix: Path) -> bool:
    return Path(f"{shards_of(prefix)[0]}.idx").is_file()


def _one_prepared(prefix: Path, tokenizer: Tokenizer | None, subset: str = "") -> DocumentSource:
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
            yield HeldOutDocument(document.tokens, document.byte_length, text, subset)

    return DocumentSource(read(), reader.eod_id, str(prefix), int(reader.byte_lengths.sum()))


def from_text(
    place: str | Path,
    tokenizer: Tokenizer,
    warn: Callable[[str], None],
    subset_field: str | None = None,
    field: str = "text",
) -> DocumentSource:
    """Documents of a file or folder of raw text, cut the way ``lightnet prep`` reads it.

    Args:
        place: .jsonl files hold a document in ``field`` of each line, any other file is one document. What lies in
            a folder directly, files and folders, are its subsets.
        warn: told about empty documents, which are left out.
        subset_field: the field that names a record's subset (the Pile: ``meta.pile_set_name``), in place of that.

    Raises:
        DataError: no such file, or nothing to read in a folder.
        UserError: while reading, at the first file or line that is not text.
    """
    found = sources.find([place])
    plain = all(source.compression is None and source.format == "text" for source in found.files)

    root = Path(place)
    options = Options(fields=(field,), subset_field=subset_field)

    def read() -> Iterator[HeldOutDocument]:
        for source in found.files:
            inside = source.path.relative_to(root).parts[0] if root in source.path.parents else ""
            for item in reading.read(reading.Span(source), options):
                if isinstance(item, reading.Problem):
                    if item.kind not in ("empty", reading.BLANK):
                        raise UserError(item.message)
                    warn(item.message)
                    continue
                tokens = np.array([*tokenizer.encode(item.text), tokenizer.eod_id], dtype=np.int64)
                subset = inside if subset_field is None else item.subset
                yield HeldOutDocument(tokens, len(item.text.encode()), item.text, subset)

    size = sum(source.path.stat().st_size for source in found.files if source.path.is_file())
    return DocumentSource(read(), tokenizer.eod_id, str(place), size if plain else None)

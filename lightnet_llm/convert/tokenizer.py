"""Tokenizer files for a Hugging Face folder, and back.

Training reads a document behind one end-of-document token and never finds a special token in a text. The exported
tokenizer does the same: it puts that token first, and reads the spelling of a special token as text.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightnet_data.errors import DataError
from lightnet_data.tokenizer import FILE_NAMES, SENTENCEPIECE, SPACE_SYMBOL, Tokenizer

from ..errors import UserError

# What the two must agree on before a conversion is trusted.
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces,\ta tab,\n\na blank line \r\n and an end of spaces   ",
    "1234567890 + 3.14159 = 0x7f; a_b-c/d\\e 'quoted' \"twice\"",
    "naïve façade, Ελληνικά, Русский, 日本語, العربية, हिन्दी, 🙂👩‍👩‍👧 e\u0301",
    "\x00\x07\x7f\ufeff\u00a0\u2003\u2028",
    "",
    " ",
    "a" * 300 + " " * 70 + "\n" * 9,
)


# The library's unigram model finds these in a text, whatever it is told.
SPELLINGS = "<s></s><unk><|endofdocument|><|endoftext|><0x41>[CLS]"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and where it was found."""

    tokenizer: Tokenizer
    path: Path


def beside(*folders: Path) -> Vocabulary | None:
    """The tokenizer in one of the folders, the last that has one.

    Raises:
        UserError: it is damaged.
    """
    for folder in reversed(folders):
        for name in FILE_NAMES.values():
            if (folder / name).is_file():
                try:
                    return Vocabulary(Tokenizer.load(folder / name, _end(folder)), folder / name)
                except DataError as error:
                    raise UserError(f"{error}; copy the folder again") from None
    return None


def _end(folder: Path) -> str | None:
    """The end-of-document token that ``keep`` noted."""
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


def keep(vocabulary: Vocabulary, folder: Path) -> None:
    """The tokenizer's own file, byte for byte, and the name of its end-of-document token."""
    vocabulary.tokenizer.save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": vocabulary.tokenizer.eod_token}) + "\n")


def mask_of(vocabulary: Vocabulary, wanted: str | None) -> tuple[str, int]:
    """Spelling and id of the token that hides others in training (``masking.token``, see ``training.masking``).

    Where the tokenizer has none it is the first id after its own, and gets a name here.
    """
    from ..training.masking import SPELLINGS

    tokenizer = vocabulary.tokenizer
    pieces = {tokenizer.piece(token): token for token in range(tokenizer.vocab_size)}
    found = next((name for name in ([wanted] if wanted else SPELLINGS) if name in pieces), None)
    return (SPELLINGS[1], tokenizer.vocab_size) if found is None else (found, pieces[found])


def export(
    vocabulary: Vocabulary, folder: Path, mask: tuple[str, int] | None = None, causal: bool = True
) -> str | None:
    """Write tokenizer.json and its configuration for ``AutoTokenizer``; returns what it cannot do, if anything.

    Args:
        mask: spelling and id of a masked model's mask token. It is found in a text, and so are the other special tokens.
        causal: whether batches are padded on the left, for generation, and a pair is one text.
    """
    tokenizer = vocabulary.tokenizer
    try:
        fast = _from_sentencepiece(tokenizer) if tokenizer.kind == SENTENCEPIECE else _from_json(tokenizer)
    except ImportError as error:
        return f"{vocabulary.path}: no tokenizer files were written, {error.name} is missing (pip install {error.name})"
    fast.encode_special_tokens = True
    topics: dict[str, str] = pydoc_data.topics.topics
    for probe in (*PROBES, "\n".join(topics[name] for name in sorted(topics))[:20000]):
        if fast.encode(probe, add_special_tokens=False).ids != tokenizer.encode(probe):
            return (
                f"{vocabulary.path}: no tokenizer files were written, as Transformers would read {probe[:40]!r} differently; "
                "encode with its own file, which lies in training/"
            )
    problem = None
    if fast.encode(SPELLINGS, add_special_tokens=False).ids != tokenizer.encode(SPELLINGS):
        problem = f"{vocabulary.path}: Transformers reads the spelling of a special token in a text as that token"
    from tokenizers.processors import TemplateProcessing

    eod = tokenizer.eod_token
    if mask is not None:
        from tokenizers import AddedToken

        fast.encode_special_tokens = False
        fast.add_special_tokens([AddedToken(mask[0], special=True, normalized=False)])
        if fast.token_to_id(mask[0]) != mask[1]:
            return (
                f"{vocabulary.path}: no tokenizer files were written, as the mask token would be {fast.token_to_id(mask[0])} "
                f"there and is {mask[1]} in training; encode with its own file, which lies in training/"
            )
    pair = f"{eod} $A $B" if causal else f"{eod} $A {eod} $B"  # as `lightnet glue` writes pairs
    fast.post_processor = TemplateProcessing(single=f"{eod} $A", pair=pair, special_tokens=[(eod, tokenizer.eod_id)])
    fast.save(str(folder / "tokenizer.json"))
    facts: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eod,
        "eos_token": eod,
        "pad_token": eod,
        **({} if mask is None else {"mask_token": mask[0]}),
        "split_special_tokens": mask is None,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left" if causal else "right",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")
    return problem


def _from_json(tokenizer: Tokenizer) -> Any:
    import tokenizers

    fast = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
    fast.no_truncation()
    fast.no_padding()
    return fast


def _from_sentencepiece(tokenizer: Tokenizer) -> Any:
    """The same model for the tokenizers library."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Fast

    format_of: Any = sentencepiece_model_pb2  # classes made at import
    proto = format_of.ModelProto()
    proto.ParseFromString(tokenizer.model)
    kinds = format_of.ModelProto.SentencePiece
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    unknown = next((index for index, piece in enumerate(proto.pieces) if piece.type == kinds.UNKNOWN), None)
    ids = {piece: index for index, (piece, _) in enumerate(pieces)}
    if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
        learned = {piece.piece for piece in proto.pieces if piece.type == kinds.NORMAL}
        merges = []
        for place, (piece, score) in enumerate(pieces):
            if piece in learned:
                cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
                merges += [(-score, place, pair) for pair in cuts if pair[0] in learned and pair[1] in learned]
        merges.sort(key=lambda merge: merge[:2])
        fast = Fast(
            models.BPE(
                ids,
                [pair for *_, pair in merges],
                unk_token=None if unknown is None else pieces[unknown][0],
                fuse_unk=True,
                byte_fallback=proto.trainer_spec.byte_fallback,
            )
        )
    else:
        fast = Fast(models.Unigram(pieces, unknown, proto.trainer_spec.byte_fallback))
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE_SYMBOL))
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_SYMBOL)])
    fast.decoder = decoders.Sequence([decoders.Replace(SPACE_SYMBOL, " "), decoders.ByteFallback(), decoders.Fuse()])
    special = (piece.piece for piece in proto.pieces if piece.type in (kinds.CONTROL, kinds.UNKNOWN))
    fast.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return fast

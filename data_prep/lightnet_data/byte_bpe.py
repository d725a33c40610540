"""A fast engine for byte-level BPE: tiktoken over the vocabulary and merges of a Hugging Face ``tokenizer.json``.

It takes the place of the tokenizers library only where both give the same ids (the GPT-2 and GPT-NeoX families); for
any other tokenizer ``engine`` is None and the library itself encodes. What must hold, and is checked here:

- merges are in the order of the ids they make, since tiktoken has one number for both;
- every piece of the vocabulary encodes to itself by the merges, since tiktoken looks whole words up;
- text is cut by GPT-2's expression, after at most NFC normalisation;
- tokens added beside the special ones are runs of 2, 3, ... k spaces. The library takes them out of the text before it
  cuts words, longest first; here they are the first alternative of the expression, and white space stops before one.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

# Bytes that UTF-8 text can hold; GPT-NeoX has no piece for the others.
UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
PROBES = (
    "Hello world's  it'll I'VE 1234 x_y\t\tz\r\n\n  end \u00a0\u3000 e\u0301 \u00e9 \u4e1c\u4eac \U0001f600 \u0660\u0661 ",
    " \n  a   b" + " " * 25 + "c" + " " * 26 + "\n \n  \n" + " " * 50,
    "<|endoftext|> <|padding|>\u2028\x85\x1c\x00\ufeff\u200b!?' 's",
)


def engine(
    content: dict[str, Any], alphabet: dict[str, int], library: Any, special: set[int]
) -> Callable[[str], list[int]] | None:
    """The fast encoder of a tokenizer, or None where equal ids are not certain.

    Args:
        content: the parsed ``tokenizer.json``.
        alphabet: byte behind each character of a byte-level vocabulary.
        library: the ``tokenizers.Tokenizer``, with ``encode_special_tokens`` on.
        special: ids of special tokens, which text never gives.

    Returns:
        A function from a text to its ids, int64 [n].
    """
    try:
        import tiktoken
    except ImportError:
        return None
    model = content.get("model") or {}
    plain = not any(
        model.get(key)
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    if model.get("type") != "BPE" or not plain or model.get("ignore_merges") or not _cuts_like_gpt2(content):
        return None
    runs = _space_runs(content, special)
    ranks = None if runs is None else _ranks(model, alphabet, library, special)
    if ranks is None or runs is None:
        return None
    for length, token in runs.items():
        # Model pieces with such a run in them are never met: white space is cut before it.
        ranks[b" " * length] = token
    encoding = tiktoken.Encoding(
        "lightnet", pat_str=_expression(max(runs, default=0)), mergeable_ranks=ranks, special_tokens={}
    )
    normalise = content.get("normalizer") is not None
    changes = may_change() if normalise else None

    def encode(text: str) -> list[int]:
        if changes is not None and not text.isascii() and changes.search(text):
            text = library.normalizer.normalize_str(text)
        ids: list[int] = encoding.encode_ordinary(text)
        return ids

    for probe in PROBES:
        if encode(probe) != library.encode(probe, add_special_tokens=False).ids:
            return None
    return encode


@lru_cache(maxsize=1)
def may_change() -> re.Pattern[str]:
    """The characters without which a text is its own NFC, in any version of Unicode.

    Python and the tokenizers library know different versions, so the library normalises. It is asked only about texts with
    a character that decomposes, combines or composes with the one before, or is not assigned in Python's version: no
    later version changes these properties of an assigned character.
    """
    composing = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}  # Hangul vowels and finals
    plain = [*range(0x300, 0x4E00), *range(0xA000, 0xAC00), *range(0xD7A4, 0xD800), *range(0xF900, 0x10000)]
    for code in plain:
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            composing.add(chr(int(parts[1], 16)))
    found = "".join(
        character
        for character in map(chr, plain)
        if character in composing
        or unicodedata.combining(character)
        or unicodedata.category(character) == "Cn"
        or not unicodedata.is_normalized("NFC", character)
    )
    return re.compile(
        f"[{re.escape(found)}\U00010000-\U0010ffff]"
    )  # one range: re is slow with single characters beyond 16 bits


def _cuts_like_gpt2(content: dict[str, Any]) -> bool:
    cutter, normaliser = content.get("pre_tokenizer") or {}, content.get("normalizer")
    return (
        cutter.get("type") == "ByteLevel"
        and not cutter.get("add_prefix_space", True)
        and cutter.get("use_regex", True)
        and (normaliser is None or normaliser == {"type": "NFC"})
    )


def _space_runs(content: dict[str, Any], special: set[int]) -> dict[int, int] | None:
    """Ids of the added runs of spaces by length: 2 to k without a gap, or nothing; None if other tokens are added."""
    runs: dict[int, int] = {}
    for token in content.get("added_tokens") or []:
        if token["id"] in special:
            continue
        if token["content"].strip(" ") or any(token.get(key) for key in ("lstrip", "rstrip", "single_word")):
            return None
        runs[len(token["content"])] = token["id"]
    return runs if sorted(runs) == list(range(2, len(runs) + 2)) else None


def _ranks(model: dict[str, Any], alphabet: dict[str, int], library: Any, special: set[int]) -> dict[bytes, int] | None:
    vocabulary: dict[str, int] = model["vocab"]
    ranks: dict[bytes, int] = {}
    for piece, token in vocabulary.items():
        if token in special:
            continue
        if not piece or any(character not in alphabet for character in piece):
            return None
        ranks[bytes(alphabet[character] for character in piece)] = token
        if [found.id for found in library.model.tokenize(piece)] != [token]:
            return None
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    made = np.array([vocabulary.get("".join(pair), -1) for pair in pairs], dtype=np.int64)
    letters = [ranks.get(bytes([byte]), -1) for byte in UTF8_BYTES]
    if min(letters) < 0 or (len(made) and (max(letters) >= made[0] or made[0] < 0)) or (np.diff(made) <= 0).any():
        return None
    singles = sum(len(piece) == 1 for piece in ranks)
    return ranks if len(ranks) == singles + len(made) else None


def _expression(longest: int) -> str:
    """GPT-2's expression; with runs of spaces, white space is cut before each place where one begins."""
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
    if not longest:
        return words + r"|\s++$|\s+(?!\S)|\s"
    space = r"(?:(?!  )\s)"
    return rf" {{2,{longest}}}|{words}|{space}+(?!\S)|{space}"

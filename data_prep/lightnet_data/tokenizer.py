"""One small interface over SentencePiece models and Hugging Face ``tokenizer.json`` files."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightnet_data import byte_bpe, manifest
from lightnet_data.errors import DataError

# SentencePiece writes a space as this character, so a text's own U+2581 comes back as a space.
SPACE_SYMBOL = "\u2581"
EOD_TOKEN = "<|endofdocument|>"
# Spellings of an end-of-document token, tried in this order where the tokenizer does not name one.
KNOWN_EOD_TOKENS = (
    EOD_TOKEN,
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<eod>",
    "<|im_end|>",
)
# SentencePiece takes more than linear time in the length of a text: three times as long for a text of 4 MB as for its
# parts of this length.
PART_CHARACTERS = 8000
# The fast engine of byte-level BPE takes linear time, but would hold a list of all ids of a long text.
LONG_PART_CHARACTERS = 1 << 18
TEXTS_OF_A_THREAD = 256  # at least, where many are encoded at once
_CUT = re.compile(f"[^\\s{SPACE_SYMBOL}](?= )")
SENTENCEPIECE, HUGGING_FACE = "sentencepiece", "huggingface"
FILE_NAMES = {SENTENCEPIECE: "tokenizer.model", HUGGING_FACE: "tokenizer.json"}


class _Backend(Protocol):
    kind: str
    engine: str
    vocab_size: int
    eod_id: int
    divisible: bool

    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, texts: list[str]) -> list[list[int]]: ...
    def parts(self, text: str) -> Iterator[list[int]]: ...
    def decode(self, ids: list[int]) -> str: ...
    def piece_bytes(self, token: int) -> bytes: ...
    def token(self, token: int) -> str: ...


class Tokenizer:
    """A loaded tokenizer.

    Attributes:
        kind: "sentencepiece" or "huggingface".
        engine: the library that encodes: "sentencepiece", "tokenizers", or "tiktoken" where it is sure to give the
            same ids (see ``byte_bpe``).
        vocab_size: largest id + 1, added tokens included.
        eod_id: id of the end-of-document token; text never encodes to it.
        eod_token: its spelling.
        fingerprint: sha256 of the tokenizer file, in hex (what ``sha256sum`` prints for it).
        model: the bytes of the tokenizer file.
    """

    def __init__(self, model: bytes, eod_token: str | int | None = None, name: str = "tokenizer") -> None:
        self.model = model
        if model.lstrip()[:1] == b"{":
            self._backend: _Backend = _HuggingFace(model, eod_token, name)
        else:
            self._backend = _SentencePiece(model, eod_token, name)
        self.kind = self._backend.kind
        self.engine = self._backend.engine
        self.vocab_size = self._backend.vocab_size
        self.eod_id = self._backend.eod_id
        self.eod_token = self._backend.token(self.eod_id)
        self.fingerprint = hashlib.sha256(model).hexdigest()

    @classmethod
    def load(cls, path: str | Path, eod_token: str | None = None) -> "Tokenizer":
        """Load a tokenizer.

        Args:
            path: a SentencePiece model, a Hugging Face ``tokenizer.json``, or a folder that holds one (an output
                folder of ``lightnet prep`` or a Hugging Face model folder).
            eod_token: spelling of the end-of-document token. Left out: from the manifest or ``tokenizer_config.json``
                beside the tokenizer, else the first known spelling in the vocabulary.

        Raises:
            DataError: no such file, not a tokenizer, or no end-of-document token in it.
        """
        path = Path(path)
        if path.is_dir():
            found = [path / name for name in FILE_NAMES.values() if (path / name).is_file()]
            if len(found) != 1:
                names = " or ".join(FILE_NAMES.values())
                raise DataError(f"{path}: holds {len(found)} tokenizers ({names}), need one; give the file")
            path = found[0]
        try:
            model = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot read the tokenizer ({error.strerror})") from None
        if not model:
            raise DataError(f"{path}: the tokenizer file is empty")
        named: str | int | None = eod_token
        if named is None:
            named = _named_beside(path, model)
        return cls(model, named, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, **options: Any) -> "Tokenizer":
        """Train a SentencePiece tokenizer; see :func:`lightnet_data.training.train`."""
        from lightnet_data.training import train

        return cls(train(texts, vocab_size, **options))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; the spelling of a special token in it is text like any other."""
        return self._backend.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text, by several threads where there are many."""
        return self._backend.encode_all(list(texts))

    def divides(self, text: str, place: int) -> bool:
        """Whether a text surely encodes to the ids of what stands before a place in it and of what stands after it: so it
        is with most tokenizers before a space that follows another character."""
        return self._backend.divisible and place > 0 and _CUT.match(text, place - 1) is not None

    def encode_array(self, text: str) -> NDArray[np.int32]:
        """The ids of ``encode`` as int32 [n], in memory that a document of 50 MB leaves small."""
        parts = [np.array(part, dtype=np.int32) for part in self._backend.parts(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens are left out and broken UTF-8 shows as U+FFFD."""
        return self._backend.decode([int(token) for token in ids])

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The UTF-8 bytes that each token stands for, joined; special tokens stand for none.

        Bytes of a split may be cut anywhere, so a program that prints token by token can hold back an incomplete
        character. No space is trimmed at the start, as the ids may continue a text.
        """
        return b"".join(self._backend.piece_bytes(int(token)) for token in ids)

    def piece(self, token: int) -> str:
        """How the vocabulary spells an id; empty for a hole in it."""
        return self._backend.token(token)

    def special_ids(self) -> list[int]:
        """Ids that stand for no text, in order."""
        return [token for token in range(self.vocab_size) if not self._backend.piece_bytes(token)]

    def save(self, folder: str | Path) -> Path:
        """Copy the tokenizer file, byte for byte, to ``folder`` under its usual name; returns its path."""
        path = Path(folder) / FILE_NAMES[self.kind]
        path.write_bytes(self.model)
        return path

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[bytes, int]]:
        return Tokenizer, (self.model, self.eod_id)


def _named_beside(path: Path, model: bytes) -> str | int | None:
    """The end-of-document token that files beside a tokenizer name: its manifest's id, or its configuration's eos."""
    if (path.parent / manifest.FILE_NAME).is_file():
        try:
            written = manifest.load(path.parent)["tokenizer"]
        except DataError:  # somebody else's manifest.json
            written = {}
        if written.get("fingerprint") == hashlib.sha256(model).hexdigest():
            return int(written["eod_id"])
    try:
        token = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and path.suffix == ".json" else None


def _find_eod(lookup: Callable[[str], int | None], size: int, named: str | int | None, default: int, name: str) -> int:
    """Id of the end-of-document token: by id, by spelling, the model's own (``default`` if >= 0), or a known one."""
    if isinstance(named, int):
        if not 0 <= named < size:
            raise DataError(f"{name}: end-of-document id {named} is not below the vocabulary size {size}")
        return named
    if named is not None:
        found = lookup(named)
        if found is None:
            raise DataError(f"{name}: no token {named!r} in the vocabulary; name one that is with --eod-token")
        return found
    own = lookup(EOD_TOKEN)
    if own is not None:
        return own
    if default >= 0:
        return default
    for token in KNOWN_EOD_TOKENS:
        found = lookup(token)
        if found is not None:
            return found
    raise DataError(f"{name}: no end-of-document token such as {EOD_TOKEN} or </s>; name one with --eod-token")


def _threads(texts: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, texts // TEXTS_OF_A_THREAD))


def divided(text: str, characters: int) -> Iterator[str]:
    """A text in parts of at least so many characters, cut before a space that follows another character."""
    start = 0
    while len(text) - start > characters:
        cut = _CUT.search(text, start + characters - 1)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


class _SentencePiece:
    kind = SENTENCEPIECE
    engine = "sentencepiece"

    def __init__(self, model: bytes, eod_token: str | int | None, name: str) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError, TypeError):
            raise DataError(f"{name}: neither a SentencePiece model nor a Hugging Face tokenizer.json") from None
        self.vocab_size = int(self._processor.vocab_size())
        self.eod_id = _find_eod(self._lookup, self.vocab_size, eod_token, self._processor.eos_id(), name)
        if not self._processor.is_control(self.eod_id):
            raise DataError(
                f"{name}: {self.token(self.eod_id)!r} is not a control token, so text could encode to it; name another "
                "with --eod-token"
            )
        self.divisible = self._is_divisible()

    def _lookup(self, token: str) -> int | None:
        found = int(self._processor.piece_to_id(token))
        return found if self._processor.id_to_piece(found) == token else None

    def encode(self, text: str) -> list[int]:
        return [token for part in self.parts(text) for token in part]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        short = [index for index, text in enumerate(texts) if len(text) <= PART_CHARACTERS]
        found = self._processor.encode([texts[index] for index in short], num_threads=_threads(len(short)))
        done = dict(zip(short, found, strict=True))
        return [done[index] if index in done else self.encode(text) for index, text in enumerate(texts)]

    def parts(self, text: str) -> Iterator[list[int]]:
        return map(self._processor.encode, divided(text, PART_CHARACTERS) if self.divisible else [text])

    def _is_divisible(self) -> bool:
        """Whether a text encodes to the same ids in parts cut before a space that follows another character.

        So it is where no piece has a space inside it or at its end behind something else, and nothing is trimmed or
        put in front.
        """
        for probe in ("a b", " a  b "):
            if b"".join(map(self.piece_bytes, self._processor.encode(probe))) != probe.encode():
                return False
        pieces = (self.token(token) for token in range(self.vocab_size))
        return not any(SPACE_SYMBOL in piece.lstrip(SPACE_SYMBOL) for piece in pieces)

    def decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text

    def token(self, token: int) -> str:
        piece: str = self._processor.id_to_piece(token)
        return piece

    def piece_bytes(self, token: int) -> bytes:
        if self._processor.is_control(token):
            return b""
        piece = self.token(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # "<0x41>"
        if self._processor.is_unknown(token):
            return " \u2047 ".encode()  # as SentencePiece decodes it
        return piece.replace(SPACE_SYMBOL, " ").encode()


class _HuggingFace:
    kind = HUGGING_FACE

    def __init__(self, model: bytes, eod_token: str | int | None, name: str) -> None:
        import tokenizers

        try:
            content = json.loads(model)
            self._tokenizer = tokenizers.Tokenizer.from_str(model.decode())
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{name}: not a Hugging Face tokenizer.json ({error})") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the spelling of a special token in a text is text
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod_id = _find_eod(self._tokenizer.token_to_id, self.vocab_size, eod_token, -1, name)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, added_token in added.items() if added_token.special}
        if self.eod_id not in self._special:
            raise DataError(
                f"{name}: {self.token(self.eod_id)!r} is not a special token, so text could encode to it; name another "
                "with --eod-token"
            )
        self._added = {token: added_token.content.encode() for token, added_token in added.items()}
        self._alphabet = _byte_level_alphabet() if _has_byte_level_decoder(content.get("decoder")) else None
        self._fast = byte_bpe.engine(content, _byte_level_alphabet(), self._tokenizer, self._special)
        self.engine = "tiktoken" if self._fast else "tokenizers"
        # GPT-2's expression never reaches over a space behind another character, so such parts are independent.
        self.divisible = self._fast is not None

    def encode(self, text: str) -> list[int]:
        return [token for part in self.parts(text) for token in part]

    def parts(self, text: str) -> Iterator[list[int]]:
        return map(self._fast, divided(text, LONG_PART_CHARACTERS)) if self._fast else iter([self._library(text)])

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        threads = _threads(len(texts))
        if threads == 1:
            return [self.encode(text) for text in texts]
        shares = [texts[first::threads] for first in range(threads)]
        with ThreadPoolExecutor(threads) as pool:  # both engines work without holding Python's lock
            found = list(pool.map(lambda share: [self.encode(text) for text in share], shares))
        return [found[index % threads][index // threads] for index in range(len(texts))]

    def _library(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception, for a word-level model without <unk> say
            raise DataError(f"the tokenizer cannot encode {text[:40]!r} ({error})") from None
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""  # None: a hole in the vocabulary

    def piece_bytes(self, token: int) -> bytes:
        if token in self._special:
            return b""
        if token in self._added:
            return self._added[token]
        piece = self.token(token)
        if self._alphabet is not None:
            return bytes(self._alphabet[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if SPACE_SYMBOL in piece:
            return piece.replace(SPACE_SYMBOL, " ").encode()
        return self.decode([token]).encode()


def _has_byte_level_decoder(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts or [])


def _byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable Latin-1 is itself, the rest from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}

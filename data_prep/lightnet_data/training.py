"""Training of a SentencePiece tokenizer that gives every text back byte for byte."""

import heapq
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import xxhash

from lightnet_data.errors import DataError
from lightnet_data.tokenizer import EOD_TOKEN

SAMPLE_BYTES = 20_000_000
SENTENCE_CHARACTERS = 4096
# <unk>, the end-of-document token and 256 byte pieces come before anything learned.
FIXED_PIECES = 258
# Characters get at most this share of the learned pieces, so that a small vocabulary still learns sequences of a
# script with thousands of characters; the rarer characters fall back to bytes.
CHARACTER_SHARE = 0.5
CHARACTER_COVERAGE = 0.9995
RESERVED_CHARACTERS = "\0\t\u2581\u2585"  # SentencePiece's own marks: string end, boundary, space, unknown


def train(texts: Iterable[str], vocab_size: int, seed: int = 0, sample_bytes: int = SAMPLE_BYTES) -> bytes:
    """Train a SentencePiece model on a corpus: a seeded sample of it, then ``fit``.

    The same texts, in the same order, give the same bytes.

    Args:
        texts: the corpus, one document each; read once.
        vocab_size: number of ids.
        seed: chooses the training sample.
        sample_bytes: a corpus beyond this size is sampled, evenly over its pieces of about 4 kB.

    Returns:
        The model file.

    Raises:
        DataError: see ``fit``.
    """
    sample = Sample(seed, sample_bytes)
    for text in texts:
        sample.add(text)
    return fit(sample.sentences(), vocab_size)


class VocabularyTooLarge(DataError):
    """The corpus does not support that many pieces; ``largest`` is the most that works."""

    def __init__(self, largest: int, message: str) -> None:
        super().__init__(message)
        self.largest = largest


class Sample:
    """At most ``limit`` bytes of a corpus: the sentences with the smallest hash of (seed, place in the corpus)."""

    def __init__(self, seed: int = 0, limit: int = SAMPLE_BYTES) -> None:
        self._seed, self._limit = seed & (2**64 - 1), limit
        self._kept: list[tuple[int, int, int, str]] = []  # a heap with the largest hash on top
        self._size = self._seen = 0

    def add(self, text: str, tag: int = 0, place: str | None = None) -> None:
        """Consider a document; ``tag`` is handed to the filter of ``sentences``.

        ``place`` names the document in the corpus where the sample sees only a part of it.
        """
        for number, sentence in enumerate(sentences(text)):
            drawn = self._seen.to_bytes(8, "little") if place is None else f"{place}\0{number}".encode()
            key = xxhash.xxh3_64_intdigest(drawn, self._seed)
            heapq.heappush(self._kept, (-key, self._seen, tag, sentence))
            self._seen += 1
            self._size += _utf8_length(sentence)
            self._trim()

    def kept(self, part: int) -> list[tuple[int, int, int, str]]:
        """What is kept, to be merged: (minus the hash, order in the corpus, tag, sentence)."""
        return [(key, (part << 48) + order, tag, sentence) for key, order, tag, sentence in self._kept]

    def merge(self, kept: list[tuple[int, int, int, str]]) -> None:
        """Consider what another sample kept of another part."""
        for entry in kept:
            heapq.heappush(self._kept, entry)
            self._size += _utf8_length(entry[3])
            self._trim()

    def _trim(self) -> None:
        while self._size > self._limit and len(self._kept) > 1:
            self._size -= _utf8_length(heapq.heappop(self._kept)[3])

    def sentences(self, wanted: Callable[[int], bool] = lambda tag: True) -> list[str]:
        """The kept sentences of documents whose tag is wanted, in corpus order."""
        return [sentence for _, _, tag, sentence in sorted(self._kept, key=lambda kept: kept[1]) if wanted(tag)]


def fit(sample: list[str], vocab_size: int, model_type: str = "bpe") -> bytes:
    """Train a SentencePiece model ("bpe" or "unigram") on sentences.

    Byte fallback, identity normalisation, no dummy prefix and kept white space make it lossless, but for U+2581, which
    SentencePiece uses for the space. Ids: 0 <unk> (never produced), 1 ``<|endofdocument|>`` (never produced from text),
    2-257 the bytes, then what was learned.

    Returns:
        The model file.

    Raises:
        DataError: the sample has no text, or the vocabulary is too small for the fixed pieces or larger than the
            text supports (the message names the largest that works).
    """
    import sentencepiece

    if vocab_size <= FIXED_PIECES:
        raise DataError(f"vocabulary size {vocab_size}: {FIXED_PIECES} ids are fixed (bytes); use at least 512")
    sample = _without_rare_characters(sample, vocab_size)
    if not any(sentence.strip() for sentence in sample):
        raise DataError("the corpus has no text to train a tokenizer on; give more documents or --tokenizer PATH")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=1.0,  # the sample holds no other characters
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # runs of spaces: the indentation of code
            split_by_unicode_script=False,  # "):\n" and "self." are pieces of code
            split_digits=True,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            control_symbols=[EOD_TOKEN],
            max_sentence_length=2**30,
            num_threads=1,  # is written into the model, so it must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(str(error), vocab_size) from None
    return model.getvalue()


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def sentences(text: str) -> Iterator[str]:
    """A document in parts of at most about 4 kB for the trainer, which joined give the document.

    Cuts fall before a newline where there is one: SentencePiece strips newlines from the end of a training sentence,
    and would never learn the pieces that hold one if parts ended there.
    """
    start = 0
    while start < len(text):
        end = start + SENTENCE_CHARACTERS
        if end < len(text):
            cut = text.rfind("\n", start + 1, end)
            end = cut if cut > start else end
        yield text[start:end]
        start = end


def _without_rare_characters(sample: list[str], vocab_size: int) -> list[str]:
    """The sample cut at each character that gets no piece of its own and is left to bytes.

    SentencePiece refuses a character_coverage below 0.98, which a small vocabulary over a large script needs, and drops
    whole sentences that hold one of the characters it reserves, the tab among them; cutting avoids both.
    """
    counts = Counter[str]()
    for sentence in sample:
        counts.update(sentence)
    room = max(1, int((vocab_size - FIXED_PIECES) * CHARACTER_SHARE))
    wanted = CHARACTER_COVERAGE * counts.total()
    for character in RESERVED_CHARACTERS:
        wanted -= counts.pop(character, 0)
    kept: set[str] = set()
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if wanted <= 0 or len(kept) >= room:
            break
        kept.add(character)
        wanted -= count
    rare = "".join(sorted((set(counts) | set(RESERVED_CHARACTERS)) - kept))
    cut = re.compile(f"[{re.escape(rare)}]+")
    # The trainer strips newlines from the end of a sentence; a space behind them keeps them learnable.
    return [part + " " if part[-1] in "\r\n" else part for text in sample for part in cut.split(text) if part]


def _explained(message: str, vocab_size: int) -> DataError:
    """SentencePiece's error in one line with a way out."""
    largest = re.search(r"too high.*<= *(\d+)", message, re.DOTALL)
    if largest:
        return VocabularyTooLarge(
            int(largest[1]),
            f"vocabulary size {vocab_size} is larger than the corpus supports; the largest that works is "
            f"{largest[1]}: use --vocab-size {largest[1]} or more text",
        )
    detail = " ".join(message.split())[-200:]
    return DataError(f"SentencePiece cannot train a vocabulary of {vocab_size} on this corpus: {detail}")

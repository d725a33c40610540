"""Documents to tokens over processes, in order."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightnet_data.errors import DataError
from lightnet_data.tokenizer import SENTENCEPIECE, SPACE_SYMBOL, Tokenizer

BATCH_CHARACTERS = 1 << 18
BATCH_DOCUMENTS = 512
PENDING_PER_WORKER = 4  # batches in flight: enough to hide the reader, few enough to bound memory


@dataclass(frozen=True)
class Item:
    """A document to encode. ``split`` is where it goes, ``check`` whether its round trip is looked at."""

    text: str
    place: str
    split: str
    byte_length: int
    check: bool


@dataclass(frozen=True)
class Encoded:
    """``tokens`` int64 [n] with the end-of-document token last; ``lossless`` None where it was not looked at."""

    item: Item
    tokens: NDArray[np.int64]
    lossless: bool | None


def encode_all(items: Iterable[Item], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """Encode documents with ``workers`` processes; the order and the result do not depend on their number.

    Raises:
        DataError: the tokenizer cannot encode a document, or a worker process died.
    """
    if workers == 1:
        for item in items:
            yield _encode(item, tokenizer)
        return
    # Forked workers need no import and no copy of the tokenizer; where there is no fork they start afresh.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    pending: deque[Future[list[Encoded]]] = deque()
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(tokenizer,)) as pool:
        try:
            for batch in _batches(items):
                pending.append(pool.submit(_encode_batch, batch))
                if len(pending) >= PENDING_PER_WORKER * workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                f"a worker process died, most likely for want of memory; use fewer than --workers {workers}"
            ) from None
        finally:
            for future in pending:
                future.cancel()


def is_lossless(text: str, tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether ids decode to the text, but for the U+2581 that SentencePiece cannot tell from a space."""
    if tokenizer.kind == SENTENCEPIECE:
        text = text.replace(SPACE_SYMBOL, " ")
    return tokenizer.decode(ids) == text


def _encode(item: Item, tokenizer: Tokenizer) -> Encoded:
    try:
        ids = tokenizer.encode(item.text)
    except DataError as error:
        raise DataError(f"{item.place}: {error}") from None
    lossless = is_lossless(item.text, tokenizer, ids) if item.check else None
    ids.append(tokenizer.eod_id)
    return Encoded(item, np.array(ids, dtype=np.int64), lossless)


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _worker_tokenizer = tokenizer


def _encode_batch(batch: list[Item]) -> list[Encoded]:
    assert _worker_tokenizer is not None
    return [_encode(item, _worker_tokenizer) for item in batch]

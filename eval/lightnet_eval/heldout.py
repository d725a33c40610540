"""Exact held-out loss: every token of every document predicted once, from all that came before it in its document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightnet_llm.errors import UserError
from lightnet_llm.models import CausalLM, ForwardContext

from .documents import HeldOutDocument


def default_batch_tokens(device: torch.device) -> int:
    """Tokens of a forward pass that use a device well."""
    return 16384 if device.type == "cuda" else 4096


@dataclass
class Score:
    """Sums over documents, and the figures that follow from them.

    What is counted: a document of n tokens gives n + 1 predictions, the closing end-of-document token included; its
    opening end-of-document token is an input only. Bytes and words are those of the texts alone.

    Attributes:
        nats: negative log likelihood of all predictions.
        eod_nats: the part of it that is due to closing end-of-document tokens.
        tokens: predictions.
        bytes: UTF-8 bytes of the texts.
        words: runs of characters that are not white space; None where the texts are not at hand.
        line_ends: lines of the texts, one that no newline closes included.
        document_nats: nats of each document, in order.
        unfaithful: documents whose tokens do not decode to a text of the stored length.
        subsets: the same for the documents of each subset, where they belong to any.
    """

    nats: float = 0.0
    eod_nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    words: int | None = 0
    line_ends: int | None = 0
    document_nats: list[float] = field(default_factory=list)
    unfaithful: int = 0
    subsets: dict[str, Score] = field(default_factory=dict)

    def count(self, document: HeldOutDocument) -> None:
        """Add up what can be counted without the model."""
        self.tokens += len(document.tokens)
        self.bytes += document.byte_length
        if document.text is None:
            self.words = self.line_ends = None
        elif self.words is not None and self.line_ends is not None:
            text = document.text
            self.words += len(text.split())
            self.line_ends += text.count("\n") + (not text.endswith("\n") and bool(text))
            self.unfaithful += len(text.encode("utf-8", "replace")) != document.byte_length

    def lose(self, nll: NDArray[np.float64]) -> None:
        """Add the nats of a document's tokens; documents come in order."""
        self.document_nats.append(float(nll.sum()))
        self.eod_nats += float(nll[-1])

    def close(self) -> None:
        """Sum up, once all documents are scored."""
        self.nats = math.fsum(self.document_nats)
        for part in self.subsets.values():
            part.close()

    def as_dict(self) -> dict[str, Any]:
        """The figures by name, JSON-able.

        ``bits_per_byte`` divides all nats, ends of documents included, by the texts' bytes. ``word_perplexity`` is
        exp(nats / words); ``word_perplexity_line_ends`` counts one more word, ``<eos>``, for every line, which is how
        the published figures of WikiText-103 are normalised (its test set then has 245,569 words).
        """
        subsets = {name: part.as_dict() for name, part in sorted(self.subsets.items())}
        return {
            "nats_per_token": self.nats / self.tokens,
            "perplexity": _exp(self.nats / self.tokens),
            "bits_per_byte": self.nats / math.log(2) / self.bytes if self.bytes else None,
            "word_perplexity": _exp(self.nats / self.words) if self.words else None,
            "word_perplexity_line_ends": (
                _exp(self.nats / (self.words + self.line_ends)) if self.words and self.line_ends else None
            ),
            "nats": self.nats,
            "end_of_document_nats": self.eod_nats,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "words": self.words,
            "line_ends": self.line_ends,
            "documents": len(self.document_nats),
            "end_of_document_included": True,
            **({"subsets": subsets} if subsets else {}),
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@torch.inference_mode()
def score(
    model: CausalLM,
    documents: Iterable[HeldOutDocument],
    eod_id: int,
    batch_tokens: int | None = None,
    progress: Callable[[int], Any] = lambda size: None,
) -> Score:
    """Score documents; the result does not depend on ``batch_tokens``.

    Every document starts from the empty state with ``eod_id`` as its first input. Documents of up to ``batch_tokens``
    tokens share forward passes as packed segments; a longer one is carried through its pieces by its state, so every
    token sees all of its document and there is no stride.

    Args:
        model: in eval mode.
        batch_tokens: tokens of a forward pass; default: by device.
        progress: told the bytes of every document that is done.

    Raises:
        UserError: there is no document, a token the model does not have, or a loss that is not finite.
    """
    limit = batch_tokens or default_batch_tokens(next(model.parameters()).device)
    if limit < 1:
        raise UserError(f"batch-tokens {limit} must be at least 1")
    result = Score()
    for batch in _batches(_counted(documents, result, model.config.vocab_size), limit):
        if len(batch) == 1 and len(batch[0].tokens) > limit:
            losses = [_carried(model, batch[0].tokens, eod_id, limit)]
        else:
            losses = _packed(model, [document.tokens for document in batch], eod_id)
        for document, nll in zip(batch, losses, strict=True):
            result.lose(nll)
            if document.subset:
                result.subsets[document.subset].lose(nll)
            progress(document.byte_length)
    if not result.document_nats:
        raise UserError("no document to score; give a held-out split or a text that is not empty")
    result.close()
    if not math.isfinite(result.nats):
        raise UserError(
            "the held-out loss is not finite: the weights are damaged or the run diverged; use another step"
        )
    return result


def _counted(documents: Iterable[HeldOutDocument], result: Score, vocab_size: int) -> Iterator[HeldOutDocument]:
    """The documents, counted on their way."""
    for index, document in enumerate(documents):
        largest = int(document.tokens.max())
        if largest >= vocab_size:
            raise UserError(
                f"document {index}: token {largest} is not one of the model's {vocab_size}; "
                "the data was cut with another tokenizer: score the text with --text"
            )
        result.count(document)
        if document.subset:
            result.subsets.setdefault(document.subset, Score()).count(document)
        yield document


def _batches(documents: Iterable[HeldOutDocument], limit: int) -> Iterator[list[HeldOutDocument]]:
    """Documents of up to ``limit`` tokens together, in order; a longer one alone."""
    waiting: list[HeldOutDocument] = []
    filled = 0
    for item in documents:
        size = len(item.tokens)
        if waiting and filled + size > limit:
            yield waiting
            waiting, filled = [], 0
        waiting.append(item)
        filled += size
    if waiting:
        yield waiting


def _inputs(tokens: NDArray[np.int64], eod_id: int) -> NDArray[np.int64]:
    """What predicts ``tokens`` [n]: the end-of-document token and all but the last."""
    return np.concatenate([[eod_id], tokens[:-1]])


def _packed(model: CausalLM, documents: list[NDArray[np.int64]], eod_id: int) -> list[NDArray[np.float64]]:
    """Nats of every token of documents that share one pass."""
    device = next(model.parameters()).device
    bounds = np.cumsum([0, *(len(tokens) for tokens in documents)])
    ids = torch.from_numpy(np.concatenate([_inputs(tokens, eod_id) for tokens in documents])).to(device)
    context = ForwardContext(cu_seqlens=torch.from_numpy(bounds).to(device))
    hidden, _ = model.hidden(ids[None], context)
    nll = _losses(model, hidden, np.concatenate(documents))
    return np.split(nll, bounds[1:-1])


def _carried(model: CausalLM, tokens: NDArray[np.int64], eod_id: int, limit: int) -> NDArray[np.float64]:
    """Nats of every token of one long document, piece by piece."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(_inputs(tokens, eod_id)).to(device)
    state, parts = None, []
    for start in range(0, len(tokens), limit):
        hidden, state = model.hidden(ids[None, start : start + limit], state=state, return_state=True)
        parts.append(_losses(model, hidden, tokens[start : start + limit]))
    return np.concatenate(parts)


def _losses(model: CausalLM, hidden: Tensor, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Nats of labels [N] after activations [1, N, width]."""
    wanted = torch.from_numpy(np.ascontiguousarray(labels)).to(hidden.device)[None]
    nats: NDArray[np.float64] = model.nll(hidden, wanted)[0].double().cpu().numpy()
    return nats

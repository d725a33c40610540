"""Recurrent generation: the prompt in parallel, then one token at a time from a state of constant size."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightnet_data.tokenizer import Tokenizer
from torch import Tensor

from ..errors import UserError
from ..models import CausalLM, ModelState
from .cache import StateCache, read
from .decoder import Decoder
from .sampling import Sampling, choose


def after_document_end(ids: Sequence[int], eod_id: int) -> list[int]:
    """The tokens of a prompt behind exactly one end-of-document token, a document's first input in training."""
    ids = [int(token) for token in ids]
    return ids if ids[:1] == [eod_id] else [eod_id, *ids]


class Generation:
    """Tokens that continue B rows; iterate over it once. ``generate`` makes one."""

    def __init__(
        self,
        model: CausalLM,
        rows: list[list[int]],
        max_tokens: int,
        sampling: Sampling,
        stop_ids: list[int],
        state: StateCache | ModelState | None,
        vocab_size: int | None,
    ):
        self.model, self.rows, self.max_tokens = model, rows, max_tokens
        self.sampling, self.stop_ids, self.vocab_size = sampling, stop_ids, vocab_size
        self._start, self._decoder, self._last = state, None, None
        self._logits: Tensor | None = None

    _decoder: Decoder | None
    _last: Tensor | None

    def _next(self) -> Tensor:
        """Logits of the next token, [B, V], after the prompt and all that was drawn."""
        if self._decoder is None:
            start = self._start
            if isinstance(start, StateCache) and not self.rows[0]:
                found = start
            else:
                found = read(self.model, self.rows, start.state if isinstance(start, StateCache) else start)
            self._decoder, self._logits = Decoder(self.model, found.state), found.logits
        elif self._last is not None:
            self._logits = self._decoder(self._last)
        self._last = None
        assert self._logits is not None
        return self._logits

    def cache(self) -> StateCache:
        """What the model has read so far: the prompts and the tokens drawn."""
        logits = self._next()
        assert self._decoder is not None
        return self._decoder.cache(logits)

    def __iter__(self) -> Iterator[Tensor]:
        count = len(self.rows)
        generators = self.sampling.generators(count)
        stops = torch.tensor(self.stop_ids, dtype=torch.int64)
        ended = torch.zeros(count, dtype=torch.bool)
        last = torch.zeros(count, dtype=torch.int64)
        for _ in range(self.max_tokens):
            drawn = choose(self._next()[:, : self.vocab_size], self.sampling, generators).cpu()
            self._last = last = torch.where(ended, last, drawn)
            yield last
            ended = ended | torch.isin(last, stops)
            if bool(ended.all()):
                return


def generate(
    model: CausalLM,
    prompt_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    state: StateCache | ModelState | None = None,
    vocab_size: int | None = None,
    **options: Any,
) -> Generation:
    """Continue prompts, token by token.

    Args:
        model: in eval mode (``load_model``).
        prompt_ids: [B, N], one list, or B lists of unlike lengths; at least one token each, the end-of-document token
            first unless ``state`` continues an earlier text (``after_document_end``). With a ``StateCache`` all rows
            may be empty.
        max_tokens: how many tokens at most; 0 is legal.
        sampling: how they are drawn; or give its fields as keywords: greedy, temperature, top_k, top_p, seed.
        stop_ids: tokens that end a row. The token itself is still yielded; a row that ended repeats it until all have.
        state: of what was read before the prompt, B rows. It is not changed: several continuations may start from it.
        vocab_size: only tokens below it are drawn, as a model may have more than its tokenizer. Padded rows never are.

    Returns:
        An iterator over int64 [B] on the CPU, one token a row.

    Raises:
        UserError: an option outside its range, a token the model does not have, or logits that are not finite.
    """
    if sampling is not None and options:
        raise TypeError(f"generate: give sampling or {', '.join(options)}, not both")
    sampling = sampling or Sampling(**options)
    if max_tokens < 0:
        raise UserError(f"max-tokens {max_tokens} must be 0 or more")
    rows = _rows(prompt_ids)
    if not all(rows) and (not isinstance(state, StateCache) or any(rows)):
        raise UserError("prompt: holds no token; put the end-of-document token first (after_document_end)")
    for token in (end(row) for row in rows if row for end in (min, max)):
        if not 0 <= token < model.config.vocab_size:
            raise UserError(
                f"prompt: token {token} is not one of the model's {model.config.vocab_size}; "
                "it was cut with another model's tokenizer"
            )
    return Generation(model, rows, max_tokens, sampling, list(stop_ids), state, vocab_size)


def _rows(prompt_ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """One list of tokens a row."""
    given: list[Any] = prompt_ids.tolist() if isinstance(prompt_ids, Tensor) else list(prompt_ids)
    if not given or not isinstance(given[0], (list, tuple)):
        given = [given]
    return [[int(token) for token in row] for row in given]


class TextStream:
    """The continuation of a prompt as pieces of text; iterate over it once.

    A piece holds whole characters only: the bytes of a character that tokens cut in two are held back until it is
    complete. Bytes that are no UTF-8 at all show as U+FFFD.

    Args:
        prompt: may be empty; the model is given the end-of-document token and then the prompt.
        max_tokens, sampling: as in ``generate``; the end-of-document token ends the text and is no part of it.
        state: of an earlier text, one row, that the prompt continues; no end-of-document token is then put first.

    Attributes:
        prompt_ids: what the model is given, after ``state``.
        ids: the tokens drawn so far, the closing end-of-document token included.
        ended: whether the model closed the document.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        prompt: str,
        max_tokens: int,
        sampling: Sampling,
        state: StateCache | None = None,
    ):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt: not valid UTF-8 at character {error.start}; save it as UTF-8") from None
        self.tokenizer = tokenizer
        self.prompt_ids = tokenizer.encode(prompt)
        if state is None:
            self.prompt_ids = after_document_end(self.prompt_ids, tokenizer.eod_id)
        self.ids: list[int] = []
        self.ended = False
        self._tokens = generate(
            model,
            self.prompt_ids,
            max_tokens,
            sampling=sampling,
            stop_ids=[tokenizer.eod_id],
            state=state,
            vocab_size=tokenizer.vocab_size,
        )

    def cache(self) -> StateCache:
        """The state after prompt and text."""
        return self._tokens.cache()

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in self._tokens:
            self.ids.append(int(token[0]))
            self.ended = self.ids[-1] == self.tokenizer.eod_id
            piece = decoder.decode(self.tokenizer.decode_bytes(self.ids[-1:]))
            if piece:
                yield piece
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest

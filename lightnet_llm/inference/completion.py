"""Many prompts at once: batches of unlike lengths, each row stopping by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightnet_data.tokenizer import Tokenizer

from ..errors import UserError
from ..models import CausalLM
from .cache import read
from .decoder import Decoder
from .sampling import Sampling, choose

KEEP_SHARE = 0.75  # rows that have ended are let go once fewer than this share of a batch is at work


class Completion(NamedTuple):
    """The continuation of one prompt.

    Attributes:
        text: without the stop string, which ends it, or what follows.
        ids: the tokens drawn, those of the stop string or the closing end-of-document token included.
        end: "end_of_document", "stop" or "max_tokens".
    """

    text: str
    ids: list[int]
    end: str


class _Row:
    """One prompt at work."""

    def __init__(self, index: int, generator: torch.Generator):
        self.index, self.generator = index, generator
        self.ids: list[int] = []
        self.data = b""
        self.end: str | None = None
        self.cut: int | None = None

    def add(self, token: int, tokenizer: Tokenizer, stops: list[bytes], max_tokens: int) -> None:
        """One more token, and whether it is the last."""
        self.ids.append(token)
        if token == tokenizer.eod_id:
            self.end = "end_of_document"
            return
        before = len(self.data)
        self.data += tokenizer.decode_bytes([token])
        for stop in stops:
            place = self.data.find(stop, max(0, before - len(stop) + 1))
            if place >= 0 and (self.cut is None or place < self.cut):
                self.cut, self.end = place, "stop"
        if self.end is None and len(self.ids) == max_tokens:
            self.end = "max_tokens"

    def completion(self) -> Completion:
        text = self.data[: self.cut].decode("utf-8", "replace")
        return Completion(text, self.ids, self.end or "max_tokens")


@torch.inference_mode()
def complete(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    batch_size: int = 32,
    numbers: Sequence[int] | None = None,
    progress: Callable[[int], Any] = lambda done: None,
) -> list[Completion]:
    """Continue every prompt, each as it would be continued alone.

    Args:
        prompts: tokens of each, at least one (``after_document_end``).
        max_tokens: of each continuation, at most.
        sampling: prompt i draws with its seed + i.
        stop: strings that end a text and are no part of it.
        batch_size: prompts at work together; they need not be alike in length, and results do not depend on it.
        numbers: what i is for each prompt, where these are some of many. Default: 0, 1, ...
        progress: told how many are done, after each step.

    Returns:
        In the order of the prompts.

    Raises:
        UserError: an empty prompt or stop string, a token the model does not have, or logits that are not finite.
    """
    if max_tokens < 0:
        raise UserError(f"max-tokens {max_tokens} must be 0 or more")
    if batch_size < 1:
        raise UserError(f"batch-size {batch_size} must be at least 1")
    stops = [text.encode() for text in stop]
    if not all(stops):
        raise UserError("stop: an empty string would end every text at once; leave it out")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index}: holds no token; put the end-of-document token first")
        if not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
            raise UserError(
                f"prompt {index}: has tokens outside the model's {model.config.vocab_size}; "
                "it was cut with another model's tokenizer"
            )
    if max_tokens == 0:
        return [Completion("", [], "max_tokens") for _ in prompts]
    results: dict[int, Completion] = {}
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        seeds = [sampling.seed + (index if numbers is None else numbers[index]) for index in batch]
        rows = [
            _Row(index, torch.Generator().manual_seed(seed % 2**63)) for index, seed in zip(batch, seeds, strict=True)
        ]
        cache = read(model, [prompts[index] for index in batch])
        logits, decoder = cache.logits, Decoder(model, cache.state)
        while True:
            drawn = choose(logits[:, : tokenizer.vocab_size], sampling, [row.generator for row in rows]).cpu()
            for row, token in zip(rows, drawn.tolist(), strict=True):
                if row.end is None:
                    row.add(token, tokenizer, stops, max_tokens)
                    if row.end is not None:
                        results[row.index] = row.completion()
                        progress(1)
            working = [place for place, row in enumerate(rows) if row.end is None]
            if not working:
                break
            if len(working) < KEEP_SHARE * len(rows):
                index = torch.tensor(working)
                decoder.keep(index)
                rows, drawn = [rows[place] for place in working], drawn[index]
            logits = decoder(drawn)
    return [results[index] for index in range(len(prompts))]

"""Recurrent generation: the prompt in parallel, then one token at a time from a state of constant size."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lightnet_data.tokenizer import Tokenizer
from lightnet_kernels import ToeplitzState
from lightnet_kernels.decode import decode_state
from torch import Tensor

from ..errors import UserError
from ..models import CausalLM, ForwardContext, ModelState
from .sampling import Sampling, choose

PIECE = 2048  # tokens of a prompt read at once: memory stays constant for prompts of any length


class Reading(NamedTuple):
    """What a model makes of the tokens it has read.

    Attributes:
        logits: [B, V] of the next token, without the padded rows of the vocabulary.
        state: of all tokens read. Nothing ever changes it, so it can be continued any number of times (forked).
    """

    logits: Tensor
    state: ModelState


@torch.inference_mode()
def read(model: CausalLM, ids: Tensor, state: ModelState | None = None) -> Reading:
    """Read tokens in parallel.

    Args:
        ids: integer [B, N], N >= 1, on any device.
        state: of the tokens before, as a ``Reading`` gave it; None at the start of a document.
    """
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ValueError(f"read: ids has shape {tuple(ids.shape)}; expected [B, N] with at least one token")
    device = next(model.parameters()).device
    for piece in ids.to(device).split(PIECE, dim=1):
        hidden, after = model.hidden(piece, state=state, return_state=True)
        assert after is not None
        state = _in_float64(after)
    assert state is not None
    logits = model.layers_set.gather_logits(model.logits(hidden[:, -1:]), model.config.vocab_size)
    return Reading(logits[:, 0], state)


class Decoder:
    """Reads one token a row at a time, on a state of its own that it changes in place.

    Args:
        state: what the model has read before, as a ``Reading`` gave it; it is copied.
    """

    def __init__(self, model: CausalLM, state: ModelState):
        self.model, self.state = model, state
        # The step knows no separate log mass ("no share"): that ablation reads token by token with the scan.
        self.in_place = model.config.decay != "independent"
        if not self.in_place:
            return
        layers = []
        for block, layer in zip(model.layers, state.layers, strict=True):
            attention: Any = block.attention
            theta = None if attention.lrpe is None else attention.lrpe()
            layers.append(decode_state(layer, theta, attention.qkv.weight.dtype))
        tpe = None if state.tpe is None else ToeplitzState(*(x.clone() for x in state.tpe))
        self.state = ModelState(tpe, tuple(layers))

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [B], on any device, to the logits of the next ones [B, V], as in ``Reading``."""
        if not self.in_place:
            reading = read(self.model, tokens[:, None], self.state)
            self.state = reading.state
            return reading.logits
        model = self.model
        ids = tokens.to(next(model.parameters()).device)[:, None]
        hidden, _ = model.hidden(ids, ForwardContext(decode=True), self.state)
        return model.layers_set.gather_logits(model.logits(hidden), model.config.vocab_size)[:, 0]


def _in_float64(state: ModelState) -> ModelState:
    """Scan states in fp64: added to one token at a time, an fp32 normaliser stops growing once a single key lies 17
    nats above very many others, and rotating kv at every token drifts (model-spec sections 1 and 2)."""

    def widen(layer: Any) -> Any:
        return layer._replace(max=layer.max.double(), sum=layer.sum.double(), kv=layer.kv.double())

    return ModelState(state.tpe, tuple(widen(layer) for layer in state.layers))


def after_document_end(ids: Sequence[int], eod_id: int) -> list[int]:
    """The tokens of a prompt behind exactly one end-of-document token, a document's first input in training."""
    ids = [int(token) for token in ids]
    return ids if ids[:1] == [eod_id] else [eod_id, *ids]


def generate(
    model: CausalLM,
    prompt_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    state: ModelState | None = None,
    vocab_size: int | None = None,
    **options: Any,
) -> Iterator[Tensor]:
    """Continue a prompt, token by token.

    Args:
        model: in eval mode (``load_model``).
        prompt_ids: [B, N] or one list; at least one token each, the end-of-document token first unless ``state``
            continues an earlier text (``after_document_end``).
        max_tokens: how many tokens at most; 0 is legal.
        sampling: how they are drawn; or give its fields as keywords: greedy, temperature, top_k, top_p, seed.
        stop_ids: tokens that end a row. The token itself is still yielded; a row that ended repeats it until all have.
        state: of what was read before the prompt. It is not changed: several continuations may start from it.
        vocab_size: only tokens below it are drawn, as a model may have more than its tokenizer. Padded rows never are.

    Yields:
        int64 [B] on the CPU, one token a row.

    Raises:
        UserError: an option outside its range, a token the model does not have, or logits that are not finite.
    """
    if sampling is not None and options:
        raise TypeError(f"generate: give sampling or {', '.join(options)}, not both")
    sampling = sampling or Sampling(**options)
    if max_tokens < 0:
        raise UserError(f"max-tokens {max_tokens} must be 0 or more")
    ids = torch.as_tensor(prompt_ids, dtype=torch.int64)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.numel() == 0:
        raise UserError("prompt: holds no token; put the end-of-document token first (after_document_end)")
    if not 0 <= int(ids.min()) <= int(ids.max()) < model.config.vocab_size:
        raise UserError(
            f"prompt: token {int(ids.max())} is not one of the model's {model.config.vocab_size}; "
            "it was cut with another model's tokenizer"
        )
    return _generate(model, ids, max_tokens, sampling, list(stop_ids), state, vocab_size)


def _generate(
    model: CausalLM,
    ids: Tensor,
    max_tokens: int,
    sampling: Sampling,
    stop_ids: list[int],
    state: ModelState | None,
    vocab_size: int | None,
) -> Iterator[Tensor]:
    generators = sampling.generators(ids.shape[0])
    stops = torch.tensor(stop_ids, dtype=torch.int64)
    ended = torch.zeros(ids.shape[0], dtype=torch.bool)
    last = ids[:, -1]
    decoder: Decoder | None = None
    for _ in range(max_tokens):
        if decoder is None:
            logits, after = read(model, ids, state)
            decoder = Decoder(model, after)
        else:
            logits = decoder(last)
        drawn = choose(logits[:, :vocab_size], sampling, generators).cpu()
        last = torch.where(ended, last, drawn)
        yield last
        ended = ended | torch.isin(last, stops)
        if bool(ended.all()):
            return


class TextStream:
    """The continuation of a prompt as pieces of text; iterate over it once.

    A piece holds whole characters only: the bytes of a character that tokens cut in two are held back until it is
    complete. Bytes that are no UTF-8 at all show as U+FFFD.

    Args:
        prompt: may be empty; the model is given the end-of-document token and then the prompt.
        max_tokens, sampling: as in ``generate``; the end-of-document token ends the text and is no part of it.

    Attributes:
        prompt_ids: what the model is given.
        ids: the tokens drawn so far, the closing end-of-document token included.
        ended: whether the model closed the document.
    """

    def __init__(self, model: CausalLM, tokenizer: Tokenizer, prompt: str, max_tokens: int, sampling: Sampling):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt: not valid UTF-8 at character {error.start}; save it as UTF-8") from None
        self.tokenizer = tokenizer
        self.prompt_ids = after_document_end(tokenizer.encode(prompt), tokenizer.eod_id)
        self.ids: list[int] = []
        self.ended = False
        self._tokens = generate(
            model,
            self.prompt_ids,
            max_tokens,
            sampling=sampling,
            stop_ids=[tokenizer.eod_id],
            vocab_size=tokenizer.vocab_size,
        )

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

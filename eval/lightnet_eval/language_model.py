"""LightNet as a model of the Language Model Evaluation Harness (lm-eval)."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightnet_data.tokenizer import Tokenizer
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm

from lightnet_llm.errors import UserError, nearest
from lightnet_llm.inference import Loaded, Sampling, complete, load_model
from lightnet_llm.inference.load import require_tokenizer

from .likelihood import Request, likelihoods
from .ranks import Ranks

GENERATED_TOKENS = 256  # where a task does not say how many
TOGETHER = 4096  # requests whose texts are encoded at once


@register_model("lightnet")
class LightNetLM(LM):
    """Scores and continues texts with a checkpoint.

    A text stands behind exactly one end-of-document token, which every document's first token follows in training; a
    context that spells that token at its start gets no second one. Every process of a launcher sees all requests and
    learns all results, so lm-eval is told that there is one.

    Args:
        checkpoint: a run folder, one of its steps, or a Hugging Face folder. ``pretrained`` means the same.
        device, dtype, weights: as in ``load_model``.
        batch_tokens: tokens of a forward pass. Scores do not depend on it.
        batch_size: texts generated together, or "auto" (also "auto:N", which lm-eval's own models know).
        max_length: tokens of a context and its continuation at most. A longer context loses its beginning, the
            continuation is kept whole, and it is said how many there were. None: no limit, as the state has none.
        add_bos_token: whether texts stand behind the end-of-document token.
        loaded: a checkpoint that is loaded already, in place of ``checkpoint``.
        warn: told, once a task type, what is peculiar about its requests.
        quiet: whether no progress bars are shown.
        progress: told how many requests are done.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        *,
        pretrained: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        weights: str = "trained",
        batch_tokens: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool = True,
        loaded: Loaded | None = None,
        ranks: Ranks | None = None,
        warn: Callable[[str], Any] | None = None,
        quiet: bool = False,
        progress: Callable[[int], Any] = lambda done: None,
    ):
        super().__init__()
        self.ranks = ranks or Ranks.join()
        self._say = warn or (lambda line: print(f"warning: {line}", file=sys.stderr))
        if loaded is None:
            place = checkpoint or pretrained
            if place is None:
                raise UserError("checkpoint: not given; name a run folder, a step of it, or a Hugging Face folder")
            loaded = load_model(place, self._choose(device), dtype, weights)
        if max_length is not None and max_length < 1:
            raise UserError(f"max_length {max_length} must be at least 1")
        self.loaded, self.model = loaded, loaded.model
        self.tokenizer: Tokenizer = require_tokenizer(loaded)
        self.batch_tokens, self.max_length, self.add_bos_token = batch_tokens, max_length, add_bos_token
        self.batch_size = _texts_at_once(batch_size)
        self._device = next(self.model.parameters()).device
        self._quiet, self._progress = quiet or bool(self.ranks.rank), progress

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> LightNetLM:
        """As lm-eval's program makes a model. What is wrong ends it with one line."""
        with _ends():
            _check_arguments(simple_parse_args_string(arg_string))
            return super().create_from_arg_string(arg_string, additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> LightNetLM:
        """The same of arguments that it has read."""
        with _ends():
            _check_arguments(arg_dict)
            return super().create_from_arg_obj(arg_dict, additional_config)

    def _choose(self, device: str | None) -> str | None:
        """lm-eval's program asks for cuda:0 where nobody named a device, on every process and machine."""
        if device in ("cuda", "cuda:0"):
            if not torch.cuda.is_available():
                self._warn(f"device {device} is not here; the CPU is used")
                return "cpu"
            return self.ranks.device() or device
        return device or self.ranks.device()

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches of requests."""
        return self.tokenizer.fingerprint

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes about the model."""
        return {
            "checkpoint": str(self.loaded.folder),
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_dtype": str(self.model.embedding.weight.dtype),
            "add_bos_token": self.add_bos_token,
            "max_length": self.max_length,
            "processes": self.ranks.size,
        }

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log likelihood in nats, whether greedy decoding gives it) of each (context, continuation)."""
        made: list[Request] = []
        for first in range(0, len(requests), TOGETHER):
            pairs = [instance.args for instance in requests[first : first + TOGETHER]]
            known = self._encode(text for pair in pairs for text in self._parts(*pair))
            made += [self._request(one, two, known) for one, two in pairs]
        nothing = sum(request.start >= len(request.tokens) for request in made)
        if nothing:
            self._warn(f"{nothing} of {len(made)} continuations tokenise to nothing; their log likelihood is 0")
        return self._scored(
            "loglikelihood", requests, [self._cut(request) for request in made], len(made), disable_tqdm
        )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log likelihood in nats of each whole text: every token once, after all that came before it."""
        made = [Request(self._start() + tuple(self.tokenizer.encode(instance.args[0])), 1) for instance in requests]
        nothing = sum(len(request.tokens) == 1 for request in made)
        if nothing:
            self._warn(f"{nothing} of {len(made)} texts tokenise to nothing; their log likelihood is 0")
        found = self._scored("loglikelihood_rolling", requests, made, 0, disable_tqdm)
        return [nats for nats, _ in found]

    def _scored(
        self, kind: str, instances: list[Instance], made: list[Request], cuttable: int, quiet: bool
    ) -> list[tuple[float, bool]]:
        if cuttable and self._long:
            self._warn(
                f"{self._long} of {cuttable} contexts were longer than max_length {self.max_length} allows and lost their "
                "beginning; continuations are whole"
            )
            self._long = 0
        with tqdm(total=len(made), desc=kind, disable=quiet or self._quiet, leave=False, delay=1) as bar:
            found = likelihoods(self.model, made, self.batch_tokens, self.ranks, self._moves(bar))
        answers = [(item.log_likelihood, item.greedy) for item in found]
        for instance, answer in zip(instances, answers, strict=True):
            self.cache_hook.add_partial(kind, instance.args, answer if kind == "loglikelihood" else answer[0])
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context up to the first of its stop strings."""
        kinds: dict[str, list[int]] = {}
        for index, instance in enumerate(requests):
            kinds.setdefault(json.dumps(instance.args[1], sort_keys=True), []).append(index)
        texts: dict[int, str] = {}
        for options, members in kinds.items():
            stop, most, sampling = _generation(json.loads(options))
            known = self._encode(requests[index].args[0] for index in members)
            prompts = {index: self._begun(known[requests[index].args[0]]) for index in members}
            if self.max_length is not None:
                room = max(1, self.max_length - most)
                long = [index for index, prompt in prompts.items() if len(prompt) > room]
                prompts |= {index: prompts[index][-room:] for index in long}
                if long:
                    self._warn(
                        f"{len(long)} of {len(prompts)} contexts were longer than max_length {self.max_length} allows "
                        f"with {most} tokens to come and lost their beginning"
                    )
            order = sorted(members, key=lambda index: (-len(prompts[index]), index))
            mine = order[self.ranks.rank :: self.ranks.size]
            quiet = disable_tqdm or self._quiet
            with tqdm(total=len(mine), desc="generate_until", disable=quiet, leave=False, delay=1) as bar:
                work = partial(
                    complete,
                    self.model,
                    self.tokenizer,
                    [prompts[index] for index in mine],
                    most,
                    sampling,
                    stop=stop,
                    batch_size=self.batch_size,
                    numbers=mine,
                    progress=self._moves(bar),
                )
                parts = self.ranks.share(work)
            for rank, done in enumerate(parts):
                texts |= {index: item.text for index, item in zip(order[rank :: self.ranks.size], done, strict=True)}
        for index, instance in enumerate(requests):
            self.cache_hook.add_partial("generate_until", instance.args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def _moves(self, bar: Any) -> Callable[[int], Any]:
        return lambda done: (bar.update(done), self._progress(done))

    _long = 0  # contexts cut since the last warning

    def _start(self) -> tuple[int, ...]:
        return (self.tokenizer.eod_id,)

    def _encode(self, texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Tokens of each text, a spelled end-of-document token at its start left out."""
        distinct = list(dict.fromkeys(texts))
        every = self.tokenizer.encode_all([text.removeprefix(self.tokenizer.eod_token) for text in distinct])
        return dict(zip(distinct, map(tuple, every), strict=True))

    def _begun(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """A text's tokens behind the end-of-document token; an empty text is that token alone."""
        return self._start() + ids if self.add_bos_token or not ids else ids

    def _parts(self, context: str, continuation: str) -> tuple[str, str]:
        """A context without spaces at its end, and what goes on from there where its tokens surely do not depend on the
        context (so each context is tokenised once, not with each continuation); else the whole text."""
        text, whole = context.rstrip(), context + continuation
        return text, whole[len(text) :] if self.tokenizer.divides(whole, len(text)) else whole

    def _request(self, context: str, continuation: str, known: Mapping[str, tuple[int, ...]] | None = None) -> Request:
        """Cut where lm-eval cuts: spaces at a context's end belong to the continuation, and the text is tokenised as a
        whole, of which the continuation is what goes beyond the context's own tokens. ``known``: of `_encode`."""
        text, end = self._parts(context, continuation)
        if not text:
            before = self._start()
            return Request(before + tuple(self.tokenizer.encode(end)), len(before))
        known = known or self._encode((text, end))
        divided = len(end) < len(context) + len(continuation)
        before, whole = self._begun(known[text]), known[text] + known[end] if divided else known[end]
        return Request(before + self._begun(whole)[len(before) :], len(before))

    def _cut(self, request: Request) -> Request:
        """The last tokens that ``max_length`` allows: one more than it, as the last one is not read."""
        if self.max_length is None or len(request.tokens) <= self.max_length + 1:
            return request
        self._long += 1
        first = min(len(request.tokens) - self.max_length - 1, request.start - 1)
        return Request(request.tokens[first:], request.start - first)

    def _warn(self, line: str) -> None:
        if not self.ranks.rank:
            self._say(line)


def _check_arguments(given: Iterable[str]) -> None:
    known = list(inspect.signature(LightNetLM).parameters)
    texts = [name for name in known if name not in ("loaded", "ranks", "warn", "progress")]  # the others are objects
    for name in given:
        if name not in known:
            raise UserError(f"model_args: unknown argument '{name}'{nearest(name, texts)}; known: {', '.join(texts)}")


def _texts_at_once(batch_size: int | str | None) -> int:
    text = "auto" if batch_size is None else str(batch_size)
    if text in ("1", "auto") or text.startswith("auto:"):  # 1 is what lm-eval's program gives unless told
        return 32
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"batch_size {text}: must be a number of 1 or more, or auto")
    return int(text)


@contextmanager
def _ends() -> Iterator[None]:
    """Programs that know no `UserError` of ours end with its message."""
    try:
        yield
    except UserError as error:
        raise SystemExit(f"lightnet: {error}") from None


def _generation(options: dict[str, Any]) -> tuple[Sequence[str], int, Sampling]:
    """Stop strings, tokens at most, and how tokens are drawn, from a task's ``generation_kwargs``."""
    until = options.pop("until", None) or []
    most = next((options.pop(name) for name in ("max_gen_toks", "max_new_tokens") if name in options), GENERATED_TOKENS)
    options.pop("max_length", None)
    if options.pop("num_beams", 1) != 1:
        raise UserError("generation_kwargs: num_beams is not supported; leave it out")
    sample, temperature = options.pop("do_sample", None), float(options.pop("temperature", 0.0) or 0.0)
    top_k, top_p = options.pop("top_k", None), float(options.pop("top_p", None) or 1.0)
    if options:
        raise UserError(f"generation_kwargs: '{next(iter(options))}' is not supported; leave it out")
    if sample and not temperature:
        temperature = 1.0
    greedy = not temperature if sample is None else not sample
    sampling = Sampling(greedy=greedy, temperature=temperature or 1.0, top_k=top_k or None, top_p=top_p)
    return [until] if isinstance(until, str) else [text for text in until if text], int(most), sampling

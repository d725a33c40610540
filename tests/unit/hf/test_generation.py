"""generate() from a state of constant size against re-running everything; padding, beams, streams."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightnet_llm import LightNetCache, LightNetForCausalLM

from ..inference.test_cache import Work
from .conftest import build
from .test_model import compiled

PLAIN: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None}


def prompts(*shape: int) -> Tensor:
    return torch.randint(1, 251, shape, generator=torch.Generator().manual_seed(1))


def padded() -> tuple[Tensor, Tensor]:
    """Three rows, 20 columns, with padding of 7, 0 and 15 on the left; what lies there is not looked at."""
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[0, :7] = mask[2, :15] = 0
    return prompts(3, 20), mask


def alone(model: LightNetForCausalLM, ids: Tensor, mask: Tensor, **options: Any) -> list[list[int]]:
    """New tokens of every row when it is generated from by itself."""
    rows = [row[keep.bool()][None] for row, keep in zip(ids, mask, strict=True)]
    return [model.generate(row, **PLAIN, **options)[0, row.shape[1] :].tolist() for row in rows]


@pytest.mark.parametrize(
    ("count", "fields"),
    [(500, {}), (150, {"decay": "independent", "decay_rank": 8}), (150, {"lrpe": False, "tpe": False})],
)
def test_greedy_equals_the_full_run(count: int, fields: dict[str, Any]) -> None:
    model, ids = build(**fields), prompts(2, 20)
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    fast = model.generate(ids, max_new_tokens=count, **options, **PLAIN)
    with torch.inference_mode():  # every token from all before it at once: causal
        logits = model(fast.sequences[:, :-1], use_cache=False).logits[:, -count:]
    torch.testing.assert_close(torch.stack(fast.logits, 1), logits, atol=5e-5, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), fast.sequences[:, -count:])
    assert len(set(fast.sequences[0, -count:].tolist())) > 3


def test_left_padded_rows_equal_rows_alone(model: LightNetForCausalLM) -> None:
    ids, mask = padded()
    together = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, **PLAIN)[:, 20:]
    assert together.tolist() == alone(model, ids, mask, max_new_tokens=30, do_sample=False)


def test_logits_ignore_padding_on_either_side(model: LightNetForCausalLM) -> None:
    ids, mask = padded()
    for keep in (mask, mask.flip(1)):
        with torch.inference_mode():
            logits = model(ids, attention_mask=keep).logits
            for row in range(3):
                real = keep[row].bool()
                torch.testing.assert_close(
                    logits[row][real], model(ids[row][real][None]).logits[0], atol=1e-5, rtol=1e-5
                )
                assert not logits[row][~real].any()


@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search_equals_beams_without_a_cache(model: LightNetForCausalLM, beams: int) -> None:
    ids = prompts(3, 9)
    options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": 25, "do_sample": False, "num_return_sequences": 2}
    fast, slow = (model.generate(ids, use_cache=use, **options, **PLAIN) for use in (True, False))
    assert torch.equal(fast, slow)
    greedy = model.generate(ids, max_new_tokens=25, do_sample=False, **PLAIN)
    assert not torch.equal(fast[::2], greedy)  # beams did change places


def test_beam_search_of_padded_rows(model: LightNetForCausalLM) -> None:
    ids, mask = padded()
    together = model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=12, do_sample=False, **PLAIN)[
        :, 20:
    ]
    assert together.tolist() == alone(model, ids, mask, num_beams=3, max_new_tokens=12, do_sample=False)


def test_sampling_draws_the_same_with_and_without_a_cache(model: LightNetForCausalLM) -> None:
    results = []
    for use in (True, False):
        torch.manual_seed(3)
        options: dict[str, Any] = {"do_sample": True, "top_p": 0.9, "temperature": 0.8, "num_return_sequences": 3}
        results.append(model.generate(prompts(2, 5), max_new_tokens=20, use_cache=use, **options, **PLAIN))
    assert torch.equal(*results)
    assert len({tuple(row) for row in results[0].tolist()}) == 6


def test_streaming(model: LightNetForCausalLM) -> None:
    class Keep:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Keep()
    whole = model.generate(prompts(1, 6), max_new_tokens=9, do_sample=False, streamer=streamer, **PLAIN)
    assert streamer.tokens == whole[0].tolist() and streamer.ended


def test_a_text_in_pieces_and_a_later_turn(model: LightNetForCausalLM) -> None:
    """Pieces of 1, 3 and 64 tokens, each continuing the state of the one before, give the logits of all at once."""
    ids = prompts(2, 68)
    with torch.inference_mode():
        whole = model(ids, use_cache=False).logits
        cache, parts, start = None, [], 0
        for size in (1, 3, 64):
            output = model(ids[:, start : start + size], cache=cache, use_cache=True)
            cache, start = output.cache, start + size
            parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=2e-5)
        assert cache.get_seq_length() == 68
    turn = model.generate(
        ids, cache=LightNetCache(), max_new_tokens=5, do_sample=False, return_dict_in_generate=True, **PLAIN
    )
    longer = torch.cat([turn.sequences, prompts(2, 3)], 1)
    fast = model.generate(longer, cache=turn.cache, max_new_tokens=8, do_sample=False, **PLAIN)
    assert torch.equal(fast, model.generate(longer, max_new_tokens=8, do_sample=False, **PLAIN))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_forked_caches_are_separate_runs(model: LightNetForCausalLM, copier: Any, grad: bool) -> None:
    """One prompt is read; two texts go on from it, a token at a time, and a third, from the fork of a fork."""
    with torch.set_grad_enabled(grad):
        cache = model(prompts(2, 20)).cache
    forks = [copier(cache), copier(cache)]
    with torch.no_grad():
        for fork in (cache, *forks):
            model(prompts(2, 1), past_key_values=fork)  # decodes: the state changes in place from here on
        forks.append(copier(forks[0]))
    for number, fork in enumerate(forks):
        more = (prompts(2, 6) + number) % 251
        with torch.no_grad():
            steps = [model(token, past_key_values=fork).logits[:, -1] for token in more.split(1, 1)]
            whole = model(torch.cat([prompts(2, 20), prompts(2, 1), more], 1), use_cache=False).logits[:, -6:]
        torch.testing.assert_close(torch.stack(steps, 1), whole, atol=5e-5, rtol=1e-4)


def test_a_token_costs_the_same_operations_at_any_position(model: LightNetForCausalLM) -> None:
    work = []
    for length in (5, 3000):
        with torch.no_grad():
            cache = model(prompts(1, length)).cache
            model(prompts(1, 1), past_key_values=cache)
            with Work() as seen:
                model(prompts(1, 1), past_key_values=cache)
        work.append(seen.done)
    assert work[0] == work[1] and len(work[0]) > 20


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_generate_under_torch_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's pass and single tokens are compiled once each; positions do not compile again."""
    model, ids = build(layers=1), prompts(2, 12)
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False, **PLAIN)
    fast = compiled(model, backend, monkeypatch)
    assert torch.equal(fast.generate(ids, max_new_tokens=24, do_sample=False, **PLAIN), wanted)
    monkeypatch.setattr(model, "forward", compiled(model.forward, backend, monkeypatch))
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, **PLAIN), wanted[:, :20])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False, **PLAIN), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_the_cache_keeps_its_size(model: LightNetForCausalLM) -> None:
    def size(length: int) -> int:
        with torch.inference_mode():
            state = model(prompts(1, length)).cache.state
        return sum(x.numel() for part in (state.tpe, *state.layers) for x in part)

    assert size(3) == size(300)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "is empty"),
        ({"input_ids": prompts(1, 3), "attention_mask": torch.zeros(1, 3)}, "leaves no token"),
        ({"input_ids": prompts(1, 3), "cache": ()}, "is a tuple"),
        ({"inputs_embeds": torch.zeros(1, 3, 64)}, "input_ids"),
        (
            {
                "input_ids": prompts(1, 3),
                "attention_mask": torch.tensor([[0, 1, 1]]),
                "cu_seqlens": torch.tensor([0, 3]),
            },
            "not both",
        ),
    ],
)
def test_refusals(model: LightNetForCausalLM, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        model(**arguments)
    assert "\n" not in str(error.value)


def test_dropping_tokens_is_refused(model: LightNetForCausalLM) -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match="cannot drop tokens"):
        model(prompts(1, 3)).cache.crop(1)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(prompts(1, 3), assistant_model=model, max_new_tokens=3, **PLAIN)

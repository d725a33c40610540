"""generate() from a state of constant size against re-running everything; padding, beams, streams."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightnet_llm import LightNetCache, LightNetForCausalLM

from .conftest import build

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


@pytest.mark.parametrize("fields", [{}, {"decay": "independent", "decay_rank": 8}, {"lrpe": False, "tpe": False}])
def test_greedy_equals_the_full_run(fields: dict[str, Any]) -> None:
    model, ids = build(**fields), prompts(2, 20)
    count = 150
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

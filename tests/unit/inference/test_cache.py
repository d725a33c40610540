"""State caches: fed in pieces, forked, selected, saved; batches of unlike lengths."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.errors import UserError
from lightnet_llm.inference import Loaded, Sampling, StateCache, complete, read
from lightnet_llm.inference.cache import PIECE, empty_state
from lightnet_llm.inference.decoder import Decoder
from lightnet_llm.inference.generate import generate
from lightnet_llm.models import CausalLM, initialize

SHAPE = {"layers": 2, "width": 32, "heads": 2, "glu_width": 40, "vocab_size": 50, "gate_rank": 4, "tpe_rank": 4}


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 330, (rows, count), generator=torch.Generator().manual_seed(seed))


def close(a: StateCache, b: StateCache) -> None:
    torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=0)
    for one, other in zip(a.state.layers, b.state.layers, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-4)
    assert (a.state.tpe is None) == (b.state.tpe is None)
    if a.state.tpe is not None:
        torch.testing.assert_close(a.state.tpe.hidden, b.state.tpe.hidden, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("piece", [1, 3, 64])
@pytest.mark.parametrize("switch", [None, "tpe", "lrpe", "decay"])
def test_a_prompt_in_pieces_is_the_prompt_at_once(loaded: Loaded, piece: int, switch: str | None) -> None:
    model = loaded.model
    if switch is not None:
        value = "independent" if switch == "decay" else False
        model = CausalLM(ModelConfig(**SHAPE, initializer_std=0.2, **{switch: value})).eval()
        initialize(model, 0)
    ids = tokens(2, 150) % model.config.vocab_size
    cache, state = None, None
    for part in ids.split(piece, dim=1):
        cache = read(model, part, state)
        state = cache.state
    assert cache is not None
    close(cache, read(model, ids))


@pytest.mark.parametrize("lengths", [[1, 5, 64, 65, 200], [7, 7, 3], [130, 1]])
def test_rows_of_unlike_lengths_are_what_each_is_alone(loaded: Loaded, lengths: list[int]) -> None:
    rows = [tokens(1, length, seed=index)[0].tolist() for index, length in enumerate(lengths)]
    together = read(loaded.model, rows)
    for index, row in enumerate(rows):
        close(together.select([index]), read(loaded.model, torch.tensor([row])))
    more = [tokens(1, 1 + 3 * index, seed=99)[0].tolist() for index in range(len(rows))]
    after = read(loaded.model, more, together.state)
    for index, row in enumerate(rows):
        close(after.select([index]), read(loaded.model, torch.tensor([row + more[index]])))


def test_long_rows_of_unlike_lengths_are_read_in_pieces(loaded: Loaded) -> None:
    rows = [tokens(1, length)[0].tolist() for length in (8 * PIECE // 2 + 30, 40)]
    together = read(loaded.model, rows)
    for index, row in enumerate(rows):
        torch.testing.assert_close(
            together.logits[index], read(loaded.model, torch.tensor([row])).logits[0], atol=1e-4, rtol=0
        )


def test_forks_are_separate_runs(loaded: Loaded) -> None:
    model, shared = loaded.model, tokens(2, 70)
    ends = [tokens(1, 1 + index, seed=index)[0].tolist() for index in range(6)]
    forked = read(model, ends, read(model, shared).fork(3).state)
    for index, end in enumerate(ends):
        alone = read(model, torch.tensor([shared[index // 3].tolist() + end]))
        close(forked.select([index]), alone)
    with pytest.raises(ValueError, match="copies 0"):
        read(model, shared).fork(0)


def test_saved_and_resumed(loaded: Loaded, tmp_path: Path) -> None:
    model, file = loaded.model, tmp_path / "prompt.safetensors"
    cache = read(model, tokens(2, 90))
    cache.save(file, model)
    again = StateCache.load(file, model)
    assert torch.equal(again.logits, cache.logits)
    pairs = zip(again.state.layers, cache.state.layers, strict=True)
    assert all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
    wanted = [t.tolist() for t in generate(model, [[], []], 20, greedy=True, state=cache)]
    assert [t.tolist() for t in generate(model, [[], []], 20, greedy=True, state=again)] == wanted
    whole = [t.tolist() for t in generate(model, tokens(2, 90), 20, greedy=True)]
    assert whole == wanted


def test_a_state_of_other_weights_or_no_state_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    model, file = loaded.model, tmp_path / "prompt.safetensors"
    read(model, tokens(1, 5)).save(file, model)
    other = CausalLM(model.config).eval()
    initialize(other, 9)
    with pytest.raises(UserError, match="of other weights"):
        StateCache.load(file, other)
    with pytest.raises(UserError, match="no such file"):
        StateCache.load(tmp_path / "none", model)
    (tmp_path / "text").write_text("text")
    with pytest.raises(UserError, match="not a saved state"):
        StateCache.load(tmp_path / "text", model)
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, "pt") as opened:
        tensors, facts = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    for gone in ("logits", "tpe.hidden", "layers.1.kv"):
        save_file({name: x for name, x in tensors.items() if name != gone}, tmp_path / "half", facts)
        with pytest.raises(UserError, match=f"has no tensor '{gone}', so this is half a state"):
            StateCache.load(tmp_path / "half", model)
    with pytest.raises(UserError, match="cannot be written"):
        read(model, tokens(1, 5)).save(tmp_path / "no" / "file", model)


def test_generation_goes_on_from_its_own_cache(loaded: Loaded, tmp_path: Path) -> None:
    """Stopped after 75 tokens (past a block of decoding), saved, loaded, continued: the text of one run."""
    model = loaded.model
    whole = [int(t) for t in generate(model, [1, 300], 150, greedy=True)]
    first = generate(model, [1, 300], 75, greedy=True)
    drawn = [int(t) for t in first]
    first.cache().save(tmp_path / "s", model)
    rest = [int(t) for t in generate(model, [], 75, greedy=True, state=StateCache.load(tmp_path / "s", model))]
    assert drawn + rest == whole


def test_greedy_is_the_full_rerun_for_500_tokens(loaded: Loaded) -> None:
    """One re-run over the final text gives the greedy choice at each of its places, the model being causal."""
    drawn = [int(t) for t in generate(loaded.model, [1, 300, 310], 500, greedy=True)]
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[1, 300, 310, *drawn]])).logits[0, 2:-1, :330]
    top = logits.topk(2).values
    differ = logits.argmax(-1) != torch.tensor(drawn)
    assert not bool((differ & (top[:, 0] - top[:, 1] > 1e-4)).any())  # ties apart
    assert int(differ.sum()) <= 2


def test_state_and_work_per_token_do_not_grow(loaded: Loaded) -> None:
    """Size of the state after 10 and after 5,000 tokens; decoding touches nothing else."""

    def size(decoder: Decoder) -> list[int]:
        layers = [x.numel() for layer in decoder.state.layers for x in layer if x is not None]
        return [*layers, *(x.numel() for x in decoder.state.tpe)]

    short, long = (Decoder(loaded.model, read(loaded.model, tokens(1, n)).state) for n in (10, 5000))
    before = size(long)
    assert size(short) == before
    for token in range(70):
        long(torch.tensor([2 + token]))
    assert size(long) == before


def test_decoding_goes_on_from_a_strided_state(loaded: Loaded) -> None:
    """As a GPU's scan leaves it."""
    state = read(loaded.model, tokens(2, 20)).state
    hidden = state.tpe.hidden
    strided = hidden.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided.is_contiguous()
    decoders = [Decoder(loaded.model, state._replace(tpe=state.tpe._replace(hidden=x))) for x in (hidden, strided)]
    for token in range(3):
        one, other = (decoder(torch.tensor([2 + token, 9])) for decoder in decoders)
        assert torch.equal(one, other)


class Work(TorchDispatchMode):
    """Every operation that runs, with the shapes of what it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        self.done.append((str(function), [tuple(x.shape) for x in tensors]))
        return result


def test_a_token_costs_the_same_operations_at_any_position(loaded: Loaded) -> None:
    work = []
    for length in (5, 4000):
        decoder = Decoder(loaded.model, read(loaded.model, tokens(1, length)).state)
        with Work() as seen:
            decoder(torch.tensor([7]))
        work.append(seen.done)
    assert work[0] == work[1] and len(work[0]) > 20


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(seed=5, top_p=0.9)])
def test_batches_of_unlike_prompts_give_what_each_gives_alone(
    loaded: Loaded, batch_size: int, sampling: Sampling
) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    prompts = [[1, *tokens(1, length, seed=length)[0].tolist()] for length in (0, 3, 40, 41, 3, 90, 1)]
    found = complete(loaded.model, tokenizer, prompts, 25, sampling, batch_size=batch_size)
    for index, prompt in enumerate(prompts):
        one = Sampling(sampling.greedy, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed + index)
        rows = generate(loaded.model, prompt, 25, sampling=one, stop_ids=[1], vocab_size=tokenizer.vocab_size)
        assert found[index].ids == [int(t) for t in rows]
        assert found[index].end == ("end_of_document" if found[index].ids[-1] == 1 else "max_tokens")
        assert found[index].text == tokenizer.decode_bytes(found[index].ids).decode("utf-8", "replace")


def test_stop_strings_cut_the_text(loaded: Loaded) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    free = complete(loaded.model, tokenizer, [[1]], 40, Sampling(seed=1))[0]
    stop = free.text[7:11]  # anywhere, not where a token ends
    cut = complete(loaded.model, tokenizer, [[1], [1, 300]], 40, Sampling(seed=1), stop=["\x00", stop])[0]
    assert cut.text == free.text[: free.text.index(stop)] and cut.end == "stop"
    assert len(cut.ids) < len(free.ids) and free.ids[: len(cut.ids)] == cut.ids


def test_refusals(loaded: Loaded) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    for arguments, options, message in (
        (([[1]], -1), {}, "max-tokens -1"),
        (([[1]], 1), {"batch_size": 0}, "batch-size 0"),
        (([[1], []], 1), {}, "prompt 1: holds no token"),
        (([[330]], 1), {}, "prompt 0: has tokens outside"),
        (([[1]], 1), {"stop": [""]}, "empty string"),
    ):
        with pytest.raises(UserError, match=message):
            complete(loaded.model, tokenizer, *arguments, Sampling(), **options)
    assert [c.end for c in complete(loaded.model, tokenizer, [[1]], 0, Sampling())] == ["max_tokens"]
    with pytest.raises(ValueError, match="row 1 of ids holds no token"):
        read(loaded.model, [[1], []])
    assert empty_state(loaded.model, 3).layers[0].sum.shape[0] == 3

"""Generation from the state against re-running the whole prefix, on trained weights."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lightnet_llm.cli import main
from lightnet_llm.config.model import ModelConfig
from lightnet_llm.errors import UserError
from lightnet_llm.inference import Loaded, Sampling, TextStream, after_document_end, read
from lightnet_llm.inference.cache import PIECE
from lightnet_llm.inference.decoder import Decoder
from lightnet_llm.inference.generate import generate
from lightnet_llm.inference.sampling import choose
from lightnet_llm.models import CausalLM, initialize


def rerun(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the next token after all of ``ids`` [B, N], in one pass without any state."""
    with torch.inference_mode():
        return model(ids).logits[:, -1, : model.config.vocab_size]


def prompt_of(loaded: Loaded, text: str) -> list[int]:
    assert loaded.tokenizer is not None
    return after_document_end(loaded.tokenizer.encode(text), loaded.tokenizer.eod_id)


def test_state_equals_whole_prefix_for_200_tokens(loaded: Loaded) -> None:
    model = loaded.model
    ids = torch.tensor([prompt_of(loaded, "the ship sails under a bright")])
    reading = read(model, ids)
    worst = 0.0
    sampling, generators = Sampling(seed=3), Sampling(seed=3).generators(1)
    for _ in range(200):
        worst = max(worst, float((reading.logits - rerun(model, ids)).abs().max()))
        token = choose(reading.logits, sampling, generators)
        ids = torch.cat([ids, token[:, None]], dim=1)
        reading = read(model, token[:, None], reading.state)
    assert worst < 1e-4, worst
    assert float(reading.logits.std()) > 1.0  # trained weights: the logits are far from constant


def test_decoder_equals_whole_prefix_for_200_tokens(loaded: Loaded) -> None:
    model = loaded.model
    ids = torch.tensor([prompt_of(loaded, "the ship sails under a bright")]).repeat(2, 1)
    logits, state = read(model, ids)
    decoder = Decoder(model, state)
    sampling, generators = Sampling(seed=3), Sampling(seed=3).generators(2)
    worst = 0.0
    for _ in range(200):
        worst = max(worst, float((logits - rerun(model, ids)).abs().max()))
        tokens = choose(logits, sampling, generators)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        logits = decoder(tokens)
    assert worst < 1e-4, worst


@pytest.mark.parametrize("switch", ["tpe", "lrpe", "decay"])
def test_ablations_generate_from_the_state_too(switch: str) -> None:
    value = "independent" if switch == "decay" else False
    fields = {"layers": 2, "width": 32, "heads": 2, "glu_width": 40, "vocab_size": 50, "gate_rank": 4, "tpe_rank": 4}
    model = CausalLM(ModelConfig(**fields, initializer_std=0.2, **{switch: value})).eval()
    initialize(model, 0)
    ids = torch.randint(0, 50, (2, 90), generator=torch.Generator().manual_seed(0))
    reading = read(model, ids[:, :70])
    decoder = Decoder(model, reading.state)
    for place in range(70, 90):
        torch.testing.assert_close(reading.logits, rerun(model, ids[:, :place]), atol=1e-4, rtol=0)
        reading = read(model, ids[:, place : place + 1], reading.state)
        torch.testing.assert_close(decoder(ids[:, place]), reading.logits, atol=1e-4, rtol=0)


def test_long_prompts_are_read_in_pieces(loaded: Loaded) -> None:
    ids = torch.randint(2, 330, (1, PIECE + 100), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(read(loaded.model, ids).logits, rerun(loaded.model, ids), atol=1e-4, rtol=0)


def test_a_state_can_be_forked(loaded: Loaded) -> None:
    model, start = loaded.model, torch.tensor([prompt_of(loaded, "a keeper writes")])
    reading = read(model, start)
    kept = [layer.kv.clone() for layer in reading.state.layers]
    ends = [prompt_of(loaded, text)[1:] for text in (" to an old friend", " slowly", " over the harbour")]
    for end in ends * 2:  # each twice: no continuation leaves a trace in the state it started from
        forked = [int(t) for t in generate(model, end, 12, greedy=True, state=reading.state)]
        whole = [int(t) for t in generate(model, [*start[0].tolist(), *end], 12, greedy=True)]
        assert forked == whole
    assert all(torch.equal(a, b.kv) for a, b in zip(kept, reading.state.layers, strict=True))


def test_rows_of_a_batch_do_what_they_do_alone(loaded: Loaded) -> None:
    prompts = torch.tensor([[1, 300, 310, 320], [1, 312, 299, 301], [1, 305, 305, 303]])
    together = torch.stack(list(generate(loaded.model, prompts, 30, seed=5)), dim=1)
    for row in range(3):
        alone = torch.stack(list(generate(loaded.model, prompts[row : row + 1], 30, seed=5 + row)), dim=1)
        assert torch.equal(together[row : row + 1], alone)


def test_a_row_that_ended_repeats_its_stop_token(loaded: Loaded) -> None:
    prompts = torch.tensor([[1, 300], [1, 312]])
    free = torch.stack(list(generate(loaded.model, prompts, 40, seed=1)), dim=1)
    stop = int(free[0, 5])
    out = torch.stack(list(generate(loaded.model, prompts, 40, seed=1, stop_ids=[stop])), dim=1)
    first = [row.tolist().index(stop) if stop in row.tolist() else 40 for row in free]
    for row, end in enumerate(first):
        assert out[row, : end + 1].tolist() == free[row, : min(end + 1, out.shape[1])].tolist()
        assert set(out[row, end:].tolist()) <= {stop}
    assert out.shape[1] == min(40, max(first) + 1)


def test_seed_decides_the_text(loaded: Loaded) -> None:
    def text(**options: float) -> list[int]:
        return [int(t) for t in generate(loaded.model, [1], 40, **options)]

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text(greedy=True) == text(greedy=True, seed=9) == text(temperature=0.0) == text(top_k=1, seed=4)
    assert text(temperature=1e-6) == text(greedy=True)
    assert text(top_p=1e-9, seed=3) == text(greedy=True)


@pytest.mark.parametrize("options", [{"greedy": True}, {"seed": 1}, {"top_k": 330, "temperature": 5.0}])
def test_rows_that_no_token_has_are_never_drawn(loaded: Loaded, options: dict[str, float]) -> None:
    """Padded rows have logits of 0, so they win where all others are negative; so do rows beyond the tokenizer."""
    model = CausalLM(loaded.config.model.model_copy(update={"tie_embeddings": False})).eval()
    initialize(model, 0)
    assert model.head is not None
    with torch.no_grad():
        model.embedding.weight.abs_()
        model.head.weight[:330] = -model.embedding.weight[:330] - 0.1
        raw = model(torch.tensor([[1]])).logits[0, 0]
        assert int(raw.argmax()) >= 330  # unmasked, padding would be drawn
        assert all(int(t) < 330 for t in generate(model, [1], 20, **options))
        model.head.weight[300:330] = 0.0
        assert all(int(t) < 300 for t in generate(model, [1], 20, vocab_size=300, **options))
        assert any(int(t) >= 300 for t in generate(model, [1], 20, **options))


def test_legal_and_illegal_amounts(loaded: Loaded) -> None:
    assert list(generate(loaded.model, [1], 0)) == []
    with pytest.raises(UserError, match="max-tokens -1"):
        generate(loaded.model, [1], -1)
    with pytest.raises(UserError, match="token 330 is not one of the model's 330"):
        generate(loaded.model, [1, 330], 5)
    with pytest.raises(UserError, match="holds no token"):
        generate(loaded.model, [], 5)
    with pytest.raises(TypeError, match="not both"):
        generate(loaded.model, [1], 1, sampling=Sampling(), greedy=True)


def test_logits_that_are_not_finite_are_an_error(loaded: Loaded) -> None:
    model = CausalLM(loaded.config.model).eval()
    initialize(model, 0)
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        list(generate(model, [1], 1))


def test_prompt_follows_exactly_one_end_of_document_token() -> None:
    assert after_document_end([], 1) == [1]
    assert after_document_end([5, 6], 1) == [1, 5, 6]
    assert after_document_end([1, 5, 6], 1) == [1, 5, 6]


def test_pieces_of_text_hold_whole_characters(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    byte = {value: 2 + value for value in range(256)}  # lightnet's byte pieces
    data = "é水🌊x".encode()
    wanted = [*(byte[b] for b in data), byte[0x80], byte[ord("y")], byte[0xE6]]  # then a stray and a cut byte
    monkeypatch.setattr(
        "lightnet_llm.inference.generate.generate", lambda *a, **k: iter([torch.tensor([t]) for t in wanted])
    )
    pieces = list(TextStream(loaded.model, tokenizer, "", 20, Sampling()))
    assert pieces == ["é", "水", "🌊", "x", "\ufffd", "y", "\ufffd"]


def test_end_of_document_ends_the_text_and_is_no_part_of_it(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    wanted = [*tokenizer.encode("the sea"), tokenizer.eod_id]
    monkeypatch.setattr(
        "lightnet_llm.inference.generate.generate", lambda *a, **k: iter([torch.tensor([t]) for t in wanted])
    )
    stream = TextStream(loaded.model, tokenizer, "x", 20, Sampling())
    assert "".join(stream) == "the sea"
    assert stream.ended and stream.ids == wanted


# The command ------------------------------------------------------------------------------------------------------


def command(*arguments: str, **options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["generate", *arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_command_streams_what_the_library_draws(run: Path, loaded: Loaded) -> None:
    code, out, _ = command(str(run), "--prompt", "the ship", "--max-tokens", "20", "--seed", "7")
    assert loaded.tokenizer is not None
    stream = TextStream(loaded.model, loaded.tokenizer, "the ship", 20, Sampling(seed=7))
    assert code == 0 and out == "".join(stream) + "\n"
    code, echoed, _ = command(str(run), "--prompt", "the ship", "--max-tokens", "20", "--seed", "7", "--echo")
    assert code == 0 and echoed == "the ship" + out


def test_command_json_and_prompt_sources(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("naïve 水")
    answers = [
        command(str(run), "--prompt", "naïve 水", "--max-tokens", "8", "--greedy", "--json"),
        command(str(run), "--prompt", "-", "--max-tokens", "8", "--greedy", "--json", input="naïve 水"),
        command(str(run), "--prompt-file", str(file), "--max-tokens", "8", "--greedy", "--json"),
    ]
    facts = [json.loads(out) for code, out, _ in answers if code == 0]
    assert len(facts) == 3 and len({fact["text"] for fact in facts}) == 1
    assert (
        len(facts[0]["ids"]) <= 8
        and facts[0]["prompt_ids"][0] == 1
        and facts[0]["end"] in ("max_tokens", "end_of_document")
    )


def test_command_takes_an_empty_prompt_and_no_tokens(run: Path) -> None:
    assert command(str(run), "--prompt", "", "--max-tokens", "0")[:2] == (0, "\n")
    code, out, _ = command(str(run), "--prompt", "", "--max-tokens", "5", "--json")
    assert code == 0 and json.loads(out)["prompt_ids"] == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--top-p", "0"], "top-p 0.0"),
        (["--prompt", "x", "--top-k", "0"], "top-k 0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature -1.0"),
        (["--prompt", "x", "--seed", "-1"], "seed -1"),
        (["--prompt", "x", "--device", "toaster"], "device 'toaster'"),
        (["--prompt", "x", "--dtype", "fp8"], "dtype 'fp8'"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt: cannot be read"),
        ([], "give either --prompt"),
        (["--prompt", "x", "--prompt-file", "y"], "give either --prompt"),
    ],
)
def test_command_errors_are_one_line(run: Path, arguments: list[str], message: str) -> None:
    code, out, err = command(str(run), *arguments)
    assert code == 1 and out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1

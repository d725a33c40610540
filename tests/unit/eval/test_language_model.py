"""The model of lm-eval: how texts become tokens, what odd requests get, and its three kinds of requests."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightnet_eval.language_model import LightNetLM
from lightnet_eval.likelihood import Request
from lm_eval.api.instance import Instance

from lightnet_llm.errors import UserError
from lightnet_llm.inference import Loaded, Sampling, complete
from lightnet_llm.inference.load import require_tokenizer

from .test_likelihood import twin

ROOT = Path(__file__).resolve().parents[3]


class Model(LightNetLM):
    """Keeps what it says."""

    def __init__(self, loaded: Loaded, **options: object):
        self.said: list[str] = []
        super().__init__(loaded=loaded, warn=self.said.append, **options)


def instances(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def test_exactly_one_end_of_document_token(loaded: Loaded) -> None:
    model, tokenizer = Model(loaded), require_tokenizer(loaded)
    sea = tuple(tokenizer.encode("the sea ship"))
    for context in ("the sea", "<|endofdocument|>the sea", "the sea "):
        request = model._request(context, "ship" if context.endswith(" ") else " ship")
        assert request.tokens == (1, *sea) and request.start == 1 + len(tokenizer.encode("the sea"))
    for context in ("", "  "):
        request = model._request(context, "ship")
        assert request.tokens == (1, *tokenizer.encode(context + "ship")) and request.start == 1
    assert model._request("the", "").start == len(model._request("the", "").tokens)
    bare = Model(loaded, add_bos_token=False)
    assert bare._request("the sea", " ship").tokens == sea
    assert bare._request("", "ship").tokens[0] == 1  # something must stand before the first token


def test_batch_sizes_that_lm_eval_knows(loaded: Loaded) -> None:
    for given in (None, 1, "1", "auto", "auto:4"):
        assert Model(loaded, batch_size=given).batch_size == 32
    assert Model(loaded, batch_size="7").batch_size == 7
    for given in ("many", "0", "-1"):
        with pytest.raises(UserError, match=f"batch_size {given}: must be a number"):
            Model(loaded, batch_size=given)


def test_loglikelihoods_are_those_of_the_plain_model(loaded: Loaded) -> None:
    model = Model(loaded)
    pairs = [("the sea", " ship sails"), ("", "naïve 水"), ("the sea", " ship"), ("a b", ""), ("the sea", " ship")]
    answers = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for pair, (nats, greedy) in zip(pairs, answers, strict=True):
        wanted = twin(loaded.model, model._request(*pair))
        assert nats == pytest.approx(wanted.log_likelihood, abs=1e-4) and greedy == wanted.greedy
    assert answers[3] == (0.0, True) and answers[2] == answers[4]
    assert model.said == ["1 of 5 continuations tokenise to nothing; their log likelihood is 0"]


def test_a_context_is_tokenised_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with each of its continuations, where it ends before a space; what comes out is as if it were."""
    model, tokenizer = Model(loaded), require_tokenizer(loaded)
    pairs = [("the sea", f" {word}") for word in ("ship", "sails", "harbour")]
    pairs += [
        ("the sea ", "ship"),
        ("a lone ", " ship"),
        ("<|endofdocument|>", " ship"),
        ("no", "where"),
        (" ship", " x"),
    ]
    wanted = []
    for context, continuation in pairs:
        before = (1, *tokenizer.encode(context.removeprefix("<|endofdocument|>").rstrip()))
        whole = (1, *tokenizer.encode((context + continuation).removeprefix("<|endofdocument|>")))
        wanted.append(Request(before + whole[len(before) :], len(before)))
    assert [model._request(*pair) for pair in pairs] == wanted
    encoded: list[str] = []
    encode_all = tokenizer.encode_all
    monkeypatch.setattr(tokenizer, "encode_all", lambda texts: (encoded.extend(texts), encode_all(texts))[1])
    found = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for request, (nats, greedy) in zip(wanted, found, strict=True):
        truth = twin(loaded.model, request)
        assert nats == pytest.approx(truth.log_likelihood, abs=1e-4) and greedy == truth.greedy
    assert encoded.count("the sea") == 1 and sum("sea" in text for text in encoded) == 1


def test_rolling_reads_the_whole_text(loaded: Loaded) -> None:
    model, tokenizer = Model(loaded, batch_tokens=50), require_tokenizer(loaded)
    texts = ["the sea ship sails over the harbour " * 30, "x", ""]
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", *((text,) for text in texts)))
    for text, nats in zip(texts, found, strict=True):
        assert nats == pytest.approx(
            twin(loaded.model, Request((1, *tokenizer.encode(text)), 1)).log_likelihood, abs=1e-3
        )
    assert model.said == ["1 of 3 texts tokenise to nothing; their log likelihood is 0"]


def test_long_contexts_are_cut_and_counted_and_continuations_kept(loaded: Loaded) -> None:
    model, tokenizer = Model(loaded, max_length=10), require_tokenizer(loaded)
    context, long = "the sea " * 20, " ship sails over the harbour keeper" * 3
    for continuation in (" ship", long):
        whole = model._request(context.strip(), continuation)
        cut = model._cut(whole)
        assert cut.tokens[cut.start :] == whole.tokens[whole.start :]
        assert len(cut.tokens) == max(11, len(cut.tokens) - cut.start + 1) and cut.start >= 1
    assert len(tokenizer.encode(long)) > 11
    model._long = 0
    pairs = [(context.strip(), " ship"), ("the", " sea"), (context.strip(), long)]
    answers = model.loglikelihood(instances("loglikelihood", *pairs))
    assert len(model.said) == 1 and model.said[0].startswith("2 of 3 contexts were longer than max_length 10")
    assert answers[0][0] == pytest.approx(
        twin(loaded.model, model._cut(model._request(*pairs[0]))).log_likelihood, abs=1e-4
    )


def test_generation_stops_where_it_is_told(loaded: Loaded) -> None:
    model, tokenizer = Model(loaded), require_tokenizer(loaded)
    contexts = ["the sea", "", "a keeper writes to an old friend"]
    kinds = [{"until": [".", "\n"], "max_gen_toks": 30}, {"until": "sea", "max_gen_toks": 12, "do_sample": False}]
    given = [(context, kinds[index % 2]) for index, context in enumerate(contexts)]
    found = model.generate_until(instances("generate_until", *given))
    for (context, options), text in zip(given, found, strict=True):
        prompt = [1, *tokenizer.encode(context)]
        free = complete(loaded.model, tokenizer, [prompt], options["max_gen_toks"], Sampling(greedy=True))[0].text
        stops = [options["until"]] if isinstance(options["until"], str) else options["until"]
        ends = [free.index(stop) for stop in stops if stop in free]
        assert text == free[: min(ends, default=None)]
    sampled = [("the", {"until": [], "max_gen_toks": 9, "do_sample": True, "temperature": 1.5, "top_k": 50})] * 2
    one, other = model.generate_until(instances("generate_until", *sampled))
    assert one != other and [one, other] == model.generate_until(instances("generate_until", *sampled))
    short = Model(loaded, max_length=8)
    short.generate_until(instances("generate_until", ("the sea " * 9, {"max_gen_toks": 4})))
    assert short.said[0].startswith("1 of 1 contexts were longer than max_length 8 allows with 4 tokens to come")
    for options in ({"num_beams": 4}, {"repetition_penalty": 2}):
        with pytest.raises(UserError, match=next(iter(options))):
            model.generate_until(instances("generate_until", ("x", options)))


def test_refusals(loaded: Loaded) -> None:
    with pytest.raises(UserError, match="checkpoint: not given"):
        LightNetLM()
    with pytest.raises(UserError, match="max_length 0"):
        Model(loaded, max_length=0)


RANKS = """
import json, os, sys
import torch
from lightnet_eval.language_model import LightNetLM
from lm_eval.api.instance import Instance
torch.set_num_threads(1)
rank = 1 if os.fork() == 0 else 0  # imported once
os.environ["RANK"] = str(rank)
model = LightNetLM(sys.argv[1], device="cpu")
given = [("the sea", " ship"), ("the sea", " keeper writes"), ("", "naïve")]
answers = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(given)])
more = model.loglikelihood([Instance("loglikelihood", {}, given[0], 0)])
texts = model.generate_until([Instance("generate_until", {}, ("the", {"max_gen_toks": 6}), 0)])
with open(f"{sys.argv[2]}.{rank}", "w") as file:
    json.dump([answers, more, texts], file)
os.wait() if rank == 0 else os._exit(0)
"""


def test_three_requests_on_two_ranks(run: Path, loaded: Loaded, tmp_path: Path) -> None:
    """One rank has nothing to do in two of three calls; nothing hangs, and every rank learns the same."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(run), str(tmp_path / "answers")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **place}, check=True, timeout=240)
    answers = [json.loads((tmp_path / f"answers.{rank}").read_text()) for rank in range(2)]
    assert answers[0] == answers[1]
    pairs = [("the sea", " ship"), ("the sea", " keeper writes"), ("", "naïve")]
    model = Model(loaded)
    alone = model.loglikelihood(instances("loglikelihood", *pairs))
    for one, other in zip([*answers[0][0], *answers[0][1]], [*alone, alone[0]], strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4) and one[1] == other[1]
    assert answers[0][2] == model.generate_until(instances("generate_until", ("the", {"max_gen_toks": 6})))


def test_lm_eval_learns_of_the_model() -> None:
    """As PyTorch's entry point does it in lm-eval's program; the other models stay known."""
    code = (
        "import lm_eval; from lightnet_eval.plugin import register; register();"
        "from lm_eval.api.registry import get_model, model_registry;"
        "print(get_model('lightnet').__name__, 'hf' in model_registry)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.split() == ["LightNetLM", "True"], done.stderr
    code = "import sys; from lightnet_eval.plugin import register; register(); print('lm_eval' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout.split() == ["False"], done.stderr


def test_device_of_this_process(loaded: Loaded) -> None:
    model = Model(loaded)
    if not torch.cuda.is_available():
        assert model._choose("cuda:0") == "cpu" and "the CPU is used" in model.said[0]
    assert model._choose("cpu") == "cpu"


@pytest.mark.parametrize("arguments", ["checkpiont=x", {"checkpiont": "x"}], ids=["string", "dictionary"])
def test_an_argument_that_is_none_is_named(arguments: Any) -> None:
    make = LightNetLM.create_from_arg_string if isinstance(arguments, str) else LightNetLM.create_from_arg_obj
    with pytest.raises(SystemExit) as ended:
        make(arguments, {"device": "cpu"})
    said = "lightnet: model_args: unknown argument 'checkpiont' (did you mean 'checkpoint'?); known: checkpoint, "
    assert str(ended.value).startswith(said) and "batch_tokens" in str(ended.value) and "\n" not in str(ended.value)


@pytest.mark.parametrize("arguments", ["pretrained={}", {"pretrained": "{}"}], ids=["string", "dictionary"])
def test_lm_evals_program_ends_with_one_line(arguments: str | dict[str, str], tmp_path: Path) -> None:
    make = LightNetLM.create_from_arg_string if isinstance(arguments, str) else LightNetLM.create_from_arg_obj
    place = str(tmp_path / "nowhere")
    given = arguments.format(place) if isinstance(arguments, str) else {"pretrained": place}
    with pytest.raises(SystemExit, match=f"^lightnet: {place}: no such checkpoint; ") as ended:
        make(given, {"device": "cpu"})  # type: ignore[arg-type]
    assert "\n" not in str(ended.value)

"""Held-out scores against a computation that takes one document at a time in one piece."""

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from lightnet_data import manifest
from lightnet_data.documents import DocumentReader
from lightnet_eval.baselines import Baselines
from lightnet_eval.documents import HeldOutDocument, from_text, prepared
from lightnet_eval.heldout import score

from lightnet_llm.cli import main
from lightnet_llm.errors import UserError
from lightnet_llm.inference import Loaded
from lightnet_llm.inference.load import require_tokenizer
from tests.unit.inference import toy


@pytest.fixture(scope="module")
def documents(loaded: Loaded) -> list[HeldOutDocument]:
    """The held-out split, an empty document and one far longer than any."""
    tokenizer = require_tokenizer(loaded)
    assert loaded.config.data.path
    found = list(prepared(loaded.config.data.path, tokenizer).documents)
    long = "\n".join(toy.documents(12, seed=4))
    tokens = np.array([*tokenizer.encode(long), tokenizer.eod_id])
    empty = HeldOutDocument(np.array([tokenizer.eod_id]), 0, "")
    return [*found[:9], empty, HeldOutDocument(tokens, len(long.encode()), long), *found[9:18]]


@pytest.fixture(scope="module")
def truth(loaded: Loaded, documents: list[HeldOutDocument]) -> list[float]:
    """Nats of each document by a loop over its tokens' log probabilities, in fp64."""
    nats = []
    with torch.no_grad():
        for document in documents:
            inputs = torch.tensor([[1, *document.tokens[:-1].tolist()]])
            logits = loaded.model(inputs).logits[0].double()[:, :330]
            probability = logits.log_softmax(-1)
            nats.append(-sum(float(probability[i, t]) for i, t in enumerate(document.tokens.tolist())))
    return nats


@pytest.mark.parametrize("batch_tokens", [1, 7, 64, 100, 333, 5000, None])
def test_every_batch_size_gives_the_truth(
    loaded: Loaded, documents: list[HeldOutDocument], truth: list[float], batch_tokens: int | None
) -> None:
    some = documents if batch_tokens != 1 else documents[:3] + documents[9:10]  # one token a pass is slow
    nats = truth if batch_tokens != 1 else truth[:3] + truth[9:10]
    result = score(loaded.model, some, 1, batch_tokens)
    np.testing.assert_allclose(result.document_nats, nats, rtol=1e-5)
    assert result.nats == pytest.approx(sum(nats), rel=1e-5)
    assert result.tokens == sum(len(document.tokens) for document in some)


def test_what_is_counted(loaded: Loaded, documents: list[HeldOutDocument], truth: list[float]) -> None:
    result = score(loaded.model, documents, 1)
    figures = result.as_dict()
    texts = [document.text or "" for document in documents]
    size = sum(len(text.encode()) for text in texts)
    words = sum(len(text.split()) for text in texts)
    lines = sum(len(text.splitlines()) for text in texts)
    assert figures["documents"] == len(documents) and figures["bytes"] == size
    assert figures["words"] == words and figures["line_ends"] == lines
    assert figures["bits_per_byte"] == pytest.approx(sum(truth) / math.log(2) / size, rel=1e-5)
    assert figures["nats_per_token"] == pytest.approx(sum(truth) / figures["tokens"], rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["nats_per_token"]))
    assert figures["word_perplexity"] == pytest.approx(math.exp(sum(truth) / words), rel=1e-4)
    assert figures["word_perplexity_line_ends"] == pytest.approx(math.exp(sum(truth) / (words + lines)), rel=1e-4)
    assert figures["end_of_document_included"] is True and result.unfaithful == 0
    with torch.no_grad():  # the share of the closing tokens, for two documents
        closing = 0.0
        for document in documents[:2]:
            logits = loaded.model(torch.tensor([[1, *document.tokens[:-1].tolist()]])).logits[0, -1, :330]
            closing -= float(logits.log_softmax(-1)[1])
    assert score(loaded.model, documents[:2], 1).eod_nats == pytest.approx(closing, rel=1e-5)


def test_prepared_documents_are_those_that_were_prepared(run: Path, loaded: Loaded) -> None:
    assert loaded.config.data.path
    source = prepared(loaded.config.data.path, require_tokenizer(loaded))
    reader = DocumentReader(Path(loaded.config.data.path) / "validation")
    found = list(source.documents)
    assert len(found) == len(reader) and source.total_bytes == sum(d.byte_length for d in found)
    originals = set(toy.documents(220, seed=1))
    assert all(document.text in originals for document in found)
    assert next(prepared(loaded.config.data.path, None).documents).text is None


def test_text_and_its_tokens_score_alike(loaded: Loaded, tmp_path: Path) -> None:
    texts = toy.documents(9, seed=1)
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + '{"text": " "}\n')
    notes: list[str] = []
    tokenizer = require_tokenizer(loaded)
    found = list(from_text(file, tokenizer, notes.append).documents)
    assert [document.text for document in found] == texts and len(notes) == 1
    assert all(d.tokens.tolist() == [*tokenizer.encode(t), 1] for d, t in zip(found, texts, strict=True))
    file.write_text('{"content": "a b", "text": "c"}\n{"content": "d"}\n')
    assert [d.text for d in from_text(file, tokenizer, notes.append, field="content").documents] == ["a b", "d"]
    with pytest.raises(UserError, match=r"line 2: no field 'text' .*--field"):
        list(from_text(file, tokenizer, notes.append).documents)
    file.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match="line 2"):
        list(from_text(file, tokenizer, notes.append).documents)


@pytest.mark.parametrize(("program", "name"), [("gzip", "gzip -9"), ("xz", "xz -9")])
def test_baselines_are_what_the_programs_give(program: str, name: str) -> None:
    texts = toy.documents(120, seed=2)
    data = "".join(texts).encode()
    baselines = Baselines()
    for text in texts:
        baselines.add(text)
    try:
        packed = subprocess.run(
            [program, "-9", "-c", "-n" if program == "gzip" else "-k"], input=data, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip(f"{program} is not installed")
    facts = baselines.finish()[name]
    assert abs(facts["bytes"] - len(packed.stdout)) <= 8, packed.stderr
    assert facts["bits_per_byte"] == pytest.approx(8 * facts["bytes"] / len(data))


def test_subsets_of_prepared_folders(loaded: Loaded, tmp_path: Path) -> None:
    """What ``lightnet prep --by-subset`` writes: a data set in each of a folder's folders."""
    assert loaded.config.data.path
    data = Path(loaded.config.data.path)
    (tmp_path / "one").symlink_to(data)
    (tmp_path / "two").symlink_to(data)
    found = list(prepared(tmp_path, require_tokenizer(loaded)).documents)
    alone = list(prepared(data, require_tokenizer(loaded)).documents)
    assert [document.subset for document in found] == ["one"] * len(alone) + ["two"] * len(alone)
    whole, part = score(loaded.model, found, 1, 300), score(loaded.model, alone, 1, 5000)
    assert set(whole.subsets) == {"one", "two"} and not part.subsets
    figures = whole.as_dict()
    for name in ("one", "two"):
        assert figures["subsets"][name]["nats"] == pytest.approx(part.nats, rel=1e-5)
        assert figures["subsets"][name]["bits_per_byte"] == pytest.approx(part.as_dict()["bits_per_byte"], rel=1e-5)
        assert figures["subsets"][name]["documents"] == len(alone)
    assert figures["nats"] == pytest.approx(2 * part.nats, rel=1e-5)
    assert figures["tokens"] == sum(figures["subsets"][name]["tokens"] for name in ("one", "two"))


def test_subsets_of_text(loaded: Loaded, tmp_path: Path) -> None:
    texts = toy.documents(6, seed=1)
    for index, text in enumerate(texts):
        folder = tmp_path / ("prose" if index % 2 else "code")
        folder.mkdir(exist_ok=True)
        (folder / f"{index}.txt").write_text(text)
    tokenizer = require_tokenizer(loaded)
    found = list(from_text(tmp_path, tokenizer, print).documents)
    assert [document.subset for document in found] == ["code"] * 3 + ["prose"] * 3
    file = tmp_path / "all.jsonl"
    rows = [{"text": text, "meta": {"set": f"set {index % 2}"}} for index, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(from_text(file, tokenizer, print, "meta.set").documents)
    assert [document.subset for document in found] == ["set 0", "set 1"] * 3
    assert {document.subset for document in from_text(file, tokenizer, print).documents} == {""}
    shares = score(loaded.model, found, 1).as_dict()["subsets"]
    assert shares["set 0"]["bytes"] + shares["set 1"]["bytes"] == sum(len(text.encode()) for text in texts)


def test_refusals(loaded: Loaded, documents: list[HeldOutDocument], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no document"):
        score(loaded.model, [], 1)
    with pytest.raises(UserError, match="batch-tokens -1"):
        score(loaded.model, documents, 1, -1)
    foreign = HeldOutDocument(np.array([5, 330, 1]), 4, None)
    with pytest.raises(UserError, match="document 1: token 330"):
        score(loaded.model, [documents[0], foreign], 1)
    assert score(loaded.model, [documents[0], foreign._replace(tokens=np.array([5, 1]))], 1).as_dict()["words"] is None
    monkeypatch.setattr("lightnet_eval.heldout._losses", lambda *a: np.array([math.nan, 1.0]))
    with pytest.raises(UserError, match="not finite"):
        score(loaded.model, [foreign._replace(tokens=np.array([5, 1]))], 1)


# The command ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["eval", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_command_default_data_and_output(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "heldout.json"
    code, out, err = command(str(run), "--json", "--baselines", "--output", str(target))
    assert code == 0, err
    facts = json.loads(out)
    assert facts == json.loads(target.read_text())
    assert facts["bits_per_byte"] < facts["baselines"]["gzip -9"]["bits_per_byte"]  # sixty steps beat gzip on toy text
    code, again, _ = command(str(run), "--json", "--batch-tokens", "50")
    assert json.loads(again)["nats"] == pytest.approx(facts["nats"], rel=1e-5)
    code, table, _ = command(str(run), "--baselines", "--limit", "3")
    assert code == 0 and "bits per byte" in table and "gzip -9" in table and "3 documents" in table


def test_command_text_and_prefix(run: Path, loaded: Loaded, tmp_path: Path) -> None:
    assert loaded.config.data.path
    (tmp_path / "a.txt").write_text("the sea\n")
    code, out, _ = command(str(run), "--text", str(tmp_path / "a.txt"), "--json")
    assert code == 0 and json.loads(out)["documents"] == 1 and json.loads(out)["bytes"] == 8
    code, out, _ = command(str(run), "--data", f"{loaded.config.data.path}/train", "--limit", "2", "--json")
    assert code == 0 and json.loads(out)["documents"] == 2


@pytest.fixture
def foreign_data(loaded: Loaded, tmp_path: Path) -> Iterator[Path]:
    """The run's data under another tokenizer's fingerprint."""
    assert loaded.config.data.path
    data = toy.copy(Path(loaded.config.data.path), tmp_path / "data")
    facts = manifest.load(data)
    facts["tokenizer"]["fingerprint"] = "0" * 64
    manifest.save(data, facts)
    yield data


def test_command_errors_are_one_line(run: Path, foreign_data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    facts = {"format": manifest.FORMAT, "format_version": 1, "splits": {"validation": {"webdataset": {}}}}
    (tmp_path / "packed").mkdir()
    manifest.save(tmp_path / "packed", facts)
    for arguments, message in (
        (["--data", "a", "--text", "b"], "choose one"),
        (["--data", str(tmp_path / "empty")], "validation.idx: no such file"),
        (["--data", str(tmp_path / "packed")], "validation.idx: no such file; the folder holds packed samples"),
        (["--data", str(foreign_data)], "cut with another tokenizer"),
        (["--text", str(tmp_path / "nothing.txt")], "no such file or folder"),
        (["--output", str(tmp_path / "no" / "x.json")], "existing folder"),
    ):
        code, out, err = command(str(run), *arguments)
        assert code == 1 and out == "" and err.startswith("error: ") and message in err, (arguments, err)
        assert err.count("\n") == 1

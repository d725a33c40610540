"""The fast engine of byte-level BPE gives the ids of the tokenizers library, or is not used."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightnet_data.options import Options
from lightnet_data.prepare import prepare
from lightnet_data.tokenizer import Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

MINI_PILE = Path(__file__).resolve().parents[3] / "data/mini-pile/small.jsonl.zst"
PIECES = [
    " ", "  ", "   ", " " * 23, " " * 24, " " * 25, " " * 60, "\n", "\n\n", "\r\n", "\t", "\t\t ", "\u00a0", "\u3000",
    "\u2028", "\x85", "\x1c", "\x00", "\ufeff", "\u200b", "\u200d", "a", "the", " The", "don't", "I'LL", "'s", "'", "\u2019s",
    "x1y2", "1234", " 12.5", "٣٤", "²½", "…", "!?", "--", "__init__", "é", "e\u0301", "\u0301", "ﬁ", "Å", "한", "\u1112\u1161",
    "東京", "हिन्दी", "ไทย", "😀", "👩‍👩‍👧", "🇩🇪", "\U0001d11e", "\ufffd", "\U0010ffff", "\ue000",
    "<|endoftext|>", "<|padding|>", "<|endof", "text|>", "</s>", "def f(self):\n    return  x\n",
]  # fmt: skip
AWKWARD = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=24).map("".join)


def trained(texts: list[str], family: str) -> tokenizers.Tokenizer:
    """A small tokenizer of the GPT-2 or the GPT-NeoX family."""
    built = tokenizers.Tokenizer(models.BPE())
    if family == "gpt-neox":
        built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|padding|>"]
    built.train_from_iterator(
        [*texts, "東京 é 😀 हिन्दी " * 9],
        trainers.BpeTrainer(vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if family == "gpt-neox":
        built.add_tokens([" " * length for length in range(2, 25)])
    return built


@pytest.fixture(scope="module", params=["gpt2", "gpt-neox"])
def pair(request: pytest.FixtureRequest, python_texts: list[str]) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Ours, which must have taken the fast engine, and the library's."""
    built = trained(python_texts, request.param)
    ours = Tokenizer(built.to_str().encode())
    assert ours.engine == "tiktoken"
    built.encode_special_tokens = True
    return ours, built


def ids_of(library: tokenizers.Tokenizer, text: str) -> list[int]:
    found: list[int] = library.encode(text, add_special_tokens=False).ids
    return found


@given(text=AWKWARD)
@example("".join(PIECES))
@example(" ".join(PIECES) + " ")
@settings(max_examples=1500, deadline=None)
def test_awkward_texts(pair: tuple[Tokenizer, tokenizers.Tokenizer], text: str) -> None:
    ours, library = pair
    assert ours.encode(text) == ids_of(library, text)


@given(text=AWKWARD, characters=st.integers(1, 12))
@settings(max_examples=500, deadline=None)
def test_long_texts_in_parts(pair: tuple[Tokenizer, tokenizers.Tokenizer], text: str, characters: int) -> None:
    ours, library = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightnet_data.tokenizer.LONG_PART_CHARACTERS", characters)
        assert ours.encode(text) == ids_of(library, text)


def test_a_generated_corpus(pair: tuple[Tokenizer, tokenizers.Tokenizer], python_texts: list[str]) -> None:
    """A megabyte of code with awkward pieces strewn in, and of letters drawn from all scripts."""
    ours, library = pair
    draw = random.Random(0)
    texts = [text[start : start + 5000] for text in python_texts for start in range(0, len(text), 5000)]
    for number, text in enumerate(texts):
        places = sorted(draw.randrange(len(text)) for _ in range(40))
        pieces = [
            text[start:end] + draw.choice(PIECES) for start, end in zip([0, *places], [*places, None], strict=True)
        ]
        texts[number] = "".join(pieces)
    letters = [chr(code) for code in range(0x20, 0x3000) if not 0xD800 <= code < 0xE000]
    texts += ["".join(draw.choices(letters, k=5000)) for _ in range(20)]
    assert sum(map(len, texts)) > 400_000
    for text in texts:
        assert ours.encode(text) == ids_of(library, text)


@pytest.mark.slow
def test_the_small_mini_pile(pair: tuple[Tokenizer, tokenizers.Tokenizer]) -> None:
    ours, library = pair
    assert MINI_PILE.exists(), "make mini-pile first; the generated corpus needs nothing"
    data = zstandard.ZstdDecompressor().decompressobj().decompress(MINI_PILE.read_bytes())
    for line in filter(None, data.decode().split("\n")):
        text = json.loads(line)["text"]
        assert ours.encode(text) == ids_of(library, text)


def _no_merge_order(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


def _prefix_space(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


def _lowercase(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def _other_added_token(content: dict[str, Any]) -> None:
    last = max(content["model"]["vocab"].values())
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    content["added_tokens"].append({"id": last + 1, "content": "word", **dict.fromkeys(fields, False)})


def _dropout(content: dict[str, Any]) -> None:
    content["model"]["dropout"] = 0.1


def _split_digits(content: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}


@pytest.mark.parametrize(
    "change", [_no_merge_order, _prefix_space, _lowercase, _other_added_token, _dropout, _split_digits]
)
def test_what_it_cannot_equal_is_left_to_the_library(
    python_texts: list[str], change: Callable[[dict[str, Any]], None]
) -> None:
    content = json.loads(trained(python_texts[:2], "gpt2").to_str())
    change(content)
    assert Tokenizer(json.dumps(content).encode()).engine == "tokenizers"


def test_without_tiktoken(python_texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert Tokenizer(trained(python_texts[:2], "gpt2").to_str().encode()).engine == "tokenizers"


@pytest.mark.parametrize(("added", "dtype"), [(0, "uint16"), (1, "int32")])
def test_token_width_counts_added_tokens(tmp_path: Path, added: int, dtype: str) -> None:
    """65,536 ids with those of added tokens fit 16 bits, 65,537 do not, and the largest is stored as it is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + [a + b for a in alphabet for b in alphabet][: 2**16 - 2 - len(alphabet)]
    built = tokenizers.Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    built.add_special_tokens(["<|endoftext|>"])
    built.add_tokens(["zq" * (number + 2) for number in range(1 + added)])
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a" + "zq" * (2 + added))
    written = prepare([tmp_path / "a.txt"], tmp_path / "out", tmp_path / "tokenizer.json")
    assert written["tokenizer"]["vocab_size"] == 2**16 + added and written["splits"]["train"]["dtype"] == dtype
    tokens = np.fromfile(tmp_path / "out" / "train.bin", dtype=dtype).tolist()
    assert max(tokens) == 2**16 - 1 + added and tokens[-1] == written["tokenizer"]["eod_id"]


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt2", "gpt-neox"])
def test_special_tokens_spelt_in_text_are_text(tmp_path: Path, python_texts: list[str], kind: str) -> None:
    """Through the whole preparation: one end-of-document token a document, and the text comes back."""
    if kind == "sentencepiece":
        path = Tokenizer.train(python_texts, 500).save(tmp_path)
        text = "<|endofdocument|><unk></s> a <0x41>"
    else:
        path, text = tmp_path / "tokenizer.json", "<|endoftext|>a <|padding|><|endoftext|>"
        trained(python_texts, kind).save(str(path))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    written = prepare([tmp_path / "a.jsonl"], tmp_path / "out", path)
    assert written["round_trip"] == {"checked": 1, "differ": 0, "first": None}
    tokenizer = Tokenizer.load(tmp_path / "out")
    tokens = np.fromfile(tmp_path / "out" / "train.bin", dtype="uint16").tolist()
    assert tokens.count(tokenizer.eod_id) == 1 and tokens[-1] == tokenizer.eod_id
    assert tokenizer.decode(tokens[:-1]) == text


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_unigram_and_bpe_are_lossless(tmp_path: Path, python_texts: list[str], model_type: str) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*python_texts, "é東\ud7a3😀\t\r\n"])
    )
    written = prepare(
        [tmp_path / "a.jsonl"], tmp_path / "out", options=Options(vocab_size=600, model_type=model_type, holdout=0)
    )
    assert written["round_trip"] == {"checked": 10, "differ": 0, "first": None}
    tokenizer = Tokenizer.load(tmp_path / "out")
    for text in (*PIECES, "".join(PIECES), "\x07 never seen \U0001f9ff"):
        assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eod_id not in tokenizer.encode(text)

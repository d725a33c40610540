"""Lossless round trips, determinism, special tokens that text cannot reach, and refusals."""

import io
import json
import pickle
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightnet_data.errors import DataError
from lightnet_data.tokenizer import EOD_TOKEN, Tokenizer
from lightnet_data.training import SENTENCE_CHARACTERS, Sample, sentences
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

AWKWARD = [
    "",
    " ",
    "  \n\n\t \r\n ",
    "\0",
    "a\0b",
    "trailing   ",
    "\n",
    "\r",
    "\u2028\u2029\x85",
    "\ufeffbom",
    "\ufffd",
    "e\u0301 é ﬁ Å",  # would change under NFC or NFKC
    "👩‍👩‍👧‍👦 🇩🇪",
    "\U0010ffff\ue000\x7f\x01",
    "<unk><s></s><0x41><|endofdocument|><pad>",
    "\u2585\u2047 ⁇ ",
    "    def f(self):\n\t\treturn  1\n",
    "12345.67890",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert not {0, tokenizer.eod_id} & set(ids)


@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
@example("\u2580\u2582")
@settings(max_examples=500, deadline=None)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.eod_id not in ids and max(ids, default=0) < tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_many_texts_encode_together_to_the_same_ids(
    tokenizer: Tokenizer, hugging_face: Path, python_texts: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightnet_data.tokenizer._threads", lambda texts: 3 if texts > 9 else 1)
    chosen = tokenizer if kind == "sentencepiece" else Tokenizer.load(hugging_face)
    lines = [line for text in python_texts for line in text.splitlines()][:600]
    texts = [*AWKWARD, *lines, "long " * 5000, *reversed(lines)]
    assert chosen.encode_all(texts) == [chosen.encode(text) for text in texts]
    assert chosen.encode_all([]) == [] and chosen.encode_all(["a b"]) == [chosen.encode("a b")]


@given(st.text(alphabet="ab  \u2581\n\té", max_size=60))
@settings(max_examples=300, deadline=None)
def test_long_texts_encode_in_parts_to_the_same_ids(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightnet_data.tokenizer.PART_CHARACTERS", 3)
        assert tokenizer.encode(text) == whole
    for place in range(len(text) + 1):
        if tokenizer.divides(text, place):
            assert tokenizer.encode(text[:place]) + tokenizer.encode(text[place:]) == whole


def test_texts_divide_before_a_space_behind_a_character(tokenizer: Tokenizer) -> None:
    assert [place for place in range(9) if tokenizer.divides(" ab  c d", place)] == [3, 6]
    assert not tokenizer.divides("a\u2581 b", 2) and not tokenizer.divides("a\n b", 2)


def test_long_code_encodes_in_parts_to_the_same_ids(tokenizer: Tokenizer, python_texts: list[str]) -> None:
    text = "".join(python_texts)
    ids = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightnet_data.tokenizer.PART_CHARACTERS", len(text))
        assert tokenizer.encode(text) == ids


@pytest.mark.parametrize(
    "options", [{"split_by_whitespace": False}, {"treat_whitespace_as_suffix": True}, {"add_dummy_prefix": True}]
)
def test_models_whose_pieces_cross_spaces_encode_whole(python_texts: list[str], options: dict[str, bool]) -> None:
    model = io.BytesIO()
    fixed = {"model_type": "bpe", "vocab_size": 600, "byte_fallback": True, "minloglevel": 2, "add_dummy_prefix": False}
    lossless = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(python_texts[0].splitlines()), model_writer=model, **{**fixed, **lossless, **options}
    )
    loaded = Tokenizer(model.getvalue())
    assert loaded.eod_token == "</s>"
    text = python_texts[1]
    assert len(text) > 8000 and loaded.encode(text) == loaded._backend._processor.encode(text)  # type: ignore[attr-defined]
    assert loaded.decode(loaded.encode(text)) == text


def test_only_u2581_is_lost(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\u2581b \u2581")) == "a b  "


def test_bytes_stream_token_by_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 𝄞 b")
    assert b"".join(tokenizer.decode_bytes([token]) for token in [*ids, tokenizer.eod_id]) == "a 𝄞 b".encode()
    assert tokenizer.decode([tokenizer.eod_id]) == ""


def test_code_compresses(tokenizer: Tokenizer, python_texts: list[str]) -> None:
    text = python_texts[0]
    assert len(text.encode()) / len(tokenizer.encode(text)) > 2.2
    pieces = {tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    assert {"    ", "        ", ":\n", "self"} <= pieces


def test_training_is_deterministic(python_texts: list[str]) -> None:
    first = Tokenizer.train(python_texts, 600, seed=1, sample_bytes=100_000)
    again = Tokenizer.train(iter(python_texts), 600, seed=1, sample_bytes=100_000)
    other = Tokenizer.train(python_texts, 600, seed=2, sample_bytes=100_000)
    assert first.model == again.model and first.model != other.model
    assert first.vocab_size == 600 and first.eod_token == EOD_TOKEN and first.eod_id == 1


def test_sample_is_bounded_and_spread() -> None:
    sample = Sample(seed=0, limit=50_000)
    for number in range(1000):
        sample.add(f"{number:04d}" * 250, tag=number)
    kept = sample.sentences()
    assert 40_000 < sum(map(len, kept)) <= 50_000
    numbers = [int(sentence[:4]) for sentence in kept]
    assert numbers == sorted(numbers) and min(numbers) < 200 and max(numbers) > 800
    assert sample.sentences(lambda tag: tag < 500) == [sentence for sentence in kept if int(sentence[:4]) < 500]


@given(st.text(alphabet="ab\n", max_size=200))
def test_sentences_join_to_the_text(text: str) -> None:
    long = text * 200
    parts = list(sentences(long))
    assert "".join(parts) == long and all(0 < len(part) <= SENTENCE_CHARACTERS for part in parts)


def test_script_with_more_characters_than_the_vocabulary() -> None:
    text = "".join(map(chr, range(0x4E00, 0x5E00))) + "東京都" * 500
    trained = Tokenizer.train([text], 400)
    assert trained.decode(trained.encode(text)) == text
    assert len(trained.encode("東京都")) == 1


def test_tabs_do_not_spoil_training() -> None:
    trained = Tokenizer.train(["if x:\n\treturn foobar\n\tprint(foobar)\n" * 50], 290)
    assert "foobar" in {trained.decode([token]).strip() for token in range(trained.vocab_size)}


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["hello world"] * 3, 5000, r"vocabulary size 5000 .* largest that works is (\d+)"),
        (["hello"], 258, r"vocabulary size 258: 258 ids are fixed"),
        (["hello"], -1, r"vocabulary size -1"),
        ([], 512, r"no text to train"),
        (["", " \n\t"], 512, r"no text to train"),
    ],
)
def test_training_refusals(texts: list[str], vocab_size: int, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Tokenizer.train(texts, vocab_size)
    assert "\n" not in str(caught.value)


def test_the_named_largest_vocabulary_works() -> None:
    texts = ["hello world, hello text"] * 3
    with pytest.raises(DataError) as caught:
        Tokenizer.train(texts, 5000)
    largest = int(str(caught.value).split("largest that works is ")[1].split(":")[0])
    assert Tokenizer.train(texts, largest).vocab_size == largest
    with pytest.raises(DataError):
        Tokenizer.train(texts, largest + 1)


def test_load_save_pickle(tokenizer: Tokenizer, tokenizer_file: Path) -> None:
    for loaded in (
        Tokenizer.load(tokenizer_file),
        Tokenizer.load(tokenizer_file.parent),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert loaded.model == tokenizer.model and loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode("def f") == tokenizer.encode("def f") and loaded.eod_id == tokenizer.eod_id


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory, python_texts: list[str]) -> Path:
    """A byte-level tokenizer.json with truncation, padding and an added token that is not special."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    built.train_from_iterator(python_texts, trainer)
    built.add_tokens(["  é  "])
    built.enable_truncation(8)
    built.enable_padding(length=16)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    built.save(str(path))
    return path


@pytest.mark.parametrize("text", [*AWKWARD, "x  é  y", "<|endoftext|>", "word " * 50])
def test_hugging_face_round_trip(hugging_face: Path, text: str) -> None:
    loaded = Tokenizer.load(hugging_face)
    ids = loaded.encode(text)
    assert loaded.kind == "huggingface" and loaded.eod_token == "<|endoftext|>"
    assert loaded.eod_id not in ids
    assert loaded.decode(ids) == text
    assert b"".join(loaded.decode_bytes([token]) for token in [*ids, loaded.eod_id]) == text.encode()


def test_hugging_face_vocabulary_counts_added_tokens(hugging_face: Path) -> None:
    loaded = Tokenizer.load(hugging_face)
    assert loaded.vocab_size == 501 and max(loaded.encode("  é  ")) == 500


def test_end_of_document_of_a_hugging_face_folder(hugging_face: Path, tmp_path: Path) -> None:
    content = json.loads(hugging_face.read_text())
    content["added_tokens"][0]["content"] = "<custom-end>"
    content["model"]["vocab"]["<custom-end>"] = content["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"no end-of-document token .* --eod-token"):
        Tokenizer.load(tmp_path)
    assert Tokenizer.load(tmp_path, "<custom-end>").eod_id == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<custom-end>"}}))
    assert Tokenizer.load(tmp_path).eod_token == "<custom-end>"
    with pytest.raises(DataError, match="no token '<other>'"):
        Tokenizer.load(tmp_path, "<other>")
    with pytest.raises(DataError, match="'self' is not a special token"):
        Tokenizer.load(tmp_path, "self")


def test_normalising_tokenizer_is_seen(hugging_face: Path) -> None:
    built = tokenizers.Tokenizer.from_file(str(hugging_face))
    built.normalizer = normalizers.NFC()
    loaded = Tokenizer(built.to_str().encode())
    assert loaded.decode(loaded.encode("e\u0301")) == "é"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.model", None, "cannot read the tokenizer"),
        ("empty.model", b"", "is empty"),
        ("text.model", b"hello, no tokenizer", "neither a SentencePiece model nor"),
        ("zeros.model", bytes(100), "neither a SentencePiece model nor"),
        ("broken.json", b"{broken", "not a Hugging Face tokenizer.json"),
        ("other.json", b'{"a": 1}', "not a Hugging Face tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        Tokenizer.load(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_folder_without_or_with_two_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds 0 tokenizers"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "tokenizer.json").write_bytes(b"x")
    with pytest.raises(DataError, match="holds 2 tokenizers"):
        Tokenizer.load(tmp_path)

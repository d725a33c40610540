"""Which id hides a token, for tokenizers with and without a mask of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightnet_data import manifest
from lightnet_data.options import Options
from lightnet_data.prepare import prepare
from lightnet_data.tokenizer import Tokenizer

from lightnet_llm.config.load import validate
from lightnet_llm.errors import UserError
from lightnet_llm.training.masking import rule_of


@pytest.fixture(params=["[MASK]", "<gap>", None])
def prepared(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str | None]:
    """A prepared folder whose byte-level tokenizer has this mask."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "[PAD]", *([request.param] if request.param else [])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["some words and some more words"] * 5, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    facts: dict[str, Any] = {"format": manifest.FORMAT, "format_version": manifest.FORMAT_VERSION}
    size = tokenizer.get_vocab_size()
    manifest.save(tmp_path, {**facts, "tokenizer": {"vocab_size": size, "eod_id": 0}, "splits": {"train": {}}})
    return tmp_path, request.param


def config_of(folder: Path, vocab_size: int, **masking: Any) -> Any:
    model = {"layers": 1, "width": 16, "heads": 1, "glu_width": 8, "vocab_size": vocab_size}
    tree = {"model": {**model, "head": "masked_lm", "causal": False}, "train": {"steps": 1}, "masking": masking}
    return validate({**tree, "data": {"path": str(folder)}}, "here")


def test_the_mask_is_the_tokenizers_or_one_more(prepared: tuple[Path, str | None]) -> None:
    folder, own = prepared
    size = manifest.load(folder)["tokenizer"]["vocab_size"]
    rule = rule_of(config_of(folder, size + 1))
    named = own == "[MASK]"  # <gap> is no usual spelling: it must be asked for
    assert rule.mask_id == (2 if named else size)
    assert {0, 1} <= set(rule.special_ids) and (2 in rule.special_ids) == (own is not None)
    if own is not None:
        assert rule_of(config_of(folder, size, token=own)).mask_id == 2
    if not named:
        with pytest.raises(UserError, match=f"set model.vocab_size={size + 1} or more"):
            rule_of(config_of(folder, size))


def test_a_mask_that_the_tokenizer_has_not(prepared: tuple[Path, str | None]) -> None:
    with pytest.raises(UserError, match=r"masking.token '\[MASKS\]' is not in the tokenizer .*tokenizer.json"):
        rule_of(config_of(prepared[0], 1000, token="[MASKS]"))


def test_data_without_a_tokenizer(tiny: Path) -> None:
    """Then all that is known to be special is the end of a document."""
    rule = rule_of(config_of(tiny.parent / "data", 252))
    assert rule.mask_id == 251 and set(rule.special_ids) == {0}
    with pytest.raises(UserError, match="has no tokenizer; leave it null"):
        rule_of(config_of(tiny.parent / "data", 252, token="[MASK]"))


def wordpiece(folder: Path) -> Path:
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer()
    tokenizer.train_from_iterator(["some words and some more words"] * 5, vocab_size=60, show_progress=False)
    tokenizer.save(str(folder / "given.json"))
    return folder / "given.json"


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece"])
def test_special_tokens_are_never_hidden_and_never_drawn(tmp_path: Path, kind: str) -> None:
    """Of tokenizers as `lightnet prep` takes them: padding, unknown and end of document."""
    (tmp_path / "text.txt").write_text("some words and some more words\n" * 50)
    own = wordpiece(tmp_path) if kind == "wordpiece" else None
    options = Options(vocab_size=None if own else 280, eod_token="[SEP]" if own else None, holdout=0.0)
    prepare([tmp_path / "text.txt"], tmp_path / "data", own, options)
    tokenizer = Tokenizer.load(tmp_path / "data")
    rule = rule_of(config_of(tmp_path / "data", tokenizer.vocab_size + 1, share=1.0, masked=0.0, drawn=1.0))
    spelt = {tokenizer.piece(token) for token in rule.special_ids}
    if kind == "wordpiece":
        assert spelt == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} and tokenizer.piece(rule.mask_id) == "[MASK]"
    else:
        assert "<unk>" in spelt and tokenizer.eod_token in spelt and rule.mask_id == tokenizer.vocab_size
    tokens = np.arange(tokenizer.vocab_size)
    special = np.isin(tokens, sorted(rule.special_ids))
    seen: set[int] = set()
    for position in range(200):
        inputs, labels = rule(tokens, position)
        assert (inputs[special] == tokens[special]).all() and (labels[special] == -1).all()
        seen.update(inputs[~special].tolist())
    assert seen == set(tokens[~special].tolist())

"""The masks of a run with ``head: masked_lm``: which id hides a token, and which are never hidden."""

from __future__ import annotations

from typing import Any

from lightnet_data.masking import MaskedTokens, Masking
from lightnet_data.tokenizer import Tokenizer

from ..config.run import RunConfig
from ..errors import UserError, nearest
from .sources import common_tokenizer, sources_of, tokenizer_file

SPELLINGS = ("[MASK]", "<mask>", "<|mask|>")
# Tokens that some tokenizers write out as text and that stand for none of it.
UNWRITTEN = ("<unk>", "[UNK]", "<|unk|>", "<pad>", "[PAD]", "<|pad|>", "<|padding|>")


def rule_of(config: RunConfig) -> Masking:
    """The rule of masking for the tokenizer of the training data.

    Without a mask among its tokens the first id after them is taken, for which the model's vocabulary must have a row.

    Raises:
        UserError: it has none, or ``masking.token`` is not in the tokenizer.
    """
    source = common_tokenizer(sources_of(config))
    file, size = tokenizer_file(source), int(source.tokenizer.get("vocab_size", 0))
    special, mask = {int(source.tokenizer.get("eod_id", 0))}, size
    if file is not None:
        tokenizer = Tokenizer.load(file)
        pieces = {tokenizer.piece(token): token for token in range(tokenizer.vocab_size)}
        special.update(tokenizer.special_ids(), (pieces[x] for x in UNWRITTEN if x in pieces))
        wanted = config.masking.token
        if wanted is not None and wanted not in pieces:
            hint = nearest(wanted, list(pieces)) or "; null takes the first id after the tokenizer's own"
            raise UserError(f"masking.token {wanted!r} is not in the tokenizer {file}{hint}")
        mask = next((pieces[x] for x in ([wanted] if wanted else SPELLINGS) if x in pieces), size)
    elif config.masking.token is not None:
        raise UserError(f"masking.token is set, and {source.folder} has no tokenizer; leave it null")
    if mask >= config.model.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} has no row for a mask token beside the {size} ids of the tokenizer; "
            f"set model.vocab_size={size + 1} or more"
        )
    given = config.masking
    return Masking(size, mask, frozenset(special), given.share, given.masked, given.drawn, config.train.seed)


def masked(samples: Any, config: RunConfig) -> Any:
    """A data set of token windows as the run's head is given it."""
    return MaskedTokens(samples, rule_of(config)) if config.model.head == "masked_lm" else samples

"""Names of the weights, in training and in a Hugging Face folder: a table."""

from __future__ import annotations

import re

# Training's name | Hugging Face's; * is a block's number. What a configuration does not have is in neither.
TABLE = (
    ("embedding.weight", "model.embedding.weight"),
    ("embedding.bias", "model.embedding.bias"),  # of images
    ("tpe.raw", "model.tpe.raw"),
    ("tpe.beta", "model.tpe.beta"),
    ("layers.*.attention_norm.weight", "model.layers.*.attention_norm.weight"),
    ("layers.*.attention_norm.bias", "model.layers.*.attention_norm.bias"),
    ("layers.*.attention.qkv.weight", "model.layers.*.attention.qkv.weight"),
    ("layers.*.attention.gate_down.weight", "model.layers.*.attention.gate_down.weight"),
    ("layers.*.attention.gate_up.weight", "model.layers.*.attention.gate_up.weight"),
    ("layers.*.attention.decay_down.weight", "model.layers.*.attention.decay_down.weight"),
    ("layers.*.attention.decay_up.weight", "model.layers.*.attention.decay_up.weight"),
    ("layers.*.attention.lrpe.theta", "model.layers.*.attention.lrpe.theta"),
    ("layers.*.attention.norm.weight", "model.layers.*.attention.norm.weight"),
    ("layers.*.attention.norm.bias", "model.layers.*.attention.norm.bias"),
    ("layers.*.attention.output.weight", "model.layers.*.attention.output.weight"),
    ("layers.*.glu_norm.weight", "model.layers.*.glu_norm.weight"),
    ("layers.*.glu_norm.bias", "model.layers.*.glu_norm.bias"),
    ("layers.*.glu.gate.weight", "model.layers.*.glu.gate.weight"),
    ("layers.*.glu.up.weight", "model.layers.*.glu.up.weight"),
    ("layers.*.glu.down.weight", "model.layers.*.glu.down.weight"),
    ("norm.weight", "model.norm.weight"),
    ("norm.bias", "model.norm.bias"),
    ("head.weight", "model.head.weight"),  # tied weights have none: the embedding serves
    ("head.bias", "model.head.bias"),  # of images
    ("head.dense.weight", "model.head.dense.weight"),  # of sentences, as the following
    ("head.dense.bias", "model.head.dense.bias"),
    ("head.output.weight", "model.head.output.weight"),
    ("head.output.bias", "model.head.output.bias"),
)
HEADS = ("causal_lm", "masked_lm", "sequence_classifier", "classifier")  # of the models that are converted
_TO_HF = dict(TABLE)
_TO_TRAINING = {there: here for here, there in TABLE}


def to_hugging_face(name: str) -> str | None:
    """The name in a Hugging Face folder; None where the table has none."""
    return _renamed(name, _TO_HF)


def to_training(name: str) -> str | None:
    """The name in training; None where the table has none."""
    return _renamed(name, _TO_TRAINING)


def _renamed(name: str, table: dict[str, str]) -> str | None:
    number = re.search(r"(?<=layers\.)\d+(?=\.)", name)
    if number is None:
        return table.get(name)
    found = table.get(name.replace(f"layers.{number[0]}.", "layers.*.", 1))
    return None if found is None else found.replace("*", number[0], 1)

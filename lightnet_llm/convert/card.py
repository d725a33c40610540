"""The model card: what the folder holds, the run's facts, and how to use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config.model import ModelConfig
from ..config.run import RunConfig

# By head: the Hub's name of the task, what the model is, and how it is used.
KINDS = {
    "causal_lm": (
        "text-generation",
        "language model: linear attention with additive decay, whose state has the same size at any position",
        "CausalLM",
        """inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))""",
    ),
    "masked_lm": (
        "fill-mask",
        "masked language model: linear attention over the whole text, in both directions",
        "MaskedLM",
        """inputs = tokenizer(f"The sun is {tokenizer.mask_token} in the sky.", return_tensors="pt")
place = (inputs.input_ids[0] == tokenizer.mask_token_id).nonzero()
print(tokenizer.batch_decode(model(**inputs).logits[0, place[0, 0]].topk(5).indices[:, None]))""",
    ),
    "sequence_classifier": (
        "text-classification",
        "classifier of sentences: linear attention over the whole text, in both directions",
        "SequenceClassification",
        """inputs = tokenizer("A sentence.", return_tensors="pt")  # or a pair: tokenizer("One.", "Two.", ...)
print(model(**inputs).logits)""",
    ),
    "classifier": (
        "image-classification",
        "image classifier: linear attention over patches, whose positions need no table, so that images may have other sizes",
        "ImageClassification",
        """inputs = processor(Image.open("image.png"), return_tensors="pt")
print(model.config.id2label[int(model(**inputs).logits.argmax())])""",
    ),
}


def _use(head: str) -> str:
    """The lines that load and use a folder."""
    *_, kind, lines = KINDS[head]
    reader, name = ("processor", "AutoImageProcessor") if head == "classifier" else ("tokenizer", "AutoTokenizer")
    pillow = "from PIL import Image\n" if head == "classifier" else ""
    return f"""```python
{pillow}from transformers import AutoModelFor{kind}, {name}

folder = "PATH OR HUB NAME OF THIS FOLDER"
{reader} = {name}.from_pretrained(folder, trust_remote_code=True)
model = AutoModelFor{kind}.from_pretrained(folder, trust_remote_code=True)
{lines}
```"""


def run_facts(run: Path, config: RunConfig) -> dict[str, Any]:
    """What a run folder tells about its run; nothing where there is none."""
    facts: dict[str, Any] = {"precision": config.train.precision, "sequence_length": config.data.sequence_length}
    for row in _rows(run / "metrics.jsonl"):
        if "loss" in row:
            facts["training_loss"] = row["loss"]
        if isinstance(row.get("validation"), dict):
            facts["validation_loss"] = {name: figures.get("loss") for name, figures in row["validation"].items()}
    heldout = _rows(run / "heldout.json", whole=True)
    if heldout:
        names = ("nats_per_token", "bits_per_byte", "perplexity", "word_perplexity", "documents", "bytes")
        facts["held_out"] = {name: heldout[0][name] for name in names if heldout[0].get(name) is not None}
    started = _rows(run / "environment.jsonl")
    if started:
        facts["versions"] = started[-1].get("versions")
        facts["layout"] = started[-1].get("layout")
        facts["git_commit"] = (started[-1].get("git") or {}).get("commit")
    return {key: value for key, value in facts.items() if value is not None}


def _rows(path: Path, whole: bool = False) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(text)] if whole else [json.loads(line) for line in text.splitlines() if line]
    except (OSError, ValueError):
        return []
    return [row for row in rows if isinstance(row, dict)]


def card(name: str, model: ModelConfig, config: RunConfig, facts: dict[str, Any], parameters: int, dtype: str) -> str:
    """README.md of a Hugging Face folder.

    Args:
        name: of the run.
        facts: as ``run_facts``, with step and tokens.
        parameters: their exact number, padding not counted.
        dtype: of the weights.
    """
    image, (task, kind, *_) = model.image, KINDS[model.head]
    rows = [
        ("parameters", f"{parameters:,}"),
        ("architecture", f"{model.layers} blocks, width {model.width}, {model.heads} heads, GLU {model.glu_width}"),
        *([("vocabulary", f"{model.vocab_size:,}")] if model.image is None else []),
        *(
            [("images", f"{image.size[0]} x {image.size[1]}, {image.channels} channels, patches of {image.patch}")]
            if image
            else []
        ),
        ("weights", dtype),
    ]
    for key, value in facts.items():
        label = key.replace("_", " ")
        if isinstance(value, dict):
            rows.append((label, ", ".join(f"{k.replace('_', ' ')} {_shown(v)}" for k, v in value.items())))
        else:
            rows.append((label, _shown(value)))
    rows += [
        ("learning rate", f"{config.optimizer.learning_rate * config.rate_scale:g}, {config.schedule.kind}"),
        ("global batch", f"{config.train.global_batch} samples"),
    ]
    reading = "`training/` holds the run's configuration as it was;"
    if image is None:
        reading = """The tokenizer puts the end-of-document token in front, as in training. `training/` holds the run's
configuration and its tokenizer file as they were;"""
    table = "\n".join(f"| {label} | {value} |" for label, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags:
- lightnet
- linear-attention
---

# {name}

A LightNet {kind}. Trained with lightnet-llm and exported with `lightnet convert`.

| | |
|---|---|
{table}

{_use(model.head)}

The model's code lies in this folder and needs only torch and transformers; where lightnet-llm is installed,
`trust_remote_code` is not needed. On a GPU with Triton its kernels are used.
{reading} `lightnet convert THIS_FOLDER OUT --to training` makes a checkpoint of it again.
"""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

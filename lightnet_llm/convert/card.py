"""The model card: what the folder holds, the run's facts, and how to use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config.model import ModelConfig
from ..config.run import RunConfig

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "PATH OR HUB NAME OF THIS FOLDER"
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
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
    rows = [
        ("parameters", f"{parameters:,}"),
        ("architecture", f"{model.layers} blocks, width {model.width}, {model.heads} heads, GLU {model.glu_width}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("weights", dtype),
    ]
    for key, value in facts.items():
        label = key.replace("_", " ")
        if isinstance(value, dict):
            rows.append((label, ", ".join(f"{k.replace('_', ' ')} {_shown(v)}" for k, v in value.items())))
        else:
            rows.append((label, _shown(value)))
    optimizer = config.optimizer
    rows += [
        ("learning rate", f"{optimizer.learning_rate:g}, {config.schedule.kind}"),
        ("global batch", f"{config.train.global_batch} samples"),
    ]
    table = "\n".join(f"| {label} | {value} |" for label, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- lightnet
- linear-attention
---

# {name}

A LightNet language model: linear attention with additive decay, whose state has the same size at any position. Trained
with lightnet-llm and exported with `lightnet convert`.

| | |
|---|---|
{table}

{USE}

The model's code lies in this folder and needs only torch and transformers; with lightnet-llm installed,
`import lightnet_llm.hf` registers it and `trust_remote_code` is not needed. On a GPU with Triton its kernels are used.
The tokenizer puts the end-of-document token in front, as in training. `training/` holds the run's configuration and its
tokenizer file as they were; `lightnet convert THIS_FOLDER OUT --to training` makes a checkpoint of it again.
"""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

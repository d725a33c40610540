"""A whole run folder in a few seconds: prepared text, a tokenizer, a model trained a little by a plain loop."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before megatron-core is imported: it takes half the time

from lightnet_data.dataset import PackedTokens, collate
from lightnet_data.prepare import Options, prepare

from lightnet_llm.checkpoint import store
from lightnet_llm.checkpoint.weights import gather_weights, part_file, write_weights
from lightnet_llm.config import dump_config, validate
from lightnet_llm.models import CausalLM, ForwardContext, initialize

VOCABULARY = (
    "the a sea ship sails slowly over under bright grün über naïve 水 月 harbour keeper writes to an old friend"
)
WORDS = VOCABULARY.split()


def documents(count: int, seed: int) -> list[str]:
    """Short texts with characters of one to three bytes; a few are long, some hold several lines."""
    draw = random.Random(seed)
    texts = []
    for index in range(count):
        lines = []
        for _ in range(40 if index % 25 == 7 else draw.randint(1, 4)):
            lines.append(" ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12))) + ".")
        texts.append("\n".join(lines) + ("\n" if index % 3 else ""))
    return texts


def build(factory: pytest.TempPathFactory) -> Path:
    """The run folder; one a session, whoever asks. Tests that change it work on a ``copy``."""
    folder = factory.getbasetemp() / "toy"
    run = folder / "run"
    if (run / "checkpoints" / "latest").exists():
        return run
    folder.mkdir()
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(220, seed=1)))
    data = folder / "data"
    prepare([str(source)], str(data), None, Options(vocab_size=330, holdout=0.15))
    config = validate(
        {
            "model": {"layers": 2, "width": 48, "heads": 3, "glu_width": 64, "vocab_size": 330, "gate_rank": 8}
            | {"tpe_rank": 8, "tpe_init_length": 64},
            "data": {"path": str(data), "sequence_length": 64},
            "train": {"name": "run", "output": str(folder), "steps": 60, "precision": "fp32", "micro_batch": 8},
        },
        "toy",
    )
    model = CausalLM(config.model)
    initialize(model, seed=3)
    train(model, data, steps=60)
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    shutil.copyfile(data / "tokenizer.model", run / "tokenizer.model")
    save(model, run, step=60)
    return run


def train(model: CausalLM, data: Path, steps: int) -> None:
    """A plain loop: the weights that tests use are not initial ones."""
    dataset = PackedTokens(data / "train", 64, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        batch = collate([dataset[8 * step + i] for i in range(8)])
        context = ForwardContext(cu_seqlens=batch["cu_seqlens"])
        loss = model.loss(batch["input_ids"], batch["labels"], context).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def save(model: CausalLM, run: Path, step: int, **facts: Any) -> Path:
    """A checkpoint as training writes it, without the optimiser; ``facts`` go into its manifest."""
    folder = store.begin(run / "checkpoints", step)
    write_weights(part_file(folder, 0, 0), *gather_weights(model, zero_stage=1, writes=True), 0, 1)
    shutil.copyfile(run / "config.yaml", folder / "config.yaml")
    return store.commit(run / "checkpoints", step, {"format": 1, "state": {"step": step}, **facts})


def copy(run: Path, target: Path) -> Path:
    """A copy of the run folder that a test may break."""
    return Path(shutil.copytree(run, target))

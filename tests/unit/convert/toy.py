"""Checkpoints of random weights in any tensor- and pipeline-parallel cut, and folders made of them."""

from pathlib import Path
from typing import Any

import torch

from lightnet_llm.checkpoint import store
from lightnet_llm.checkpoint.weights import part_file, write_weights
from lightnet_llm.config import dump_config, validate
from lightnet_llm.config.run import RunConfig
from lightnet_llm.convert import convert
from lightnet_llm.convert.source import specs_of
from lightnet_llm.models.layers import padded_size
from lightnet_llm.models.parameters import shard

MODEL = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "glu_width": 45,
    "vocab_size": 300,
    "gate_rank": 4,
    "tpe_rank": 4,
    "tpe_init_length": 32,
    "initializer_std": 0.1,
    "norm_eps": 1e-2,
}
HEADS: dict[str, dict[str, Any]] = {  # fields that make the toy a model of another head
    "masked_lm": {"head": "masked_lm", "causal": False},
    "sequence_classifier": {"head": "sequence_classifier", "causal": False, "classes": 3, "norm": "layer"},
    "regression": {"head": "sequence_classifier", "causal": False, "classes": 1},
    "classifier": {
        "head": "classifier",
        "causal": False,
        "axes": 2,
        "norm": "layer",
        "vocab_size": 0,
        "image": {"size": [12, 16], "patch": 4, "channels": 3, "classes": 5},
    },
}
TEXT = "the ship sails under a bright moon and the crew sings of home, of rain, of 12 long nights\n"


def config_of(precision: str = "fp32", **model: Any) -> RunConfig:
    tree = {"model": {**MODEL, **model}, "train": {"steps": 9, "precision": precision, "name": "toy"}}
    return validate(tree, "toy")


def checkpoint(run: Path, config: RunConfig, tensor: int = 1, pipeline: int = 1, step: int = 7, seed: int = 0) -> Path:
    """A whole checkpoint; padding is zero, as in training."""
    root, specs = run / "checkpoints", specs_of(config.model)
    folder = store.begin(root, step)
    for stage in range(pipeline):
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(tensor)]
        joins = {}
        for index, (name, spec) in enumerate(specs.items()):
            first = int(name.split(".")[1]) * pipeline // config.model.layers if name.startswith("layers.") else 0
            if stage != (pipeline - 1 if name.startswith(("norm", "head")) else first):
                continue
            drawn = torch.Generator().manual_seed(1000 * seed + index)
            full = spec.init(drawn, spec.shape)
            if full.ndim == 1:  # norms and biases start alike everywhere, and a wrong one would not be seen
                full = full + 0.2 * torch.randn(spec.shape, generator=drawn)
            full = full if spec.keep_fp32 or config.train.precision == "fp32" else full.bfloat16()
            shape = list(spec.shape)
            if spec.partition_dim is not None:
                multiple = 128 * tensor if name in ("embedding.weight", "head.weight") else tensor
                shape[spec.partition_dim] = padded_size(shape[spec.partition_dim], multiple) // tensor
            for rank in range(tensor):
                parts[rank][name] = shard(full, spec, tuple(shape), rank).clone(memory_format=torch.contiguous_format)
            joins[name] = {"dim": spec.partition_dim, "shape": list(spec.shape)}
        for rank in range(tensor):
            write_weights(part_file(folder, stage, rank), parts[rank], joins, rank, tensor)
    (folder / "config.yaml").write_text(dump_config(config))
    layout = {"tensor": tensor, "pipeline": pipeline, "data": 1, "sequence": 1}
    state = {"step": step, "samples": 0, "tokens": 1234}
    return store.commit(root, step, {"format": 1, "state": state, "layout": layout, "zero_stage": 1, "data": {}})


def give_tokenizer(run: Path, vocab_size: int = 300) -> None:
    from lightnet_data.tokenizer import Tokenizer

    Tokenizer.train([TEXT * 20], vocab_size).save(run)


def exported(target: Path, seed: int = 0, **model: Any) -> Path:
    """A Hugging Face folder with a tokenizer."""
    run = target.with_name(f"{target.name}-run")
    checkpoint(run, config_of(**model), seed=seed)
    if "image" not in model:
        give_tokenizer(run, 299 if model.get("head") == "masked_lm" else 300)  # a row is left for the mask
    convert(run, target, "hf")
    return target

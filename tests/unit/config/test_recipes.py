"""Presets of classifiers, denoisers and the bidirectional model against model-spec 7 (the paper's table of configurations)."""

from math import ceil
from typing import Any

import pytest

from lightnet_llm.config import load_config

IMAGES = 1_281_167  # of ImageNet-1k's training set
CLASSIFIER = {
    "optimizer": {"betas": (0.9, 0.98), "eps": 1e-8, "clip": 5.0, "learning_rate": 5e-4},
    "schedule": {"kind": "cosine", "warmup_steps": ceil(20 * IMAGES / 2048)},
    "train": {"global_batch": 2048, "steps": ceil(300 * IMAGES / 2048)},
    "augmentation": {
        "randaugment": 9,
        "erasing": 0.25,
        "mixup": 0.8,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
        "flip": 0.5,
    },
    "model": {"drop_path": 0.1, "dropout": 0.0, "norm": "layer", "tpe": True, "lrpe": True, "mixer": "lightnet"},
}
DENOISER = {
    "optimizer": {"betas": (0.9, 0.98), "eps": 1e-8, "clip": 0.0, "learning_rate": 1e-4, "weight_decay": 0.0},
    "schedule": {"kind": "constant", "warmup_steps": 0},
    "train": {"global_batch": 256, "steps": 400_000, "ema": 0.9999},
    "diffusion": {"prediction": "noise", "class_drop": 0.1},
    "model": {"conditioning": "tokens", "dropout": 0.0, "drop_path": 0.0, "norm": "layer"},
}
BIDIRECTIONAL = {
    "optimizer": {"betas": (0.9, 0.98), "eps": 1e-12, "clip": 0.5, "learning_rate": 1e-3, "weight_decay": 0.01},
    "schedule": {"kind": "triangle", "peak_share": 0.5, "final_ratio": 0.0},
    "train": {"global_batch": 8192, "hours": 24},
    "data": {"sequence_length": 128},
    "masking": {"share": 0.25, "masked": 0.8, "drawn": 0.1},
    "model": {"dropout": 0.0, "norm": "srms", "tie_embeddings": True},
}


@pytest.mark.parametrize(
    ("preset", "recipe", "more"),
    [
        ("classify/tiny", CLASSIFIER, {"optimizer": {"weight_decay": 0.05}}),
        ("classify/small", CLASSIFIER, {"optimizer": {"weight_decay": 0.05}}),
        ("classify/base", CLASSIFIER, {"optimizer": {"weight_decay": 0.1}}),
        ("diffuse/small", DENOISER, {}),
        ("diffuse/base", DENOISER, {}),
        ("diffuse/large", DENOISER, {}),
        ("diffuse/xlarge", DENOISER, {"train": {"global_batch": 1024, "steps": 800_000}}),
        ("bidirectional/cramming", BIDIRECTIONAL, {}),
    ],
)
def test_presets_have_the_papers_recipe(preset: str, recipe: dict[str, Any], more: dict[str, Any]) -> None:
    config = load_config(preset)
    for section, fields in recipe.items():
        found = getattr(config, section)
        for name, value in {**fields, **more.get(section, {})}.items():
            assert getattr(found, name) == value, (section, name)

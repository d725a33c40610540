"""Small images and latents that can be learned within a few steps, and configurations that train on them."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
from lightnet_data.images import prepare_images
from lightnet_data.manifest import save
from lightnet_data.sample_shards import FORMAT, SampleWriter, save_index
from PIL import Image

CLASSES = 3
COMMON = """
train: {steps: 20, global_batch: 8, micro_batch: 2, precision: fp32, seed: 7, ema: 0.9}
optimizer: {learning_rate: 2.0e-3, eps: 1.0e-6, clip: 0.4}
schedule: {kind: cosine, warmup_steps: 3}
parallel: {zero_stage: 1}
validation: {interval: 10, samples: 5}
checkpoint: {interval: 0}
logging: {interval: 1}
"""
MODEL = """causal: false, axes: 2, norm: layer, layers: 4, width: 64, heads: 4, glu_width: 90, gate_rank: 8, tpe_rank: 8,
  tpe_init_length: 4, norm_eps: 1.0e-2"""


def write_classifier(folder: Path) -> Path:
    """A configuration with everything that is drawn, and images whose stripes tell their class: its file."""
    for split, count in (("train", 36), ("validation", 12)):
        for i in range(count):
            random, kind = np.random.default_rng([i, count]), i % CLASSES
            wave = np.sin(np.arange(20) * (0.5 + kind) + random.uniform(0, 6))
            values = 128 + 80 * np.broadcast_to(wave[:, None, None], (20, 18, 3)) + random.normal(0, 20, (20, 18, 3))
            place = folder / "tree" / split / "abc"[kind] / f"{i}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(place)
    prepare_images([str(folder / "tree")], folder / "images")
    config = folder / "classifier.yaml"
    config.write_text(
        f"""
model: {{head: classifier, {MODEL}, drop_path: 0.1, image: {{size: [16, 12], patch: 4, classes: {CLASSES}}}}}
data: {{path: {folder / "images"}}}
augmentation: {{crop_scale: [0.5, 1.0], mixup: 0.8, cutmix: 1.0, label_smoothing: 0.1, mix_chance: 0.7,
  randaugment: 7, erasing: 0.3}}
{COMMON}"""
    )
    return config


def write_denoiser(folder: Path) -> Path:
    """A configuration and latents with little variance of their own: its file."""
    facts: dict[str, Any] = {"shape": [2, 2, 4, 4, 6], "scaling_factor": 0.5, "shift_factor": 1.0}
    data, splits = folder / "latents", {}
    data.mkdir()
    for split, count in (("train", 30), ("validation", 8)):
        with SampleWriter(data, split) as writer:
            for i in range(count):
                random = np.random.default_rng([i, count])
                values = np.full((2, 2, 4, 4, 6), math.log(0.01), np.float16)
                values[:, 0] = 1 + 2 * np.sign(random.normal(size=(4, 1, 1))) * (1 + i % CLASSES) / 2
                buffer = io.BytesIO()
                np.save(buffer, values)
                writer.add("npy", buffer.getvalue(), i % CLASSES, {})
        splits[split] = {"samples": count, "index": save_index(data, split, writer.index()), "shards": writer.shards}
    (data / "classes.json").write_text('{"a": 0, "b": 1, "c": 2}')
    save(data, {"format": FORMAT, "format_version": 1, "kind": "latents", "splits": splits, "latents": facts})
    config = folder / "denoiser.yaml"
    config.write_text(
        f"""
model: {{head: denoiser, {MODEL}, dropout: 0.1, image: {{size: [4, 6], patch: 2, channels: 4, classes: {CLASSES}}}}}
data: {{path: {data}}}
diffusion: {{class_drop: 0.2}}
{COMMON}"""
    )
    return config


def write_encoded(folder: Path) -> Path:
    """A configuration whose images a small VAE encodes while training: its file."""
    import torch
    from lightnet_data.autoencoders import encoded

    from tests.small_vae import small_vae

    write_classifier(folder)
    coder = small_vae(scaling_factor=1.0)
    pixels = torch.randint(0, 256, (4, 3, 8, 12), dtype=torch.uint8)
    spread = float(encoded(coder, pixels, torch.randn(4, 4, 4, 6)).std())
    coder.register_to_config(scaling_factor=1 / spread)
    coder.save_pretrained(folder / "vae")
    config = folder / "encoded.yaml"
    config.write_text(
        f"""
model: {{head: denoiser, {MODEL}, image: {{size: [4, 6], patch: 2, channels: 4, classes: {CLASSES}}}}}
data: {{path: {folder / "images"}}}
diffusion: {{class_drop: 0.2, vae: {folder / "vae"}}}
{COMMON}"""
    )
    return config
